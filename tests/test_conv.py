"""The trimmed convolution equals its definition, and its layer stands in for ``nn.Conv2d``."""

import copy
import math
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, fx, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from ell0.attacks.surrogate import surrogate_gradients
from ell0.nn import TruncatedConv2d
from ell0.ops import conv, reference, trimmed_conv2d
from ell0.ops.reference import Geometry
from ell0.threat import Unit
from trimmed_cases import BACKENDS, KINDS, UNITS, assert_close, numbers, using

inf, nan = math.inf, math.nan
each_unit = pytest.mark.parametrize("unit", UNITS)


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int]
    out: int
    kernel: tuple[int, int]
    geometry: Geometry
    unit: Unit
    top: int
    bottom: int
    kinds: tuple[str, str]
    few: int
    biased: bool
    dtype: torch.dtype
    seed: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, weight and bias."""
        g = Generator().manual_seed(self.seed)
        made = []
        for kind, (rows, *shape) in zip(self.kinds, (self.shape, (self.out, self.shape[1], *self.kernel)), strict=True):
            d = math.prod(shape)
            made.append(KINDS[kind](rows, d, min(d, self.few), g).reshape(rows, *shape).to(self.dtype))
        bias = torch.randn(self.out, generator=g, dtype=self.dtype) if self.biased else None
        return made[0], made[1], bias


@st.composite
def cases(draw: st.DrawFn) -> Case:
    channels, kernel = draw(st.integers(1, 6)), draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    stride, dilation = (draw(st.tuples(st.integers(1, 3), st.integers(1, 3))) for _ in range(2))
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    height, width = (
        max(1, dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i]) + draw(st.integers(0, 5 * stride[i])) for i in (0, 1)
    )
    unit = draw(st.sampled_from(UNITS))
    terms = conv.count_terms(channels, kernel, unit)
    top = draw(st.integers(0, terms - 1))
    bottom = draw(st.integers(0, terms - 1 - top) | st.just(min(top, terms - 1 - top)))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64]))
    # The sums of pixels in float64 that tie but for their last bit are not defined to it.
    weights = ["gaussian", "integers"] if unit == "pixel" and dtype == torch.float64 else list(KINDS)
    kinds = draw(st.sampled_from(list(KINDS))), draw(st.sampled_from(weights))
    few, biased, seed = draw(st.integers(1, 8)), draw(st.booleans()), draw(st.integers(0, 2**32 - 1))
    shape, out = (draw(st.integers(1, 3)), channels, height, width), draw(st.integers(1, 9))
    geometry = {"stride": stride, "padding": padding, "dilation": dilation}
    return Case(shape, out, kernel, geometry, unit, top, bottom, kinds, few, biased, dtype, seed)


def moved(**options: Any) -> dict[str, Any]:
    """How a window moves over an image."""
    return {"stride": 1, "padding": 0, "dilation": 1} | options


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, *, top: int, bottom: int, unit: Unit
) -> None:
    """Values, with and without gradients, and gradients are those of the definition."""
    terms = reference.conv_terms(x, weight, geometry, unit)
    stays = reference.kept(terms, top, bottom)
    out = reference.trimmed_conv2d(x, weight, bias, geometry, top=top, bottom=bottom, unit=unit)
    # In float64 the sum over channels itself can cancel.
    sizes = terms.abs() if x.dtype == torch.float32 else reference.conv_terms(x.abs(), weight.abs(), geometry, unit)
    scale = sizes.double().where(stays, 0.0).sum(-1)
    scale = scale if bias is None else scale + bias.double().abs().unsqueeze(-1)
    upstream = torch.randn(out.shape, generator=Generator().manual_seed(1), dtype=x.dtype)
    lost = terms.isnan().any(-1)
    stays = stays | lost.unsqueeze(-1)
    expected = reference.conv_gradients(upstream.masked_fill(lost, nan), x, weight, stays, geometry, unit)
    sizes_of_gradients = reference.conv_gradients(upstream.abs(), x.abs(), weight.abs(), stays, geometry, unit)
    options: dict[str, Any] = {"top": top, "bottom": bottom, "unit": unit, **geometry}

    assert_close(trimmed_conv2d(x, weight, bias, **options).flatten(2), out, scale)
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    value = trimmed_conv2d(*leaves, **options)
    assert_close(value.detach().flatten(2), out, scale)
    found = torch.autograd.grad(value, leaves, upstream.view(value.shape))
    for gradient, want, size in zip(found, expected, sizes_of_gradients, strict=False):
        assert_close(gradient, want, size)
    if bias is not None:
        assert_close(found[2], upstream.double().sum((0, 2)), upstream.double().abs().sum((0, 2)))


@given(cases(), st.sampled_from([1, 300, 1 << 18]), st.sampled_from([0, conv.COMPARED]))
@settings(max_examples=settings().max_examples // 2)
def test_values_and_gradients_equal_the_definition(case: Case, at_once: int, compared: int) -> None:
    x, weight, bias = case.tensors()
    with mock.patch.multiple(conv, CACHED=at_once, COMPARED=compared):
        if case.top == case.bottom == 0:
            plain = trimmed_conv2d(x, weight, bias, top=0, bottom=0, unit=case.unit, **case.geometry)
            dense = F.conv2d(x, weight, bias, **case.geometry)
            assert torch.equal(plain.nan_to_num(), dense.nan_to_num())
        else:
            with using(BACKENDS[case.seed % len(BACKENDS)]):
                check(x, weight, bias, case.geometry, top=case.top, bottom=case.bottom, unit=case.unit)


def by_hand(x: Tensor, weight: Tensor, top: int, bottom: int, unit: Unit) -> Tensor:
    """One sample in plain Python."""
    out, _, kh, kw = weight.shape
    result = torch.empty(out, x.shape[1] - kh + 1, x.shape[2] - kw + 1, dtype=x.dtype)
    for o, i, j in product(*map(range, result.shape)):
        products = (weight[o] * x[:, i : i + kh, j : j + kw]).tolist()
        terms = [value for channel in products for row in channel for value in row]
        if unit == "pixel":
            terms = [sum(terms[place :: kh * kw]) for place in range(kh * kw)]
        result[o, i, j] = sum(sorted(terms)[bottom : len(terms) - top])
    return result


@each_unit
def test_the_definition_is_the_sorted_middle_of_a_field(unit: Unit) -> None:
    x, weight, bias = numbers(1, 3, 5, 4), numbers(2, 3, 3, 2, seed=1), numbers(2, seed=2)
    expected = by_hand(F.pad(x[0], (2, 2, 1, 1)), weight, 2, 1, unit) + bias.view(2, 1, 1)
    defined = reference.trimmed_conv2d(x, weight, bias, moved(padding=(1, 2)), top=2, bottom=1, unit=unit)
    torch.testing.assert_close(defined[0].view(expected.shape), expected)


def test_windows_of_many_places() -> None:
    # More ties than a byte can count.
    x, weight = torch.ones(1, 2, 16, 18), torch.ones(2, 2, 16, 17)
    check(x, weight, None, moved(), top=30, bottom=25, unit="pixel")


@pytest.mark.parametrize("value", [1.0, -1e8, inf])
@each_unit
def test_no_change_of_a_few_units_leaves_the_interval(unit: Unit, value: float) -> None:
    g, k = Generator().manual_seed(0), 4
    x, weight = torch.rand(20, 3, 7, 7, generator=g) * 2 - 1, numbers(5, 3, 3, 3, dtype=torch.float32)
    # The products of an infinite pixel have one sign: else its term is undefined.
    weight = weight.abs() if value == inf else weight
    clean = trimmed_conv2d(x, weight, top=k, bottom=k, padding=1, unit=unit)
    for budget in range(1, k + 1):
        low = trimmed_conv2d(x, weight, top=k + budget, bottom=k - budget, padding=1, unit=unit)
        high = trimmed_conv2d(x, weight, top=k - budget, bottom=k + budget, padding=1, unit=unit)
        chosen = torch.rand(20, 3 if unit == "feature" else 1, 49, generator=g).flatten(1).argsort(1) < budget
        changed = torch.where(chosen.view(20, -1, 7, 7), value, x)
        attacked = trimmed_conv2d(changed, weight, top=k, bottom=k, padding=1, unit=unit)
        assert ((low - 1e-4 <= attacked) & (attacked <= high + 1e-4)).all()
        assert not torch.equal(attacked, clean)


@each_unit
@pytest.mark.parametrize("compared", [0, conv.COMPARED])
def test_nan_stays_in_the_fields_that_see_it_and_in_its_output(
    unit: Unit, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv, "COMPARED", compared)
    x, weight = numbers(2, 2, 6, 6), numbers(3, 2, 3, 3, seed=1)
    x[1, 0, 0, 5], weight[2, 1, 1, 1] = nan, nan
    lost = torch.zeros(2, 3, 6, 6, dtype=torch.bool)
    lost[1, :, :2, 4:], lost[:, 2] = True, True
    assert torch.equal(trimmed_conv2d(x, weight, top=1, bottom=2, padding=1, unit=unit).isnan(), lost)
    check(x, weight, None, moved(padding=1), top=1, bottom=2, unit=unit)


# Memory, layouts and gradients.


@each_unit
def test_no_terms_are_kept_for_backward(unit: Unit) -> None:
    x, weight = numbers(4, 3, 8, 8).requires_grad_(), numbers(50, 3, 3, 3, seed=1).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        trimmed_conv2d(x, weight, top=2, bottom=2, unit=unit)
    fields, cuts = 4 * 36 * 27, 4 * 36 * 50 * 2
    assert max(t.numel() for t in kept) <= max(fields, cuts)


@each_unit
def test_any_layout(unit: Unit) -> None:
    x, weight, upstream = numbers(4, 3, 6, 5), numbers(6, 3, 3, 3, seed=1), numbers(4, 6, 4, 3, seed=2)

    def run(x: Tensor, weight: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        out = trimmed_conv2d(*leaves, top=1, bottom=2, unit=unit)
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    expected = run(x, weight, upstream)
    assert expected[0].is_contiguous()
    last, wide = torch.channels_last, torch.stack((x, x), -1)[..., 0]
    assert trimmed_conv2d(x.to(memory_format=last), weight, top=0, bottom=0).is_contiguous(memory_format=last)
    for strange in (
        (x.to(memory_format=last), weight.to(memory_format=last), upstream.to(memory_format=last)),
        (wide, weight.transpose(2, 3).contiguous().transpose(2, 3), upstream),
        (x, weight, upstream.transpose(0, 1).contiguous().transpose(0, 1)),
    ):
        found = run(*strange)
        assert found[0].is_contiguous() != strange[0].is_contiguous(memory_format=last)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    same = run(x[:1].expand(4, 3, 6, 5), weight, upstream)[0]
    torch.testing.assert_close(same, expected[0][:1].expand_as(same))


@each_unit
def test_empty_batches(unit: Unit) -> None:
    x, weight = torch.ones(0, 2, 5, 5, requires_grad=True), torch.ones(4, 2, 3, 3, requires_grad=True)
    out = trimmed_conv2d(x, weight, top=1, bottom=1, unit=unit)
    assert out.shape == (0, 4, 3, 3)
    to_x, to_weight = torch.autograd.grad(out.sum(), (x, weight))
    assert to_x.shape == x.shape
    assert torch.equal(to_weight, torch.zeros_like(weight))


@each_unit
@pytest.mark.parametrize("wanted", [(0, 1, 2), (0, 1), (0,), (1,), (2,), ()])
def test_gradients_to_what_asks_for_them_the_same_bits_and_inputs_left_alone(
    unit: Unit, wanted: tuple[int, ...]
) -> None:
    leaves = [numbers(3, 2, 5, 5), numbers(4, 2, 3, 3, seed=1), numbers(4, seed=2)]
    every = [t.clone().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(trimmed_conv2d(*every, top=2, bottom=1, unit=unit).square().sum(), every)
    for i in wanted:
        leaves[i].requires_grad_()
    out = trimmed_conv2d(*leaves, top=2, bottom=1, unit=unit).square_()  # a layer behind may work in place
    assert out.requires_grad == bool(wanted)
    if wanted:
        out.sum().backward()
    for i, t in enumerate(leaves):
        assert (t.grad is not None) == (i in wanted)
        assert t.grad is None or torch.equal(t.grad, expected[i])
        assert torch.equal(t, every[i])
    with torch.no_grad():
        assert torch.equal(trimmed_conv2d(*leaves, top=2, bottom=1, unit=unit).square(), out)


def test_the_operator_is_registered_soundly() -> None:
    fields, weight, bias = (t.requires_grad_() for t in (numbers(7, 4, 9), numbers(6, 4, 9), numbers(6)))
    torch.library.opcheck(torch.ops.ell0.trimmed_pixels.default, (fields, weight, bias, 2, 1))
    saved = numbers(7, 6), fields.detach(), weight.detach(), 2, 1
    for wanted in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(torch.ops.ell0.trimmed_pixels_backward.default, (*saved, *wanted))


@each_unit
def test_no_second_derivatives_and_no_forward_mode(unit: Unit) -> None:
    x, weight = numbers(2, 2, 5, 5).requires_grad_(), numbers(3, 2, 3, 3)
    out = trimmed_conv2d(x, weight, top=1, bottom=1, unit=unit)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        slope.sum().backward()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        trimmed_conv2d(forward_ad.make_dual(x.detach(), x.detach()), weight, top=1, bottom=1, unit=unit)


@each_unit
def test_autocast_keeps_the_precision_of_the_weight(unit: Unit) -> None:
    layer, x = TruncatedConv2d(3, 4, 3, 2, unit=unit), numbers(2, 3, 6, 6, dtype=torch.float32)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
        lowered = layer(x.bfloat16())
    assert lowered.dtype == torch.float32
    torch.testing.assert_close(lowered, layer(x.bfloat16().float()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": None}, "x must be a tensor, got NoneType"),
        ({"x": torch.ones(3, 8, 8)}, r"x must have shape \(n, 4, height, width\) to match weight, got \(3, 8, 8\)"),
        ({"x": torch.ones(2, 3, 8, 8)}, r"x must have shape \(n, 4, height, width\) .* got \(2, 3, 8, 8\)"),
        ({"x": torch.ones(2, 4, 8, 8).double()}, r"x must have the dtype of weight .* got torch.float64"),
        ({"weight": torch.ones(6, 18)}, r"weight must have shape \(out, in, height, width\), got \(6, 18\)"),
        ({"bias": torch.ones(5)}, r"bias must have shape \(6,\) to match weight, got \(5,\)"),
        ({"unit": "colour"}, 'unit must be "feature" or "pixel", got \'colour\''),
        ({"bottom": 1.0}, "bottom must be an integer, got 1.0"),
        ({"top": 20, "bottom": 16}, r"top \+ bottom must be smaller than .* got top=20 and bottom=16 with 36 terms"),
        ({"top": 5, "bottom": 4, "unit": "pixel"}, "got top=5 and bottom=4 with 9 terms"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], said: str) -> None:
    right: dict[str, Any] = {"x": torch.ones(2, 4, 8, 8), "weight": torch.ones(6, 4, 3, 3)}
    with pytest.raises(ValueError, match=said):
        trimmed_conv2d(**(right | {"top": 1, "bottom": 1} | changed))


# The layer.


def test_the_layer_starts_as_conv2d_and_shares_its_state() -> None:
    for bias in (True, False):
        torch.manual_seed(3)
        plain, after = nn.Conv2d(4, 6, (3, 2), bias=bias), torch.rand(3)
        torch.manual_seed(3)
        truncated, then = TruncatedConv2d(4, 6, (3, 2), 2, bias=bias), torch.rand(3)
        assert torch.equal(after, then)
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), truncated.parameters(), strict=True))
        plain.load_state_dict(truncated.state_dict())
        truncated.load_state_dict(plain.state_dict())
    said = "TruncatedConv2d(4, 6, kernel_size=(3, 2), stride=(1, 1), bias=False, k=2, unit=feature)"
    assert repr(truncated) == repr(copy.deepcopy(truncated)) == said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k": 9}, r"k must satisfy 0 <= 2\*k < terms of a field, got k=9 with terms of a field=18"),
        ({"k": 5, "unit": "pixel"}, r"k must satisfy 0 <= 2\*k < .* got k=5 with terms of a field=9"),
        ({"k": -1}, r"k must satisfy 0 <= 2\*k < terms of a field, got k=-1"),
        ({"k": True}, "k must be an integer, got True"),
        ({"k": 1.0}, "k must be an integer, got 1.0"),
        ({"unit": "row"}, 'unit must be "feature" or "pixel", got \'row\''),
        ({"padding": "same"}, "padding must be an int or two of them, got 'same'"),
    ],
)
def test_a_wrong_layer_is_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TruncatedConv2d(**({"in_channels": 2, "out_channels": 3, "kernel_size": 3, "k": 1} | changed))


@each_unit
def test_the_layer_is_the_operator_and_can_be_traced_exported_and_compiled(unit: Unit) -> None:
    options: dict[str, Any] = {"stride": (2, 1), "padding": (2, 1), "dilation": (1, 2), "unit": unit}
    layer, x = TruncatedConv2d(2, 3, 3, 2, **options), numbers(3, 2, 5, 5, dtype=torch.float32)
    assert torch.equal(layer(x), trimmed_conv2d(x, layer.weight, layer.bias, top=2, bottom=2, **options))
    assert torch.equal(fx.symbolic_trace(layer)(x), layer(x))
    program = torch.export.export(layer, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(x), layer(x))
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    slopes = [torch.autograd.grad(f(x).square().sum(), layer.weight)[0] for f in (compiled, layer)]
    torch.testing.assert_close(*slopes)


@each_unit
def test_the_straight_surrogate_is_the_gradient_of_the_dense_layer(unit: Unit) -> None:
    layer = TruncatedConv2d(4, 6, (3, 2), 2, (2, 1), 1, (1, 2), unit=unit).double()
    x, upstream = numbers(3, 4, 7, 6), numbers(*layer(numbers(3, 4, 7, 6)).shape, seed=3)
    x[:, 0, 3, 3] = inf
    ordinary = layer(x)
    leaf = torch.zeros_like(x).requires_grad_()
    (dense,) = torch.autograd.grad(F.conv2d(leaf, layer.weight, **layer.geometry), leaf, upstream)
    with surrogate_gradients(layer):
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        torch.testing.assert_close(torch.autograd.grad(out, leaf, upstream)[0], dense)
    assert torch.equal(out.nan_to_num(), ordinary.nan_to_num())
    assert "forward" not in layer.__dict__
