"""The loop, on an objective of which all is known: a parabola whose windows pull in their own directions."""

import json

import pytest
import torch
from torch import nn

from cskv_cli.config import FinetuneConfig
from cskv_cli.distributed import Workers
from cskv_cli.errors import CskvError
from cskv_cli.progress import SILENT
from cskv_cli.training import loop
from cskv_cli.training.curve import write_curve
from cskv_cli.training.loop import STATE, Trainer
from cskv_cli.training.objectives import Score
from cskv_cli.training.stream import HELD_OUT_RECALL, HELD_OUT_TEXT, Stream

NAME = "model.layers.3.self_attn.k_up.weight"


class Parabola:
    """|w - window|^2 / 2 of the first numbers of each window; goes wrong when told to."""

    def __init__(self, weight, fail_at=None):
        self.weight, self.calls, self.fail_at = weight, [], fail_at

    def _loss(self, window):
        return (self.weight - window.ids[:3].float() / 90).square().sum() / 2

    def backward(self, window, weight):
        self.calls.append(window)
        loss = self._loss(window)
        if len(self.calls) == self.fail_at:
            loss = loss * float("nan")
        (weight * loss).backward()
        return loss.item()

    def score(self, window):
        with torch.no_grad():
            return Score(self._loss(window).item(), 1, 4)


@pytest.fixture
def stream(tokenizer):
    texts = torch.randint(3, 93, (22 + HELD_OUT_TEXT, 64), generator=torch.Generator().manual_seed(0))
    return Stream(texts, tokenizer, 0.2, seed=0)


def trainer(stream, folder, objective=None, **settings):
    folder.mkdir(exist_ok=True)
    objective = objective or Parabola(nn.Parameter(torch.tensor([2.0, 2.0, 2.0])))
    config = FinetuneConfig(**{"steps": 40, "lr": 0.1} | settings)
    return Trainer(objective, {NAME: objective.weight}, stream, config, folder, Workers(0, 1))


def test_gives_the_best_state_and_scores_it_as_it_is_mixed(stream, tmp_path):
    made = trainer(stream, tmp_path)
    outcome = made.run(SILENT)
    assert [line["step"] for line in outcome.scores] == [0, 10, 20, 30, 40]
    assert outcome.best_score["score"] == min(line["score"] for line in outcome.scores) < outcome.scores[0]["score"]
    made.parameters[NAME].data = outcome.best[NAME]
    again = made.score()
    assert again["score"] == outcome.best_score["score"]
    text, recall = stream.held_out()
    assert (len(text), len(recall)) == (HELD_OUT_TEXT, HELD_OUT_RECALL)
    mean = lambda windows: sum(made.objective.score(w).loss for w in windows) / len(windows)  # noqa: E731
    assert again["score"] == pytest.approx(0.8 * mean(text) + 0.2 * mean(recall))
    assert again["answers"] == 0.25


def test_never_worse_than_at_the_start(stream, tmp_path):
    """A rate that leaps over the minimum: what was there at the start is what is given."""
    outcome = trainer(stream, tmp_path, lr=1e5, steps=8).run(SILENT)
    assert outcome.best_score["step"] == 0
    assert torch.equal(outcome.best[NAME], torch.tensor([2.0, 2.0, 2.0]))


def test_stops_when_out_of_patience(stream, tmp_path):
    outcome = trainer(stream, tmp_path, lr=1e5, patience=2).run(SILENT)
    assert [line["step"] for line in outcome.scores] == [0, 10, 20]
    assert len(outcome.steps) == 20


def test_the_steps_are_adamw_with_warm_up_and_cosine(stream, tmp_path):
    """Against the update written out, with bias correction."""
    made = trainer(stream, tmp_path, steps=12)
    outcome = made.run(SILENT)
    w, m, v = torch.full((3,), 2.0, dtype=torch.float64), 0, 0
    for step in range(12):
        gradient = w - stream.window(step).ids[:3].double() / 90
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        share = min(1, (step + 1) / 10) * (1 + torch.cos(torch.tensor(torch.pi * step / 12))).item() / 2
        assert outcome.steps[step]["rate"] == pytest.approx(share)
        hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
        w = w - 0.1 * 2.0 * share * hat[0] / (hat[1].sqrt() + 1e-8)  # the rate is a share of the mean magnitude, 2
    torch.testing.assert_close(made.parameters[NAME].data.double(), w, rtol=1e-5, atol=1e-5)


