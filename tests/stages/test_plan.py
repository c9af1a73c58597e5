"""`--dry-run` of a large base: everything from config.json and the headers of its shards."""

import json
import struct

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cli import cskv

SEVENTY = dict(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)


@pytest.fixture(scope="module")
def seventy(tmp_path_factory):
    """A model of 70 billion parameters whose shards have headers alone; the weights are holes in the files."""
    folder = tmp_path_factory.mktemp("seventy")
    config = LlamaConfig(**SEVENTY, dtype="bfloat16", tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: list(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    weight_map, names = {}, list(shapes)
    for start in range(0, len(names), 30):
        shard, header, end = f"model-{start:05}.safetensors", {}, 0
        for name in names[start : start + 30]:
            size = 2 * torch.Size(shapes[name]).numel()
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [end, end + size]}
            weight_map[name], end = shard, end + size
        blob = json.dumps(header).encode()
        with (folder / shard).open("wb") as file:
            file.write(struct.pack("<Q", len(blob)) + blob)
            file.truncate(8 + len(blob) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read_bytes():
    """Bytes that this process has asked to read so far."""
    with open("/proc/self/io") as file:  # noqa: PTH123
        return int(file.readline().split()[1])


@pytest.mark.parametrize("flags", [(), ("--bits", 4), ("--budget", 0.9)])
def test_a_plan_for_70_billion_parameters_reads_no_weight(seventy, tmp_path, flags):
    before = read_bytes()
    plan = cskv("compress", seventy, "--run", tmp_path / "run", "--data", "builtin", *flags, "--dry-run")
    assert read_bytes() - before < 2**24  # of 141 GB
    layer = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672) + 2 * 8192
    tokens = plan["samples"] * plan["seq_len"]
    held = 2 * layer + 3 * 8 * 8192**2
    assert plan["layer"]["memory_bytes"] == held
    assert plan["memory_bytes"] == 2 * 8192 * (128256 + tokens) + held
    factors = plan["factor_parameters"]
    statistics = 4 * 8192**2
    assert plan["layer"]["disk_bytes"] == statistics + factors * 6 // 80
    weights = sum(path.stat().st_size for path in seventy.glob("*.safetensors"))
    assert weights > 141e9 and plan["disk_bytes"] == weights + 80 * statistics + factors * 6
    assert plan["layer"]["seconds"] > 0
    assert not [path for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")]


def test_text_that_the_model_writes_takes_the_whole_model(seventy, tmp_path):
    plan = cskv("compress", seventy, "--run", tmp_path / "run", "--dry-run")
    assert plan["data"] == ["self", "builtin"] and plan["memory_bytes"] > 141e9
