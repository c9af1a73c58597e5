"""A cache that was saved and loaded goes on as if it had never left, bit for bit, and no other model takes it."""

import copy
import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import StaticLayer

from cskv_cli.modeling import cskv_file
from cskv_cli.modeling.modeling_cskv import CACHE
from tests.families import compressed, truncated
from tests.modeling.decoding import (
    RANK,
    SETTINGS,
    SINKS,
    WINDOW,
    base,
    close,
    cskv,
    decode,
    held_bytes,
    latent_bytes,
    new_cache,
    padding,
    tokens,
    waiting,
)
from tests.modeling.test_generate import generate

STARTS, PROMPT, LENGTH = [0, 3, 6], 21, 34
IDS, MASK = tokens(3, LENGTH), padding(STARTS, LENGTH)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "文 1.safetensors"


def filled(model, sizes=(17, 1, 1, 1, 1), cache=None):
    """A cache that has read PROMPT tokens of each row."""
    cache = new_cache(model) if cache is None else cache
    decode(model, IDS[:, :PROMPT], sizes, cache, MASK)
    return cache


def go_on(model, cache):
    """Logits of what follows: a question, single tokens, other beams, single tokens."""
    logits = decode(model, IDS[:, PROMPT : LENGTH - 4], [5, 1, 1, 1, 1], cache, MASK)
    beams = torch.tensor([2, 0, 0])
    cache.reorder_cache(beams)
    return torch.cat([logits, decode(model, IDS[beams, LENGTH - 4 :], [1] * 4, cache, MASK[beams])], dim=1)


