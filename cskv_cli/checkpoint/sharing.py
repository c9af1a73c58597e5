"""Bringing the base's files into an export without reading them: shared on disk where that is safe."""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cskv_cli.checkpoint.base import BaseModel

_CLONE = 0x40049409  # ioctl FICLONE (Linux: btrfs, XFS, bcachefs, NFS 4.2)


def bring(source: Path | str, target: Path | str, *, fixed: bool = False, copy: bool = False) -> None:
    """Make `target` hold what `source` holds.

    It is a clone where the file system has them: blocks are shared until one of the two is written to. Else it is a
    hard link, where nobody writes to the source in place; else a copy.

    Args:
        fixed: the source may be replaced or removed, but is never written to in place.
        copy: share nothing.
    """
    source, target = Path(source).resolve(), Path(target)  # a hard link to a symbolic link would be one itself
    shared = not copy and (_cloned(source, target) or (fixed and _linked(source, target)))
    if not shared:
        shutil.copyfile(source, target)


def is_fixed(base: "BaseModel") -> bool:
    """Whether the files of a base are never written in place: those in the Hub's cache, and those converted here.

    A folder of the user's may be saved over, and an export that shared its files would change with it.
    """
    return base.kind == "hub" or base.converted


def is_linked(base: "BaseModel", place: Path) -> bool:
    """Whether an export in `place` would take no room for the shards that it takes over as they are."""
    existing = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
    return is_fixed(base) and all(path.resolve().stat().st_dev == existing.stat().st_dev for path in base.shards)


def _cloned(source: Path, target: Path) -> bool:
    with source.open("rb") as read, target.open("wb") as write:
        try:
            fcntl.ioctl(write, _CLONE, read.fileno())
            return True
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
    target.unlink()
    return False


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        return False
    return True
