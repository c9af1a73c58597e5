"""Safetensors shards on disk: headers, index, hashes, finite values, and the room to write more."""

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cskv_cli.errors import CskvError

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOAT_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CHUNK_BYTES = 64 * 2**20
_FETCH_AGAIN = "copy or download it again"


class TensorHeader(NamedTuple):
    """One tensor as its shard's header describes it.

    `dtype` is the safetensors name (`BF16`), `start` and `end` are byte offsets from the start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CskvError naming the file when it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CskvError(f"{path} is not valid JSON: {error}", _FETCH_AGAIN) from error
    if not isinstance(value, dict):
        raise CskvError(f"{path} should hold a JSON object, not a {type(value).__name__}", _FETCH_AGAIN)
    return value


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors shard, by name, without reading their data.

    Raises CskvError naming the file when its header is unreadable or does not account for every byte.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        if first == b"version ":
            raise CskvError(f"{path} is a Git LFS pointer, not the weights", "run `git lfs pull` in its folder")
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if length > size - 8:
            raise CskvError(f"{path} is truncated or no safetensors file ({size} bytes)", _FETCH_AGAIN)
        blob = file.read(length)
    try:
        tensors = _parse_header(blob, data_start=8 + length)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CskvError(f"{path} has an unreadable safetensors header", _FETCH_AGAIN) from error
    expected = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if expected != size:
        what = "truncated" if size < expected else "damaged"
        raise CskvError(f"{path} is {what}: {size} bytes, its header says {expected}", _FETCH_AGAIN)
    return tensors


def _parse_header(blob: bytes, data_start: int) -> dict[str, TensorHeader]:
    entries = json.loads(blob)
    entries.pop("__metadata__", None)
    return {
        name: TensorHeader(
            entry["dtype"],
            tuple(entry["shape"]),
            data_start + int(entry["data_offsets"][0]),
            data_start + int(entry["data_offsets"][1]),
        )
        for name, entry in entries.items()
    }


def shard_names(folder: Path, single: str = SINGLE_NAME, index: str = INDEX_NAME) -> list[str]:
    """File names of a model's shards, in order; empty when the folder has none.

    As in transformers, a lone `single` file wins over an `index`. The shards need not exist.
    """
    if (folder / single).is_file():
        return [single]
    if not (folder / index).is_file():
        return []
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CskvError(f"{folder / index} has no weight_map", _FETCH_AGAIN)
    return sorted(set(weight_map.values()))


def require_shards(folder: Path, names: list[str], index: str = INDEX_NAME) -> None:
    """CskvError naming the first of the shards that the index lists and the folder lacks."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CskvError(
            f"{folder / missing[0]} is missing: {index} names {len(names)} shards, {len(missing)} not found",
            f"copy or download {', '.join(missing[:3])} into the folder",
        )


def read_headers(folder: Path) -> dict[str, dict[str, TensorHeader]]:
    """Shard name -> tensor name -> header of a model folder, checked against its index and for real weights.

    Raises CskvError for a missing or damaged shard, an index naming a tensor its shard lacks, and weights
    that hold quantized codes.
    """
    names = shard_names(folder)
    require_shards(folder, names)
    headers = {name: read_header(folder / name) for name in names}
    if names != [SINGLE_NAME]:
        _check_index(folder, headers)
    for shard, tensors in headers.items():
        for name, tensor in tensors.items():
            if name.endswith("weight") and tensor.dtype not in FLOAT_TYPES:
                raise CskvError(
                    f"{name} in {folder / shard} holds quantized codes ({tensor.dtype})",
                    "start from the unquantized model",
                )
    return headers


def _check_index(folder: Path, headers: dict[str, dict[str, TensorHeader]]) -> None:
    index = read_json(folder / INDEX_NAME)
    if not isinstance(index.get("metadata"), dict):  # transformers stops with a KeyError
        raise CskvError(
            f"{folder / INDEX_NAME} has no metadata, without which transformers loads no shards",
            'write "metadata": {} into it',
        )
    for tensor, shard in index["weight_map"].items():
        if tensor not in headers[shard]:
            raise CskvError(
                f"{folder / INDEX_NAME} places {tensor} in {shard}, which does not hold it",
                "copy or download the index and its shards again, together",
            )


def check_finite(shards: Iterable[Path], progress: Callable[[int], None] | None = None) -> None:
    """Read every floating tensor, at most 64 MiB of it in memory at a time.

    `progress` is called with the bytes read since its last call.
    Raises CskvError naming the first tensor that holds NaN or Inf, and its file.
    """
    for path in shards:
        for name, chunk in _float_chunks(path):
            if not chunk.isfinite().all():
                kind = "NaN" if chunk.isnan().any() else "Inf"
                raise CskvError(
                    f"{name} in {path} holds {kind}", "the base model is damaged: copy or download it again"
                )
            if progress:
                progress(chunk.nbytes)


def _float_chunks(path: Path) -> Iterator[tuple[str, "Tensor"]]:
    from safetensors import safe_open

    headers = read_header(path)
    with safe_open(path, framework="pt") as file:
        for name, header in headers.items():
            if header.dtype not in FLOAT_TYPES:
                continue
            if not header.shape:
                yield name, file.get_tensor(name)
                continue
            row_bytes = max(1, (header.end - header.start) // max(1, header.shape[0]))
            rows = max(1, _CHUNK_BYTES // row_bytes)
            tensor = file.get_slice(name)
            for start in range(0, header.shape[0], rows):
                yield name, tensor[start : start + rows]


def file_hashes(paths: Iterable[Path], cache: Path) -> dict[str, str]:
    """File name -> sha256.

    `cache` is a JSON file that remembers the hash of a file for as long as its path, size, times and inode stay the
    same: a modification time can be set back, the others cannot. It may be absent or damaged: then everything is hashed
    again.
    """
    try:
        known = read_json(cache)
    except (CskvError, OSError):
        known = {}
    before, hashes = dict(known), {}
    for path in paths:
        real, stat = str(path.resolve()), path.stat()
        state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        entry = known.get(real)
        if not isinstance(entry, list) or entry[:-1] != state:
            with path.open("rb") as file:
                entry = [*state, hashlib.file_digest(file, "sha256").hexdigest()]
        known[real] = entry
        hashes[path.name] = entry[-1]
    if known != before:
        _replace_json(cache, known)
    return hashes


def _replace_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    temporary.replace(path)


def free_bytes(path: Path) -> int:
    """Free bytes on the file system that holds `path`, which need not exist yet."""
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


def require_disk(path: Path, needed: int, what: str) -> None:
    """CskvError naming both figures when `needed` bytes for `what` do not fit where `path` lies."""
    free = free_bytes(path)
    if free < needed:
        raise CskvError(
            f"{what} needs {_gigabytes(needed)} at {path}, where {_gigabytes(free)} are free",
            "free some space or choose a folder on another disk",
        )


def _gigabytes(count: int) -> str:
    return f"{math.ceil(count / 1e7) / 100:.2f} GB"
