"""`cskv quantize`: codes for the latents, in the basis and with the clipping that hurt attention least."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cskv_cli import factors, statistics
from cskv_cli.allocation import read_allocation
from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.checkpoint.layers import in_memory, load_by_layer
from cskv_cli.config import QuantizeConfig
from cskv_cli.distributed import workers
from cskv_cli.errors import CskvError
from cskv_cli.evaluation.attention import AttentionOutput
from cskv_cli.factorize.groups import parts, product
from cskv_cli.layout import Layout, load_layout, save_layout
from cskv_cli.modeling.cskv_quantizer import Quantizer
from cskv_cli.modeling.cskv_structure import attentions
from cskv_cli.progress import Progress
from cskv_cli.run import Manifest, Run
from cskv_cli.stages.finetune import raise_if_failed, train

CLIPS = (1.0, 0.95, 0.9)
ROTATIONS = 2

Error = Callable[[torch.Tensor], float]


@dataclass(frozen=True)
class Choice:
    """Factors in the basis chosen, how to quantize their latents, and the error that remains."""

    a: torch.Tensor
    b: torch.Tensor
    clip: float
    rotated: bool
    error: float


def quantized_layout(layout: Layout, config: QuantizeConfig) -> Layout:
    """The layout with the bits and group of `config`; the clips are to be filled in.

    Raises:
        CskvError: the group is larger than the window.
    """
    if config.group > layout.window:
        raise CskvError(
            f"--group {config.group} is more than the window of {layout.window} tokens",
            f"give --group {layout.window} or less, or --window {config.group} to compress or init",
        )
    every = {
        f"bits_{name}": tuple(
            None if rank is None else getattr(config, f"bits_{name}") for rank in getattr(layout, f"rank_{name}")
        )
        for name in "kv"
    }
    ones = {f"clip_{name}": tuple(None if rank is None else 1.0 for rank in layout.rank_k) for name in "kv"}
    return layout.model_copy(update=every | ones | {"group": config.group})


def allocated_layout(layout: Layout, path: Path) -> Layout:
    """The layout with the bits and group of an allocation; the clips are to be filled in.

    Raises:
        CskvError: its ranks or its window are not those of the layout.
    """
    allocation = read_allocation(path)
    layers = sorted({*layout.layers, *layout.whole})
    ranks = [rank for rank in layout.rank_k + layout.rank_v if rank is not None]
    chosen = {each.index: each for each in allocation.layers}
    hint = f"run: cskv init --allocation {path}"
    for i in layers:
        for name in "kv":
            ours, each = getattr(layout, f"rank_{name}")[i], getattr(chosen.get(i), name, None)
            if i in chosen and ours != (each and each.rank):
                theirs = "leaves it whole" if each is None else f"has rank {each.rank}"
                raise CskvError(f"layer {i}: {path} {theirs} for {name}, the factors have {ours or 'none'}", hint)
    if (allocation.window, allocation.sinks) != (layout.window, layout.sinks):
        raise CskvError(f"{path} is for another window or number of sinks than the factors", hint)
    allocated = allocation.layout(len(layout.rank_k), path, layers, max(ranks))
    return allocated.model_copy(update={"head_groups": layout.head_groups})


def quantize(
    run: Run,
    base: BaseModel,
    source: str,
    config: QuantizeConfig,
    inputs: dict[str, str],
    progress: Progress,
    allocation: Path | None = None,
) -> Manifest:
    """Choose, layer by layer, for keys and for values, the basis of the latents and the clipping of their codes.

    What is compared is the output of the layer's own attention on the calibration sample (see `output_error`). The
    report holds the relative error that quantization adds to it, per layer and over all. With `config.qat` the factors
    are then trained with the codes in the loop.
    """
    layout = load_layout(run.folder(source))
    layout = quantized_layout(layout, config) if allocation is None else allocated_layout(layout, allocation)
    partial = run.partial("quantize", {"config": config.model_dump(mode="json"), "inputs": inputs})
    partial.mkdir(parents=True, exist_ok=True)
    chosen = _choose_all(run, base, source, layout, config.seed, partial, progress) if workers().main else None
    layout, report = workers().told(chosen)
    if config.qat is not None:
        report["qat"] = train(run, base, layout, partial, config.qat, partial, progress)
    if workers().main:
        save_layout(partial, layout)
    manifest = run.commit("quantize", partial, config, inputs, report)
    raise_if_failed(run.folder("quantize"), report.get("qat", {}))
    return manifest


def _choose_all(
    run: Run, base: BaseModel, source: str, layout: Layout, seed: int, folder: Path, progress: Progress
) -> tuple[Layout, dict]:
    """Write the factors in the bases chosen; the layout with the clips chosen, and the report."""
    clips: dict[str, list[float | None]] = {name: [None] * len(layout.rank_k) for name in "kv"}
    rows = []
    with run.offload() as offload, torch.inference_mode():
        model = load_by_layer(base.folder, Path(offload), dtype=torch.float32, device="cpu")
        modules = attentions(model)
        with progress.task("quantize", len(layout.layers), "layers") as advance:
            for i in layout.layers:
                with in_memory(modules[i]) as attention:
                    output = AttentionOutput(model, attention, _sample(run, layout, i))
                    choices, norm = _layer(run.folder(source), layout, i, output, seed)
                for name, choice in choices.items():
                    clips[name][i] = choice.clip
                factors.save_layer(folder, i, _tensors(run.folder(source), i, choices))
                rows.append((i, choices, norm))
                advance(1)
    return layout.model_copy(update={f"clip_{name}": tuple(clips[name]) for name in "kv"}), _report(rows)


def choose(
    latents: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    quantizer: Quantizer,
    seed: int,
    error: Error,
    sinks: int = 0,
) -> Choice:
    """Try bases and clips on latents [runs, tokens, rank] and keep the one of least `error`.

    For any invertible M the factors (A M, M^-1 B) are the same factorization. All bases tried have orthonormal rows in
    B: the principal axes of the keys or values, whose channels differ most, and random rotations of them, which spread
    variance and error evenly. Of head groups each has its own axes, and all have the same rotation.

    Args:
        error: of keys or values [runs, tokens, channels] made from the codes.
        sinks: first tokens of each run, whose latents are never read.
    """
    axes = [principal_axes(ours[:, sinks:].flatten(0, 1), block) for ours, block in parts(latents, b)]
    best = None
    for number, rotation in enumerate(_rotations(b.shape[0], seed)):
        basis = torch.cat([rotation.T @ ours for ours in axes], dim=1)
        # latents @ b == (latents @ turn) @ basis, since the rows of basis span those of b
        turn = torch.cat(
            [block @ new.T for (_, block), (_, new) in zip(parts(a, b), parts(a, basis), strict=True)], dim=1
        )
        turned = product(latents, turn).float()
        for clip in CLIPS:
            tried = Quantizer(quantizer.bits, quantizer.group, quantizer.per_channel, clip)
            remaining = error(product(tried.round_trip(turned, sinks), basis.float()))
            if best is None or remaining < best.error:
                best = Choice(product(a, turn), basis, clip, number > 0, remaining)
    return best


def output_error(output: torch.Tensor, expected: torch.Tensor, layers: int) -> float:
    """Squared error of a layer's output, the part along the output itself counted once for every layer.

    Clipping lowers the squared error and shrinks the output; that adds up over the layers, where rounding does not.
    """
    difference, expected = (output - expected).flatten().double(), expected.flatten().double()
    along = (difference @ expected).square() / (expected @ expected)
    return (difference @ difference + (layers - 1) * along).item()


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


def _sample(run: Run, layout: Layout, index: int) -> torch.Tensor:
    """The calibration sample of a layer, [runs, whole groups of tokens, hidden], float32."""
    sample = statistics.load_layer(run.folder("calibrate"), index).sample.float()
    whole = sample.shape[1] // layout.group * layout.group
    if not whole:
        raise CskvError(
            f"the calibration sample has runs of {sample.shape[1]} tokens, less than a group of {layout.group}",
            "calibrate again with a longer --seq-len, or give a smaller --group",
        )
    return sample[:, :whole]


def _layer(
    folder: Path, layout: Layout, index: int, output: AttentionOutput, seed: int
) -> tuple[dict[str, Choice], float]:
    """The choices for keys and values, and the squared norm of the attention output without quantization."""
    given = {name: tensor.double() for name, tensor in factors.load_layer(folder, index).items()}
    latents = {name: output.hidden.double() @ given[f"{name}.a"] for name in "kv"}
    kept = {name: product(latents[name], given[f"{name}.b"]).float() for name in "kv"}
    expected = output(**kept)
    choices = {}
    for name in "kv":
        bits = getattr(layout, f"bits_{name}")[index]
        if bits is None:  # stays as it is
            choices[name] = Choice(given[f"{name}.a"], given[f"{name}.b"], 1.0, rotated=False, error=0.0)
            continue
        quantizer = Quantizer(bits, layout.group, per_channel=name == "k")

        def error(states: torch.Tensor, name: str = name) -> float:
            exact = kept[name][:, : layout.sinks]
            tried = torch.cat([exact, states[:, layout.sinks :]], dim=1)
            return output_error(output(**kept | {name: tried}), expected, len(layout.layers))

        choices[name] = choose(
            latents[name], given[f"{name}.a"], given[f"{name}.b"], quantizer, seed * 10_000 + index, error, layout.sinks
        )
    return choices, expected.square().sum().item()


def _tensors(folder: Path, index: int, choices: dict[str, Choice]) -> dict[str, torch.Tensor]:
    """The layer's factors in their new bases; whatever else it holds stays."""
    tensors = factors.load_layer(folder, index)
    for name, choice in choices.items():
        tensors |= {f"{name}.a": choice.a.float(), f"{name}.b": choice.b.float()}
    return tensors


def _report(rows: list[tuple[int, dict[str, Choice], float]]) -> dict:
    layers = [
        {"index": i}
        | {
            name: {"added_error": math.sqrt(choice.error / norm), "clip": choice.clip, "rotated": choice.rotated}
            for name, choice in choices.items()
        }
        for i, choices, norm in rows
    ]
    norms = sum(norm for *_, norm in rows)
    total = {name: math.sqrt(sum(choices[name].error for _, choices, _ in rows) / norms) for name in "kv"}
    return {"layers": layers, "added_error": total}
