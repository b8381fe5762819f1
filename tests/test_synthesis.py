"""Analysis by Synthesis: answers by definition, alone and in any batch; its training, its gradient, its recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from balls import within_one
from ell0 import L0Ball, evaluate, models, recipe
from ell0.attacks import sparse_rs
from ell0.nn import ParallelLinear
from ell0.results import Results
from ell0.synthesis import AnalysisBySynthesis, ClassBounds
from ell0.train import TrainConfig, fit, load_checkpoint
from small_training import images
from tiny_recipe import edited, write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (3, 6, 6)
CONFIG = TrainConfig(epochs=12, batch=24, rates=(0.01,), optimizer="adam")


def synthesis(**given: Any) -> AnalysisBySynthesis:
    torch.manual_seed(0)
    few = {"in_shape": SHAPE, "classes": 3, "hidden": (12, 9), "latents": 2, "samples": 30, "steps": 4}
    return AnalysisBySynthesis(**{**few, **given}).eval()


def linear(**given: Any) -> AnalysisBySynthesis:
    """With decoders G_c(z) = z W_c + b_c, in float64."""
    model = synthesis(**given)
    model.decoder = nn.Sequential(ParallelLinear(3, 2, 108))
    return model.double()


def planted(model: AnalysisBySynthesis) -> tuple[Tensor, Tensor]:
    """Weight and bias of the decoders' first layer."""
    layer = next(iter(model.decoder))
    assert isinstance(layer, ParallelLinear)
    return layer.weight.detach(), layer.bias.detach()


def least_squares(model: AnalysisBySynthesis, x: Tensor) -> Tensor:
    """The true maximum of the bound of linear decoders, ``(n, classes)``."""
    found = []
    for weight, bias in zip(*planted(model), strict=True):
        rest = (x.flatten(1) + 1) / 2 - bias
        codes = torch.linalg.solve(weight @ weight.T + model.kl / 2 * torch.eye(2).double(), weight @ rest.T).T
        found.append(-(rest - codes @ weight).square().sum(1) - model.kl / 2 * codes.square().sum(1))
    return torch.stack(found, 1)


def by_definition(model: AnalysisBySynthesis, image: Tensor, label: int) -> float:
    """The bound of one class for one image: every code is tried, then torch's own Adam goes on from the best."""

    def loss(code: Tensor) -> Tensor:
        made = code
        for layer in model.decoder:
            if isinstance(layer, ParallelLinear):
                made = F.linear(made, layer.weight[label].T, layer.bias[label, 0])
            else:
                made = layer(made)
        return ((image.flatten() + 1) / 2 - made).square().sum() + model.kl * code.square().sum() / 2

    code = min(model.codes, key=lambda code: loss(code).item()).clone().requires_grad_()
    adam = torch.optim.Adam([code], lr=0.05)
    for _ in range(model.steps):
        adam.zero_grad()
        loss(code).backward()
        adam.step()
        code.data *= min(1.0, 5.0 / float(code.detach().norm()))
    return -loss(code).item()


def test_classes_together_are_each_class_alone_by_definition() -> None:
    x, model = images(4)[0].double(), synthesis(samples=12, kl=9.0, steps=2).double()
    x[0] *= 40  # drives codes to the end of their ball
    for parameter in model.decoder.parameters():
        parameter.data *= 4
    expected = [[by_definition(model, image, label) for label in range(3)] for image in x]
    torch.testing.assert_close(model(x), torch.tensor(expected, dtype=torch.float64))


def test_linear_decoders_come_near_least_squares_from_below() -> None:
    x, model = images(20)[0].double(), linear(samples=200, steps=0)
    true, gaps = least_squares(model, x), []
    for model.steps in (0, 10, 200):
        gaps.append(true - model(x))
        assert float(gaps[-1].min()) > -1e-9
    assert gaps[0].mean() > gaps[1].mean() > 1e3 * gaps[2].mean()
    assert float(gaps[2].max()) < 1e-3


