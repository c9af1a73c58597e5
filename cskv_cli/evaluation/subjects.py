"""The models to score: exports and base models, and the methods that are scored on them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cskv_cli.checkpoint.base import resolve_base
from cskv_cli.checkpoint.load import find_checkpoint, load_base, load_checkpoint
from cskv_cli.devices import pick_device
from cskv_cli.errors import CskvError
from cskv_cli.eval_config import EvalConfig
from cskv_cli.evaluation import methods as make
from cskv_cli.evaluation.baselines.asvd import asvd_model
from cskv_cli.evaluation.methods import Method

_FACTORS = ("k_down", "k_up", "v_down", "v_up")


@dataclass(frozen=True)
class Subject:
    """A model to score.

    Attributes:
        name: as the user gave it.
        compressed: whether it is an export of cskv, which has a cache of its own.
    """

    name: str
    folder: Path
    compressed: bool


def find_subject(name: str, methods: Sequence[str], work_dir: Path, revision: str | None = None) -> Subject:
    """An export, or a base model where only baselines are scored.

    Args:
        work_dir: where GGUF files and .bin weights are converted.
        revision: branch, tag or commit of a Hub model.

    Raises:
        CskvError: there is no such model, or it has no CSKV cache and one is asked for.
    """
    path = Path(name).expanduser()
    local = path / "config.json"
    if "cskv" in methods or (local.is_file() and "cskv" in json.loads(local.read_text())):
        return Subject(name, _checkpoint(name, path, revision), True)
    if not path.exists() and _is_export(name, revision):
        return Subject(name, find_checkpoint(name, revision), True)
    return Subject(name, resolve_base(name, revision=revision, work_dir=work_dir).folder, False)


def _checkpoint(name: str, path: Path, revision: str | None) -> Path:
    hint = "run: cskv compress MODEL, or score baselines on it: --method full"
    if path.is_file():
        raise CskvError(f"{name} is not a CSKV checkpoint but a file", hint)
    try:
        return find_checkpoint(name, revision)
    except CskvError as error:
        if "not a CSKV checkpoint" in error.message:
            raise CskvError(error.message, hint) from error
        raise


def _is_export(name: str, revision: str | None) -> bool:
    """Whether a Hub model is an export; what cannot be told is left to the resolver of base models, which says why."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return "cskv" in json.loads(Path(hf_hub_download(name, "config.json", revision=revision)).read_text())
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError):
        return False


def load_methods(
    subjects: Sequence[Subject], names: Sequence[str], config: EvalConfig, calibrated: Path | None
) -> list[Method]:
    """The full cache, then the methods of these names in their order; all share one copy of the base weights.

    "cskv" is that of each export; baselines are scored on the first subject.

    Args:
        calibrated: folder of the calibrate stage, for asvd.

    Raises:
        CskvError: a model cannot be loaded, or its base is another one than that of the first.
    """
    device = pick_device(config.device)
    first = _load(subjects[0], device, config.dtype)
    source = subjects[0].name
    loaded = [replace(make.full(first), source=source)]
    for name in names:
        if name == "cskv":
            for subject in subjects:
                model = first if subject is subjects[0] else _load(subject, device, config.dtype)
                _share_base(model, first, subject.name, source)
                loaded.append(replace(make.cskv(model), source=subject.name))
        elif name == "kivi":
            loaded += [replace(make.kivi(first, bits), source=source) for bits in config.bits]
        elif name != "full":
            loaded += [_by_ratio(name, first, subjects[0], ratio, config, calibrated) for ratio in config.ratio]
    return loaded


def _by_ratio(
    name: str, model: PreTrainedModel, subject: Subject, ratio: float, config: EvalConfig, calibrated: Path | None
) -> Method:
    if name != "asvd":
        return replace(make.by_ratio(name, model, ratio), source=subject.name)
    factored = asvd_model(subject.folder, calibrated, ratio, config.dtype).to(model.device)
    _share_base(factored, model, subject.name, subject.name)
    return replace(make.asvd(factored, ratio), source=subject.name)


def _load(subject: Subject, device: str, dtype: str) -> PreTrainedModel:
    return (load_checkpoint if subject.compressed else load_base)(subject.folder, device, dtype)


@torch.no_grad()
def _share_base(model: PreTrainedModel, first: PreTrainedModel, name: str, first_name: str) -> None:
    """Let `model` use the base weights of `first` instead of its own copy, once they are seen to be the same."""
    theirs = dict(first.named_parameters())
    for key, parameter in model.named_parameters():
        if key.split(".")[-2] in _FACTORS:
            continue
        if key not in theirs or not torch.equal(parameter, theirs[key]):
            raise CskvError(f"{name} and {first_name} have different base weights ({key})", "score them one by one")
        parameter.data = theirs[key].data
