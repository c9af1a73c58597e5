"""`cskv quantize`: codes for the latents, in the basis and with the clipping that lose least on calibration text."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from cskv_cli import factors, statistics
from cskv_cli.config import QuantizeConfig
from cskv_cli.errors import CskvError
from cskv_cli.layout import Layout, load_layout, save_layout
from cskv_cli.modeling.cskv_quantizer import Quantizer
from cskv_cli.progress import Progress
from cskv_cli.run import Manifest, Run

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
ROTATIONS = 3


@dataclass(frozen=True)
class Choice:
    """Factors in the basis chosen, how to quantize their latents, and the squared error and norm on the sample."""

    a: torch.Tensor
    b: torch.Tensor
    clip: float
    rotated: bool
    error: float
    norm: float


def quantized_layout(layout: Layout, config: QuantizeConfig) -> Layout:
    """The layout with the bits and group of `config`; the clips are to be filled in.

    Raises:
        CskvError: the group is larger than the window.
    """
    if config.group > layout.window:
        raise CskvError(
            f"--group {config.group} is more than the window of {layout.window} tokens",
            f"give --group {layout.window} or less, or run: cskv init --window {config.group}",
        )
    every = {
        f"bits_{name}": tuple(
            None if rank is None else getattr(config, f"bits_{name}") for rank in getattr(layout, f"rank_{name}")
        )
        for name in "kv"
    }
    ones = {f"clip_{name}": tuple(None if rank is None else 1.0 for rank in layout.rank_k) for name in "kv"}
    return layout.model_copy(update=every | ones | {"group": config.group})


def quantize(run: Run, source: str, config: QuantizeConfig, inputs: dict[str, str], progress: Progress) -> Manifest:
    """Choose, layer by layer, for keys and for values, the basis of the latents and the clipping of their codes.

    The report holds the relative error that quantization adds to the keys and values of the sample, per layer and
    over all.
    """
    layout = quantized_layout(load_layout(run.folder(source)), config)
    partial = run.partial("quantize", {"config": config.model_dump(mode="json"), "inputs": inputs})
    partial.mkdir(parents=True, exist_ok=True)
    clips: dict[str, list[float | None]] = {name: [None] * len(layout.rank_k) for name in "kv"}
    rows = []
    with progress.task("quantize", len(layout.layers), "layers") as advance:
        for i in layout.layers:
            choices = _layer(run, source, layout, i, config.seed)
            for name, choice in choices.items():
                clips[name][i] = choice.clip
            factors.save_layer(partial, i, _tensors(run.folder(source), i, choices))
            rows.append((i, choices))
            advance(1)
    final = {f"clip_{name}": tuple(clips[name]) for name in "kv"}
    save_layout(partial, layout.model_copy(update=final))
    return run.commit("quantize", partial, config, inputs, _report(rows))


def choose(latents: torch.Tensor, a: torch.Tensor, b: torch.Tensor, quantizer: Quantizer, seed: int) -> Choice:
    """Try bases and clips on latents [runs, tokens, rank] and keep what loses least in latents @ b.

    For any invertible M the factors (A M, M^-1 B) are the same factorization. All bases tried have orthonormal rows in
    B, so that an error in the latents is the same error in the keys or values: the principal axes of the latents,
    whose channels differ most (good where each channel has its own range), and random rotations of them, which spread
    the variance evenly (good where all channels share one).
    """
    axes = principal_axes(latents.flatten(0, 1), b)
    norm = (latents @ b).square().sum().item()
    best = None
    for number, rotation in enumerate(_rotations(a.shape[1], seed)):
        basis = rotation.T @ axes
        turn = b @ basis.T  # latents @ b == (latents @ turn) @ basis, since the rows of basis span those of b
        turned = latents @ turn
        for clip in CLIPS:
            candidate = Quantizer(quantizer.bits, quantizer.group, quantizer.per_channel, clip)
            error = (candidate.round_trip(turned) - turned).square().sum().item()
            if best is None or error < best.error:
                best = Choice(a @ turn, basis, clip, number > 0, error, norm)
    return best


def principal_axes(latents: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows that span the rows of `b` [rank, channels], by falling variance of latents @ b."""
    basis = torch.linalg.qr(b.T).Q
    inside = latents @ (b @ basis)
    return (basis @ torch.linalg.eigh(inside.T @ inside).eigenvectors.flip(-1)).T


def _rotations(rank: int, seed: int) -> list[torch.Tensor]:
    """The identity and some random orthogonal matrices [rank, rank], float64."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(ROTATIONS, rank, rank, generator=generator, dtype=torch.float64)
    return [torch.eye(rank, dtype=torch.float64), *torch.linalg.qr(normal).Q]


def _layer(run: Run, source: str, layout: Layout, index: int, seed: int) -> dict[str, Choice]:
    sample = statistics.load_layer(run.folder("calibrate"), index).sample.double()
    whole = sample.shape[1] // layout.group * layout.group
    if not whole:
        raise CskvError(
            f"the calibration sample has runs of {sample.shape[1]} tokens, less than a group of {layout.group}",
            "calibrate again with a longer --seq-len, or give a smaller --group",
        )
    given = factors.load_layer(run.folder(source), index)
    choices = {}
    for name in "kv":
        a, b = given[f"{name}.a"].double(), given[f"{name}.b"].double()
        quantizer = Quantizer(getattr(layout, f"bits_{name}")[index], layout.group, per_channel=name == "k")
        choices[name] = choose(sample[:, :whole] @ a, a, b, quantizer, seed * 10_000 + index)
    return choices


def _tensors(folder: Path, index: int, choices: dict[str, Choice]) -> dict[str, torch.Tensor]:
    """The layer's factors in their new bases; whatever else it holds stays."""
    tensors = factors.load_layer(folder, index)
    for name, choice in choices.items():
        tensors |= {f"{name}.a": choice.a.float(), f"{name}.b": choice.b.float()}
    return tensors


def _report(rows: list[tuple[int, dict[str, Choice]]]) -> dict:
    relative = lambda chosen: math.sqrt(sum(c.error for c in chosen) / sum(c.norm for c in chosen))  # noqa: E731
    layers = [
        {"index": i}
        | {
            name: {"added_error": relative([choice]), "clip": choice.clip, "rotated": choice.rotated}
            for name, choice in choices.items()
        }
        for i, choices in rows
    ]
    total = {name: relative([choices[name] for _, choices in rows]) for name in "kv"}
    return {"layers": layers, "added_error": total}
