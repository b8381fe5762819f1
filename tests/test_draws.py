"""What rows draw: the known generator underneath, no trace of the batch, and no pattern in the numbers."""

import math

import pytest
import torch
from torch import Generator, Tensor

from ell0.attacks.draws import _GOLDEN, Draws, _mix


def draws(rows: int | Tensor, seed: int = 0) -> Draws:
    ids = torch.arange(rows) if isinstance(rows, int) else rows
    return Draws(Generator().manual_seed(seed), ids)


def chi2(counts: Tensor) -> float:
    """Pearson's statistic of counts ``(cells,)`` against the uniform, in standard deviations from its mean."""
    expected = counts.sum() / counts.numel()
    free = counts.numel() - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - free) / math.sqrt(2 * free)


def test_the_hash_is_splitmix64() -> None:
    # The first outputs for the seed 1234567, published with the reference implementation.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    state = 1234567 + torch.arange(1, 6) * _GOLDEN
    assert [value % 2**64 for value in _mix(state).tolist()] == known


def test_a_draw_depends_on_the_key_the_row_the_moment_and_nothing_else() -> None:
    ids = torch.tensor([7, -3, 2**62, 0, 11])
    every = draws(ids)
    expected = every.bits(torch.arange(5), 4, 9)
    assert torch.equal(every.bits(torch.tensor([3, 1]), 4, 9), expected[[3, 1]])
    assert torch.equal(draws(ids[2:3]).bits(torch.tensor([0]), 4, 9), expected[2:3])
    assert torch.equal(every.bits(torch.arange(5), 4, 3), expected[:, :3])
    at = torch.arange(5)
    several = every.bits(at, torch.tensor([[4], [0], [10**6]]), 9)
    assert torch.equal(several, torch.stack([every.bits(at, query, 9) for query in (4, 0, 10**6)]))
    for other in (draws(ids, seed=1).bits(at, 4, 9), every.bits(at, 5, 9), draws(ids + 1).bits(at, 4, 9)):
        assert not torch.isin(other, expected).any()


def test_keys_come_from_the_generator_and_the_global_state_stays() -> None:
    before, at = torch.random.get_rng_state(), torch.arange(3)
    generator = Generator().manual_seed(0)
    first, second = (Draws(generator, at).bits(at, 0, 4) for _ in range(2))
    assert torch.equal(Draws(None, at).bits(at, 0, 4), first)  # without a generator the seed is 0
    assert not torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("axis", ["rows", "queries", "draws"])
def test_every_bit_is_fair_and_no_two_neighbours_agree_more_than_by_chance(axis: str) -> None:
    n = 20_000
    if axis == "rows":
        bits = draws(n).bits(torch.arange(n), 0, 1)[:, 0]
    elif axis == "queries":
        every = draws(1)
        bits = torch.cat([every.bits(torch.tensor([0]), query, 1)[0] for query in range(n)])
    else:
        bits = draws(1).bits(torch.tensor([0]), 0, n)[0]
    assert len(bits.unique()) == n
    signs = ((bits.unsqueeze(1) >> torch.arange(64)) & 1).double() * 2 - 1
    limit = 5 * math.sqrt(n)  # five standard deviations, of 64 + 3 * 64 + 64 * 63 / 2 sums
    assert signs.sum(0).abs().max() < limit
    for lag in (1, 2, 64):
        assert (signs[lag:] * signs[:-lag]).sum(0).abs().max() < limit
    pairs = signs.T @ signs - n * torch.eye(64)
    assert pairs.abs().max() < limit


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    numbers = draws(300).uniform(torch.arange(300), 1, 300)
    assert numbers.dtype == torch.float64
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    assert abs(chi2((numbers.flatten() * 100).long().bincount(minlength=100).double())) < 5
    # In pairs: of neighbouring draws, and of neighbouring rows.
    for one, other in ((numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])):
        cells = (one * 16).long() * 16 + (other * 16).long()
        assert abs(chi2(cells.flatten().bincount(minlength=256).double())) < 5


def test_normal_numbers_are_normal() -> None:
    numbers = draws(200).normal(torch.arange(200), 0, 501)
    assert numbers.shape == (200, 501)
    assert numbers.isfinite().all()
    # Through the normal distribution function they are uniform.
    shares = torch.special.ndtr(numbers.flatten())
    assert abs(chi2((shares * 100).long().clamp(max=99).bincount(minlength=100).double())) < 5
    scaled = torch.corrcoef(numbers.T[:40])[torch.triu(torch.ones(40, 40), 1).bool()] * math.sqrt(200)
    assert scaled.abs().max() < 5
