"""Told to stop, and held by another process; `test_faults.py` kills."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cskv_cli.run import Run
from tests.cli import CALIBRATION, compress, cskv


def start(tiny, run):
    data = "--data", tiny / "text.txt", *CALIBRATION
    command = [
        sys.executable,
        "-m",
        "cskv_cli",
        "compress",
        tiny / "base",
        "--run",
        run,
        *data,
        "--bits",
        4,
        "--group",
        8,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as in this process; sums depend on it in the last bit
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*map(str, command), "--json"], env=environment, **pipes)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_told_to_stop_exits_with_its_code_and_can_be_resumed(tiny, number, code):
    process = start(tiny, tiny / "run")
    while not (tiny / "run" / "base").exists():
        time.sleep(0.005)
    process.send_signal(number)
    assert process.wait(timeout=60) in (code, -number)  # a shell reports both as 130 or 143
    assert "Traceback" not in process.stderr.read()
    process = start(tiny, tiny / "run")
    assert process.wait(timeout=120) == 0


def test_a_second_process_is_told_who_holds_the_run(tiny):
    with Run(tiny / "run").lock():
        failure = compress(tiny, exit_code=1)
    assert f"in use by process {os.getpid()}" in failure["error"]
    compress(tiny)


def test_a_folder_that_cannot_be_written_is_named(tiny):
    (tiny / "file").write_text("")
    failure = cskv("compress", tiny / "base", "--run", tiny / "file" / "run", exit_code=1)
    assert "cannot write to" in failure["error"] and "--run DIR" in failure["hint"]
