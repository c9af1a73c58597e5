"""Small configs of many families, each in the variant that brings out what is special about it."""

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig

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
ROUTED = dict(  # experts, under the names of most families
    n_routed_experts=4,
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_group=1,
    topk_group=1,
    num_expert_group=1,
    num_limited_groups=1,
)
LATENT = dict(kv_lora_rank=8, q_lora_rank=8, num_key_value_heads=4)
UNSET = object()
CONFIGS = {"Gemma3": "Gemma3TextConfig"}  # where the name of a config is not that of its model

FAMILIES = {
    "Afmoe": dict(**ROUTED, sliding_window=8, layer_types=SLIDING_FULL * 2),
    "Apertus": {},
    "Arcee": {},
    "AriaText": dict(moe_num_experts=4, moe_topk=2),
    "Beam": dict(sliding_window=8, layer_types=SLIDING_FULL * 2, **ROUTED),
    "BioGpt": {},
    "BitNet": {},
    "Cohere": dict(use_qk_norm=True),
    "Cohere2": dict(sliding_window=8, layer_types=SLIDING_FULL * 2),
    "Cohere2Moe": dict(sliding_window=8, layer_types=SLIDING_FULL * 2, **ROUTED),
    "Cohere:noqk": {},
    "Cwm": dict(sliding_window=8, layer_types=SLIDING_FULL * 2),
    "Dbrx": dict(
        d_model=64,
        n_heads=4,
        attn_config=dict(kv_n_heads=2, clip_qkv=0.5, rope_theta=10000.0),
        ffn_config=dict(hidden_size=64, ffn_hidden_size=96, moe_num_experts=4, moe_top_k=2),
        num_key_value_heads=UNSET,
    ),
    "DiffLlama": {},
    "Ernie4_5": {},
    "Ernie4_5_Moe": dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=32),
    "Exaone4": {},
    "ExaoneMoe": dict(sliding_window=8, layer_types=SLIDING_FULL * 2, **ROUTED),
    "Falcon": dict(head_dim=UNSET),
    "Falcon:heads": dict(head_dim=UNSET, multi_query=False, parallel_attn=False, bias=True),
    "Falcon:new": dict(head_dim=UNSET, new_decoder_architecture=True, num_kv_heads=2),
    "FlexOlmo": dict(num_experts=4, num_experts_per_tok=2),
    "Flint": dict(sliding_window=8, layer_types=SLIDING_FULL * 2, **ROUTED),
    "GPT2": {},
    "GPTBigCode": {},
    "GPTBigCode:heads": dict(multi_query=False),
    "GPTNeoX": {},
    "GPTNeoX:serial": dict(use_parallel_residual=False, attention_bias=False),
    "GPTNeoXJapanese": {},
    "Gemma": {},
    "Gemma2": dict(sliding_window=8, query_pre_attn_scalar=16),
    "Gemma3": dict(sliding_window=8, query_pre_attn_scalar=16, layer_types=SLIDING_FULL * 2),
    "Gemma3:6l": dict(sliding_window=8, query_pre_attn_scalar=16, num_hidden_layers=6, layer_types=SLIDING_FULL * 3),
    "Glm": {},
    "Glm4": {},
    "Glm4Moe": dict(**ROUTED, use_qk_norm=True),
    "GptOss": dict(**MOE, sliding_window=8),
    "Granite": dict(attention_multiplier=0.25),
    "GraniteMoe": MOE,
    "GraniteMoeShared": dict(**MOE, shared_intermediate_size=32),
    "HYV3": ROUTED,
    "Helium": {},
    "HyperCLOVAX": {},
    "Jais2": {},
    "JetMoe": dict(**MOE, kv_channels=16),
    "Kolibri1": dict(sliding_window=8, layer_types=SLIDING_FULL * 2, **ROUTED),
    "Laguna": ROUTED,
    "Llama": {},
    "Llama:bias": dict(attention_bias=True),
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
    "Llama:yarn": dict(
        rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=10000.0, original_max_position_embeddings=64)
    ),
    "Mellum": dict(sliding_window=8, layer_types=SLIDING_FULL * 2, **ROUTED),
    "MiniMaxM2": MOE,
    "Ministral": dict(sliding_window=8, layer_types=SLIDING_FULL * 2),
    "Ministral3": {},
    "Mistral": dict(sliding_window=None),
    "Mixtral": MOE,
    "ModernBertDecoder": dict(sliding_window=8, layer_types=SLIDING_FULL * 2),
    "NanoChat": {},
    "Nemotron": {},
    "OPT": dict(word_embed_proj_dim=32, ffn_dim=96),
    "Olmo": dict(clip_qkv=0.5),
    "Olmo2": {},
    "Olmo3": dict(sliding_window=8),
    "Olmoe": dict(clip_qkv=0.8, num_experts=4, num_experts_per_tok=2),
    "Persimmon": {},
    "Phi": dict(qk_layernorm=True),
    "Phi3": {},
    "Phi3:partial": dict(partial_rotary_factor=0.5),
    "Phimoe": MOE,
    "Qwen2": {},
    "Qwen2:swa": dict(use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "Qwen2Moe": dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "Qwen3": {},
    "Qwen3Moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "SeedOss": {},
    "SmolLM3": dict(no_rope_layers=[1, 0, 1, 0]),
    "SolarOpen": ROUTED,
    "StableLm": {},
    "Starcoder2": dict(use_bias=True),
    "VaultGemma": dict(sliding_window=8, layer_types=SLIDING_FULL * 2),
    "XGLM": dict(d_model=64, ffn_dim=96, num_layers=4, attention_heads=4),
}
FAMILIES = {f: v for f, v in FAMILIES.items() if hasattr(transformers, CONFIGS.get(n := f.split(":")[0], f"{n}Config"))}

