"""What others do with a pushed checkpoint, and base models that come from the Hub: over HTTP, by name and commit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import CALIBRATION, compress, cskv
from tests.commands.test_compress import digests
from tests.fakehub import STRANGER, WRITER
from tests.families import base_model
from tests.hub import environment, local_hub

SCRIPT = Path(__file__).with_name("load_hub.py")
WRONG_TOKENS = {
    STRANGER: "no such model on the Hub",
    "hf_wrong": "does not accept your token",
    "hf_géheim": "has characters",
}
FLAGS = "--rank-k", 9, "--rank-v", 12, "--window", 4, "--sinks", 2


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with local_hub(monkeypatch, tmp_path) as hub:
        yield hub


def answers(hub, home, name, revision=""):
    """What `load_hub.py` prints, in an interpreter outside this repository and without this package."""
    variables = environment(hub, home, PYTHONPATH="")
    command = [sys.executable, str(SCRIPT), str(name), revision]
    result = subprocess.run(command, env=variables, cwd="/", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_it_loads_by_name_at_a_commit_without_this_package(tiny, hub):
    first = compress(tiny, *FLAGS, "--push", "me/tiny")["pushed"]["commit"]
    local = answers(hub, tiny / "home", tiny / "run" / "export")
    cskv("compress", "--run", tiny / "run", "--rank-k", 2, "--rank-v", 2, "--push", "me/tiny")
    pinned = answers(hub, tiny / "home", "me/tiny", first)
    assert pinned == local and pinned["rank"] == [9] * 4
    assert pinned["classes"] == ["CSKVLlamaForCausalLM"] * 2
    assert pinned["text"].strip() == pinned["decoded"] and len(pinned["decoded"].split()) > 8
    assert answers(hub, tiny / "home", "me/tiny")["rank"] == [2] * 4


def test_a_private_repository_and_a_wrong_token(tiny, hub, monkeypatch):
    compress(tiny, *FLAGS, "--push", "me/hidden", "--private")
    for verb in ("inspect", "eval"):
        for token, reason in WRONG_TOKENS.items():
            monkeypatch.setenv("HF_TOKEN", token)
            failure = cskv(verb, "me/hidden", exit_code=1)
            assert reason in failure["error"] and "\n" not in failure["error"] and token not in str(failure)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept your token" in cskv("compress", "me/hidden", "--run", tiny / "x", exit_code=1)["error"]
    monkeypatch.setenv("HF_TOKEN", WRITER)
    ours = cskv("inspect", "me/hidden")
    assert ours == cskv("inspect", tiny / "run" / "export") | {"checkpoint": "me/hidden"}


def test_eval_takes_a_name_and_a_revision(tiny, hub):
    sizes = "--data", tiny / "text.txt", "--samples", 2, "--seq-len", 40
    first = compress(tiny, *FLAGS, "--push", "me/tiny", "--branch", "v1")["pushed"]["commit"]
    local = cskv("eval", tiny / "run" / "export", *sizes)
    expected = local | {"model": "me/tiny", "results": [local["results"][0] | {"model": "me/tiny"}]}
    assert cskv("eval", "me/tiny", "--revision", "v1", *sizes) == expected
    assert cskv("eval", "me/tiny", "--revision", first, *sizes) == expected
    assert "has no revision v2" in cskv("eval", "me/tiny", "--revision", "v2", exit_code=1)["error"]
    assert "needs a Hub id" in cskv("eval", tiny / "run" / "export", "--revision", "v1", exit_code=1)["error"]
    assert "is not a CSKV checkpoint" in cskv("eval", "me/tiny", exit_code=1)["error"]  # main holds nothing yet


def test_weights_of_what_is_no_export_are_not_fetched(tiny, hub):
    hub.add("org/base", tiny / "base")
    assert "no cskv block" in cskv("inspect", "org/base", exit_code=1)["error"]
    assert [detail for route, detail in hub.log if route == "resolve"].count("config.json")
    assert not any("safetensors" in detail for route, detail in hub.log if route == "resolve")


def test_a_base_model_by_name_and_revision(tiny, hub):
    data = "--data", tiny / "text.txt", *CALIBRATION
    hub.add("org/base", tiny / "base")
    hub.repos["org/base"].heads["v1"] = wanted = hub.repos["org/base"].heads["main"]
    base_model("Llama", vocab_size=98).save_pretrained(tiny / "other")
    hub.repos["org/base"].commit({p.name: p.read_bytes() for p in (tiny / "other").iterdir()})
    report = cskv("compress", "org/base", "--revision", "v1", "--run", tiny / "run", *data, *FLAGS)
    assert report["base_model"] == "org/base"
    base = json.loads((tiny / "run" / "base" / "manifest.json").read_text())
    assert base["config"] == {"source": "org/base", "revision": wanted, "trust_code": False}
    cskv("compress", tiny / "base", "--run", tiny / "local", *data, *FLAGS)
    ours, theirs = digests(tiny / "run" / "export"), digests(tiny / "local" / "export")
    assert {name for name in ours if ours[name] != theirs[name]} == {"README.md", "manifest.json"}
    hub.repos["org/base"].heads["v1"] = hub.repos["org/base"].heads["main"]  # moved: the run stays with its commit
    hub.log.clear()
    assert cskv("compress", "--run", tiny / "run") == report
    assert not any("safetensors" in detail for route, detail in hub.log if route == "resolve")


@pytest.mark.parametrize("shard_size", ["8MB", "1MB"])
def test_a_plan_fetches_the_headers_of_shards_alone(tiny, hub, shard_size):
    """One shard, and several with an index."""
    folder, data = tiny / "wide", ("--data", tiny / "text.txt", *CALIBRATION)
    base_model("Llama", vocab_size=10_000).save_pretrained(folder, max_shard_size=shard_size)
    for path in (tiny / "base").glob("*token*"):
        shutil.copyfile(path, folder / path.name)
    hub.add("org/base", folder)
    plan = cskv("compress", "org/base", "--run", tiny / "run", *data, *FLAGS, "--dry-run")
    shards = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert len(shards) == (1 if shard_size == "8MB" else 3)
    assert all(hub.sent[name] <= 100_001 for name in shards) and sum(shards.values()) > 5 * 100_001 * len(shards)
    made = {path.name: path.stat().st_size for path in (tiny / "run").rglob("*.safetensors")}
    assert made == shards
    local = cskv("compress", folder, "--run", tiny / "local", *data, *FLAGS, "--dry-run")
    linked = {"base_model": "org/base", "disk_bytes": local["disk_bytes"] - sum(shards.values())}
    assert plan | {"free_bytes": 0, "layer": 0} == local | linked | {"free_bytes": 0, "layer": 0}
    hub.fail("resolve", 500, detail=sorted(shards)[-1])
    failure = cskv("compress", "org/base", "--run", tiny / "new", *data, *FLAGS, "--dry-run", exit_code=1)
    assert "org/base" in failure["error"] and "\n" not in failure["error"]


def test_a_dropped_download_is_one_line_and_is_gone_on_from(tiny, hub):
    hub.add("org/base", tiny / "base")
    data = "--data", tiny / "text.txt", *CALIBRATION
    hub.fail("resolve", 500, detail="model.safetensors")
    failure = cskv("compress", "org/base", "--run", tiny / "run", *data, *FLAGS, exit_code=1)
    assert "org/base" in failure["error"] and "again" in failure["hint"]
    hub.failures.clear()
    cskv("compress", "org/base", "--run", tiny / "run", *data, *FLAGS)
