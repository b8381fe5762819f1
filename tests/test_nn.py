"""The layers: what they compute, what they learn through, and that they stand in for their plain twins."""

import copy
import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from ell0.nn import InputClamp, InputScale, InputTruncation, TruncatedLinear, prepared

inf, nan = math.inf, math.nan
few = settings(max_examples=60, deadline=None)


def test_truncated_linear_starts_as_linear_and_leaves_the_generator_where_linear_does() -> None:
    for bias in (True, False):
        torch.manual_seed(3)
        plain, after = nn.Linear(7, 5, bias), torch.rand(3)
        torch.manual_seed(3)
        truncated, then = TruncatedLinear(7, 5, k=2, bias=bias), torch.rand(3)
        assert torch.equal(after, then)
        assert plain.state_dict().keys() == truncated.state_dict().keys()
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), truncated.parameters(), strict=True))
        truncated.load_state_dict(plain.state_dict())
        plain.load_state_dict(truncated.state_dict())


@few
@given(st.integers(0, 4), st.sampled_from([(9,), (3, 9), (2, 3, 9)]), st.booleans(), st.integers(0, 2**31))
def test_truncated_linear_is_the_sorted_middle_plus_bias(k: int, shape: tuple[int, ...], bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = TruncatedLinear(9, 4, k, bias, dtype=torch.float64)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    middle = (x.unsqueeze(-2) * layer.weight).sort(-1).values[..., k : 9 - k].sum(-1)
    torch.testing.assert_close(layer(x), middle + layer.bias if bias else middle)


def test_repr_shows_k() -> None:
    assert repr(TruncatedLinear(7, 5, k=2)) == "TruncatedLinear(in_features=7, out_features=5, bias=True, k=2)"
    assert repr(InputTruncation((1, 2, 4), k=3)) == "InputTruncation(features=(1, 2, 4), k=3)"
    assert not list(InputTruncation(5, 1).parameters())
    assert TruncatedLinear(7, 5, 2, device="meta", dtype=torch.float64).weight.device.type == "meta"


@pytest.mark.parametrize("k", [0, 391, 392, -1, True, 1.0, "1"])
def test_bounds_of_k(k: Any) -> None:
    for build, terms in (
        (lambda: TruncatedLinear(784, 2, k), "in_features"),
        (lambda: InputTruncation(784, k), "in_features"),
        (lambda: InputTruncation((3, 28, 28), k), "values of a channel"),
    ):
        if type(k) is int and 0 <= k < 392:
            build()
        else:
            with pytest.raises(ValueError, match=rf"k must (be an integer|satisfy 0 <= 2\*k < {terms}), got .*{k}"):
                build()


def stays(u: list[float], k: int) -> list[bool]:
    gone = set(sorted(range(len(u)), key=lambda i: -u[i])[:k])
    gone |= set(sorted((i for i in range(len(u)) if i not in gone), key=lambda i: u[i])[:k])
    return [i not in gone for i in range(len(u))]


numbers = st.sampled_from([-inf, -2.0, -1.0, 0.0, 0.5, 1.0, 2.0, inf, nan] + [1.0, 0.0] * 6)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([(9,), (1, 7), (2, 5), (2, 2, 2), (3, 3, 3), (2, 1, 4, 3)]),
    st.sampled_from([torch.float32, torch.float64]),
    st.data(),
)
def test_input_truncation_is_its_definition_in_float64(
    shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    length = math.prod(shape[1:]) if len(shape) > 1 else shape[0]
    channel = st.lists(numbers | st.floats(-3, 3, width=32), min_size=length, max_size=length)
    channels, k = data.draw(st.lists(channel, min_size=2, max_size=2)), data.draw(st.integers(0, (length - 1) // 2))
    channels *= math.prod(shape) // length  # two samples
    kept = [stays(values, k) for values in channels]
    spoilt = [k > 0 and any(map(math.isnan, values)) for values in channels]
    wanted = [
        [nan if bad else value if keep else 0.0 for value, keep in zip(values, keeps, strict=True)]
        for values, keeps, bad in zip(channels, kept, spoilt, strict=True)
    ]
    passed = torch.tensor(kept) & ~torch.tensor(spoilt).unsqueeze(1)
    x = torch.tensor(channels, dtype=dtype).view(2, *shape).requires_grad_()
    out = InputTruncation(shape, k)(x)
    assert torch.equal(
        out.double().nan_to_num(9e9), torch.tensor(wanted, dtype=torch.float64).view_as(out).nan_to_num(9e9)
    )
    (slope,) = torch.autograd.grad(out, x, torch.full_like(out, 2.5))
    assert torch.equal(slope.double(), 2.5 * (passed | (k == 0)).view_as(x))


def test_input_truncation_selects_what_autocast_would_round_together() -> None:
    x = 1 + torch.randperm(48, generator=torch.Generator().manual_seed(0)).view(1, 3, 16) * 2.0**-20
    with torch.autocast("cpu", torch.bfloat16):
        out = InputTruncation((3, 16), 2)(x)
    assert torch.equal(out, x.scatter(2, x.argsort(2)[..., [0, 1, -2, -1]], 0.0))


def test_changed_pixels_leave_no_outlying_value_behind() -> None:
    """8 pixels at the ends of the box; truncation of the image as one channel lets 24 - 20 and more through."""
    g = torch.Generator().manual_seed(0)
    images = 5 * torch.rand(50, 3, 32, 32, generator=g) - 2.4
    changed = images.clone().flatten(2)
    for image in changed:
        ends = torch.where(torch.rand(3, 8, generator=g) < 0.5, -258.98, 259.3)
        image[:, torch.randperm(1024, generator=g)[:8]] = ends
    changed = changed.view_as(images)
    low, high = (end.clamp(*ends) for end, ends in zip(images.aminmax(), ((None, 0), (0, None)), strict=True))
    out = InputTruncation((3, 32, 32), 10)(changed)
    assert ((out >= low) & (out <= high)).all()
    across = InputTruncation(3072, 10)(changed.flatten(1))
    assert 4 <= (across.abs() > 200).sum(1).float().mean() < 6


@pytest.mark.parametrize("shape", [(2, 3), (2, 6), (2, 3, 2), (1, 2, 2, 3), (2, 4), ()])
def test_wrong_shapes_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"x must have shape \\(n, 2, 3\\), got \\({str(shape)[1:-1]}\\)"):
        InputTruncation((2, 3), 1)(torch.zeros(shape))


@pytest.mark.parametrize("features", [0, (), (3, -1), (2.0, 3), (True, 5), 3.0, None])
def test_features_must_be_positive_ints(features: Any) -> None:
    with pytest.raises(ValueError, match="features must be a shape of positive ints, such as"):
        InputTruncation(features, 0)


@pytest.mark.parametrize("layer", [TruncatedLinear(6, 4, 2), InputTruncation(6, 2), InputScale(range(6), range(1, 7))])
def test_layers_can_be_traced_and_exported(layer: nn.Module) -> None:
    x = torch.randn(3, 6)
    assert torch.equal(fx.symbolic_trace(layer)(x), layer(x))
    batch = torch.export.Dim("batch")
    program = torch.export.export(layer, (torch.randn(2, 6),), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(program.module()(x), layer(x))


def test_prepared_weights_serve_every_call_inside() -> None:
    model = nn.Sequential(
        TruncatedLinear(40, 6, k=3), nn.ReLU(), TruncatedLinear(6, 4, k=1), TruncatedLinear(4, 2, k=0)
    )
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(x)
        with prepared(model):
            layers = [layer for layer in model if isinstance(layer, TruncatedLinear)]
            assert [layer._prepared is not None for layer in layers] == [True, True, False]
            torch.testing.assert_close(model(x), expected)
            copied = copy.deepcopy(model)
            torch.testing.assert_close(copied(x), expected)
            layers[0].weight.mul_(2)
            with pytest.raises(ValueError, match="prepared must come from this weight as it is now"):
                model(x)
        model(x)


def test_input_clamp_clips_to_its_box_and_lets_nan_pass() -> None:
    x = torch.tensor([[-inf, -2.0, -1.0, 0.25, 1.0, 100.0, inf, nan]])
    want = torch.tensor([[-1.0, -1.0, -1.0, 0.25, 1.0, 1.0, 1.0, nan]])
    torch.testing.assert_close(InputClamp()(x), want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(InputClamp(0, 0.5)(x)[0, :4], torch.tensor([0.0, 0.0, 0.0, 0.25]), rtol=0, atol=0)
    assert "low=-1.0, high=1.0" in repr(InputClamp())
    for low, high in ((1.0, 0.0), (nan, 1.0)):
        with pytest.raises(ValueError, match="low must be at most high, got"):
            InputClamp(low, high)


@given(
    st.floats(-10, 10, width=32), st.floats(2**-10, 10, width=32), st.lists(st.floats(-20, 20, width=32), min_size=1)
)
def test_input_scale_maps_its_ends_to_0_and_1_and_keeps_the_order(low: float, span: float, row: list[float]) -> None:
    scale, x = InputScale(low, low + span), torch.tensor([sorted(row)], dtype=torch.float64)
    torch.testing.assert_close(scale(x), (x - low) / span, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(scale(x.new_tensor([low, low + span])), x.new_tensor([0.0, 1.0]))
    # Of float32 as well, whose roundings may let neighbours fall together but not change places.
    assert (scale(x.float()).diff() >= 0).all()
    assert scale(x.float()).dtype == torch.float32


@given(st.data())
def test_input_scale_normalises_channel_by_channel(data: st.DataObject) -> None:
    channels = data.draw(st.integers(1, 4))
    mean, deviation = (
        data.draw(st.lists(st.floats(low, 1, width=32), min_size=channels, max_size=channels)) for low in (-1, 0.125)
    )
    scale = InputScale.normalising(mean, deviation)
    x = torch.linspace(-100, 100, 2 * channels * 6, dtype=torch.float64).view(2, channels, 3, 2)
    columns = [torch.tensor(numbers, dtype=torch.float64).view(-1, 1, 1) for numbers in (mean, deviation)]
    for points in (x, x.float()):
        torch.testing.assert_close(scale(points), ((points + 1) / 2 - columns[0]).div(columns[1]).to(points.dtype))
        torch.testing.assert_close(scale.inverse(scale(points)), points, rtol=1e-5, atol=1e-5)
        assert (scale(points.sort(0).values).diff(dim=0) >= 0).all()
    assert not scale.state_dict()
    if channels > 1:
        with pytest.raises(
            ValueError, match=rf"x must have {channels} channels, as low has numbers, got shape \(2, 9\)"
        ):
            scale(torch.zeros(2, 9))
    else:
        assert scale(x.flatten(1)).shape == (2, 6)


def test_input_scale_shows_its_ends_and_refuses_wrong_ones() -> None:
    assert "low=-1.0, high=-0.8" in repr(InputScale(-1.0, -0.8))
    numbers: list[tuple[Any, Any]] = [(1.0, 0.0), (0.5, 0.5), (nan, 1.0), (0.0, nan), (0.0, inf), (-inf, 0.0)]
    for low, high in (*numbers, (-1e308, 1e308), ((0.0, 1.0), (1.0, 1.0)), ((0.0, 1.0), 2.0), ((), ())):
        message = f"low must be below high, by a float32 number, got low={low!r} and high={high!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            InputScale(low, high)


def test_threads_share_what_is_prepared() -> None:
    """Whichever leaves first, the last one takes it away; gradients work beside a thread in inference mode."""
    layer, x = TruncatedLinear(30, 8, k=3), torch.randn(4, 30)
    first, second = prepared(layer), prepared(layer)
    with torch.inference_mode():
        first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert vars(layer)["_prepared"] is not None
    layer(x).sum().backward()
    second.__exit__(None, None, None)
    assert layer._prepared is None
    with torch.no_grad():
        layer.weight += 1.0
    layer(x)

    def work(_: int) -> None:
        for _ in range(20):
            with prepared(layer):
                layer(x)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert (layer._prepared, layer._users) == (None, 0)
