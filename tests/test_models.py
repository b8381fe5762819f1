"""The paper's networks: their layers, their inputs, and what k changes in them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from ell0 import models
from ell0.nn import InputTruncation, TruncatedLinear
from ell0.nn.residual import GhostBatchNorm

small_mlp: dict[str, Any] = {"in_features": 16, "hidden": (12, 6), "classes": 4}
BUILDERS: list[Callable[[int], nn.Module]] = [
    lambda k: models.mlp(k, **small_mlp),
    lambda k: models.small_cnn(k, in_shape=(1, 4, 4), classes=4),
]


def seeded(build: Callable[[int], nn.Module], k: int) -> nn.Module:
    torch.manual_seed(5)
    return build(k)


def test_mlp_is_the_table_of_the_paper() -> None:
    model = models.mlp()
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    assert [m.in_features for m in linear] == [784, 1568, 3136, 500, 100]
    assert [m.out_features for m in linear] == [1568, 3136, 500, 100, 10]
    assert [getattr(m, "k", None) for m in linear] == [10, None, None, None, None]
    assert [type(layer) for layer in list(model)[2:]] == [nn.ReLU, nn.Linear] * 4
    images = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        assert torch.equal(model(images), model(images.flatten(1)))


def test_vgg19_is_vgg19() -> None:
    model = models.vgg19()
    truncation, features, _, head = model
    assert isinstance(truncation, InputTruncation)
    assert (truncation.features, truncation.k) == ((3, 32, 32), 10)
    assert isinstance(features, nn.Sequential)
    layout = [str(m.out_channels) if isinstance(m, nn.Conv2d) else type(m).__name__[0] for m in features]
    block = "64BR64BRM 128BR128BRM 256BR256BR256BR256BRM 512BR512BR512BR512BRM 512BR512BR512BR512BRM"
    assert "".join(layout) == block.replace(" ", "")
    assert isinstance(head, nn.Sequential)
    assert [type(layer) for layer in head] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    # Sixteen convolutions without bias, their batch norms, and the head; the truncation has no parameters.
    assert sum(p.numel() for p in model.parameters()) == 20_018_880 + 11_008 + 512 * 513 + 2 * 512 + 5_130
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())
    with torch.no_grad():
        assert model.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_the_networks_of_the_rivals() -> None:
    nine, eighteen = models.resnet9(), models.resnet18()
    sizes = [layer.out_channels for layer in nine.modules() if isinstance(layer, nn.Conv2d)]
    assert sizes == [64, 128, 128, 128, 256, 512, 512, 512]
    assert sum(p.numel() for p in nine.parameters()) == 6_573_120
    assert sum(p.numel() for p in eighteen.parameters()) == 11_173_962
    assert sum(isinstance(layer, nn.Conv2d) for layer in eighteen.modules()) == 20  # three of them in skips
    for model, shape in (
        (nine, (3, 32, 32)),
        (models.resnet9(in_shape=(1, 28, 28)), (1, 28, 28)),
        (eighteen, (3, 9, 9)),
    ):
        with torch.no_grad():
            assert model.eval()(torch.randn(2, *shape)).shape == (2, 10)
    with pytest.raises(ValueError, match="at least 8, for three poolings"):
        models.resnet9(in_shape=(3, 7, 32))


def test_ghost_batch_norm_norms_groups_of_rows() -> None:
    torch.manual_seed(0)
    ghost, plain, x = GhostBatchNorm(3, rows=4), nn.BatchNorm2d(3), torch.randn(12, 3, 2, 2)
    groups = [x[start::3] for start in range(3)]
    torch.testing.assert_close(ghost(x), torch.stack([plain(group) for group in groups], 1).flatten(0, 1))
    assert ghost.running_var is not None
    each = []
    for group in groups:
        alone = nn.BatchNorm2d(3)
        alone(group)
        each.append(alone.running_var)
    torch.testing.assert_close(ghost.running_var, torch.stack(each).mean(0))  # type: ignore[arg-type]
    alone = nn.BatchNorm2d(3)
    torch.testing.assert_close(GhostBatchNorm(3, rows=5)(x), alone(x))
    ghost.eval()
    torch.testing.assert_close(ghost(x[:4]), ghost(x)[:4])


@pytest.mark.parametrize("build", [models.vgg19, models.small_cnn])
@pytest.mark.parametrize("shape", [(3, 32), (3, 32, 32, 1), (3.0, 32, 32), 32])
def test_shapes_are_of_images(build: Callable[..., nn.Module], shape: Any) -> None:
    with pytest.raises(ValueError, match="in_shape must be "):
        build(0, in_shape=shape)
    with torch.device("meta"):
        assert models.vgg19(0, in_shape=(1, 64, 32))(torch.empty(2, 1, 64, 32)).shape == (2, 10)
        with pytest.raises(ValueError, match=r"height and width of at least 32, .* got \(1, 28, 28\)"):
            models.vgg19(0, in_shape=(1, 28, 28))


@pytest.mark.parametrize("build", [*BUILDERS, lambda k: models.vgg19(k, classes=3)])
def test_k_changes_no_weights(build: Callable[[int], nn.Module]) -> None:
    model = seeded(build, 0)
    plain, truncated = model.state_dict(), seeded(build, 3).state_dict()
    assert not any(isinstance(m, TruncatedLinear | InputTruncation) for m in model.modules())
    assert truncated.keys() == plain.keys()
    assert all(torch.equal(plain[key], truncated[key]) for key in plain)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 5, 3), (2, 1, 1)])
def test_small_cnn_takes_any_shape(shape: tuple[int, int, int]) -> None:
    for k in (0, (math.prod(shape[1:]) - 1) // 2):
        assert models.small_cnn(k, in_shape=shape, classes=4)(torch.randn(2, *shape)).shape == (2, 4)


def test_cnn_halves_in_each_stage() -> None:
    model = models.cnn(in_shape=(2, 9, 8), widths=(3, 4, 5), depth=2, hidden=(7,), classes=6)
    assert model(torch.randn(2, 2, 9, 8)).shape == (2, 6)
    sizes = [tuple(layer.weight.shape) for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert sizes == [(3, 2, 4, 4), (3, 3, 3, 3), (4, 3, 4, 4), (4, 4, 3, 3), (5, 4, 4, 4), (5, 5, 3, 3), (7, 5), (6, 7)]
    with pytest.raises(ValueError, match=r"height and width of at least 16, for 4 widths, got \(2, 9, 8\)"):
        models.cnn(in_shape=(2, 9, 8), widths=(1, 1, 1, 1))


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("k", [-1, 8, 0.5, False, 0.0])
def test_k_must_fit(build: Callable[[Any], nn.Module], k: Any) -> None:
    with pytest.raises(ValueError, match="k must"):
        build(k)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("k", [0, 3])
def test_models_learn_and_can_be_traced_and_exported(build: Callable[[int], nn.Module], k: int) -> None:
    model, x = build(k), torch.randn(3, 1, 4, 4)
    out = model(x)
    assert out.shape == (3, 4)
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(out.square().sum(), tuple(model.parameters())))
    torch.testing.assert_close(fx.symbolic_trace(model)(x), out)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(x[:2]), out[:2])
