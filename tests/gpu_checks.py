"""Checks of the Triton kernels that need neither pytest nor, in Triton's interpreter, a GPU.

``python tests/gpu_checks.py [NAME ...]`` runs them all, or some, on the GPU; with TRITON_INTERPRET=1 on the CPU.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from balls import within_one
from ell0 import ATTACKS, L0Ball, certify, models, ops
from ell0.attacks import graphs
from ell0.nn import InputScale, InputTruncation, TruncatedLinear
from ell0.ops import gpu, reference
from ell0.ops.triton_kernels import _select
from oracle import network

INTERPRETED = gpu._interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"
INF, NAN = float("inf"), float("nan")

Inputs = tuple[Tensor, Tensor, Tensor]
Counts = tuple[tuple[int, int], ...]


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
# Samples of each kind, d, top, bottom, and the weights: what Triton's interpreter has time for.
MIXED = (
    (4, 20, 5, 4, (ordinary, integers)), (4, 44, 0, 4, (integers, one_sided)), (4, 60, 17, 16, (ordinary, few_stay)),
    (4, 140, 45, 45, (integers,)),
)  # fmt: skip
FINITE = tuple(make for make in KINDS if make not in (huge, undefined))


def close(name: str, got: Tensor, want: Tensor, scale: Tensor) -> None:
    got = got.double()
    wrong = torch.where(
        want.isfinite(), (got - want).abs() > 1e-5 * scale + 1e-30, (got != want) & ~(got.isnan() & want.isnan())
    )
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(f"{name}: {int(wrong.sum())} wrong, at {at} {got[at].item()} and not {want[at].item()}")


def run(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Counts) -> tuple[Tensor, Tensor, list[Any]]:
    """Output, a gradient to it, and the gradients of each pair to x and weight."""
    order, ranked, bound = gpu.prepare(weight)
    out, *saved = gpu.forward(x, weight, bias, (order, ranked, bound), counts, True)
    grad = torch.randn(out.shape, generator=Generator().manual_seed(1)).to(DEVICE)
    pairs = zip(grad, *saved, strict=True)
    return out, grad, [gpu.backward(g, (x, weight, order, bound, *pair), True, True) for g, *pair in pairs]


def compare(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Counts) -> None:
    """Values without and with cuts, gradients: against the definition."""
    x, weight, bias = x.to(DEVICE), weight.to(DEVICE), None if bias is None else bias.to(DEVICE)
    plain, *nothing = gpu.forward(x, weight, bias, gpu.prepare(weight), counts, False)
    assert not any(t.numel() for t in nothing)
    each = zip(*run(x, weight, bias, counts), plain, counts, strict=True)
    for value, grad, found, without, (top, bottom) in each:
        want = reference.trimmed_linear(x, weight, bias, top=top, bottom=bottom)
        scale = reference.scale(x, weight, bias, top=top, bottom=bottom)
        close("value", value, want, scale)
        close("value without cuts", without, want, scale)
        wanted = reference.gradients(grad, x, weight, top=top, bottom=bottom)
        stays = reference.kept(reference.products(x, weight), top, bottom)
        sizes = (
            (grad.unsqueeze(-1) * weight).abs().where(stays, 0.0).double().sum(1),
            (grad.unsqueeze(-1) * x.unsqueeze(1)).abs().where(stays, 0.0).double().sum(0),
        )
        for name, *these in zip(("gradient to x", "gradient to weight"), found, wanted, sizes, strict=True):
            close(name, *these)


def check_kind(make: Callable[..., Inputs]) -> None:
    for seed, (n, rows, d, top, bottom) in enumerate((*SHAPES, LONG)):
        compare(*make(n, rows, d, Generator().manual_seed(seed)), ((top, bottom),))
    # Samples may be walked as well.
    with mock.patch.object(gpu, "ASKED", 0):
        compare(*make(33, 2, 40, Generator().manual_seed(9)), ((4, 4),))


def check_alone(kinds: Sequence[Callable[..., Inputs]] = KINDS) -> None:
    """Each kind by itself: walks and searches end as early as it lets them."""
    for seed, make in enumerate(kinds):
        for n, d, top, bottom in ((33, 50, 10, 10), (3, 20, 5, 4), (3, 60, 17, 16)):
            compare(*make(n, 1, d, Generator().manual_seed(seed)), ((top, bottom),))


def check_mixed() -> None:
    """Samples of all kinds in one tile, apart from those that are not finite, by weights of several kinds."""
    g = Generator().manual_seed(0)
    for n, d, top, bottom, weights in (*MIXED, (5, 40, 4, 4, (ordinary, integers))):
        x = torch.cat([make(n, 1, d, g)[0] for make in FINITE])
        weight = torch.cat([make(1, 1, d, g)[1] for make in weights])
        # The last are walked.
        with mock.patch.object(gpu, "ASKED", 0 if d == 40 else gpu.ASKED):
            compare(x, weight, torch.randn(len(weight), generator=g), ((top, bottom),))
    for _, d, top, bottom, _ in MIXED[:3]:
        x, weight, bias = huge(3, 2, d, g)
        compare(torch.cat([x, undefined(3, 2, d, g)[0], zeros(3, 2, d, g)[0]]), weight, bias, ((top, bottom),))
    compare(*undefined(3, 2, 20, g), ((5, 4),))


def check_counts() -> None:
    """Terms are counted by one warp and by two, with several samples for a program; the weight's gradient is added up
    in parts.
    """
    g = Generator().manual_seed(0)
    for d, counts in ((35, ((17, 16), (0, 9))), (1030, ((500, 20),))):
        x = torch.cat([make(1, 2, d, g)[0] for make in (FINITE if d < 100 else FINITE[:2])])
        _, weight, bias = ordinary(2, 2, d, g)
        weight[1] = weight[1].round()
        with mock.patch.multiple(gpu, _share=mock.Mock(return_value=3), SHARE=1):
            compare(x, weight, bias, counts)
            if d < 100:
                compare(*zeros(5, 1, 40, g), ((12, 16),))
    for d, pair in ((1, (0, 0)), (2, (1, 0)), (3, (1, 1))):
        compare(*ordinary(2, 2, d, g), (pair,))
    compare(torch.ones(2, 6), torch.ones(1, 6), None, ((2, 1),))
    x, weight, _ = ordinary(3, 2, 41, g)
    compare(x[:1, :40], weight[:1, :40], None, ((5, 6),))


def check_cuts() -> None:
    """Cuts are the last terms that leave, whatever else is in the batch."""
    x, weight, _ = (t.to(DEVICE) for t in ordinary(4, 2, 40, Generator().manual_seed(0)))
    falling = reference.products(x, weight).sort(-1, descending=True).values
    for batch in (slice(0, 4), slice(2, 3)):
        with mock.patch.object(gpu, "_share", return_value=4):
            _, cuts, *_ = gpu.forward(x[batch], weight, None, gpu.prepare(weight), ((16, 17),), True)
        torch.testing.assert_close(
            cuts[0].permute(0, 2, 1), falling[batch][..., [15, -17]].movedim(-1, 0), rtol=0, atol=0
        )


def check_scales() -> None:
    """The range of half precision is that of the first samples, and wrong for others. Rows begin anywhere in memory."""
    g = Generator().manual_seed(0)
    for scale in (1e-30, 1e-12, 1e12, 1e30):
        x, weight, bias = ordinary(7, 1, 40, g)
        x[5] *= scale
        x[6, 3] = scale
        compare(x, weight / scale**0.5, bias, ((16, 17),))
    one, extreme = torch.ones(1, 40), torch.zeros(4, 40)
    extreme[0, :2] = torch.tensor([3e38, -3e38])
    four, _, _ = ordinary(4, 1, 40, g)
    with mock.patch.object(gpu, "_share", return_value=5):
        compare(extreme, one, None, ((5, 6),))
        # A sum that would overflow if it were scaled as the other samples' terms are; terms that vanish.
        for scale, last, weight in ((1e-12, 1e26, one), (1e-25, 1e-25, 1e-25 * one), (1.0, 1e-43, one)):
            compare(torch.cat([scale * four, last * four[:1].abs()]), weight, None, ((5, 6),))
    compare(torch.ones(1, 2), torch.tensor([[3e38, 2.9e38]]), None, ((1, 0), (0, 1)))
    x, weight, bias = ordinary(6, 1, 40, g)
    x[:5] = 0.0
    x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(6, 40)
    compare(x, weight, bias, ((16, 17),))


def check_ties() -> None:
    """Terms so close that half precision does not tell them apart, some of them equal, and many equal to a cut."""
    g = Generator().manual_seed(0)
    for step in (1e-7, 1e-5, 1e-3):
        x = 1.0 + step * torch.randint(-9, 10, (3, 70), generator=g)
        weight = torch.where(torch.rand(2, 70, generator=g) < 0.5, 1.0, -1.0)
        compare(x, weight, None, ((30, 16), (5, 20)))


@triton.jit  # type: ignore[untyped-decorator]
def rounding(numbers, halves, edges, size: tl.constexpr, card: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * size + tl.arange(0, size)
    number = tl.load(numbers + i)
    half = _select._half(_select._halved(number, number, card), 16)
    tl.store(halves + i, half)
    tl.store(edges + i, _select._edge(half))


def check_rounding() -> None:
    """All numbers in half precision, and what lies between them."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.float16).float()
    every = every.where(every.isfinite(), 0.0)
    beside = [torch.nextafter(every, torch.tensor(end)) for end in (-INF, INF)]
    spread = torch.randn(1 << 16, generator=Generator().manual_seed(0)) * 2.0 ** torch.linspace(-30, 20, 1 << 16)
    numbers = torch.cat([every, *beside, spread]).to(DEVICE)
    halves, edges = torch.empty_like(numbers), torch.empty_like(numbers)
    rounding[(len(numbers) // 1024,)](numbers, halves, edges, size=1024, card=not INTERPRETED)
    numbers, halves, edges = numbers.cpu(), halves.cpu(), edges.cpu()
    assert torch.equal(halves[: 1 << 16], every)
    assert torch.equal(halves.abs(), largest_half(numbers.abs()))
    assert ((halves == 0) | (halves.sign() == numbers.sign())).all()
    # The edge is rounded to a larger one, and what lies before it is not.
    below = halves < 65504
    assert (edges[~below] == INF).all()
    before = torch.nextafter(edges, torch.tensor(-INF))
    assert (towards_zero(edges) > halves)[below].all()
    assert (towards_zero(before) <= halves)[below].all()


def largest_half(sizes: Tensor) -> Tensor:
    """The largest finite number in half precision that is not larger."""
    near = sizes.clamp(max=65504.0).half()
    return torch.where(near.float() > sizes, torch.nextafter(near, torch.zeros_like(near)), near).float()


def towards_zero(numbers: Tensor) -> Tensor:
    return numbers.sign() * largest_half(numbers.abs())


def check_pairs() -> None:
    for counts in (((3, 2), (4, 0)), ((20, 12), (12, 20), (17, 17))):
        x, weight, _ = attacked(3, 1, 60, Generator().manual_seed(0))
        compare(x, weight, None, counts)


def check_two_runs_give_the_same_bits() -> None:
    for n, counts in ((33, ((5, 5),)), (5, ((17, 16),))):
        x, weight, bias = (t.to(DEVICE) for t in attacked(n, 3, 48, Generator().manual_seed(0)))
        (out, _, (grads,)), (again, _, (grads_again,)) = (run(x, weight, bias, counts) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip((out, *grads), (again, *grads_again), strict=True))


def refuses(message: str, *arguments: Any) -> bool:
    try:
        gpu.forward(*arguments)
    except ValueError as error:
        return message in str(error)
    return False


def check_a_batch_can_be_too_large() -> None:
    x, weight, bias = (t.to(DEVICE) for t in ordinary(9, 3, 40, Generator().manual_seed(0)))
    arguments = (x, weight, bias, gpu.prepare(weight), ((3, 3),))
    whole = gpu.forward(*arguments, False)[0]
    with mock.patch.object(gpu, "_MOST", 4 * 40):
        torch.testing.assert_close(gpu.forward(*arguments, False)[0], whole)
        assert refuses("at most 4", *arguments, True)


def check_other_weights_are_refused() -> None:
    x, weight, bias = (t.to(DEVICE) for t in ordinary(2, 3, 40, Generator().manual_seed(0)))
    other = gpu.prepare(weight[:2])
    assert refuses("order must be torch.int64 of shape (3, 40)", x, weight, bias, other, ((3, 3),), False)


def check_empty_batches() -> None:
    _, weight, bias = (t.to(DEVICE) for t in ordinary(2, 3, 40, Generator().manual_seed(0)))
    out, _, ((grad_x, grad_weight),) = run(weight.new_empty(0, 40), weight, bias, ((3, 3),))
    assert out.shape == (1, 0, 3)
    assert grad_x.shape == (0, 40)
    assert torch.equal(grad_weight, torch.zeros_like(weight))


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
    for k in (10, 100):
        torch.library.opcheck(
            torch.ops.ell0.trimmed_linear.default,
            (x[:40], weight, bias, *torch.ops.ell0.prepare(weight.detach()), [k, k], True),
        )


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), TruncatedLinear(784, 128, k=10), nn.ReLU(), nn.Linear(128, 10)).to(DEVICE)


