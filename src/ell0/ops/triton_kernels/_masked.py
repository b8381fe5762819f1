"""Gradients as masked products: each term is made again, and the cuts decide whether it stayed."""

import triton
import triton.language as tl

from ._gradients import tied_stay
from ._language import any_of, kernel, product_of


@triton.jit
def _with_kept(total, g, w, v, upper, lower, GPU: tl.constexpr):
    """Adds ``g * w`` where the term ``w * v`` lies between the cuts."""
    if GPU:
        # Predicated, as Triton would not.
        return tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .f32 t; mov.b32 $0, $1; mul.rn.f32 t, $3, $4;
            setp.lt.f32 p, t, $5; setp.gt.and.f32 p, t, $6, p; @p fma.rn.f32 $0, $2, $3, $0; }""",
            "=&f,f,f,f,f,f,f", [total, g, w, v, upper, lower], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        term = w * v
        return tl.where((term < upper) & (term > lower), total + g * w, total)


@kernel("grad", "left", "right", "cuts", "parts", "lefts", "d")
def masked_product(
    grad, left, right, cuts, infinite, parts, lefts, rights, d, share,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """``parts (pieces, d, lefts)``: sums over each `share` of the rights of grad times right, where the term stayed.

    One of ``left (d, lefts)`` and ``right (rights, d)`` is x, the other the weight; ``grad (rights, lefts)`` and
    ``cuts (2, rights, lefts)``.
    infinite: 1 where a number may be. Terms tied with a cut are left to `masked_ties`.
    """
    tiles = (d + COLUMNS - 1) // COLUMNS
    lane = (tl.program_id(0) // tiles * WIDTH + tl.arange(0, WIDTH))[None, :]
    column = (tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS))[:, None]
    here, there = lane < lefts, column < d
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, rights)
    v = tl.load(left + column * lefts + lane, mask=here & there, other=0.0)
    total = tl.full((COLUMNS, WIDTH), 0.0, tl.float32)
    below = rights * lefts
    if tl.load(infinite) == 0:
        for r in tl.range(first, end, loop_unroll_factor=UNROLL):
            g = tl.load(grad + r * lefts + lane, mask=here, other=0.0)
            upper = tl.load(cuts + r * lefts + lane, mask=here, other=0.0)
            lower = tl.load(cuts + below + r * lefts + lane, mask=here, other=0.0)
            w = tl.load(right + r * d + column, mask=there, other=0.0)
            total = _with_kept(total, g, w, v, upper, lower, GPU)
    else:
        for r in range(first, end):
            g = tl.load(grad + r * lefts + lane, mask=here, other=0.0)
            upper = tl.load(cuts + r * lefts + lane, mask=here, other=0.0)
            lower = tl.load(cuts + below + r * lefts + lane, mask=here, other=0.0)
            w = tl.broadcast_to(tl.load(right + r * d + column, mask=there, other=0.0), (COLUMNS, WIDTH))
            term = product_of(w, v)
            stays = (term < upper) & (term > lower)
            # Where the cut is NaN the choice of terms is undefined.
            total += tl.where(upper != upper, float("nan"), tl.where(stays, g * w, 0.0))
    tl.store(parts + tl.program_id(1) * lefts * d + column * lefts + lane, total, mask=here & there)


@kernel()
def masked_ties(
    grad, left, right, cuts, ties, tied, parts, lefts, rights, d, share, BATCH: tl.constexpr, WIDTH: tl.constexpr
):
    """Adds to the parts of `masked_product` for one left the terms that are tied with a cut and stay.

    tied: whether each left has some.
    """
    mine = tl.program_id(0)
    if tl.load(tied + mine) > 0:
        column = tl.arange(0, WIDTH)
        inside = column < d
        below = rights * lefts
        begin = tl.program_id(1) * share
        end = tl.minimum(begin + share, rights)
        v = tl.load(left + mine * d + column, mask=inside, other=0.0)
        its = parts + tl.program_id(1) * lefts * d + column * lefts + mine
        extra = tl.load(its, mask=inside, other=0.0)
        for first in range(begin, end, BATCH):
            r = first + tl.arange(0, BATCH)
            at = r * lefts + mine
            some = tl.load(ties + at, mask=r < end, other=0) | tl.load(ties + below + at, mask=r < end, other=0)
            while any_of(some != 0):
                one = tl.min(tl.where(some != 0, r, 1 << 30), 0)
                at_one = one * lefts + mine
                w = tl.load(right + one * d + column, mask=inside, other=0.0)
                stays = tied_stay(
                    product_of(w, v), inside, tl.load(cuts + at_one), tl.load(cuts + below + at_one),
                    tl.load(ties + at_one), tl.load(ties + below + at_one),
                )  # fmt: skip
                extra += tl.where(stays, tl.load(grad + at_one) * w, 0.0)
                some = tl.where(r == one, 0, some)
        tl.store(its, extra, mask=inside)
