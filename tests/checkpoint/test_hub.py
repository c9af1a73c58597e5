"""`--push` against a local Hub: what is sent, what is asked first, and every way in which a Hub fails."""

import json
import shutil

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from cskv_cli.app import app
from cskv_cli.checkpoint.hub import ATTEMPTS, default_name
from cskv_cli.eval_config import EvalConfig
from cskv_cli.measurements import keep
from cskv_cli.run import MANIFEST
from tests.cli import compress, cskv
from tests.fakehub import READER, STRANGER, WRITER
from tests.families import write_tiny
from tests.hub import local_hub

SHARDS = "--max-shard-size", "200KB"


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer, text):
    """A folder as `tiny`, compressed into `run`."""
    folder = tmp_path_factory.mktemp("made")
    write_tiny(folder, tokenizer, text)
    compress(folder, "--ratio-k", 0.5, *SHARDS)
    return folder


@pytest.fixture
def run(made, tmp_path):
    """A run of its own for each test."""
    return shutil.copytree(made / "run", tmp_path / "run")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with local_hub(monkeypatch, tmp_path) as hub:
        yield hub


def push(run, *flags, exit_code=0):
    return cskv("export", "--run", run, *flags, exit_code=exit_code)


def shard_names(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_what_is_pushed_is_the_export_and_nothing_else(run, hub):
    report = push(run, "--push", "me/tiny", "--commit-message", "first")
    export, files = run / "export", hub.files("me/tiny")
    listed = json.loads((export / MANIFEST).read_text())["files"]
    assert files.keys() == listed.keys() | {".gitattributes"} and MANIFEST not in files
    for name in listed.keys() - {"README.md"}:
        assert files[name] == (export / name).read_bytes(), name
    assert 'from_pretrained("me/tiny"' in files["README.md"].decode()
    commit = hub.repos["me/tiny"].heads["main"]
    url = f"{hub.url}/me/tiny/commit/{commit}"
    assert report["pushed"] == {"repo": "me/tiny", "commit": commit, "url": url, "pull_request": None}
    everything = b"".join(content for content in files.values())
    assert str(run.parent).encode() not in everything and WRITER.encode() not in everything


def test_everything_is_asked_before_anything_is_sent(run, hub):
    shutil.rmtree(run / "export")
    hub.fail("validate", 400)
    failure = push(run, "--push", "me/tiny", exit_code=1)
    assert "refuses the model card" in failure["error"] and "--card" in failure["hint"]
    assert hub.routes() == ["whoami", "create", "auth_check_write", "info", "validate failed"]
    assert not (run / "export").exists()


@pytest.mark.parametrize("flags, name", [(["--push"], "me/base-cskv"), (["--push", "other"], "me/other")])
def test_the_repository_has_a_default_name_and_its_owner_may_be_left_out(run, hub, flags, name):
    assert push(run, *flags)["pushed"]["repo"] == name and name in hub.repos


@pytest.mark.parametrize(
    "source, name",
    [
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B-cskv"),
        ("/a/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1-cskv"),
        ("/a/模型 1.5--dir/", "1.5-dir-cskv"),
    ],
)
def test_default_names_are_hub_ids(source, name):
    assert default_name(source) == name


def test_a_second_push_sends_nothing_and_then_what_changed(run, hub):
    first = push(run, "--push", "me/tiny")["pushed"]
    hub.routes()
    assert push(run, "--push", "me/tiny")["pushed"]["commit"] == first["commit"]
    assert not {"lfs_put", "commit"} & set(hub.routes())
    result = {"task": "retrieval", "cases": 3, "base": {"score": 1.0}, "cskv": {"score": 0.625}}
    keep(run / "export", EvalConfig(), [result])
    push(run, "--push", "me/tiny")
    before, after = (hub.files("me/tiny", commit) for commit in list(hub.repos["me/tiny"].commits)[-2:])
    assert {name for name in after if after[name] != before.get(name)} == {"README.md"}
    assert "| retrieval, 3 cases | 1 | 0.625 |" in after["README.md"].decode()
    assert "lfs_put" not in hub.routes()
    assert push(run, "--push", "me/tiny", "--dtype", "bfloat16")["pushed"]["commit"] != first["commit"]
    assert hub.routes().count("lfs_put") == len(shard_names(run / "export"))
    assert "0.625" not in hub.files("me/tiny")["README.md"].decode()  # measured of other weights


def test_shards_of_an_earlier_push_are_removed(run, hub, made):
    old = run.parent / "old"
    old.mkdir()
    for name in ("model.safetensors", "cskv_old.py", "mine.txt"):
        (old / name).write_text("x")
    hub.add("me/tiny", old)
    push(run, "--push", "me/tiny")
    assert {"model.safetensors", "cskv_old.py"}.isdisjoint(hub.files("me/tiny")) and "mine.txt" in hub.files("me/tiny")


def test_a_drop_in_the_second_shard_is_gone_on_from(run, hub):
    first, second, *_ = sorted((run / "export").glob("*.safetensors"))
    digests = {
        name: entry["sha256"] for name, entry in json.loads((run / "export" / MANIFEST).read_text())["files"].items()
    }
    hub.fail("lfs_put", None, detail=digests[second.name], read=1000)
    failure = push(run, "--push", "me/tiny", exit_code=1)
    assert "the Hub failed for me/tiny" in failure["error"] and "only what is missing" in failure["hint"]
    assert digests[first.name] in hub.blobs and digests[second.name] not in hub.blobs
    assert shard_names(run / "export")[0] not in hub.files("me/tiny")  # nothing is committed by halves
    hub.failures.clear()
    hub.log.clear()
    push(run, "--push", "me/tiny")
    sent = [oid for route, oid in hub.log if route == "lfs_put"]
    assert sent == [digests[second.name]]
    assert hub.files("me/tiny")[second.name] == second.read_bytes()


def test_one_drop_is_not_even_noticed(run, hub):
    hub.fail("lfs_put", None, times=1, read=1000)
    push(run, "--push", "me/tiny")
    assert set(shard_names(run / "export")) <= hub.files("me/tiny").keys()


@pytest.mark.parametrize("route", ["whoami", "create", "auth_check_write", "info", "validate", "preupload", "commit"])
@pytest.mark.parametrize("status, headers, wait", [(429, {"Retry-After": "7"}, 7), (500, {}, 1), (503, {}, 1)])
def test_a_passing_failure_is_waited_for(run, hub, route, status, headers, wait):
    hub.fail(route, status, times=1, headers=headers)
    push(run, "--push", "me/tiny")
    assert hub.waits and hub.waits[0] in (wait, wait + 1)  # huggingface_hub waits a second more
    assert "README.md" in hub.files("me/tiny")


def test_a_failure_that_lasts_is_one_line_and_can_be_resumed(run, hub):
    hub.fail("commit", 500)
    failure = push(run, "--push", "me/tiny", exit_code=1)
    assert "told to fail with 500" in failure["error"] and "run the same command again" in failure["hint"]
    assert hub.routes().count("commit failed") == ATTEMPTS and hub.waits == [1, 2, 4, 8]
    hub.failures.clear()
    push(run, "--push", "me/tiny")
    assert "lfs_put" not in hub.routes()


def test_too_many_requests_for_too_long(run, hub):
    hub.fail("whoami", 429, headers={"Retry-After": "3"})
    failure = push(run, "--push", "me/tiny", exit_code=1)
    assert "slow down (429)" in failure["error"] and hub.waits == [3] * (ATTEMPTS - 1)


def test_tokens(run, hub, monkeypatch):
    assert "may only read" in push(run, "--push", "--token", READER, exit_code=1)["error"]
    assert "does not accept this token" in push(run, "--push", "--token", "hf_wrong", exit_code=1)["error"]
    assert "blanks" in push(run, "--push", "--token", "hf_a b", exit_code=1)["error"]
    assert not hub.repos
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(run / "none"))
    failure = push(run, "--push", exit_code=1)
    assert "needs a token" in failure["error"] and "hf auth login" in failure["hint"]
    assert push(run, "--push", "--token", STRANGER)["pushed"]["repo"] == "you/base-cskv"


