"""Which device to compute on."""

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
