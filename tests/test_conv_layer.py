"""The layer of trimmed convolutions stands in for ``nn.Conv2d``, and its surrogate gradients are those defined."""

import copy
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from ell0.attacks.surrogate import surrogate_gradients
from ell0.nn import TruncatedConv2d
from ell0.ops import trimmed_conv2d
from ell0.threat import Unit
from trimmed_cases import UNITS, numbers


def test_the_layer_starts_as_conv2d_and_shares_its_state() -> None:
    for bias in (True, False):
        torch.manual_seed(3)
        plain, after = nn.Conv2d(4, 6, (3, 2), groups=2, bias=bias), torch.rand(3)
        torch.manual_seed(3)
        truncated, then = TruncatedConv2d(4, 6, (3, 2), 2, groups=2, bias=bias), torch.rand(3)
        assert torch.equal(after, then)
        assert plain.state_dict().keys() == truncated.state_dict().keys()
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), truncated.parameters(), strict=True))
        nn.Conv2d(4, 6, (3, 2), groups=2, bias=bias).load_state_dict(truncated.state_dict())
        truncated.load_state_dict(nn.Conv2d(4, 6, (3, 2), groups=2, bias=bias).state_dict())


@settings(max_examples=40)
@given(st.sampled_from(UNITS), st.integers(0, 4), st.sampled_from([1, (2, 3)]), st.sampled_from([0, (2, 1)]))
def test_the_layer_is_the_operator(unit: Unit, k: int, stride: Any, padding: Any) -> None:
    layer = TruncatedConv2d(4, 6, 3, k, stride, padding, (1, 2), 2, unit=unit)
    x = numbers(2, 4, 9, 9, dtype=torch.float32)
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": (1, 2), "groups": 2}
    expected = trimmed_conv2d(x, layer.weight, layer.bias, top=k, bottom=k, unit=unit, **options)
    assert torch.equal(layer(x), expected)
    if k == 0:
        plain = nn.Conv2d(4, 6, 3, **options)
        plain.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x), plain(x))


def test_the_layer_says_what_it_is() -> None:
    layer = TruncatedConv2d(3, 8, 3, 4, padding=1, unit="pixel")
    said = "TruncatedConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), k=4, unit=pixel)"
    assert repr(layer) == said
    assert repr(copy.deepcopy(layer)) == said
    made = TruncatedConv2d(3, 8, 3, 4, device="meta", dtype=torch.float64)
    assert (made.weight.device.type, made.weight.dtype) == ("meta", torch.float64)


@pytest.mark.parametrize(
    ("unit", "groups", "k", "terms"),
    [("feature", 1, 18, 36), ("feature", 2, 9, 18), ("pixel", 1, 5, 9), ("pixel", 2, -1, 9), ("feature", 4, 5, 9)],
)
def test_bounds_of_k(unit: Unit, groups: int, k: int, terms: int) -> None:
    with pytest.raises(
        ValueError, match=rf"0 <= 2\*k < the terms of a field, got k={k} with {terms} terms of unit \"{unit}\""
    ):
        TruncatedConv2d(4, 4, 3, k, groups=groups, unit=unit)
    TruncatedConv2d(4, 4, 3, (terms - 1) // 2, groups=groups, unit=unit)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k": True}, "k must be an integer, got True"),
        ({"k": 1.0}, "k must be an integer, got 1.0"),
        ({"unit": "row"}, 'unit must be "feature" or "pixel", got \'row\''),
        ({"kernel_size": 0}, "kernel_size must be an int >= 1 or two of them, got 0"),
        ({"padding": "same"}, "padding must be an int >= 0 or two of them, got 'same'"),
        ({"groups": 0}, "groups must be an int >= 1, got 0"),
    ],
)
def test_a_wrong_layer_is_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TruncatedConv2d(**({"in_channels": 2, "out_channels": 3, "kernel_size": 3, "k": 1} | changed))


@pytest.mark.parametrize("unit", UNITS)
def test_the_layer_can_be_traced_exported_and_compiled(unit: Unit) -> None:
    layer, x = TruncatedConv2d(2, 3, 3, 2, padding=1, unit=unit), numbers(3, 2, 5, 5, dtype=torch.float32)
    assert torch.equal(fx.symbolic_trace(layer)(x), layer(x))
    program = torch.export.export(layer, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(x), layer(x))
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    slopes = [torch.autograd.grad(f(x).square().sum(), layer.weight)[0] for f in (compiled, layer)]
    torch.testing.assert_close(*slopes)


# Surrogate gradients.


def grouped(unit: Unit, k: int) -> TruncatedConv2d:
    layer = TruncatedConv2d(4, 6, (3, 2), k, (2, 1), 1, (1, 2), 2, unit=unit).double()
    with torch.no_grad():
        layer.weight.copy_(numbers(6, 2, 3, 2, seed=1))
    return layer


def slope(layer: nn.Module, x: Tensor, upstream: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(layer(leaf), leaf, upstream)[0]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("k", [0, 2])
def test_straight_is_the_gradient_of_the_dense_layer(unit: Unit, k: int) -> None:
    layer, plain, x = grouped(unit, k), grouped(unit, 0), numbers(3, 4, 7, 6)
    upstream = numbers(*layer(x).shape, seed=3)
    with surrogate_gradients(layer, "straight"):
        assert torch.equal(layer(x.clone().requires_grad_()), layer(x))
        torch.testing.assert_close(slope(layer, x, upstream), slope(plain, x, upstream))
    assert torch.allclose(slope(layer, x, upstream), slope(plain, x, upstream)) == (k == 0)


@pytest.mark.parametrize("unit", UNITS)
def test_surrogates_of_infinite_inputs_are_finite_and_spare_the_parameters(unit: Unit) -> None:
    layer, x = grouped(unit, 2), numbers(3, 4, 7, 6)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    with surrogate_gradients(layer, "straight"):
        out = layer(x.clone().requires_grad_())
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), layer.weight)[0], expected)
        x[:, 0, 3, 3] = inf
        layer.weight.data[0, 0] = 0.0
        assert slope(layer, x, torch.ones_like(out)).isfinite().all()
    assert "forward" not in layer.__dict__
