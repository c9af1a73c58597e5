"""ASVD (arXiv 2312.05821), the paper's initialization: SVD of the weight scaled by how active each input channel is."""

from typing import Any

import torch

from cskv_cli.factorize import svd


def factorize(weight: torch.Tensor, rank: int, context: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """With S = diag(mean |x|^alpha): the SVD of S W, and S^-1 taken into A.

    A channel that was never active is scaled as the least active one of float32 precision, so that A stays finite.
    """
    scale = context.mean_abs**context.alpha
    scale = scale.clamp(min=max(scale.max().item(), 1.0) * torch.finfo(torch.float32).eps)[:, None]
    a, b = svd.factorize(weight * scale, rank)
    return a / scale, b
