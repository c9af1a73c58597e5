"""What CSKV adds to an attention layer of transformers: low-rank factors, and the way back from latents."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from .cskv_cache import CSKVCache, CSKVLayer
from .cskv_decode import next_step, run_step


class CSKVAttention:
    """Goes in front of a transformers attention class, whose forward stays as it is.

    `k_down` and `k_up` (A and B of the paper's eq. 1) stand beside `k_proj`, `v_down` and `v_up` beside `v_proj`. The
    layer stages the latents of the new tokens in its cache layer; the base forward then calls `update`, which gives
    it exact keys and values for the tokens of the window and rebuilt ones for the rest.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        channels = config.num_key_value_heads * self.head_dim
        for name in ("k", "v"):
            rank = config.cskv[f"rank_{name}"][layer_idx]
            full = getattr(self, f"{name}_proj", None)  # None where q, k and v are one projection (Phi3)
            setattr(self, f"{name}_down", nn.Linear(config.hidden_size, rank, bias=False))
            setattr(self, f"{name}_up", nn.Linear(rank, channels, bias=getattr(full, "bias", None) is not None))

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """The base layer's forward, with the latents of `hidden_states` [batch, new, hidden] staged before it."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))  # its names from and before transformers 5.24
        layer = cache.layers[self.layer_idx] if isinstance(cache, CSKVCache) else None
        if isinstance(layer, CSKVLayer):
            return self._forward_with_latents(layer, hidden_states, *args, **kwargs)
        return super().forward(hidden_states, *args, **kwargs)

    @torch.compiler.disable  # its shapes are others with every token; the rest of the model can be compiled
    def _forward_with_latents(self, layer: CSKVLayer, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        step = next_step(self, layer, hidden_states, args, kwargs)
        layer.stage(self, (self.k_down(hidden_states), self.v_down(hidden_states)), kwargs, step)
        if step is not None:
            return run_step(step, self, hidden_states, *args, **kwargs)
        return super().forward(hidden_states, *args, **kwargs)

    def rebuild_keys(self, latents: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """What the base layer does between `k_proj` and the cache, from latents [batch, tokens, rank].

        Args:
            rotation: cos and sin of the tokens, [1 or batch, tokens, rotated dimensions]; None where there is no RoPE.

        Returns:
            Keys [batch, heads, tokens, head_dim].
        """
        keys, norm = self.k_up(latents), self._k_norm
        per_head = norm is not None and norm.weight.shape[-1] == self.head_dim
        if norm is not None and not per_head:  # over all heads at once: Olmo2, OLMoE
            keys = norm(keys)
        keys = self._clip(keys).unflatten(-1, (-1, self.head_dim))
        if per_head:  # Qwen3, Gemma3, Cohere
            keys = norm(keys)
        keys = keys.transpose(1, 2)
        return self.rotate(keys, *rotation) if rotation is not None and self.rotates else keys

    def rebuild_key_tile(self, latents: torch.Tensor) -> torch.Tensor:
        """Keys before their rotation, tokens last, from latents [batch, rank, tokens].

        Returns:
            [batch, heads, head_dim, tokens].
        """
        if not self._plain:
            return self.rebuild_keys(latents.mT, None).mT
        up, bias = self.k_up.weight.expand(len(latents), -1, -1), self.k_up.bias
        keys = torch.bmm(up, latents) if bias is None else torch.baddbmm(bias[:, None], up, latents)
        return keys.unflatten(1, (-1, self.head_dim))

    def rebuild_values(self, latents: torch.Tensor) -> torch.Tensor:
        """As `rebuild_keys`, between `v_proj` and the cache: values [batch, heads, tokens, head_dim]."""
        return self._clip(self.v_up(latents)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    @property
    def rotates(self) -> bool:
        """Whether this layer applies RoPE; some models leave it out in some layers."""
        if self.config.model_type in ("cohere2", "exaone4"):  # no rotation in their full-attention layers
            return getattr(self, "sliding_window", None) is None and self.config.model_type == "exaone4"
        return bool(getattr(self, "use_rope", True))  # SmolLM3

    @property
    def clips(self) -> bool:
        """Whether keys and values are clipped."""
        return getattr(self.config, "clip_qkv", None) is not None  # Olmo, OLMoE

    @functools.cached_property
    def _plain(self) -> bool:
        """Whether keys before their rotation are `k_up` of latents, and nothing more."""
        return self._k_norm is None and not self.clips

    @property
    def _k_norm(self) -> nn.Module | None:
        return getattr(self, "k_norm", None) or getattr(self, "k_layernorm", None)

    def _clip(self, states: torch.Tensor) -> torch.Tensor:
        return states.clamp(-self.config.clip_qkv, self.config.clip_qkv) if self.clips else states

    def rotate(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """RoPE of keys [batch, heads, tokens, head_dim], by the base model's own function."""
        rotate = sys.modules[self.base.__module__].apply_rotary_pos_emb
        width = getattr(self, "rotary_ndims", self.head_dim)  # less than head_dim: StableLM, Phi
        turned = rotate(keys[..., :width], keys[..., :width], cos, sin)[1]
        return turned if width == self.head_dim else torch.cat([turned, keys[..., width:]], dim=-1)


@functools.cache
def attention_class(base: type[nn.Module]) -> type[nn.Module]:
    """`base` with `CSKVAttention` in front."""
    return type(
        f"CSKV{base.__name__}", (CSKVAttention, base), {"base": base, "front": CSKVAttention, "__module__": __name__}
    )
