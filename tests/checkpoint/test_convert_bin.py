"""Weights in .bin files become the same weights in a safetensors folder; what cannot is named."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cskv_cli.checkpoint import convert
from cskv_cli.errors import CskvError
from tests.checkpoint.converted import same, tiny_llama, untied, weights_of


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def save_bin(model, folder, shards=1, legacy=False):
    """The model's state_dict, tied weights included, as one or two .bin files beside its config."""
    model.config.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(b"{ }\r\n")
    state = model.state_dict()
    options = {"_use_new_zipfile_serialization": not legacy}
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin", **options)
        return folder
    names = list(state)
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:]), start=1):
        name = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({key: state[key] for key in part}, folder / name, **options)
        weight_map |= dict.fromkeys(part, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def bin_folder(tmp_path):
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


@pytest.mark.parametrize("legacy", [False, True])
def test_one_bin_file_loses_its_tied_head_and_nothing_else(model, bin_folder, tmp_path, legacy):
    folder, note = convert.convert_bin(save_bin(model, bin_folder, legacy=legacy), tmp_path / "base", "m")
    assert (folder, note) == (tmp_path / "base" / "m", "pytorch_model.bin weights were rewritten as safetensors")
    assert same(weights_of(folder), untied(model))
    assert (folder / "tokenizer.json").read_bytes() == b"{ }\r\n"
    ids = torch.arange(20)[None]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, model(ids).logits)


def test_bin_shards_get_a_new_index(model, bin_folder, tmp_path):
    folder, _ = convert.convert_bin(save_bin(model, bin_folder, shards=2), tmp_path / "base", "m")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    for tensor, shard in index["weight_map"].items():
        assert tensor in load_file(folder / shard)
    written = weights_of(folder)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    assert same({name: written[name] for name in untied(model)}, untied(model))
    assert not list(folder.glob("*.bin*"))
    ids = torch.arange(20)[None]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, model(ids).logits)


def test_tensors_that_share_memory_but_are_not_tied_are_all_kept(model, bin_folder, tmp_path):
    save_bin(model, bin_folder)
    state = model.state_dict()
    twin = state["model.layers.0.self_attn.k_proj.weight"]
    state["model.layers.1.self_attn.k_proj.weight"] = twin
    state["model.layers.1.self_attn.o_proj.weight"] = torch.rand(32, 32).T
    torch.save(state, bin_folder / "pytorch_model.bin")
    written = weights_of(convert.convert_bin(bin_folder, tmp_path / "base", "m")[0])
    assert torch.equal(written["model.layers.1.self_attn.k_proj.weight"], twin)
    assert same(written, {name: t for name, t in state.items() if name != "lm_head.weight"})


def test_a_missing_bin_shard_is_named(model, bin_folder, tmp_path):
    save_bin(model, bin_folder, shards=2)
    (bin_folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CskvError, match="pytorch_model-00002-of-00002.bin is missing: .* 2 shards, 1 not found"):
        convert.convert_bin(bin_folder, tmp_path / "base", "m")


def test_a_damaged_bin_is_named(model, bin_folder, tmp_path):
    path = save_bin(model, bin_folder) / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CskvError, match="pytorch_model.bin is damaged"):
        convert.convert_bin(bin_folder, tmp_path / "base", "m")
    torch.save({"model": {"nested": torch.ones(1)}}, path)
    with pytest.raises(CskvError, match="pytorch_model.bin is not a plain dictionary of tensors"):
        convert.convert_bin(bin_folder, tmp_path / "base", "m")
    assert not list((tmp_path / "base").glob("*m*.safetensors"))
