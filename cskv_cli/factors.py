"""The artifact of the stages that make factors, beside the layout: one file per layer."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from cskv_cli.statistics import layer_file, save_atomically


def save_layer(folder: Path, index: int, factors: dict[str, torch.Tensor]) -> None:
    """Write the factors of a layer: `k.a` [hidden, rank], `k.b` [rank / groups, channels], likewise `v`; float32.

    Raises:
        CskvError: they cannot be written.
    """
    tensors = {name: tensor.float().contiguous() for name, tensor in factors.items()}
    save_atomically(layer_file(folder, index), tensors, {})


def load_layer(folder: Path, index: int) -> dict[str, torch.Tensor]:
    """The factors of a layer, as `save_layer` was given them."""
    return load_file(layer_file(folder, index))
