"""Base models that are not safetensors: GGUF files and PyTorch .bin shards, rewritten as a model folder."""

import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cskv_cli.checkpoint.weights import (
    INDEX_NAME,
    SINGLE_NAME,
    file_hashes,
    read_json,
    require_disk,
    require_shards,
    shard_names,
)
from cskv_cli.errors import CskvError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

BIN_NAME = "pytorch_model.bin"
BIN_INDEX_NAME = "pytorch_model.bin.index.json"
_RECORD_NAME = ".cskv-source.json"
_FORMAT = 2  # raise it when a conversion would come out differently, so that old ones are made again
_WEIGHT_SUFFIXES = {".bin", ".safetensors", ".gguf", ".h5", ".msgpack", ".pt", ".pth", ".onnx"}
_TAKE_SAFETENSORS = "start from the model's safetensors checkpoint instead"


def convert_gguf(file: Path, work_dir: Path) -> tuple[Path, str]:
    """Dequantize a GGUF file to float32 in `work_dir/<file stem>/`, reused when it is there already.

    Returns the folder and a one-line note on what was done. Raises CskvError naming the file when it is no
    GGUF file, is damaged or one of several parts, or describes a model that transformers cannot rebuild.
    """
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise CskvError(f"{file} is not a GGUF file", "pass a Hub id, a model folder or a .gguf file")
    return _convert(file.stem, [file], work_dir, lambda out: _build_from_gguf(file, out))


def convert_bin(folder: Path, work_dir: Path, name: str) -> tuple[Path, str]:
    """Rewrite a folder's pytorch_model*.bin as safetensors in `work_dir/<name>/`, one shard in memory at a time.

    Returns the folder and a one-line note on what was done. Raises CskvError naming the shard that is missing
    or does not load.
    """
    names = shard_names(folder, BIN_NAME, BIN_INDEX_NAME)
    require_shards(folder, names, BIN_INDEX_NAME)
    shards = [folder / shard for shard in names]
    return _convert(name, shards, work_dir, lambda out: _build_from_bin(folder, shards, out))


