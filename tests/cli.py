"""Running verbs in this process."""

import json

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