REFUSED = {  # settings, and words of the reason
    "AXK1": (LATENT, "layer 0 has latent attention"),
    "Bamba": ({}, "layer 0 keeps a state"),
    "Bart": ({}, "is an encoder-decoder model"),
    "Bert": (
        dict(is_decoder=True),
        "layer 0 makes its keys and values in an unknown way: BertSelfAttention has no key",
    ),
    "Bloom": ({}, "layer 0 adds a bias by position"),
    "CodeGen": (dict(rotary_dim=8), "layer 0 turns its keys in a way that cskv cannot retrace"),
    "DeepseekV2": (LATENT, "layer 0 has latent attention"),
    "DeepseekV3": (LATENT, "layer 0 has latent attention"),
    "Doge": ({}, "layer 0 makes its attention mask from its values"),
    "Dory": (ROUTED, "layer 3 is passed several times"),
    "DeepseekV32": (LATENT, "layer 0 keeps something else in place of keys and values or beside them"),
    "Falcon": (dict(head_dim=UNSET, alibi=True), "layer 0 adds a bias by position"),
    "FalconH1": ({}, "layer 0 keeps a state"),
    "FalconMamba": ({}, "layer 0 keeps a state"),
    "GPTJ": (dict(rotary_dim=8), "layer 0 turns its keys in a way that cskv cannot retrace"),
    "Gemma3nText": (dict(num_kv_shared_layers=2), "layers share keys and values"),
    "Gemma4Text": (
        dict(num_kv_shared_layers=2, sliding_window=8, layer_types=SLIDING_FULL * 2),
        "layers share keys and values",
    ),
    "HunYuanDenseV1": ({}, "layer 0 has a norm after RoPE"),
    "HunYuanMoEV1": (MOE, "layer 0 has a norm after RoPE"),
    "Jamba": ({}, "layer 0 keeps a state"),
    "Llama4Text": (ROUTED, "layer 3 needs more than"),
    "Mamba": ({}, "layer 0 keeps a state"),
    "MiMoV2Flash": (ROUTED, "layer 0 has keys and values of"),
    "MiniMax": (MOE, "keeps a state"),
    "Mistral": (dict(sliding_window=8), "look at the last 8 tokens only, so its cache is bounded"),
    "Mpt": (dict(max_seq_len=256), "layer 0 adds a bias by position"),
    "Qwen3Next": (ROUTED, "layer 0 keeps a state"),
    "RecurrentGemma": ({}, "layer 0 keeps a state"),
    "Rwkv": ({}, "no list of 4 layers with a cache"),
    "T5": ({}, "is an encoder-decoder model"),
}

