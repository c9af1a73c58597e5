"""The decode step: one new token attends to its history without the history being rebuilt.

scores   q . [exact keys]  and  q . rotate(c B_K + b), the keys of old tokens a tile at a time
output   p [exact values] + (p c_V) B_V + sum(p) b_V, the values of old tokens never
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cskv_factors import by_block, is_bare
from .cskv_latents import Latents, whole_blocks
from .cskv_positions import Places
from .cskv_rotation import Turn, can_take_apart
from .cskv_structure import CACHE_NAMES
from .cskv_triton import Work, checked, key_scores, usable, weighted_sum

if TYPE_CHECKING:
    from .cskv_attention import CSKVAttention
    from .cskv_layer import CSKVLayer

CPU_TILE, GPU_TILE = 2**20, 2**26  # numbers in a tile of rotated keys: on a CPU it should stay in its cache
SMALL_SUM = 2**15  # numbers in latents that a CPU brings to 32 bits sooner than it begins a product in 16
GENERIC = {"sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"}  # know only what they are given
EAGER_LIKE = "llama", "gemma2", "gpt_oss"  # models whose own eager attention is the one below
GIVEN = {"attention_mask", "scaling", "softcap", "s_aux"}
UNKNOWN_TO_SDPA = {"softcap", "s_aux"}  # it goes on without them (transformers 4.57), or refuses them
NO_MATTER = {  # to a token that attends to all others
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


class DecodeStep:
    """One token in one layer; called in place of transformers' attention function."""

    def __init__(self, attention: CSKVAttention, rotates: bool) -> None:
        self.attention, self.rotates = attention, rotates

    def read(self, layer: CSKVLayer, total: int) -> None:
        """Take the history of a layer, which is of `total` tokens, and whose tensors may be moved away soon.

        Scores are made for whole blocks: operations of a size that was met before need no preparation (oneDNN).
        """
        self.latents, self.old = [store.as_it_is() for store in layer.latents], total - layer.recent
        self.width = min(whole_blocks(self.old), *(store.capacity for store in self.latents))
        self.places = Places(layer.sinks, self.old, total, self.width, layer.oldest(total))
        self.exact, self.group = layer.exact, layer.group
        self.rows, self.rotary, self.scratch = layer.rows, layer.rotary, layer.scratch

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of query [batch, heads, 1, head_dim] to all that was `read`.

        Args:
            key, value: of the token itself, which are among what was read.
            attention_mask: see `Rows.bias`.
            softcap: scores become softcap * tanh(score / softcap).
            s_aux: a score for each head that takes its share of attention and gives nothing (GPT-OSS).

        Returns:
            [batch, 1, heads, head_dim], and None for the weights.
        """
        self.batch, groups, dim = key.shape[0], key.shape[1], key.shape[3]
        self.full, self.work, self.large = _precisions(query.dtype, query.device.type)
        self.tile = _tile(query.device.type, self.batch * groups * dim, self.group or 1)
        query = query.reshape(self.batch * groups, -1, dim)  # 3-D, as products want it
        keys, values = self.exact.to(self.work).transpose(0, 1).flatten(1, 2).unbind(0)
        query = query.to(self.work) * (dim**-0.5 if scaling is None else scaling)
        new = torch.bmm(query, keys.mT)
        scores = torch.cat([new.to(self.full), self._old_scores(query.to(self.large)).to(self.full)], dim=-1)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        bias = self.rows.bias(attention_mask, self.places, scores.device)
        scores += bias if len(bias) == 1 else bias.repeat_interleave(groups, dim=0)
        if s_aux is not None:
            aside = s_aux.to(self.full).view(groups, -1, 1).repeat(self.batch, 1, 1)
            scores = torch.cat([scores, aside], dim=-1)
        weights, exact = scores.softmax(-1), keys.shape[1]
        old = self._old_values(weights[..., exact : exact + self.width])
        output = torch.baddbmm(old, weights[..., :exact].to(self.work), values)
        return output.to(value.dtype).view(self.batch, 1, -1, dim), None

    def _old_scores(self, query: torch.Tensor) -> torch.Tensor:
        """[batch * groups, heads of a group, `width`]."""
        attention, latents, turn = self.attention, self.latents[0], None
        if self.rotates:
            turn = self.rotary.turn(self.old, attention.form_of, query)
            query = turn.turned(query)
        plainly = functools.partial(self._scores_by_tile, query, turn)
        if not (attention.plain and self._has_kernel(latents)):
            return plainly()

        def kernel() -> torch.Tensor:
            by_row, factors = query.unflatten(0, (self.batch, -1)), None if turn is None else turn.factors
            return key_scores(latents, attention.k_up, by_row, factors, self.width).flatten(0, 1)

        return self._fused("keys", query, latents, kernel, plainly)

    def _scores_by_tile(self, query: torch.Tensor, turn: Turn | None) -> torch.Tensor:
        scores = []
        for start in range(0, self.width, self.tile):
            latents = self.latents[0].tile(start, min(start + self.tile, self.width))
            keys = self.attention.rebuild_key_tile(latents, self.large, self.scratch)
            keys = keys if turn is None else turn.applied(keys, start, self.scratch)
            scores.append(torch.bmm(query, keys.flatten(0, 1)))
        return scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)

    def _old_values(self, weights: torch.Tensor) -> torch.Tensor:
        """The sum of the old tokens' values with weights [batch * groups, heads of a group, `width`].

        These are in full precision, and stay so for codes, whose minima and steps make two sums that nearly cancel.
        """
        up, latents, heads = self.attention.v_up, self.latents[1], weights.view(self.batch, -1, self.width)
        weight, bias, rank = up.weight, up.bias, latents.rank
        groups = rank // weight.shape[1]
        if latents.packed is None:
            heads = heads.to(self.work if rank * self.width <= SMALL_SUM else self.large)
        plainly = functools.partial(latents.weighted_sum, heads, groups, self.tile)
        if latents.packed is None or not self._has_kernel(latents):
            context = plainly()
        else:

            def kernel() -> torch.Tensor:
                return weighted_sum(latents, heads.to(self.large), groups)

            context = self._fused("values", weights, latents, kernel, plainly)
        context = context.to(self.work).view(*weights.shape[:2], -1)
        values = torch.bmm(context, by_block(weight.to(self.work), self.batch, weights.shape[0]).mT)
        if bias is None:
            return values
        bias = by_block(bias, self.batch, weights.shape[0]).unsqueeze(1)
        return values + (weights.sum(-1, keepdim=True) * bias).to(self.work)

    def _has_kernel(self, latents: Latents) -> bool:
        """Whether there is a Triton kernel for this layer's precision."""
        weight = self.attention.k_up.weight
        return usable(weight) and self.large == latents.dtype == weight.dtype

    def _fused(self, what: str, like: torch.Tensor, latents: Latents, kernel: Work, plainly: Work) -> torch.Tensor:
        """What a Triton kernel gives, or torch where the kernel cannot be trusted.

        Args:
            like: [batch * groups, heads of a group, ...]; kernels are made anew for other heads.
        """
        weight = self.attention.k_up.weight
        bits = latents.quantizer and (latents.quantizer.bits, latents.quantizer.group)
        heads = like.shape[0] // self.batch, like.shape[1]
        kind = what, weight.device, weight.dtype, bits, heads, self.attention.head_dim, self.rotates
        with torch.cuda.device_of(weight):  # Triton launches on the current device
            return checked(kind, kernel, plainly)


