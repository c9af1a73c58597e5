"""Calibration keeps exactly the statistics of what the whole model computes, killed or not."""

from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from cskv_cli import statistics
from cskv_cli.checkpoint import layers
from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.checkpoint.layers import LayerByLayer
from cskv_cli.config import CalibrateConfig
from cskv_cli.data.windows import Windows
from cskv_cli.errors import CskvError
from cskv_cli.progress import SILENT, Progress
from cskv_cli.run import Run, sha256
from cskv_cli.stages import calibrate as stage
from cskv_cli.statistics import load_layer, sampled_windows
from tests.data.conftest import word_tokenizer
from tests.families import base_model

IDS = torch.randint(3, 97, (5, 70), generator=torch.Generator().manual_seed(3))
WINDOWS = Windows(IDS, {"a.txt": 3, "b.txt": 2}, ("b.txt holds 2 windows",))
INPUTS = {"base": "1" * 64}


@pytest.fixture(autouse=True)
def _two_windows_in_a_batch(monkeypatch):
    monkeypatch.setattr(layers, "BATCH_TOKENS", 140)


@pytest.fixture
def base(tmp_path):
    """Save a model, and give it as a `BaseModel`."""

    def _base(model):
        model.save_pretrained(tmp_path / "model")
        return BaseModel("model", "folder", None, tmp_path / "model")

    return _base


@pytest.fixture
def pushed(monkeypatch):
    """The layers that are run, and whether anything is collected there."""
    calls, push = [], LayerByLayer.push

    def recorded(self, index, visit=None, advance=None):
        calls.append((index, visit is not None))
        push(self, index, visit, advance)

    monkeypatch.setattr(LayerByLayer, "push", recorded)
    return calls


def calibrate(folder, base, windows=WINDOWS, **config):
    run = Run(folder)
    folder.mkdir(exist_ok=True)
    return run, stage.calibrate(run, base, CalibrateConfig(device="cpu", **config), INPUTS, windows, SILENT)


def files(run):
    return {path.name: sha256(path) for path in run.folder("calibrate").iterdir() if path.name != "manifest.json"}


def attention_inputs(base, dtype):
    """What each layer's attention is given in the whole model, [windows, seq_len, hidden]."""
    model = AutoModelForCausalLM.from_pretrained(base.folder, dtype=dtype).eval()
    seen = [[] for _ in model.model.layers]
    for index, layer in enumerate(model.model.layers):
        hook = lambda _, args, kwargs, i=index: seen[i].append(kwargs["hidden_states"])  # noqa: E731
        layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        for start in range(0, len(IDS), 2):
            model.model(IDS[start : start + 2], use_cache=False)
    return [torch.cat(parts) for parts in seen]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_statistics_are_those_of_the_whole_model(dtype, base, tmp_path):
    model = base(base_model("Llama"))
    run, _ = calibrate(tmp_path / "run", model, dtype=dtype)
    for index, inputs in enumerate(attention_inputs(model, getattr(torch, dtype))):
        got = load_layer(run.folder("calibrate"), index)
        x = inputs.flatten(0, 1).double()
        for name, expected in {"gram": x.T @ x, "mean": x.mean(0), "mean_abs": x.abs().mean(0)}.items():
            value = getattr(got, name)
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
        assert torch.equal(got.gram, got.gram.T)
        assert got.tokens == IDS.numel()
        assert torch.equal(got.sample, inputs)
        assert got.sample.shape == (5, 70, 64)


def test_small_products_are_not_lost_in_a_large_sum():
    collector = statistics.Collector(windows=101)
    collector.add(0, torch.full((1, 4, 1), 5e3))
    for window in range(1, 101):
        collector.add(window, torch.ones(1, 4, 1))
    assert collector.result().gram.item() == 1e8 + 400


def test_manifest(base, tmp_path):
    _, manifest = calibrate(tmp_path / "run", base(base_model("Llama").bfloat16()))
    assert sorted(manifest.files) == [f"layer-00{index}.safetensors" for index in range(4)]
    assert manifest.inputs == INPUTS
    assert manifest.report == {
        "layers": [0, 1, 2, 3],
        "tokens": 350,
        "samples": 5,
        "seq_len": 70,
        "sources": {"a.txt": 3, "b.txt": 2},
        "notes": ["b.txt holds 2 windows"],
    }
    assert load_layer(tmp_path / "run/calibrate", 0).sample.dtype == torch.bfloat16


def test_sliding_layers_are_run_but_not_kept(base, tmp_path, pushed):
    model = base(
        base_model(
            "Gemma3",
            num_hidden_layers=5,
            layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        )
    )
    run, manifest = calibrate(tmp_path / "run", model)
    assert sorted(files(run)) == ["layer-001.safetensors", "layer-003.safetensors"]
    assert manifest.report["layers"] == [1, 3]
    assert pushed == [(0, False), (1, True), (2, False), (3, True)]


