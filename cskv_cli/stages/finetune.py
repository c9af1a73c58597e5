"""`cskv finetune`: training of the factors, on what the model says or on its keys and values."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from cskv_cli import factors
from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.checkpoint.load import load_tokenizer
from cskv_cli.config import DataConfig, FinetuneConfig
from cskv_cli.data.recall import Window
from cskv_cli.devices import fast_dtype, pick_device
from cskv_cli.distributed import workers
from cskv_cli.errors import CskvError
from cskv_cli.evaluation.simulation import decode_simulation
from cskv_cli.layout import Layout, load_layout, save_layout
from cskv_cli.modeling.cskv_structure import find_decoder
from cskv_cli.progress import Progress
from cskv_cli.run import Manifest, Run
from cskv_cli.stages.calibrate import kept_windows
from cskv_cli.training.curve import write_curve
from cskv_cli.training.loop import STATE, Outcome, Trainer
from cskv_cli.training.objectives import OBJECTIVES
from cskv_cli.training.stream import Stream, windows_needed
from cskv_cli.training.student import as_factors, load_student, precision, trained

WINDOWS = "windows.safetensors"


def finetune(
    run: Run, base: BaseModel, source: str, config: FinetuneConfig, inputs: dict[str, str], progress: Progress
) -> Manifest:
    """Train the factors of stage `source` (see `train`).

    Raises:
        CskvError: there is too little text; or the loss is not finite any more, after the stage was written with the
            best factors until then.
    """
    partial = run.partial("finetune", {"config": config.model_dump(mode="json"), "inputs": inputs})
    partial.mkdir(parents=True, exist_ok=True)
    layout = load_layout(run.folder(source))
    report = train(run, base, layout, run.folder(source), config, partial, progress)
    if workers().main:
        save_layout(partial, layout)
    manifest = run.commit("finetune", partial, config, inputs, report)
    raise_if_failed(run.folder("finetune"), report)
    return manifest


def raise_if_failed(folder: Path, report: dict[str, Any]) -> None:
    """Say that a stage that was just written holds the best state before its training failed.

    Raises:
        CskvError: it did fail.
    """
    if reason := report.get("failed"):
        raise CskvError(
            f"training stopped: {reason}",
            f"the best state before that is kept in {folder}: run the same command again to go on with it, or train "
            "anew with a lower --lr or with --dtype float32",
        )


def train(
    run: Run,
    base: BaseModel,
    layout: Layout,
    source: Path,
    config: FinetuneConfig,
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Write trained factors of `source` and the loss curve to `folder`; the report of what was gained.

    The factors are those of the best scoring of the held-out part, the first of which is of what `source` holds. An
    interrupted training goes on from the state it last saved.
    """
    device = pick_device(config.device)
    dtype = fast_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)
    tokenizer = load_tokenizer(base.folder)
    needed = windows_needed(config.steps * config.accumulate * workers().count, config.recall_share)
    lengths = dict(samples=needed, seq_len=config.seq_len)
    asked = DataConfig(data=config.data, **lengths, seed=config.seed + 1, device=config.device)
    with workers().main_first():
        texts, notes = kept_windows(run, base, asked, folder / WINDOWS, progress)
    model = load_student(base, layout, source, dtype, device)
    if config.checkpointing:
        checkpoint_activations(model)
    stream = Stream(texts, tokenizer, config.recall_share, config.seed)
    trainer = Trainer(OBJECTIVES[config.objective](model), trained(model), stream, config, folder, workers())
    outcome = trainer.run(progress)
    if workers().main:
        for index, tensors in as_factors(outcome.best).items():
            factors.save_layer(folder, index, tensors)
        write_curve(folder, config.objective, outcome)
        for name in (STATE, WINDOWS):
            (folder / name).unlink(missing_ok=True)
    report = _report(config, outcome) | {"notes": notes, "tokens_per_second": trainer.usage.tokens_per_second}
    report |= {"peak_bytes": trainer.usage.peak_bytes, "dtype": str(dtype).removeprefix("torch."), "device": device}
    if outcome.failed is not None:
        every = config.accumulate * workers().count
        report["failed"] = _culprit(model, stream.window((outcome.failed - 1) * every), outcome.failed)
    return report


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Compute a layer's activations anew in the backward pass instead of keeping them."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in find_decoder(model).layers:
        layer.training = True  # of the layer alone, not of what is in it: no dropout


def _report(config: FinetuneConfig, outcome: Outcome) -> dict[str, Any]:
    best = outcome.best_score
    return {
        "objective": config.objective,
        "steps": len(outcome.steps),
        "best_step": best["step"],
        "held_out": {"before": _plain(outcome.scores[0]), "after": _plain(best)},
    }


def _plain(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name != "step"}


@torch.no_grad()
def _culprit(model: PreTrainedModel, window: Window, step: int) -> str:
    """Where numbers stop being finite."""
    bad: list[int] = []

    def watch(index: int) -> Any:
        def see(module: torch.nn.Module, args: tuple, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if not output.isfinite().all():
                bad.append(index)

        return see

    handles = [layer.register_forward_hook(watch(i)) for i, layer in enumerate(find_decoder(model).layers)]
    with precision(model), decode_simulation(model, window.prefill):
        model(window.ids[None].to(model.device), use_cache=False)
    for handle in handles:
        handle.remove()
    where = f"layer {bad[0]} gives numbers that are not finite" if bad else "the gradients are not finite"
    return f"at step {step} {where}"
