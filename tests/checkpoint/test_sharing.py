"""How an export takes over the base's shards: as clones, hard links or copies, and never so that it could change."""

import fcntl
import os
import shutil

import pytest

from cskv_cli.checkpoint.sharing import bring
from tests.cli import compress, cskv
from tests.hub import local_hub

SHARD = "model-00001-of-00002.safetensors"
RANKS = "--rank-k", 4, "--rank-v", 4


@pytest.fixture
def files(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"weights")
    return source, target


def refuse(*arguments):
    raise OSError(95, "Operation not supported")


def without_clones(monkeypatch):
    monkeypatch.setattr(fcntl, "ioctl", refuse)


@pytest.mark.parametrize("fixed, copy, linked", [(True, False, True), (False, False, False), (True, True, False)])
def test_a_hard_link_only_to_what_is_never_written_in_place(files, monkeypatch, fixed, copy, linked):
    without_clones(monkeypatch)
    source, target = files
    bring(source, target, fixed=fixed, copy=copy)
    assert target.read_bytes() == b"weights" and source.samefile(target) == linked


def test_a_clone_where_the_file_system_has_them(files, monkeypatch):
    def clone(target, request, source):
        assert request == 0x40049409 and target.name.endswith("target")
        os.sendfile(target.fileno(), source, 0, 99)

    monkeypatch.setattr(fcntl, "ioctl", clone)
    source, target = files
    bring(source, target, fixed=True)
    assert target.read_bytes() == b"weights" and not source.samefile(target)


def test_a_symbolic_link_is_followed_and_another_file_system_gets_a_copy(files, tmp_path, monkeypatch):
    without_clones(monkeypatch)
    source, target = files
    (tmp_path / "link").symlink_to(source)
    bring(tmp_path / "link", target, fixed=True)
    assert not target.is_symlink() and source.samefile(target)
    target.unlink()
    monkeypatch.setattr(os, "link", refuse)
    bring(source, target, fixed=True)
    assert target.read_bytes() == b"weights" and not source.samefile(target)


def test_a_folder_that_is_saved_over_does_not_change_its_export(tiny):
    compress(tiny, *RANKS)
    shard = tiny / "run" / "export" / SHARD
    before = shard.read_bytes()
    with (tiny / "base" / "model.safetensors").open("r+b") as file:  # in place
        file.seek(-8, os.SEEK_END)
        file.write(b"\1" * 8)
    assert shard.read_bytes() == before


def test_a_model_of_the_hub_shares_its_room_unless_told_to_copy(tiny, tmp_path, monkeypatch):
    with local_hub(monkeypatch, tmp_path) as hub:
        hub.add("org/base", tiny / "base")
        shutil.rmtree(tiny / "base")
        data = "--data", tiny / "text.txt", "--samples", 6, "--seq-len", 48
        plan = cskv("compress", "org/base", "--run", tiny / "run", *data, *RANKS, "--dry-run")
        cskv("compress", "org/base", "--run", tiny / "run", *data, *RANKS)
        shard = tiny / "run" / "export" / SHARD
        mode = shard.stat().st_mode
        if shard.stat().st_nlink > 1:  # else it is a clone
            copied = cskv("compress", "--run", tiny / "run", "--copy", "--dry-run")
            assert copied["disk_bytes"] - plan["disk_bytes"] == shard.stat().st_size
        cskv("export", "--run", tiny / "run", "--copy")
        assert shard.stat().st_nlink == 1 and shard.stat().st_mode == mode
        assert "copy" not in cskv("export", "--run", tiny / "run", "--copy", "--card")["card"]
