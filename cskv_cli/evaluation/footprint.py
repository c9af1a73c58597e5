"""What a process needs while it decodes."""

import ctypes
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch


def decoding_peak(prepare: Callable[..., tuple[Callable[[], None], Callable[[], None]]], *args: Any) -> dict | None:
    """Memory of a process of its own that does nothing but this, in bytes.

    Args:
        prepare: loads what is needed for `args`, and returns two functions: one that reads a prompt, one that decodes.

    Returns:
        `idle`: once all is loaded; `prefill` and `decode`: the peak of each. None where the system does not tell
        (resident memory on Linux, allocated memory on CUDA).
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_watch, args=(sender, prepare, args))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()


def _watch(sender: Connection, prepare: Callable, args: tuple) -> None:
    prefill, decode = prepare(*args)
    reading = _cuda if torch.cuda.is_initialized() else _resident
    try:
        idle, _ = reading()
        prefill()
        _, read = reading()
        decode()
        _, decoded = reading()
    except OSError:  # no /proc
        sender.send(None)
        return
    sender.send({"idle": idle, "prefill": read, "decode": decoded})


def _cuda() -> tuple[int, int]:
    """Bytes held now, and at the peak since this was last asked."""
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), peak


def _resident() -> tuple[int, int]:
    """As `_cuda`, of this process; what it has freed is first given back to the system."""
    peak = _status("VmHWM")
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS"), peak


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
