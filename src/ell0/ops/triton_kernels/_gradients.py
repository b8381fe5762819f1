"""Gradients to the weight and to the samples."""

import triton
import triton.language as tl

from ._language import LANES, any_of, kernel, product_of, weight_of


@triton.jit
def tied_stay(terms, inside, upper, lower, ties, ties2):
    """Which terms of one pair, by rising index, are tied with a cut and stay."""
    many = 1 << 30
    leave = tl.where(ties == 0, many, ties - 1)
    leave2 = tl.where(ties2 == 0, many, ties2 - 1)
    at_upper = inside & (terms == upper)
    at_lower = inside & (terms == lower)
    rank = tl.cumsum(at_upper.to(tl.int32), 0)
    rank2 = tl.cumsum(at_lower.to(tl.int32), 0)
    before = tl.where(upper == lower, leave, 0)
    gone = at_upper & (rank <= leave)
    gone2 = at_lower & (rank2 > before) & (rank2 - before <= leave2)
    return (at_upper | at_lower) & ~gone & ~gone2


@kernel("grad", "panel", "cuts", "samples", "d")
def weight_parts(
    grad, order, panel, cuts, marks, parts, samples, rows, d,
    BLOCK: tl.constexpr, BATCH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Of one row and a block of samples: sums of the kept terms at the walked places, ``parts (blocks, rows, d)``.

    All rows take a block before the next one comes, so that its part of the panel stays in the second-level cache.
    """
    row = tl.program_id(0) % rows
    part = tl.program_id(0) // rows
    grad += row * samples
    cuts += row * samples
    depth = tl.minimum(tl.load(marks + row), d)
    for j in range(0, depth, PLACES):
        place = j + tl.arange(0, PLACES)
        inside = place < depth
        both = tl.load(order + row * d + place, mask=inside, other=0)
        i = (both >> 32).to(tl.int32) // 128
        w = weight_of(both)
        total = tl.full((PLACES, BATCH), 0.0, tl.float32)
        for b in range(part * BLOCK, tl.minimum(part * BLOCK + BLOCK, samples), BATCH):
            lane = b + tl.arange(0, BATCH)
            here = lane < samples
            g = tl.load(grad + lane, mask=here, other=0.0, eviction_policy="evict_first")
            upper = tl.load(cuts + lane, mask=here, other=0.0, eviction_policy="evict_first")
            lower = tl.load(cuts + rows * samples + lane, mask=here, other=0.0, eviction_policy="evict_first")
            at = i[:, None] * LANES + (lane // LANES * d * LANES + lane % LANES)[None, :]
            v = tl.load(panel + at, mask=inside[:, None] & here[None, :], other=0.0)
            term = w[:, None] * v
            keeps = (term < upper[None, :]) & (term > lower[None, :])
            total += tl.where(keeps, g[None, :] * v, 0.0)
        tl.store(parts + (part * rows + row) * d + place, tl.sum(total, 1), mask=inside)


@triton.jit
def _last_to_leave(cut, leave, base, order, panel, depth):
    """Of each lane the index of the last term tied with the cut that leaves, -1 if none does."""
    last = tl.full((LANES,), -1, tl.int32)
    while tl.max(leave, 0) > 0:
        following = tl.full((LANES,), 1 << 30, tl.int32)
        for j in range(0, depth, 64):
            i, term, _ = _walked(order, panel, base, j, depth)
            candidate = (term == cut[None, :]) & (i > last[None, :])
            following = tl.minimum(following, tl.min(tl.where(candidate, i, 1 << 30), 0))
        last = tl.where(leave > 0, following, last)
        leave -= 1
    return last


@triton.jit
def _walked(order, panel, base, j, depth):
    """Index ``(64, lanes)``, term and coordinate at 64 places of an order; NaN for terms beyond the depth."""
    place = j + tl.arange(0, 64)
    both = tl.load(order + place, mask=place < depth, other=0)
    i = tl.broadcast_to(((both >> 32).to(tl.int32) // 128)[:, None], (64, LANES))
    v = tl.load(panel + base[None, :] + i * LANES)
    term = tl.where((place < depth)[:, None], weight_of(both)[:, None] * v, float("nan"))
    return i, term, v


@triton.jit
def _add_tied(
    tied, first, many, grad, x, raw, order, panel, lead_count, cuts, ties, below, out, d, depth, WIDTH: tl.constexpr
):
    """Adds to a row's gradient, for 32 of the samples listed in `tied`, the terms tied with a cut that stay."""
    listed = first + tl.arange(0, LANES)
    here = listed < many
    sample = tl.load(tied + listed, mask=here, other=0)
    g = tl.load(grad + sample, mask=here, other=0.0)
    upper = tl.load(cuts + sample)
    lower = tl.load(cuts + below + sample)
    tie = tl.load(ties + sample, mask=here, other=0)
    tie2 = tl.load(ties + below + sample, mask=here, other=0)
    # Few tied terms of walked coordinates: lanes together. Else one sample after the other.
    few = here & (tie < 8) & (tie2 < 8) & (upper != lower) & (tl.load(lead_count + sample) == 0)
    if any_of(few):
        base = sample // LANES * d * LANES + sample % LANES
        last = _last_to_leave(upper, tl.where(few, tie - 1, 0), base, order, panel, depth)
        last2 = _last_to_leave(lower, tl.where(few, tie2 - 1, 0), base, order, panel, depth)
        for j in range(0, depth, 64):
            i, term, v = _walked(order, panel, base, j, depth)
            stays = (term == upper[None, :]) & (tie > 0)[None, :] & (i > last[None, :])
            stays = stays | ((term == lower[None, :]) & (tie2 > 0)[None, :] & (i > last2[None, :]))
            share = tl.sum(tl.where(stays & few[None, :], g[None, :] * v, 0.0), 1)
            tl.atomic_add(out + tl.max(i, 1), share, mask=share != 0)
    tl.debug_barrier()  # so that the sums have one order
    left = here & ~few
    while any_of(left):
        one = listed == tl.min(tl.where(left, listed, 1 << 30), 0)
        mine = tl.sum(tl.where(one, sample, 0), 0)
        column = tl.arange(0, WIDTH)
        inside = column < d
        v = tl.load(x + mine * d + column, mask=inside, other=0.0)
        stays = tied_stay(
            product_of(tl.load(raw + column, mask=inside, other=0.0), v), inside, tl.load(cuts + mine),
            tl.load(cuts + below + mine), tl.load(ties + mine), tl.load(ties + below + mine),
        )  # fmt: skip
        tl.atomic_add(out + column, tl.load(grad + mine) * v, mask=stays)
        left = left & ~one


@kernel()
def weight_gradient(
    grad, x, weight, order, bound, panel, asked, lead_count, lead_index, lead_value, cuts, ties, marks, parts, tied,
    out, samples, rows, width, d, blocks, count_parts, WIDTH: tl.constexpr, BATCH: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Of one row: ``out (rows, d)`` holds the dense product of ``grad (rows, samples)`` and the panel.

    A place of the order that no sample walked keeps that value; a walked one is added up from its kept terms alone.
    """
    row = tl.program_id(0)
    grad += row * samples
    cuts += row * samples
    ties += row * samples
    below = rows * samples
    raw = weight + row * d
    out += row * d
    depth = tl.minimum(tl.load(marks + row), d)
    most = tl.load(asked + 1)
    lost = tl.load(asked + 2)
    for j in range(0, depth, 64):
        place = j + tl.arange(0, 64)
        inside = place < depth
        i = (tl.load(order + row * d + place, mask=inside, other=0) >> 32).to(tl.int32) // 128
        total = tl.full((64,), 0.0, tl.float32)
        for part in range(0, count_parts):
            total += tl.load(parts + (part * rows + row) * d + place, mask=inside, other=0.0)
        tl.store(out + i, total, mask=inside)
    tl.debug_barrier()
    if most > 0:
        # Outlying coordinates are not in the panel. Few of their terms stay: one after the other.
        for b in range(0, samples, 32):
            lane = b + tl.arange(0, 32)
            here = lane < samples
            count = tl.load(lead_count + lane, mask=here, other=0)
            if tl.max(count, 0) > 0:
                g = tl.load(grad + lane, mask=here, other=0.0)
                upper = tl.load(cuts + lane, mask=here, other=0.0)
                lower = tl.load(cuts + below + lane, mask=here, other=0.0)
                for q in range(0, tl.minimum(tl.max(count, 0), LEADS)):
                    there = (q < count) & (count <= LEADS)
                    i = tl.load(lead_index + q * width + lane, mask=there, other=0)
                    v = tl.load(lead_value + q * width + lane, mask=there, other=0.0)
                    term = product_of(tl.load(raw + i, mask=there, other=0.0), v)
                    left = there & (term < upper) & (term > lower)
                    while any_of(left):
                        one = lane == tl.min(tl.where(left, lane, 1 << 30), 0)
                        at = tl.sum(tl.where(one, i, 0), 0)
                        tl.atomic_add(out + at, tl.sum(tl.where(one, g * v, 0.0), 0))
                        left = left & ~one
                # A sample with too many to list: all of its row.
                left = count > LEADS
                while any_of(left):
                    sample = tl.min(tl.where(left, lane, 1 << 30), 0)
                    column = tl.arange(0, WIDTH)
                    v = tl.load(x + sample * d + column, mask=column < d, other=0.0)
                    at = panel + column * LANES + sample // LANES * d * LANES + sample % LANES
                    p = tl.load(at, mask=column < d, other=0.0)
                    term = product_of(tl.load(raw + column, mask=column < d, other=0.0), v)
                    stays = (term < tl.load(cuts + sample)) & (term > tl.load(cuts + below + sample))
                    stays = stays & (v != p) & (column < d)
                    tl.atomic_add(out + column, tl.load(grad + sample) * v, mask=stays)
                    left = left & (lane != sample)
    if tl.load(marks + rows + row) > 0:
        tied += row * BATCH
        for b in range(0, samples, BATCH):
            lane = b + tl.arange(0, BATCH)
            here = lane < samples
            both = tl.load(ties + lane, mask=here, other=0) + tl.load(ties + below + lane, mask=here, other=0)
            some = here & (both > 0)
            many = tl.sum(some.to(tl.int32), 0)
            if many > 0:
                tl.store(tied + tl.cumsum(some.to(tl.int32), 0) - 1, lane, mask=some)
                tl.debug_barrier()
                for first in range(0, many, LANES):
                    _add_tied(
                        tied, first, many, grad, x, raw, order + row * d, panel, lead_count, cuts, ties, below, out,
                        d, depth, WIDTH,
                    )  # fmt: skip
                tl.debug_barrier()
    largest = tl.load(bound + row * blocks)
    if (lost > 0) | (largest != largest):
        tl.debug_barrier()
        column = tl.arange(0, WIDTH)
        tl.store(out + column, tl.full((WIDTH,), float("nan"), tl.float32), mask=column < d)
