"""The clipped product and its layer: the definition, its gradients, infinite numbers, and Linear's place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from ell0.nn import ClippedLinear
from ell0.ops import blocked, clipped_linear, reference

inf, nan = math.inf, math.nan
few = settings(max_examples=settings().max_examples // 3)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@few
@given(st.integers(0, 2**31), st.sampled_from([(9,), (3, 9), (2, 3, 9)]), st.floats(0.05, 4), st.booleans())
def test_it_is_the_definition_with_its_gradients(seed: int, shape: tuple[int, ...], clip: float, bias: bool) -> None:
    x, weight = draw(seed, *shape).requires_grad_(), draw(seed + 1, 4, 9).requires_grad_()
    offset = draw(seed + 2, 4).requires_grad_() if bias else None
    inputs = [tensor for tensor in (x, weight, offset) if tensor is not None]
    out = clipped_linear(x, weight, offset, clip=clip)
    plain = (x.unsqueeze(-2) * weight).clamp(-clip, clip).sum(-1)
    plain = plain if offset is None else plain + offset
    upstream = draw(seed + 3, *out.shape)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(out.detach(), reference.clipped_linear(x, weight, offset, clip=clip).detach())
    for one, other in zip(*(torch.autograd.grad(o, inputs, upstream) for o in (out, plain)), strict=True):
        torch.testing.assert_close(one, other)


def test_it_goes_through_its_products_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(0, 11, 9).requires_grad_(), draw(1, 7, 9).requires_grad_()
    whole = clipped_linear(x, weight, clip=0.5)
    grads = torch.autograd.grad(whole.square().sum(), (x, weight))
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 40)
    out = clipped_linear(x, weight, clip=0.5)
    torch.testing.assert_close(out, whole)
    for one, other in zip(torch.autograd.grad(out.square().sum(), (x, weight)), grads, strict=True):
        torch.testing.assert_close(one, other)


def test_infinite_numbers_clip_and_nan_spoils_its_row() -> None:
    x = torch.tensor([[inf, 1.0, -inf], [1.0, nan, 0.0], [1.0, 1.0, 1.0]], requires_grad=True)
    weight = torch.tensor([[0.0, 2.0, 1.0], [-1.0, 0.25, 0.0]], requires_grad=True)
    out = clipped_linear(x, weight, clip=0.5)
    torch.testing.assert_close(out[0], torch.tensor([0.0, -0.25]))
    assert out[1].isnan().all()
    torch.testing.assert_close(out[2], torch.tensor([1.0, -0.25]))
    (grad,) = torch.autograd.grad(clipped_linear(x[:1], weight, clip=0.5).sum(), weight)
    torch.testing.assert_close(grad, torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))


def test_a_changed_input_moves_an_output_by_at_most_twice_the_clip() -> None:
    layer = ClippedLinear(9, 5, 0.3)
    x = torch.randn(4, 9)
    moved = x.clone()
    moved[:, 3] = torch.tensor([1e30, -1e30, inf, -inf])
    assert (layer(moved) - layer(x)).abs().max() <= 0.6 + 1e-6


def test_it_starts_as_linear() -> None:
    for bias in (True, False):
        torch.manual_seed(3)
        plain = nn.Linear(7, 5, bias)
        torch.manual_seed(3)
        clipped = ClippedLinear(7, 5, 1e6, bias)
        x = torch.randn(3, 7)
        clipped.load_state_dict(plain.state_dict())
        torch.testing.assert_close(clipped(x), plain(x))
    assert repr(clipped) == "ClippedLinear(in_features=7, out_features=5, bias=False, clip=1000000.0)"
    assert ClippedLinear(7, 5, 1.0, device="meta", dtype=torch.float64).weight.dtype == torch.float64


def test_tracing_records_one_call() -> None:
    graph = fx.symbolic_trace(nn.Sequential(ClippedLinear(4, 2, 1.0))).graph
    leaf = [node for node in graph.nodes if node.op == "call_module"]
    assert len(leaf) == 0
    assert [node.target.__name__ for node in graph.nodes if node.op == "call_function"] == ["clipped_linear"]


@pytest.mark.parametrize("clip", [0, -1.0, inf, nan, True, "1", None])
def test_bad_clips(clip: Any) -> None:
    x, weight = torch.ones(1, 4), torch.ones(2, 4)
    for call in (lambda: ClippedLinear(4, 2, clip), lambda: clipped_linear(x, weight, clip=clip)):
        with pytest.raises(ValueError, match=f"clip must be a finite number > 0, got {clip!r}"):
            call()


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 4\)"):
        clipped_linear(torch.ones(1, 3), torch.ones(2, 4), clip=1.0)
    with pytest.raises(ValueError, match="bias must have shape"):
        clipped_linear(torch.ones(1, 4), torch.ones(2, 4), torch.ones(3), clip=1.0)