def killed(monkeypatch, run_folder, model, layer):
    """Calibrate until the second batch of `layer`; return the partial folder."""
    add, seen = statistics.Collector.add, []

    def killing(self, first, inputs):
        if first == 2 and (seen.append(1) or len(seen) == layer + 1):
            raise KeyboardInterrupt
        add(self, first, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(statistics.Collector, "add", killing)
        with pytest.raises(KeyboardInterrupt):
            calibrate(run_folder, model)
    (partial,) = run_folder.glob(".calibrate-*")
    return partial


def truncate(path):
    path.write_bytes(path.read_bytes()[:-5])


def leave_half_written(partial):
    (partial / ".tmpAbCdEf").write_bytes(b"half")  # safetensors' own temporary name
    (partial / "layer-002.safetensors").write_bytes((partial / "layer-001.safetensors").read_bytes()[:-5])


def lose_an_earlier_layer(partial):
    truncate(partial / "layer-000.safetensors")


def lose_the_hidden_states(partial):
    truncate(partial / "hidden-0.safetensors")


@pytest.mark.parametrize(
    ("save_every", "damage", "expected"),
    [
        (0, leave_half_written, [(2, True), (3, True)]),
        (0, lose_an_earlier_layer, [(0, True), (1, False), (2, True), (3, True)]),
        (0, lose_the_hidden_states, [(0, False), (1, False), (2, True), (3, True)]),
        (1e9, leave_half_written, [(0, False), (1, False), (2, True), (3, True)]),
    ],
)
def test_killed_and_resumed_is_uninterrupted(save_every, damage, expected, base, tmp_path, monkeypatch, pushed):
    model = base(base_model("Llama").bfloat16())
    whole, manifest = calibrate(tmp_path / "whole", model)
    monkeypatch.setattr(stage, "SAVE_EVERY", save_every)
    partial = killed(monkeypatch, tmp_path / "killed", model, layer=2)
    assert Run(tmp_path / "killed").manifest("calibrate") is None
    damage(partial)
    pushed.clear()
    resumed, again = calibrate(tmp_path / "killed", model)
    assert pushed == expected
    assert files(resumed) == files(whole)
    assert again.digest == manifest.digest
    assert {path.name for path in resumed.path.iterdir()} == {"calibrate"}


def test_other_windows_do_not_resume(base, tmp_path, monkeypatch):
    model = base(base_model("Llama"))
    killed(monkeypatch, tmp_path / "run", model, layer=2)
    other = Windows(IDS.flip(0), {"a.txt": 5}, ())
    _, manifest = calibrate(tmp_path / "run", model, windows=other)
    _, undisturbed = calibrate(tmp_path / "fresh", model, windows=other)
    assert manifest.files == undisturbed.files
    assert not list((tmp_path / "run").glob(".calibrate-*"))  # what was begun with other windows is gone


def test_full_disk_for_hidden_states_is_survived(base, tmp_path, monkeypatch):
    save = statistics.save_atomically

    def full(path, tensors, metadata):
        if path.name == "hidden-0.safetensors":
            raise CskvError("disk full")
        save(path, tensors, metadata)

    monkeypatch.setattr(statistics, "save_atomically", full)
    monkeypatch.setattr(stage, "SAVE_EVERY", 0)
    _, manifest = calibrate(tmp_path / "run", base(base_model("Llama")))
    assert len(manifest.files) == 4


def test_overflow_in_half_precision(base, tmp_path):
    model = base_model("Llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(1e6)
    run, model = Run(tmp_path / "run"), base(model.bfloat16())
    with pytest.raises(CskvError, match="layer 2 .*float16") as caught:
        calibrate(run.path, model, dtype="float16")
    assert "--dtype bfloat16" in caught.value.hint
    assert run.manifest("calibrate") is None


@pytest.mark.parametrize(("windows", "expected"), [(256, range(0, 256, 16)), (3, range(3)), (40, None)])
def test_sampled_windows(windows, expected):
    chosen = sampled_windows(windows)
    assert expected is None or chosen == list(expected)
    assert len(set(chosen)) == min(windows, 16) and max(chosen) < windows


def test_a_run_is_the_beginning_of_its_window():
    collector = statistics.Collector(windows=2)
    inputs = torch.randn(2, 300, 3)
    collector.add(0, inputs)
    assert torch.equal(collector.result().sample, inputs[:, :128])


def test_unreadable_statistics_are_named(base, tmp_path):
    run, _ = calibrate(tmp_path / "run", base(base_model("Llama")))
    folder = run.folder("calibrate")
    truncate(folder / "layer-001.safetensors")
    with pytest.raises(CskvError, match="layer-001.safetensors is damaged"):
        load_layer(folder, 1)
    with pytest.raises(CskvError, match="layer-007.safetensors is missing"):
        load_layer(folder, 7)


def test_default_data_is_the_model_and_python(base, monkeypatch):
    tokenizer, config = word_tokenizer(), CalibrateConfig(samples=4, seq_len=16, device="cpu", seed=5)
    asked, steps = {}, []

    def sample(model, _, *, progress, **arguments):
        asked.update(arguments, dtype=model.dtype)
        for texts in (1, 2, 3):
            progress(texts, 3)
        return torch.full((arguments["count"], 16), 7)

    class Steps(Progress):
        @contextmanager
        def task(self, description, total, unit=""):
            yield steps.append
            assert sum(steps) == total == 1

    monkeypatch.setattr(stage, "sample_from_model", sample)
    drawn = stage.windows_for(config, base(base_model("Llama").bfloat16()), tokenizer, Steps())
    assert asked == {"count": 1, "seq_len": 16, "seed": 5, "dtype": torch.bfloat16}
    assert steps
    assert drawn.counts == {"self": 1, "builtin": 3}
    assert (drawn.ids == 7).all(dim=1).sum() == 1
    assert drawn.notes == (stage.DEFAULT_NOTE,)


def test_given_data_is_taken_as_it_is(base, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{n}" for n in range(64)))
    config = CalibrateConfig(data=(str(text),), samples=4, seq_len=16)
    drawn = stage.windows_for(config, base(base_model("Llama")), word_tokenizer(), SILENT)
    assert sorted(drawn.ids.flatten().tolist()) == list(range(3, 67))
    assert drawn.notes == ()
