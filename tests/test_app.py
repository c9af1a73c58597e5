"""The command itself: versions, completion, and how it behaves where there is no terminal, no home, no stdin."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cskv_cli.app import app
from tests.cli import CALIBRATION, compress
from tests.commands.test_compress import digests

ROOT = Path(__file__).parents[1]
MAIN = "import sys; sys.argv[0] = 'cskv'; from cskv_cli.app import main; main()"


def run(*arguments, code=0, variables=None, **how):
    """`cskv` in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CSKV_", "COLUMNS", "NO_COLOR"))}
    environment = kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (variables or {})
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, **{"cwd": "/"} | how)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def export(tiny):
    compress(tiny, "--ratio-k", 0.5)
    return tiny / "run" / "export"


def test_version_and_help_import_nothing_heavy():
    script = MAIN.replace("main()", "\ntry:\n    main()\nfinally:\n    print(sorted(sys.modules), file=sys.stderr)")
    for argument in ("--version", "--help"):
        done = subprocess.run([sys.executable, "-c", script, argument], cwd=ROOT, capture_output=True, text=True)
        loaded = done.stderr.splitlines()[-1]
        assert done.returncode == 0 and "'rich.table'" in loaded
        assert not any(f"'{name}'" in loaded for name in ("torch", "transformers", "huggingface_hub", "datasets"))


def test_versions_for_bug_reports():
    shown = json.loads(CliRunner().invoke(app, ["--version", "--json"]).stdout)
    assert shown["cskv"] == CliRunner().invoke(app, ["--version"]).stdout.split()[1]
    for package in ("torch", "transformers", "huggingface_hub", "gguf"):
        assert shown[package] == version(package)
    assert CliRunner().invoke(app, ["--json", "status"]).exit_code == 2


@pytest.mark.parametrize("words, expected", [("cskv ex", {"export"}), ("cskv export --pu", {"--push"})])
def test_completion(words, expected):
    variables = {"_CSKV_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert set(run(variables=variables).stdout.split()) == expected
    assert "_CSKV_COMPLETE=complete_bash" in run(variables={"_CSKV_COMPLETE": "source_bash"}).stdout


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_reader_of_stdout_leaves(form):
    """`cskv recipes ls | head -0`: no traceback, and no complaint at exit."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", MAIN, "recipes", "ls", *form]
    done = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write)
    assert done.communicate()[1] == "" and done.returncode == 1


def test_closed_streams(tiny):
    """Nothing that libraries print lands in a file of ours that took the number of a closed stream."""
    arguments = "compress", tiny / "base", "--run", tiny / "run", "--data", tiny / "text.txt", *CALIBRATION
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, preexec_fn=lambda: [os.close(stream) for stream in (0, 1, 2)])
    assert done.returncode == 0
    shutil.move(tiny / "run", tiny / "closed")
    compress(tiny)
    assert digests(tiny / "closed") == digests(tiny / "run")


def test_no_home(export):
    variables = {"HOME": "/nonexistent", "HF_HOME": None, "XDG_CACHE_HOME": None}
    assert json.loads(run("eval", export, "--samples", 1, "--seq-len", 16, "--json", variables=variables).stdout)


@pytest.mark.parametrize("verb", ["inspect", "status"])
def test_eighty_columns_without_colour(export, verb):
    target = ["--run", "run"] if verb == "status" else ["run/export"]
    shown = terminal(export.parents[1], verb, *target)
    title, *rows = shown.splitlines()
    assert title.startswith("run") and max(map(len, rows)) <= 80 and "\x1b[" not in shown and "…" not in shown


def terminal(folder, *arguments):
    """What `cskv` writes, in this folder, to a terminal of 80 columns, with NO_COLOR."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = os.environ | {"NO_COLOR": "1", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment, cwd=folder)
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    assert process.wait() == 0
    return shown.decode().replace("\r", "")
