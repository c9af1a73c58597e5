"""What goes wrong with disks, files and clocks: refused by name, and gone on from to the same bytes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cskv_cli.stages import export as export_stage
from tests.cli import CALIBRATION, compress, cskv
from tests.commands.test_compress import digests
from tests.families import base_model, write_tiny
from tests.hub import local_hub

KILLED = Path(__file__).with_name("killed.py")
BITS = "--bits", 4, "--group", 8
STAGES = ["base", "calibrate", "analyze", "init", "quantize", "export"]


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer, text):
    """A folder as `tiny`, with every stage in `run`."""
    folder = tmp_path_factory.mktemp("made")
    write_tiny(folder, tokenizer, text)
    compress(folder, *BITS)
    cskv("analyze", "--run", folder / "run")
    return folder


@pytest.fixture
def run(made, tmp_path):
    """That run, for one test to harm."""
    return shutil.copytree(made / "run", tmp_path / "run")


@pytest.fixture
def disk(tmp_path):
    """A file system of 8 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def fill(disk, leave):
    """A file that takes all but `leave` bytes of a file system."""
    stat = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(bytes(max(stat.f_bavail * stat.f_frsize - leave, 0)))
    return filler


@pytest.mark.parametrize("leave", [4096, 40_000])
@pytest.mark.parametrize("stage", ["calibrate", "analyze", "init", "quantize", "export"])
def test_a_full_disk_leaves_no_stage_and_can_be_gone_on_from(made, disk, stage, leave):
    run = disk / "run"
    before = STAGES[: STAGES.index(stage)]
    for name in before:
        shutil.copytree(made / "run" / name, run / name)
    shutil.copyfile(made / "run" / ".hashes.json", run / ".hashes.json")
    flags = {"calibrate": ["--data", made / "text.txt", *CALIBRATION], "quantize": BITS}.get(stage, [])
    filler = fill(disk, leave)
    failure = cskv(stage, "--run", run, *flags, exit_code=1)
    assert re.search("disk is full|No space left|are free", failure["error"])
    assert "free some space" in failure["hint"] and not (run / stage).exists()
    filler.unlink()
    cskv(stage, "--run", run, *flags)
    for name in (*before, stage):
        ours, theirs = digests(run / name), digests(made / "run" / name)
        assert ours.keys() == theirs.keys()
        differing = {file for file in ours if ours[file] != theirs[file]}
        assert differing <= ({"report.json", "manifest.json"} if name == "analyze" else set())  # its last bits vary


def test_a_full_disk_is_said_at_once_and_before_any_work(made, disk):
    filler = fill(disk, 40_000)
    arguments = "compress", made / "base", "--run", disk / "run", "--data", made / "text.txt", *CALIBRATION, *BITS
    failure = cskv(*arguments, exit_code=1)
    assert "are free" in failure["error"] and not (disk / "run" / "calibrate").exists()
    filler.unlink()
    filler = fill(disk, 0)
    assert "disk is full" in cskv(*arguments, exit_code=1)["error"]
    filler.unlink()
    cskv(*arguments)
    assert digests(disk / "run" / "export") == digests(made / "run" / "export")


def test_a_full_disk_for_out_and_for_results_costs_no_checkpoint(made, run, disk):
    filler = fill(disk, 40_000)
    failure = cskv("compress", "--run", run, "--out", disk / "copy", exit_code=1)
    assert "cannot copy" in failure["error"] and not (disk / "copy").exists() and len(list(disk.iterdir())) == 1
    filler.unlink()
    shutil.copytree(run, disk / "run")
    fill(disk, 0)
    sizes = "--data", made / "text.txt", "--samples", 1, "--seq-len", 16
    assert cskv("eval", disk / "run" / "export", *sizes)["task"] == "perplexity"
    assert digests(run / "export") == digests(made / "run" / "export")


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
@pytest.mark.parametrize("name", ["quantize/layer-002.safetensors", "quantize/layout.json"])
def test_damage_is_refused_by_name(run, name, damage):
    harm(run / name, damage)
    shutil.rmtree(run / "export")
    failure = cskv("export", "--run", run, exit_code=1)
    assert Path(name).name in failure["error"] and failure["hint"] == f"run: cskv quantize --run {run}"
    assert not (run / "export").exists()


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json", "cskv_cache.py"])
def test_a_damaged_export_is_made_again_and_never_pushed(made, run, name, damage, monkeypatch, tmp_path):
    harm(run / "export" / name, damage)
    with local_hub(monkeypatch, tmp_path) as hub:
        cskv("export", "--run", run, "--push", "me/x")
        pushed = hub.files("me/x")
    whole = made / "run" / "export"
    assert all(
        pushed[path.name] == path.read_bytes() for path in whole.iterdir() if path.name in pushed.keys() - {"README.md"}
    )
    assert digests(run / "export") == digests(whole)


