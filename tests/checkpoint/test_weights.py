"""Headers, indexes, hashes and finite checks on hand-written shards."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from cskv_cli.checkpoint import weights
from cskv_cli.errors import CskvError


@pytest.fixture
def folder(tmp_path):
    """Two shards and their index: `a.weight` and a scalar in the first, `b.weight` in the second."""
    shards = {
        "model-00001-of-00002.safetensors": {"a.weight": torch.rand(7, 3), "scale": torch.tensor(2.0)},
        "model-00002-of-00002.safetensors": {"b.weight": torch.rand(4).bfloat16()},
    }
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (tmp_path / weights.INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def shard(folder, number):
    return folder / f"model-0000{number}-of-00002.safetensors"


def test_header_offsets_point_at_the_bytes_of_the_tensor(folder):
    saved = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    save_file({"x": torch.ones(5), "y": saved}, folder / "one.safetensors")
    header = weights.read_header(folder / "one.safetensors")["y"]
    raw = (folder / "one.safetensors").read_bytes()[header.start : header.end]
    assert (header.dtype, header.shape) == ("F32", (3, 4))
    assert raw == saved.numpy().tobytes()


@pytest.mark.parametrize("size", [0, 4, 8, 60, -1])
def test_a_cut_shard_is_named(folder, size):
    path = shard(folder, 1)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CskvError, match=f"{path.name} is truncated"):
        weights.read_header(path)


def test_bytes_after_the_last_tensor_are_damage(folder):
    path = shard(folder, 1)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CskvError, match=f"{path.name} is damaged"):
        weights.read_header(path)


@pytest.mark.parametrize("blob", [b"not json", b"[1, 2]  ", b'{"a":1}  ', b'{"a":{}} '])
def test_an_unreadable_header_names_the_file(tmp_path, blob):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(blob).to_bytes(8, "little") + blob)
    with pytest.raises(CskvError, match="x.safetensors has an unreadable safetensors header"):
        weights.read_header(path)


def test_a_git_lfs_pointer_says_so(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CskvError, match="x.safetensors is a Git LFS pointer") as error:
        weights.read_header(path)
    assert "git lfs pull" in error.value.hint


def test_headers_of_a_folder_are_grouped_by_shard(folder):
    headers = weights.read_headers(folder)
    assert {name: set(tensors) for name, tensors in headers.items()} == {
        "model-00001-of-00002.safetensors": {"a.weight", "scale"},
        "model-00002-of-00002.safetensors": {"b.weight"},
    }


def test_a_missing_shard_is_named_and_counted(folder):
    shard(folder, 2).unlink()
    with pytest.raises(CskvError, match=r"model-00002-of-00002.safetensors is missing: .* 2 shards, 1 not found"):
        weights.read_headers(folder)


def test_an_index_naming_a_tensor_its_shard_lacks_is_refused(folder):
    index = json.loads((folder / weights.INDEX_NAME).read_text())
    index["weight_map"]["b.weight"] = shard(folder, 1).name
    index["weight_map"]["scale"] = shard(folder, 2).name
    (folder / weights.INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CskvError, match="places b.weight in model-00001-of-00002|places scale in model-00002"):
        weights.read_headers(folder)


def test_an_index_without_metadata_is_refused_as_transformers_cannot_load_it(folder):
    index = json.loads((folder / weights.INDEX_NAME).read_text())
    del index["metadata"]
    (folder / weights.INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CskvError, match=r"model.safetensors.index.json has no metadata"):
        weights.read_headers(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_a_broken_index_is_named(folder, text):
    (folder / weights.INDEX_NAME).write_text(text)
    with pytest.raises(CskvError, match="model.safetensors.index.json"):
        weights.read_headers(folder)


def test_a_lone_file_wins_over_an_index(folder):
    save_file({"only": torch.ones(1)}, folder / weights.SINGLE_NAME)
    assert {n: list(t) for n, t in weights.read_headers(folder).items()} == {"model.safetensors": ["only"]}


def test_quantized_codes_are_named(folder):
    save_file({"q.qweight": torch.ones(2, dtype=torch.int32)}, folder / weights.SINGLE_NAME)
    with pytest.raises(CskvError, match=r"q.qweight in .*model.safetensors holds quantized codes \(I32\)"):
        weights.read_headers(folder)


def test_integer_buffers_are_no_quantized_codes(folder):
    save_file({"position_ids": torch.arange(3)}, folder / weights.SINGLE_NAME)
    assert weights.read_headers(folder)["model.safetensors"]["position_ids"].dtype == "I64"


@pytest.mark.parametrize("value, word", [(float("nan"), "NaN"), (float("inf"), "Inf"), (-float("inf"), "Inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_first_bad_tensor_is_named(folder, value, word, dtype):
    bad = torch.zeros(9, 5, dtype=dtype)
    bad[-1, -1] = value
    save_file({"a": torch.ones(3), "m.bad": bad, "steps": torch.arange(3)}, shard(folder, 2))
    with pytest.raises(CskvError, match=f"m.bad in .*{shard(folder, 2).name} holds {word}"):
        weights.check_finite([shard(folder, 1), shard(folder, 2)])


def test_every_chunk_is_looked_at(folder, monkeypatch):
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 16)  # 7 rows of 12 bytes: one row a chunk
    for row in range(7):
        tensor = torch.ones(7, 3)
        tensor[row, row % 3] = float("nan")
        save_file({"t": tensor}, folder / "t.safetensors")
        with pytest.raises(CskvError, match="t in .* holds NaN"):
            weights.check_finite([folder / "t.safetensors"])


def test_a_scalar_is_looked_at(folder):
    save_file({"scale": torch.tensor(float("inf"))}, folder / "s.safetensors")
    with pytest.raises(CskvError, match="scale in"):
        weights.check_finite([folder / "s.safetensors"])


def test_progress_counts_the_bytes_of_all_floating_tensors(folder, monkeypatch):
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 16)
    seen = []
    save_file({"steps": torch.arange(99), "empty": torch.ones(0, 4)}, folder / "ints.safetensors")
    weights.check_finite([shard(folder, 1), shard(folder, 2), folder / "ints.safetensors"], seen.append)
    assert sum(seen) == 7 * 3 * 4 + 4 + 4 * 2
    assert len(seen) > 8


def test_hashes_come_from_the_cache_until_the_file_changes(tmp_path, monkeypatch):
    path, cache = tmp_path / "file", tmp_path / "cache" / "hashes.json"
    path.write_bytes(b"one")
    first = weights.file_hashes([path], cache)
    assert first == {"file": "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"}
    calls = []
    digest = weights.hashlib.file_digest
    monkeypatch.setattr(weights.hashlib, "file_digest", lambda *args: calls.append(args) or digest(*args))
    assert weights.file_hashes([path], cache) == first
    assert calls == []
    stat = path.stat()
    path.write_bytes(b"two")  # the same size; only the time tells
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert weights.file_hashes([path], cache) != first
    assert len(calls) == 1
    assert [p.name for p in cache.parent.iterdir()] == ["hashes.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"PATH": 3}', '{"PATH": [1]}'])
def test_a_corrupt_hash_cache_is_ignored(tmp_path, text):
    path, cache = tmp_path / "file", tmp_path / "hashes.json"
    path.write_bytes(b"one")
    cache.write_text(text.replace("PATH", str(path)))
    assert weights.file_hashes([path], cache)["file"].startswith("7692c3ad")
    assert weights.read_json(cache)[str(path)][-1].startswith("7692c3ad")


def test_too_little_disk_names_both_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "free_bytes", lambda path: 1_500_000_000)
    weights.require_disk(tmp_path, 1_500_000_000, "the export")
    with pytest.raises(CskvError, match="the export needs 2.00 GB at .*, where 1.50 GB are free"):
        weights.require_disk(tmp_path, 2_000_000_000, "the export")


def test_free_bytes_of_a_folder_to_be(tmp_path):
    assert weights.free_bytes(tmp_path / "not" / "yet") > 0
