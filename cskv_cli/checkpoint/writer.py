"""Writing an exported checkpoint: the base's own files, one more shard with the factors, and the modeling files."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cskv_cli import factors, modeling
from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.checkpoint.classes import cskv_class, reads_images
from cskv_cli.checkpoint.convert import add_legacy_keys
from cskv_cli.checkpoint.layers import in_memory, kv_projections, load_by_layer
from cskv_cli.checkpoint.shards import write_shards
from cskv_cli.checkpoint.sharing import is_fixed
from cskv_cli.checkpoint.weights import INDEX_NAME
from cskv_cli.errors import CskvError
from cskv_cli.layout import Layout
from cskv_cli.modeling.cskv_structure import attentions, key_value_rows
from cskv_cli.progress import Progress
from cskv_cli.run import write_json

ENTRY = "modeling_cskv"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".ot"}
_REPLACED = {"config.json", "README.md", INDEX_NAME, "pytorch_model.bin.index.json", "tf_model.h5.index.json"}


def modeling_files() -> list[Path]:
    """The files of `cskv_cli/modeling` that travel with a checkpoint."""
    return sorted(p for p in Path(modeling.__file__).parent.glob("*.py") if p.name != "__init__.py")


def write_checkpoint(
    folder: Path,
    base: BaseModel,
    layout: Layout,
    factors_folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    offload: str,
    progress: Progress,
    *,
    copy: bool = False,
) -> None:
    """Fill `folder` with everything but the model card.

    Args:
        dtype: precision of the exported weights; the base's shards are taken over byte for byte if it is theirs.
        shard_bytes: largest shard; larger ones of the base are cut up.
        offload: an empty folder to work in.
        copy: share no file with the base (see `sharing`).
    """
    config = config_json(base, layout, dtype)
    write_json(folder / "config.json", config)
    _copy_extras(base.folder, folder)
    for path in modeling_files():
        shutil.copyfile(path, folder / path.name)
    tensors = _factor_tensors(base, layout, factors_folder, dtype, offload)
    conversion = None if str(dtype).removeprefix("torch.") == base.dtype else dtype
    write_shards(folder, base.shards, tensors, conversion, shard_bytes, progress, fixed=is_fixed(base), copy=copy)


def config_json(base: BaseModel, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """The base's own config.json with the CSKV block, and the class to load with `trust_remote_code`.

    Keys that only newer versions of transformers read get their older twins beside them.
    `transformers serve` (5.24) takes remote code only from the entry for AutoModelForDecision.
    """
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(base.folder)
    entry = f"{ENTRY}.{cskv_class(model).__name__}"
    config = add_legacy_keys(base.config)
    name = str(dtype).removeprefix("torch.")
    for key in ("torch_dtype", "dtype"):
        if key in config:
            config[key] = name
    if not {"torch_dtype", "dtype"} & config.keys():
        config["torch_dtype"] = name
    auto_map = {"AutoModelForCausalLM": entry, "AutoModelForDecision": entry}
    if reads_images(model):
        auto_map["AutoModelForImageTextToText"] = entry
    return config | {"auto_map": auto_map, "cskv": layout.model_dump(mode="json")}


def _copy_extras(source: Path, folder: Path) -> None:
    for path in extra_files(source):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def extra_files(source: Path) -> list[Path]:
    """Tokenizer, chat templates, generation config, licence: what is neither weights nor replaced."""
    kept = [
        path
        for path in sorted(source.iterdir())
        if path.suffix not in _WEIGHTS and path.name not in _REPLACED and not path.name.startswith(".")
    ]
    return [path for path in kept if path.is_file()] + sorted((source / "additional_chat_templates").glob("*"))


def _factor_tensors(
    base: BaseModel, layout: Layout, factors_folder: Path, dtype: torch.dtype, offload: str
) -> dict[str, torch.Tensor]:
    """The factors beside the projections of the base, with the biases of those."""
    model = load_by_layer(base.folder, offload, dtype=torch.float32, device="cpu")
    tensors, modules = {}, attentions(model)
    for i in layout.layers:
        loaded = factors.load_layer(factors_folder, i)
        with in_memory(modules[i]) as attention:
            biases = {name: bias for name, (_, bias) in kv_projections(attention).items()}
            path = stored_path(model, attention, base.weight_map)
        for name in "kv":
            made = {"down.weight": loaded[f"{name}.a"].T, "up.weight": loaded[f"{name}.b"].T}
            if (bias := loaded.get(f"{name}.bias", biases[name])) is not None:
                made["up.bias"] = bias
            tensors |= {f"{path}.{name}_{part}": tensor.to(dtype).contiguous() for part, tensor in made.items()}
    return tensors


def stored_path(model: nn.Module, attention: nn.Module, stored: Iterable[str]) -> str:
    """The path of an attention layer in the names of a checkpoint, which may differ from that in the model.

    GPT-2 on the Hub stores `h.0.attn` for `transformer.h.0.attn`, Llava `language_model.model` for
    `model.language_model`; transformers renames ours along with the others, if it is named like them.

    Raises:
        CskvError: it cannot be told.
    """
    path = next(name for name, module in model.named_modules() if module is attention).split(".")
    linear, _ = key_value_rows(attention)["k"]
    leaf = f".{next(name for name, module in attention.named_children() if module is linear)}.weight"

    def likeness(name: str) -> tuple[int, int]:
        """Steps from the end that are the same, and further steps that both have."""
        parts = name.split(".")
        same = 0
        while same < min(len(parts), len(path)) and parts[-1 - same] == path[-1 - same]:
            same += 1
        return same, len(set(parts[: len(parts) - same]) & set(path[: len(path) - same]))

    ranked = sorted((name.removesuffix(leaf) for name in stored if name.endswith(leaf)), key=likeness)
    if not ranked or likeness(ranked[-1])[0] < 2 or ranked[:-1] and likeness(ranked[-2]) == likeness(ranked[-1]):
        raise CskvError(f"the checkpoint has no tensor for {'.'.join(path)}{leaf}", "save it anew with save_pretrained")
    return ranked[-1]
