"""What a victim keeps of the points an attack asks about, and what it refuses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from balls import within_one
from ell0.attacks.contract import Victim
from oracle import Sums


@pytest.fixture
def victim() -> Iterator[Victim]:
    """Two rows that a linear model with a plain sum as its margin takes for class 0."""
    model = Sums(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
        model.bias.zero_()
    x, y = torch.full((2, 3), 0.5), torch.zeros(2, dtype=torch.int64)
    with Victim(model, x, y, within_one(2, low=-2.0), minimal=True) as victim:
        yield victim


def test_a_row_asked_several_times_at_once_keeps_its_best(victim: Victim) -> None:
    points = torch.tensor([[-1, -1, 0.5], [-0.9, -1, 0.5], [0.5, 0.5, -1], [0.5, -1, 0.1], [-1, 0.4, 0.5]])
    victim.margins(points, torch.tensor([0, 0, 1, 1, 0]))
    result = victim.result()
    assert result.queries.tolist() == [3, 2]
    assert result.success.tolist() == [True, True]
    assert torch.equal(result.x_best, points[[0, 3]])
    assert torch.equal(result.x_adv, points[[0, 3]])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_successes_the_nearer_stays_and_the_lower_margin_too(victim: Victim, order: Any) -> None:
    near, low = torch.tensor([[0.5, 0.5, -2.0]]), torch.tensor([[-2.0, 0.5, -2.0]])
    for point in ((near, low)[i] for i in order):
        victim.margins(point, torch.tensor([0]))
    result = victim.result()
    assert torch.equal(result.x_adv[:1], near)
    assert result.distance.tolist() == [1, -1]
    assert torch.equal(result.x_best[:1], low)
    assert result.margin.tolist() == [-3.5, 1.5]


def test_points_beyond_the_budget_are_no_success(victim: Victim) -> None:
    assert victim.errs(torch.full((1, 3), -1.0), torch.tensor([1])).tolist() == [True]
    result = victim.result()
    assert not result.success.any()
    assert torch.equal(result.x_best, victim.x)
    assert result.margin.tolist() == [1.5, 1.5]
    assert result.queries.tolist() == [0, 1]


def test_a_point_outside_the_box_is_a_bug_that_is_seen(victim: Victim) -> None:
    victim.margins(torch.tensor([[0.5, 0.5, -3.0]]), torch.tensor([1]))
    with pytest.raises(AssertionError, match="left the ball: x_adv of row 1"):
        victim.result()
