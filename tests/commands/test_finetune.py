"""`cskv finetune` and `--qat` on a tiny model: gains, resumes, shares its work, and says what is wrong."""

import json
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from cskv_cli.checkpoint.load import load_checkpoint
from cskv_cli.data.recall import Window
from cskv_cli.run import Run
from cskv_cli.training.objectives import Distillation
from tests.cli import CALIBRATION, compress, cskv, start_compress
from tests.commands.test_compress import digests

TRAINING = "--steps", 12, "--seq-len", 64
LOW = "--ratio-k", 0.8, "--ratio-v", 0.8, "--window", 8, "--sinks", 2


@pytest.fixture
def run(tiny):
    """A run with factors, as `cskv init` leaves it."""
    compress(tiny, *LOW)
    return tiny / "run"


def divergence(checkpoint, text, tokenizer):
    """Mean KL of text windows that no training has seen, by the exported checkpoint itself."""
    model = load_checkpoint(checkpoint, "cpu", torch.float32)
    ids = torch.tensor(tokenizer(text)["input_ids"])[-300:].view(5, 60)
    scores = [Distillation(model).score(Window(row, 0, torch.ones(59, dtype=torch.bool))).loss for row in ids]
    return sum(scores) / 5


def test_distilled_factors_reach_the_checkpoint_and_are_better(run, text, tokenizer):
    before = divergence(run / "export", text, tokenizer)
    report = cskv("finetune", "--run", run, *TRAINING, "--steps", 40)
    held_out = report["held_out"]
    assert held_out["after"]["score"] < held_out["before"]["score"]
    exported = cskv("export", "--run", run)
    assert exported["trained"]
    assert divergence(run / "export", text, tokenizer) < before
    shard = load_file(run / "export" / "model-00002-of-00002.safetensors")
    trained = load_file(run / "finetune" / "layer-001.safetensors")
    assert torch.equal(shard["model.layers.1.self_attn.k_down.weight"], trained["k.a"].T)
    assert not torch.equal(trained["k.a"], load_file(run / "init" / "layer-001.safetensors")["k.a"])


def test_reconstruction_improves_on_asvd_and_has_nothing_to_gain_on_whitened(tiny):
    gains = {}
    for method in ("random", "asvd", "whitened"):
        compress(tiny, *LOW, "--method", method)
        flags = "--objective", "reconstruction", "--steps", 60, "--lr", 0.002, "--mix", "retrieval=0", "--seq-len", 64
        held_out = cskv("finetune", "--run", tiny / "run", *flags)["held_out"]
        gains[method] = held_out["before"]["score"], held_out["after"]["score"]
    assert gains["random"][1] < gains["random"][0]
    assert gains["asvd"][1] < gains["asvd"][0]
    assert gains["whitened"][0] <= gains["asvd"][1] < gains["random"][1]
    assert gains["whitened"][1] > 0.9 * gains["whitened"][0]


def test_training_starts_from_what_the_checkpoint_says(run):
    """Before the first step the held-out text scores as the exported checkpoint does, in float32."""
    held_out = cskv("finetune", "--run", run, *TRAINING, "--steps", 1, "--mix", "retrieval=0", "--dtype", "float32")
    again = cskv("finetune", "--run", run, *TRAINING, "--steps", 2, "--mix", "retrieval=0", "--dtype", "float32")
    assert held_out["held_out"]["before"] != held_out["held_out"]["after"]
    assert again["held_out"]["before"]["text"] > 0


def test_a_second_run_is_reused_and_other_settings_are_not(run):
    first = cskv("finetune", "--run", run, *TRAINING)
    stamp = (run / "finetune" / "manifest.json").stat().st_mtime_ns
    assert cskv("finetune", "--run", run, *TRAINING) == first
    assert (run / "finetune" / "manifest.json").stat().st_mtime_ns == stamp
    cskv("finetune", "--run", run, *TRAINING, "--lr", 0.001)
    assert (run / "finetune" / "manifest.json").stat().st_mtime_ns != stamp


def test_killed_twice_in_training_ends_in_the_same_bytes(tiny):
    flags = "--finetune", "distill", "--steps", 30, "--bits", 4, "--group", 8, "--qat"
    process = start_compress(tiny, tiny / "whole", *LOW, *flags)
    assert process.wait(timeout=300) == 0, process.stderr.read()
    run = tiny / "killed"
    for stage in ("finetune", "quantize"):
        process = start_compress(tiny, run, *LOW, *flags)
        while process.poll() is None and not list(run.glob(f".{stage}-*/state.safetensors")):
            time.sleep(0.005)
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (run / stage / "manifest.json").exists()
    process = start_compress(tiny, run, *LOW, *flags)
    assert process.wait(timeout=300) == 0, process.stderr.read()
    for stage in ("finetune", "quantize", "export"):
        ours, theirs = digests(run / stage), digests(tiny / "whole" / stage)
        if stage != "export":  # these tell how fast it was
            assert ours.pop("manifest.json") and theirs.pop("manifest.json")
        assert ours == theirs
        assert Run(run).manifest(stage).digest == Run(tiny / "whole").manifest(stage).digest


