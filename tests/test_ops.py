"""The trimmed product equals its definition, on every backend."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ell0.ops import blocked, cuts, keep_mask, kernel, prepare, reference, trimmed_linear, truncated_linear

inf, nan = math.inf, math.nan
BACKENDS = (*kernel.builds(), "none")
DTYPES = (torch.float32, torch.float64)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}

# Rows (n, d) of one kind of data; `few` is a number of coordinates.
Kind = Callable[[int, int, int, Generator], Tensor]


def gaussian(n: int, d: int, _: int, g: Generator) -> Tensor:
    return torch.randn(n, d, generator=g, dtype=torch.float64)


def integers(n: int, d: int, _: int, g: Generator) -> Tensor:
    return torch.randint(-2, 3, (n, d), generator=g).double()


def sparse(n: int, d: int, few: int, g: Generator) -> Tensor:
    return gaussian(n, d, few, g) * (torch.rand(n, d, generator=g) < 0.2)


def sparser(n: int, d: int, few: int, g: Generator) -> Tensor:
    return gaussian(n, d, few, g) * (torch.rand(n, d, generator=g).argsort(-1) < few)


def mnist(n: int, d: int, _: int, g: Generator) -> Tensor:
    return (5 * torch.rand(n, d, generator=g, dtype=torch.float64) - 4).clamp(-1, 1 - 2**-8)


def equal(n: int, d: int, few: int, g: Generator) -> Tensor:
    return gaussian(n, 1, few, g).expand(n, d)


def blank(n: int, d: int, _: int, __: Generator) -> Tensor:
    return torch.zeros(n, d, dtype=torch.float64)


def tiny(n: int, d: int, few: int, g: Generator) -> Tensor:
    return 1e-30 * gaussian(n, d, few, g)


def uneven(n: int, d: int, few: int, g: Generator) -> Tensor:
    return gaussian(n, d, few, g) * 10 ** (6 * torch.rand(n, d, generator=g, dtype=torch.float64) - 3)


def undefined(n: int, d: int, few: int, g: Generator) -> Tensor:
    x = sparse(n, d, few, g)
    x[torch.randint(n, (), generator=g), torch.randint(d, (), generator=g)] = nan
    return x


def with_few_at(value: float) -> Kind:
    def make(n: int, d: int, few: int, g: Generator) -> Tensor:
        chosen = torch.rand(n, d, generator=g).argsort(-1) < few
        signs = 2 * torch.randint(0, 2, (n, d), generator=g) - 1
        return (value * signs).where(chosen, gaussian(n, d, few, g))

    return make


def mixed(n: int, d: int, few: int, g: Generator) -> Tensor:
    kinds = [kind for kind in KINDS.values() if kind is not mixed]
    kinds = [kinds[i] for i in torch.randint(len(kinds), (min(n, 12),), generator=g).tolist()]
    return torch.cat([kind(len(range(i, n, len(kinds))), d, few, g) for i, kind in enumerate(kinds)])


KINDS: dict[str, Kind] = {
    "gaussian": gaussian,
    "integers": integers,
    "sparse": sparse,
    "sparser": sparser,
    "mnist": mnist,
    "equal": equal,
    "blank": blank,
    "tiny": tiny,
    "uneven": uneven,
    "few at 1e3": with_few_at(1e3),
    "few at 1e8": with_few_at(1e8),
    "few infinite": with_few_at(inf),
    "undefined": undefined,
    "mixed": mixed,
}


@dataclass(frozen=True)
class Case:
    batch: int
    out: int
    d: int
    top: int
    bottom: int
    x: str
    weight: str
    upstream: str
    few: int
    biased: bool
    dtype: torch.dtype
    seed: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """x, weight, bias and the gradient of the output."""
        g = Generator().manual_seed(self.seed)
        x = KINDS[self.x](self.batch, self.d, self.few, g)
        weight = KINDS[self.weight](self.out, self.d, self.few, g)
        upstream = KINDS[self.upstream](self.batch, self.out, 1, g)
        bias = torch.randn(self.out, generator=g, dtype=self.dtype) if self.biased else None
        return x.to(self.dtype), weight.to(self.dtype), bias, upstream.to(self.dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Shapes up to batch * out * d = 200,000; top and bottom over all they may be."""
    d = draw(st.sampled_from([2, 15, 16, 17, 33, 63, 100, 383, 500, 512, 784, 1000]) | st.integers(1, 1000))
    pairs = 200_000 // d
    out = draw(st.integers(1, min(pairs, draw(st.sampled_from([1, 20, 70, pairs])))))
    batch = draw(st.integers(1, min(pairs // out, draw(st.sampled_from([1, 20, 70, pairs])))))
    most = min(d - 1, draw(st.sampled_from([1, 4, 8, 16, 17, 64, d])))
    one = draw(st.integers(0, most))
    rest = d - 1 - one
    other = draw(st.integers(0, min(rest, most)) | st.sampled_from([0, min(one, rest), rest]))
    top, bottom = draw(st.sampled_from([(one, other), (other, one)]))
    return Case(
        batch,
        out,
        d,
        top,
        bottom,
        x=draw(st.sampled_from(list(KINDS))),
        weight=draw(st.sampled_from(list(KINDS))),
        upstream=draw(st.sampled_from(["gaussian", "sparse", "equal"])),
        # As many outlying coordinates as are removed, or about so many, or any number.
        few=draw(st.integers(1, min(d, top + bottom + 2)) | st.integers(1, d)),
        biased=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float64])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Takes a backend, and fills fresh memory with NaN: an entry that nobody writes shows."""
    kernel.use(backend)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        kernel.use(None)


def assert_close(actual: Tensor, expected: Tensor, scale: Tensor) -> None:
    """Within the tolerance of the dtype, relative to scale; exactly where expected is infinite or NaN."""
    assert actual.shape == expected.shape
    bound = (TOLERANCE[actual.dtype] * scale).where(expected.isfinite(), 0.0)
    right = ((actual.double() - expected).abs() <= bound) | (actual == expected) | (actual.isnan() & expected.isnan())
    wrong = (~right).nonzero()
    assert not len(wrong), (
        f"{len(wrong)} of {right.numel()} entries, the first at {wrong[0].tolist()}: {actual[~right][0]:.9g} "
        f"for {expected[~right][0]:.9g}, scale {scale[~right][0]:.9g}"
    )


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    upstream: Tensor | None = None,
    *,
    top: int,
    bottom: int,
    backends: Sequence[str] = BACKENDS,
) -> None:
    """Values, with and without gradients, and gradients are those of the definition."""
    if upstream is None:
        upstream = torch.ones(len(x), len(weight), dtype=x.dtype)
    out = reference.trimmed_linear(x, weight, bias, top=top, bottom=bottom)
    to_x, to_weight = reference.gradients(upstream, x, weight, top=top, bottom=bottom)
    out_scale = reference.scale(x, weight, bias, top=top, bottom=bottom)
    stays = reference.kept(reference.products(x, weight), top, bottom)
    size = upstream.double().abs().unsqueeze(-1)
    x_scale = (size * weight.double().abs()).where(stays, 0.0).sum(1)
    weight_scale = (size * x.double().abs().unsqueeze(1)).where(stays, 0.0).sum(0)
    for backend in backends:
        with using(backend):
            # Without gradients the kernel may stop its walk at a tie, with gradients it may not.
            assert_close(trimmed_linear(x, weight, bias, top=top, bottom=bottom), out, out_scale)
            leaves = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
            value = trimmed_linear(*leaves, bias, top=top, bottom=bottom)
            grad_x, grad_weight = torch.autograd.grad(value, leaves, upstream)
        assert_close(value.detach(), out, out_scale)
        assert_close(grad_x, to_x, x_scale)
        assert_close(grad_weight, to_weight, weight_scale)


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


@given(cases())
@settings(max_examples=100)
def test_keep_mask_equals_the_definition(case: Case) -> None:
    terms, *_ = case.tensors()
    terms = terms.nan_to_num(nan=1.0).unsqueeze(1)
    assert torch.equal(keep_mask(terms, case.top, case.bottom), reference.kept(terms, case.top, case.bottom))


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


@pytest.mark.parametrize("value", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(
    ("top", "bottom"), [(3, 2), (1, 0), (0, 1), (8, 8), (16, 16), (17, 2), (0, 30), (40, 40), (30, 69)]
)
def test_ties_leave_lowest_index_first(backend: str, top: int, bottom: int, value: float) -> None:
    weight = torch.arange(1.0, 101.0)[None].requires_grad_()
    x = (value * torch.ones(5, 100) / weight.detach()).requires_grad_()
    terms = reference.products(x.detach(), weight.detach())
    trimmed_linear(x, weight, top=top, bottom=bottom).sum().backward()
    assert x.grad is not None
    kept = x.grad.nonzero()[:, 1].view(5, -1)
    assert kept.shape[1] == 100 - top - bottom, backend
    if (terms == value).all():
        assert kept[0].tolist() == list(range(top + bottom, 100))


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


@pytest.mark.parametrize("d", [63, 500, 1000])
@pytest.mark.parametrize(("top", "bottom"), [(2, 1), (16, 0), (5, 12)])
@pytest.mark.parametrize("kind", ["mnist", "gaussian", "sparse"])
def test_layers_as_they_are_used(kind: str, d: int, top: int, bottom: int) -> None:
    g = Generator().manual_seed(d)
    x, weight = KINDS[kind](40, d, 1, g).float(), (gaussian(20, d, 1, g) / d**0.5).float()
    check(x, weight, gaussian(1, 20, 1, g)[0].float(), gaussian(40, 20, 1, g).float(), top=top, bottom=bottom)


# Bugs once seen.


@pytest.mark.parametrize("side", [1, -1])
def test_removed_terms_in_both_lists_do_not_count_as_kept(side: int) -> None:
    weight = gaussian(1, 16, 1, Generator().manual_seed(0)).float()
    weight[0, :9] = -1e6 * side
    check(torch.ones(1, 16), weight, top=0 if side > 0 else 9, bottom=9 if side > 0 else 0)


@pytest.mark.parametrize("large", [1e4, 1e6, -1e8])
@pytest.mark.parametrize("k", [1, 2, 5, 12])
def test_one_large_weight_among_leading_coordinates(large: float, k: int) -> None:
    g = Generator().manual_seed(0)
    x, weight = gaussian(16, 600, 1, g).float(), gaussian(4, 600, 1, g).float()
    x[:, 7], weight[:, 7] = 0.5, large
    check(x, weight, top=k, bottom=k)


@pytest.mark.parametrize("k", [1, 17])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_dense_sum_may_overflow_where_the_trimmed_one_does_not(k: int, sign: int) -> None:
    x, weight = torch.ones(3, 40), torch.zeros(2, 40)
    weight[:, 1 : k + 1] = 3e38 * sign  # together with the next two beyond float32
    weight[1, k + 1 : k + 3] = 0.7e38 * sign
    top, bottom = (k, 0) if sign > 0 else (0, k)
    check(x, weight, top=top, bottom=bottom)


@pytest.mark.parametrize(("top", "bottom"), [(0, 500), (333, 333), (750, 0), (20, 0), (3, 3), (999, 0)])
def test_equal_terms_do_not_drift(top: int, bottom: int) -> None:
    for value in (0.3, 0.5923077, 1.1256411):
        check(torch.full((1, 1000), value), torch.ones(1, 1000), top=top, bottom=bottom)


@pytest.mark.parametrize(("batch", "out"), [(1, 10_000), (10_000, 1), (1_000, 10)])
def test_equal_shares_of_a_gradient_do_not_drift(batch: int, out: int) -> None:
    for value in (0.3, 0.5923077, 1.1256411):
        upstream = torch.full((batch, out), value)
        check(torch.ones(batch, 20), torch.full((out, 20), value), None, upstream, top=1, bottom=1)


# Coordinates that would spoil a sum.


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


def test_infinite_terms_that_leave_do_not_matter(backend: str) -> None:
    x = torch.tensor([[inf, 3.0, 1.0, 2.0, -inf]])
    weight = torch.ones(1, 5)
    assert trimmed_linear(x, weight, top=1, bottom=1).tolist() == [[6.0]], backend
    assert trimmed_linear(-x, weight, top=1, bottom=1).tolist() == [[-6.0]]
    assert trimmed_linear(x, weight, top=2, bottom=2).tolist() == [[2.0]]
    assert trimmed_linear(weight, x, top=1, bottom=1).tolist() == [[6.0]]


def test_infinite_terms_that_stay_are_infinite_or_undefined(backend: str) -> None:
    x = torch.tensor(
        [[inf, inf, 1.0, 2.0, -inf, -inf], [inf, inf, 1.0, 2.0, 3.0, 4.0], [-inf, -inf, 1.0, 2.0, 3.0, 4.0]]
    )
    out = trimmed_linear(x, torch.ones(1, 6), top=1, bottom=1)
    assert out.isnan().tolist() == [[True], [False], [False]], backend
    assert out[1:].tolist() == [[inf], [-inf]]
    assert trimmed_linear(torch.ones(1, 6), x, top=1, bottom=1)[0, 1:].tolist() == [inf, -inf]


def test_zero_times_infinity_is_zero(backend: str) -> None:
    x = torch.tensor([[inf, 1.0, 2.0, 3.0, 0.0], [0.0, 1.0, 2.0, 3.0, 0.0]])
    weight = torch.tensor([[0.0, 1.0, 1.0, 1.0, inf]])
    assert trimmed_linear(x, weight, top=1, bottom=1).tolist() == [[3.0], [3.0]], backend
    assert trimmed_linear(x, weight, top=0, bottom=1).tolist() == [[6.0], [6.0]]
    # Such a term may leave, and ties with other zeros.
    for sign in (1, -1):
        check(sign * x, weight, top=0, bottom=1, backends=[backend])
        check(sign * x, weight, top=1, bottom=1, backends=[backend])
        check(torch.zeros(1, 5), weight, top=2, bottom=1, backends=[backend])
        check(sign * torch.tensor([[5.0, 1.0, 2.0, -3.0, 0.0]]), weight, top=1, bottom=1, backends=[backend])
        check(sign * torch.tensor([[3.0, 0.0, 0.0, 0.0, 0.0]]), weight, top=0, bottom=1, backends=[backend])
        # The zero that leaves has an infinite weight, the one that stays a finite coordinate.
        top = int(sign > 0)
        rest = sign * torch.tensor([[0.0, 2.0, -1.0, -2.0, -3.0]])
        check(rest, torch.tensor([[inf, 0.0, 1.0, 1.0, 1.0]]), top=top, bottom=1 - top, backends=[backend])


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


@pytest.mark.parametrize("k", [1, 8, 20])
@pytest.mark.parametrize("elsewhere", [0.0, 1.0])
def test_nan_stays_in_its_sample_and_in_its_column(backend: str, k: int, elsewhere: float) -> None:
    g = Generator().manual_seed(k)
    x, weight = gaussian(20, 50, 1, g), gaussian(18, 50, 1, g)
    clean = trimmed_linear(x, weight, top=k, bottom=k)
    # A coefficient of 0 does not hide a NaN.
    weight[:, 3] = x[:, 4] = elsewhere
    x[7, 3] = weight[11, 4] = nan
    x.requires_grad_()
    weight.requires_grad_()
    out = trimmed_linear(x, weight, top=k, bottom=k)
    lost = torch.zeros_like(clean, dtype=torch.bool)
    lost[7], lost[:, 11] = True, True
    assert torch.equal(out.isnan(), lost), backend
    assert torch.equal(trimmed_linear(x.detach(), weight.detach(), top=k, bottom=k).isnan(), lost)
    with torch.no_grad():
        x[7, 3] = weight[11, 4] = 0.0
    healed = trimmed_linear(x, weight, top=k, bottom=k)
    assert torch.allclose(out[~lost], healed[~lost], rtol=1e-12)


def test_nothing_removed_is_the_dense_layer(backend: str) -> None:
    g = Generator().manual_seed(0)
    x, weight, bias = gaussian(5, 9, 1, g), gaussian(4, 9, 1, g), gaussian(1, 4, 1, g)[0]
    x[0, 0], weight[0, 0] = inf, 0.0
    assert truncated_linear(x, weight, bias, k=0).isnan().nonzero().tolist() == [[0, 0]], backend
    assert torch.equal(truncated_linear(x[1:], weight, bias, k=0), F.linear(x[1:], weight, bias))


def test_k_is_top_and_bottom(backend: str) -> None:
    g = Generator().manual_seed(0)
    x, weight, bias = gaussian(5, 9, 1, g), gaussian(4, 9, 1, g), gaussian(1, 4, 1, g)[0]
    both = trimmed_linear(x, weight, bias, top=3, bottom=3)
    assert torch.equal(truncated_linear(x, weight, bias, k=3), both), backend


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


@pytest.mark.parametrize("k", [1, 20])
def test_nan_upstream_reaches_what_the_definition_says(backend: str, k: int) -> None:
    g = Generator().manual_seed(k)
    x, weight = gaussian(20, 50, 1, g), gaussian(18, 50, 1, g)
    upstream = gaussian(20, 18, 1, g)
    upstream[7, 11] = nan
    check(x, weight, None, upstream, backends=[backend], top=k, bottom=k)


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


# Shapes and layouts.


@pytest.mark.parametrize("shape", [(63,), (1, 63), (0, 63), (2, 0, 63), (5, 63), (2, 3, 63), (2, 1, 3, 63)])
@pytest.mark.parametrize("out", [1, 5])
def test_any_leading_shape(backend: str, shape: tuple[int, ...], out: int) -> None:
    g = Generator().manual_seed(0)
    x = torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
    weight = gaussian(out, 63, 1, g).requires_grad_()
    bias = gaussian(1, out, 1, g)[0].requires_grad_()
    value = trimmed_linear(x, weight, bias, top=4, bottom=2)
    assert value.shape == (*shape[:-1], out), backend
    assert torch.allclose(value, reference.trimmed_linear(x, weight, bias, top=4, bottom=2))
    to_x, to_weight, to_bias = torch.autograd.grad(value.sum(), (x, weight, bias))
    flat = x.detach().reshape(-1, 63)
    expected = reference.gradients(torch.ones(len(flat), out), flat, weight.detach(), top=4, bottom=2)
    assert torch.allclose(to_x.reshape(-1, 63), expected[0])
    assert torch.allclose(to_weight, expected[1])
    assert to_x.shape == x.shape
    assert torch.equal(to_bias, torch.full_like(bias, len(flat)))


@pytest.mark.parametrize("out", [0, 1])
def test_no_samples_or_no_outputs(backend: str, out: int) -> None:
    x, weight = torch.ones(3 * (1 - out), 7, requires_grad=True), torch.ones(out, 7, requires_grad=True)
    value = trimmed_linear(x, weight, top=2, bottom=1)
    assert value.shape == (len(x), out), backend
    grads = torch.autograd.grad(value.sum(), (x, weight))
    assert [g.shape for g in grads] == [x.shape, weight.shape]
    assert not any(g.any() for g in grads)


def transposed(t: Tensor) -> Tensor:
    return t.T.contiguous().T if t.dim() == 2 else strided(t)


def strided(t: Tensor) -> Tensor:
    return torch.full((*t.shape, 3), nan, dtype=t.dtype).index_copy_(-1, torch.tensor([1]), t.unsqueeze(-1))[..., 1]


def expanded(t: Tensor) -> Tensor:
    return t[:1].contiguous().expand(t.shape)


@pytest.mark.parametrize("layout", [transposed, strided, expanded])
@pytest.mark.parametrize("which", ["x", "weight", "bias", "upstream"])
def test_any_layout(backend: str, which: str, layout: Callable[[Tensor], Tensor]) -> None:
    g = Generator().manual_seed(0)
    tensors = {"x": gaussian(20, 63, 1, g), "weight": gaussian(18, 63, 1, g), "bias": gaussian(1, 18, 1, g)[0]}
    tensors["upstream"] = gaussian(20, 18, 1, g)
    tensors[which] = layout(tensors[which])
    assert 0 in tensors[which].stride() or not tensors[which].is_contiguous()

    def run(x: Tensor, weight: Tensor, bias: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        out = trimmed_linear(*leaves, top=3, bottom=5)
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    plain = run(**{name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()})
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(run(**tensors), plain, strict=True)), backend


@pytest.mark.parametrize("kind", ["gaussian", "few at 1e8", "mixed"])
@pytest.mark.parametrize("k", [3, 30])
def test_samples_do_not_depend_on_their_batch(backend: str, kind: str, k: int) -> None:
    g = Generator().manual_seed(k)
    x, weight = KINDS[kind](300, 100, k, g).float(), gaussian(3, 100, 1, g).float()
    together = trimmed_linear(x, weight, top=k, bottom=k)
    alone = torch.stack([trimmed_linear(row, weight, top=k, bottom=k) for row in x])
    scale = reference.scale(x, weight, top=k, bottom=k)
    assert_close(together, alone.double(), 2 * scale)
    assert backend in BACKENDS


@pytest.mark.parametrize("k", [2, 20])
def test_batches_beyond_one_slab_of_panels(k: int) -> None:
    # The kernel packs 8 MiB of samples at a time.
    g = Generator().manual_seed(k)
    x, weight = integers(2_150, 1_000, 1, g).float(), integers(2, 1_000, 1, g).float()
    x[-1] = gaussian(1, 1_000, 1, g)[0]
    upstream = gaussian(2_150, 2, 1, g).float()
    check(x, weight, None, upstream, top=k, bottom=1, backends=kernel.builds()[:1])


@pytest.mark.parametrize("batch", [1, 40])
def test_any_number_of_threads(backend: str, batch: int) -> None:
    g = Generator().manual_seed(0)
    x, weight = gaussian(batch, 63, 1, g).float(), gaussian(50, 63, 1, g).float()
    upstream = gaussian(batch, 50, 1, g).float()
    torch.set_num_threads(3)
    try:
        check(x, weight, None, upstream, top=3, bottom=2, backends=[backend])
    finally:
        torch.set_num_threads(1)


def test_inputs_are_left_alone(backend: str) -> None:
    g = Generator().manual_seed(0)
    for k in (2, 20):
        leaves = [mixed(40, 100, k, g), mixed(20, 100, k, g), gaussian(1, 20, 1, g)[0]]
        before = [t.clone() for t in leaves]
        upstream = gaussian(40, 20, 1, g)
        same = upstream.clone()
        for t in leaves:
            t.requires_grad_()
        trimmed_linear(*leaves, top=k, bottom=k).backward(upstream)
        trimmed_linear(*(t.detach() for t in leaves), top=k, bottom=k)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(leaves, before, strict=True)), backend
        assert torch.equal(upstream, same)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,), ()])
def test_gradients_to_what_asks_for_them(backend: str, wanted: tuple[int, ...]) -> None:
    g = Generator().manual_seed(0)
    leaves = [gaussian(20, 63, 1, g), gaussian(18, 63, 1, g), gaussian(1, 18, 1, g)[0]]
    upstream = gaussian(20, 18, 1, g)
    expected = [*reference.gradients(upstream, leaves[0], leaves[1], top=3, bottom=4), upstream.sum(0)]
    for i in wanted:
        leaves[i].requires_grad_()
    out = trimmed_linear(*leaves, top=3, bottom=4)
    assert out.requires_grad == bool(wanted), backend
    if wanted:
        out.backward(upstream)
    for i, t in enumerate(leaves):
        assert (t.grad is not None) == (i in wanted)
        assert t.grad is None or torch.allclose(t.grad, expected[i], rtol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize(("batch", "out", "d"), [(64, 128, 250), (3, 700, 20), (300, 2, 100)])
def test_the_torch_path_makes_nothing_larger_than_a_block(
    monkeypatch: pytest.MonkeyPatch, batch: int, out: int, d: int
) -> None:
    block = 16_384
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", block)
    g = Generator().manual_seed(0)
    x, weight = gaussian(batch, d, 1, g).float(), gaussian(out, d, 1, g).float()
    upstream = gaussian(batch, out, 1, g).float()
    check(x, weight, None, upstream, top=3, bottom=2, backends=["none"])
    with LargestTensor() as largest:
        _, cuts, ties = blocked.forward(x, weight, None, 3, 2, keep_cuts=True)
        blocked.backward(upstream, x, weight, cuts, ties, to_x=True, to_weight=True)
    inputs_and_outputs = max(t.numel() for t in (x, weight, cuts))
    assert largest.elements <= max(block, inputs_and_outputs) < batch * out * d


def test_the_torch_path_serves_the_layer_of_the_paper_in_blocks() -> None:
    x, weight = torch.ones(64, 1000), torch.ones(512, 1000)
    with LargestTensor() as largest:
        blocked.forward(x, weight, None, 10, 10, keep_cuts=False)
    assert largest.elements <= blocked.BLOCK_ELEMENTS < 64 * 512 * 1000
