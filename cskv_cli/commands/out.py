"""`--out`: a copy of the finished checkpoint, outside the run directory."""

import shutil
from pathlib import Path

from cskv_cli.errors import CskvError
from cskv_cli.run import MANIFEST, Run, sha256


class Out:
    """A folder to copy the export to, checked before the long work.

    Raises:
        CskvError: it overlaps the run directory, holds something else than this run's last export, or cannot be made.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self.path, self.run = path.resolve(), run
        here = run.path.resolve()
        if self.path == here or here in self.path.parents or self.path in here.parents:
            raise CskvError(f"{path} and the run directory {run.path} lie within one another", "name another --out")
        self._replaceable = self._is_export()
        if self.path.exists() and not self._replaceable and not self._is_empty():
            raise CskvError(f"{path} exists and is not an empty folder", "name another one with --out")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CskvError(f"cannot make {self.path.parent}: {error.strerror}", "name another --out") from error

    def deliver(self) -> None:
        """Copy the export; the copy is there whole or not at all (in a folder that was there, with config.json)."""
        if self._is_export():
            return
        from cskv_cli.checkpoint.sharing import bring

        temporary = self.path.with_name(f".{self.path.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            shutil.copytree(
                self.run.folder("export"),
                temporary,
                ignore=shutil.ignore_patterns(MANIFEST),
                copy_function=bring,
            )
            if self.path.exists():
                self._fill(temporary)
            else:
                temporary.rename(self.path)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            hint = f"the checkpoint is in {self.run.folder('export')}"
            raise CskvError(f"cannot copy to {self.path}: {error}", hint) from error

    def _fill(self, source: Path) -> None:
        """Move the files into the folder that is there: it may be the shell's own. config.json comes last."""
        for old in self.path.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        for path in sorted(source.iterdir(), key=lambda path: path.name == "config.json"):
            path.rename(self.path / path.name)
        source.rmdir()

    def _is_empty(self) -> bool:
        return self.path.is_dir() and not any(self.path.iterdir())

    def _is_export(self) -> bool:
        """Whether the folder holds what this run last exported, and nothing else."""
        manifest = self.run.manifest("export")
        if manifest is None or not self.path.is_dir():
            return False
        names = {str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file()}
        return names == manifest.files.keys() and all(
            sha256(self.path / name) == entry["sha256"] for name, entry in manifest.files.items()
        )
