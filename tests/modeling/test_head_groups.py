"""Latents of groups of heads: the same as a B that is block-diagonal, and the base at full rank."""

import pytest
import torch

from cskv_cli.modeling.cskv_factors import GroupedUp, Scratch, made_of_tile
from tests.families import base_model, compressed
from tests.modeling.decoding import base, close, decode, padding, tokens
from tests.modeling.test_decode import LENGTH, PROMPT, SIZES, both
from tests.modeling.test_decode import steps as steps

GROUPS, WIDTH = 2, 6
SETTINGS = dict(rank=GROUPS * WIDTH, window=8, sinks=2, group=4)


def grouped(weight):
    """A of all groups side by side, and their blocks of B: [width, channels]."""
    made = []
    for channels in weight.T.chunk(GROUPS, dim=1):
        u, s, v = torch.linalg.svd(channels, full_matrices=False)
        made.append((u[:, :WIDTH] * s[:WIDTH], v[:WIDTH]))
    return tuple(torch.cat(part, dim=1) for part in zip(*made, strict=True))


def dense(weight):
    """The same with B as a whole matrix."""
    down, up = grouped(weight)
    return down, torch.block_diag(*up.chunk(GROUPS, dim=1))


@pytest.mark.parametrize("bits", [None, 3])
@pytest.mark.parametrize("family", ["Llama:bias", "Qwen3", "Phi3"])
def test_it_is_a_block_diagonal_matrix(family, bits, steps):
    ids, mask = tokens(2, LENGTH), padding([0, 3], LENGTH)
    ours = compressed(base(family), grouped, head_groups=GROUPS, bits=bits, **SETTINGS)
    theirs = compressed(base(family), dense, bits=bits, **SETTINGS)
    assert ours.model.layers[0].self_attn.k_up.weight.shape == (32, WIDTH)
    close(decode(ours, ids, SIZES, mask=mask), decode(theirs, ids, SIZES, mask=mask))
    taken = len(steps)
    close(*both(ours, ids, mask, prompt=LENGTH - 3))  # step by step, and with the history rebuilt
    assert taken and len(steps) > taken


def test_full_rank_is_the_base():
    """Each group of heads has the whole input for its latents."""
    eye = torch.eye(64)
    exact = lambda weight: (torch.cat([eye] * GROUPS, dim=1), weight.T)  # noqa: E731
    model = compressed(base_model("Llama:bias"), exact, rank=GROUPS * 64, head_groups=GROUPS, window=4, sinks=2)
    sizes = [PROMPT] + [1] * (LENGTH - PROMPT)
    close(decode(model, tokens(2, LENGTH), sizes), decode(base("Llama:bias"), tokens(2, LENGTH), sizes))


@pytest.mark.parametrize("bias", [False, True])
def test_a_tile_has_tokens_last(bias):
    torch.manual_seed(0)
    up = GroupedUp(12, 18, 3, bias)
    if bias:
        torch.nn.init.normal_(up.bias)
    latents = torch.randn(2, 40, 12)
    with torch.no_grad():
        torch.testing.assert_close(made_of_tile(up, latents.mT[..., 5:25], Scratch()), up(latents[:, 5:25]).mT)
        whole = torch.block_diag(*up.weight.chunk(3)) @ latents.mT
        torch.testing.assert_close(up(latents), (whole.mT + up.bias) if bias else whole.mT)
