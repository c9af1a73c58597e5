"""Can this model be compressed? Told from its config alone, by retracing its own path from projection to cache."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from cskv_cli.checkpoint.classes import cskv_class, empty_base, hidden_size, layer_count
from cskv_cli.checkpoint.layers import SEE_MODELS, compressible_layers, kv_projections
from cskv_cli.checkpoint.rotary import inputs_for
from cskv_cli.errors import CskvError
from cskv_cli.modeling.cskv_cache import CSKVCache, CSKVLayer
from cskv_cli.modeling.cskv_structure import attentions, cache_name, find_decoder, key_value_rows, takes

TOKENS = 9


def empty_model(config: PretrainedConfig, cskv: dict[str, Any]) -> PreTrainedModel:
    """The CSKV model of a config, without weights (on the meta device)."""
    config = copy.deepcopy(config)
    config.cskv = cskv
    with torch.device("meta"):
        return cskv_class(config)(config)


def check_supported(folder: Path) -> None:
    """Refuse a model whose keys and values cannot be rebuilt from latents.

    Every distinct attention layer gets random weights and a few tokens; what `rebuild_keys` and `rebuild_values` make
    of the output of its own projections must be what it gave to the cache.

    Raises:
        CskvError: naming the model type, the layer and the reason.
    """
    config = AutoConfig.from_pretrained(folder)
    name = f"{config.model_type} ({folder})"
    layers = compressible_layers(config)
    try:
        base = empty_base(config)
        find_decoder(base)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CskvError(f"{name}: its layers are not built as cskv expects ({error})", SEE_MODELS) from error
    for i in layers:
        if reason := _foreign(base, i):
            raise CskvError(f"{name}: layer {i} {reason}", SEE_MODELS)
    model = empty_model(config, _smallest_block(config, layers))
    seen = []
    for i in layers:
        attention = attentions(model)[i]
        traits = type(attention), {k: v for k, v in vars(attention).items() if isinstance(v, bool | int | float | str)}
        traits[1].pop("layer_idx")
        if traits not in seen:
            seen.append(traits)
            if reason := _untraceable(model, i):
                raise CskvError(f"{name}: layer {i} {reason}", SEE_MODELS)


def _foreign(model: PreTrainedModel, index: int) -> str | None:
    """What an attention layer is built of that rules it out; None if nothing."""
    attention, config = attentions(model)[index], model.config.get_text_config(decoder=True)
    if attention is None or attention.layer_idx != index:
        return "has no attention with a cache of its own"
    if any(hasattr(attention, part) for part in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_norm")):
        return "has latent attention (MLA), whose cache is compressed already"
    if getattr(config, "alibi", False) or type(attention).__name__ in ("BloomAttention", "MptAttention"):
        return "adds a bias by position to its scores (ALiBi), for which tokens cannot be simulated as decoded"
    if takes(attention, "cache_offset") or takes(attention, "cycle_offset"):
        return "is passed several times for each token, with a cache for each time"
    if hasattr(attention, "dt_proj"):
        return "makes its attention mask from its values"
    if hasattr(attention, "conv1d"):
        return "keeps a state instead of keys and values (linear attention)"
    try:
        widths = [len(rows) for layer in (0, index) for _, rows in key_value_rows(attentions(model)[layer]).values()]
    except ValueError as error:
        return f"makes its keys and values in an unknown way: {error}"
    if len(set(widths)) > 1:
        return f"has keys and values of {widths[2]} and {widths[3]} channels, where layer 0 has keys of {widths[0]}"
    return None


def _untraceable(model: PreTrainedModel, index: int) -> str | None:
    """Why the keys and values of a layer cannot be rebuilt; None if they can."""
    attention = attentions(model)[index].to_empty(device="cpu").float().eval()
    generator = torch.Generator().manual_seed(index)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    inputs = inputs_for(model, index, TOKENS)
    rotation = inputs["position_embeddings"]
    if takes(attention, "position_embeddings") and not hasattr(find_decoder(model).module, "rotary_emb"):
        return "has its rotations from elsewhere than a rotary embedding of the decoder"
    hidden = torch.randn(1, TOKENS, hidden_size(model.config), generator=generator)
    cache = CSKVCache(model.config)
    with torch.no_grad():
        try:
            attention(hidden, **inputs, **{cache_name(attention): cache})
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return f"needs more than hidden states and rotations ({str(error).splitlines()[0]})"
        exact = cache.layers[index]
        if not isinstance(exact, CSKVLayer) or exact.keys is None:
            return "does not keep its keys and values in the cache"
        raw = [hidden @ weight + (0 if bias is None else bias) for weight, bias in kv_projections(attention).values()]
        attention.k_up = attention.v_up = nn.Identity()
        try:
            keys, values = attention.rebuild_keys(raw[0], rotation), attention.rebuild_values(raw[1])
        except (AttributeError, RuntimeError, TypeError) as error:
            return f"turns its keys in a way that cskv cannot retrace ({str(error).splitlines()[0]})"
    if _same(keys, exact.keys) and _same(values, exact.values):
        return None
    if not _same(values, exact.values):
        return "does more with its values than project them"
    return _about_keys(attention, raw[0], rotation, exact.keys)


def _about_keys(attention: nn.Module, raw: torch.Tensor, rotation: Any, exact: torch.Tensor) -> str:
    plain = raw.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    turned = plain if rotation is None else attention.rotate(plain, *rotation)
    for name, norm in attention.named_children():
        if "norm" in name and "q" not in name and _same(norm(turned), exact):
            return "has a norm after RoPE on its keys, so that their rotation cannot wait"
    return "makes its keys in a way that cskv cannot retrace"


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def _smallest_block(config: PretrainedConfig, layers: list[int]) -> dict[str, Any]:
    every = [1 if i in layers else None for i in range(layer_count(config))]
    none = [None] * layer_count(config)
    return dict(window=99, sinks=0, rank_k=every, rank_v=every, bits_k=none, bits_v=none, group=None)