def test_two_processes_do_as_one(tiny):
    """Each takes half of the windows; Grams, gradients and so the factors are those of one, up to rounding."""
    flags = "--finetune", "distill", "--steps", 6, "--dtype", "float32"
    one = start_compress(tiny, tiny / "one", *LOW, *flags, "--accumulate", 2)
    assert one.wait(timeout=300) == 0, one.stderr.read()
    two = start_compress(tiny, tiny / "two", *LOW, *flags, processes=2)
    out, err = two.communicate(timeout=300)
    assert two.returncode == 0, err
    assert json.loads(out)["checkpoint"] == str(tiny / "two" / "export")  # one process prints
    for stage in ("calibrate", "init", "finetune"):
        for path in sorted((tiny / "one" / stage).glob("layer-*")):
            ours, theirs = load_file(path), load_file(tiny / "two" / stage / path.name)
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                assert (tensor - theirs[name]).norm() <= 1e-5 * tensor.norm(), (stage, path.name, name)
    lines = [(tiny / name / "finetune" / "curve.jsonl").read_text().splitlines() for name in ("one", "two")]
    losses = [[json.loads(line)["loss"] for line in run if "loss" in line] for run in lines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_qat_trains_with_the_codes_in_the_loop(run, text, tokenizer):
    plain = cskv("quantize", "--run", run, "--bits", 2, "--group", 8)
    cskv("export", "--run", run)
    before = divergence(run / "export", text, tokenizer)
    report = cskv("quantize", "--run", run, "--bits", 2, "--group", 8, "--qat", *TRAINING, "--steps", 40)
    assert report["bits_k"] == plain["bits_k"]
    assert report["qat"]["held_out"]["after"]["score"] < report["qat"]["held_out"]["before"]["score"]
    assert cskv("export", "--run", run)["trained"]
    assert divergence(run / "export", text, tokenizer) < before


def test_a_loss_that_is_not_finite_names_the_layer_and_keeps_the_best(run, monkeypatch):
    from cskv_cli.training import objectives

    backward, calls = objectives.Distillation.backward, []

    def failing(self, window, weight):
        calls.append(window)
        if len(calls) == 7:
            self.model.model.layers[2].self_attn.v_up.weight.data[0, 0] = torch.inf
        return backward(self, window, weight)

    monkeypatch.setattr(objectives.Distillation, "backward", failing)
    failure = cskv("finetune", "--run", run, *TRAINING, exit_code=1)
    assert "step 7" in failure["error"] and "layer 2" in failure["error"]
    report = cskv("finetune", "--run", run, *TRAINING)
    assert report["best_step"] == 6
    assert all(t.isfinite().all() for t in load_file(run / "finetune" / "layer-002.safetensors").values())


@pytest.mark.parametrize(
    "flags, exit_code, said",
    [
        (("--mix", "poems=0.2"), 2, "retrieval=SHARE"),
        (("--mix", "retrieval=1.5"), 2, "retrieval=SHARE"),
        (("--seq-len", 700, "--data", "TEXT"), 1, "too few"),
        (("--objective", "guess"), 2, "guess"),
    ],
)
def test_bad_settings_are_refused(run, tiny, flags, exit_code, said):
    flags = [tiny / "text.txt" if flag == "TEXT" else flag for flag in flags]
    assert said in cskv("finetune", "--run", run, *flags, exit_code=exit_code)["error"]


def test_training_flags_without_training_are_refused(run):
    assert "--finetune or --qat" in cskv("compress", "--run", run, "--steps", 9, exit_code=2)["error"]
    assert "--qat" in cskv("quantize", "--run", run, "--steps", 9, exit_code=2)["error"]


def test_finetune_before_init_says_what_to_run(tiny):
    cskv("calibrate", tiny / "base", "--run", tiny / "run", "--data", tiny / "text.txt", *CALIBRATION)
    failure = cskv("finetune", "--run", tiny / "run", exit_code=1)
    assert "cskv init" in failure["hint"]


def test_compress_leaves_training_out_when_told_so(tiny):
    compress(tiny, *LOW, "--finetune", "distill", "--steps", 2)
    assert (tiny / "run" / "finetune").exists()
    plan = cskv("compress", "--run", tiny / "run", "--dry-run")
    assert [t["objective"] for t in plan["training"]] == ["distill"]
    report = cskv("compress", "--run", tiny / "run", "--finetune", "none")
    assert not report["trained"] and not (tiny / "run" / "finetune").exists()


def test_checkpointing_changes_nothing_but_memory(run):
    plain = cskv("finetune", "--run", run, *TRAINING, "--dtype", "float32")
    saved = cskv("finetune", "--run", run, *TRAINING, "--dtype", "float32", "--checkpointing")
    assert saved["held_out"]["after"]["score"] == pytest.approx(plain["held_out"]["after"]["score"], rel=1e-4)
