"""The whole way on a tiny model: what is written, reused, refused and said."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from cskv_cli.app import app
from cskv_cli.checkpoint.load import load_checkpoint
from tests.cli import CALIBRATION, compress, cskv
from tests.families import base_model


def digests(folder):
    """SHA-256 of every file, by name; hidden files (locks, caches) left out."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.startswith(".")]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_report_and_files(tiny):
    report = compress(tiny, "--ratio-k", 0.75, "--rank-v", 20, "--window", 8, "--sinks", 2)
    assert report["rank_k"] == [8] * 4 and report["rank_v"] == [20] * 4
    assert (report["window"], report["sinks"]) == (8, 2)
    assert report["cache_bytes_per_token"] == {"base": 4 * 64 * 4, "cskv": 4 * 28 * 4 + 4}
    assert 0 < report["relative_error"]["k"] < 1
    export = tiny / "run" / "export"
    assert report["checkpoint"] == str(export)
    assert not (export / "model.safetensors").exists()
    assert len({path.stat().st_mode for path in export.iterdir() if path.name != "manifest.json"}) == 1
    index = json.loads((export / "model.safetensors.index.json").read_text())
    with safe_open(tiny / "base" / "model.safetensors", "pt") as base:
        for name in base.keys():  # noqa: SIM118
            with safe_open(export / index["weight_map"][name], "pt") as ours:
                assert torch.equal(ours.get_tensor(name), base.get_tensor(name))
    config, original = (json.loads((d / "config.json").read_text()) for d in (export, tiny / "base"))
    assert {key: config[key] for key in original} == original
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_cskv.CSKVLlamaForCausalLM"
    assert (export / "tokenizer.json").read_bytes() == (tiny / "base" / "tokenizer.json").read_bytes()
    assert str(tiny) not in (export / "README.md").read_text()


