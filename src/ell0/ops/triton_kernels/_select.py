"""Many removed terms, few terms at all, or unequal counts: a warp holds all terms of a pair and counts them.

A program takes one row of the weight and some samples. On each side it looks for a number in half precision beyond
which as many terms lie as leave: rounding keeps the order of terms, so those are the ones that leave. The search begins
at an average of where those of the samples before ended. Terms that half precision does not tell apart are counted as
they are.
"""

from typing import Any

import triton
import triton.language as tl

from ._definition import by_definition, keys_of, value_of
from ._language import LARGEST, kernel, weight_of

STEPS = tl.constexpr(12)  # of a search in half precision
TRIES = tl.constexpr(3)  # terms that are looked at one after the other
LARGEST_HALF, LEAST = tl.constexpr(65504.0), tl.constexpr(2.0**-126)
PROBED = tl.constexpr(4)  # samples whose terms tell the scale


@triton.jit
def _numbers(matrix, row, width, WORDS: tl.constexpr, LANES: tl.constexpr):
    """A row of numbers, two of which lie in one int64. NaN, which no comparison counts, stands behind its end."""
    out = ()
    for r in tl.static_range(WORDS):
        place = r * LANES + tl.arange(0, LANES)
        if r < WORDS - 1:
            both = tl.load(matrix + row * width + place)
        else:
            both = tl.load(matrix + row * width + place, mask=place < width, other=0x7FC000007FC00000)
        out = out + (weight_of(both), weight_of(both >> 32))
    return out


@triton.jit
def _products(a, b):
    out = ()
    for r in tl.static_range(len(a)):
        out = out + (a[r] * b[r],)
    return out


