"""Certificates put to the test by attacks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ell0 import ATTACKS, L0Ball, certify
from ell0.attacks import AttackResult
from ell0.common import Step
from ell0.data import load
from ell0.evaluation import Entry
from ell0.models import mlp
from ell0.nn import TruncatedLinear
from ell0.train import TrainConfig, fit

CHEAP = {"sparse_rs": partial(ATTACKS["sparse_rs"], queries=100)}


def network() -> nn.Sequential:
    """Three classes, each the truncated sum of ten inputs of its own: three of them may change to anything."""
    first, last = TruncatedLinear(30, 3, 3, bias=False), nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.eye(3).repeat_interleave(10, 1))
        last.weight.copy_(torch.eye(3))
    return nn.Sequential(first, nn.ReLU(), last).eval()


def rows(n: int = 12) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % 3
    noise = torch.rand(n, 30, generator=torch.Generator().manual_seed(1)) / 10
    return torch.eye(3)[y].repeat_interleave(10, 1) + noise, y


def test_certificates_stand_under_every_attack() -> None:
    """Of a network trained on digits, whose radii differ, within +-1 and +-100."""
    x, y = (part[:600] for part in load("digits", "train"))
    torch.manual_seed(0)
    model = mlp(8, in_features=64, hidden=(32,))
    config = TrainConfig(epochs=12, batch=64, rates=(0.02,), optimizer="adam")
    fit(model, (x, y), config, objective=certify.Objective(2))
    x, y = (part[:40] for part in load("digits", "test"))
    radii = certify.radius(model.eval(), x, y)
    attacks = {name: partial(attack, **attack.cheap) for name, attack in ATTACKS.items()}
    result = certify.challenge(model, x, y, radii, attacks=attacks)
    assert (result.tried, len(result.fell), result.attacks) == (int((radii > 0).sum()), 0, tuple(ATTACKS))
    assert len(radii[radii > 0].unique()) > 1


def test_each_row_is_attacked_with_its_own_radius_in_both_boxes() -> None:
    model, (x, y) = network(), rows()
    radii = torch.tensor([-1, 0, 1, 2, 3, 3, 2, 1, 0, -1, 3, 1])
    asked: list[tuple[int, float, float, str, list[list[float]]]] = []

    def spy(_: object, points: Tensor, labels: Tensor, ball: L0Ball, **__: object) -> AttackResult:
        low, high, _ = ball.box(points)
        asked.append((ball.budget, float(low), float(high), ball.unit, points.tolist()))
        failed = torch.full_like(labels, -1)
        return AttackResult(points, failed > 0, failed, 0 * labels, points, labels.double())

    result = certify.challenge(model, x, y, radii, attacks={"spy": Entry(spy, white_box=False)})
    assert (result.tried, len(result.fell)) == (8, 0)
    for beta in (1.0, 100.0):
        for budget in (1, 2, 3):
            (seen,) = (one[4] for one in asked if one[:4] == (budget, -beta, beta, "feature") and len(one[4]) > 1)
            assert seen == x[radii == budget].tolist()


def test_flags_of_the_attacks_are_kept_and_nothing_to_try_is_no_error() -> None:
    (x, y), model = rows(3), nn.Sequential(*network(), nn.Softmax(1)).eval()
    assert any("softmax" in flag for flag in certify.challenge(model, x, y, torch.ones(3).long(), None, CHEAP).flags)
    result = certify.challenge(model, x, y, torch.full((3,), -1))
    assert (result.tried, len(result.fell), result.attacks) == (0, 0, tuple(ATTACKS))


def test_a_radius_that_claims_too_much_falls_and_the_attack_is_named() -> None:
    model, (x, y) = network(), rows()
    claimed = torch.full((12,), 6)
    claimed[:4] = 0
    seen: list[Step] = []
    result = certify.challenge(model, x, y, claimed, attacks=CHEAP, progress=seen.append)
    assert result.tried == 8
    assert len(result.fell)
    assert result.fell.min() >= 4
    assert result.by == ("sparse_rs",) * len(result.fell)
    assert seen[-1] == Step("rows attacked", 8, 8)


def test_a_box_of_the_ball_is_kept_row_by_row() -> None:
    """Where nothing may move, a wrong claim stands; the rows that may move fall."""
    model, (x, y) = network(), rows()
    ball = L0Ball(0, low=-100.0, high=100.0, mutable=torch.arange(12).view(-1, 1).expand(12, 30) % 2 == 0)
    result = certify.challenge(model, x, y, torch.tensor([8, 7, 6] * 4), ball, CHEAP)
    assert len(result.fell)
    assert (result.fell % 2 == 0).all()
    anything = replace(ball, low=-math.inf, high=math.inf)
    assert torch.equal(certify.challenge(model, x, y, torch.tensor([8, 7, 6] * 4), anything, CHEAP).fell, result.fell)
    certify.challenge(model, 50 * x, y, torch.tensor([8, 7, 6] * 4), anything, CHEAP)
    claimed = torch.full((12,), 6)
    narrow = L0Ball(6, low=0.0, high=torch.tensor([0.1]))  # a tensor: meant so, though x is wider
    assert not len(certify.challenge(model, x, y, claimed, narrow, CHEAP).fell)
    assert len(certify.challenge(model, x, y, claimed, L0Ball(6, low=0.0, high=9.0), CHEAP).fell)


@pytest.mark.parametrize(
    ("radii", "ball", "message"),
    [
        (torch.ones(5, dtype=torch.int64), None, r"radii must be integers of shape \(12,\)"),
        (torch.ones(12), None, "radii must be integers of shape"),
        (torch.ones(12, dtype=torch.int64), L0Ball(1, low=-1.0, high=math.inf), "finite box, or none at all"),
    ],
)
def test_wrong_arguments(radii: Tensor, ball: L0Ball | None, message: str) -> None:
    model, (x, y) = network(), rows()
    with pytest.raises(ValueError, match=message):
        certify.challenge(model, x, y, radii, ball)
