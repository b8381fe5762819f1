"""The trimmed product on the GPU: launches the Triton kernels (`triton_kernels`).

Without Triton `serves` is False and the operator takes the blocked torch path. Nothing here waits for the device, so it
can be captured in a CUDA graph. No result depends on the order in which the device works: two runs give the same bits.
Another batch may give other last bits where removed terms are listed: its size chooses the kernels.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import bounds_per_row, check_prepared

LISTED = 15  # the longest list of the walk; more removed terms than this are counted
LEADS = 64  # outlying coordinates of a sample that are listed
LANES = 32
WIDEST = 1 << 14  # the longest row that one program can sort or hold
ASKED = 1 << 20  # products of batch and width from which it pays to ask which side should be walked
NETWORKED = ("walk",)  # kernels with networks among their constants
FLAGS = 3  # what `triton_kernels.pack` notes
TIED = 1024  # samples of which those with ties are listed together
BLOCK = 2048  # samples whose panel stays in the second-level cache

# What was fastest on one H200.
WALKERS, WALK = 24, {"num_warps": 1, "maxnreg": 80}  # programs on a multiprocessor, and how they are compiled
# Where terms are counted: pairs of terms that a lane holds, at most; samples of a program, at most.
WORDS, BLOCKED, SELECT = 16, 64, {"maxnreg": 72, "enable_fp_fusion": False}
# Columns and lefts of a tile, and how often its loop is unrolled.
MASKED, UNROLL, TILED = (8, 512), 4, {"num_warps": 4, "maxnreg": 168}
SHARE = 1024  # samples, at least, of a part of the weight's gradient

_MOST = (1 << 31) - 1

Counts = tuple[tuple[int, int], ...]


@functools.cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def serves(weight: Tensor) -> bool:
    """Whether these kernels take products with this weight."""
    fits = weight.numel() and len(weight) * (weight.shape[1] + 1) <= _MOST and weight.shape[1] <= WIDEST
    return bool(fits) and weight.device.type == "cuda" and weight.dtype == torch.float32 and available()


def marks_of(counts: Counts, d: int, rows: int, n: int) -> int:
    """How many marks `forward` makes for each pair of counts."""
    return (2 if _listed(counts, d) else 1) * rows + n


def _listed(counts: Counts, d: int) -> bool:
    """Whether the removed terms are listed by a walk; else terms are counted.

    A walk is compiled for its counts. Those that differ come from bounds in training, which ask for many in turn.
    """
    return d >= 32 and all(top == bottom <= LISTED for top, bottom in counts)


def prepare(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Order, ranked weight and bound of `Prepared`; the order holds the weight as well, so ranked is empty."""
    order, bound = _ordered(weight.contiguous(), None, None)
    return order, weight.new_empty((0, 0)), bound


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arrays: Sequence[Tensor],
    counts: Counts,
    keep_cuts: bool,
    kept: list[Lanes] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output ``(pairs, n, out)``, cuts and ties ``(pairs, 2, out, n)``, marks ``(pairs, marks_of(...))``; the last
    three empty unless keep_cuts.

    counts: pairs of top and bottom.  kept: gets the samples as they lie in the lanes, which the backward pass can use.
    ties: as in `kernel.forward`.  marks: how deep each row was walked, unless terms were counted; whether each row,
    then each sample, has ties.
    """
    order, _, bound = arrays
    check_prepared(weight, torch.int64, order=order, bound=bound)
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    (n, d), rows, pairs = x.shape, weight.shape[0], len(counts)
    most = _MOST // (pairs * max(d, 2 * rows))
    if n > most:
        if keep_cuts:
            raise ValueError(f"a batch of {n} is too large for a gradient of this layer on the GPU: at most {most}")
        parts = [forward(part, weight, bias, arrays, counts, False) for part in x.split(most)]
        return torch.cat([part[0] for part in parts], 1), *parts[0][1:]
    shape = (pairs, 2, rows, n) if keep_cuts else (pairs, 2, 0, 0)
    cuts, ties = x.new_empty(shape), x.new_zeros(shape, dtype=torch.int32)
    each = marks_of(counts, d, rows, n) if keep_cuts else 0
    if not _listed(counts, d) or n == 0:
        out, marks = x.new_empty(pairs, n, rows), x.new_zeros((pairs, each), dtype=torch.int32)
        if n:
            _select(x, weight, bias, counts, keep_cuts, (out, cuts, ties, marks))
        return out, cuts, ties, marks
    # Marks, tickets for two walks and flags are one buffer: one launch to clear it.
    tickets = 2 * _multiprocessors(x.device) + -(-max(n, rows) // LANES)
    cleared = x.new_zeros(pairs * (each + 2 * tickets) + FLAGS, dtype=torch.int32)
    marks = cleared[: pairs * each].view(pairs, each)
    flags = cleared[len(cleared) - FLAGS :]
    lanes = Lanes.of(x, samples=True, asked=flags)
    if kept is not None:
        kept.append(lanes)
    with _no_autocast(x):
        dense = F.linear(lanes.inner[:, :n].T, weight, bias)
    # Not a view: the next layer may write into its input.
    out = torch.ops.aten._unsafe_view(dense, (1, n, rows)) if pairs == 1 else dense.repeat(pairs, 1, 1)
    for p, (top, _) in enumerate(counts):
        drawn = cleared[pairs * each + p * 2 * tickets :][: 2 * tickets]
        outputs = (out[p] if bias is None else bias, out[p], cuts[p], ties[p], marks[p])
        _walk(Work(x, weight, order, bound, drawn, keep_cuts, bias is not None, outputs), lanes, top)
    return out, cuts, ties, marks


def backward(
    grad: Tensor, saved: Sequence[Tensor], to_x: bool, to_weight: bool, kept: list[Lanes] | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients ``(n, in)`` and ``(out, in)`` through the kept terms; one that is not wanted is empty.

    saved: x, weight, order, bound, cuts, ties, marks.  kept: what `forward` put there; else x is packed again.
    """
    x, weight, order, bound, cuts, ties, marks = saved
    check_prepared(weight, torch.int64, order=order, bound=bound)
    x, weight = x.contiguous(), weight.contiguous()
    (n, d), rows = x.shape, weight.shape[0]
    grad_x = grad_weight = x.new_empty(0)
    if n == 0:
        return torch.zeros_like(x) if to_x else grad_x, torch.zeros_like(weight) if to_weight else grad_weight
    width = _width(d)
    turned = grad.T.contiguous()
    if to_weight and len(marks) == rows + n:
        cuts_across, ties_across = (t.transpose(1, 2).contiguous() for t in (cuts, ties))
        share = max(SHARE, -(-n // 8))
        grad_weight = _masked(grad.contiguous(), weight, x, cuts_across, ties_across, marks[:rows], share)
    elif to_weight:
        lanes = kept[0] if kept else Lanes.of(x, samples=True, asked=marks.new_zeros(FLAGS))
        with _no_autocast(x):
            grad_weight = grad.T @ lanes.inner[:, :n].T
        pieces = -(-n // BLOCK)
        parts = x.new_empty(pieces, rows, d)
        launch(
            "weight_parts", (rows * pieces,), (turned, order, lanes.panel, cuts, marks, parts, n, rows, d),
            (("BLOCK", BLOCK), ("BATCH", 32), ("PLACES", 64)), {"num_warps": 4},
        )  # fmt: skip
        launch(
            "weight_gradient", (rows,),
            (turned, x, weight, order, bound, lanes.panel, lanes.asked, *lanes.leads, cuts, ties, marks, parts,
             marks.new_empty(rows * TIED), grad_weight, n, rows, len(lanes.reach), d, bounds_per_row(d), pieces),
            (("WIDTH", width), ("BATCH", TIED), ("LEADS", LEADS)), {"num_warps": 4},
        )  # fmt: skip
    if to_x:
        grad_x = _masked(turned, x, weight, cuts, ties, marks[-n:], rows)
    return grad_x, grad_weight


def _masked(grad: Tensor, left: Tensor, right: Tensor, cuts: Tensor, ties: Tensor, tied: Tensor, share: int) -> Tensor:
    """Gradient to left through the kept terms. grad ``(rights, lefts)``, cuts and ties ``(2, rights, lefts)``."""
    largest = torch.stack([matrix.abs().amax() for matrix in (left, right)]).amax()
    infinite = (~(largest <= torch.finfo(largest.dtype).max)).int()
    (lefts, d), rights = left.shape, len(right)
    pieces = -(-rights // share)
    parts = left.new_empty(pieces, d, lefts)
    columns, width = (4, 32) if _interpreted() else MASKED
    launch(
        "masked_product", (-(-d // columns) * -(-lefts // width), pieces),
        (grad, left.T.contiguous(), right, cuts, infinite, parts, lefts, rights, d, share),
        (("COLUMNS", columns), ("WIDTH", width), ("UNROLL", UNROLL), ("GPU", not _interpreted())), TILED,
    )  # fmt: skip
    launch(
        "masked_ties", (lefts, pieces), (grad, left, right, cuts, ties, tied, parts, lefts, rights, d, share),
        (("BATCH", 128), ("WIDTH", _width(d))), {"num_warps": 4},
    )  # fmt: skip
    return (parts[0] if pieces == 1 else parts.sum(0)).T.contiguous()


@dataclass(frozen=True)
class Lanes:
    """The rows of a matrix laid out for the lanes: what `triton_kernels.pack` writes."""

    panel: Tensor
    reach: Tensor
    inner: Tensor
    votes: Tensor
    leads: tuple[Tensor, Tensor, Tensor]  # how many coordinates of each row are outlying, where, and their values
    asked: Tensor

    @classmethod
    def of(cls, matrix: Tensor, samples: bool, asked: Tensor) -> Lanes:
        """asked: flags; without the first only samples are laid out."""
        rows, d = matrix.shape
        padded = -(-rows // LANES) * LANES
        width = _width(d)
        together = max(1, (8192 if padded >= 4096 else 4096) // width)
        counted, listed, inside = (padded, LEADS * padded, d) if samples else (0, 0, 0)
        # Two buffers: to allocate takes the host as long as to launch.
        floats, ints = (d * padded, inside * padded, padded, listed), (counted, counted, listed)
        panel, inner, reach, value = matrix.new_empty(sum(floats)).split(floats)
        votes, count, index = matrix.new_empty(sum(ints), dtype=torch.int32).split(ints)
        lanes = cls(panel, reach, inner.view(inside, padded), votes, (count, index, value), asked)
        launch(
            "pack", (-(-padded // together),),
            (matrix, asked, panel, reach, lanes.inner, votes, *lanes.leads, rows, padded, d),
            (("WIDTH", width), ("ROWS", together), ("SAMPLES", samples), ("LEADS", LEADS)),
            {"num_warps": 8, "maxnreg": 128},
        )  # fmt: skip
        return lanes


@dataclass(frozen=True)
class Work:
    """One batch and one weight: what both walks take."""

    x: Tensor
    weight: Tensor
    order: Tensor
    bound: Tensor
    tickets: Tensor  # zeros, for two walks
    keep_cuts: bool
    has_bias: bool
    outputs: tuple[Tensor, ...]  # bias, out, cuts, ties, marks

    def units(self, lanes: int) -> tuple[int, int, int]:
        """Parts of the walkers; units of work (32 lanes and a part), enough for all multiprocessors; their number."""
        tiles, sms = -(-lanes // LANES), _multiprocessors(self.x.device)
        parts = max(1, 2 * sms // tiles)
        return parts, tiles * parts, sms


def _walk(work: Work, samples: Lanes, k: int) -> None:
    """Walks the rows of the weight and, if samples are asked, the samples of those that want it."""
    x, weight = work.x, work.weight
    (n, d), rows, asked = x.shape, len(weight), samples.asked
    ask, sms = n * rows >= ASKED, _multiprocessors(x.device)
    for by_weight in (True, False) if ask else (True,):
        if by_weight:
            order, bound, walkers, others, lanes = work.order, work.bound, weight, x, samples
            # Walkers to a ticket: few where there is little to do.
            share = max(1, min(4, -(-n // LANES) * rows // (8 * sms * WALKERS)))
        else:
            order, bound = _ordered(x, samples.votes, asked)
            walkers, others, lanes, share = x, weight, Lanes.of(weight, samples=False, asked=asked), 1
        launch(
            "walk", (_programs(WALKERS, x.device),),
            (order, bound, walkers, lanes.panel, lanes.reach, others, samples.votes, *samples.leads, *work.outputs,
             work.tickets.chunk(2)[0 if by_weight else 1], asked, len(walkers), len(others), len(lanes.reach), d,
             bounds_per_row(d), *work.units(len(others)), share, n, rows),
            _walk_constants(k, work.keep_cuts, by_weight, ask, work.has_bias, d), WALK,
        )  # fmt: skip


@functools.cache
def _walk_constants(
    k: int, keep_cuts: bool, by_weight: bool, ask: bool, has_bias: bool, d: int
) -> tuple[tuple[str, Any], ...]:
    kernels, step = _kernels(), 8 if by_weight else 16
    merge, places = kernels.merge(k + keep_cuts)  # one more than is removed is listed if ties must be seen
    return (
        ("K", k), ("KEEP", keep_cuts), ("BY_WEIGHT", by_weight), ("ASK", ask), ("HAS_BIAS", has_bias),
        ("WIDTH", _width(d)), ("STEP", step), ("EXACT", d % step == 0), ("SORT", kernels.SORT16),
        ("SORT8", kernels.SORT8), ("MERGE", merge), ("PLACES", places), ("GPU", not _interpreted()),
    )  # fmt: skip


def _select(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: Counts, keep_cuts: bool, outputs: tuple[Tensor, ...]
) -> None:
    """Finds the cuts of each pair among its terms."""
    (n, d), rows = x.shape, len(weight)
    far, largest = (torch.linalg.vector_norm(matrix, torch.inf, 1) for matrix in (x, weight))
    x_both, weight_both = _in_pairs(x), _in_pairs(weight)
    half = x_both.shape[1]
    warps = 1
    while LANES * warps * WORDS < half:
        warps *= 2
    shape = ("WORDS", -(-half // (LANES * warps))), ("LANES", LANES * warps)
    options = {"num_warps": warps, **SELECT}
    scaled, scales = weight.new_empty(rows, 2 * half), weight.new_empty(2, rows)
    launch("scale_rows", (rows,), (x_both, weight_both, scaled, scales, n, rows, half), shape, options)
    share = _share(n, rows, x.device)
    constants = (*shape, ("HAS_BIAS", bias is not None), ("KEEP", keep_cuts), ("GPU", not _interpreted()))
    for (top, bottom), *its in zip(counts, *outputs, strict=True):
        launch(
            "select", (rows * -(-n // share),),
            (x, weight, x_both, scaled.view(torch.int64), scales, far, largest, its[0] if bias is None else bias, *its,
             n, rows, d, half, top, bottom, share),
            constants, options,
        )  # fmt: skip


def _share(n: int, rows: int, device: torch.device) -> int:
    """Samples of a program that counts: fewer where a multiprocessor would get less than 16 programs."""
    return max(1, min(BLOCKED, n * rows // (16 * _multiprocessors(device))))


def _in_pairs(matrix: Tensor) -> Tensor:
    """Two numbers in an int64; a NaN beside an odd one."""
    if matrix.shape[1] % 2:
        matrix = F.pad(matrix, (0, 1), value=torch.nan)
    if matrix.data_ptr() % 8 or matrix.storage_offset() % 2:
        matrix = matrix.clone()
    # A single row is contiguous whatever its stride.
    return matrix.as_strided(matrix.shape, (matrix.shape[1], 1)).view(torch.int64)


def _ordered(matrix: Tensor, votes: Tensor | None, asked: Tensor | None) -> tuple[Tensor, Tensor]:
    """The order and bound of each row; with votes only of those that are wanted."""
    rows, d = matrix.shape
    order = torch.empty(rows, d, dtype=torch.int64, device=matrix.device)
    bound = matrix.new_empty(rows, bounds_per_row(d))
    width = _width(d)
    launch(
        "order_rows", (rows,),
        (matrix, order if votes is None else votes, order if asked is None else asked, order, bound, d,
         bounds_per_row(d)),
        (("WIDTH", width), ("VOTED", votes is not None)), {"num_warps": max(1, width // 2048)},
    )  # fmt: skip
    return order, bound


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _width(d: int) -> int:
    return max(16, 1 << (d - 1).bit_length())


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return 2 if _interpreted() else torch.cuda.get_device_properties(device).multi_processor_count


def _programs(many: int, device: torch.device) -> int:
    """So many on each multiprocessor."""
    return _multiprocessors(device) * (many if device.type == "cuda" else 2)


@functools.cache
def _kernels() -> Any:
    from . import triton_kernels

    return triton_kernels


@functools.cache
def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


_compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # run, function, metadata, values of the constants


def launch(
    name: str,
    grid: tuple[int, ...],
    arguments: tuple[Tensor | int, ...],
    constants: tuple[tuple[str, Any], ...],
    options: dict[str, int],
) -> None:
    """Launches a kernel on the current stream of its tensors' device.

    Triton looks a kernel up by all of its arguments, which takes the host longer than a small layer takes the device.
    So the look-up is done here, by what these kernels are compiled for: the constants, and how some arguments are
    aligned.
    """
    if _interpreted():
        getattr(_kernels(), name)[grid](*arguments, **dict(constants), **options)
        return
    first = arguments[0]
    assert isinstance(first, Tensor)
    # These constants are long, and live as long as the cache they come from.
    kind = id(constants) if name in NETWORKED else constants
    device = first.device.index
    plain = [a if isinstance(a, int) else a.data_ptr() for a in arguments]
    aligned = tuple((plain[i] % 16 == 0, plain[i] == 1) for i in _kernels().ALIGNED[name])
    key = (name, device, kind, aligned, options["num_warps"], options.get("maxnreg"))
    found = _compiled.get(key)
    with nullcontext() if device == torch.cuda.current_device() else torch.cuda.device(device):
        if found is None:
            kernel = getattr(_kernels(), name)[grid](*arguments, **dict(constants), **options)
            _compiled[key] = kernel.run, kernel.function, kernel.packed_metadata, [value for _, value in constants]
        else:
            run, function, metadata, values = found
            stream = torch._C._cuda_getCurrentRawStream(device)
            run(*(*grid, 1, 1)[:3], stream, function, metadata, None, None, None, *plain, *values)
