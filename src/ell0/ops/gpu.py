"""The trimmed product on the GPU: launches the Triton kernels (`triton_kernels`).

Without Triton `serves` is False and the operator takes the blocked torch path. Nothing here waits for the device, so it
can be captured in a CUDA graph. No result depends on the order in which the device works: two runs give the same bits.
Another batch may give other last bits: its size chooses the kernels, its samples where terms are counted.
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
WIDEST = 1 << 14  # the longest row that one program can sort
ASKED = 1 << 20  # products of batch and width from which it pays to ask which side should be walked
NETWORKED = ("walk", "select", "cut_bands")  # kernels with networks among their constants
FLAGS = 3  # what `triton_kernels.pack` notes
TIED = 1024  # samples of which those with ties are listed together
BLOCK = 2048  # samples whose panel stays in the second-level cache

# Share of the terms: if more leave, they are counted in tiles (`_count`), at a price that hardly grows, not row by row
# (`_select`), which takes what leaves out of the dense product. Where little stays that is unsound, and each pair is
# done by the definition. Tiles pay earlier where pairs are many: their guess takes a millisecond. For 64 of 784 on each
# side, 8,192 samples and 1,568 rows, an H200 took, times the dense layer's time, row by row 55 (MNIST), 69 (Gaussian)
# and 766 (80 % zeros), in tiles 32, 31 and 30.
MANY, EARLY, PAIRS = 0.42, 0.1, 1 << 21
WIDE = 1 << 15  # rows of the weight up to which there is memory for tiles
EXACT = 2048  # terms that can be counted in half precision

# What was fastest on one H200.
WALKERS, WALK = 24, {"num_warps": 1, "maxnreg": 80}  # programs on a multiprocessor, and how they are compiled
SELECTORS, SELECT = 20, {"num_warps": 1, "maxnreg": 96}
# That count before the bands are laid. After two an H200 did 0 to 3 % of the benchmark's pairs by the definition (12 %
# for k = 391 with outlying coordinates), after one 24 to 30 %.
PASSES = 2
LEARNT = 1024  # pairs that the guess is learnt from
RIDGE = 1e-2
STEEP = 2.0**15
# Samples that are counted together, and pairs: there are 256 bytes for the terms in bands of each.
CHUNK, CHUNK_PAIRS = 2048, 1 << 22
# Terms in both bands of a pair: sorted with those of other pairs; sorted apart; and places for a list, which ends when
# 16 are left.
LIST, LONG, SLOTS = 32, 48, 64
DEFINERS, DEFINE = 16, {"num_warps": 1, "maxnreg": 128}
# Rows and samples (or columns and lefts) of a tile, and how often its loop is unrolled.
COUNT, SUM, MASKED, UNROLL = (8, 256), (2, 512), (8, 512), 4
# Differences of rounded products must not be fused.
TILED = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": False}
SHARE = 2048  # samples, at least, of a part of the weight's gradient

_MOST = (1 << 31) - 1

Counts = tuple[tuple[int, int], ...]


@functools.cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def serves(weight: Tensor) -> bool:
    """Whether these kernels take products with this weight."""
    fits = 0 < weight.numel() <= _MOST and weight.shape[1] <= WIDEST
    return weight.device.type == "cuda" and weight.dtype == torch.float32 and fits and available()


def marks_of(counts: Counts, d: int, rows: int, n: int) -> int:
    """How many marks `forward` makes for each pair."""
    return (1 if _tiled(counts, d, rows, n) else 2) * rows + n


def _listed(counts: Counts, d: int) -> bool:
    """Whether the removed terms are listed by a walk; else terms are counted.

    A walk is compiled for its counts. Those that differ come from bounds in training, which ask for many in turn.
    """
    return d >= 32 and all(top == bottom <= LISTED for top, bottom in counts)


def _tiled(counts: Counts, d: int, rows: int, n: int) -> bool:
    """Whether terms are counted in tiles."""
    if _listed(counts, d) or d > EXACT or rows > WIDE:
        return False
    most = max(top + bottom for top, bottom in counts)
    # Last, what depends on the batch: most layers compile for any.
    return most > MANY * d or (most > EARLY * d and n * rows >= PAIRS)


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

    counts: pairs of top and bottom. Where terms are counted, pairs share what they can.  kept: gets the samples as they
    lie in the lanes, which the backward pass can use.
    ties: as in `kernel.forward`.  marks: how deep each row was walked, unless terms were counted in tiles; whether each
    row, then each sample, has ties.
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
    # Marks, tickets for two kernels and flags are one buffer: one launch to clear it.
    each = marks_of(counts, d, rows, n) if keep_cuts else 0
    tickets = 2 * _multiprocessors(x.device) + -(-max(n, rows) // LANES)
    cleared = x.new_zeros(pairs * (each + 2 * tickets) + FLAGS, dtype=torch.int32)
    marks = cleared[: pairs * each].view(pairs, each)
    if n == 0:
        return x.new_empty(pairs, n, rows), cuts, ties, marks
    flags = cleared[len(cleared) - FLAGS :]
    lanes = Lanes.of(x, samples=True, asked=flags)
    if kept is not None:
        kept.append(lanes)
    if _tiled(counts, d, rows, n):
        out = x.new_empty(pairs, n, rows)
        outputs = (out if bias is None else bias, out, cuts, ties, marks)
        _count(Work(x, weight, order, bound, flags, keep_cuts, bias is not None, outputs), lanes, counts)
        return out, cuts, ties, marks
    with _no_autocast(x):
        dense = F.linear(lanes.inner[:, :n].T, weight, bias)
    # Not a view: the next layer may write into its input.
    out = torch.ops.aten._unsafe_view(dense, (1, n, rows)) if pairs == 1 else dense.repeat(pairs, 1, 1)
    listed = _listed(counts, d)
    together = 1 if listed else 2
    for p in range(0, pairs, together):
        some = slice(p, p + together)
        at = pairs * each + p * 2 * tickets
        drawn = cleared[at : at + 2 * tickets]
        outputs = (out[some] if bias is None else bias, out[some], cuts[some], ties[some], marks[some])
        work = Work(x, weight, order, bound, drawn, keep_cuts, bias is not None, outputs)
        if listed:
            _walk(work, lanes, counts[p][0])
        else:
            _select(work, lanes, counts[some])
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
    columns, width = _tile(MASKED)
    launch(
        "masked_product", (-(-d // columns) * -(-lefts // width), pieces),
        (grad, left.T.contiguous(), right, cuts, infinite, parts, lefts, rights, d, share),
        (("COLUMNS", columns), ("WIDTH", width), ("UNROLL", UNROLL)), TILED,
    )  # fmt: skip
    out = (parts[0] if pieces == 1 else parts.sum(0)).T.contiguous()
    launch(
        "masked_ties", (lefts,), (grad, left, right, cuts, ties, tied, out, lefts, rights, d),
        (("BATCH", 128), ("WIDTH", _width(d))), {"num_warps": 4},
    )  # fmt: skip
    return out


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
    """One batch and one weight: what a walk and a selection both take."""

    x: Tensor
    weight: Tensor
    order: Tensor
    bound: Tensor
    tickets: Tensor  # zeros, for two kernels
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


def _select(work: Work, lanes: Lanes, counts: Counts) -> None:
    (n, d), rows = work.x.shape, len(work.weight)
    programs = _programs(SELECTORS, work.x.device)
    pairs = (*counts, (0, 0))
    scratch = work.x.new_empty(programs * 2 * _kernels().CANDIDATES.value * LANES)
    launch(
        "select", (programs,),
        (work.order, work.bound, work.weight, lanes.panel, lanes.reach, work.x, *lanes.leads, *work.outputs,
         work.tickets, scratch, rows, n, len(lanes.reach), d, bounds_per_row(d), *work.units(n), *pairs[0], *pairs[1]),
        _select_constants(len(counts), work.keep_cuts, work.has_bias, d), SELECT,
    )  # fmt: skip


@functools.cache
def _select_constants(pairs: int, keep_cuts: bool, has_bias: bool, d: int) -> tuple[tuple[str, Any], ...]:
    kernels = _kernels()
    merge, places = kernels.merge(16)
    return (
        ("PAIRS", pairs), ("KEEP", keep_cuts), ("HAS_BIAS", has_bias), ("SHORT", d < 32), ("EXACT", d % 16 == 0),
        ("PASSES", 12), ("SORT", kernels.SORT16), ("MERGE", merge), ("PLACES", places), ("GPU", not _interpreted()),
    )  # fmt: skip


def _count(work: Work, lanes: Lanes, counts: Counts) -> None:
    """Finds the cuts of all pairs by counting, for a chunk of samples at a time."""
    x, weight, keep = work.x, work.weight, work.keep_cuts
    bias, out, cuts, ties, marks = work.outputs
    (n, d), rows, asked = x.shape, len(weight), lanes.asked
    turned, zeros = weight.T.contiguous(), (lanes.inner == 0).sum(0, dtype=torch.int32)
    # For the counts in half precision: numbers up to 1, and samples so steep that differences are 0 or 1.
    scale_x, scale_w = (_scale(largest) for largest in (lanes.reach, work.bound[:, 0]))
    inner, scaled = lanes.inner * scale_x, weight * scale_w.unsqueeze(1)
    halves = (inner * STEEP).half().view(torch.int32)
    twice = scaled.T.half().view(torch.int16).int()
    twice = ((twice << 16) | (twice & 0xFFFF)).contiguous()
    guesses = [_learn(x, inner, scaled, scale_x, pair) for pair in counts]
    of_weight = _moments(scaled, 0, d)
    scale_x = scale_x * STEEP
    definers = _programs(DEFINERS, x.device)
    width = len(lanes.reach)
    size, across = _tile(SUM)
    room = SLOTS * size * across  # of the lists of a tile
    most = min(CHUNK, max(across, CHUNK_PAIRS // rows // across * across))
    for first in range(0, n, most):
        chunk = min(most, n - first)
        shape = (rows, chunk)
        with _no_autocast(x):
            moments = torch.bmm(of_weight, _moments(inner, first, chunk))
        edges, sums = (x.new_empty(many, *shape) for many in (4, 1))
        tiles = -(-chunk // across) * -(-rows // size)
        even = chunk + chunk % 2
        bars, counted, state = (x.new_empty(many, rows, even, dtype=torch.float16) for many in (2, 2, 10))
        found = x.new_empty(2, *shape, dtype=torch.int32)
        # So that no list goes on where the upper half of its addresses would change.
        aligned = x.new_empty((tiles + 1) * room)
        lists = aligned[-aligned.data_ptr() // 4 % room :]
        for pair, (top, bottom) in enumerate(counts):
            cells = (-(-rows * chunk // 1024),)
            launch(
                "guess_pivots", (-(-rows * chunk // 512),),
                (moments, zeros, lanes.leads[0], *guesses[pair], bars, state, first, chunk, rows, d, top, bottom),
                (("SIZE", 512), ("STEEP", STEEP)), {"num_warps": 4},
            )  # fmt: skip
            for number in range(PASSES):
                high, wide = _tile(COUNT)
                launch(
                    "count_terms", (-(-even // (2 * wide)) * -(-rows // high),),
                    (halves, twice, bars.view(torch.int32), counted.view(torch.int32), first // 2, even // 2, rows,
                     width // 2, d),
                    (("ROWS", high), ("WIDTH", wide), ("UNROLL", UNROLL), ("GPU", not _interpreted())), TILED,
                )  # fmt: skip
                launch(
                    "move_pivots", cells,
                    (counted, weight, zeros, *lanes.leads, asked, scale_x, scale_w, bars, state, edges,
                     first, chunk, rows, width, d, top, bottom),
                    (("SIZE", 1024), ("FIRST", number == 0), ("LAST", number == PASSES - 1), ("LEADS", LEADS)),
                    {"num_warps": 4},
                )  # fmt: skip
            launch(
                "sum_between", (tiles,),
                (lanes.inner, turned, edges, sums, found, lists, first, chunk, rows, width, d),
                (("ROWS", size), ("WIDTH", across), ("UNROLL", UNROLL), ("SLOTS", SLOTS), ("GPU", not _interpreted())),
                TILED,
            )  # fmt: skip
            odds, longer = x.new_zeros(2, 1 + tiles * size * across, dtype=torch.int32)
            for again, programs in ((False, tiles * size * across // 128), (True, definers)):
                launch(
                    "cut_bands", (programs,),
                    (weight, work.bound, lanes.reach, zeros, *lanes.leads, asked, found, edges, sums, lists,
                     bias, out[pair], cuts[pair], ties[pair], marks[pair], odds, longer,
                     first, n, chunk, rows, width, d, bounds_per_row(d), top, bottom),
                    _cut_constants(size, across, again, work.has_bias, keep), {"num_warps": 4},
                )  # fmt: skip
            launch(
                "odd_pairs", (definers,),
                (weight, x, bias, out[pair], cuts[pair], ties[pair], marks[pair], odds, edges,
                 first, n, chunk, rows, d, top, bottom, definers),
                (("WIDTH", _width(d)), ("HAS_BIAS", work.has_bias), ("KEEP", keep)), DEFINE,
            )  # fmt: skip


@functools.cache
def _cut_constants(size: int, across: int, again: bool, bias: bool, keep: bool) -> tuple[tuple[str, Any], ...]:
    kernels = _kernels()
    (merge, places), (merge2, places2) = kernels.merge(LIST), kernels.merge(LONG)
    return (
        ("ROWS", size), ("WIDTH", across), ("SIZE", 128), ("LIST", LONG if again else LIST), ("SLOTS", SLOTS),
        ("AGAIN", again), ("LEADS", LEADS), ("HAS_BIAS", bias), ("KEEP", keep), ("SORT", kernels.SORT16),
        ("MERGE", merge), ("PLACES", places), ("MERGE2", merge2), ("PLACES2", places2),
    )  # fmt: skip


def _moments(numbers: Tensor, first: int, many: int) -> Tensor:
    """Of some columns of numbers ``(a, b)``: ``(8, a, many)`` in bfloat16, whose products are those of the terms:
    squares, then themselves, cubes, fourth powers, magnitudes, signs, and roots of magnitudes without sign and with it.
    """
    out = numbers.new_empty((8, len(numbers), many), dtype=torch.bfloat16)
    launch(
        "powers", (-(-out[0].numel() // 1024),), (numbers, out, len(numbers) * many, numbers.shape[1], first, many),
        (("SIZE", 1024),), {"num_warps": 4},
    )  # fmt: skip
    return out


def _learn(x: Tensor, inner: Tensor, scaled: Tensor, scale_x: Tensor, counts: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """What `guess_pivots` takes: centre ``(2, 7)``, and how pivots and gaps follow from the moments of the terms, by
    least squares over some pairs.

    inner ``(d, width)`` and scaled ``(rows, d)``: samples without outlying coordinates and weight, scaled.
    """
    (n, d), rows = x.shape, len(scaled)
    which = torch.arange(LEARNT, device=x.device)
    sample, row = which * n // LEARNT, which * 7919 % rows
    right = scaled[row]
    every = x[sample] * scale_x[sample].unsqueeze(1) * right
    fine = every.isfinite().all(1)
    terms = (inner.T[sample] * right).nan_to_num(0.0, 0.0, 0.0)
    size, sign = terms.abs(), terms.sign()
    # Terms of outlying coordinates end with the others: they must not widen gaps.
    most = size.amax(1, keepdim=True)
    fell = every.nan_to_num(0.0, 0.0, 0.0).clamp(-most, most).sort(1, descending=True).values
    square, root = terms * terms, size.sqrt()
    unit = square.mean(1, keepdim=True).sqrt().clamp(min=1e-8)
    shaped = (terms / unit, terms * square / unit**3, (square / unit**2) ** 2, size / unit, sign, root / unit**0.5,
              sign * root / unit**0.5)  # fmt: skip
    shapes = torch.stack([each.mean(1) for each in shaped], 1)
    centre = torch.stack([shapes.mean(0), shapes.std(0) + 1e-4])
    shapes = ((shapes - centre[0]) / centre[1]).clamp(-4, 4)
    some, other = torch.triu_indices(7, 7, device=x.device)
    known = torch.cat([torch.ones_like(unit), shapes, shapes[:, some] * shapes[:, other]], 1).double()
    systems, gaps = [], []
    for k, sorted_ in zip(counts, (fell, -fell.flip(1)), strict=True):
        # Where the cut is 0, the zeros of the sample tell.
        cut, next_ = sorted_[:, max(k, 1) - 1], sorted_[:, max(k, 1)]
        counted = (fine & (cut != 0)).double().unsqueeze(1)
        low, high = max(k - 9, 0), min(k + 8, d - 1)
        gap = (sorted_[:, low] - sorted_[:, high]) / (high - low)
        wanted = torch.stack([0.5 * (cut + next_), gap], 1) / unit
        gaps.append((wanted[:, 1:] * counted).sum() / counted.sum().clamp(min=1))
        both = torch.cat([known, wanted.double()], 1)
        system = F.pad((known * counted).T @ both, (0, 64 - both.shape[1], 0, 64 - known.shape[1]))
        systems.append(system)
    held = torch.stack(systems)
    held.diagonal(dim1=1, dim2=2).add_(RIDGE)
    columns = known.shape[1]
    learnt = x.new_empty(2 * columns * 2 + 2)
    launch("solve", (2,), (held, learnt, columns, 2), (("TILE", 64),), {"num_warps": 4})
    learnt[-2:] = torch.stack(gaps)
    return centre, learnt


def _scale(largest: Tensor) -> Tensor:
    """A power of 2 that brings numbers up to the largest to 1 or less; 1 if it is 0, infinite or undefined."""
    scale = torch.exp2(-torch.ceil(torch.log2(largest)))
    return torch.where((largest > 0) & (largest < torch.inf), scale, 1.0)


def _tile(size: tuple[int, int]) -> tuple[int, int]:
    """In Triton's interpreter shapes are small."""
    return (4, 32) if _interpreted() else size


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
