"""Batch norms merged into the layers before them: the same function, and nothing else touched."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ell0.nn import InputScale, InputTruncation, TruncatedLinear, folded
from ell0.nn.residual import ResidualBlock


def norm(channels: int, kind: type[nn.BatchNorm1d | nn.BatchNorm2d] = nn.BatchNorm2d) -> nn.Module:
    """With statistics and weights of both signs."""
    layer = kind(channels)
    for tensor in (layer.running_mean, layer.weight.data, layer.bias.data):
        assert tensor is not None
        tensor.normal_()
    assert layer.running_var is not None
    layer.running_var.uniform_(0.2, 3)
    return layer


@given(st.integers(0, 99), st.booleans(), st.booleans(), st.sampled_from([1, 2]), st.booleans())
def test_the_function_stays(seed: int, relu: bool, bias: bool, groups: int, inner: bool) -> None:
    torch.manual_seed(seed)
    block = [nn.Conv2d(4, 6, 3, 2, 1, 1, groups, bias), norm(6), *([nn.ReLU()] if relu else [])]
    tail = [nn.MaxPool2d(2), nn.Conv2d(6, 4, 1), norm(4), nn.ReLU(), nn.Flatten()]
    tail += [nn.Sequential(nn.Linear(16, 5, bias), norm(5, nn.BatchNorm1d), nn.ReLU(), nn.Linear(5, 3))]
    parts = [nn.Sequential(*block), *tail] if inner else [*block, *tail]
    model = nn.Sequential(InputScale(range(4), range(1, 5)), InputTruncation((4, 8, 8), 2), *parts).eval()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(3, 4, 8, 8, requires_grad=True)
    short = folded(model)
    assert not any(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in short.modules())
    want, got = model(x), short(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    slopes = [torch.autograd.grad(out.sum(), x)[0] for out in (got, want)]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_residual_blocks_are_folded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ResidualBlock(3, 6, 2), ResidualBlock(6, 6)).eval()
    for layer in [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]:
        layer.load_state_dict(norm(layer.num_features).state_dict())
    x, short = torch.randn(2, 3, 8, 8), folded(model)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in short.modules())
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()) == 5
    torch.testing.assert_close(short(x), model(x), rtol=1e-4, atol=1e-4)
    assert folded(model.train()) is model


def test_a_linear_layer_may_see_more_than_rows() -> None:
    model = nn.Sequential(nn.Linear(4, 3), norm(3, nn.BatchNorm1d)).eval()
    for x in (torch.randn(7, 4), torch.randn(7, 3, 4)):
        torch.testing.assert_close(folded(model)(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_layer_may_be_used_twice() -> None:
    torch.manual_seed(0)
    relu, pool, block = nn.ReLU(), nn.MaxPool2d(2), nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), norm(3))
    model = nn.Sequential(block, relu, pool, block, relu, pool, nn.Conv2d(3, 2, 1), norm(2), relu, nn.Flatten()).eval()
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(folded(model)(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_mode_of_no_layer_changes() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Conv2d(1, 1, 1), norm(1)).eval()
    model[0].train()
    modes = [layer.training for layer in model.modules()]
    assert len(list(folded(model).children())) == 2
    assert [layer.training for layer in model.modules()] == modes


def other_forward() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), norm(1)).eval()
    model[1].forward = lambda x: 2 * x
    return model


def norm_in_training() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), norm(1)).eval()
    model[1].train()
    return model


def hooked() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), norm(1)).eval()
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    "model",
    [
        nn.Conv2d(1, 1, 1),
        nn.Sequential(nn.Conv2d(1, 1, 1), norm(1)),
        nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), norm(1)).eval(),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), norm(1)).eval(),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1, track_running_stats=False)).eval(),
        nn.Sequential(nn.Linear(4, 3), norm(6, nn.BatchNorm1d)).eval(),
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False)).eval(),
        nn.Sequential(TruncatedLinear(4, 3, 1), norm(3, nn.BatchNorm1d)).eval(),
        norm_in_training(),
        hooked(),
        other_forward(),
    ],
)
def test_what_cannot_be_merged_comes_back_itself(model: nn.Module) -> None:
    assert folded(model) is model
