"""One layer at a time gives what the whole model gives, bit for bit, and reads a checkpoint no more than it must."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from cskv_cli.checkpoint import layers
from cskv_cli.checkpoint.layers import LayerByLayer, compressible_layers, in_memory, kv_projections, load_by_layer
from cskv_cli.checkpoint.load import load_base
from cskv_cli.errors import CskvError
from cskv_cli.modeling.cskv_structure import find_attention, find_decoder
from tests.families import base_model

IDS = torch.randint(3, 97, (5, 12), generator=torch.Generator().manual_seed(3))
BATCHES = [slice(0, 2), slice(2, 4), slice(4, 5)]
OVERFLOW = 1e30


@pytest.fixture(autouse=True)
def _two_windows_in_a_batch(monkeypatch):
    monkeypatch.setattr(layers, "BATCH_TOKENS", 24)


@pytest.fixture
def load(tmp_path):
    """Save a model, then load it by layer."""

    def _load(model, dtype=torch.float32):
        model.save_pretrained(tmp_path / "model")
        return load_by_layer(tmp_path / "model", tmp_path / "offload", dtype=dtype, device="cpu")

    return _load


@torch.no_grad()
def attention_inputs(model):
    """What each layer's attention is given in the whole model, and what comes out of the last layer."""
    decoder, output = find_decoder(model), []
    seen = [[] for _ in decoder.layers]
    for index, layer in enumerate(decoder.layers):
        hook = lambda _, args, kwargs, i=index: seen[i].append(args[0] if args else kwargs["hidden_states"])  # noqa: E731
        find_attention(layer).register_forward_pre_hook(hook, with_kwargs=True)
    layer.register_forward_hook(lambda _, args, result: output.append(result[0] if type(result) is tuple else result))
    for rows in BATCHES:
        model(IDS[rows], use_cache=False)
    return [torch.cat(parts) for parts in seen], torch.cat(output)


FAMILIES = ["Llama:bias", "Llama:dynamic", "Qwen3Moe", "Gemma3", "Phi3", "SmolLM3", "GptOss", "Granite", "Cohere2"]
FAMILIES += ["GPTNeoX", "Falcon", "GPT2", "OPT", "Llava", "Qwen2VL"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_whole_model(family, dtype, load, tmp_path):
    model = load(base_model(family), dtype)
    inputs, output = attention_inputs(load_base(tmp_path / "model", "cpu", dtype))
    states = LayerByLayer(model, IDS, "cpu")
    for index, expected in enumerate(inputs):
        seen, done = {}, []
        states.push(index, seen.__setitem__, done.append)
        assert list(seen) == [0, 2, 4]
        assert done == [2, 2, 1]
        assert torch.equal(torch.cat(list(seen.values())), expected)
    assert states.hidden.dtype == dtype
    assert torch.equal(states.hidden, output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoint_is_read_in_place(stored, dtype, load, tmp_path):
    model = load(base_model("Llama").to(stored), dtype)
    assert not list((tmp_path / "offload").iterdir())
    assert {weight.device.type for weight in (*model.model.layers.parameters(), model.lm_head.weight)} == {"meta"}
    assert model.model.embed_tokens.weight.dtype == dtype


def test_weights_are_read_once_and_let_go(load):
    base = base_model("Qwen2")
    layer = load(base).model.layers[1]
    x, rotation = torch.randn(1, 3, 64), (torch.ones(1, 3, 16), torch.zeros(1, 3, 16))
    with in_memory(layer), torch.no_grad():
        weights = dict(layer.named_parameters())
        for _ in range(2):
            layer(x, position_embeddings=rotation, attention_mask=None)
            assert all(weight is weights[name] for name, weight in layer.named_parameters())
        for name, weight in base.model.layers[1].named_parameters():
            assert torch.equal(weights[name], weight)
    assert {weight.device.type for weight in layer.parameters()} == {"meta"}
    with in_memory(layer.self_attn):
        assert torch.equal(layer.self_attn.k_proj.weight, base.model.layers[1].self_attn.k_proj.weight)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Phi3"])
def test_kv_projections_lead_to_the_cache(family, load):
    base = base_model(family)
    model, cache, seen = load(base), DynamicCache(config=base.config), []
    hook = lambda _, args, kwargs: seen.append(kwargs["hidden_states"])  # noqa: E731
    base.model.layers[0].self_attn.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        base.model(IDS[:1], past_key_values=cache, use_cache=True)
    with in_memory(model.model.layers[0].self_attn) as attention:
        projections = kv_projections(attention)
    cached = {"k": cache.layers[0].keys[..., :1, :], "v": cache.layers[0].values}  # the first token is not rotated
    for name, (weight, bias) in projections.items():
        rebuilt = seen[0] @ weight + (0 if bias is None else bias)
        rebuilt = rebuilt.unflatten(-1, (2, 16)).transpose(1, 2)[..., : cached[name].shape[-2], :]
        torch.testing.assert_close(rebuilt, cached[name])
        assert weight.dtype == torch.float32


def test_unknown_projections_are_refused():
    with pytest.raises(CskvError, match="Identity has no key and value projection"):
        kv_projections(torch.nn.Identity())


@pytest.mark.parametrize(
    ("family", "expected"),
    [("Llama", [0, 1, 2, 3]), ("Mistral", [0, 1, 2, 3]), ("Gemma3", [1, 3]), ("Qwen2:swa", [0, 1])],
)
def test_compressible_layers(family, expected):
    assert compressible_layers(base_model(family).config) == expected


@pytest.mark.parametrize("family", ["Mistral", "Phi3"])
def test_nothing_but_sliding_windows(family):
    with pytest.raises(CskvError, match="last 8 tokens only"):
        compressible_layers(base_model(family, sliding_window=8).config)


@pytest.mark.parametrize(
    ("dtype", "advice"), [(torch.bfloat16, "--dtype float32"), (torch.float32, "damaged")], ids=str
)
def test_overflow_names_the_layer(dtype, advice, load):
    base = base_model("Llama")
    with torch.no_grad():
        base.model.layers[2].mlp.up_proj.weight.mul_(OVERFLOW)
        base.model.layers[2].mlp.down_proj.weight.mul_(OVERFLOW)
    states = LayerByLayer(load(base, dtype), IDS, "cpu")
    states.push(0)
    states.push(1)
    with pytest.raises(CskvError, match=f"layer 2 .* not finite in {str(dtype)[6:]}") as caught:
        states.push(2)
    assert advice in caught.value.hint


def test_missing_tensor_is_refused(tmp_path):
    base_model("Llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 4
    with pytest.raises(CskvError, match="lacks 1 tensors of the model, among them model.layers.2.self_attn.k_proj"):
        load_by_layer(tmp_path, tmp_path / "offload", dtype=torch.float32, device="cpu")
