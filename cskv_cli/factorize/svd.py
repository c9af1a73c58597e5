"""Truncated SVD of the weight: needs no data, and does not know which inputs occur."""

from typing import Any

import torch


def factorize(weight: torch.Tensor, rank: int, context: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A = U_r sqrt(S_r), B = sqrt(S_r) V_r^T, the best rank-r approximation of `weight` [hidden, channels]."""
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * vh[:rank]