def test_the_gradient_is_that_of_the_maximum() -> None:
    x, model = images(4)[0].double().requires_grad_(), linear(steps=300)
    weights = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    (found,) = torch.autograd.grad((model(x) * weights).sum(), x)
    (true,) = torch.autograd.grad((least_squares(model, x) * weights).sum(), x)
    torch.testing.assert_close(found, true, rtol=1e-3, atol=1e-3)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_answer_depends_on_its_row_alone() -> None:
    x, model = images(150)[0], synthesis()
    before = torch.get_rng_state()
    whole = model(x)
    assert torch.equal(whole, model(x))
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(torch.cat([model(part) for part in x.split(47)]), whole)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x[order]), whole[order])
    assert not whole.requires_grad
    with torch.no_grad():
        assert torch.equal(whole, model(x))
    fresh = synthesis()
    with torch.inference_mode():
        assert torch.equal(whole, fresh(x.clone()))


def test_codes_are_the_densest_of_normal_ones() -> None:
    codes = synthesis(latents=3, samples=9000).codes
    radii = codes.norm(dim=1)
    assert codes.shape == (9000, 3)
    assert torch.equal(codes, synthesis(latents=3, samples=9000).codes)
    assert float(radii.max()) == pytest.approx(2.5003, abs=0.05)  # 90 % of a normal code lie within
    assert float(codes.mean(0).abs().max()) < 0.05


