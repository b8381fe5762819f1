"""The attack that knows the defence: the closed form of one truncated row, masks, and what it falls back to."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from balls import within_one
from ell0 import L0Ball, models
from ell0.attacks import adaptive, sparse_rs
from ell0.attacks.adaptive import _Greedy, _scorer
from ell0.attacks.contract import Victim
from ell0.data import SETS
from ell0.nn import InputClamp, InputScale, InputTruncation, TruncatedLinear
from ell0.threat import Unit

CHANNELS = InputScale.normalising((0.5, 0.4, 0.3), (0.25, 0.5, 0.125))


class Row(nn.Module):
    """Two classes from one truncated sum: logits -f and f."""

    def __init__(self, d: int, k: int, g: Generator) -> None:
        super().__init__()
        self.sum = TruncatedLinear(d, 1, k, dtype=torch.float64)
        with torch.no_grad():
            self.sum.weight.copy_(torch.randn(1, d, generator=g))

    def forward(self, x: Tensor) -> Tensor:
        out = self.sum(x.flatten(1))
        return torch.cat([-out, out], 1)


class Skip(nn.Module):
    """A layer and a way around it, which join."""

    def __init__(self, layer: nn.Module, around: nn.Module, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.around, self.join = layer, around, join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.layer(x), self.around(x))


def optimum(net: Row, x: Tensor, y: Tensor, budget: int) -> Tensor:
    """The smallest margin that ``budget <= k`` changes of any size can reach: twice the sum without its k + budget
    largest and its k - budget smallest terms."""
    sign = 2.0 * y - 1
    terms = (sign.unsqueeze(1) * x * net.sum.weight.detach()).sort(1, descending=True).values
    k, d = net.sum.k, x.shape[1]
    assert net.sum.bias is not None
    return 2 * (terms[:, k + budget : d - (k - budget)].sum(1) + sign * net.sum.bias.detach())


@given(data=st.data())
@settings(max_examples=settings().max_examples // 8)
def test_one_truncated_row_falls_to_its_closed_form(data: st.DataObject) -> None:
    d = data.draw(st.integers(5, 120), "d")
    k = data.draw(st.integers(1, (d - 1) // 2), "k")
    budget = data.draw(st.integers(1, min(k, 12, d - k - 1)), "budget")
    g = Generator().manual_seed(data.draw(st.integers(0, 10**6), "seed"))
    net = Row(d, k, g)
    x = torch.rand(12, d, generator=g, dtype=torch.float64) * 2 - 1
    # Half of the rows agree with the weights so well that no such change breaks them.
    x[::2] = x[::2].abs() * net.sum.weight.detach().sign() * (1 - 2.0 * (torch.arange(6) % 2)).unsqueeze(1)
    with torch.no_grad():
        y = net(x).argmax(1)
    best = optimum(net, x, y, budget)
    result = adaptive(net, x, y, L0Ball(budget, low=-1e4, high=1e4), queries=30 * budget)
    clear = best.abs() > 1e-9
    assert torch.equal(result.success[clear], (best < 0)[clear])
    stands = ~result.success
    torch.testing.assert_close(result.margin[stands], best[stands], rtol=1e-6, atol=1e-9)


def test_values_inside_a_mask() -> None:
    g = Generator().manual_seed(0)
    linear = nn.Linear(100, 4).double()
    net = nn.Sequential(InputTruncation(100, 12), linear)
    x = torch.rand(40, 100, generator=g, dtype=torch.float64) * 2 - 1
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g))
        y = net(x).argmax(1)
    ball = L0Ball(2, low=-100, high=100)
    mine = adaptive(net, x, y, ball, queries=300)
    corners = sparse_rs(net, x, y, ball, queries=300)
    assert mine.success.sum() >= corners.success.sum() + 6
    used = mine.x_adv[mine.x_adv != x]
    assert (used.abs() < 5).any()


@pytest.mark.parametrize("seed", [2, 4])
def test_a_normalised_and_truncated_image_is_not_safe_from_values_inside(seed: int) -> None:
    cifar, g = SETS["cifar10"], Generator().manual_seed(seed)
    torch.manual_seed(seed)
    scale = InputScale.normalising(cifar.mean, cifar.deviation)
    net = nn.Sequential(scale, models.small_cnn(4, in_shape=(3, 8, 8), classes=4))
    x = torch.rand(60, 3, 8, 8, generator=g) * 2 - 1
    y, ball = net(x).argmax(1), L0Ball(2, "pixel", *cifar.box(100))
    with Victim(net, x, y, ball) as victim:
        scorer, slope = _scorer(victim), victim.slopes(x, torch.arange(60), straight=True)[1]
        assert scorer.inner is not None
        inner = L0Ball(2, "pixel", *(victim.points(end) for end in scorer.inner))
    assert (slope != 0).flatten(1).all(1).all()
    # The mask lets the values inside through.
    changed = torch.where(torch.rand(x.shape, generator=g) < 0.05, inner.high, x)
    assert (InputTruncation((3, 8, 8), 4)(scale(changed))[changed != x] != 0).float().mean() > 0.9
    found = adaptive(net, x, y, ball, queries=100)
    for box in (inner, ball):
        assert found.success.sum() > sparse_rs(net, x, y, box, queries=100).success.sum()


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ([nn.Flatten(), TruncatedLinear(12, 3, 2)], TruncatedLinear),
        ([nn.Flatten(), TruncatedLinear(12, 3, 0)], None),
        ([nn.Flatten(), nn.Tanh(), TruncatedLinear(12, 3, 2)], None),
        ([InputTruncation((3, 2, 2), 1), nn.Flatten(), nn.Linear(12, 3)], InputTruncation),
        ([CHANNELS, InputTruncation((3, 2, 2), 1), nn.Flatten(), nn.Linear(12, 3)], InputTruncation),
        ([InputClamp(), CHANNELS, nn.Flatten(), TruncatedLinear(12, 3, 2)], TruncatedLinear),
        ([nn.Flatten(), InputScale(range(12), range(2, 14)), TruncatedLinear(12, 3, 2)], None),
        ([nn.Flatten(), nn.Linear(12, 3)], None),
        ([InputClamp(), nn.Flatten(), TruncatedLinear(12, 3, 2)], TruncatedLinear),
        ([nn.Flatten(), InputClamp(), InputTruncation(12, 2), nn.Linear(12, 3)], InputTruncation),
        ([InputClamp(), InputScale(), nn.Flatten(), TruncatedLinear(12, 3, 2)], TruncatedLinear),
        ([InputScale(0, 3), nn.Flatten(), InputTruncation(12, 2), nn.Linear(12, 3)], InputTruncation),
        ([InputScale(), InputScale(), nn.Flatten(), TruncatedLinear(12, 3, 2)], None),
        ([InputScale(-2, 2), InputClamp(0, 1), nn.Flatten(), TruncatedLinear(12, 3, 2)], None),
        ([nn.Flatten(), Skip(TruncatedLinear(12, 3, 2), nn.Linear(12, 3), torch.mul)], None),
        ([InputScale(), nn.Flatten(), Skip(TruncatedLinear(12, 3, 2), nn.Linear(12, 3), torch.add)], None),
    ],
)
@pytest.mark.parametrize("unit", ["feature", "pixel"])
@pytest.mark.parametrize("end", [10.0, 1e10])
def test_the_defence_is_recognised(
    layers: list[nn.Module], kind: type[nn.Module] | None, unit: Unit, end: float
) -> None:
    x = torch.rand(9, 3, 2, 2, generator=Generator().manual_seed(1)) * 2 - 1
    net = nn.Sequential(*layers)
    y = net(x).argmax(1)
    with Victim(net, x, y, L0Ball(2, unit, low=-end, high=end)) as victim:
        layer = _scorer(victim).layer
    assert (None if layer is None else type(layer)) is kind
    adaptive(net, x, y, victim.ball, queries=60)


def hidden(first: nn.Module, g: Generator) -> nn.Sequential:
    """A network behind a first layer with 60 outputs, which likes class 0 so well that many rows stand."""
    last = nn.Linear(60, 4)
    net = nn.Sequential(first, nn.Tanh(), last).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g))
        last.bias[0] += 20
    return net


@pytest.mark.parametrize(
    "first", [TruncatedLinear(60, 60, 5), TruncatedLinear(60, 60, 0), InputTruncation(60, 5)], ids=str
)
@pytest.mark.parametrize("scales", [(), (InputScale(),)], ids=str)
def test_a_clamp_hides_nothing(first: nn.Module, scales: tuple[nn.Module, ...]) -> None:
    """Behind a clamp to a box the attack in a wider box does what it does in that box without the clamp."""
    g = Generator().manual_seed(0)
    net = nn.Sequential(*scales, hidden(first, g))
    # Most numbers lie almost at an end, as the background of digits does: half of their moves lead nowhere.
    x = torch.where(torch.rand(40, 60, generator=g) < 0.8, -0.99, torch.rand(40, 60, generator=g)).double()
    with torch.no_grad():
        y = net(x).argmax(1)
    plain = adaptive(net, x, y, within_one(2), queries=40, candidates=4)
    clamped = adaptive(nn.Sequential(InputClamp(), net), x, y, L0Ball(2, low=-100, high=100), queries=40, candidates=4)
    assert not plain.success.all()
    assert torch.equal(clamped.margin, plain.margin)
    assert torch.equal(clamped.success, plain.success)


@pytest.mark.parametrize(
    "first", [nn.Sequential(nn.Flatten(), TruncatedLinear(60, 60, 5)), InputTruncation((3, 5, 4), 5)]
)
@pytest.mark.parametrize("scale", [InputScale(-3.0, 1.0), InputScale((-3.0, 0.0, -1.0), (1.0, 2.0, -0.5))], ids=str)
@pytest.mark.parametrize("unit", ["feature", "pixel"])
def test_a_scale_hides_nothing(first: nn.Module, scale: InputScale, unit: Unit) -> None:
    """The attack on a network behind a scale is that on the network itself, of images and a box that are scaled."""
    g = Generator().manual_seed(0)  # the scales are exact in floating point
    net = hidden(nn.Sequential(first, nn.Flatten()), g)
    x = torch.randint(-64, 65, (40, 3, 5, 4), generator=g).double() / 64
    with torch.no_grad():
        y = net(scale(x)).argmax(1)
    low, high = (scale(torch.full((1, 3, 5, 4), end, dtype=torch.float64))[0] for end in (-64.0, 64.0))
    plain = adaptive(net, scale(x), y, L0Ball(1, unit, low, high), queries=60, candidates=4)
    scaled = adaptive(nn.Sequential(scale, net), x, y, L0Ball(1, unit, -64, 64), queries=60, candidates=4)
    assert not plain.success.all()
    assert torch.equal(scaled.success, plain.success)
    torch.testing.assert_close(scaled.margin, plain.margin)
    torch.testing.assert_close(scale(scaled.x_adv), plain.x_adv)


def test_a_way_around_a_clamp_is_used() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clamp, self.linear = InputClamp(), nn.Linear(6, 2, bias=False)
            with torch.no_grad():
                self.linear.weight.copy_(torch.tensor([[1.0] * 6, [0.0] * 6]))

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.linear(torch.cat([self.clamp(x)[:, :5], x[:, 5:]], 1))
            return logits

    x = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 50.0]])
    result = adaptive(Around(), x, torch.tensor([0]), L0Ball(1, low=-100, high=100), queries=3, candidates=1)
    assert result.success.all()


def test_a_large_budget_grows_in_sets() -> None:
    g = Generator().manual_seed(0)
    weight = torch.randn(5, 200, generator=g, dtype=torch.float64)
    x = torch.rand(20, 200, generator=g, dtype=torch.float64) * 2 - 1

    def model(z: Tensor) -> Tensor:
        return (z.unsqueeze(1) * weight).sum(2)

    y = model(x).argmax(1)
    result = adaptive(model, x, y, within_one(60), queries=60)
    assert result.success.all()
    assert result.queries.max() <= 60


def test_the_best_candidate_stays_and_no_swap_does_harm() -> None:
    g = Generator().manual_seed(0)
    net, x = hidden(nn.Linear(30, 60), g), torch.rand(60, 30, generator=g, dtype=torch.float64) * 2 - 1
    last = nn.Linear(4, 3).double()
    last.bias.data = torch.tensor([900.0, 0.0, 0.0], dtype=torch.float64)  # no row falls: all candidates are tried
    net.append(last)
    y = torch.zeros(60, dtype=torch.int64)
    for budget in (1, 3):
        with Victim(net, x, y, L0Ball(budget, low=-3.0, high=3.0)) as victim:
            clean, greedy = victim.margin.clone(), _Greedy(victim, _scorer(victim), 6, 400)
            greedy.grow()
            if budget == 1:
                gained = victim.margin < clean
                assert gained.sum() > 50
                assert torch.equal(greedy._margin[gained], victim.margin[gained])
            grown = greedy._margin.clone()
            greedy.swap()
            assert (greedy._margin <= grown).all()
            assert torch.equal(greedy._margin, victim.judge(net(greedy._points), torch.arange(60))[0])
    assert (greedy._margin < grown).any()


def test_sets_of_units_are_the_best_ones_then_others_by_noise() -> None:
    gain = -torch.rand(5, 40, generator=Generator().manual_seed(0), dtype=torch.float64)
    x = torch.zeros(5, 40, dtype=torch.float64)
    with Victim(
        lambda z: z[:, :2] + torch.tensor([1.0, 0.0]), x, torch.zeros(5).long(), L0Ball(8, low=-1.0, high=1.0)
    ) as victim:
        greedy = _Greedy(victim, _scorer(victim), 3, 10)
        sets = [greedy._set(gain, torch.arange(5), 8, number, number).sort(1).values for number in range(3)]
        again = greedy._set(gain, torch.arange(5), 8, 1, 7).sort(1).values
    assert torch.equal(sets[0], gain.argsort(1)[:, :8].sort(1).values)
    for one, other in combinations([*sets, again], 2):
        assert (one != other).any(1).all()
    # Better units come more often.
    assert gain.gather(1, sets[1]).mean() < gain.mean() - 0.1
