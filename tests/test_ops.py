"""The trimmed product equals its definition, on every backend."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.nn import functional as F

from ell0.ops import cuts, keep_mask, kernel, prepare, reference, trimmed_linear, truncated_linear
from trimmed_cases import BACKENDS, DTYPES, KINDS, Case, cases, check, gaussian, integers, mnist, using

inf, nan = math.inf, math.nan


# A weight of 0, an infinite input and an undefined gradient make an undefined share.
@example(Case(1, 4, 15, 1, 0, "few infinite", "sparse", "undefined", 1, False, torch.float32, 0))
@given(cases())
def test_values_and_gradients_equal_the_definition(case: Case) -> None:
    x, weight, bias, upstream = case.tensors()
    if case.top == case.bottom == 0:
        plain = trimmed_linear(x, weight, bias, top=0, bottom=0)
        assert torch.equal(plain.nan_to_num(), F.linear(x, weight, bias).nan_to_num())
    else:
        check(x, weight, bias, upstream, top=case.top, bottom=case.bottom)


def brute_force(terms: list[float], top: int, bottom: int) -> list[bool]:
    left = list(range(len(terms)))
    for _ in range(top):
        left.remove(max(left, key=lambda i: (terms[i], -i)))
    for _ in range(bottom):
        left.remove(min(left, key=lambda i: (terms[i], i)))
    return [i in left for i in range(len(terms))]


@given(
    st.lists(st.sampled_from([-inf, -2.0, -1.0, -0.0, 0.0, 1.0, 2.0, inf]), min_size=1, max_size=12),
    st.integers(0, 11),
    st.integers(0, 11),
)
def test_kept_is_the_definition_in_words(terms: list[float], top: int, bottom: int) -> None:
    top %= len(terms)
    bottom %= len(terms) - top
    stays = reference.kept(torch.tensor(terms), top, bottom)
    assert stays.tolist() == brute_force(terms, top, bottom)
    assert torch.equal(keep_mask(torch.tensor(terms), top, bottom), stays)


@given(
    st.integers(2, 200),
    st.sampled_from([1, 18]),
    st.sampled_from([0, 1, 2, 3]),
    st.tuples(st.integers(0, 199), st.integers(0, 199)),
    st.sampled_from([(1, 1), (1, 0), (0, 1)]),
    st.sampled_from([17, 200]),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=150)
def test_every_backend_keeps_the_same_coefficients(
    d: int,
    batch: int,
    values: int,
    counts: tuple[int, int],
    sides: tuple[int, int],
    most: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    # Terms of few values, made by weights that are powers of two and never 0: the gradient to x shows what stayed.
    g = Generator().manual_seed(seed)
    top = sides[0] * counts[0] % most % d
    bottom = sides[1] * counts[1] % most % (d - top)
    if top == bottom == 0:
        top, bottom = sides if d > 2 else (1, 0)
    terms = torch.randint(-values, values + 1, (batch, d), generator=g).to(dtype) + (not values)
    weight = 2.0 ** torch.randint(-6, 7, (1, d), generator=g).to(dtype)
    stays = reference.kept(terms, top, bottom)
    assert (stays.sum(-1) == d - top - bottom).all()
    for backend in BACKENDS:
        x, w = (terms / weight).requires_grad_(), weight.clone().requires_grad_()
        with using(backend):
            out = trimmed_linear(x, w, top=top, bottom=bottom)
            to_x, to_weight = torch.autograd.grad(out.sum(), (x, w))
        assert torch.equal(to_x != 0, stays), backend
        assert torch.equal(to_weight, (x.detach() * stays).sum(0, keepdim=True)), backend


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("k", [1, 3, 16])
@pytest.mark.parametrize("d", [112, 640])
def test_ties_far_apart_in_the_order_of_the_weight(backend: str, d: int, k: int, sign: int) -> None:
    # Terms of 0.5 to 2 but for k + 1 that tie at 4, half of them at the largest weights and half at the smallest.
    for rising in (True, False):
        weight = torch.linspace(1, 4, d)[None]
        weight = weight if rising else weight.flip(1)
        x = torch.full((1, d), 0.5 * sign)
        ends = [*range((k + 1) // 2), *range(d - (k + 2) // 2, d)]
        weight[0, ends] = weight[0, ends].log2().round().exp2()
        x[0, ends] = 4 * sign / weight[0, ends]
        top = k if sign > 0 else 0
        check(x, weight, top=top, bottom=k - top, backends=[backend])


@pytest.mark.parametrize("k", [4, 8, 12, 16, 17])
def test_rows_are_marked_only_where_a_tied_term_stays(k: int) -> None:
    # Gradients of a marked row cost several times as much.
    g = Generator().manual_seed(0)
    weight = gaussian(3, 784, 1, g).float()
    for backend in kernel.builds():
        for x, w, marked in (
            (gaussian(20, 784, 1, g).float(), weight, False),
            (torch.ones(20, 784), weight.sign(), True),
        ):
            with using(backend):
                walked = torch.ops.ell0.trimmed_linear(x, w, None, *torch.ops.ell0.prepare(w), [k, k], True)[3]
            assert ((walked < 0) == marked).all(), backend


@pytest.mark.parametrize("seed", range(12))
def test_many_removed_terms_of_few_values(seed: int) -> None:
    # Cuts that are found by counting: a pivot that hits a tied term is rare, so there are many samples.
    g = Generator().manual_seed(seed)
    d = 23 + 7 * seed
    one = 17 + seed % 4 * (d - 24) // 4
    other = seed % 7
    top, bottom = (one, other) if seed % 2 else (other, one)
    x = torch.randint(-8, 9, (600, d), generator=g).float()
    weight = 2.0 ** torch.randint(-3, 4, (8, 1), generator=g) * torch.tensor([1.0, -1.0]).repeat(4)[:, None].expand(
        8, d
    )
    out = reference.trimmed_linear(x, weight, top=top, bottom=bottom)
    for backend in BACKENDS:
        with using(backend):
            assert torch.equal(trimmed_linear(x, weight, top=top, bottom=bottom).double(), out), backend


def in_both_lists(side: int) -> tuple[Tensor, Tensor]:
    weight = gaussian(1, 16, 1, Generator().manual_seed(0)).float()
    weight[0, :9] = -1e6 * side
    return torch.ones(1, 16), weight


def one_large_weight(large: float) -> tuple[Tensor, Tensor]:
    g = Generator().manual_seed(0)
    x, weight = gaussian(16, 600, 1, g).float(), gaussian(4, 600, 1, g).float()
    x[:, 7], weight[:, 7] = 0.5, large
    return x, weight


def overflowing(k: int, sign: int) -> tuple[Tensor, Tensor]:
    """The dense sum overflows float32, the trimmed one does not."""
    weight = torch.zeros(2, 40)
    weight[:, 1 : k + 1] = 3e38 * sign
    weight[1, k + 1 : k + 3] = 0.7e38 * sign
    return torch.ones(3, 40), weight


def infinite_products(sign: int) -> tuple[Tensor, Tensor]:
    """Finite numbers, three of whose products are infinite."""
    g = Generator().manual_seed(0)
    x, weight = torch.full((3, 100), 1e20), gaussian(2, 100, 1, g).float()
    weight[:, 4:7] = 1e19 * sign
    return x, weight


def equal(value: float, batch: int = 1, out: int = 1, d: int = 1000) -> tuple[Tensor, Tensor]:
    """Sums of equal terms, or of equal gradients, must not drift."""
    return torch.full((batch, d), value), torch.full((out, d), 0.5923077)


SEEN = [
    *((in_both_lists(1), 0, 9), (in_both_lists(-1), 9, 0)),
    *((one_large_weight(large), k, k) for large in (1e4, 1e6, -1e8) for k in (1, 2, 5, 12)),
    *((overflowing(k, sign), k if sign > 0 else 0, k if sign < 0 else 0) for k in (1, 17) for sign in (1, -1)),
    *((infinite_products(sign), *counts) for sign in (1, -1) for counts in ((0, 20), (20, 0), (0, 3), (3, 0))),
    *((equal(v), *c) for v in (0.3, 1.1256411) for c in ((0, 500), (333, 333), (750, 0), (20, 0), (3, 3), (999, 0))),
    *((equal(0.3, batch, out, 20), 1, 1) for batch, out in ((1, 10_000), (10_000, 1), (1_000, 10))),
]


@pytest.mark.parametrize(("tensors", "top", "bottom"), SEEN)
def test_bugs_once_seen(tensors: tuple[Tensor, Tensor], top: int, bottom: int) -> None:
    x, weight = tensors
    check(x, weight, None, torch.full((len(x), len(weight)), 1.1256411), top=top, bottom=bottom)


@pytest.mark.parametrize(("d", "top", "bottom"), [(200_000, 150_000, 0), (200_001, 20, 180_000)])
def test_more_terms_than_sixteen_bits_count(d: int, top: int, bottom: int) -> None:
    x, weight = (integers(1, d, 1, Generator().manual_seed(seed)).float() for seed in (0, 1))
    check(x, weight, top=top, bottom=bottom)


# Coordinates that would spoil a sum.

INFINITE: list[tuple[list[float], list[float], int, int, float]] = [
    ([inf, 3, 1, 2, -inf], [1, 1, 1, 1, 1], 1, 1, 6.0),
    ([inf, 3, 1, 2, -inf], [1, 1, 1, 1, 1], 2, 2, 2.0),
    ([inf, inf, 1, 2, -inf, -inf], [1, 1, 1, 1, 1, 1], 1, 1, nan),
    ([inf, inf, 1, 2, 3, 4], [1, 1, 1, 1, 1, 1], 1, 1, inf),
    # 0 * inf is 0: such a term may leave, and ties with other zeros.
    ([inf, 1, 2, 3, 0], [0, 1, 1, 1, inf], 1, 1, 3.0),
    ([inf, 1, 2, 3, 0], [0, 1, 1, 1, inf], 0, 1, 6.0),
    ([0, 0, 0, 0, 0], [0, 1, 1, 1, inf], 2, 1, 0.0),
    ([5, 1, 2, -3, 0], [0, 1, 1, 1, inf], 1, 1, 1.0),
    ([3, 0, 0, 0, 0], [0, 1, 1, 1, inf], 0, 1, 0.0),
    # The zero that leaves has an infinite weight, the one that stays a finite coordinate.
    ([0, 2, -1, -2, -3], [inf, 0, 1, 1, 1], 1, 0, -6.0),
]


@pytest.mark.parametrize(("left", "right", "top", "bottom", "value"), INFINITE)
def test_infinite_numbers(
    backend: str, left: list[float], right: list[float], top: int, bottom: int, value: float
) -> None:
    one, other = torch.tensor([left]).float(), torch.tensor([right]).float()
    for x, weight in ((one, other), (other, one)):
        assert str(trimmed_linear(x, weight, top=top, bottom=bottom).item()) == str(value)
        check(x, weight, top=top, bottom=bottom, backends=[backend])
        check(-x, weight, top=bottom, bottom=top, backends=[backend])


@pytest.mark.parametrize("huge", [1e3, 1e8, -1e20, inf])
@pytest.mark.parametrize("k", [1, 10, 16, 20])
@pytest.mark.parametrize("d", [100, 784])
def test_as_many_huge_coordinates_as_leave(d: int, k: int, huge: float) -> None:
    g = Generator().manual_seed(k)
    x, weight = mnist(20, d, 1, g).float(), gaussian(18, d, 1, g).float()
    least = reference.trimmed_linear(x, weight, top=2 * k, bottom=0)
    most = reference.trimmed_linear(x, weight, top=0, bottom=2 * k)
    x[torch.rand(20, d, generator=g).argsort(-1) < k] = huge
    check(x, weight, gaussian(1, 18, 1, g)[0].float(), top=k, bottom=k)
    for backend in BACKENDS:
        with using(backend):
            value = truncated_linear(x, weight, k=k)
        # What no change of k coordinates can leave: the certificate rests on it.
        assert ((least - 1e-3 <= value) & (value <= most + 1e-3)).all()


@pytest.mark.parametrize("k", [10, 30])
def test_huge_coordinates_do_not_lengthen_the_walk(k: int) -> None:
    g = Generator().manual_seed(0)
    x, weight = mnist(20, 784, 1, g).float(), gaussian(30, 784, 1, g).float()
    huge = x.clone()
    huge[torch.rand(20, 784, generator=g).argsort(-1) < 10] = 1e8
    for backend in kernel.builds():
        with using(backend):
            prepared = torch.ops.ell0.prepare(weight)
            walked = [torch.ops.ell0.trimmed_linear(t, weight, None, *prepared, [k, k], True)[3] for t in (x, huge)]
        assert walked[0].max() < 500
        assert walked[1].max() < 600


def test_nan_spoils_its_sample_and_its_column(backend: str) -> None:
    x, weight = torch.ones(4, 9), torch.ones(3, 9)
    # A coefficient of 0 does not hide a NaN.
    x[:, 4], weight[:, 3], x[2, 3], weight[1, 4] = 0.0, 0.0, nan, nan
    lost = torch.zeros(4, 3, dtype=torch.bool)
    lost[2], lost[:, 1] = True, True
    assert torch.equal(trimmed_linear(x, weight, top=2, bottom=1).isnan(), lost), backend


def test_k_removes_as_many_on_each_side_and_0_is_the_dense_layer(backend: str) -> None:
    g = Generator().manual_seed(0)
    x, weight, bias = gaussian(5, 9, 1, g), gaussian(4, 9, 1, g), gaussian(1, 4, 1, g)[0]
    x[0, 0], weight[0, 0] = inf, 0.0
    assert truncated_linear(x, weight, bias, k=0).isnan().nonzero().tolist() == [[0, 0]], backend
    assert torch.equal(truncated_linear(x[1:], weight, bias, k=0), F.linear(x[1:], weight, bias))
    both = trimmed_linear(x, weight, bias, top=3, bottom=3)
    assert torch.equal(truncated_linear(x, weight, bias, k=3), both)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("top", "bottom"), [(1, 1), (0, 3), (20, 0), (30, 40), (99, 0)])
def test_cuts_are_the_last_terms_that_leave(backend: str, top: int, bottom: int, dtype: torch.dtype) -> None:
    g = Generator().manual_seed(0)
    x, weight = integers(20, 100, 1, g).to(dtype), gaussian(7, 100, 1, g).to(dtype)
    x[3, 5] = nan
    terms = reference.products(x, weight).sort(-1, descending=True).values
    high, low = cuts(x.view(4, 5, 100), weight, top=top, bottom=bottom)
    for found, removed, at in ((high, top, top - 1), (low, bottom, 100 - bottom)):
        assert found.shape == (4, 5, 7), backend
        expected = terms[..., at] if removed else torch.full((20, 7), inf if found is high else -inf)
        expected = expected.to(dtype).index_fill(0, torch.tensor([3]), nan)
        assert torch.equal(found.view(20, 7).nan_to_num(7.5), expected.nan_to_num(7.5))


# Prepared weights.


@given(st.sampled_from(list(KINDS)), st.integers(1, 40), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_prepared_order_is_a_permutation_and_its_bound_is_attained(
    kind: str, d: int, dtype: torch.dtype, seed: int
) -> None:
    d = d if d < 30 else 25 * (d - 29)
    weight = KINDS[kind](5, d, min(d, 3), Generator().manual_seed(seed)).to(dtype)
    for backend in kernel.builds():
        with using(backend):
            prepared = prepare(weight)
        assert torch.equal(prepared.order.sort(-1).values, torch.arange(d, dtype=torch.int32).expand(5, d))
        ranked = weight.gather(1, prepared.order.long())
        assert torch.equal(prepared.ranked.nan_to_num(), ranked.nan_to_num())
        lost = weight.isnan().any(-1)
        assert torch.equal(prepared.bound[:, 0].isnan(), lost)
        sound = prepared.ranked[~lost].abs()
        for block in range(-(-d // 16)):
            assert torch.equal(prepared.bound[~lost, block], sound[:, 16 * block :].amax(-1))
        # The order is by falling magnitude, to a few bits and over a few octaves.
        near = sound.clamp(min=sound.amax(-1, keepdim=True) / 200)
        assert (near[:, 1:] <= 1.02 * near[:, :-1]).all()
