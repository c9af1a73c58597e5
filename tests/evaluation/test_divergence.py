"""KL divergence of logits, and its gradient, against torch's own."""

import pytest
import torch
from torch import nn

from cskv_cli.evaluation.divergence import ROWS, divergence


@pytest.mark.parametrize("tokens", [1, ROWS, 2 * ROWS + 3])
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_divergence_is_torchs_and_so_is_its_gradient(tokens, dtype, close):
    generator = torch.Generator().manual_seed(0)
    full, compressed = (3 * torch.randn(tokens, 50, generator=generator).to(dtype) for _ in range(2))
    logs = [logits.double().requires_grad_() for logits in (full, compressed)]
    expected = nn.functional.kl_div(
        logs[1].log_softmax(-1), logs[0].log_softmax(-1), log_target=True, reduction="batchmean"
    )
    (0.5 * expected).backward()
    compressed.requires_grad_()
    got = divergence(full, compressed)
    (0.5 * got).backward()
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    assert compressed.grad.dtype == dtype
    limit = close * logs[1].grad.abs().max().item()
    torch.testing.assert_close(compressed.grad.double(), logs[1].grad, rtol=close, atol=limit)
    with torch.inference_mode():
        assert divergence(full, compressed.detach()).item() == got.item()


def test_nothing_is_far_from_itself():
    logits = 5 * torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    assert divergence(logits, logits).item() == 0
    assert divergence(logits, logits + 1).item() == pytest.approx(0, abs=1e-6)  # the same probabilities
