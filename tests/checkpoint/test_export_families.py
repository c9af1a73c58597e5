"""Models of other shapes than Llama's, through the whole pipeline to a checkpoint that answers as the base."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from cskv_cli.checkpoint.load import load_base, load_checkpoint
from cskv_cli.modeling.cskv_structure import attentions
from tests.checkpoint.test_export_loads import NEWEST, OLDER, answers, same_logits
from tests.cli import compress
from tests.families import write_tiny

FULL_RANK = {"GPTNeoX": 64, "Falcon:new": 32, "GPT2": 64, "Gemma3Vision": 32}


@pytest.mark.parametrize("family", FULL_RANK)
def test_full_rank_answers_as_the_base_in_both_versions(family, tmp_path, tokenizer, text):
    write_tiny(tmp_path, tokenizer, text, family)
    if family == "GPT2":  # as on the Hub; Gemma 3 is saved under older names of its own accord
        path = tmp_path / "base" / "model.safetensors"
        save_file({name.removeprefix("transformer."): t for name, t in load_file(path).items()}, path, {"format": "pt"})
    rank = FULL_RANK[family]
    compress(tmp_path, "--rank-k", rank, "--rank-v", rank, "--window", 4, "--sinks", 2)
    exported = dict(folder=tmp_path / "run" / "export", trust=True)
    plain = dict(folder=tmp_path / "base", trust=False)
    newest = answers(NEWEST, tmp_path / "modules", base=plain, ours=exported | {"save": tmp_path / "again"})
    oldest = answers(OLDER[0], tmp_path / "modules-oldest", ours=exported)
    base = newest["base"]
    assert newest["ours"]["again"] == newest["ours"]["greedy"]
    for ours in (newest["ours"], oldest["ours"]):
        assert (ours["class"], ours["cache"]) == (f"CSKV{base['class']}", "CSKVCache")
        for what in ("greedy", "beams", "second"):
            assert ours[what] == base[what], what
        same_logits(ours, base, 1e-3)


def test_ranks_and_bits_by_layer_and_a_layer_left_whole(tmp_path, tokenizer, text):
    write_tiny(tmp_path, tokenizer, text, "Falcon:new")
    choices = [(6, 4, 9, None), None, (32, None, 32, None), (20, None, 12, 3)]
    layers = [
        {"index": i} | {"k": c and {"rank": c[0], "bits": c[1]}, "v": c and {"rank": c[2], "bits": c[3]}}
        for i, c in enumerate(choices)
    ]
    path = tmp_path / "allocation.json"
    path.write_text(json.dumps({"version": 1, "window": 8, "sinks": 2, "group": 4, "layers": layers}))
    compress(tmp_path, "--allocation", path)
    base = load_base(tmp_path / "base", "cpu", torch.float32)
    model = load_checkpoint(tmp_path / "run" / "export", "cpu", torch.float32)
    ids = torch.arange(10, 40)[None]
    output = model.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True)
    expected = base.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True)
    torch.testing.assert_close(output.logits[0], expected.logits[0])  # a prefill is exact
    kinds = [type(layer).__name__ for layer in output.cache.layers]
    assert kinds == ["CSKVLayer", "DynamicLayer", "CSKVLayer", "CSKVLayer"]
    for choice, layer, attention in zip(choices, output.cache.layers, attentions(model), strict=True):
        if choice is None:
            assert layer.keys.shape[1:3] == (4, 37)  # the base caches a copy of each key for each query
            continue
        assert (attention.k_up.in_features, attention.v_up.in_features) == choice[::2]
        assert [store.quantizer and store.quantizer.bits for store in layer.latents] == list(choice[1::2])