def add_legacy_keys(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with the keys that transformers 4.57 reads beside those that 5.x writes.

    Without `rope_theta` and `rope_scaling`, 4.57 silently falls back to its own default theta.
    """
    config = {key: add_legacy_keys(value) if key == "text_config" else value for key, value in config.items()}
    if "dtype" in config:
        config.setdefault("torch_dtype", config["dtype"])
    rope = config.get("rope_parameters")
    if not rope or "rope_theta" in config:
        return config
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    scaling = dict(rope.get("full_attention", rope))
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in scaling:
            config[key] = scaling.pop(key)
    config["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    return config


def _convert(name: str, sources: list[Path], work_dir: Path, build: Callable[[Path], str]) -> tuple[Path, str]:
    """Run `build` in a temporary folder and rename it to `work_dir/name`, unless that holds its result."""
    made_from = {"format": _FORMAT, "sha256": file_hashes(sources, work_dir / "hashes.json")}
    target, partial = work_dir / name, work_dir / f".{name}.partial"
    if (target / _RECORD_NAME).is_file():
        record = read_json(target / _RECORD_NAME)
        if record["made_from"] == made_from:
            return target, record["note"]
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        note = build(partial)
        _write_json(partial / _RECORD_NAME, {"made_from": made_from, "note": note})
        _flush(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target, note


def _build_from_gguf(file: Path, out: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    reader = _open_gguf(file)
    require_disk(out, sum(int(tensor.n_elements) * 4 for tensor in reader.tensors), f"dequantizing {file.name}")
    with redirect_stderr(io.StringIO()):  # progress bars: the GGUF reader's knows no switch
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CskvError(f"{file} cannot be read as a model: {reason}", _TAKE_SAFETENSORS) from error
        lacking = sorted(loading["missing_keys"]) + sorted(map(str, loading["mismatched_keys"]))
        if lacking:
            raise CskvError(f"{file} lacks {lacking[0]} ({len(lacking)} tensors in all)", _TAKE_SAFETENSORS)
        model.save_pretrained(out, max_shard_size="5GB")
        _save_tokenizer(tokenizer, reader, model.config.max_position_embeddings, out)
    config = read_json(out / "config.json")
    config.pop("_model_name_or_path", None)
    _write_json(out / "config.json", add_legacy_keys(config))
    _save_license(reader, out)
    return f"GGUF {_main_type(reader)} weights were dequantized to float32"


def _open_gguf(file: Path) -> "GGUFReader":
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except Exception as error:
        raise CskvError(f"{file} is truncated or damaged", "copy or download it again") from error
    parts = _field(reader, "split.count") or 1
    if parts > 1:
        raise CskvError(f"{file} is one of {parts} parts", "join them first: `llama-gguf-split --merge`")
    _refuse_lost_rope(file, reader)
    return reader


def _refuse_lost_rope(file: Path, reader: "GGUFReader") -> None:
    """transformers drops these RoPE settings silently: the model would be subtly wrong at every position."""
    lost = [tensor.name for tensor in reader.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
    architecture = _field(reader, "general.architecture")
    scaling = _field(reader, f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none") and architecture != "gpt-oss":
        lost.append(f"{architecture}.rope.scaling.type = {scaling}")
    if lost:
        raise CskvError(f"{file} scales RoPE by {lost[0]}, which transformers does not read", _TAKE_SAFETENSORS)


def _field(reader: "GGUFReader", key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _save_license(reader: "GGUFReader", out: Path) -> None:
    """The licence as the front matter of a model card, where the file names one."""
    from huggingface_hub import metadata_save

    keys = {
        "license": "general.license",
        "license_name": "general.license.name",
        "license_link": "general.license.link",
    }
    found = {name: _field(reader, key) for name, key in keys.items()}
    if found["license"]:
        metadata_save(out / "README.md", {name: value for name, value in found.items() if value})


def _main_type(reader: "GGUFReader") -> str:
    counts: Counter[str] = Counter()
    for tensor in reader.tensors:
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    return counts.most_common(1)[0][0]


def _save_tokenizer(tokenizer: "PreTrainedTokenizerBase", reader: "GGUFReader", max_length: int, out: Path) -> None:
    from tokenizers import pre_tokenizers

    if _field(reader, "tokenizer.ggml.pre") == "smollm":  # transformers takes it for GPT-2's: "  1" would differ
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    config = read_json(path)
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    if config.get("tokenizer_class") == "TokenizersBackend":  # a name that transformers 4.57 does not know
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(path, config)


def _build_from_bin(folder: Path, shards: list[Path], out: Path) -> str:
    from safetensors.torch import save_file

    require_disk(out, sum(shard.stat().st_size for shard in shards), f"rewriting {shards[0].name}")
    tied = _tied_names(folder)
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, start=1):
        single = len(shards) == 1
        name = SINGLE_NAME if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = _unshare(_load_bin(shard), tied)
        save_file(tensors, out / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        _write_json(out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for file in folder.iterdir():
        if file.is_file() and file.suffix not in _WEIGHT_SUFFIXES and file.name != BIN_INDEX_NAME:
            shutil.copy(file, out / file.name)
    return f"{shards[0].name} weights were rewritten as safetensors"


def _load_bin(shard: Path) -> dict[str, "Tensor"]:
    from zipfile import is_zipfile

    import torch

    try:
        state = torch.load(shard, map_location="cpu", weights_only=True, mmap=is_zipfile(shard))
    except Exception as error:
        raise CskvError(f"{shard} is damaged or holds more than weights", _TAKE_SAFETENSORS) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CskvError(f"{shard} is not a plain dictionary of tensors", _TAKE_SAFETENSORS)
    return state


def _tied_names(folder: Path) -> set[str]:
    """Parameters that the model takes from another one, such as an lm_head tied to the embeddings."""
    from transformers import AutoConfig

    from cskv_cli.checkpoint.classes import empty_base

    return set(empty_base(AutoConfig.from_pretrained(folder)).all_tied_weights_keys)


def _unshare(state: dict[str, "Tensor"], tied: set[str]) -> dict[str, "Tensor"]:
    """The tensors of one shard without aliases, which safetensors refuses: tied names go, others are copied."""
    owners = Counter(tensor.untyped_storage().data_ptr() for tensor in state.values())
    kept = {}
    for name, tensor in state.items():
        shared = owners[tensor.untyped_storage().data_ptr()] > 1
        if shared and name in tied:
            continue
        kept[name] = tensor.contiguous().clone() if shared else tensor.contiguous()
    return kept


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _flush(folder: Path) -> None:
    """Bring the folder's files to the disk, so that a rename after a crash never shows half of them."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