@pytest.mark.parametrize("route", ["whoami", "create", "commit", "info"])
@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_no_token_is_printed_or_written(run, hub, route, debug):
    """Not even where the Hub repeats it."""
    hub.fail(route, 400)
    command = (
        ["inspect", "me/x"] if route == "info" else ["export", "--run", str(run), "--push", "me/x", "--token", WRITER]
    )
    result = CliRunner().invoke(app, [*command, *debug])
    assert result.exit_code == 1 and "told to fail" in result.output
    written = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert not any(b"secret" in text for text in [result.output.encode(), *written])


def test_a_repository_of_someone_else(run, hub):
    hub.add("you/theirs", run / "export")
    shutil.rmtree(run / "export")
    failure = push(run, "--push", "you/theirs", exit_code=1)
    assert "may not write to you/theirs" in failure["error"] and "--push USER/NAME" in failure["hint"]
    assert "may not write to you/new" in push(run, "--push", "you/new", exit_code=1)["error"]
    assert not (run / "export").exists() and "you/new" not in hub.repos  # before the work


def test_creation_is_forbidden_but_the_repository_is_writable(run, hub):
    (run.parent / "empty").mkdir()
    hub.add("you/shared", run.parent / "empty")
    hub.may_write.add(("me", "you/shared"))
    assert push(run, "--push", "you/shared")["pushed"]["repo"] == "you/shared"
    assert "config.json" in hub.files("you/shared")