def test_accumulated_windows_are_averaged(stream, tmp_path):
    made = trainer(stream, tmp_path, steps=1, accumulate=5, lr=1e-9)
    made.optimizer.step = lambda: gradients.append(made.parameters[NAME].grad.clone())
    gradients = []
    made.run(SILENT)
    windows = [stream.window(i).ids[:3].float() / 90 for i in range(5)]
    torch.testing.assert_close(gradients[0], 2 - torch.stack(windows).mean(0))


@pytest.mark.parametrize("killed_after", [[7], [3, 22]])
def test_killed_and_gone_on_with_ends_in_the_same_bytes(stream, tmp_path, monkeypatch, killed_after):
    monkeypatch.setattr(loop, "SAVE_EVERY", -1.0)
    expected = trainer(stream, tmp_path / "whole").run(SILENT)
    for stop in killed_after:
        made = trainer(stream, tmp_path / "killed")
        step = made.optimizer.step

        def killed(made=made, step=step, stop=stop):
            if len(made.outcome.steps) == stop:
                raise KeyboardInterrupt
            step()

        made.optimizer.step = killed
        with pytest.raises(KeyboardInterrupt):
            made.run(SILENT)
    again = trainer(stream, tmp_path / "killed")
    outcome = again.run(SILENT)
    assert len(again.objective.calls) == 40 - killed_after[-1]  # not from the start
    assert torch.equal(outcome.best[NAME], expected.best[NAME])
    assert (outcome.steps, outcome.scores) == (expected.steps, expected.scores)
    for name, folder in (("a", expected), ("b", outcome)):
        (tmp_path / name).mkdir()
        write_curve(tmp_path / name, "distill", folder)
    for file in ("curve.jsonl", "curve.png"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "killed" / STATE).exists()


def test_a_loss_that_is_not_finite_ends_it_without_a_step(stream, tmp_path):
    objective = Parabola(nn.Parameter(torch.tensor([2.0, 2.0, 2.0])), fail_at=14)
    outcome = trainer(stream, tmp_path, objective).run(SILENT)
    assert outcome.failed == 14 and len(outcome.steps) == 13
    assert objective.weight.isfinite().all()
    assert outcome.best_score["step"] == 10 and outcome.best[NAME].isfinite().all()


def test_the_curve_has_every_step_and_every_scoring(stream, tmp_path):
    outcome = trainer(stream, tmp_path).run(SILENT)
    write_curve(tmp_path, "distill", outcome)
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 41))
    assert [line["loss"] for line in lines if "loss" in line] == [line["loss"] for line in outcome.steps]
    assert [line["held_out"]["score"] for line in lines if "held_out" in line] == [s["score"] for s in outcome.scores]


class TestStream:
    def test_every_text_comes_once_an_epoch_and_none_is_held_out(self, stream):
        windows = [stream.window(i) for i in range(55)]
        texts = [tuple(w.ids.tolist()) for w in windows if w.prefill == 0]
        assert len(texts) == 44 and len(windows) - len(texts) == 11
        assert len(set(texts[:22])) == len(set(texts[22:])) == 22
        assert texts[:22] != texts[22:] and set(texts[:22]) == set(texts[22:])
        assert not {tuple(w.ids.tolist()) for w in stream.held_out()[0]} & set(texts)

    def test_the_share_is_spread_evenly(self, stream):
        kinds = [stream.window(i).prefill > 0 for i in range(50)]
        assert all(sum(kinds[start : start + 5]) == 1 for start in range(0, 50, 5))

    def test_too_little_text_is_said(self, tokenizer):
        with pytest.raises(CskvError, match="too few"):
            Stream(torch.zeros(HELD_OUT_TEXT, 64, dtype=torch.long), tokenizer, 0.2, 0)