def plain_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def half_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
        logits = net(x.bfloat16())
    return F.cross_entropy(logits.float(), y)


def certified_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Its bound is that of changed pixels."""
    return F.cross_entropy(-certify.margins(net, x, y, 2, within_one(2, "pixel")), y)


def check_cuda_graphs() -> None:
    """Three steps in a graph end where three eager steps end."""
    check_graph(model, (784,), plain_loss)
    for loss in (plain_loss, half_loss):
        check_graph(normalised, (3, 8, 8), loss, 0.05)
    check_graph(partial(models.mlp, 0, in_features=12, hidden=(4,), classes=4), (3, 2, 2), certified_loss)


def normalised() -> nn.Module:
    scale = InputScale.normalising((0.5, 0.4, 0.3), (0.2, 0.3, 0.1))
    return nn.Sequential(scale, models.small_cnn(3, in_shape=(3, 8, 8), classes=4))


def check_graph(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
    share: float = 0.0,
) -> None:
    """share: how far a parameter may end elsewhere, of the way that it goes."""
    torch.manual_seed(0)
    eager = make().to(DEVICE)
    graphed = copy.deepcopy(eager)
    x = torch.rand(3, 64, *shape, device=DEVICE) * 2 - 1
    y = torch.randint(0, 4, (3, 64), device=DEVICE)

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


def check_input_truncation() -> None:
    """Ties, infinities and NaN are treated as on the CPU, in any layout and under autocast."""
    x = torch.randint(-9, 10, (200, 3, 32, 32), generator=Generator().manual_seed(0)).float()
    x[0, 0, 0, :5], x[1, 1, 3, 7], x[2] = INF, NAN, 1.0
    layer = InputTruncation((3, 32, 32), 10)
    for images_ in (x.to(DEVICE), x.to(DEVICE, memory_format=torch.channels_last)):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            torch.testing.assert_close(layer(images_).cpu(), layer(x), rtol=0, atol=0, equal_nan=True)


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
        assert {value.device.type for value in vars(result).values() if isinstance(value, Tensor)} == {DEVICE}, name
        assert result.success.any(), name
        assert ball.contains(x, result.x_adv).all(), name
        assert torch.equal(net(result.x_adv).argmax(1) != y, result.success), name


def check_replays() -> None:
    """Attacks find the same from CUDA graphs, on a model that adds up each row by itself, and are replayed at all."""
    net = network(36).to(DEVICE)
    x = (torch.rand(40, 1, 6, 6, generator=Generator().manual_seed(0)) * 2 - 1).to(DEVICE)
    y, ball, replays = net(x).argmax(1), L0Ball(1, low=-1.0, high=1.0), []

    def replayed(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(graph)
        replay(graph)

    replay = torch.cuda.CUDAGraph.replay
    for name, attack in ATTACKS.items():
        amounts = {"queries": 200, "steps": 60, "restarts": 2}
        run_it = partial(attack, net, x, y, ball, **{key: amounts[key] for key in attack.settings if key in amounts})
        called = run_it()
        own = mock.patch.object(graphs, "_KNOWN", ("ell0", "torch", "oracle"))
        with own, mock.patch.object(torch.cuda.CUDAGraph, "replay", replayed):
            found = run_it()
        for field in ("x_adv", "success", "distance", "queries", "x_best", "margin"):
            assert torch.equal(getattr(found, field), getattr(called, field)), f"{name}: {field}"
        assert name == "pointwise" or replays, f"{name} was not replayed"
        replays.clear()


ANYWHERE: dict[str, Callable[[], None]] = {
    "alone": check_alone,
    "mixed": check_mixed,
    "counts": check_counts,
    "cuts": check_cuts,
    "scales": check_scales,
    "ties": check_ties,
    "rounding": check_rounding,
    "pairs": check_pairs,
    "determinism": check_two_runs_give_the_same_bits,
    "size": check_a_batch_can_be_too_large,
    "prepared": check_other_weights_are_refused,
    "empty": check_empty_batches,
}
GPU_ONLY: dict[str, Callable[[], None]] = {
    **{make.__name__: partial(check_kind, make) for make in KINDS},
    "operator": check_operator,
    "graphs": check_cuda_graphs,
    "compile": check_compile,
    "autocast": check_autocast,
    "input-truncation": check_input_truncation,
    "attacks": check_attacks,
    "replays": check_replays,
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
