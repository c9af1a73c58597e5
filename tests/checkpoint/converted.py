"""A tiny model to be converted, and comparisons of what comes out."""

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), "ĠĠ"]
HEADS, KV_HEADS = 4, 2


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=99,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 54321.0},
    )
    return LlamaForCausalLM(config).eval()


def weights_of(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def untied(model):
    return {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