@pytest.mark.parametrize("sizes", [[PROMPT], [17, 1, 1, 1, 1]], ids=["prefilled", "decoded"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Llama:dynamic"])
def test_loaded_caches_go_on_as_the_saved_one(family, setting, sizes, path):
    model = copy.deepcopy(cskv(family, setting))
    cache = filled(model, sizes)
    model.save_cache(cache, path)
    models = [model, *(copy.deepcopy(model) for _ in range(3))]  # "dynamic" keeps the longest length in the model
    again = copy.deepcopy(cache)
    caches = [cache, again, *(each.load_cache(path) for each in models[2:])]
    logits = [go_on(*each) for each in zip(models, caches, strict=True)]
    assert logits[0].isfinite().all() and all(torch.equal(each, logits[0]) for each in logits[1:])


@pytest.mark.parametrize("setting", SETTINGS)
def test_generate_goes_on(setting, path):
    model = cskv("Llama", setting)
    cache = filled(model)
    model.save_cache(cache, path)
    kept, _ = generate(model, IDS, attention_mask=MASK, **{CACHE: cache})
    for _ in range(2):
        got, _ = generate(model, IDS, attention_mask=MASK, **{CACHE: model.load_cache(path)})
        assert torch.equal(got, kept)


@pytest.mark.parametrize("setting", ["low", "low, 4 bit"])
def test_a_recorded_past_stays_recorded(setting, path):
    model, other = cskv("Llama", setting), tokens(3, 9, seed=1)
    mask = torch.cat([MASK[:, :PROMPT], torch.ones(3, 20, dtype=torch.long)], dim=1)
    cache = filled(model)
    cache.record_past_for_generate(True)
    decode(model, other[:, :4], [4], cache, mask)
    model.save_cache(cache, path)
    loaded, logits = model.load_cache(path), []
    for each in (cache, loaded):
        decode(model, other[:, 4:], [1] * 5, each, mask)
        each.crop(-8)
        each.record_past_for_generate(False)
        assert not any(layer.record_past for layer in each.layers)
        logits.append(decode(model, other, [1] * 9, each, mask))
    assert torch.equal(*logits)


def test_an_empty_cache(path):
    model = cskv("Llama", "low, 4 bit")
    model.save_cache(new_cache(model), path)
    assert torch.equal(go_on(model, filled(model)), go_on(model, filled(model, cache=model.load_cache(path))))


def test_only_a_cskv_cache_can_be_saved(path):
    with pytest.raises(ValueError, match="only a CSKVCache can be saved, and this is a DynamicCache"):
        cskv("Llama").save_cache(new_cache(base("Llama")), path)
    cache = new_cache(cskv("Llama"))
    cache.layers[1] = StaticLayer(max_cache_len=8)
    with pytest.raises(ValueError, match="cannot save a cache with a StaticLayer"):
        cskv("Llama").save_cache(cache, path)
    assert not list(path.parent.iterdir())


def header_bytes(path):
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


@pytest.mark.parametrize("setting", ["low", "low, 4 bit", "low, 3 bit"])
def test_the_file_holds_the_bytes_of_the_cache(setting, path):
    """No room to grow, no padding, no view of what is gone."""
    model, count = cskv("Llama", setting), 261
    cache = new_cache(model)
    decode(model, tokens(1, count), [256] + [1] * 5, cache)
    model.save_cache(cache, path)
    expected = 4 * 2 * (WINDOW + SINKS) * 32 * 4 + 4 * count
    for waits in (waiting(setting, 256, count, i) for i in range(4)):
        expected += latent_bytes(count - waits, setting) + waits * 64 * 4
    assert path.stat().st_size - header_bytes(path) == expected
    assert held_bytes(model.load_cache(path)) == expected


def test_sliding_layers_are_saved_without_what_they_have_left_behind(path):
    model = cskv("Gemma3", "low")
    model.save_cache(filled(model), path)
    sliding = [t for name, t in load_file(path).items() if name.startswith(("layers.0.", "layers.2."))]
    assert [t.shape for t in sliding] == [(3, 2, 7, 16)] * 4  # a window of 8 keeps 7 for the next token


def with_another_weight():
    model = copy.deepcopy(cskv("Llama"))
    with torch.no_grad():
        model.model.layers[2].self_attn.v_down.weight.mul_(1.5)
    return model


OTHER_MODELS = {
    "its window is 8, here 9": lambda: cskv("Llama", window=9),
    "its sinks is 2, here 3": lambda: cskv("Llama", sinks=3),
    "its rank_k is .*, here": lambda: cskv("Llama", "low"),
    "its bits_k is .*, here": lambda: cskv("Llama", bits=4),
    "its model_type is llama, here qwen3": lambda: cskv("Qwen3"),
    "its dtype is float32, here bfloat16": lambda: copy.deepcopy(cskv("Llama")).bfloat16(),
    "attention weights of layer 2 differ": with_another_weight,
}


@pytest.mark.parametrize("message", OTHER_MODELS)
def test_another_model_is_refused(message, path):
    cskv("Llama").save_cache(filled(cskv("Llama")), path)
    with pytest.raises(ValueError, match=f"文 1.safetensors is a prompt cache of another model.*{message}"):
        OTHER_MODELS[message]().load_cache(path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def rewritten(change):
    def damage(path):
        tensors, header = load_file(path), read_header(path)
        change(tensors, header)
        save_file(tensors, path, metadata={cskv_file.HEADER: json.dumps(header)})

    return damage


def read_header(path):
    raw = path.read_bytes()
    return json.loads(json.loads(raw[8 : header_bytes(path)])["__metadata__"][cskv_file.HEADER])


DAMAGES = {
    "cut": (cut, "is damaged, or no safetensors file"),
    "empty": (lambda path: path.write_bytes(b""), "is damaged, or no safetensors file"),
    "a flipped bit": (flip, "does not hold what was written"),
    "a tensor less": (rewritten(lambda tensors, header: tensors.pop("rows.starts")), "does not hold what was written"),
    "another header": (
        rewritten(lambda tensors, header: header["layers"][0].update(record_past=True)),
        "does not hold what was written",
    ),
    "a later format": (rewritten(lambda tensors, header: header.update(format=3)), "of format 3; this code reads 2"),
    "weights": (lambda path: save_file({"x": torch.ones(2)}, path), "is no prompt cache"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(damage, path):
    model = cskv("Llama", "low")
    model.save_cache(filled(model), path)
    harm, message = DAMAGES[damage]
    harm(path)
    with pytest.raises(ValueError, match=f"文 1.safetensors.*{message}"):
        model.load_cache(path)


def test_a_save_that_fails_leaves_what_was_there(path, monkeypatch):
    model = cskv("Llama", "low")
    model.save_cache(filled(model), path)
    before = path.read_bytes()

    def full_disk(tensors, beside, metadata):
        beside.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(cskv_file, "save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        model.save_cache(filled(model), path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_loaded_cache_needs_its_file_no_more(path):
    model = cskv("Llama", "low, 4 bit")
    model.save_cache(cache := filled(model), path)
    loaded = model.load_cache(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(go_on(model, loaded), go_on(model, cache))


def test_weights_that_are_offloaded_to_a_disk(path, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, unused = (
        compressed(base("Llama"), factors=truncated(RANK), rank=RANK, window=WINDOW, sinks=SINKS) for _ in range(2)
    )
    model.save_cache(cache := filled(model), path)
    offloaded = accelerate.disk_offload(unused, tmp_path / "offload", execution_device="cpu")
    assert offloaded.model.layers[1].self_attn.k_down.weight.is_meta
    loaded = offloaded.load_cache(path)
    assert loaded.layers[1].device == torch.device("cpu")
    offloaded.save_cache(loaded, path)
    expected = go_on(model, cache)
    close(go_on(offloaded, loaded), expected)
    assert torch.equal(go_on(model, model.load_cache(path)), expected)
