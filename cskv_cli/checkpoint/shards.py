"""Cutting the weights of an export into shards of at most a given size."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cskv_cli.checkpoint.sharing import bring
from cskv_cli.checkpoint.weights import FLOAT_TYPES, INDEX_NAME, TensorHeader, read_header
from cskv_cli.progress import Progress
from cskv_cli.run import write_json


@dataclass(frozen=True)
class Piece:
    """Tensors that become one shard; `source` is the base's shard they are in, None for the factors."""

    source: Path | None
    names: tuple[str, ...]
    whole: bool = False


def write_shards(
    folder: Path,
    shards: list[Path],
    factors: dict[str, torch.Tensor],
    dtype: torch.dtype | None,
    limit: int,
    progress: Progress,
    *,
    fixed: bool,
    copy: bool,
) -> None:
    """Write the base's `shards`, then the factors, as `model-0000i-of-0000N`, and the index over all of them.

    A shard of the base within `limit` bytes is taken over as it is where `dtype` is None (see `bring` for `fixed` and
    `copy`); else floating tensors are converted to it. A single tensor larger than the limit is a shard of its own.
    """
    pieces = [piece for path in shards for piece in _pieces(path, dtype, limit)]
    sizes = {name: tensor.nbytes for name, tensor in factors.items()}
    pieces += [Piece(None, names) for names in _groups(sizes, limit)]
    weight_map, total = {}, 0
    with progress.task("export", len(pieces), "shards") as advance:
        for number, piece in enumerate(pieces, start=1):
            target = folder / f"model-{number:05d}-of-{len(pieces):05d}.safetensors"
            if piece.whole:
                bring(piece.source, target, fixed=fixed, copy=copy)
            else:
                _write(piece, target, factors, dtype)
            if target.stat().st_nlink == 1:
                shutil.copymode(folder / "config.json", target)  # safetensors leaves it readable by its owner alone
            weight_map |= dict.fromkeys(piece.names, target.name)
            total += sum(header.end - header.start for header in read_header(target).values())
            advance(1)
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _pieces(path: Path, dtype: torch.dtype | None, limit: int) -> list[Piece]:
    if dtype is None and path.stat().st_size <= limit:
        return [Piece(path, tuple(read_header(path)), whole=True)]
    sizes = {name: _bytes(header, dtype) for name, header in read_header(path).items()}
    return [Piece(path, names) for names in _groups(sizes, limit)]


def _groups(sizes: dict[str, int], limit: int) -> Iterator[tuple[str, ...]]:
    """Consecutive names whose shards, header included, stay within the limit."""
    names, size = [], 0
    for name, count in sizes.items():
        count += len(json.dumps(name)) + 128  # its entry in the header
        if names and size + count > limit:
            yield tuple(names)
            names, size = [], 0
        names.append(name)
        size += count
    if names:
        yield tuple(names)


def _write(piece: Piece, target: Path, factors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    if piece.source is None:
        tensors = {name: factors[name] for name in piece.names}
    else:
        with safe_open(piece.source, "pt") as file:
            tensors = {name: _in(file.get_tensor(name), dtype) for name in piece.names}
    save_file(tensors, target, metadata={"format": "pt"})


def _in(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _bytes(header: TensorHeader, dtype: torch.dtype | None) -> int:
    """Bytes of a tensor once it is in `dtype`."""
    size = header.end - header.start
    if dtype is None or header.dtype not in FLOAT_TYPES:
        return size
    return size // getattr(torch, FLOAT_TYPES[header.dtype]).itemsize * dtype.itemsize
