"""Can this model be compressed? Told from its config alone, by retracing its own path from projection to cache."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cskv_cli.checkpoint.layers import compressible_layers, kv_projections
from cskv_cli.checkpoint.rotary import rotation_for
from cskv_cli.errors import CskvError
from cskv_cli.modeling import modeling_cskv
from cskv_cli.modeling.cskv_cache import CSKVCache, CSKVLayer

UNSUPPORTED = "cskv cannot compress it; docs/models.md lists the families it can"


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The `CSKV...ForCausalLM` class of a base config."""
    return getattr(modeling_cskv, f"CSKV{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]}")


def empty_model(config: PretrainedConfig, cskv: dict[str, Any]) -> PreTrainedModel:
    """The CSKV model of a config, without weights (on the meta device)."""
    config = copy.deepcopy(config)
    config.cskv = cskv
    with torch.device("meta"):
        return model_class(config)(config)


def check_supported(folder: Path) -> None:
    """Refuse a model whose keys and values cannot be rebuilt from latents.

    Every distinct attention layer gets random weights and a few tokens; what `rebuild_keys` and `rebuild_values` make
    of the output of its own projections must be what it gave to the cache, bit for bit.

    Raises:
        CskvError: naming the model type, the layer and the reason.
    """
    config = AutoConfig.from_pretrained(folder)
    name = f"{config.model_type} ({folder})"
    layers = compressible_layers(config)
    try:
        model = empty_model(config, _smallest_block(config, layers))
    except (AttributeError, TypeError) as error:
        raise CskvError(f"{name}: its layers are not built as cskv expects ({error})", UNSUPPORTED) from error
    seen = []
    for i in layers:
        attention = model.model.layers[i].self_attn
        traits = type(attention), {k: v for k, v in vars(attention).items() if isinstance(v, bool | int | float | str)}
        traits[1].pop("layer_idx")
        if traits not in seen:
            seen.append(traits)
            _check_layer(name, model, i)


def _check_layer(name: str, model: PreTrainedModel, index: int) -> None:
    attention = model.model.layers[index].self_attn.to_empty(device="cpu").float().eval()
    generator = torch.Generator().manual_seed(index)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    rotation = rotation_for(model, index, 9)
    hidden = torch.randn(1, 9, model.config.hidden_size, generator=generator)
    positions = torch.arange(9).unsqueeze(0)
    cache = CSKVCache(model.config)
    with torch.no_grad():
        inputs = dict(hidden_states=hidden, position_embeddings=rotation, position_ids=positions, attention_mask=None)
        attention(**inputs, **{modeling_cskv.CACHE: cache})
        exact = cache.layers[index]
        if not isinstance(exact, CSKVLayer) or exact.keys is None:
            raise CskvError(f"{name}: layer {index} does not keep its keys and values in the cache", UNSUPPORTED)
        raw = [hidden @ weight + (0 if bias is None else bias) for weight, bias in kv_projections(attention).values()]
        attention.k_up = attention.v_up = nn.Identity()
        rebuilt = attention.rebuild_keys(raw[0], rotation), attention.rebuild_values(raw[1])
    for what, ours, theirs in zip(("keys", "values"), rebuilt, (exact.keys, exact.values), strict=True):
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
            raise CskvError(
                f"{name}: layer {index} makes its {what} in a way that cskv cannot retrace (such as a norm after RoPE)",
                UNSUPPORTED,
            )


def _smallest_block(config: PretrainedConfig, layers: list[int]) -> dict[str, Any]:
    every = [1 if i in layers else None for i in range(config.num_hidden_layers)]
    none = [None] * config.num_hidden_layers
    return dict(window=99, sinks=0, rank_k=every, rank_v=every, bits_k=none, bits_v=none, group=None)