def _tile(device: str, channels: int, group: int) -> int:
    """Tokens in a tile, whole groups of the quantizer; `channels` of the keys of a token, in all rows."""
    numbers = CPU_TILE if device == "cpu" else GPU_TILE
    return max(numbers // (2 * channels) // group, 1) * group


@functools.cache
def _precisions(given: torch.dtype, device: str) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Of the softmax, of small products, and of large ones, which are over all old tokens.

    A CPU is slow to begin a product in 16 bits, and to do one in float16.
    """
    full = torch.promote_types(torch.float32, given)
    if device != "cpu":
        return full, given, given
    return full, full, full if given is torch.float16 else given


def run_step(step: Any, attention: CSKVAttention, *args: Any, **kwargs: Any) -> tuple:
    """The base forward of an attention layer with `step` as its attention function."""
    twin = object.__new__(type(attention))
    vars(twin).update(vars(attention), config=StepConfig(attention.config), step=step)
    return super(type(attention).front, twin).forward(*args, **kwargs)


class StepConfig:
    """A model's config, but for the attention function that it asks for: the `step` of its layer."""

    _attn_implementation = __name__

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _attend(attention: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return attention.step(*args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(__name__, _attend)


def next_step(
    attention: CSKVAttention, layer: CSKVLayer, hidden_states: torch.Tensor, args: tuple, kwargs: dict[str, Any]
) -> DecodeStep | None:
    """A step for the token of `hidden_states` [batch, 1, hidden]; None where the layer's cache must be rebuilt.

    That is so for several tokens at once, with gradients, and for a layer that does more with keys, values or scores
    than a `DecodeStep` knows: whatever it calls attention with is looked at, once for each set of arguments.
    """
    if hidden_states.shape[1] != 1 or torch.is_grad_enabled() or attention.training or not layer.decodes():
        return None
    rotation, mask = kwargs.get("position_embeddings"), kwargs.get("attention_mask")
    if mask is not None and not _is_of_one_row(mask, layer.get_seq_length() + 1):
        return None
    parts = attention._modules
    if not (is_bare(parts["k_up"]) and is_bare(parts["v_up"])):
        return None
    given = layer.asked, *(name for name, value in kwargs.items() if value is not None)
    known = vars(attention).setdefault("known_calls", {})
    if given not in known:
        known[given] = _is_known(attention, layer.asked, hidden_states, args, kwargs)
    return DecodeStep(attention, rotation is not None and attention.rotates) if known[given] else None


def _is_of_one_row(mask: Any, total: int) -> bool:
    if not torch.is_tensor(mask) or mask.shape[-1] != total:
        return False
    return mask.dim() == 2 or mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1


def _is_known(
    attention: CSKVAttention, asked: str, hidden_states: torch.Tensor, args: tuple, kwargs: dict[str, Any]
) -> bool:
    if attention.clips:
        return False
    if not asks_for_function(attention):
        return False
    if asked not in GENERIC and not (asked == "eager" and _has_known_eager(attention.base)):
        return False
    rotation = kwargs.get("position_embeddings") if attention.rotates else None
    if rotation is not None and not can_take_apart(attention.rotate, rotation, attention.head_dim):
        return False
    trial = _Trial(GIVEN - UNKNOWN_TO_SDPA if asked == "sdpa" else GIVEN)
    replaced = {name: trial if name in CACHE_NAMES else value for name, value in kwargs.items()}
    run_step(trial, attention, hidden_states, *args, **replaced)
    return trial.passed


def asks_for_function(attention: CSKVAttention) -> bool:
    """Whether the base calls what its config asks for; Bloom, Falcon and MPT attend by themselves."""
    return "ALL_ATTENTION_FUNCTIONS" in _code(attention.base.forward)[1]


class _Trial:
    """In place of a cache and of the attention function: does what the one returns reach the other as it is?"""

    def __init__(self, given: set[str]) -> None:
        self.given = given
        self.states: tuple | None = None
        self.passed = False

    def update(self, *states: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.states = states[:2]
        return self.states

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        given = {name for name, argument in kwargs.items() if argument is not None}
        same = self.states is not None and key is self.states[0] and value is self.states[1]
        self.passed = same and given <= self.given | NO_MATTER
        return query.transpose(1, 2), None


def eager_function(base: type) -> Callable | None:
    """A model's own attention function, where it has one by the usual name."""
    return getattr(sys.modules[base.__module__], "eager_attention_forward", None)


@functools.cache
def _has_known_eager(base: type) -> bool:
    """Whether a model's own attention function is, instruction by instruction, one that `DecodeStep` stands for."""
    function = eager_function(base)
    known = (importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in EAGER_LIKE)
    return function is not None and any(_code(function) == _code(model.eager_attention_forward) for model in known)


def _code(function: Any) -> tuple:
    code = inspect.unwrap(function).__code__
    return code.co_code, code.co_names, code.co_consts
