"""The run directory: one folder per stage, written whole or not at all, with a manifest that says what it came from."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from cskv_cli import __version__
from cskv_cli.config import StageConfig
from cskv_cli.errors import CskvError
from cskv_cli.launch import is_main

MANIFEST = "manifest.json"
_OFFLOAD = ".offload-"
STAGES = ("base", "calibrate", "analyze", "search", "init", "finetune", "quantize", "export")
Config = TypeVar("Config", bound=StageConfig)


@dataclass(frozen=True)
class Manifest:
    """What a finished stage holds.

    Attributes:
        config: the stage's settings.
        inputs: digest of each artifact it was made from, by stage name (or `data:SOURCE`).
        files: size in bytes and SHA-256 of each file, by name.
        report: what the stage had to say, for `--json` and `status`.
    """

    stage: str
    config: dict[str, Any]
    inputs: dict[str, str]
    files: dict[str, dict[str, Any]]
    report: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Identity of the artifact: its settings, inputs and content; not when or with what versions it was made."""
        identity = {key: getattr(self, key) for key in ("stage", "config", "inputs", "files")}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


class Run:
    """A run directory.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, stage: str) -> Path:
        """Where a stage's files are."""
        return self.path / stage

    def partial(self, stage: str, identity: dict[str, Any]) -> Path:
        """Where an unfinished stage keeps its files; other settings or inputs use another folder."""
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        return self.path / f".{stage}-{digest}"

    def manifest(self, stage: str) -> Manifest | None:
        """The manifest of a finished stage; None where there is none.

        Raises:
            CskvError: it is not readable as one.
        """
        path = self.folder(stage) / MANIFEST
        if not path.exists():
            return None
        try:
            return Manifest(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            verb = "compress MODEL" if stage == "base" else stage
            hint = f"delete {path.parent} and run: cskv {verb} --run {self.path}"
            raise CskvError(f"{path} is damaged: {error}", hint) from error

    def stale(self, stage: str) -> str | None:
        """Why a finished stage no longer holds; None where it does."""
        manifest = self.manifest(stage)
        for name, entry in manifest.files.items():
            path = self.folder(stage) / name
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        for name, digest in manifest.inputs.items():
            if name not in STAGES:
                continue
            current = self.manifest(name)
            if current is None:
                return f"{name} is gone"
            if current.digest != digest:
                return f"{name} has changed since"
            if reason := self.stale(name):
                return f"{name} is stale ({reason})"
        return None

    def require(self, stage: str) -> Manifest:
        """A finished stage that still holds, every byte of it checked.

        Raises:
            CskvError: it is missing, stale or damaged; the hint is the command to run next.
        """
        manifest, folder = self.manifest(stage), self.folder(stage)
        if manifest is None:
            raise CskvError(f"{self.path} has no {stage} yet", f"run: cskv {stage} --run {self.path}")
        if reason := self.stale(stage):
            raise CskvError(f"{folder} is stale: {reason}", f"run: cskv {stage} --run {self.path}")
        for name, entry in manifest.files.items():
            if sha256(folder / name) != entry["sha256"]:
                raise CskvError(
                    f"{folder / name} is damaged: its SHA-256 is not the one in the manifest",
                    f"run: cskv {stage} --run {self.path}",
                )
        return manifest

    def reusable(self, stage: str, config: StageConfig, inputs: dict[str, str]) -> Manifest | None:
        """The finished stage, if it was made with this config from these inputs and is whole."""
        manifest = self.manifest(stage)
        if manifest is None or manifest.config != _plain(config) or manifest.inputs != inputs or self.stale(stage):
            return None
        return manifest

    def remembered(self, stage: str, given: dict[str, Any], kind: type[Config]) -> Config:
        """A stage's config: what was given, over the defaults; with nothing given, as it was last made."""
        manifest = self.manifest(stage)
        if given or manifest is None:
            return kind(**given)
        fields = kind.model_fields  # a default counts as not given: a rank beside the default ratio is no contradiction
        chosen = {k: v for k, v in manifest.config.items() if k not in fields or v != fields[k].default}
        try:
            return kind(**chosen)
        except ValidationError as error:
            path = self.folder(stage)
            raise CskvError(
                f"{path} was made by another version of cskv, with settings that this one does not have",
                f"give the settings as flags, or delete {path}",
            ) from error

    def fallen_back(self, stage: str, given: dict[str, Any], config: StageConfig) -> dict[str, tuple[Any, Any]]:
        """Settings that were not given and are at their defaults, though the stage was made otherwise: (was, is)."""
        manifest = self.manifest(stage)
        if manifest is None or not given:
            return {}
        now = _plain(config)
        changed = {name: (was, now.get(name)) for name, was in manifest.config.items() if was != now.get(name)}
        return {name: pair for name, pair in changed.items() if name not in given}

    def commit(
        self, stage: str, partial: Path, config: StageConfig, inputs: dict[str, str], report: dict[str, Any]
    ) -> Manifest:
        """Turn a folder of finished files into the stage: manifest last, all on disk, then one rename.

        Of several processes the first does so; the others get the manifest that it would write, and are not waited for.
        """
        if not is_main():
            return Manifest(stage, _plain(config), inputs, {}, report)
        for left in partial.rglob(".*.tmp"):  # of a write that was cut short
            left.unlink()
        files = {}
        for path in sorted(p for p in partial.rglob("*") if p.is_file() and p.name != MANIFEST):
            files[str(path.relative_to(partial))] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
            _sync(path)
        manifest = Manifest(stage, _plain(config), inputs, files, report, versions())
        write_json(partial / MANIFEST, asdict(manifest))
        _sync(partial)
        final, old = self.folder(stage), self.path / f".{stage}-old"
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        _sync(self.path)
        for left in self.path.glob(f".{stage}-*"):  # the old one, and what was begun with other settings
            shutil.rmtree(left, ignore_errors=True)
        return manifest

    def discard(self, stage: str) -> None:
        """Remove a stage."""
        if is_main():
            shutil.rmtree(self.folder(stage), ignore_errors=True)

    def offload(self) -> tempfile.TemporaryDirectory:
        """An empty folder to work in, removed afterwards."""
        return tempfile.TemporaryDirectory(dir=self.path, prefix=_OFFLOAD)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run directory for this process.

        Of several processes launched together the first does so for all.

        Raises:
            CskvError: the folder cannot be written, or another process holds it.
        """
        if not is_main():
            yield
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = (self.path / ".lock").open("a+")
        except OSError as error:
            raise CskvError(f"cannot write to {self.path}: {error.strerror}", "name another with --run DIR") from error
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                raise CskvError(
                    f"{self.path} is in use by process {handle.read().strip() or '?'}",
                    "wait for it, or name another run directory with --run DIR",
                ) from None
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            for left in self.path.glob(f"{_OFFLOAD}*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            yield


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically: a reader finds the old or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    _sync(temporary)
    temporary.replace(path)


def versions() -> dict[str, str]:
    """Versions of what determines the numbers."""
    from importlib.metadata import version

    return {"cskv": __version__} | {name: version(name) for name in ("torch", "transformers", "safetensors")}


def _plain(config: StageConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