def harm(path, how):
    content = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(content[:-1])
    else:
        content[-3] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("other", ["base", "settings"])
def test_a_stage_of_another_run_is_refused(made, run, tmp_path, other):
    theirs = tmp_path / "theirs"
    shutil.copytree(made, theirs, ignore=shutil.ignore_patterns("run"))
    if other == "base":
        base_model("Llama", rope_theta=5000.0).save_pretrained(theirs / "base")
    text = "--data", theirs / "text.txt", "--samples", 5 if other == "settings" else 6, "--seq-len", 48
    cskv("compress", theirs / "base", "--run", theirs / "run", *text, *BITS)
    shutil.rmtree(run / "init")
    shutil.copytree(theirs / "run" / "init", run / "init")
    failure = cskv("quantize", "--run", run, *BITS, exit_code=1)
    assert "calibrate has changed" in failure["error"] and "cskv init" in failure["hint"]
    cskv("compress", "--run", run)
    assert digests(run / "export") == digests(made / "run" / "export")


def test_a_read_only_folder_is_named_and_can_still_be_read(made, run):
    before = digests(run)
    bind = ["mount", "--bind", run, run], ["mount", "-o", "remount,ro,bind", run]
    if any(subprocess.run(command, capture_output=True).returncode for command in bind):
        pytest.skip("mounting is not allowed here")
    try:
        for verb in ("init", "export", "compress"):
            failure = cskv(verb, "--run", run, exit_code=1)
            assert f"cannot write to {run}: Read-only" in failure["error"] and "--run DIR" in failure["hint"]
        sizes = "--data", made / "text.txt", "--samples", 1, "--seq-len", 16
        assert cskv("eval", run / "export", *sizes)["task"] == "perplexity"
        states = {stage["stage"]: stage["state"] for stage in cskv("status", "--run", run)["stages"]}
        assert {states[stage] for stage in ("base", "calibrate", "init", "quantize", "export")} == {"ready"}
        assert cskv("inspect", run / "export")["bits_k"] == [4] * 4
    finally:
        subprocess.run(["umount", "-l", run], check=True)
    assert digests(run) == before


def test_the_base_changes_during_the_export(tiny, monkeypatch):
    compress(tiny)
    shutil.rmtree(tiny / "run" / "export")
    write = export_stage.write_checkpoint

    def write_and_change(*arguments, **options):
        write(*arguments, **options)
        harm(tiny / "base" / "model.safetensors", "flipped")

    monkeypatch.setattr(export_stage, "write_checkpoint", write_and_change)
    assert "has changed since" in cskv("export", "--run", tiny / "run", exit_code=1)["error"]
    assert not (tiny / "run" / "export").exists()


def test_a_changed_base_with_its_old_size_and_time_is_noticed(tiny):
    compress(tiny)
    path = tiny / "base" / "model.safetensors"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    harm(path, "flipped")
    os.utime(path, ns=times)
    assert "has changed since" in compress(tiny, exit_code=1)["error"]


@pytest.mark.parametrize("year", [1971, 2100])
def test_a_clock_that_was_wrong_changes_nothing(made, run, year):
    seconds = (year - 1970) * 365 * 86400
    for path in run.rglob("*"):
        os.utime(path, (seconds, seconds))
    before = {path: path.stat().st_ino for path in run.rglob("manifest.json")}
    cskv("compress", "--run", run)
    assert {path: path.stat().st_ino for path in run.rglob("manifest.json")} == before
    cskv("compress", "--run", run, "--sinks", 1)
    cskv("compress", "--run", run, "--sinks", 4)
    assert digests(run / "export") == digests(made / "run" / "export")


def test_killed_thirty_times_at_random_moments(made, tmp_path):
    """`compress` in processes that are killed with SIGKILL: each next one goes on, and it ends in the right bytes."""
    arguments = "compress", made / "base", "--data", made / "text.txt", *CALIBRATION, *BITS, "--json"
    command = [sys.executable, str(KILLED), str(tmp_path), "30", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as in this process; sums depend on it in the last bit
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=KILLED.parents[2])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["killed"] == 30
    for run in report["finished"]:
        for stage in ("base", "calibrate", "init", "quantize", "export"):
            assert digests(Path(run) / stage) == digests(made / "run" / stage), (run, stage)