# Multimodal models: model type, the family of the text part, what else is in their config, what is added to the text's.
TOWER = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)
CLIP, SIGLIP = dict(TOWER, model_type="clip_vision_model"), dict(TOWER, model_type="siglip_vision_model")
PATCHES = dict(
    depth=1, embed_dim=16, num_heads=2, patch_size=4, spatial_merge_size=1, temporal_patch_size=1, intermediate_size=32
)
SECTIONS = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3]))
IMAGE = 90
MULTIMODAL = {
    "AyaVision": ("aya_vision", "Cohere2", dict(vision_config=SIGLIP, image_token_index=IMAGE)),
    "Gemma3Vision": ("gemma3", "Gemma3", dict(vision_config=TOWER, mm_tokens_per_image=4, image_token_id=IMAGE)),
    "Idefics3": ("idefics3", "Llama", dict(vision_config=TOWER, image_token_id=IMAGE)),
    "InternVL": (
        "internvl",
        "Qwen2",
        dict(vision_config=dict(TOWER, image_size=[8, 8], patch_size=[4, 4]), image_token_id=IMAGE),
    ),
    "Llava": ("llava", "Llama", dict(vision_config=CLIP, image_token_index=IMAGE)),
    "LlavaOnevision": ("llava_onevision", "Qwen2", dict(vision_config=SIGLIP, image_token_index=IMAGE)),
    "Mistral3": (
        "mistral3",
        "Mistral",
        dict(vision_config=dict(TOWER, model_type="pixtral", head_dim=8), image_token_index=IMAGE),
    ),
    "PaliGemma": (
        "paligemma",
        "Gemma",
        dict(vision_config=dict(SIGLIP, projection_dim=64), projection_dim=64, image_token_index=IMAGE),
    ),
    "Qwen2VL": ("qwen2_vl", "Qwen2", dict(vision_config=dict(PATCHES, hidden_size=64), image_token_id=IMAGE), SECTIONS),
    "Qwen2_5VL": (
        "qwen2_5_vl",
        "Qwen2",
        dict(vision_config=dict(PATCHES, hidden_size=16, out_hidden_size=64), image_token_id=IMAGE),
        SECTIONS,
    ),
    "Qwen3VL": (
        "qwen3_vl",
        "Qwen3",
        dict(
            vision_config=dict(PATCHES, hidden_size=16, out_hidden_size=64, deepstack_visual_indexes=[]),
            image_token_id=IMAGE,
        ),
        SECTIONS,
    ),
}
MULTIMODAL = {name: entry for name, entry in MULTIMODAL.items() if entry[0] in CONFIG_MAPPING}
FAMILIES |= {name: {} for name in MULTIMODAL}


def config_of(family: str, **overrides) -> PretrainedConfig:
    """The small config of a family; a setting that is `UNSET` is left to the family's own default."""
    if family in MULTIMODAL:
        kind, text, settings, *more = MULTIMODAL[family]
        text_config = config_of(text, **overrides).to_dict()
        for setting in more:
            text_config |= setting | {"model_type": f"{kind}_text"}
        return CONFIG_MAPPING[kind](text_config=text_config, **settings)
    name = family.split(":")[0]
    settings = {**SMALL, **FAMILIES.get(family, {}), **overrides}
    if transformers.__version__ < "5" and (rope := settings.pop("rope_parameters", None)):  # its names before
        settings.update(rope_scaling=rope, rope_theta=rope["rope_theta"])
    kind = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    return kind(**{key: value for key, value in settings.items() if value is not UNSET})
