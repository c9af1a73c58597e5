"""Loading an exported checkpoint with this package's own modeling code."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from cskv_cli.checkpoint.classes import base_class, cskv_class
from cskv_cli.checkpoint.download import download, looks_like_path
from cskv_cli.checkpoint.layers import compressible_layers
from cskv_cli.checkpoint.weights import read_headers, read_json
from cskv_cli.errors import CskvError
from cskv_cli.layout import Layout, parse_layout
from cskv_cli.memory import Shape
from cskv_cli.modeling.cskv_structure import attentions, key_value_rows, repeats, width_of_head


def find_checkpoint(name: str, revision: str | None = None) -> Path:
    """A folder, or the Hub id of an exported checkpoint, as a local folder.

    Raises:
        CskvError: there is none, or it is not an export of cskv.
    """
    folder = Path(name).expanduser()
    if folder.exists() or looks_like_path(name):
        if revision is not None:
            raise CskvError(f"{name} is a local path: --revision {revision} needs a Hub id", "drop --revision")
        if not (folder / "config.json").exists():
            raise CskvError(f"no checkpoint in {name}: there is no config.json", "run: cskv export")
    else:
        folder = download(name, revision, ["config.json"])
        _check_export(folder, name)  # before its weights are fetched
        folder = download(name, folder.name, None)
    _check_export(folder, name)
    return folder


def _check_export(folder: Path, name: str) -> None:
    path = folder / "config.json"
    if not path.exists() or "cskv" not in read_json(path):
        raise CskvError(
            f"{name} is not a CSKV checkpoint: its config.json has no cskv block", "run: cskv compress MODEL"
        )


def load_checkpoint(folder: Path, device: str, dtype: torch.dtype | str) -> PreTrainedModel:
    """The CSKV model in `folder`, ready to score.

    Raises:
        CskvError: a shard is missing or damaged, or factors are missing from its weights.
    """
    read_headers(folder)
    config = AutoConfig.from_pretrained(folder)
    disable_progress_bar()
    model, report = cskv_class(config).from_pretrained(folder, dtype=dtype, output_loading_info=True)
    if report["missing_keys"]:
        raise CskvError(f"{folder} lacks the weights {sorted(report['missing_keys'])[:3]}", "export it again")
    return model.to(device).eval()


def load_unfilled(folder: Path, layout: Layout, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """The CSKV model of a base, on the CPU, its factors yet to be filled in.

    Args:
        attention: transformers' name of the function to use; by default it chooses.
    """
    config = AutoConfig.from_pretrained(folder)
    config.cskv = layout.model_dump(mode="json")
    disable_progress_bar()
    model = cskv_class(config).from_pretrained(folder, config=config, dtype=dtype, attn_implementation=attention)
    return model.eval()


def load_base(folder: Path, device: str, dtype: torch.dtype | str) -> PreTrainedModel:
    """The base model in `folder`, ready to score."""
    disable_progress_bar()
    return base_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype).to(device).eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`.

    Raises:
        CskvError: there is none that works.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # None would ask
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(": ")
        raise CskvError(
            f"{folder} has no usable tokenizer: {reason}",
            "put the files of the model's tokenizer there (tokenizer.json or tokenizer.model, tokenizer_config.json)",
        ) from error


def layout_of(model: PreTrainedModel) -> Layout:
    """The layout in a checkpoint's config."""
    return parse_layout(model.config.cskv, Path(model.config.name_or_path) / "config.json")


def shape_of(model: PreTrainedModel) -> Shape:
    """What the base caches per token and layer."""
    attention = attentions(model)[compressible_layers(model.config)[0]]
    channels, width = len(key_value_rows(attention)["k"][1]), width_of_head(attention)
    return Shape(channels, model.dtype.itemsize, channels // width, repeats(attention))
