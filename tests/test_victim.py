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


def test_rows_that_fall_in_the_last_tenth_of_the_queries_are_late() -> None:
    x, y = torch.full((4, 2), 0.5), torch.tensor([0, 0, 0, 1])

    def model(points: torch.Tensor) -> torch.Tensor:
        return torch.stack([points[:, 0], torch.zeros(len(points))], 1)

    with Victim(model, x, y, within_one(1)) as victim:
        for query in victim.while_standing(range(20), "any"):
            falls = torch.tensor([4, 18, 99])[victim.standing] == query
            points = x[victim.standing].clone()
            points[:, 0] = torch.where(falls, -1.0, 0.5)
            victim.margins(points, victim.standing)
        result = victim.result()
    assert result.queries.tolist() == [5, 19, 20, 0]
    assert result.late is not None
    assert result.late.tolist() == [False, True, False, False]
    assert repr(result).splitlines() == [
        "3 of 4 rows broken, by 1 change in the median",
        "1 of them misclassified from the start",
        "ball: 1 feature changed, values in [-1, 1]",
        "queries a row: 11, at most 20",
        "not converged: 1 row fell in the last tenth of the queries",
    ]


def test_an_attack_for_few_changes_has_no_late_rows(victim: Victim) -> None:
    assert victim.result().late is None
    assert repr(victim.result()).startswith("0 of 2 rows broken\nball: 2 features")
