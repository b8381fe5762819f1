"""What is learnt of a matrix: the order of its rows, and its numbers turned over for the lanes."""

import triton.language as tl

from ._language import CHUNK, INFINITE, LANES, LARGEST, any_of, kernel


@kernel()
def order_rows(matrix, votes, asked, order, bound, d, blocks, WIDTH: tl.constexpr, VOTED: tl.constexpr):
    """Orders a row by falling magnitude, up to the last bits of the mantissa, where the index sits while sorting.

    order: in the upper half of each number the byte at which the coordinate begins in a panel, 128 times its index; in
    the lower half the weight. bound: no magnitude from each sixteenth
    place on is larger; NaN first if the row has a NaN. VOTED: only if its 32 rows all ask for it, which is noted.
    """
    row = tl.program_id(0)
    wanted = 1
    if VOTED:
        wanted = tl.min(tl.load(votes + row // LANES * LANES + tl.arange(0, LANES)), 0)
    if wanted > 0:
        if VOTED:
            tl.store(asked, 1)
        place = tl.arange(0, WIDTH)
        inside = place < d
        bits = tl.load(matrix + row * d + place, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        undefined = tl.max((bits > INFINITE).to(tl.int32), 0)
        low = WIDTH - 1
        key = tl.where(inside, (bits & ~low) | place, -1)
        key = tl.sort(key, descending=True)
        index = key & low
        weight = tl.load(matrix + row * d + index, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        both = ((index * 128).to(tl.int64) << 32) | (weight.to(tl.int64) & 0xFFFFFFFF)
        tl.store(order + row * d + place, both, mask=inside)
        reach = tl.minimum(key | low, INFINITE).to(tl.float32, bitcast=True)
        reach = tl.where((undefined > 0) & (place == 0), float("nan"), reach)
        tl.store(bound + row * blocks + place // CHUNK, reach, mask=inside & (place % CHUNK == 0))


@kernel("matrix", "panel", "inner", "d", "width")
def pack(
    matrix, asked, panel, reach, inner, votes, lead_count, lead_index, lead_value, rows, width, d,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SAMPLES: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Turns a matrix over, ``panel (width / 32, d, 32)``, so that its rows lie in the lanes; zeros fill the last ones.

    reach: the largest magnitude in the panel, NaN if the row has a NaN. Of SAMPLES the outlying coordinates become
    zeros there and in ``inner (d, width)``, and are listed; a vote says that few coordinates are large. Other matrices
    are packed only if somebody asked. asked: that flag; whether a coordinate is outlying, a sample undefined.
    """
    if not SAMPLES:
        if tl.load(asked) == 0:
            return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < d)[None, :]
    x = tl.load(matrix + row[:, None] * d + column[None, :], mask=inside, other=0.0)
    size = tl.abs(x)
    undefined = tl.max((x != x).to(tl.int32), 1) > 0
    x = tl.where(undefined[:, None], 0.0, x)
    if SAMPLES:
        size = tl.where(undefined[:, None], 0.0, size)
        finite = size <= LARGEST
        peak = tl.max(tl.where(finite, size, 0.0), 1)
        near = tl.sum((finite & (size > (peak / 8)[:, None])).to(tl.int32), 1)
        limit = tl.full((ROWS,), LARGEST, tl.float32)
        odd = (near <= LEADS) & (peak > 0)
        if any_of(odd):
            # Eight times the magnitude that follows the LEADS largest; or the median, where few are not zero.
            bits = tl.where(finite, size, 0.0).to(tl.int32, bitcast=True)
            rank = tl.minimum(tl.sum((bits > 0).to(tl.int32), 1) // 2, LEADS) + 1
            low = tl.full((ROWS,), 0, tl.int32)
            for step in tl.static_range(15):
                middle = low | (1 << (30 - step))
                enough = tl.sum((bits >= middle[:, None]).to(tl.int32), 1) >= rank
                low = tl.where(enough, middle, low)
            found = low.to(tl.float32, bitcast=True)
            limit = tl.where(odd & (found <= LARGEST / 8), found * 8, limit)
        outlying = size > limit[:, None]
        count = tl.sum(outlying.to(tl.int32), 1)
        if tl.max(count, 0) > 0:
            place = tl.cumsum(outlying.to(tl.int32), 1) - 1
            listed = outlying & (place < LEADS) & inside
            at = place * width + row[:, None]
            tl.store(lead_index + at, tl.broadcast_to(column[None, :], (ROWS, WIDTH)), mask=listed)
            tl.store(lead_value + at, x, mask=listed)
        x = tl.where(outlying, 0.0, x)
        size = tl.where(outlying, 0.0, size)
        most = tl.max(size, 1)
        few = tl.sum((size > (most / 2)[:, None]).to(tl.int32), 1) * 4 < d
        tl.store(lead_count + row, count, mask=row < width)
        if tl.max(count, 0) > 0:
            tl.atomic_max(asked + 1, 1)
        if any_of(undefined):
            tl.atomic_max(asked + 2, 1)
        turned = inner + row[:, None] + column[None, :] * width
        tl.store(turned, x, mask=(column < d)[None, :] & (row < width)[:, None])
        tl.store(votes + row, ((few & (count == 0)) | (row >= rows)).to(tl.int32), mask=row < width)
    most = tl.max(tl.abs(x), 1)
    tl.store(reach + row, tl.where(undefined, float("nan"), most), mask=row < width)
    at = panel + (row // LANES * d * LANES + row % LANES)[:, None] + column[None, :] * LANES
    tl.store(at, x, mask=(column < d)[None, :] & (row < width)[:, None])