def test_export_holds_the_factors_of_init(tiny):
    compress(tiny, "--ratio-k", 0.5, "--ratio-v", 0.5)
    with safe_open(tiny / "run" / "init" / "layer-002.safetensors", "pt") as file:
        a, b = file.get_tensor("v.a"), file.get_tensor("v.b")
    with safe_open(tiny / "run" / "export" / "model-00002-of-00002.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("model.layers.2.self_attn.v_down.weight"), a.T)
        assert torch.equal(file.get_tensor("model.layers.2.self_attn.v_up.weight"), b.T)


def test_head_groups(tiny):
    """Each of the two KV heads has its own latents; their number is a multiple of the groups."""
    report = compress(
        tiny, "--head-groups", 2, "--ratio-k", 0.55, "--rank-v", 10, "--bits", 4, "--group", 4, "--window", 8
    )
    assert report["head_groups"] == 2 == cskv("compress", "--run", tiny / "run", "--dry-run")["head_groups"]
    config = json.loads((tiny / "run/export/config.json").read_text())["cskv"]
    assert (config["head_groups"], config["rank_k"][0], config["rank_v"][0]) == (2, 14, 10)
    model = load_checkpoint(tiny / "run/export", "cpu", "float32")
    assert model.model.layers[1].self_attn.v_up.weight.shape == (32, 5)
    assert "head_groups: 2" in (tiny / "run/export/README.md").read_text()
    errors = [
        cskv("init", "--run", tiny / "run", "--ratio-k", 0.5, "--head-groups", g)["relative_error"] for g in (1, 2)
    ]
    assert errors[0]["k"] < errors[1]["k"] < 1
    for flags, said in (
        (("--head-groups", 3), "2 KV heads do not divide into --head-groups 3"),
        (("--head-groups", 2, "--rank-k", 7), "--rank-k 7 does not divide by 2 head groups"),
    ):
        assert said in compress(tiny, *flags, exit_code=1)["error"]
    assert "an allocation is for factors that all heads share" in compress(
        tiny, "--head-groups", 2, "--budget", 0.8, exit_code=2
    )["error"].replace("\n", " ")


def test_a_second_run_changes_nothing_and_another_ratio_keeps_calibration(tiny):
    compress(tiny, "--ratio-k", 0.5)
    before = digests(tiny / "run")
    stamp = (tiny / "run" / "calibrate" / "manifest.json").stat().st_mtime_ns
    compress(tiny, "--ratio-k", 0.5)
    assert digests(tiny / "run") == before
    report = cskv("compress", "--run", tiny / "run", "--ratio-k", 0.25)
    assert report["rank_k"] == [24] * 4
    assert (tiny / "run" / "calibrate" / "manifest.json").stat().st_mtime_ns == stamp
    cskv("compress", "--run", tiny / "run", "--ratio-k", 0.5)
    assert digests(tiny / "run") == before


def test_stages_one_by_one_give_the_same_bytes(tiny):
    compress(tiny, "--ratio-k", 0.5, "--bits", 4, "--group", 8)
    run = tiny / "single"
    cskv("calibrate", tiny / "base", "--run", run, "--data", tiny / "text.txt", *CALIBRATION)
    cskv("init", "--run", run, "--ratio-k", 0.5)
    cskv("quantize", "--run", run, "--bits", 4, "--group", 8)
    cskv("export", "--run", run)
    for stage in ("calibrate", "init", "quantize", "export"):
        assert digests(run / stage) == digests(tiny / "run" / stage) or stage == "calibrate"
    ours, theirs = digests(run / "calibrate"), digests(tiny / "run" / "calibrate")
    assert {k: v for k, v in ours.items() if k != "manifest.json"} == {
        k: v for k, v in theirs.items() if k != "manifest.json"
    }


def test_a_recipe_equals_its_flags_and_flags_win(tiny):
    recipe = tiny / "recipe.yaml"
    recipe.write_text(
        f"model: {tiny / 'base'}\ncalibrate: {{data: [{tiny / 'text.txt'}], samples: 6, seq_len: 48}}\n"
        "init: {rank_k: 7, ratio_v: 0.75}\n"
    )
    report = cskv("compress", "--recipe", recipe, "--run", tiny / "run", "--ratio-k", 0.5)
    assert report["rank_k"] == [16] * 4 and report["rank_v"] == [8] * 4
    assert report == compress(tiny, "--ratio-k", 0.5, "--ratio-v", 0.75)


def test_out_is_a_copy_without_the_manifest(tiny):
    report = compress(tiny, "--out", tiny / "m-1.5 模型")
    assert report["checkpoint"] == str(tiny / "m-1.5 模型")
    export = {k: v for k, v in digests(tiny / "run" / "export").items() if k != "manifest.json"}
    assert digests(tiny / "m-1.5 模型") == export
    assert "not an empty folder" in compress(tiny, "--out", tiny / "base", exit_code=1)["error"]
    assert compress(tiny, "--out", tiny / "m-1.5 模型") == report
    (tiny / "m-1.5 模型" / "README.md").write_text("mine")
    assert "not an empty folder" in compress(tiny, "--out", tiny / "m-1.5 模型", exit_code=1)["error"]


def test_dry_run_writes_no_stage_and_agrees_with_the_result(tiny):
    plan = compress(tiny, "--ratio-k", 0.75, "--dry-run")
    assert [p.name for p in (tiny / "run").iterdir() if not p.name.startswith(".")] == []
    report = compress(tiny, "--ratio-k", 0.75)
    for key in ("rank_k", "rank_v", "cache_bytes_per_token", "channels", "base_model"):
        assert plan[key] == report[key]
    assert plan["factor_parameters"] == 4 * (8 + 16) * (64 + 32)


def test_other_factors_than_calibration_are_refused_with_the_command(tiny):
    compress(tiny)
    cskv("calibrate", "--run", tiny / "run", "--data", tiny / "text.txt", "--samples", 5, "--seq-len", 48)
    failure = cskv("export", "--run", tiny / "run", exit_code=1)
    assert "calibrate has changed since" in failure["error"] and "cskv init --run" in failure["hint"]
    states = {s["stage"]: s["state"] for s in cskv("status", "--run", tiny / "run")["stages"]}
    assert states["calibrate"] == "ready" and states["init"].startswith("stale: calibrate has changed")
    assert states["export"].startswith("stale: init is stale")


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
@pytest.mark.parametrize("victim", ["calibrate/layer-001.safetensors", "init/layer-003.safetensors"])
def test_damaged_artifacts_are_refused_by_name(tiny, victim, damage):
    compress(tiny)
    shutil.rmtree(tiny / "run" / "export")
    path = tiny / "run" / victim
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(content[:-5])
    elif damage == "flip":
        content[-3] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    verb = "export" if victim.startswith("init") else "init"
    failure = cskv(verb, "--run", tiny / "run", *([] if verb == "export" else ["--alpha", 0.3]), exit_code=1)
    assert path.name in failure["error"] and "cskv " in failure["hint"]
    assert not (tiny / "run" / "export").exists()


def test_another_model_or_a_changed_one_is_refused(tiny):
    compress(tiny)
    shutil.copytree(tiny / "base", tiny / "other")
    other = cskv("compress", tiny / "other", "--run", tiny / "run", exit_code=1)
    assert "belongs to" in other["error"]
    base_model("Llama", vocab_size=98).save_pretrained(tiny / "base")
    assert "has changed since" in compress(tiny, exit_code=1)["error"]


def test_out_may_not_overlap_the_run_or_take_what_is_there(tiny):
    run = tiny / "run"
    for out in (run, run / "export", run / "x" / "y", tiny):
        assert "within one another" in compress(tiny, "--out", out, exit_code=1)["error"]
    assert "cannot make" in compress(tiny, "--out", tiny / "text.txt" / "x", exit_code=1)["error"]
    assert not (run / "calibrate").exists()
    (tiny / "empty").mkdir()
    (tiny / "link").symlink_to(tiny / "empty")
    report = compress(tiny, "--out", tiny / "link")
    assert (tiny / "empty" / "config.json").exists() and report["checkpoint"] == str(tiny / "link")


def test_quantizing_is_kept_until_told_otherwise_and_a_seed_does_not_begin_it(tiny):
    group = "--window", 8, "--group", 8
    assert compress(tiny, "--window", 8, "--seed", 1)["bits_k"] == [None] * 4
    assert compress(tiny, *group, "--bits", 4)["bits_k"] == [4] * 4
    assert cskv("compress", "--run", tiny / "run")["bits_k"] == [4] * 4
    assert cskv("compress", "--run", tiny / "run", "--window", 8, "--sinks", 1)["bits_v"] == [4] * 4
    assert cskv("compress", "--run", tiny / "run", "--bits", 16)["bits_k"] == [None] * 4
    assert cskv("compress", "--run", tiny / "run")["bits_k"] == [None] * 4


def test_stages_by_hand_after_compress_export_what_was_quantized_last(tiny):
    compress(tiny, "--window", 8)
    cskv("quantize", "--run", tiny / "run", "--bits", 3, "--group", 8)
    assert cskv("export", "--run", tiny / "run")["bits_k"] == [3] * 4
    assert cskv("export", "--run", tiny / "run", "--factors", "init")["bits_k"] == [None] * 4


def test_settings_that_fall_back_are_said(tiny):
    compress(tiny, "--ratio-k", 0.75, "--window", 8)
    command = ["compress", "--run", str(tiny / "run"), "--sinks", "2", "--json"]
    result = CliRunner().invoke(app, command)
    assert "init: ratio_k is not given and now 0.5; it was 0.75" in result.stderr
    assert "init: window is not given and now 32; it was 8" in result.stderr


def test_the_export_dtype_is_remembered_and_planned(tiny):
    first = compress(tiny, "--export-dtype", "bfloat16")
    assert first["dtype"] == "bfloat16" and first["cache_bytes_per_token"]["base"] == 4 * 64 * 2
    plan = cskv("compress", "--run", tiny / "run", "--dry-run")
    assert plan["cache_bytes_per_token"] == first["cache_bytes_per_token"]
    assert cskv("compress", "--run", tiny / "run") == first


def test_ranks_are_remembered_beside_the_default_ratios(tiny):
    first = compress(tiny, "--rank-k", 7)
    assert first["rank_k"] == [7] * 4 and cskv("compress", "--run", tiny / "run") == first


def test_a_damaged_stage_is_made_again_by_its_own_verb_with_its_settings(tiny):
    compress(tiny)
    before = digests(tiny / "run")
    path = tiny / "run" / "calibrate" / "layer-001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    cskv("calibrate", "--run", tiny / "run")
    assert digests(tiny / "run") == before


def test_a_changed_chat_template_is_exported(tiny):
    compress(tiny)
    (tiny / "base" / "chat_template.jinja").write_text("{{ messages }}")
    cskv("export", "--run", tiny / "run")
    assert (tiny / "run" / "export" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_folder_of_text_is_watched_and_paths_hold_from_anywhere(tiny, monkeypatch):
    (tiny / "texts").mkdir()
    shutil.copyfile(tiny / "text.txt", tiny / "texts" / "a.txt")
    monkeypatch.chdir(tiny)
    data = "--data", "texts", *CALIBRATION
    first = cskv("compress", tiny / "base", "--run", "run", *data)
    monkeypatch.chdir(tiny.parent)
    assert cskv("compress", "--run", tiny / "run")["relative_error"] == first["relative_error"]
    (tiny / "texts" / "a.txt").write_text(" ".join(reversed((tiny / "text.txt").read_text().split())))
    assert cskv("compress", "--run", tiny / "run")["relative_error"] != first["relative_error"]


def test_a_run_that_made_nothing_yet_can_change_its_model(tiny):
    shutil.copytree(tiny / "base", tiny / "other")
    compress(tiny, "--dry-run")
    assert cskv("compress", tiny / "other", "--run", tiny / "run", "--dry-run")["base_model"] == str(tiny / "other")


def test_damaged_manifests_and_checkpoints_name_the_file(tiny):
    compress(tiny)
    (tiny / "run" / "init" / "manifest.json").write_text("")
    states = {s["stage"]: s["state"] for s in cskv("status", "--run", tiny / "run")["stages"]}
    assert states["init"].startswith("damaged") and states["calibrate"] == "ready"
    shard = tiny / "run" / "export" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    for verb in ("eval", "inspect"):
        assert shard.name in cskv(verb, tiny / "run" / "export", exit_code=1)["error"]
    config = tiny / "run" / "export" / "config.json"
    config.write_text(config.read_text().replace('"sinks"', '"sunk"'))
    shutil.copyfile(tiny / "base" / "model.safetensors", shard)
    assert "config.json" in cskv("inspect", tiny / "run" / "export", exit_code=1)["error"]


def test_usage_errors_exit_with_2(tiny):
    compress(tiny, "--ratio-k", 1.5, exit_code=2)
    compress(tiny, "--rank-k", 4, "--ratio-k", 0.5, exit_code=2)
    compress(tiny, "--method", "magic", exit_code=2)
    compress(tiny, "--bits", 5, exit_code=2)


def test_bad_settings_are_refused_before_calibration(tiny):
    assert "more than the 32 channels" in compress(tiny, "--rank-k", 33, exit_code=1)["error"]
    assert "more than the window" in compress(tiny, "--bits", 4, "--group", 64, exit_code=1)["error"]
    assert not (tiny / "run" / "calibrate").exists()


def test_no_model_is_one_clear_line(tmp_path):
    failure = cskv("compress", "--run", tmp_path / "run", exit_code=1)
    assert "remembers no model" in failure["error"]
    assert "no run directory" in cskv("status", "--run", tmp_path / "none", exit_code=1)["error"]
    assert not (tmp_path / "none").exists()


def test_changed_text_is_calibrated_on_again_and_lost_text_is_not_missed(tiny):
    compress(tiny)
    stamp = (tiny / "run" / "calibrate" / "manifest.json").stat().st_mtime_ns
    words = (tiny / "text.txt").read_text().split()
    (tiny / "text.txt").write_text(" ".join(reversed(words)))
    compress(tiny)
    assert (tiny / "run" / "calibrate" / "manifest.json").stat().st_mtime_ns > stamp
    before = digests(tiny / "run")
    (tiny / "text.txt").unlink()
    cskv("compress", "--run", tiny / "run")
    assert digests(tiny / "run") == before
    failure = cskv("calibrate", "--run", tiny / "run", "--data", tiny / "gone.txt", exit_code=1)
    assert "gone.txt" in failure["error"]
