"""The training loop: scored at the start, on the way and at the end; the best state is what it gives."""

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from cskv_cli import statistics
from cskv_cli.config import FinetuneConfig
from cskv_cli.distributed import Workers
from cskv_cli.progress import Progress
from cskv_cli.training.objectives import Objective
from cskv_cli.training.optimizer import make_optimizer, restore_state, set_rate, state_tensors
from cskv_cli.training.stream import Stream
from cskv_cli.training.usage import Usage

STATE = "state.safetensors"
SAVE_EVERY = 60.0  # seconds of work that a kill may cost; every scoring is saved too
SCORE_EVERY = 50  # steps, at most


@dataclass
class Outcome:
    """What training has come to.

    Attributes:
        best: the factors of the best scoring, by parameter name, on the CPU.
        steps: one line for each step: `step`, `loss`, `rate` (of the peak).
        scores: one line for each scoring of the held-out part (see `score`).
        failed: the step whose gradients were not finite, which ended it.
    """

    best: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    failed: int | None = None

    @property
    def best_score(self) -> dict[str, Any]:
        """The line of the best scoring, the first of equals."""
        return min(self.scores, key=lambda line: line["score"])

    def out_of_patience(self, patience: int) -> bool:
        """Whether so many scorings have passed since the best."""
        return len(self.scores) - self.scores.index(self.best_score) > patience


class Trainer:
    """Brings down an objective over the windows of a stream.

    Args:
        parameters: what is trained, by name.
        folder: where the state is kept, from which another process goes on to the same result.
    """

    def __init__(
        self,
        objective: Objective,
        parameters: dict[str, nn.Parameter],
        stream: Stream,
        config: FinetuneConfig,
        folder: Path,
        workers: Workers,
    ) -> None:
        self.objective, self.parameters, self.stream, self.config = objective, parameters, stream, config
        self.folder, self.workers = folder, workers
        self._held_out = stream.held_out()
        self.optimizer = make_optimizer(parameters, config.objective, config.lr)
        self.outcome = Outcome()
        self.usage = Usage()

    def run(self, progress: Progress) -> Outcome:
        """Train to the end, from where an interrupted run was."""
        outcome, steps = self.outcome, self.config.steps
        self._restore()
        self.workers.wait()
        saved = time.monotonic()
        with progress.task(f"finetune ({self.config.objective})", steps) as advance:
            advance(len(outcome.steps))
            if not outcome.scores:
                self._score(0)
            while len(outcome.steps) < steps and not outcome.out_of_patience(self.config.patience):
                with self.usage.step(self.config.accumulate * self.config.seq_len):
                    finite = self._step(len(outcome.steps))
                if not finite:
                    break
                advance(1, self.usage.summary(self.workers.count))
                done = len(outcome.steps)
                due = done % min(SCORE_EVERY, math.ceil(steps / 4)) == 0 or done == steps
                if due:
                    self._score(done)
                if self.workers.main and (due or time.monotonic() - saved > SAVE_EVERY):
                    self._save()
                    saved = time.monotonic()
        return outcome

    def _step(self, step: int) -> bool:
        """One step of the optimizer; False, and no step, where the gradients are not finite."""
        share = set_rate(self.optimizer, step, self.config.steps)
        every = self.config.accumulate * self.workers.count
        losses = torch.zeros(1, dtype=torch.float64)
        for number in self.workers.every(every):
            window = self.stream.window(step * every + number)
            losses += self.objective.backward(window, 1 / every)
        loss = self.workers.sum(losses).item() / every
        gradients = [parameter.grad for parameter in self.parameters.values()]
        for gradient in gradients:
            self.workers.sum(gradient)
        finite = math.isfinite(loss) and all(gradient.isfinite().all() for gradient in gradients)
        if finite:
            self.optimizer.step()
            self.outcome.steps.append({"step": step + 1, "loss": loss, "rate": share})
        else:
            self.outcome.failed = step + 1
        self.optimizer.zero_grad(set_to_none=False)
        return finite

    def _score(self, step: int) -> None:
        """Score the held-out part, and keep the factors if they are the best so far."""
        line = {"step": step, **self.score()}
        scores = self.outcome.scores
        if not scores or line["score"] < self.outcome.best_score["score"]:
            self.outcome.best = {name: p.detach().cpu().clone() for name, p in self.parameters.items()}
        scores.append(line)

    def score(self) -> dict[str, Any]:
        """The held-out part: mean loss of `text` and of `recall`, `score`, in which they are mixed as in training, and
        the share of `answers` in the recall windows that would be given right."""
        text, recall = self._held_out
        sums = torch.zeros(4, dtype=torch.float64)
        for number in self.workers.every(len(text) + len(recall)):
            scored = self.objective.score((text + recall)[number])
            sums[0 if number < len(text) else 1] += scored.loss
            sums[2:] += torch.tensor([scored.right, scored.answers]) if number >= len(text) else 0
        losses = self.workers.sum(sums)
        line = {"text": losses[0].item() / len(text)}
        if not recall:
            return {"score": line["text"], **line}
        line["recall"] = losses[1].item() / len(recall)
        if losses[3]:
            line["answers"] = (losses[2] / losses[3]).item()
        share = self.config.recall_share
        return {"score": (1 - share) * line["text"] + share * line["recall"], **line}

    def _save(self) -> None:
        tensors = {f"now.{name}": p.detach() for name, p in self.parameters.items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.outcome.best.items()}
        tensors |= state_tensors(self.optimizer)
        lines = {"steps": self.outcome.steps, "scores": self.outcome.scores}
        metadata = {"lines": json.dumps(lines)}
        statistics.save_atomically(self.folder / STATE, tensors, metadata)

    def _restore(self) -> None:
        path = self.folder / STATE
        if not statistics.is_whole(path):
            return
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            lines = json.loads(file.metadata()["lines"])
        for name, parameter in self.parameters.items():
            parameter.data.copy_(tensors[f"now.{name}"])
            self.outcome.best[name] = tensors[f"best.{name}"]
        self.outcome.steps, self.outcome.scores = lines["steps"], lines["scores"]
        restore_state(self.optimizer, tensors, len(self.outcome.steps))
