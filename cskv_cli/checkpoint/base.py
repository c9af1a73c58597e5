"""The model to compress: a Hub id, a local folder or a GGUF file, resolved to one safetensors folder."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from cskv_cli.checkpoint.convert import BIN_INDEX_NAME, BIN_NAME, convert_bin, convert_gguf
from cskv_cli.checkpoint.download import WHAT_TO_PASS, download, looks_like_path
from cskv_cli.checkpoint.headers import fetch_headers, has_safetensors
from cskv_cli.checkpoint.weights import (
    FLOAT_TYPES,
    INDEX_NAME,
    SINGLE_NAME,
    TensorHeader,
    file_hashes,
    read_headers,
    read_json,
    shard_names,
)
from cskv_cli.errors import CskvError

Kind = Literal["hub", "folder", "gguf"]

_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "README.md", "LICENSE*"]
_FOREIGN_WEIGHTS = ["tf_model.h5", "flax_model.msgpack", "model.ckpt.index", "rust_model.ot"]
_CAUSAL_NAMES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class BaseModel:
    """A base model on disk: `folder` holds config.json and safetensors shards, complete and readable.

    `source` is what the user typed, `revision` the commit of a Hub model. `converted` says that the folder was
    made here, from a GGUF file or .bin shards; `notes` are lines the user should see.
    """

    source: str
    kind: Kind
    revision: str | None
    folder: Path
    converted: bool = False
    notes: tuple[str, ...] = ()

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as it was read."""
        return read_json(self.folder / "config.json")

    @cached_property
    def headers(self) -> dict[str, dict[str, TensorHeader]]:
        """Shard file name -> tensor name -> header."""
        return read_headers(self.folder)

    @property
    def shards(self) -> list[Path]:
        """The safetensors files, in name order."""
        return [self.folder / name for name in self.headers]

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> shard file name."""
        return {tensor: shard for shard, tensors in self.headers.items() for tensor in tensors}

    @property
    def dtype(self) -> str:
        """The dtype of most weight bytes, by its torch name: `bfloat16`."""
        sizes: Counter[str] = Counter()
        for tensor in self._tensors():
            if tensor.dtype in FLOAT_TYPES:
                sizes[FLOAT_TYPES[tensor.dtype]] += tensor.end - tensor.start
        return sizes.most_common(1)[0][0]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.end - tensor.start for tensor in self._tensors())

    def fingerprint(self, cache: Path) -> dict[str, str]:
        """File name -> sha256 of config.json, the shards and their index; `cache` as in `file_hashes`."""
        files = [self.folder / "config.json", *self.shards]
        if list(self.headers) != [SINGLE_NAME]:
            files.append(self.folder / INDEX_NAME)
        return file_hashes(files, cache)

    def _tensors(self) -> list[TensorHeader]:
        return [tensor for tensors in self.headers.values() for tensor in tensors.values()]


def resolve_base(
    source: str, *, revision: str | None, work_dir: Path, trust_code: bool = False, dry: bool = False
) -> BaseModel:
    """Find the base model that `source` names; an existing local path wins over a Hub id.

    A Hub model is downloaded into the usual cache. GGUF files and .bin weights are converted into
    `work_dir/<model>/`, which is reused for as long as the source stays the same. A model that brings its own code is
    taken with `trust_code` alone, if that code is what transformers has too. With `dry`, safetensors on the Hub are not
    downloaded: the base is then a folder in `work_dir` whose shards have headers only.

    Raises CskvError, before any long work, for everything that cannot be compressed.
    """
    path = Path(source).expanduser()
    if path.exists():
        if revision:
            raise CskvError(f"{source} is a local path: --revision {revision} needs a Hub id", "drop --revision")
        base = _from_path(source, path, work_dir, trust_code)
    elif looks_like_path(source):
        raise CskvError(f"{source}: no such file or folder", WHAT_TO_PASS)
    else:
        base = _from_hub(source, revision, work_dir, trust_code, dry)
    if not base.headers:
        raise CskvError(f"{base.folder} has no weights", WHAT_TO_PASS)
    return base


def _from_path(source: str, path: Path, work_dir: Path, trust_code: bool) -> BaseModel:
    if path.is_file():
        return _from_gguf(source, path, work_dir)
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").is_file():
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise CskvError(f"{source} holds {len(files)} GGUF files: {names}", f"pass one: {files[0]}")
        return _from_gguf(source, files[0], work_dir)
    _check_config(path, source, trust_code)
    return _with_safetensors(source, "folder", None, path, work_dir)


def _from_gguf(source: str, file: Path, work_dir: Path) -> BaseModel:
    folder, note = convert_gguf(file, work_dir)
    _check_config(folder, source)
    return BaseModel(source, "gguf", None, folder, converted=True, notes=(note,))


def _from_hub(source: str, revision: str | None, work_dir: Path, trust_code: bool, dry: bool) -> BaseModel:
    """Small files first, so that a model which cannot be compressed is refused before its weights are fetched."""
    from cskv_cli.checkpoint.probe import check_supported

    folder = download(source, revision, [*_SMALL_FILES, "*.py"] if trust_code else _SMALL_FILES)
    _check_config(folder, source, trust_code)
    check_supported(folder)
    commit = folder.name
    if dry and has_safetensors(source, commit, folder):
        return BaseModel(source, "hub", commit, fetch_headers(source, commit, folder, work_dir / f"{commit}-headers"))
    for single, index in ((SINGLE_NAME, INDEX_NAME), (BIN_NAME, BIN_INDEX_NAME)):
        download(source, commit, ["config.json", *(shard_names(folder, single, index) or [single])])
        if shard_names(folder, single, index):
            break
    return _with_safetensors(source, "hub", commit, folder, work_dir)


def _with_safetensors(source: str, kind: Kind, revision: str | None, folder: Path, work_dir: Path) -> BaseModel:
    if shard_names(folder):
        return BaseModel(source, kind, revision, folder)
    if shard_names(folder, BIN_NAME, BIN_INDEX_NAME):
        name = source.split("/")[-1] if kind == "hub" else folder.resolve().name
        folder, note = convert_bin(folder, work_dir, name)
        return BaseModel(source, kind, revision, folder, converted=True, notes=(note,))
    foreign = [name for name in _FOREIGN_WEIGHTS if (folder / name).is_file()]
    if foreign:
        raise CskvError(f"{source} has only {foreign[0]}, no safetensors", "save it from PyTorch with save_pretrained")
    raise CskvError(f"{source} has no weights (no {SINGLE_NAME}, no {INDEX_NAME})", WHAT_TO_PASS)


def _check_config(folder: Path, source: str, trust_code: bool = False) -> None:
    """CskvError for a model that cannot be compressed, told from its small files alone."""
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            base = read_json(folder / "adapter_config.json").get("base_model_name_or_path", "its base model")
            hint = f"merge it into {base} first: peft's merge_and_unload(), then save_pretrained"
            raise CskvError(f"{source} is a PEFT adapter, not a model", hint)
        hint = f"{WHAT_TO_PASS} (from a GGUF repository, `hf download {source} FILE.gguf` it first)"
        raise CskvError(f"{source} is not a model: it has no config.json", hint)
    config = read_json(path)
    if "cskv" in config:
        base = config["cskv"].get("base_model") or "the model it was made from"
        raise CskvError(f"{source} is compressed by CSKV already", f"start from {base}")
    method = _quantization(folder, config)
    if method:
        raise CskvError(f"{source} is already quantized ({method})", "start from the unquantized model")
    if "auto_map" in config and not trust_code:
        hint = "read it, then pass --trust-remote-code; the model is taken if transformers has the same one"
        raise CskvError(f"{source} brings its own code (auto_map in config.json)", hint)
    _check_causal(config, source)
    if "auto_map" in config:
        from cskv_cli.checkpoint.remote import check_same_model

        check_same_model(folder, source)


def _quantization(folder: Path, config: dict[str, Any]) -> str | None:
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings:
        return settings.get("quant_method", "method not named")
    if "quantization" in config:
        return "MLX"
    older = {"quant_config.json": "AWQ", "quantize_config.json": "GPTQ"}
    return next((method for name, method in older.items() if (folder / name).is_file()), None)


def _check_causal(config: dict[str, Any], source: str) -> None:
    from cskv_cli.checkpoint.classes import GENERATING

    kind = config.get("model_type")
    if not kind:
        raise CskvError(f"{source}: config.json has no model_type", WHAT_TO_PASS)
    if config.get("is_encoder_decoder"):
        raise CskvError(f"{source} is an encoder-decoder model ({kind}), not a decoder alone", WHAT_TO_PASS)
    if kind not in GENERATING:
        raise CskvError(f"{source}: transformers has no causal language model of type {kind}", WHAT_TO_PASS)
    classes = config.get("architectures") or []
    if classes and not any(name == GENERATING[kind] or name.endswith(_CAUSAL_NAMES) for name in classes):
        raise CskvError(f"{source} is a {classes[0]}, not a causal language model", WHAT_TO_PASS)
