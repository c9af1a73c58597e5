"""Causal language models of transformers with a CSKV cache (arXiv 2409.10593).

There is a `CSKV<Base>` for every `<Base>` of transformers that writes text: `CSKVLlamaForCausalLM` is
`LlamaForCausalLM`, with the same weights and the same answer to a prompt, whose `generate` keeps its history in a
`CSKVCache`.
"""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

import transformers
from torch import nn
from transformers import DynamicCache, PretrainedConfig
from transformers.utils import logging

from .cskv_attention import compress
from .cskv_cache import CSKVCache
from .cskv_decode import DecodeStep
from .cskv_factors import GroupedUp
from .cskv_file import describe, read_cache, write_cache
from .cskv_latents import Latents
from .cskv_layer import CSKVLayer
from .cskv_positions import RotaryHistory
from .cskv_quantizer import Quantizer
from .cskv_rotation import Turn
from .cskv_structure import FUSED, Decoder, attentions, find_attention, find_decoder
from .cskv_triton import usable

# Every file of this model is imported here: transformers 4.57 takes along only those that it finds in this one.
__all__ = [
    "CSKVCache",
    "CSKVForCausalLM",
    "CSKVLayer",
    "Decoder",
    "DecodeStep",
    "GroupedUp",
    "Latents",
    "Quantizer",
    "RotaryHistory",
    "Turn",
    "usable",
]

TESTED = "4.57.6", "5.24"  # the oldest and the newest transformers that this model was tested under

LOGGER = logging.get_logger("transformers.cskv")  # one for all checkpoints that bring this file

# transformers 5.24 renamed the argument
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"


class CSKVForCausalLM:
    """Goes in front of a `...ForCausalLM` of transformers, or of a `...ForConditionalGeneration` that reads images."""

    _auto_class = "AutoModelForCausalLM"  # makes `save_pretrained` copy these files along

    def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        decoder, text = find_decoder(self), config.get_text_config(decoder=True)
        groups = config.cskv.get("head_groups", 1)  # not in checkpoints of the first version
        for i, ranks in enumerate(zip(config.cskv["rank_k"], config.cskv["rank_v"], strict=True)):
            if None not in ranks:
                compress(find_attention(decoder.layers[i]), text, ranks, groups)
        decoder.module.register_forward_pre_hook(self._begin, with_kwargs=True)
        decoder.module.register_forward_hook(_end, with_kwargs=True, always_call=True)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """As the base class; transformers looks for the answer in the source file of a class, which is this one."""
        return cls._base()._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls._base()._can_set_experts_implementation()

    @classmethod
    def is_custom_code(cls) -> bool:
        """As the base class, whose tensors transformers 5 renames where a checkpoint is older."""
        return False

    @classmethod
    def _base(cls) -> type:
        return cls.__mro__[cls.__mro__.index(CSKVForCausalLM) + 1]

    def save_cache(self, cache: CSKVCache, path: str | os.PathLike) -> None:
        """Write a cache that this model has filled to a safetensors file, for `load_cache` of this or a later process.

        Raises:
            ValueError: it is no `CSKVCache`, or has a layer of a kind that a file cannot hold.
        """
        write_cache(path, cache, describe(self.config, attentions(self)))

    def load_cache(self, path: str | os.PathLike) -> CSKVCache:
        """The cache in a file of `save_cache`: this model goes on from it as it would have then.

        Raises:
            ValueError: the file is damaged, no prompt cache, or one of another model or other settings.
        """
        return read_cache(path, self.config, attentions(self))

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Give a forward that asks for a cache, and brings none, ours instead of the base model's."""
        wanted = kwargs.get("use_cache")
        if kwargs.get(CACHE) is None and (model.config.use_cache if wanted is None else wanted):
            kwargs[CACHE] = self._new_cache()
        if isinstance(kwargs.get(CACHE), CSKVCache):
            wanted = kwargs.get("output_attentions")
            shows = self.config.output_attentions if wanted is None else wanted
            asked = None if shows else self.config.get_text_config(decoder=True)._attn_implementation
            kwargs[CACHE].begin(model, kwargs.get("attention_mask"), asked)
        return args, kwargs

    def _new_cache(self, **kwargs: Any) -> CSKVCache:
        """A cache, and a word of warning where an adapter (PEFT) changes keys or values that latents stand for."""
        for attention in attentions(self):
            for name in ("k_proj", "v_proj", *FUSED):
                if hasattr(attention, "k_down") and hasattr(getattr(attention, name, None), "base_layer"):
                    LOGGER.warning_once(
                        f"An adapter changes {name}, and the CSKV cache rebuilds what it holds of old tokens without "
                        "it: adapt queries, outputs or the MLP, or merge the adapter into the base before compressing."
                    )
        return CSKVCache(self.config, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Replace the `DynamicCache` that `generate` makes; a cache that was asked for or given stays."""
        given = model_kwargs.get(CACHE)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)
        cache = model_kwargs.get(CACHE)
        if given is None and type(cache) is DynamicCache:
            cache = model_kwargs[CACHE] = self._new_cache(offloading=cache.offloading)
        if isinstance(cache, CSKVCache):
            is_assistant = getattr(generation_config, "is_assistant", False)
            cache.record_past_for_generate(is_assistant or generation_mode.value == "assisted_generation")


def _end(model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    if isinstance(kwargs.get(CACHE), CSKVCache):
        kwargs[CACHE].end()


def _warn_if_untested(version: str) -> None:
    """Once in a process, however many checkpoints bring this file."""
    oldest, newest, given = (tuple(map(int, re.findall(r"\d+", v)[:3])) for v in (*TESTED, version))
    if given < oldest or given[: len(newest)] > newest:
        LOGGER.warning_once(
            f"This CSKV model was tested under transformers {TESTED[0]} to {TESTED[1]}, not under {version}: compare a "
            "few answers with those of the base model."
        )


def __getattr__(name: str) -> type:
    """Define `CSKV<Base>` at its first use, from transformers' `<Base>`."""
    base = getattr(transformers, name.removeprefix("CSKV"), None) if name.startswith("CSKV") else None
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _rename_as(base, name)
    globals()[name] = type(name, (CSKVForCausalLM, base), {"__module__": __name__, "__doc__": CSKVForCausalLM.__doc__})
    return globals()[name]


def _rename_as(base: type, name: str) -> None:
    """Rename tensors at loading and saving as transformers 5 does for the class `base`, such as GPT-NeoX's head."""
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError:  # before, classes said themselves what to rename
        return
    if (renamings := get_checkpoint_conversion_mapping(base.__name__)) is not None:
        register_checkpoint_conversion_mapping(name, renamings, overwrite=True)


_warn_if_untested(transformers.__version__)
