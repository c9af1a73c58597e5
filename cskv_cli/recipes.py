"""Recipes: settings of a whole compression in one YAML file."""

from pathlib import Path
from typing import Any

import yaml

from cskv_cli.config import CalibrateConfig, ExportConfig, FinetuneConfig, InitConfig, QuantizeConfig, SearchConfig
from cskv_cli.errors import CskvError

STAGE_CONFIGS = {
    "calibrate": CalibrateConfig,
    "search": SearchConfig,
    "init": InitConfig,
    "finetune": FinetuneConfig,
    "quantize": QuantizeConfig,
    "export": ExportConfig,
}
_NAMES = ("model", "revision", "push")
_HERE = Path(__file__).parent


def folder() -> Path:
    """Where the recipes are: in the package once installed, at the top of the repository in a checkout."""
    installed = _HERE / "_recipes"
    return installed if installed.is_dir() else _HERE.parent / "recipes"


def names() -> list[str]:
    """Recipes that come with cskv."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def find(name: str) -> Path:
    """A recipe file, or one of ours by its name.

    Raises:
        CskvError: there is none.
    """
    path = Path(name)
    if path.is_file():
        return path
    ours = folder() / f"{path.name.removesuffix('.yaml')}.yaml"
    if not ours.is_file():
        raise CskvError(f"no recipe {name}", f"there are: {', '.join(names())}")
    return ours


def read(path: Path) -> dict[str, Any]:
    """`{"model": ..., "revision": ..., "push": REPO, stage: {setting: value}}`; every key is checked.

    Raises:
        CskvError: not YAML, or a key or value that no stage has.
    """
    from cskv_cli.pipeline import checked

    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CskvError(f"{path} is not YAML: {' '.join(str(error).split())}", "") from error
    if not isinstance(content, dict):
        raise CskvError(f"{path} holds no settings", "see: cskv recipes show smollm2-135m")
    for key, value in content.items():
        if key in _NAMES:
            if not isinstance(value, str):
                raise CskvError(f"{path}: {key} is {value!r}, not a name", f"write: {key}: NAME")
            continue
        if key in ("eval", "baselines"):
            raise CskvError(f"{path} is a recipe of a sweep", f"run: cskv sweep {path.stem}")
        if key not in STAGE_CONFIGS:
            allowed = ", ".join([*_NAMES, *STAGE_CONFIGS])
            raise CskvError(f"{path}: there is no stage {key!r}", f"keys are: {allowed}")
        checked(STAGE_CONFIGS[key], value or {}, f"{path}: {key}")
    return content
