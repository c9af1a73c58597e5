"""Small random models of many families, each in the variant that brings out what is special about it."""

import copy

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig

from cskv_cli.checkpoint.classes import base_class, hidden_size, layer_count
from cskv_cli.checkpoint.layers import compressible_layers, kv_projections
from cskv_cli.modeling import modeling_cskv
from cskv_cli.modeling.cskv_structure import attentions

SMALL = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    initializer_range=0.15,
)
MOE = dict(num_local_experts=4, num_experts_per_tok=2)
SLIDING_FULL = ["sliding_attention", "full_attention"]
UNSET = object()
CONFIGS = {"Gemma3": "Gemma3TextConfig"}  # where the name of a config is not that of its model

FAMILIES = {
    "Llama": {},
    "Llama:bias": dict(attention_bias=True),
    "Llama:yarn": dict(
        rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=10000.0, original_max_position_embeddings=64)
    ),
    "Llama:dynamic": dict(
        rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0), max_position_embeddings=16
    ),
    "Llama:longrope": dict(
        rope_parameters=dict(
            rope_type="longrope",
            factor=4.0,
            rope_theta=10000.0,
            short_factor=[1.0] * 8,
            long_factor=[4.0] * 8,
            original_max_position_embeddings=16,
        )
    ),
    "Mistral": dict(sliding_window=None),
    "Mixtral": MOE,
    "Ministral3": {},
    "Qwen2": {},
    "Qwen2:swa": dict(use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "Qwen3": {},
    "Qwen3Moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "Gemma": {},
    "Gemma2": dict(sliding_window=8, query_pre_attn_scalar=16),
    "Gemma3": dict(sliding_window=8, query_pre_attn_scalar=16, layer_types=SLIDING_FULL * 2),
    "Gemma3:6l": dict(sliding_window=8, query_pre_attn_scalar=16, num_hidden_layers=6, layer_types=SLIDING_FULL * 3),
    "Phi": dict(qk_layernorm=True),
    "Phi3": {},
    "Phi3:partial": dict(partial_rotary_factor=0.5),
    "Olmo": dict(clip_qkv=0.5),
    "Olmo2": {},
    "Olmo3": dict(sliding_window=8),
    "Olmoe": dict(clip_qkv=0.8, num_experts=4, num_experts_per_tok=2),
    "Granite": dict(attention_multiplier=0.25),
    "GraniteMoe": MOE,
    "Cohere": dict(use_qk_norm=True),
    "Cohere:noqk": {},
    "Cohere2": dict(sliding_window=8, layer_types=SLIDING_FULL * 2),
    "Starcoder2": dict(use_bias=True),
    "SmolLM3": dict(no_rope_layers=[1, 0, 1, 0]),
    "Glm": {},
    "Glm4": {},
    "Helium": {},
    "SeedOss": {},
    "Ernie4_5": {},
    "Arcee": {},
    "Nemotron": {},
    "StableLm": {},
    "GptOss": dict(**MOE, sliding_window=8),
    "Exaone4": {},
    "Apertus": {},
    "MiniMaxM2": MOE,
    "BitNet": {},
    "GPTNeoX": {},
    "GPTNeoX:serial": dict(use_parallel_residual=False, attention_bias=False),
    "GPTNeoXJapanese": {},
    "Falcon": dict(head_dim=UNSET),
    "Falcon:new": dict(head_dim=UNSET, new_decoder_architecture=True, num_kv_heads=2),
    "Falcon:heads": dict(head_dim=UNSET, multi_query=False, parallel_attn=False, bias=True),
    "Persimmon": {},
    "GPT2": {},
    "GPTBigCode": {},
    "GPTBigCode:heads": dict(multi_query=False),
    "OPT": dict(word_embed_proj_dim=32, ffn_dim=96),
    "BioGpt": {},
}

# Multimodal models: their text part, and a tower for images.
TOWER = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)
MULTIMODAL = {
    "Gemma3Vision": ("gemma3", "Gemma3", dict(vision_config=TOWER, mm_tokens_per_image=4, image_token_id=90)),
}
FAMILIES |= {name: {} for name in MULTIMODAL}


def config_of(family: str, **overrides) -> PretrainedConfig:
    """The small config of a family; a setting that is `UNSET` is left to the family's own default."""
    if family in MULTIMODAL:
        kind, text, settings = MULTIMODAL[family]
        return CONFIG_MAPPING[kind](text_config=config_of(text, **overrides).to_dict(), **settings)
    name = family.split(":")[0]
    settings = {**SMALL, **FAMILIES.get(family, {}), **overrides}
    if transformers.__version__ < "5" and (rope := settings.pop("rope_parameters", None)):  # its names before
        settings.update(rope_scaling=rope, rope_theta=rope["rope_theta"])
    kind = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    return kind(**{key: value for key, value in settings.items() if value is not UNSET})


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


def models_page() -> str:
    """docs/models.md."""
    names = "\n".join(f"- {name}" for name in sorted(FAMILIES))
    return f"""# Models

Any causal language model of transformers is taken whose attention layers pass the probe (`checkpoint/probe.py`): what
`rebuild_keys` and `rebuild_values` make of a projection's output must be what the layer gives to its cache. It is asked
before any work, and a model that fails it is refused by name with the reason: latent attention (MLA), a norm after
RoPE, layers that are not `model.layers[i].self_attn`, or sliding windows in every layer.

These variants are tested: at full rank, tokens and logits equal the base's, padded and not, eager and sdpa. Where a
model has layers with a sliding window, those are left alone.

{names}

This page is written by `python -m tests.families > docs/models.md`.
"""


if __name__ == "__main__":
    print(models_page(), end="")
