"""Told to stop, and held by another process; `test_faults.py` kills."""

import os
import signal
import time

import pytest

from cskv_cli.run import Run
from tests.cli import compress, cskv, start_compress

BITS = "--bits", 4, "--group", 8


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_told_to_stop_exits_with_its_code_and_can_be_resumed(tiny, number, code):
    process = start_compress(tiny, tiny / "run", *BITS)
    while not (tiny / "run" / "base").exists():
        time.sleep(0.005)
    process.send_signal(number)
    assert process.wait(timeout=60) in (code, -number)  # a shell reports both as 130 or 143
    assert "Traceback" not in process.stderr.read()
    process = start_compress(tiny, tiny / "run", *BITS)
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
