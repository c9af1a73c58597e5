"""The global minimum of the paper's own loss (eq. 1), in closed form."""

from typing import Any

import torch


def factorize(weight: torch.Tensor, rank: int, context: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A = W V, B = V^T, with V the top eigenvectors of W^T C W.

    X W is best approximated by its projection on its own leading right singular vectors, which are the eigenvectors
    of (X W)^T (X W) = W^T C W (Eckart and Young). C is never inverted, so it may be rank-deficient.
    """
    covariance = weight.T @ context.gram @ weight
    vectors = torch.linalg.eigh((covariance + covariance.T) / 2).eigenvectors.flip(-1)[:, :rank]
    return weight @ vectors, vectors.T.contiguous()
