"""Running verbs: in this process, and in others."""

import json
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from cskv_cli.app import app


def cskv(*arguments, exit_code=0):
    """The JSON object that a verb prints; asserts its exit code and that stdout holds nothing else."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == exit_code, (result.stdout, result.stderr, result.exception)
    return json.loads(result.stdout) if result.stdout else {"error": result.stderr}


CALIBRATION = "--samples", 6, "--seq-len", 48


def compress(tiny, *flags, exit_code=0):
    """`cskv compress` of the tiny model, into `run` beside it."""
    data = "--data", tiny / "text.txt", *CALIBRATION
    return cskv("compress", tiny / "base", "--run", tiny / "run", *data, *flags, exit_code=exit_code)


def start(*arguments, processes=1):
    """A verb in a process of its own, or in several that `accelerate launch` starts; `wait` for it."""
    several = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", processes, "-m"]  # also without GPUs
    command = [sys.executable, "-m", *(several if processes > 1 else []), "cskv_cli", *arguments, "--json"]
    # Threads as in this process: sums depend on their number in the last bit.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, command)), env=environment, **pipes)


def start_compress(tiny, run, *flags, processes=1):
    """`compress` as above, elsewhere."""
    data = "--data", tiny / "text.txt", *CALIBRATION
    return start("compress", tiny / "base", "--run", run, *data, *flags, processes=processes)
