"""What calibration keeps of each layer's attention input, and how it lies on disk."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cskv_cli.distributed import Workers
from cskv_cli.errors import CskvError

ALONE = Workers(0, 1)
MAX_RUNS = 16
RUN_TOKENS = 128

_TENSORS = ("gram", "mean", "mean_abs", "sample")


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer's attention input x over all tokens.

    Attributes:
        gram: X^T X, summed over the tokens, [hidden, hidden], float32.
        mean, mean_abs: mean of x and of |x|, [hidden], float32.
        sample: the first tokens of some windows, [runs, at most 128 tokens, hidden], in the dtype of computation.
        tokens: how many tokens were seen.
    """

    gram: torch.Tensor
    mean: torch.Tensor
    mean_abs: torch.Tensor
    sample: torch.Tensor
    tokens: int


class Collector:
    """Gathers `LayerStatistics` batch by batch: products in float32, their sum in float64.

    The sample is the first 128 tokens of each of at most 16 windows, evenly spread: from the first token on, since
    attention within a run that lacks it is not what it is in a text.

    Args:
        windows: of all processes.
        first: the number of the first window of this process.
    """

    def __init__(self, windows: int, first: int = 0) -> None:
        self.tokens = 0
        self._first = first
        self._sampled = sampled_windows(windows)
        self._sample: list[torch.Tensor] = []
        self._sums: tuple[torch.Tensor, ...] = ()  # of x^T x (its upper triangle), x and |x|

    def add(self, first: int, inputs: torch.Tensor) -> None:
        """Take in this process's windows `first` and following, [batch, seq_len, hidden]."""
        first += self._first
        for window in self._sampled:
            if first <= window < first + len(inputs):
                run = inputs[window - first, :RUN_TOKENS]
                self._sample.append(run.to("cpu", copy=True))  # a view would keep it all
        x = inputs.flatten(0, 1).float()
        if not self._sums:
            hidden, place = x.shape[1], "cpu" if x.device.type == "mps" else x.device  # mps has no float64
            shapes = (hidden, hidden), (hidden,), (hidden,)
            self._sums = tuple(torch.zeros(shape, dtype=torch.float64, device=place) for shape in shapes)
        gram, total, total_abs = self._sums
        _add_products(gram, x)
        total += x.sum(0).to(total.device)
        total_abs += x.abs().sum(0).to(total.device)
        self.tokens += len(x)

    def result(self, workers: Workers = ALONE) -> LayerStatistics:
        """Return the statistics of what all processes have taken in."""
        gram, total, total_abs = (workers.sum(part).cpu() for part in self._sums)
        tokens, samples = zip(*workers.gather((self.tokens, self._sample)), strict=True)
        mean, mean_abs = (total / sum(tokens)).float(), (total_abs / sum(tokens)).float()
        gram = gram.triu() + gram.triu(1).T
        sample = torch.stack([run for runs in samples for run in runs])
        return LayerStatistics(gram.float(), mean, mean_abs, sample, sum(tokens))


def _add_products(total: torch.Tensor, x: torch.Tensor) -> None:
    """Add x^T x, [hidden, hidden], to `total`, as far as it is needed for the upper triangle: 5/8 of the work."""
    size = -(-x.shape[1] // 4)
    for start in range(0, x.shape[1], size):
        rows = slice(start, start + size)
        total[rows, start:] += (x[:, rows].T @ x[:, start:]).to(total.device)


def sampled_windows(windows: int) -> list[int]:
    """The windows that the sample is from, evenly spread."""
    runs = min(MAX_RUNS, windows)
    return [run * windows // runs for run in range(runs)]


def layer_file(folder: Path, index: int) -> Path:
    """Where the statistics of a layer are."""
    return folder / f"layer-{index:03d}.safetensors"


def save_layer(folder: Path, index: int, statistics: LayerStatistics) -> None:
    """Write the statistics of a layer; the file is there whole or not at all.

    Raises:
        CskvError: it cannot be written.
    """
    tensors = {name: getattr(statistics, name) for name in _TENSORS}
    save_atomically(layer_file(folder, index), tensors, {"tokens": str(statistics.tokens)})


def load_layer(folder: Path, index: int) -> LayerStatistics:
    """Read the statistics of a layer, on the CPU.

    Raises:
        CskvError: the file is missing, cut short, or something else.
    """
    path = layer_file(folder, index)
    if not path.exists():
        raise CskvError(f"{path} is missing: layer {index} was not calibrated", "run: cskv calibrate")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
            return LayerStatistics(**tensors, tokens=int(file.metadata()["tokens"]))
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        raise CskvError(f"{path} is damaged: {error}", f"delete {folder} and run: cskv calibrate") from error


def is_whole(path: Path) -> bool:
    """Whether a safetensors file is there with all the bytes its header promises."""
    try:
        with safe_open(path, "pt"):
            return True
    except (SafetensorError, OSError):
        return False


def save_atomically(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file under another name (`*.tmp`), bring it to the disk, then give it its own.

    Raises:
        CskvError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(tensors, temporary, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (SafetensorError, OSError) as error:
        temporary.unlink(missing_ok=True)
        raise CskvError(f"cannot write {path}: {error}", "free some space, then run the command again") from error
