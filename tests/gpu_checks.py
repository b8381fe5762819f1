"""Checks of the Triton kernels that need neither pytest nor, in Triton's interpreter, a GPU.

``python tests/gpu_checks.py [NAME ...]`` runs them all, or some, on the GPU; with TRITON_INTERPRET=1 on the CPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import product
from typing import get_args
from unittest import mock

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ell0 import ATTACKS, L0Ball, certify, models, ops
from ell0.nn import TruncatedConv2d, TruncatedLinear
from ell0.ops import conv, gpu, gpu_conv, reference
from ell0.ops.reference import Geometry

INTERPRETED = gpu._interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"
INF, NAN = float("inf"), float("nan")

Inputs = tuple[Tensor, Tensor, Tensor]


def ordinary(n: int, rows: int, d: int, g: Generator) -> Inputs:
    return torch.randn(n, d, generator=g), torch.randn(rows, d, generator=g), torch.randn(rows, generator=g)


def images(n: int, rows: int, d: int, g: Generator) -> Inputs:
    x, weight, bias = ordinary(n, rows, d, g)
    return torch.where(torch.rand(n, d, generator=g) < 0.8, -1.0, x.clamp(-1, 1)), weight, bias


def zeros(n: int, rows: int, d: int, g: Generator) -> Inputs:
    x, weight, bias = ordinary(n, rows, d, g)
    return torch.where(torch.rand(n, d, generator=g) < 0.8, 0.0, x), weight, bias


def integers(n: int, rows: int, d: int, g: Generator) -> Inputs:
    """Hundreds of ties."""
    x, weight = (torch.randint(-2, 3, (r, d), generator=g).float() for r in (n, rows))
    return x, weight, torch.randn(rows, generator=g)


def attacked(n: int, rows: int, d: int, g: Generator) -> Inputs:
    """Every second sample has up to twenty coordinates at 100."""
    x, weight, bias = images(n, rows, d, g)
    for b in range(0, n, 2):
        where = torch.randperm(d, generator=g)[: 1 + 3 * b % 20]
        x[b, where] = 100 * torch.randn(len(where), generator=g).sign()
    return x, weight, bias


def huge(n: int, rows: int, d: int, g: Generator) -> Inputs:
    x, weight, bias = images(n, rows, d, g)
    for row in x:
        row[torch.randperm(d, generator=g)[:3]] = 1e8 * torch.randn(3, generator=g)
    x[0, 0], x[0, 1], x[1, 2] = INF, -INF, 0.0
    weight[0, 0], weight[-1, 2], weight[0, 3] = 0.0, INF, -INF
    if d > 80:
        x[2, : d // 2] = INF
        x[2, d // 2 : d - 4] = -INF
    return x, weight, bias


def undefined(n: int, rows: int, d: int, g: Generator) -> Inputs:
    x, weight, bias = ordinary(n, rows, d, g)
    x[0, 3], weight[-1, 2] = NAN, NAN
    return x, weight, bias


def few_stay(n: int, rows: int, d: int, g: Generator) -> Inputs:
    """What is removed is far larger than what stays: subtracting it would cancel."""
    x, weight, bias = ordinary(n, rows, d, g)
    weight[:, d // 4 :] *= 1e-6
    return x, weight, bias


def one_sided(n: int, rows: int, d: int, g: Generator) -> Inputs:
    """No term of most samples is positive, and their neighbour has an outlying one."""
    x, weight, bias = ordinary(n, rows, d, g)
    x = -x.abs()
    x[-1, 0] = 1000.0
    return x, weight.abs(), bias


KINDS = (ordinary, images, zeros, integers, attacked, huge, undefined, few_stay, one_sided)
# n, rows, d, top, bottom: short rows, orders that do not end on a step, one side, many terms
SHAPES = ((3, 2, 20, 5, 4), (33, 1, 50, 10, 10), (3, 2, 44, 0, 4), (3, 2, 60, 17, 16))
LONG = (3, 1, 140, 45, 45)
SLOW = (zeros, integers, huge, undefined, few_stay, one_sided)  # in Triton's interpreter, where they get less


def close(name: str, got: Tensor, want: Tensor, scale: Tensor) -> None:
    got = got.double()
    wrong = torch.where(
        want.isfinite(), (got - want).abs() > 1e-5 * scale + 1e-30, (got != want) & ~(got.isnan() & want.isnan())
    )
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(f"{name}: {int(wrong.sum())} wrong, at {at} {got[at].item()} and not {want[at].item()}")


def compare(x: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[tuple[int, int], ...]) -> None:
    """Values without and with cuts, gradients: against the definition."""
    x, weight, bias = x.to(DEVICE), weight.to(DEVICE), None if bias is None else bias.to(DEVICE)
    prepared = gpu.prepare(weight)
    plain, *nothing = gpu.forward(x, weight, bias, *prepared, counts, False)
    assert not any(t.numel() for t in nothing)
    out, cuts, ties, marks = gpu.forward(x, weight, bias, *prepared, counts, True)
    grad = torch.randn(out.shape, generator=Generator().manual_seed(1)).to(DEVICE)
    for p, (top, bottom) in enumerate(counts):
        want = reference.trimmed_linear(x, weight, bias, top=top, bottom=bottom)
        scale = reference.scale(x, weight, bias, top=top, bottom=bottom)
        close("value", out[p], want, scale)
        close("value without cuts", plain[p], want, scale)
        found = gpu.backward(grad[p], x, weight, *prepared, cuts[p], ties[p], marks[p], True, True)
        wanted = reference.gradients(grad[p], x, weight, top=top, bottom=bottom)
        stays = reference.kept(reference.products(x, weight), top, bottom)
        sizes = (
            (grad[p].unsqueeze(-1) * weight).abs().where(stays, 0.0).double().sum(1),
            (grad[p].unsqueeze(-1) * x.unsqueeze(1)).abs().where(stays, 0.0).double().sum(0),
        )
        for name, *these in zip(("gradient to x", "gradient to weight"), found, wanted, sizes, strict=True):
            close(name, *these)


def check_kind(make: Callable[..., Inputs]) -> None:
    slow = INTERPRETED and make in SLOW
    shapes = SHAPES if slow else (*SHAPES, LONG)
    for seed, (n, rows, d, top, bottom) in enumerate(shapes):
        compare(*make(n, rows, d, Generator().manual_seed(seed)), ((top, bottom),))
    # Samples may be walked as well.
    with mock.patch.object(gpu, "ASKED", 0):
        compare(*make(5 if slow else 33, 2, 40, Generator().manual_seed(9)), ((4, 3),))


def check_pairs() -> None:
    for counts in (((3, 2), (4, 0)), ((20, 12), (12, 20), (17, 17))):
        x, weight, _ = attacked(3, 1, 60, Generator().manual_seed(0))
        compare(x, weight, None, counts)


def check_two_runs_give_the_same_bits() -> None:
    x, weight, bias = (t.to(DEVICE) for t in attacked(33, 4, 48, Generator().manual_seed(0)))
    for counts in (((5, 5),), ((17, 16),)):
        runs = []
        for _ in range(2):
            prepared = gpu.prepare(weight)
            out, cuts, ties, marks = gpu.forward(x, weight, bias, *prepared, counts, True)
            runs.append((out, *gpu.backward(out[0], x, weight, *prepared, cuts[0], ties[0], marks[0], True, True)))
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def check_a_batch_can_be_too_large() -> None:
    x, weight, bias = (t.to(DEVICE) for t in ordinary(9, 3, 40, Generator().manual_seed(0)))
    prepared = gpu.prepare(weight)
    whole = gpu.forward(x, weight, bias, *prepared, ((3, 3),), False)[0]
    with mock.patch.object(gpu, "_MOST", 4 * 40):
        torch.testing.assert_close(gpu.forward(x, weight, bias, *prepared, ((3, 3),), False)[0], whole)
        refused = False
        try:
            gpu.forward(x, weight, bias, *prepared, ((3, 3),), True)
        except ValueError as error:
            refused = "at most 4" in str(error)
    assert refused


def check_other_weights_are_refused() -> None:
    x, weight, bias = (t.to(DEVICE) for t in ordinary(2, 3, 40, Generator().manual_seed(0)))
    refused = False
    try:
        gpu.forward(x, weight, bias, *gpu.prepare(weight[:2]), ((3, 3),), False)
    except ValueError as error:
        refused = "order must be torch.int64 of shape (3, 40)" in str(error)
    assert refused


def check_empty_batches() -> None:
    _, weight, bias = (t.to(DEVICE) for t in ordinary(2, 3, 40, Generator().manual_seed(0)))
    prepared = gpu.prepare(weight)
    x = weight.new_empty(0, 40)
    out, cuts, ties, marks = gpu.forward(x, weight, bias, *prepared, ((3, 3),), True)
    assert out.shape == (1, 0, 3)
    grad_x, grad_weight = gpu.backward(out[0], x, weight, *prepared, cuts[0], ties[0], marks[0], True, True)
    assert grad_x.shape == (0, 40)
    assert torch.equal(grad_weight, torch.zeros_like(weight))


@contextmanager
def small_fields(taken: bool) -> Iterator[None]:
    """Has convolutions done by the kernels for small fields, or without them, and sees that they were."""
    serves = gpu_conv.fits if taken else mock.Mock(return_value=False)
    with (
        mock.patch.object(gpu_conv, "serves", serves),
        mock.patch.object(gpu_conv, "forward", side_effect=gpu_conv.forward) as forward,
        mock.patch.object(gpu_conv, "backward", side_effect=gpu_conv.backward) as backward,
    ):
        yield
    assert forward.called == backward.called == taken


def compare_convolution(make: Callable[..., Inputs], channels: int, geometry: Geometry, unit: conv.Unit) -> None:
    """Values and gradients of two pairs, however much is unfolded at once or nothing is: against the definition."""
    g, (height, width) = Generator().manual_seed(0), (7, 6) if INTERPRETED else (13, 11)
    counts = ((2, 1), (0, 3)) if make is integers or not INTERPRETED else ((2, 1),)
    layout = torch.channels_last if geometry.groups == 2 else torch.contiguous_format
    x = make(3, 1, channels * height * width, g)[0].view(3, channels, height, width)
    x = x.to(DEVICE).to(memory_format=layout)
    outs = max(2, geometry.groups) if INTERPRETED else 8
    weight, bias = make(2, outs, channels // geometry.groups * 9, g)[1:]
    weight, bias = weight.view(outs, -1, 3, 3).to(DEVICE), bias.to(DEVICE)
    terms = reference.conv_terms(x, weight, geometry, unit)
    lost = terms.isnan().any(-1)
    grad = torch.randn(len(counts), *lost.shape, generator=g).to(DEVICE)
    values, sizes, gradients = [], [], []
    for upstream, (top, bottom) in zip(grad, counts, strict=True):
        stays = reference.kept(terms, top, bottom)
        values.append(reference.trimmed_conv2d(x, weight, bias, geometry, top=top, bottom=bottom, unit=unit))
        sizes.append(terms.double().abs().where(stays, 0.0).sum(-1) + bias.double().abs()[:, None])
        through = (stays | lost.unsqueeze(-1), geometry, unit)
        wanted = reference.conv_gradients(upstream.masked_fill(lost, NAN), x, weight, *through)
        scales = reference.conv_gradients(upstream.abs(), x.abs(), weight.abs(), *through)
        gradients.append((*wanted, *scales))
    to_x, to_weight, scale_x, scale_weight = (torch.stack(each).sum(0) for each in zip(*gradients, strict=True))
    name = f"{unit}, {make.__name__}, {geometry}"
    # Without a GPU it is other tests that unfold.
    for at_once, small in ((conv.UNFOLDED, True), (conv.UNFOLDED, False), (400, False))[: 1 if INTERPRETED else 3]:
        with small_fields(small), mock.patch.multiple(conv, UNFOLDED=at_once, CACHED=at_once):
            leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
            out = ops.trimmed_conv2ds(*leaves, counts=counts, unit=unit, **vars(geometry))
            found = torch.autograd.grad(out, leaves, grad.view(out.shape))
        assert out[0].is_contiguous(memory_format=layout)
        close(f"{name}: value", out.detach().flatten(3), torch.stack(values), torch.stack(sizes))
        close(f"{name}: gradient to x", found[0], to_x, scale_x)
        close(f"{name}: gradient to weight", found[1], to_weight, scale_weight)
        close(f"{name}: gradient to bias", found[2], grad.double().sum((0, 1, 3)), grad.double().abs().sum((0, 1, 3)))


def check_convolution() -> None:
    settings = (
        (3, Geometry(padding=(1, 1))), (4, Geometry((2, 1), (1, 2), (1, 2), 2)), (4, Geometry((1, 2), groups=4)),
    )  # fmt: skip
    for shift, unit in enumerate(get_args(conv.Unit)):
        cases = list(product(KINDS, settings))
        if INTERPRETED:
            # Every kind meets one of the settings.
            cases = [(make, settings[(i + shift) % len(settings)]) for i, make in enumerate(KINDS)]
        for make, (channels, geometry) in cases:
            compare_convolution(make, channels, geometry, unit)


def check_small_fields_do_not_depend_on_the_parts() -> None:
    """Neither on what a program and a launch take; a window with an even side, more outputs than a program has."""
    g, grads = Generator().manual_seed(0), []
    x, weight = torch.randn(3, 2, 5, 4, generator=g).to(DEVICE), torch.randn(4, 1, 2, 3, generator=g).to(DEVICE)
    usual = {name: getattr(gpu_conv, name) for name in ("TRIM", "MARK", "WEIGHTS", "INPUTS", "AT_ONCE")}
    few = {"TRIM": (32, 1, 1), "MARK": (16, 2, 1), "WEIGHTS": (16, 16, 1), "INPUTS": (16, 1), "AT_ONCE": 100}
    for unit, sizes in product(get_args(conv.Unit), (usual, usual, few)):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with small_fields(True), mock.patch.multiple(gpu_conv, **sizes):
            out = ops.trimmed_conv2d(*leaves, top=1, bottom=2, padding=(1, 0), groups=2, unit=unit)
            grads.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    for one, again, in_parts in (grads[:3], grads[3:]):
        assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
        assert torch.equal(one[0], in_parts[0])
        assert torch.equal(one[1], in_parts[1])
        torch.testing.assert_close(one[2], in_parts[2])


def check_ties_in_small_fields() -> None:
    """The lowest index leaves first, on top before at the bottom."""
    for unit, (top, bottom) in product(get_args(conv.Unit), ((2, 3), (0, 2), (4, 0))):
        x, weight = torch.ones(1, 1, 3, 3, device=DEVICE, requires_grad=True), torch.ones(2, 1, 3, 3, device=DEVICE)
        with small_fields(True):
            out = ops.trimmed_conv2d(x, weight, top=top, bottom=bottom, unit=unit)
            (found,) = torch.autograd.grad(out.sum(), x)
        assert found.flatten().tolist() == [0.0] * (top + bottom) + [2.0] * (9 - top - bottom)
    # Six terms tie: after 9 and 8 the top side takes the first of them, the bottom side the next two.
    x = torch.tensor([1.0, 9.0, 1.0, 1.0, 8.0, 1.0, 1.0, 1.0, 2.0], device=DEVICE).view(1, 1, 3, 3).requires_grad_()
    with small_fields(True):
        out = ops.trimmed_conv2d(x, torch.ones(1, 1, 3, 3, device=DEVICE), top=4, bottom=2)
        (found,) = torch.autograd.grad(out.sum(), x)
    assert out.item() == 3
    assert found.flatten().tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0]


def check_pixels_of_small_fields() -> None:
    """Their channels are added up in float64, infinities that disagree are undefined, and 0 * inf is 0."""
    x, weight = torch.ones(1, 3, 1, 4, device=DEVICE), torch.ones(2, 3, 1, 4, device=DEVICE)
    x[0, :, 0, 1] = torch.tensor([1e8, 2.0, -1e8])
    x[0, 0, 0, 2], weight[:, 0, 0, 2] = INF, 0.0
    weight[1, 0, 0, 2] = 1.0
    with small_fields(True):
        x.requires_grad_()
        out = ops.trimmed_conv2d(x, weight, top=1, bottom=0, unit="pixel")
        (found,) = torch.autograd.grad(out.sum(), x)
    # Terms 3, 2, 2, 3 and 3, 2, inf, 3.
    assert out.flatten().tolist() == [7, 8]
    assert found[0, :, 0].tolist() == [[1, 2, 0, 2], [1, 2, 1, 2], [1, 2, 1, 2]]
    x = x.detach()
    x[0, 1, 0, 2] = -INF
    with mock.patch.object(gpu_conv, "serves", gpu_conv.fits):
        out = ops.trimmed_conv2d(x, weight, top=1, bottom=1, unit="pixel")
        by_feature = ops.trimmed_conv2d(x, weight, top=2, bottom=2)
    assert out.isnan().flatten().tolist() == [False, True]
    # The first output keeps 0 * inf and seven ones, the second seven ones and a 2.
    assert by_feature.flatten().tolist() == [7, 9]


def check_what_small_fields_are() -> None:
    x, weight = torch.empty(2, 3, 9, 8, device=DEVICE), torch.empty(4, 3, 3, 3, device=DEVICE)
    assert gpu_conv.fits(x, weight, (7, 6))
    assert not gpu_conv.fits(x.double(), weight.double(), (7, 6))
    assert not gpu_conv.fits(x[:0], weight, (7, 6))
    assert not gpu_conv.fits(x, weight[:0], (7, 6))
    assert not gpu_conv.fits(x, weight.new_empty(4, 3, 3, 4), (7, 5))
    assert gpu_conv.serves(x, weight, (7, 6)) != INTERPRETED
    # Places are counted in int32.
    large, one = torch.empty(1, 1, 1 << 15, 1 << 15, device="meta"), torch.empty(1, 1, 3, 3, device="meta")
    assert gpu_conv.fits(large, one, (1 << 15, 1 << 15))
    assert not gpu_conv.fits(large, one.expand(2, -1, -1, -1), (1 << 15, 1 << 15))
    assert not gpu_conv.fits(large.new_empty(1, 1, 1 << 15, (1 << 15) + 1), one, (1, 1))
    assert not gpu_conv.fits(x, one.expand(1 << 27, -1, -1, -1), (1, 1))


def some_small_fields() -> Inputs:
    """x, weight, and a gradient to the output without padding."""
    g, (outs, channels, side) = Generator().manual_seed(0), (2, 2, 2) if INTERPRETED else (20, 3, 3)
    x, weight = torch.randn(3, channels, 5, 4, generator=g), torch.randn(outs, channels, side, side, generator=g)
    upstream = torch.randn(3, outs, 6 - side, 5 - side, generator=g)
    return x.to(DEVICE), weight.to(DEVICE), upstream.to(DEVICE)


def run_small_fields(x: Tensor, weight: Tensor, upstream: Tensor, unit: conv.Unit) -> Inputs:
    """The output, and the gradients to x and weight."""
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    # Not `trimmed_conv2d`, which hands on a gradient that lies as the output does.
    out = ops.trimmed_conv2ds(*leaves, counts=((2, 1),), unit=unit)
    to_x, to_weight = torch.autograd.grad(out, leaves, upstream.unsqueeze(0))
    return out[0].detach(), to_x, to_weight


def check_layouts_of_small_fields() -> None:
    """However x, weight and the gradient to the output lie in memory: the same bits, and an output that lies as x."""
    (x, weight, upstream), last = some_small_fields(), torch.channels_last
    x_last, weight_last, upstream_last = (t.to(memory_format=last) for t in (x, weight, upstream))
    wide, turned = torch.stack((x, x), -1)[..., 0], weight.transpose(2, 3).contiguous().transpose(2, 3)
    same = upstream[:1, :, :1, :1].expand_as(upstream)
    cases = (
        ((x, weight, upstream), (x, weight_last, upstream_last)),
        ((x, weight, upstream), (x_last, weight, upstream)),
        ((x, weight, upstream), (x_last, weight_last, upstream_last)),
        ((x, weight, upstream), (wide, turned, upstream)),
        ((x[:1].repeat(3, 1, 1, 1), weight, same.contiguous()), (x[:1].expand_as(x), weight, same)),
        ((x[1:2], weight, upstream[1:2]), (x_last[1:2], weight_last, upstream_last[1:2])),
    )
    for unit, (plain, strange) in product(get_args(conv.Unit), cases):
        with small_fields(True):
            wanted, found = (run_small_fields(*these, unit) for these in (plain, strange))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert found[0].is_contiguous(memory_format=last) == (strange[0] is x_last or len(strange[0]) == 1)


def check_half_precision_into_small_fields() -> None:
    """Under autocast terms are compared in float32 all the same; the gradient to x has its dtype."""
    (x, weight, upstream), half = some_small_fields(), torch.bfloat16
    layouts = torch.contiguous_format, torch.channels_last
    for unit, layout, dtype in product(get_args(conv.Unit), layouts, (half, torch.float32)):
        given = x.to(half).to(dtype).to(memory_format=layout)
        with small_fields(True):
            wanted = run_small_fields(given.float(), weight, upstream, unit)
            with torch.autocast(DEVICE, dtype=half):
                found = run_small_fields(given, weight.to(memory_format=layout), upstream, unit)
        assert [t.dtype for t in found] == [torch.float32, dtype, torch.float32]
        assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, wanted, strict=True))


def check_no_small_fields() -> None:
    """An empty batch is nothing to launch a kernel for."""
    x, weight = torch.empty(0, 3, 5, 4, device=DEVICE), torch.ones(4, 3, 3, 3, device=DEVICE)
    for unit in get_args(conv.Unit):
        with mock.patch.object(gpu_conv, "serves", gpu_conv.fits):
            out, to_x, to_weight = run_small_fields(x, weight, x.new_empty(0, 4, 3, 2), unit)
        assert out.shape == (0, 4, 3, 2)
        assert to_x.shape == x.shape
        assert torch.equal(to_weight, torch.zeros_like(weight))


def certified(unit: conv.Unit | None) -> nn.Module:
    """A network on images (n, 3, 2, 2) for a certificate; its first layer is truncated, or plain without a unit."""
    torch.manual_seed(0)
    if unit is None:
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 4)).to(DEVICE)
    first = TruncatedConv2d(3, 3, 2, 1 if unit == "pixel" else 3, padding=1, unit=unit)
    return nn.Sequential(first, nn.Flatten(), nn.ReLU(), nn.Linear(27, 4)).to(DEVICE)


def certified_loss(net: nn.Module, x: Tensor, y: Tensor, ball: L0Ball) -> Tensor:
    return F.cross_entropy(-certify.margins(net, x, y, ball.budget, ball), y)


BOUNDED: tuple[tuple[conv.Unit | None, L0Ball], ...] = (
    ("feature", L0Ball(0, low=-INF, high=INF)), ("feature", L0Ball(2, low=-INF, high=INF)),
    ("feature", L0Ball(1, "pixel", low=-INF, high=INF)), ("pixel", L0Ball(1, "pixel", low=-INF, high=INF)),
    (None, L0Ball(2, "pixel")),
)  # fmt: skip


def check_certificates_of_small_fields() -> None:
    """The bound that a network is trained on, with its gradients: where all that leave do so on one side, too."""
    g = Generator().manual_seed(0)
    x, y = (torch.rand(5, 3, 2, 2, generator=g) * 2 - 1).to(DEVICE), torch.randint(4, (5,), generator=g).to(DEVICE)
    for unit, ball in BOUNDED:
        found = []
        for taken in (True, False):
            net = certified(unit)
            with small_fields(taken):
                loss = certified_loss(net, x, y, ball)
                found.append([loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# --- what only a GPU can show -----------------------------------------------------------------------------------------


def check_operator() -> None:
    g = Generator().manual_seed(0)
    x, weight, bias = (t.to(DEVICE).requires_grad_() for t in images(300, 200, 784, g))
    for counts in (((10, 10),), ((100, 100), (108, 92))):
        out = ops.trimmed_linears(x, weight, bias, counts=counts)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, (x, weight, bias), grad)
        wanted = [
            reference.gradients(part, x, weight, top=t, bottom=b) for part, (t, b) in zip(grad, counts, strict=True)
        ]
        to_x, to_weight = (torch.stack(each).sum(0) for each in zip(*wanted, strict=True))
        for got, want in zip(found, (to_x, to_weight, grad.sum((0, 1))), strict=True):
            torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-3)
        for value, (top, bottom) in zip(out, counts, strict=True):
            want = reference.trimmed_linear(x, weight, bias, top=top, bottom=bottom)
            close(
                "value",
                value.detach(),
                want.detach(),
                reference.scale(x, weight, bias, top=top, bottom=bottom).detach(),
            )
    torch.library.opcheck(
        torch.ops.ell0.trimmed_linear.default,
        (x[:40], weight, bias, *torch.ops.ell0.prepare(weight.detach()), [10, 10], True),
    )
    check_operator_of_small_fields()


def check_operator_of_small_fields() -> None:
    shapes = ((2, 2, 5, 4), (2, 1, 2, 3), (2,))
    x, weight, bias = (torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes)
    where = ([2, 1], [1, 0], [1, 1], 2, "feature")
    with small_fields(True):
        for pairs, image in (([1, 2, 2, 1], x), ([1, 2], x.detach().to(memory_format=torch.channels_last))):
            torch.library.opcheck(torch.ops.ell0.trimmed_conv2d.default, (image, weight, bias, pairs, *where))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), TruncatedLinear(784, 128, k=10), nn.ReLU(), nn.Linear(128, 10)).to(DEVICE)


def convolutional(unit: conv.Unit) -> nn.Module:
    """Weights lie as training on a GPU lays them."""
    torch.manual_seed(0)
    first = TruncatedConv2d(3, 24, 3, 2 if unit == "pixel" else 4, padding=1, unit=unit)
    net = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(24 * 64, 10)).to(DEVICE)
    first.weight.data = first.weight.data.contiguous(memory_format=torch.channels_last)
    return net


def plain_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def half_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
        logits = net(x.bfloat16())
    return F.cross_entropy(logits.float(), y)


def check_cuda_graphs() -> None:
    """Three steps in a graph end where three eager steps end."""
    _check_graph(model, (784,), plain_loss)
    for unit, (loss, share) in product(get_args(conv.Unit), ((plain_loss, 0.0), (half_loss, 0.05))):
        with small_fields(True):
            _check_graph(partial(convolutional, unit), (3, 8, 8), loss, share)
    for kind, ball in BOUNDED:
        with small_fields(True):
            _check_graph(partial(certified, kind), (3, 2, 2), partial(certified_loss, ball=ball))


def _check_graph(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
    share: float = 0.0,
) -> None:
    """share: of the way that a parameter goes, by which it may end elsewhere."""
    x = torch.rand(3, 64, *shape, device=DEVICE) * 2 - 1
    y = torch.randint(0, 4, (3, 64), device=DEVICE)
    eager, graphed = make(), make()

    def step(net: nn.Module, images: Tensor, labels: Tensor) -> None:
        for p in net.parameters():
            p.grad = None
        loss(net, images, labels).backward()
        with torch.no_grad():
            for p in net.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.1)

    before = [p.detach().clone() for p in graphed.parameters()]
    for images_, labels in zip(x, y, strict=True):
        step(eager, images_, labels)
    still_x, still_y = x[0].clone(), y[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(graphed, still_x, still_y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(graphed, still_x, still_y)
    with torch.no_grad():
        for p, b in zip(graphed.parameters(), before, strict=True):
            p.copy_(b)
    for images_, labels in zip(x, y, strict=True):
        still_x.copy_(images_)
        still_y.copy_(labels)
        graph.replay()
    for a, b, c in zip(eager.parameters(), graphed.parameters(), before, strict=True):
        way = float((a.detach() - c).abs().max())
        assert way > 1e-5, "nothing was learnt, so nothing was compared"
        torch.testing.assert_close(a, b, rtol=1e-4, atol=max(share * way, 1e-6))


def check_compile() -> None:
    net, x = model(), torch.rand(64, 784, device=DEVICE) * 2 - 1
    torch.testing.assert_close(torch.compile(net)(x), net(x), rtol=1e-4, atol=1e-5)


def check_autocast() -> None:
    """The comparison of terms keeps its precision; half precision on the way in is taken."""
    net, x = model(), torch.rand(64, 784, device=DEVICE) * 2 - 1
    layer = next(m for m in net.modules() if isinstance(m, TruncatedLinear))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(x), layer(x.clone()))
        assert layer(x).dtype == torch.float32


def check_attacks() -> None:
    """Everything stays on the device of the input, and claims hold there."""
    torch.manual_seed(0)
    net = models.mlp(2, in_features=36, hidden=(16,), classes=3).to(DEVICE)
    x = (torch.rand(40, 1, 6, 6, generator=Generator().manual_seed(0)) * 2 - 1).to(DEVICE)
    y = net(x).argmax(1)
    ball = L0Ball(4, low=-3.0, high=3.0)
    for name, attack in ATTACKS.items():
        cheap = {"queries": 60, "steps": 20}
        result = attack(net, x, y, ball, **{key: cheap[key] for key in signature(attack).parameters if key in cheap})
        assert {value.device.type for value in vars(result).values()} == {DEVICE}, name
        assert result.success.any(), name
        assert ball.contains(x, result.x_adv).all(), name
        assert torch.equal(net(result.x_adv).argmax(1) != y, result.success), name


ANYWHERE: dict[str, Callable[[], None]] = {
    **{make.__name__: lambda make=make: check_kind(make) for make in KINDS},  # type: ignore[misc]
    "pairs": check_pairs,
    "determinism": check_two_runs_give_the_same_bits,
    "size": check_a_batch_can_be_too_large,
    "prepared": check_other_weights_are_refused,
    "empty": check_empty_batches,
    "conv": check_convolution,
    "fields": check_small_fields_do_not_depend_on_the_parts,
    "ties": check_ties_in_small_fields,
    "pixels": check_pixels_of_small_fields,
    "small": check_what_small_fields_are,
    "layouts": check_layouts_of_small_fields,
    "half": check_half_precision_into_small_fields,
    "nothing": check_no_small_fields,
    "certify": check_certificates_of_small_fields,
}
GPU_ONLY: dict[str, Callable[[], None]] = {
    "operator": check_operator,
    "graphs": check_cuda_graphs,
    "compile": check_compile,
    "autocast": check_autocast,
    "attacks": check_attacks,
}


def run_checks(checks: dict[str, Callable[[], None]], names: list[str]) -> int:
    """Runs the checks of these names, or all, and says how each went; 1 if one failed."""
    failed = 0
    for name in names or checks:
        start = time.perf_counter()
        try:
            checks[name]()
            verdict = "ok"
        except Exception as error:
            verdict, failed = f"FAILED: {type(error).__name__}: {error}", failed + 1
        print(f"{name}: {verdict} ({time.perf_counter() - start:.1f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_checks(ANYWHERE if INTERPRETED else ANYWHERE | GPU_ONLY, sys.argv[1:]))
