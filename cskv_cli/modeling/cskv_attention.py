"""What CSKV adds to an attention layer of transformers: low-rank factors, and the way back from latents."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import transformers
from torch import nn

from .cskv_cache import CSKVCache, CSKVLayer
from .cskv_decode import next_step, run_step
from .cskv_factors import Scratch, made_of_tile, up_projection
from .cskv_rotation import Form, find_form
from .cskv_structure import CACHE_NAMES, key_value_rows, repeats, takes, width_of_head

SLIDING_ROTATE = "afmoe", "beam", "cohere2", "cohere2_moe", "flint"  # models without RoPE in full-attention layers


class CSKVAttention:
    """Goes in front of a transformers attention class, whose forward stays as it is.

    `k_down` and `k_up` are A and B of the paper's eq. 1 for the keys, `v_down` and `v_up` for the values. The layer
    stages the hidden states of the new tokens in its cache layer; the base forward then calls `update`, which makes
    latents of them, and gives it exact keys and values for the tokens of the window and rebuilt ones for the rest.
    """

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """The base layer's forward, with `hidden_states` [batch, new, hidden] staged before it for their latents."""
        for name in CACHE_NAMES:
            if isinstance(cache := kwargs.get(name), CSKVCache):
                layer = cache.layers[self.layer_idx]
                if isinstance(layer, CSKVLayer):
                    return self._forward_with_latents(layer, hidden_states, *args, **kwargs)
        return super().forward(hidden_states, *args, **kwargs)

    @torch.compiler.disable  # its shapes are others with every token; the rest of the model can be compiled
    def _forward_with_latents(self, layer: CSKVLayer, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        step = next_step(self, layer, hidden_states, args, kwargs)
        layer.stage(self, hidden_states, kwargs, step)
        if step is None:
            return super().forward(hidden_states, *args, **kwargs)
        return run_step(step, self, hidden_states, *args, **kwargs)

    def rebuild_keys(self, latents: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """What the base layer does between its key projection and the cache, from latents [batch, tokens, rank].

        Args:
            rotation: cos and sin of the tokens, [1 or batch, tokens, rotated dimensions]; None where there is no RoPE.

        Returns:
            Keys [batch, heads, tokens, head_dim].
        """
        keys, norm = self.k_up(latents), self._k_norm
        weight = getattr(norm, "weight", None)
        per_head = norm is not None and (weight is None or weight.shape[-1] == self.head_dim)
        if norm is not None and not per_head:  # over all heads at once: Olmo2, OLMoE
            keys = norm(keys)
        keys = self._clip(keys).unflatten(-1, (-1, self.head_dim))
        if per_head:  # Qwen3, Gemma3, Cohere
            keys = norm(keys)
        keys = self._repeat(keys.transpose(1, 2))
        return self.rotate(keys, *rotation) if rotation is not None and self.rotates else keys

    def rebuild_key_tile(self, latents: torch.Tensor, dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
        """Keys before their rotation, tokens last, from latents [batch, rank, tokens].

        Returns:
            [batch, heads, head_dim, tokens] in `dtype`.
        """
        if not self.plain:
            return self.rebuild_keys(latents.mT, None).mT.to(dtype)
        keys = made_of_tile(self.k_up, latents.to(dtype), scratch)
        return keys.view(keys.shape[0], -1, self.head_dim, keys.shape[2])

    def rebuild_values(self, latents: torch.Tensor) -> torch.Tensor:
        """As `rebuild_keys`, between the value projection and the cache: values [batch, heads, tokens, head_dim]."""
        return self._repeat(self._clip(self.v_up(latents)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2))

    @functools.cached_property
    def rotates(self) -> bool:
        """Whether this layer applies RoPE; some models leave it out in some layers."""
        if self.config.model_type in SLIDING_ROTATE:
            return getattr(self, "force_rope", False)
        if self.config.model_type in (
            "exaone4",
            "exaone_moe",
            "kolibri1",
        ):  # the same, if there are sliding layers at all
            return self.sliding_window is None
        return bool(getattr(self, "use_rope", True))  # SmolLM3

    @property
    def clips(self) -> bool:
        """Whether keys and values are clipped."""
        return self._limit is not None

    @functools.cached_property
    def plain(self) -> bool:
        """Whether keys before their rotation are `k_up` of latents, and nothing more."""
        return self._k_norm is None and not self.clips

    @property
    def _k_norm(self) -> nn.Module | None:
        return getattr(self, "k_norm", None) or getattr(self, "k_layernorm", None)

    @property
    def _limit(self) -> float | None:
        return getattr(self, "clip_qkv", None) or getattr(self.config, "clip_qkv", None)  # MPT, DBRX; Olmo, OLMoE

    def _clip(self, states: torch.Tensor) -> torch.Tensor:
        return states.clamp(-self._limit, self._limit) if self.clips else states

    def _repeat(self, states: torch.Tensor) -> torch.Tensor:
        copies = repeats(self)
        return states if copies == 1 else states.repeat_interleave(copies, dim=1)

    def rotate(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """RoPE of keys [batch, heads, tokens, head_dim], by the base model's own function."""
        rotate = sys.modules[self.base.__module__].apply_rotary_pos_emb
        width = getattr(self, "rotary_ndims", self.head_dim)  # less than head_dim: StableLM, Phi
        turned = rotate(keys[..., :width], keys[..., :width], cos, sin)[1]
        return turned if width == self.head_dim else torch.cat([turned, keys[..., width:]], dim=-1)

    def form_of(self, cos: torch.Tensor) -> Form:
        """The form of `rotate`, which is the same for every cos; found once."""
        known, kind = vars(self).setdefault("known_forms", {}), (cos.shape[-1], cos.dtype, cos.device)
        if kind not in known:
            known[kind] = find_form(self.rotate, cos, self.head_dim)
        return known[kind]


@functools.cache
def attention_class(base: type[nn.Module]) -> type[nn.Module]:
    """`base` with `CSKVAttention` in front."""
    return type(
        f"CSKV{base.__name__}", (CSKVAttention, base), {"base": base, "front": CSKVAttention, "__module__": __name__}
    )


def put_in_front(attention: nn.Module, config: Any) -> None:
    """Make an attention layer of transformers a `CSKVAttention`, which has no factors yet."""
    attention.__class__ = attention_class(type(attention))
    attention.head_dim = width_of_head(attention)  # GPT-NeoX has another name for it
    attention.config = config


def compress(attention: nn.Module, config: Any, ranks: tuple[int, int], head_groups: int = 1) -> None:
    """Make an attention layer of transformers a `CSKVAttention`, with factors of these ranks (keys, values).

    Args:
        config: of the decoder.
        head_groups: see `GroupedUp`.

    Raises:
        ValueError: it makes its keys and values in a way that is not known.
    """
    projections = key_value_rows(attention)
    if hasattr(attention, "rotary_emb") and not takes(attention, "position_embeddings"):  # DBRX, JetMoe before 5.0
        raise ValueError(
            f"{type(attention).__name__} rotates its keys by itself in transformers {transformers.__version__}, which "
            "a CSKV cache cannot repeat: take a newer version"
        )
    put_in_front(attention, config)
    for (name, (linear, rows)), rank in zip(projections.items(), ranks, strict=True):
        setattr(attention, f"{name}_down", nn.Linear(config.hidden_size, rank, bias=False))
        up = up_projection(rank, len(rows), head_groups, linear.bias is not None)
        setattr(attention, f"{name}_up", up)