def test_an_answer_follows_the_weights() -> None:
    x, model, other = images(8)[0], synthesis(), synthesis()
    before = model(x)
    for parameter in other.parameters():
        parameter.data *= 2
    planted(model)[0].mul_(2)
    assert not torch.equal(before, model(x))
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(x), other(x))
    # As a CUDA graph changes weights: torch does not learn of it.
    kept = model(x)
    next(model.decoder.parameters()).data.mul_(0.5)
    assert not torch.equal(kept, model.train().eval()(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(x), other(x))


def test_training_teaches_each_class_its_own_decoder(tmp_path: Path) -> None:
    x, y = images(120)
    model = synthesis(steps=10)
    training = fit(model, (x, y), CONFIG, objective=ClassBounds(), validation=images(60, seed=1), out=tmp_path)
    first, last = training.epochs[0], training.epochs[-1]
    assert last.loss < 0.7 * first.loss
    assert last.train_accuracy > 0.9
    assert (last.validation_accuracy or 0.0) > 0.9
    fresh = synthesis(steps=10)
    load_checkpoint(tmp_path).into(fresh)
    assert torch.equal(fresh(x), model.eval()(x))
    # The loss of a row changes the weights of its own class alone.
    model.zero_grad()
    ClassBounds()(model, x[y == 1], y[y == 1])[1].backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert [bool(part.any()) for part in parameter.grad] == [False, True, False]


def test_the_bounds_drawn_lie_below_the_maximum_in_the_mean() -> None:
    """With q = N(mean, variance), E log p(x | z) - KL(q | prior) <= log p(x); linear decoders have both exactly."""
    model, x = linear(kl=5.0), images(3)[0].double()
    list(model.encoder.parameters())[-2].data *= 20
    drawn = torch.stack([model.drawn_bounds(x) for _ in range(400)]).mean(0)
    weight, bias = planted(model)
    rest = (x.flatten(1) + 1) / 2 - bias
    mean, log_variance = model.encoder(((x.flatten(1) + 1) / 2).expand(3, -1, -1)).detach().chunk(2, 2)
    q = torch.distributions.Normal(mean, (log_variance / 2).exp())
    divergence = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(2)
    errors = (rest - mean @ weight).square().sum(2) + (q.variance * weight.square().sum(2).unsqueeze(1)).sum(2)
    torch.testing.assert_close(drawn, -(errors + model.kl * divergence).T, rtol=0.05, atol=0)
    covariance = weight.mT @ weight + model.kl / 2 * torch.eye(108).double()
    inverse = torch.linalg.inv(covariance)
    exact = -torch.einsum("cni,cij,cnj->nc", rest, inverse, rest) / 2 - torch.logdet(covariance) / 2
    constant = torch.tensor(model.kl / 2).log() * 108 / 2  # of the normal density, which the bound leaves out
    assert (drawn / model.kl < exact + constant).all()


def test_one_large_value_decides_unless_pixels_are_binary() -> None:
    x, y = images(60)
    grey, binary = synthesis(), synthesis(pixels="binary")
    fit(grey, (x, y), CONFIG, objective=ClassBounds())
    binary.load_state_dict(grey.state_dict())
    x[0, 0, 0, 0] = 0.0  # between black and white, and white
    bright = torch.where(x == 1, 100.0, x)
    assert torch.equal(binary(x), binary(bright))
    assert torch.equal(binary(x), binary(torch.where(x >= 0, 1.0, -1.0)))
    ball = L0Ball(1, low=-100.0, high=100.0)
    assert sparse_rs(grey, x, y, ball, queries=40).success.float().mean() > 0.9
    assert sparse_rs(binary, x, y, ball, queries=40).success.float().mean() < 0.5


def test_evaluate_attacks_grey_ones_by_gradients_and_says_why_not_binary_ones() -> None:
    x, y = images(12)
    report = evaluate(synthesis(), x, y, within_one(3, "pixel"), ["sigma_zero", "sparse_rs"])
    assert not any("gradient at all" in flag for flag in report.flags)
    with pytest.raises(ValueError, match="attacks must be black-box for a model that gives no gradient, got sigma_zer"):
        evaluate(synthesis(pixels="binary"), x, y, within_one(3, "pixel"), ["sigma_zero"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kl": 0.0}, "kl must be a positive number, got 0.0"),
        ({"pixels": "black"}, 'pixels must be "grey" or "binary", got \'black\''),
        ({"samples": 0}, "samples must be an int >= 1, got 0"),
        ({"hidden": (8, 0)}, "hidden must be an int >= 1, got 0"),
        ({"steps": -1}, "steps must be an int >= 0, got -1"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        synthesis(**given)


def test_wrong_shapes_and_models_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("x must have shape (n, 3, 6, 6), got")):
        synthesis()(torch.zeros(2, 3, 5, 5))
    x, y = images(4)
    with pytest.raises(ValueError, match="model must be an AnalysisBySynthesis, got Sequential"):
        ClassBounds().check(models.small_cnn(in_shape=SHAPE, classes=3), x, y)


def test_a_recipe_trains_it_on_its_own_objective(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    model = 'name = "abs"\nhidden = [8]\nlatents = 2\nsamples = 20\nsteps = 3'
    edited(path, 'name = "mlp"\nk = 0\nhidden = [8]', model)
    ran = recipe.run(path, out=tmp_path / "run", device="cpu")
    (one, _) = recipe.load(path).classifiers
    assert one.objective == ClassBounds()
    results = Results.load(ran / "results.json")
    assert results.find(what="clean_accuracy", classifier="F(0)").value > 0.8
    assert results.find(what="robust_accuracy", classifier="F(0)", budget=2, queries=8, attack="sparse_rs")
    network = recipe.model(load_checkpoint(ran / "f0"))
    assert isinstance(network, AnalysisBySynthesis)
    assert (network.samples, network.in_shape) == (20, (1, 4, 4))
    edited(path, "[classifier.training]\nepochs = 3", "[classifier.training]\ntrades = { budget = 1 }\nepochs = 3")
    with pytest.raises(ValueError, match="must have neither certified nor trades for a model with its own loss"):
        recipe.load(path)


def test_the_shipped_recipe_measures_all_on_the_same_rows() -> None:
    shipped = recipe.load("mnist-abs")
    rows = {(task.classifier.name, task.what == "clean_accuracy"): task.rows for task in shipped.tasks}
    for name in ("ABS", "F(10)", "F(0) for 10, seed 0"):
        assert (rows[name, True], rows[name, False]) == (1000, 100)
    grey, binary = (one.model for one in shipped.classifiers)
    assert binary == {**grey, "pixels": "binary"}
    assert (grey["samples"], grey["latents"], shipped.classifiers[0].objective) == (8000, 8, ClassBounds())


def test_parallel_layers_begin_as_linear_ones_do() -> None:
    torch.manual_seed(0)
    for parameter in ParallelLinear(3, 50, 40).parameters():
        assert 0.95 < parameter.detach().abs().max().item() * 50**0.5 <= 1