@triton.jit
def _bits(number):
    """In half precision, towards zero; finite."""
    size = tl.abs(number)
    small = (size * 2.0**24).to(tl.int32).to(tl.float32) * 2.0**-24
    cut = (size.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    size = tl.where(size < 2.0**-14, small, tl.where(size == size, tl.minimum(cut, LARGEST_HALF), size))
    return tl.where(number < 0, 0.0 - size, size).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _half(both, SHIFT: tl.constexpr):
    return (both >> SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _halved(a, b, GPU: tl.constexpr):
    """Two numbers in half precision, rounded towards zero, in an int32."""
    if GPU:
        return tl.inline_asm_elementwise(
            "cvt.rz.f16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (_bits(a) & 0xFFFF) | (_bits(b) << 16)


def _raised(compare: str) -> Any:
    """Assembly: a count becomes larger by how many of two numbers compare so with two pivots."""
    return tl.constexpr(
        f"{{ .reg .b32 a, b; mov.b32 b, 0xFFFF; set.{compare}.u32.f16x2 a, $2, $3; dp2a.lo.s32.s32 $0, a, b, $1; }}"
    )


ABOVE, BENEATH = _raised("gt"), _raised("lt")


@triton.jit
def _beyond(halves, pivots, BELOW: tl.constexpr, GPU: tl.constexpr):
    """How many of the numbers lie beyond the pivot: are larger, or, if BELOW, smaller than its negative."""
    count = tl.full(halves[0].shape, 0, tl.int32)
    other = count
    if BELOW:
        pivots ^= -0x7FFF8000
    for r in tl.static_range(len(halves)):
        if GPU:
            more = tl.inline_asm_elementwise(
                BENEATH if BELOW else ABOVE, "=r,r,r,r", [count, halves[r], pivots], dtype=tl.int32, is_pure=True,
                pack=1,
            )  # fmt: skip
        elif BELOW:
            more = count + (_half(halves[r], 0) < _half(pivots, 0)) + (_half(halves[r], 16) < _half(pivots, 0))
        else:
            more = count + (_half(halves[r], 0) > _half(pivots, 0)) + (_half(halves[r], 16) > _half(pivots, 0))
        count, other = other, more
    return tl.sum(count + other, 0)


@triton.jit
def _edge(pivot):
    """The least number that, rounded towards zero, is above the pivot; infinity if the pivot is the largest."""
    bits = pivot.to(tl.int32, bitcast=True)
    next_ = tl.where(pivot < 2.0**-14, pivot + 2.0**-24, (bits + 0x2000).to(tl.float32, bitcast=True))
    next_ = tl.where(pivot < LARGEST_HALF, next_, float("inf"))
    return tl.where(pivot < 0, (bits - 1).to(tl.float32, bitcast=True), next_)


@triton.jit
def _search(halves, k, pivot, gap, BELOW: tl.constexpr, GPU: tl.constexpr):
    """A pivot beyond which k of the numbers lie, found if the second result is 0; else the third and the fourth are
    pivots beyond which more and fewer lie. Then the first pivot, and by how many it was off; how many steps it took, or
    STEPS if it gave up.
    """
    pivots = _halved(pivot, pivot, GPU)
    pivot = _half(pivots, 0)
    first, reach, step = pivot, gap, k * 0
    low, high = pivot * 0 - float("inf"), pivot * 0 + float("inf")
    off = _beyond(halves, pivots, BELOW, GPU) - k
    began = off
    while (off != 0) & (step < STEPS):
        low, high = tl.where(off > 0, pivot, low), tl.where(off > 0, high, pivot)
        pivot = tl.fma(off.to(tl.float32), reach, pivot)
        pivots = _halved(pivot, pivot, GPU)
        pivot = _half(pivots, 0)
        inside = (pivot > low) & (pivot < high)
        if ~inside:
            pivot = 0.5 * (low + high)
            pivots = _halved(pivot, pivot, GPU)
            pivot = _half(pivots, 0)
            inside = (pivot > low) & (pivot < high)
        reach *= 1.2
        step += 1
        if inside:
            off = _beyond(halves, pivots, BELOW, GPU) - k
        else:
            step = k * 0 + STEPS
    return pivot, off, low, high, first, began, step


@triton.jit
def _many(terms, number, BELOW: tl.constexpr, STRICT: tl.constexpr):
    """How many terms are at or beyond the number; if STRICT, beyond it."""
    count = tl.full(terms[0].shape, 0.0, tl.float32)
    for r in tl.static_range(len(terms)):
        if BELOW:
            beyond = terms[r] < 0.0 - number if STRICT else terms[r] <= 0.0 - number
        else:
            beyond = terms[r] > number if STRICT else terms[r] >= number
        count = tl.where(beyond, count + 1.0, count)
    return tl.sum(count.to(tl.int32), 0)


@triton.jit
def _next(terms, number, BELOW: tl.constexpr):
    """The largest term that is not at or beyond the number."""
    found = tl.full(terms[0].shape, float("inf") if BELOW else float("-inf"), tl.float32)
    for r in tl.static_range(len(terms)):
        if BELOW:
            found = tl.where(terms[r] > 0.0 - number, tl.minimum(found, terms[r]), found)
        else:
            found = tl.where(terms[r] < number, tl.maximum(found, terms[r]), found)
    return 0.0 - tl.min(found, 0) if BELOW else tl.max(found, 0)


@triton.jit
def _last(terms, number, BELOW: tl.constexpr):
    """The smallest term that is at or beyond the number; infinity if there is none."""
    found = tl.full(terms[0].shape, float("-inf") if BELOW else float("inf"), tl.float32)
    for r in tl.static_range(len(terms)):
        if BELOW:
            found = tl.where(terms[r] <= 0.0 - number, tl.maximum(found, terms[r]), found)
        else:
            found = tl.where(terms[r] >= number, tl.minimum(found, terms[r]), found)
    return 0.0 - tl.max(found, 0) if BELOW else tl.min(found, 0)


@triton.jit
def _exact(terms, k, low, high, BELOW: tl.constexpr):
    """A number that k terms or more are at or beyond; if some that are equal to it stay, how many leave; how many stay.

    At least k terms are at or beyond low, and fewer at or beyond high.
    """
    cut, reached, tries = high, k * 0, k * 0
    # As a rule the first terms below, of which some may be equal, are enough.
    while (reached < k) & (tries < TRIES):
        cut = _next(terms, cut, BELOW)
        reached = _many(terms, cut, BELOW, False)
        tries += 1
    if reached < k:
        first, last = keys_of(low), keys_of(cut)
        while (reached != k) & (first + 1 < last):
            middle = (first & last) + ((first ^ last) >> 1)
            reached = _many(terms, value_of(middle), BELOW, False)
            first, last = tl.where(reached >= k, middle, first), tl.where(reached >= k, last, middle)
        cut = value_of(first)
        reached = _many(terms, cut, BELOW, False)
    leave = k * 0
    if reached > k:
        leave = k - _many(terms, cut, BELOW, True)
    return cut, leave, reached - k


@triton.jit
def _side(terms, halves, k, pivot, gap, at_zero, BELOW: tl.constexpr, GPU: tl.constexpr):
    """Terms at or beyond the edge leave; of those equal to it so many leave, and so many stay, if some do. Then where
    the search ended.
    """
    zero = k.to(tl.float32) * 0
    edge, leave, stay = zero + float("inf"), k * 0, k * 0
    if k > 0:
        found = k < 0
        if at_zero:
            over, reached = _many(terms, 0.0, BELOW, True), _many(terms, 0.0, BELOW, False)
            found = (over < k) & (k < reached)
            at_zero = found
            if found:
                edge, leave, stay = zero, k - over, reached - k
        if ~found:
            pivot, off, low, high, first, began, step = _search(halves, k, pivot, gap, BELOW, GPU)
            if off == 0:
                edge = _edge(pivot)
            else:
                edge, leave, stay = _exact(terms, k, _edge(low), _edge(high), BELOW)
                at_zero = (edge == 0) & (stay > 0)
                pivot = tl.where(at_zero | ~(tl.abs(edge) < LARGEST_HALF), first, edge)
            if (step > 3) & (tl.abs(began) > 2):
                seen = tl.minimum(tl.maximum((pivot - first) / began.to(tl.float32), 0.25 * gap), 8.0 * gap)
                gap += 0.25 * (seen - gap)
    return edge, leave, stay, pivot, gap, at_zero


@triton.jit
def _kept(terms, lower, upper, GPU: tl.constexpr):
    """The sum of the terms between the edges."""
    zero = tl.full(terms[0].shape, 0.0, tl.float32)
    totals = (zero, zero, zero, zero)
    for r in tl.static_range(len(terms)):
        if GPU:
            total = tl.inline_asm_elementwise(
                """{ .reg .pred p; mov.b32 $0, $1; setp.lt.f32 p, $2, $4; setp.gt.and.f32 p, $2, $3, p;
                @p add.rn.f32 $0, $0, $2; }""",
                "=&f,f,f,f,f", [totals[0], terms[r], lower, upper], dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            total = tl.where((terms[r] < upper) & (terms[r] > lower), totals[0] + terms[r], totals[0])
        totals = totals[1:] + (total,)
    return tl.sum((totals[0] + totals[1]) + (totals[2] + totals[3]), 0)


@triton.jit
def _guess(k, d, size):
    """Where the k-th of d terms would lie, and how far it from the next one, if their distribution were logistic."""
    share = (tl.maximum(k, 1).to(tl.float32) - 0.5) / d
    return 0.625 * size * tl.log((1 - share) / share), size / (1.6 * d * share * (1 - share))


@triton.jit
def _size(terms):
    """How large terms are that are not 0; a few large ones don't matter."""
    root = tl.full(terms[0].shape, 0.0, tl.float32)
    count = root
    for r in tl.static_range(len(terms)):
        size = tl.abs(terms[r])
        root, count = tl.where(size > 0, root + tl.sqrt(size), root), tl.where(size > 0, count + 1.0, count)
    root = tl.sum(root, 0) / tl.maximum(tl.sum(count, 0), 1.0)
    return root * root


@kernel("half")
def scale_rows(x, weight, scaled, scales, n, rows, half, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Brings each row's terms into the range of half precision, by a power of 2.

    scales ``(2, rows)``: the power, and how large terms are after that, as far as some samples tell.
    """
    row = tl.program_id(0)
    w = _numbers(weight, row, half, WORDS, LANES)
    size = tl.program_id(0).to(tl.float32) * 0
    for i in range(PROBED):
        its = _size(_products(_numbers(x, n // PROBED * i, half, WORDS, LANES), w))
        size = tl.where(its < float("inf"), tl.maximum(size, its), size)
    # As a rule the size becomes 16 to 32.
    exponent = tl.minimum(tl.maximum(258 - (size.to(tl.int32, bitcast=True) >> 23), 87), 167)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scales + row, scale)
    tl.store(scales + rows + row, 1.5 * size * scale)
    for r in tl.static_range(2 * WORDS):
        place = r // 2 * LANES + tl.arange(0, LANES)
        tl.store(scaled + row * 2 * half + 2 * place + r % 2, w[r] * scale, mask=place < half)


@kernel("x_both", "scaled", "half")
def select(
    x, weight, x_both, scaled, scales, far, largest, bias, out, cuts, ties, tied, n, rows, d, half, top, bottom, share,
    WORDS: tl.constexpr, LANES: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Value, cuts and tied removals of one row of the weight with `share` samples.

    x_both ``(n, half)`` and scaled ``(rows, half)``: numbers in pairs; an odd one has a NaN beside it.
    far, largest: the largest magnitude of each sample and of each row.  tied: whether each row, then each sample, has
    ties.
    """
    row, first = tl.program_id(0) % rows, tl.program_id(0) // rows * share
    last = tl.minimum(first + share, n)
    scale, size = tl.load(scales + row), tl.load(scales + rows + row)
    # Of the sum of the terms, scaled or not.
    reach = tl.load(largest + row) * tl.maximum(scale, 1.0) * d
    back = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    up, up_gap = _guess(top, d, size)
    down, down_gap = _guess(bottom, d, size)
    up_zero, down_zero = top < 0, bottom < 0
    plane = rows * n
    base = tl.load(bias + row) if HAS_BIAS else 0.0
    for sample in range(first, last):
        away = tl.load(far + sample)
        at = row * n + sample
        sound = away * reach <= LARGEST
        if sound:
            terms = _products(_numbers(x_both, sample, half, WORDS, LANES), _numbers(scaled, row, half, WORDS, LANES))
            halves = ()
            for r in tl.static_range(WORDS):
                halves = halves + (_halved(terms[2 * r], terms[2 * r + 1], GPU),)
            upper, leave, stay, end, up_gap, up_zero = _side(terms, halves, top, up, up_gap, up_zero, False, GPU)
            lower, leave2, stay2, end2, down_gap, down_zero = _side(
                terms, halves, bottom, down, down_gap, down_zero, True, GPU
            )
            # An average of where the searches ended.
            part = tl.where(sample == first, 1.0, 0.25)
            up, down = tl.fma(part, end - up, up), tl.fma(part, end2 - down, down)
            value = _kept(terms, 0.0 - lower, upper, GPU)
            if KEEP:
                upper, lower = _last(terms, upper, False), _last(terms, lower, True)
                # The definition's terms are not scaled: there are ties where they vanish.
                small, small2 = tl.abs(upper) * back < LEAST, tl.abs(lower) * back < LEAST
                sound = ~((small & (upper != 0)) | (small2 & (lower != 0)))
            lower = 0.0 - lower
            one = (upper == lower) & (stay > 0)
            if (stay > 0) | (stay2 > 0):
                stay = tl.where(one, stay - leave2, stay)
                stay2 = tl.where(one, 0, stay2)
                value += tl.where(stay > 0, stay.to(tl.float32) * upper, 0.0)
                value += tl.where(stay2 > 0, stay2.to(tl.float32) * lower, 0.0)
            tl.store(out + sample * rows + row, value * back + base)
            if KEEP:
                tl.store(cuts + at, upper * back)
                tl.store(cuts + plane + at, lower * back)
                tie = tl.where(stay > 0, leave + 1, 0)
                tie2 = tl.where((stay2 > 0) | one, leave2 + 1, 0)
                if sound & ((tie != 0) | (tie2 != 0)):
                    tl.store(ties + at, tie)
                    tl.store(ties + plane + at, tie2)
                    tl.atomic_max(tied + row, 1)
                    tl.atomic_max(tied + rows + sample, 1)
        if ~sound:
            if (away != away) | (reach != reach):
                tl.store(out + sample * rows + row, float("nan"))
                if KEEP:
                    tl.store(cuts + at, float("nan"))
                    tl.store(cuts + plane + at, float("nan"))
            else:
                by_definition(
                    weight + row * d, x, bias + row, sample, 1 + row * 0, d, top, bottom, out + row, rows,
                    cuts + row * n, 1, plane, ties + row * n, tied + row, tied + rows, HAS_BIAS, True, KEEP,
                )  # fmt: skip
