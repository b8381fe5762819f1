"""Surrogate gradients: the values of a truncated layer stay, the gradient to its input is another."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ell0.attacks.surrogate import Surrogate, surrogate_gradients
from ell0.nn import InputClamp, InputTruncation, TruncatedLinear


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(k: int = 3) -> TruncatedLinear:
    layer = TruncatedLinear(17, 5, k)
    with torch.no_grad():
        layer.weight.copy_(numbers(5, 17, seed=1))
    return layer


def elementwise(k: int = 3) -> InputTruncation:
    layer = InputTruncation((2, 3, 4), k)
    with torch.no_grad():
        layer.weight.copy_(numbers(2, 3, 4, seed=2))
    return layer


def slope(layer: nn.Module, x: Tensor, upstream: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(layer(leaf), leaf, upstream)[0]


@pytest.mark.parametrize("layer", [linear(), linear(0), elementwise(), elementwise(0)], ids=repr)
def test_the_values_are_those_of_the_layer_to_the_bit(layer: nn.Module) -> None:
    x = numbers(6, 17) if isinstance(layer, TruncatedLinear) else numbers(6, 2, 3, 4)
    expected = layer(x)
    with surrogate_gradients(layer, "straight"):
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x.clone().requires_grad_()), expected)


@pytest.mark.parametrize("shape", [(6, 17), (2, 3, 17), (17,)])
def test_straight_is_the_gradient_of_the_dense_layer(shape: tuple[int, ...]) -> None:
    layer, x, upstream = linear(), numbers(*shape), numbers(*shape[:-1], 5, seed=3)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.linear(leaf, layer.weight, layer.bias), leaf, upstream)
    with surrogate_gradients(layer, "straight"):
        torch.testing.assert_close(slope(layer, x, upstream), expected)
    assert not torch.allclose(slope(layer, x, upstream), expected)


def test_straight_through_a_mask_is_the_gradient_of_the_scaling() -> None:
    layer, x, upstream = elementwise(), numbers(6, 2, 3, 4), numbers(6, 2, 3, 4, seed=3)
    with surrogate_gradients(layer, "straight"):
        torch.testing.assert_close(slope(layer, x, upstream), upstream * layer.weight)


def test_a_clamp_lets_the_gradient_through_beyond_its_ends() -> None:
    layer, x, upstream = InputClamp(-0.5, 0.25), numbers(6, 17), numbers(6, 17, seed=3)
    assert ((x < -0.5) | (x > 0.25)).any()
    with surrogate_gradients(layer, "straight"):
        assert torch.equal(layer(x), x.clamp(-0.5, 0.25))
        assert torch.equal(slope(layer, x, upstream), upstream)
    assert not torch.equal(slope(layer, x, upstream), upstream)


def test_parameters_keep_their_gradients() -> None:
    layer, x = linear(), numbers(6, 17)
    expected = torch.autograd.grad(layer(x).square().sum(), [layer.weight, layer.bias])
    with surrogate_gradients(layer, "straight"):
        found = torch.autograd.grad(layer(x.clone().requires_grad_()).square().sum(), [layer.weight, layer.bias])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_every_layer_inside_a_model_is_found_and_given_back() -> None:
    shared = linear()
    model = nn.ModuleDict({"a": nn.Sequential(nn.Sequential(elementwise())), "b": shared, "c": shared})
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with surrogate_gradients(model, "straight"):
        changed = [name for name, module in model.named_modules() if module.__dict__.keys() != before[name].keys()]
        assert changed == ["a.0.0", "b"]
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_uses_may_be_nested_and_repeated() -> None:
    layer, x, upstream = linear(), numbers(6, 17), numbers(6, 5, seed=3)
    plain = slope(layer, x, upstream)
    for _ in range(2):
        with surrogate_gradients(layer, "straight"):
            straight = slope(layer, x, upstream)
            for inner in ("straight", None):
                with surrogate_gradients(layer, inner):
                    assert torch.equal(slope(layer, x, upstream), straight)
            assert torch.equal(slope(layer, x, upstream), straight)
        assert torch.equal(slope(layer, x, upstream), plain)
    assert not torch.equal(straight, plain)


@pytest.mark.parametrize("model", [nn.Linear(17, 5), torch.sin, lambda x: x, None])
@pytest.mark.parametrize("kind", [None, "straight"])
def test_other_models_are_left_alone(model: Any, kind: Surrogate | None) -> None:
    before = dict(getattr(model, "__dict__", {}))
    with surrogate_gradients(model, kind):
        assert dict(getattr(model, "__dict__", {})) == before


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogate must be \"straight\" or None, got 'hard'"):
        surrogate_gradients(linear(), "hard").__enter__()  # type: ignore[arg-type]
