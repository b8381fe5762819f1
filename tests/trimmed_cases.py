"""Numbers of every kind, shapes and checks for the tests of the trimmed product."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Generator, Tensor

from ell0.ops import kernel, reference, trimmed_linear

inf, nan = math.inf, math.nan
BACKENDS = (*kernel.builds(), "none")
DTYPES = (torch.float32, torch.float64)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}

# Rows (n, d) of one kind of data; `few` is a number of coordinates.
Kind = Callable[[int, int, int, Generator], Tensor]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=Generator().manual_seed(seed), dtype=dtype)


def gaussian(n: int, d: int, _: int, g: Generator) -> Tensor:
    return torch.randn(n, d, generator=g, dtype=torch.float64)


def integers(n: int, d: int, _: int, g: Generator) -> Tensor:
    return torch.randint(-2, 3, (n, d), generator=g).double()


def sparse(n: int, d: int, few: int, g: Generator) -> Tensor:
    return gaussian(n, d, few, g) * (torch.rand(n, d, generator=g) < 0.2)


def mnist(n: int, d: int, _: int, g: Generator) -> Tensor:
    return (5 * torch.rand(n, d, generator=g, dtype=torch.float64) - 4).clamp(-1, 1 - 2**-8)


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
    "sparser": lambda n, d, few, g: gaussian(n, d, few, g) * (torch.rand(n, d, generator=g).argsort(-1) < few),
    "mnist": mnist,
    "equal": lambda n, d, few, g: gaussian(n, 1, few, g).expand(n, d),
    "blank": lambda n, d, *_: torch.zeros(n, d, dtype=torch.float64),
    "tiny": lambda n, d, few, g: 1e-30 * gaussian(n, d, few, g),
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
        upstream=draw(st.sampled_from(["gaussian", "sparse", "equal", "undefined"])),
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
