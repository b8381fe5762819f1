"""Slips of the paper that docs/paper.md lists and no other test shows."""

from __future__ import annotations

import math

import numpy as np
import torch

from ell0 import recipe
from ell0.data import SETS
from ell0.ops import truncated_linear


def phibar(x: float) -> float:
    return math.erfc(x / math.sqrt(2)) / 2


def test_the_printed_integral_lacks_the_factor_of_the_density() -> None:
    # Appendix A: the integral of 1 - p_i over the half line, which the paper sets equal to erf(|nu| / sqrt 2).
    for mu, sigma in ((0.3, 1.0), (1.0, 2.5)):
        t = np.linspace(0, 40 * sigma, 400_001)
        near, far = (np.exp(-((t + sign * mu) ** 2) / (2 * sigma**2)) for sign in (-1, 1))
        printed = float(np.trapezoid((1 - far / np.maximum(near, 1e-300)) * near, t))
        chance = math.erf(mu / sigma / math.sqrt(2))
        assert math.isclose(printed / math.sqrt(2 * math.pi * sigma**2), chance, rel_tol=1e-6)
        assert printed > 2 * chance


def test_the_union_bound_needs_a_factor_2_that_its_last_step_pays_for() -> None:
    # Eq. 25: P(max |b_i| >= t) <= d Phibar(t) <= 1 / t for t = sqrt(2 log d).
    for d in (100, 784, 10**4, 10**6, 10**9):
        t = math.sqrt(2 * math.log(d))
        exact = -math.expm1(d * math.log1p(-2 * phibar(t)))
        assert d * phibar(t) < exact < 2 * d * phibar(t) < 1 / t


def test_a_bias_given_as_a_constant_coordinate_is_truncated() -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 20, generator=rng, dtype=torch.float64) for n in (5, 3))
    bias = torch.tensor([50.0, -50.0, 80.0], dtype=torch.float64)
    constant = torch.ones(5, 1, dtype=torch.float64)
    appended = truncated_linear(torch.cat([x, constant], 1), torch.cat([weight, bias[:, None]], 1), k=2)
    after = truncated_linear(x, weight, bias, k=2)
    assert ((appended - after).abs() > 30).all()
    # Coordinates that count may be changed as well: the appended one decides where the bias is small.
    small = torch.cat([weight, torch.full((3, 1), 0.1, dtype=torch.float64)], 1)
    outputs = [truncated_linear(torch.cat([x, value * constant], 1), small, k=2) for value in (1, -1e6)]
    assert (outputs[0] != outputs[1]).all()


def test_robust_accuracies_of_the_paper_are_multiples_of_a_512th() -> None:
    figures = [one for name in ("mnist-table1", "cifar-table1") for one in recipe.load(name).paper if "budget" in one]
    shares = [one["value"] for one in figures]
    assert len(shares) == 30
    # Printed with two digits of a per cent, some of them cut off and not rounded.
    assert all(0 <= round(512 * share) / 512 - share + 5.1e-5 < 1.51e-4 for share in shares)
    assert any(abs(round(256 * share) / 256 - share) > 1e-3 for share in shares)


def test_the_box_of_beta_1_on_cifar_leaves_the_range_of_the_images_at_four_of_six_ends() -> None:
    mean, deviation = np.array(SETS["cifar10"].mean), np.array(SETS["cifar10"].deviation)
    low, high = -mean / deviation, (1 - mean) / deviation
    box = -2.429065704345703, 2.7537312507629395
    assert np.allclose([low.min(), high.max()], box, atol=1e-6)
    assert (low > box[0] + 0.01).tolist() == [False, True, True]
    assert (high < box[1] - 0.01).tolist() == [True, True, False]
