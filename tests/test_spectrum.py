"""Spectra against the matrices they describe."""

import math

import pytest
import torch

from cskv_cli.spectrum import Spectrum, cache_spectrum, rank_at


def of(*squares: float) -> Spectrum:
    return Spectrum(torch.tensor(squares, dtype=torch.float64).sqrt())


def random_cache(tokens=50, hidden=12, channels=8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -2, hidden, dtype=torch.float64)
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64) * scales + 0.5
    return x, torch.randn(hidden, channels, generator=generator, dtype=torch.float64)


def test_singular_values_are_those_of_the_cache():
    x, w = random_cache()
    torch.testing.assert_close(cache_spectrum(x.T @ x, w).singular_values, torch.linalg.svdvals(x @ w))


def test_single_precision_gives_double_precision_values():
    x, w = random_cache()
    spectrum = cache_spectrum((x.T @ x).float(), w.float())
    assert spectrum.singular_values.dtype == torch.float64
    torch.testing.assert_close(spectrum.singular_values, torch.linalg.svdvals(x @ w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "hidden"), [(3, 12), (50, 5)])
def test_a_cache_of_low_rank_has_zeros_at_the_end_and_no_nan(tokens, hidden):
    x, w = random_cache(tokens, hidden)
    spectrum = cache_spectrum(x.T @ x, w)
    rank = min(tokens, hidden)
    assert spectrum.channels == 8
    assert spectrum.singular_values[rank:].max() < 1e-6 * spectrum.singular_values[0]
    assert spectrum.relative_error(1 - rank / 8) < 1e-7
    assert spectrum.effective_rank <= rank + 1e-6


def test_diagonal():
    spectrum = cache_spectrum(torch.diag(torch.tensor([1.0, 9.0, 4.0])), torch.eye(3))
    assert spectrum.singular_values.tolist() == [3, 2, 1]
    torch.testing.assert_close(spectrum.energy, torch.tensor([9, 13, 14], dtype=torch.float64) / 14)


def test_rank_is_the_smallest_that_keeps_the_energy():
    spectrum = of(16, 4, 4, 4, 4)
    assert [spectrum.rank_for(e) for e in (0.25, 0.5, 0.51, 0.625, 0.63, 0.95)] == [1, 1, 2, 2, 3, 5]


def test_effective_rank_counts_equal_directions():
    assert of(1, 1, 1, 1).effective_rank == pytest.approx(4)
    assert of(1, 1, 0, 0).effective_rank == pytest.approx(2)
    assert of(9, 0, 0).effective_rank == 1
    assert of(2, 1, 1).effective_rank == pytest.approx(2**1.5)


@pytest.mark.parametrize("ratio", [0, 0.3, 0.5, 0.8, 0.99])
def test_relative_error_is_that_of_the_best_approximation(ratio):
    x, w = random_cache()
    cache = x @ w
    rank = rank_at(ratio, 8)
    u, s, vh = torch.linalg.svd(cache, full_matrices=False)
    error = (cache - u[:, :rank] * s[:rank] @ vh[:rank]).norm() / cache.norm()
    assert cache_spectrum(x.T @ x, w).relative_error(ratio) == pytest.approx(float(error), abs=1e-7)


def test_an_error_below_the_precision_of_the_energy_is_still_told():
    assert of(1, 1e-20).relative_error(0.5) == pytest.approx(1e-10)


def test_rank_at():
    ranks = [(0.5, 192, 96), (0.8, 192, 38), (0.875, 192, 24), (0.125, 192, 168), (0.7, 12, 4), (0, 8, 8), (0.99, 8, 1)]
    assert [rank_at(ratio, channels) for ratio, channels, _ in ranks] == [rank for *_, rank in ranks]


def test_a_cache_of_zeros_loses_nothing():
    spectrum = cache_spectrum(torch.eye(4), torch.zeros(4, 3))
    assert [spectrum.rank_for(0.99), spectrum.effective_rank, spectrum.relative_error(0.9)] == [1, 1, 0]
    assert not any(math.isnan(share) for share in spectrum.energy)
    assert spectrum.singular_values.tolist() == [0, 0, 0]
