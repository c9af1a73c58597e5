"""The JSON of every verb against its schema in `docs/schemas`, and each schema against less than that."""

import json
from pathlib import Path

import pytest
import typer
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from cskv_cli.app import about, app
from cskv_cli.console import Console
from tests.cli import CALIBRATION, compress, cskv
from tests.families import write_tiny
from tests.hub import local_hub

SCHEMAS = Path(__file__).parents[1] / "docs" / "schemas"
SEARCH = "--budget", 0.6, "--context", 256, "--windows", 2, "--seq-len", 64, "--rounds", 1
SIZES = "--samples", 2, "--seq-len", 40, "--entries", 5, "--cases", 3


def verbs(group, prefix=""):
    """Names of all verbs, `recipes-ls` for those of a group."""
    for name, command in group.commands.items():
        yield from verbs(command, f"{name}-") if hasattr(command, "commands") else [prefix + name]


def validator(name):
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def sweep_recipe(folder):
    text = folder / "text.txt"
    path = folder / "sweep.yaml"
    path.write_text(f"""
model: {folder / "base"}
calibrate: {{data: {text}, samples: 6, seq_len: 48}}
init: {{ratio: [0.5, 0.8], window: 8}}
baselines: [{{method: kivi, bits: 4}}, {{method: full}}]
eval: {{data: {text}, samples: 2, seq_len: 40}}
""")
    return path


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, tokenizer, text):
    """What each verb printed: (schema, output), several for verbs that have several forms."""
    folder = tmp_path_factory.mktemp("schemas")
    write_tiny(folder, tokenizer, text, "Gemma3")  # with sliding layers, which are left as they are
    data, run = ("--data", folder / "text.txt"), ("--run", folder / "run")
    export = folder / "run" / "export"
    with pytest.MonkeyPatch.context() as patch, local_hub(patch, folder):
        return [
            ("compress", compress(folder, "--ratio-k", 0.5, "--dry-run")),
            ("calibrate", cskv("calibrate", folder / "base", *run, *data, *CALIBRATION)),
            ("analyze", cskv("analyze", *run)),
            ("search", cskv("search", *run, *SEARCH)),
            ("search", cskv("search", *run, *SEARCH, "--dry-run")),
            ("init", cskv("init", *run, "--window", 8)),
            ("finetune", cskv("finetune", *run, "--steps", 2, "--seq-len", 64)),
            ("export", cskv("export", *run)),
            ("eval", cskv("eval", export, *data, *SIZES)),
            ("eval", cskv("eval", export, "--task", "retrieval", *SIZES, "--fail-under", "compression>=0")),
            ("quantize", cskv("quantize", *run, "--bits", 8, "--group", 8, "--qat", "--steps", 1, "--seq-len", 64)),
            ("quantize", cskv("quantize", *run, "--bits", 4, "--group", 8)),
            ("compress", cskv("compress", *run, "--push", "me/x")),
            ("compress", cskv("compress", *run, "--dry-run")),
            ("export", cskv("export", *run, "--card")),
            ("eval", cskv("eval", export, "--task", "perplexity", "--task", "retrieval", *data, *SIZES)),
            ("eval", cskv("eval", export, *data, *SIZES, "--fail-under", "compression>=1", exit_code=3)),
            ("inspect", cskv("inspect", export)),
            ("bench", cskv("bench", export, "--context", 20, "--new-tokens", 2, "--prefills", 1)),
            ("sweep", cskv("sweep", sweep_recipe(folder), "--out", folder / "sweep")),
            ("status", cskv("status", *run)),
            ("status", compress(folder, "--dry-run") and cskv("status", *run)),
            ("recipes-ls", cskv("recipes", "ls")),
            ("recipes-show", cskv("recipes", "show", "smollm2-135m")),
            ("recipes-cp", cskv("recipes", "cp", "smollm2-135m", folder)),
            ("error", cskv("inspect", folder, exit_code=1)),
            ("error", compress(folder, "--rank-k", 4, "--ratio-k", 0.5, exit_code=2)),
            ("version", json.loads(CliRunner().invoke(app, ["--version", "--json"]).stdout)),
        ]


def test_every_verb_has_a_schema_and_a_real_output(outputs):
    expected = {*verbs(typer.main.get_command(app)), "error", "version"}
    assert {path.stem for path in SCHEMAS.glob("*.json")} == expected == {name for name, _ in outputs}


def test_outputs_are_valid(outputs):
    for name, output in outputs:
        errors = [error.message for error in validator(name).iter_errors(output)]
        assert not errors, (name, errors)


OPTIONAL = {
    "compress": {"pushed"},
    "quantize": {"qat"},
    "version": set(about()) - {"cskv", "python", "platform"},
}


def test_a_key_less_or_of_another_kind_is_not(outputs):
    for name, output in outputs:
        check = validator(name)
        for key in output:
            less = {k: v for k, v in output.items() if k != key}
            if name != "eval" or key == "results":  # the others stand there twice
                assert check.is_valid(less) == (key in OPTIONAL.get(name, ())), (name, key)
            assert not check.is_valid(output | {key: {"un": ["expected"]}}), (name, key)


def test_what_is_not_finite_is_null(capsys):
    Console(json=True).result({"a": float("nan"), "b": [float("inf")], "c": (1.5, {"d": -float("inf")})})
    assert capsys.readouterr().out == '{"a": null, "b": [null], "c": [1.5, {"d": null}]}\n'
