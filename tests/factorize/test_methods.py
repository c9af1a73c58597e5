"""The factorizations against their closed forms, and against each other on the loss they are for."""

import pytest
import torch

from cskv_cli.factorize import METHODS, Context, squared_error
from cskv_cli.factorize.groups import factorized, product

HIDDEN, CHANNELS, TOKENS = 24, 16, 200


def problem(seed=0, dead=()):
    """Inputs with unequal channels, a weight, and the context calibration would give."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(1, -2, HIDDEN, dtype=torch.float64)
    mix = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64) * scale @ mix + scale
    x[:, list(dead)] = 0
    weight = torch.randn(HIDDEN, CHANNELS, generator=generator, dtype=torch.float64)
    context = Context(x.T @ x, x.abs().mean(0), 0.5, torch.Generator().manual_seed(1))
    return x, weight, context


def error_of(method, rank, seed=0):
    x, weight, context = problem(seed)
    return squared_error(weight, *METHODS[method](weight, rank, context), context.gram)[0]


def test_squared_error_is_that_of_the_cache():
    x, weight, context = problem()
    a, b = METHODS["svd"](weight, 5)
    expected = (x @ weight - x @ a @ b).square().sum(), (x @ weight).square().sum()
    torch.testing.assert_close(torch.tensor(squared_error(weight, a, b, context.gram)), torch.stack(expected).float())


@pytest.mark.parametrize("rank", [1, 5, 15])
def test_whitened_reaches_the_best_rank_r_error(rank):
    x, weight, context = problem()
    singular = torch.linalg.svdvals(x @ weight)
    assert error_of("whitened", rank) == pytest.approx(singular[rank:].square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("method", ["asvd", "svd", "random"])
def test_whitened_is_never_worse(method, seed):
    for rank in (1, 4, 9, 15):
        assert error_of("whitened", rank, seed) <= error_of(method, rank, seed) * (1 + 1e-9)


@pytest.mark.parametrize("method", ["whitened", "asvd", "svd"])
def test_full_rank_is_exact_and_error_falls_with_rank(method):
    _, weight, context = problem()
    a, b = METHODS[method](weight, CHANNELS, context)
    torch.testing.assert_close(a @ b, weight, rtol=1e-6, atol=1e-6)
    if method == "whitened":
        errors = [error_of(method, rank) for rank in range(1, CHANNELS)]
        assert all(after < before for before, after in zip(errors, errors[1:], strict=False))


def test_svd_is_the_best_approximation_of_the_weight():
    _, weight, _ = problem()
    a, b = METHODS["svd"](weight, 5)
    expected = torch.linalg.svdvals(weight)[5:].square().sum()
    torch.testing.assert_close((weight - a @ b).square().sum(), expected)
    torch.testing.assert_close(a.T @ a, b @ b.T)  # the singular values are shared evenly


def test_asvd_is_the_svd_of_the_scaled_weight():
    _, weight, context = problem()
    scale = context.mean_abs.sqrt()[:, None]
    u, s, vh = torch.linalg.svd(scale * weight, full_matrices=False)
    a, b = METHODS["asvd"](weight, 6, context)
    torch.testing.assert_close(a @ b, (u[:, :6] * s[:6] @ vh[:6]) / scale)


def test_asvd_with_alpha_zero_is_svd():
    _, weight, context = problem()
    plain = Context(context.gram, context.mean_abs, 0.0, context.generator)
    for ours, theirs in zip(METHODS["asvd"](weight, 6, plain), METHODS["svd"](weight, 6), strict=True):
        torch.testing.assert_close(ours.abs(), theirs.abs())


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_deficient_gram_gives_finite_factors(method):
    x, weight, _ = problem(dead=(0, 7))
    few = x[:3]
    context = Context(few.T @ few, few.abs().mean(0), 0.5, torch.Generator().manual_seed(1))
    a, b = METHODS[method](weight, 8, context)
    assert a.float().isfinite().all() and b.float().isfinite().all()
    if method == "whitened":
        torch.testing.assert_close(few @ a @ b, few @ weight)


def test_random_is_seeded_and_has_the_size_of_a_fresh_layer():
    _, weight, _ = problem()
    draw = lambda seed: METHODS["random"](  # noqa: E731
        weight, 8, Context(None, None, 0.5, torch.Generator().manual_seed(seed))
    )
    assert torch.equal(draw(1)[0], draw(1)[0]) and not torch.equal(draw(1)[0], draw(2)[0])
    assert draw(1)[0].abs().max() <= HIDDEN**-0.5 and draw(1)[1].abs().max() > 8**-0.5 * 0.8


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_of_heads_reach_the_best_error_of_each(groups):
    x, weight, context = problem()
    rank, errors = 8, []
    a, b = factorized(lambda part, rank: METHODS["whitened"](part, rank, context), weight, rank, groups)
    assert (a.shape, b.shape) == ((HIDDEN, rank), (rank // groups, CHANNELS))
    for channels in weight.chunk(groups, dim=1):
        errors.append(torch.linalg.svdvals(x @ channels)[rank // groups :].square().sum().item())
    assert squared_error(weight, a, b, context.gram)[0] == pytest.approx(sum(errors), rel=1e-6)
    torch.testing.assert_close(product(a, b), a @ torch.block_diag(*b.chunk(groups, dim=1)))
