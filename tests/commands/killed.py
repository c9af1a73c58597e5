"""Run as a program: kills `cskv` at random moments, in one run directory after the other.

Arguments: a folder for the run directories, how many kills, and the command line without --run. Everything is imported
once and each process is a fork, so that a moment is one of the work and not of importing.
Prints how many were killed and the run directories that were finished.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import cskv_cli.checkpoint.writer
import cskv_cli.pipeline
import cskv_cli.stages.export
import cskv_cli.stages.quantize  # noqa: F401
from cskv_cli.app import app

torch.set_num_threads(1)


def started(run, arguments):
    """The process that does it, by its id."""
    process = os.fork()
    if process:
        return process
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        app([*arguments, "--run", str(run)])
    except SystemExit as error:
        os._exit(error.code or 0)
    os._exit(70)


def finished(process, seconds):
    """Whether it ended by itself within that time, well; else it is killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0, status
            return True
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


folder, kills, arguments = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
moments = random.Random(0)
begun = time.monotonic()
assert finished(started(folder / "run-0", arguments), 120)
whole = time.monotonic() - begun  # seconds that it takes undisturbed
killed, runs = 0, [folder / "run-0"]
while killed < kills:
    runs.append(folder / f"run-{len(runs)}")
    while killed < kills and not finished(started(runs[-1], arguments), moments.uniform(0, whole / 2)):
        killed += 1
    assert finished(started(runs[-1], arguments), 120)
print(json.dumps({"killed": killed, "finished": [str(run) for run in runs], "seconds": whole}))