def test_a_repository_that_exists_is_used(run, hub):
    hub.add("me/tiny", run / "base")
    push(run, "--push", "me/tiny")
    assert "config.json" in hub.files("me/tiny")


def test_private(run, hub):
    assert push(run, "--push", "me/tiny", "--private")["pushed"]["repo"] == "me/tiny" and hub.repos["me/tiny"].private
    hub.add("me/open", run / "base")
    assert "is public" in push(run, "--push", "me/open", "--private", exit_code=1)["error"]
    assert "config.json" not in hub.files("me/open")


def test_a_branch(run, hub):
    push(run, "--push", "me/tiny", "--branch", "v1")
    assert "config.json" in hub.files("me/tiny", "v1") and "config.json" not in hub.files("me/tiny")
    push(run, "--push", "me/tiny", "--branch", "v1")


def test_a_pull_request_to_a_repository_that_may_only_be_read(run, hub):
    hub.add("you/theirs", run / "base")
    report = push(run, "--push", "you/theirs", "--create-pr")
    assert report["pushed"]["pull_request"] == f"{hub.url}/you/theirs/discussions/1"
    assert "config.json" in hub.files("you/theirs", "refs/pr/1") and "config.json" not in hub.files("you/theirs")
    assert "you/none is not on the Hub" in push(run, "--push", "you/none", "--create-pr", exit_code=1)["error"]


def test_usage_errors(run, hub):
    push(run, "--private", exit_code=2)
    push(run, "--push", "me/x", "--create-pr", "--branch", "v1", exit_code=2)
    push(run, "--push", "me/x", "--commit-message", "", exit_code=2)
    push(run, "--max-shard-size", "5 apples", exit_code=2)
    assert "no Hub id" in push(run, "--push", "me/x/y", exit_code=1)["error"]
    assert "no Hub id" in push(run, "--push", "me/--", exit_code=1)["error"]
    assert not hub.repos


def test_offline_is_said(run, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    failure = push(run, "--push", exit_code=1)
    assert "HF_HUB_OFFLINE is set" in failure["error"] and not hub.waits


def test_no_hub_at_all(run, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    failure = push(run, "--push", exit_code=1)
    assert "the Hub failed" in failure["error"] and "again" in failure["hint"]


def test_compress_pushes_and_a_recipe_may_name_the_repository(tiny, hub):
    recipe = tiny / "recipe.yaml"
    recipe.write_text("push: me/from-recipe\ninit: {ratio_k: 0.5}\n")
    assert "pushed" not in compress(tiny, "--recipe", recipe)
    assert not hub.repos  # a recipe alone does not upload
    assert compress(tiny, "--recipe", recipe, "--push")["pushed"]["repo"] == "me/from-recipe"
    assert compress(tiny, "--recipe", recipe, "--push", "me/from-flag")["pushed"]["repo"] == "me/from-flag"


def test_a_dry_run_asks_who_pushes_and_creates_nothing(tiny, hub):
    assert compress(tiny, "--push", "--dry-run")["base_model"] and not hub.repos
    assert hub.routes() == ["whoami", "validate"]
    assert "may only read" in compress(tiny, "--push", "--token", READER, "--dry-run", exit_code=1)["error"]


def test_compress_asks_before_it_calibrates(tiny, hub):
    assert "may not write" in compress(tiny, "--push", "you/x", exit_code=1)["error"]
    assert not (tiny / "run" / "base").exists()
    hub.fail("validate", 400)
    assert "refuses the model card" in compress(tiny, "--push", "me/x", exit_code=1)["error"]
    assert not (tiny / "run" / "calibrate").exists()


def test_shards_stay_within_their_size_and_hold_the_same_tensors(run, made):
    export = run / "export"
    names = shard_names(export)
    index = json.loads((export / "model.safetensors.index.json").read_text())
    found, total = {}, 0
    for name in names:
        with safe_open(export / name, "pt") as file:
            held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        assert len(held) == 1 or (export / name).stat().st_size <= 200_000
        assert all(index["weight_map"][key] == name for key in held)
        found |= held
        total += sum(tensor.nbytes for tensor in held.values())
    assert len(names) > 3 and names[-1].endswith(f"{len(names):05d}-of-{len(names):05d}.safetensors")
    assert index["metadata"]["total_size"] == total and index["weight_map"].keys() == found.keys()
    with safe_open(made / "base" / "model.safetensors", "pt") as base:
        for key in base.keys():  # noqa: SIM118
            assert found[key].equal(base.get_tensor(key))
