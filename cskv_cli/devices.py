"""Which device to compute on, and how fast it is."""

import time

import torch

from cskv_cli.errors import CskvError


def pick_device(name: str) -> str:
    """The device asked for; `auto` is the best there is.

    Raises:
        CskvError: it is not there.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device, there in available.items() if there)
    if not available[name]:
        raise CskvError(f"there is no {name} device here", "use --device auto")
    return name


def fast_dtype(device: str) -> torch.dtype:
    """bfloat16 where the device computes in it faster than in float32, else float32."""
    if device == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        about = torch.cpu.get_capabilities() if device == "cpu" and hasattr(torch.cpu, "get_capabilities") else {}
        fast = about.get("avx512_bf16") or about.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32


def multiply_adds_per_second(device: str, dtype: torch.dtype) -> float:
    """What a matrix product of a middling size reaches here, from a few tenths of a second of trying."""
    a, b = torch.ones(512, 2048, device=device, dtype=dtype), torch.ones(2048, 2048, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        (a @ b)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - began)
    return 512 * 2048 * 2048 / best
