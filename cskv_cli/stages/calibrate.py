"""`cskv calibrate`: statistics of every compressible layer's attention input, one layer in memory at a time."""

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from cskv_cli import statistics
from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.checkpoint.layers import LayerByLayer, compressible_layers, load_by_layer
from cskv_cli.checkpoint.load import load_base, load_tokenizer
from cskv_cli.config import CalibrateConfig, DataConfig
from cskv_cli.data.self_sample import sample_from_model
from cskv_cli.data.sources import parse_source
from cskv_cli.data.windows import Windows, calibration_windows
from cskv_cli.devices import pick_device
from cskv_cli.distributed import workers
from cskv_cli.errors import CskvError
from cskv_cli.progress import Progress
from cskv_cli.run import Manifest, Run

DEFAULT_DATA = ("self", "builtin@3")
DEFAULT_NOTE = (
    "no --data: calibrated on text that the model writes and on text from Python's installation; --data with text like "
    "yours does better (docs/results.md shows by how much)"
)
SAVE_EVERY = 60.0  # seconds of work that a kill may cost


def windows_for(
    config: CalibrateConfig, base: BaseModel, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> Windows:
    """Draw the windows that `config` asks for; for `self` the whole model is loaded for as long as it writes.

    Raises:
        CskvError: a source is not there, cannot be read or is too short.
    """

    def generate(count: int, seq_len: int, seed: int) -> torch.LongTensor:
        model = load_base(base.folder, pick_device(config.device), _dtype(config, base))
        with progress.task("write text with the model", count, "windows") as advance:
            done = 0

            def report(texts: int, of: int) -> None:
                nonlocal done
                done, before = count * texts // of, done
                advance(done - before)

            return sample_from_model(model, tokenizer, count=count, seq_len=seq_len, seed=seed, progress=report)

    sources = [parse_source(text) for text in config.data or DEFAULT_DATA]
    drawn = calibration_windows(
        sources, tokenizer, samples=config.samples, seq_len=config.seq_len, seed=config.seed, generate=generate
    )
    notes = drawn.notes if config.data else (DEFAULT_NOTE, *drawn.notes)
    return Windows(drawn.ids, drawn.counts, notes)


def kept_windows(
    run: Run, base: BaseModel, config: DataConfig, path: Path, progress: Progress
) -> tuple[torch.Tensor, list[str]]:
    """The windows that `config` asks for and notes on them, drawn once and kept in `path`: some sources take long.

    Without data they are of the calibration's text.
    """
    if not statistics.is_whole(path):
        data = config.data or tuple(run.manifest("calibrate").config["data"])
        asked = CalibrateConfig(**config.model_dump() | {"data": data})
        drawn = windows_for(asked, base, load_tokenizer(base.folder), progress)
        notes = [note for note in drawn.notes if data]
        statistics.save_atomically(path, {"ids": drawn.ids}, {"notes": json.dumps(notes)})
    with safe_open(path, "pt") as file:
        return file.get_tensor("ids"), json.loads(file.metadata()["notes"])


def calibrate(
    run: Run, base: BaseModel, config: CalibrateConfig, inputs: dict[str, str], windows: Windows, progress: Progress
) -> Manifest:
    """Collect `LayerStatistics` of every compressible layer (see `statistics`); the layers behind the last are not run.

    A run that was interrupted goes on from the hidden states it last saved, to the same bytes. Several processes share
    the windows.

    Raises:
        CskvError: there are more processes than windows, there is nothing to compress, numbers overflow, or files
            cannot be written.
    """
    device, dtype = pick_device(config.device), _dtype(config, base)
    partial = run.partial("calibrate", _identity(config, inputs, windows, device, dtype))
    partial.mkdir(parents=True, exist_ok=True)
    if len(windows.ids) < workers().count:
        raise CskvError(f"{len(windows.ids)} windows cannot be shared by {workers().count} processes", "give more text")
    with run.offload() as offload:
        model = load_by_layer(base.folder, Path(offload), dtype=dtype, device=device)
        layers = compressible_layers(model.config)
        states = LayerByLayer(model, windows.ids[workers().part(len(windows.ids))], device)
        _collect(states, layers, len(windows.ids), partial, progress)
    workers().wait()
    if workers().main:
        _remove_all_but_layers(partial)
    report = {
        "layers": layers,
        "tokens": windows.ids.numel(),
        "samples": windows.ids.shape[0],
        "seq_len": windows.ids.shape[1],
        "sources": windows.counts,
        "notes": list(windows.notes),
    }
    return run.commit("calibrate", partial, config, inputs, report)


def _dtype(config: CalibrateConfig, base: BaseModel) -> torch.dtype:
    return getattr(torch, base.dtype if config.dtype == "auto" else config.dtype)


def _identity(
    config: CalibrateConfig, inputs: dict[str, str], windows: Windows, device: str, dtype: torch.dtype
) -> dict[str, object]:
    ids = hashlib.sha256(windows.ids.contiguous().numpy().tobytes()).hexdigest()
    settings = config.model_dump(mode="json") | {"device": device, "dtype": str(dtype)}
    return {"config": settings, "inputs": inputs, "ids": ids}


def _remove_all_but_layers(folder: Path) -> None:
    """Remove the hidden states, and what a killed process left half-written."""
    for path in folder.iterdir():
        if not path.match("layer-*.safetensors"):
            path.unlink()


def _collect(states: LayerByLayer, layers: list[int], windows: int, partial: Path, progress: Progress) -> None:
    """Write the files of `layers` that are not there; `windows` are those of all processes."""
    count = layers[-1] + 1
    done = workers().told([i for i in layers if statistics.is_whole(statistics.layer_file(partial, i))])
    checkpoint = _Checkpoint(partial / f"hidden-{workers().rank}.safetensors")
    first = checkpoint.restore(states.hidden, layers)
    with progress.task("calibrate", (count - first) * len(states.hidden), "windows") as advance:
        for index in range(first, count):
            if index not in layers or index in done:
                states.push(index, advance=advance)
            else:
                collector = statistics.Collector(windows, workers().part(windows).start)
                states.push(index, collector.add, advance)
                result = collector.result(workers())
                if workers().main:
                    statistics.save_layer(partial, index, result)
            checkpoint.save_if_due(states.hidden, index + 1)


class _Checkpoint:
    """Saves the hidden states now and then, so seldom that saving takes at most about a tenth of the time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved = time.monotonic()
        self._cost = 0.0

    def restore(self, hidden: torch.Tensor, layers: list[int]) -> int:
        """Read saved hidden states into `hidden`; return the layer they are the input of, 0 without any of use."""
        if not statistics.is_whole(self._path):
            return 0
        with safe_open(self._path, "pt") as file:
            following = int(file.metadata()["layer"])
        folder = self._path.parent
        if not all(statistics.is_whole(statistics.layer_file(folder, i)) for i in layers if i < following):
            return 0
        for window in range(len(hidden)):
            # opened anew, or in the end all of it would be mapped into memory
            with safe_open(self._path, "pt") as file:
                hidden[window] = file.get_slice("hidden")[window]
        return following

    def save_if_due(self, hidden: torch.Tensor, layer: int) -> None:
        began = time.monotonic()
        if began - self._saved < SAVE_EVERY * max(1.0, self._cost / 6):
            return
        with suppress(CskvError):  # a full disk: a run that is killed then begins again at an older state
            statistics.save_atomically(self._path, {"hidden": hidden}, {"layer": str(layer)})
        self._saved = time.monotonic()
        self._cost = self._saved - began
