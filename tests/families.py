"""Small random models of many families, the CSKV models over them, and the page that lists them."""

import copy
import re

import torch

from cskv_cli.checkpoint.classes import base_class, hidden_size, layer_count
from cskv_cli.checkpoint.layers import compressible_layers, kv_projections
from cskv_cli.modeling import modeling_cskv
from cskv_cli.modeling.cskv_structure import attentions
from tests.family_configs import FAMILIES, MULTIMODAL, REFUSED, config_of


def base_model(family: str, **overrides):
    """A random model in float32 whose biases, norms and sinks are not at their initial zeros and ones."""
    config = config_of(family, **overrides)
    torch.manual_seed(0)
    model = base_class(config)._from_config(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if "sinks" in key:
                parameter.copy_(torch.randn_like(parameter))
    return model


def cskv_block(base, rank=None, window=4, sinks=2, bits=None, group=4, head_groups=1):
    """The `cskv` entry of a config, with the same settings in every full-attention layer (rank None: full rank)."""
    layers = compressible_layers(base.config)
    per_layer = lambda value: [value if i in layers else None for i in range(layer_count(base.config))]  # noqa: E731
    rank = rank or hidden_size(base.config)
    return dict(
        window=window,
        sinks=sinks,
        rank_k=per_layer(rank),
        rank_v=per_layer(rank),
        bits_k=per_layer(bits),
        bits_v=per_layer(bits),
        clip_k=per_layer(1.0),
        clip_v=per_layer(1.0),
        group=group,
        head_groups=head_groups,
    )


def compressed(base, factors=None, **settings):
    """The CSKV model over the weights of `base`.

    Without `factors` (a function of the projection's weight [channels, hidden] that gives A [hidden, r] and
    B [r, channels]) they are exact: A is the identity, B the projection itself.
    """
    config = copy.deepcopy(base.config)
    config.cskv = cskv_block(base, **settings)
    model = getattr(modeling_cskv, f"CSKV{type(base).__name__}")(config).float().eval()
    assert not model.load_state_dict(base.state_dict(), strict=False).unexpected_keys
    factors = factors or (lambda weight: (torch.eye(weight.shape[1]), weight.T))
    with torch.no_grad():
        for attention, rank in zip(attentions(model), config.cskv["rank_k"], strict=True):
            if rank is None:
                continue
            for name, (weight, bias) in kv_projections(attention).items():
                down, up = factors(weight.T)
                getattr(attention, f"{name}_down").weight.copy_(down.T)
                getattr(attention, f"{name}_up").weight.copy_(up.T)
                if bias is not None:
                    getattr(attention, f"{name}_up").bias.copy_(bias)
    return model


def truncated(rank: int):
    """Factors of low rank, by truncated SVD."""

    def factors(weight):
        u, s, v = torch.linalg.svd(weight.T, full_matrices=False)
        return u[:, :rank] * s[:rank], v[:rank]

    return factors


def write_tiny(folder, tokenizer, text, family="Llama"):
    """Put a tiny model with a tokenizer into `base`, and `text.txt` beside it."""
    base_model(family).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "text.txt").write_text(text)


SPECIAL = {
    "Afmoe": "no RoPE in full-attention layers",
    "Beam": "no RoPE in full-attention layers",
    "Cohere": "norm of each key head, RoPE of interleaved pairs",
    "Cohere2": "no RoPE in full-attention layers",
    "Cohere2Moe": "no RoPE in full-attention layers",
    "Dbrx": "one projection for queries, keys and values; clipped",
    "DiffLlama": "differential attention",
    "ExaoneMoe": "norm of each key head, no RoPE in full-attention layers",
    "Falcon": "one projection; multi-query",
    "Falcon:heads": "one projection, head by head",
    "Falcon:new": "one projection, group by group; the base caches a copy of each key for each of its queries",
    "Flint": "norm of each key head, no RoPE in full-attention layers",
    "GPT2": "one projection (Conv1D); learned positions",
    "GPTBigCode": "one projection; multi-query; learned positions",
    "GPTBigCode:heads": "one projection, head by head; learned positions",
    "GPTNeoX": "one projection, head by head; partial RoPE; parallel blocks",
    "GPTNeoX:serial": "one projection, head by head; partial RoPE",
    "GPTNeoXJapanese": "one projection, head by head; partial RoPE",
    "Gemma2": "softcap of scores and logits",
    "Gemma3": "norm of each key head; a RoPE for each kind of layer",
    "GptOss": "attention sinks",
    "JetMoe": "one projection for keys and values",
    "Kolibri1": "norm of each key head, no RoPE in full-attention layers",
    "Llama:bias": "biases",
    "Llama:dynamic": "RoPE that changes with the length",
    "Llama:longrope": "RoPE that changes with the length",
    "Llama:yarn": "scaled RoPE",
    "NanoChat": "norm after RoPE, but without weights, so that their order does not matter",
    "OPT": "learned positions",
    "Olmo": "clipped",
    "Olmo2": "norm of the whole key",
    "Olmoe": "norm of the whole key; clipped",
    "Persimmon": "one projection, head by head; norm of each key head; partial RoPE",
    "Phi": "partial RoPE; norm of each key head",
    "Phi3": "one projection",
    "Qwen2": "biases",
    "Qwen3": "norm of each key head",
    "SmolLM3": "no RoPE in some layers",
}


def models_page() -> str:
    """docs/models.md."""
    special = SPECIAL | {name: f"reads images; its text part is {entry[1]}" for name, entry in MULTIMODAL.items()}
    note = lambda name: f": {special[name]}" if name in special else ""  # noqa: E731
    names = "\n".join(f"- {name}{note(name)}" for name in sorted(FAMILIES))
    refused = "\n".join(f"- {name}: {re.sub(r'^layer . ', '', reason)}" for name, (_, reason) in REFUSED.items())
    return f"""# Models

A model is taken for how it is built, not for its name: a decoder with a list of layers, an attention in each that makes
keys and values of its input by linear projections, of their own or shared with the queries, and what lies between
projection and cache: bias, clipping, a norm, RoPE. `checkpoint/probe.py` asks, before any work and from the config
alone, whether `rebuild_keys` and `rebuild_values` make of a projection's output what the layer gives to its cache. A
model for which they do not is refused by name, with the layer and the reason.

## Models that work

Tested: at full rank, tokens and logits equal the base's, padded and not, eager and sdpa, with a window of 4 tokens;
and so they do after tokens came one by one, in chunks or turns, and after the cache was copied, cropped, reordered,
repeated or selected from. Where a model has layers with a sliding window, those are left alone; ranks may differ by
layer, and layers may be left whole (an allocation file).

{names}

Tested with transformers 5.24. Where a family was there before, its exports load under 4.57 too (tested: Llama,
GPT-NeoX, Falcon, GPT-2 and the multimodal Gemma 3), unless its attention layers were not given their rotations then:
DBRX and JetMoe are refused there when they are loaded, Qwen2-VL and Qwen2.5-VL fail when they first decode.

A multimodal model is exported whole, with its towers as they are; calibration reads text. `AutoModelForCausalLM` and
`AutoModelForImageTextToText` load the export.

A base that brings its own code (`auto_map`) is refused unless `--trust-remote-code` is given. Its code then runs once,
and the base is taken if transformers' own class of that type gives the same logits on the same random weights.

## Models that are refused

{refused}

This page is written by `python -m tests.families > docs/models.md`.
"""


if __name__ == "__main__":
    print(models_page(), end="")
