"""Surrogate gradients: the values of a truncated layer stay, the gradient to its input is another."""

import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ell0 import L0Ball
from ell0.attacks import ATTACKS
from ell0.attacks.contract import Victim
from ell0.attacks.surrogate import surrogate_gradients
from ell0.nn import InputClamp, InputTruncation, TruncatedLinear


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(k: int = 3) -> TruncatedLinear:
    layer = TruncatedLinear(17, 5, k)
    layer.weight.data = numbers(5, 17, seed=1)
    return layer


def slope(layer: nn.Module, x: Tensor, upstream: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(layer(leaf), leaf, upstream)[0]


@pytest.mark.parametrize("layer", [linear(), linear(0), *(InputTruncation((2, 3, 4), k) for k in (3, 0))], ids=repr)
def test_the_values_are_those_of_the_layer_to_the_bit(layer: nn.Module) -> None:
    x = numbers(6, 17) if isinstance(layer, TruncatedLinear) else numbers(6, 2, 3, 4)
    expected = layer(x)
    with surrogate_gradients(layer):
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x.clone().requires_grad_()), expected)


@pytest.mark.parametrize("shape", [(6, 17), (2, 3, 17), (17,)])
def test_a_truncated_layer_has_the_gradient_of_the_dense_one(shape: tuple[int, ...]) -> None:
    layer, x, upstream = linear(), numbers(*shape), numbers(*shape[:-1], 5, seed=3)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.linear(leaf, layer.weight, layer.bias), leaf, upstream)
    with surrogate_gradients(layer):
        torch.testing.assert_close(slope(layer, x, upstream), expected)
    assert not torch.allclose(slope(layer, x, upstream), expected)


@pytest.mark.parametrize("layer", [InputTruncation((2, 3, 4), 3), InputClamp(-0.5, 0.25)], ids=repr)
def test_a_layer_without_weights_lets_the_gradient_through(layer: nn.Module) -> None:
    x, upstream = numbers(6, 2, 3, 4), numbers(6, 2, 3, 4, seed=3)
    expected = layer(x)
    with surrogate_gradients(layer):
        assert torch.equal(layer(x), expected)
        assert torch.equal(slope(layer, x, upstream), upstream)
    assert torch.equal(slope(layer, x, upstream) == 0, expected != x)


def test_parameters_keep_their_gradients() -> None:
    layer, x = linear(), numbers(6, 17)
    expected = torch.autograd.grad(layer(x).square().sum(), [layer.weight, layer.bias])
    with surrogate_gradients(layer):
        found = torch.autograd.grad(layer(x.clone().requires_grad_()).square().sum(), [layer.weight, layer.bias])
    torch.testing.assert_close(found, expected)


def test_every_layer_inside_a_model_is_found_and_given_back() -> None:
    shared = linear()
    model = nn.ModuleDict({"a": nn.Sequential(nn.Sequential(InputTruncation(6, 2))), "b": shared, "c": shared})
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with surrogate_gradients(model):
        changed = [name for name, module in model.named_modules() if module.__dict__.keys() != before[name].keys()]
        assert changed == ["a.0.0", "b"]
        inside = {name: dict(module.__dict__) for name, module in model.named_modules()}
        with surrogate_gradients(model):
            pass
        assert {name: dict(module.__dict__) for name, module in model.named_modules()} == inside
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("name", [name for name in ATTACKS if ATTACKS[name].white_box])
def test_attacks_by_gradients_use_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 30), TruncatedLinear(30, 20, 10), nn.ReLU(), nn.Linear(20, 3))
    x = numbers(40, 30).clamp(-1, 1)
    y = model(x).argmax(1)

    def points() -> Tensor:
        return ATTACKS[name](model, x, y, L0Ball(3, low=-9.0, high=9.0), **ATTACKS[name].cheap).x_best

    straight, slopes, asked = points(), Victim.slopes, list[bool]()

    def spied(*arguments: Any, **options: Any) -> Any:
        asked.append(options.get("straight", False))
        return slopes(*arguments, **options)

    monkeypatch.setattr(Victim, "slopes", spied)
    monkeypatch.setattr(importlib.import_module("ell0.attacks.contract"), "surrogate_gradients", nullcontext)
    assert not torch.equal(straight, points())
    assert all(asked)
