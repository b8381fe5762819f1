"""Networks of parts: what an answer depends on, how they begin, and what a GPU asks of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from certify_cases import few
from ell0.nn.residual import SMALL, SmallConvolution, convolution
from ell0.part_networks import Members, PartCNN, PartMLP, PartTransformer, Pool, SelfAttention
from watching import Watch

PLACES = 6
IMAGES: list[Callable[..., nn.Module]] = [
    lambda shape: PartMLP(shape, PLACES, classes=4, width=24, depth=2),
    lambda shape: PartCNN(shape, PLACES, classes=4, widths=(8,), blocks=2),
    lambda shape: PartCNN(shape, PLACES, classes=4, widths=(4, 8), blocks=1, pool="learned"),
    lambda shape: PartTransformer(shape, PLACES, classes=4, width=16, depth=2, heads=2),
]
ROWS = [IMAGES[0], IMAGES[3]]
KINDS = [(make, shape) for make in IMAGES for shape in ((3, 4, 2), (1, 7, 7))] + [(make, (5,)) for make in ROWS]
each = pytest.mark.parametrize(("make", "shape"), KINDS)


def drawn(make: Callable[..., nn.Module], shape: tuple[int, ...], m: int = 12) -> tuple[nn.Module, Tensor, Tensor]:
    """A network some steps away from its beginning, at which blocks do nothing, and parts."""
    torch.manual_seed(0)
    network = make(shape)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    parts, place = torch.randn(m, *shape), torch.arange(m) % PLACES
    network(parts, place)  # statistics of batch norms
    return network, parts, place


@each
@few
@given(st.lists(st.booleans(), min_size=12, max_size=12), st.sampled_from([math.nan, math.inf, 1e30]))
def test_an_answer_depends_on_its_part_alone(make: Any, shape: Any, touched: list[bool], value: float) -> None:
    network, parts, place = drawn(make, shape)
    network.eval()
    mask = torch.tensor(touched)
    with torch.no_grad():
        clean = network(parts, place)
        others = torch.where(mask.view(-1, *[1] * len(shape)), value, parts)
        assert torch.equal(network(others, place)[~mask], clean[~mask])
        for row in (0, 7):
            torch.testing.assert_close(network(parts[row : row + 1], place[row : row + 1])[0], clean[row])
        order = torch.randperm(12)
        torch.testing.assert_close(network(parts[order], place[order]), clean[order])


@each
def test_place_and_every_number_of_a_part_count(make: Any, shape: Any) -> None:
    network, parts, place = drawn(make, shape, m=2)
    network.eval()
    parts[1], place[:] = parts[0], torch.tensor([0, 3])
    answers = network(parts, place)
    assert (answers[0] - answers[1]).abs().max() > 1e-3
    (slope,) = torch.autograd.grad(network(parts.requires_grad_(), place)[:, 0].sum(), parts)
    assert (slope != 0).all()
    if len(shape) == 3 and shape[2] > 2:  # pixels are told apart by where they lie
        assert not torch.allclose(network(parts.flip(3), place), answers, atol=1e-4)


@each
def test_networks_begin_unsure_and_learn(make: Any, shape: Any) -> None:
    """In bf16, from the logarithm of the classes, with finite gradients to every weight after a step."""
    torch.manual_seed(0)
    network, parts = make(shape), torch.rand(96, *shape) * 2 - 1
    y, place = (parts.flatten(1).mean(1) > 0).long(), torch.arange(96) % PLACES
    optimizer, losses = torch.optim.AdamW(network.parameters(), 0.01), list[float]()
    types: list[torch.dtype] = []
    network.get_submodule("head").register_forward_pre_hook(lambda _, inputs: types.append(inputs[0].dtype))
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = network(parts, place)
        assert logits.dtype == torch.bfloat16
        loss = F.cross_entropy(logits.float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) > 2:
            for name, parameter in network.named_parameters():
                assert parameter.grad is not None
                assert parameter.grad.isfinite().all()
                assert parameter.grad.abs().sum() > 0, name
    assert abs(losses[0] - math.log(4)) < 0.15
    assert losses[-1] < 0.6
    assert set(types) == {torch.bfloat16}  # what lies between blocks would take twice the time in float32


def test_learned_weights_of_positions_begin_at_the_mean() -> None:
    parts, place, found = torch.randn(6, 3, 5, 4), torch.arange(6), list[Tensor]()
    for pool in get_args(Pool):
        torch.manual_seed(0)
        found.append(PartCNN((3, 5, 4), 6, widths=(4, 8), blocks=1, pool=pool)(parts, place))
    assert torch.equal(*found)


def test_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    layer, x = SelfAttention(12, 3, 0.0).double(), torch.randn(5, 7, 12, dtype=torch.float64)
    nn.init.normal_(layer.out.weight)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    into, out = layer.into.state_dict(prefix="in_proj_"), layer.out.state_dict(prefix="out_proj.")
    theirs.load_state_dict(into | out)
    normed = F.layer_norm(x, (12,))
    torch.testing.assert_close(layer(x), theirs(normed, normed, normed)[0])


@each
def test_a_step_asks_the_host_for_nothing(make: Any, shape: Any) -> None:
    network, parts, place = drawn(make, shape)
    with Watch() as watch, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        network(parts, place).float().sum().backward()
    assert not watch.seen


@pytest.mark.parametrize(
    "make",
    [
        lambda: PartMLP((3, 8, 8), PLACES, width=512, depth=16),
        lambda: PartCNN((3, 8, 8), PLACES, widths=(64,), blocks=8),
        lambda: PartCNN((3, 8, 8), PLACES, widths=(16, 32, 64), blocks=3),
        lambda: PartTransformer((3, 8, 8), PLACES, width=64, depth=12),
    ],
)
def test_signals_neither_vanish_nor_grow(make: Callable[[], nn.Module]) -> None:
    """Deep and wide at the beginning: hidden numbers of the size of 1."""
    torch.manual_seed(0)
    network, sizes = make(), list[float]()
    network.get_submodule("head").register_forward_pre_hook(
        lambda _, inputs: sizes.append(inputs[0].square().mean().sqrt().item())
    )
    network(torch.rand(12, 3, 8, 8) * 2 - 1, torch.arange(12) % PLACES)
    assert 0.1 < sizes[0] < 2


@few
@given(st.integers(1, 4), st.integers(1, 9))
def test_members_learn_apart_and_answer_together(members: int, m: int) -> None:
    networks, place = [drawn(IMAGES[0], (3, 4, 2))[0] for _ in range(members)], torch.arange(m) % PLACES
    for number, network in enumerate(networks):
        torch.nn.init.constant_(network.get_parameter("head.1.bias"), float(number))
    together, parts = Members(networks).eval(), torch.randn(m, 3, 4, 2)
    assert together.passes == members
    answers = torch.stack([network(parts, place) for network in networks])
    torch.testing.assert_close(together(parts, place), answers.mean(0))
    for network in networks:
        network.apply(lambda module: setattr(module, "p", 0.0) if isinstance(module, nn.Dropout) else None)
    shares = torch.arange(m).tensor_split(members)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    said = together.train()(parts, place)
    for number, share in enumerate(share for share in shares if len(share)):
        torch.testing.assert_close(said[share], networks[number](parts[share], place[share]))
        for other, network in enumerate(networks):
            slopes = torch.autograd.grad(
                said[share].sum(), list(network.parameters()), retain_graph=True, allow_unused=True
            )
            assert any(slope is not None and bool(slope.any()) for slope in slopes) == (other == number)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Members([]), "networks must be at least one, got none"),
        (lambda: PartMLP((3, 0, 2), 4), r"shape must be a shape of positive ints, .* got \(3, 0, 2\)"),
        (lambda: PartMLP((3,), 0), "places must be an int >= 1, got 0"),
        (lambda: PartMLP((3,), 4, depth=0), "depth must be an int >= 1, got 0"),
        (lambda: PartMLP((3,), 4, classes=1), "classes must be an int >= 2, got 1"),
        (lambda: PartCNN((3,), 4), r"shape must be \(channels, height, width\), got \(3,\)"),
        (lambda: PartCNN((3, 2, 2), 4, pool="max"), 'pool must be "mean" or "learned", got'),  # type: ignore[arg-type]
        (lambda: PartCNN((3, 2, 2), 4, widths=()), r"widths must be at least one, got \(\)"),
        (
            lambda: PartTransformer((3, 2, 2), 4, width=10, heads=4),
            "width must be a multiple of heads, got width=10 wi",
        ),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


@few
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(lambda picture: picture[0] * picture[1] <= SMALL),
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_a_convolution_of_a_small_picture_is_a_dense_product(
    picture: tuple[int, int], stride: int, before: int, after: int, last: bool
) -> None:
    torch.manual_seed(0)
    layer = convolution(before, after, stride, picture=picture).double()
    assert type(layer) is SmallConvolution
    x = torch.randn(5, before, *picture, dtype=torch.float64, requires_grad=True)
    laid_out = x.contiguous(memory_format=torch.channels_last) if last else x
    expected = F.conv2d(x, layer.weight, stride=stride, padding=1)
    found = layer(laid_out)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    slopes = [torch.autograd.grad((out * weights).sum(), (x, layer.weight)) for out in (found, expected)]
    torch.testing.assert_close(*slopes)


def test_a_larger_picture_is_convolved() -> None:
    assert type(convolution(1, 1, picture=(5, 2))) is type(convolution(1, 1)) is nn.Conv2d
    assert type(convolution(1, 1, 1, 1, picture=(2, 2))) is nn.Conv2d
    for shape, small in (((3, 4, 2), 5), ((3, 6, 5), 1), ((3, 8, 8), 0)):
        network = PartCNN(shape, PLACES, widths=(4, 4), blocks=1)
        assert sum(type(layer) is SmallConvolution for layer in network.modules()) == small, shape
