"""What all kernels are written in: constants, how they are compiled, terms, and who does what."""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import smid

LANES = tl.constexpr(32)
CHUNK = tl.constexpr(16)  # terms a network takes at a time
LARGEST = tl.constexpr(3.4028234663852886e38)
INFINITE = tl.constexpr(0x7F800000)  # its bits; a NaN's are above


ALIGNED: dict[str, tuple[int, ...]] = {}
"""Arguments, by place, that a kernel is compiled for: whether they are divisible by 16, or equal to 1."""


def kernel(*aligned: str) -> Callable[[Callable[..., None]], Any]:
    """A kernel that is compiled for its constants and for how these arguments are aligned, nothing else: a batch that
    shrinks from query to query costs no compilation, and no look-up by the values of the arguments.
    """

    def compiled(function: Callable[..., None]) -> Any:
        names = [name for name, kind in inspect.get_annotations(function).items() if "constexpr" in str(kind)]
        arguments = [name for name in inspect.signature(function).parameters if name not in names]
        others = [name for name in arguments if name not in aligned]
        ALIGNED[function.__name__] = tuple(arguments.index(name) for name in aligned)
        return triton.jit(function, do_not_specialize=others, do_not_specialize_on_alignment=others)

    return compiled


@triton.jit
def product_of(a, b):
    return tl.where((a == 0) | (b == 0), 0.0, a * b + 0.0)


@triton.jit
def any_of(mask):
    return tl.max(mask.to(tl.int32), 0) > 0


@triton.jit
def bits_of(mask):
    """A mask of lanes as one number."""
    return tl.sum(mask.to(tl.int32) << tl.arange(0, LANES), 0)


@triton.jit
def _coordinate(panel, both):
    """What a panel holds at a place of an order. With bytes the address takes the least arithmetic."""
    at = panel.to(tl.pointer_type(tl.int8), bitcast=True) + (both.to(tl.uint64) >> 32)
    return tl.load(at.to(tl.pointer_type(tl.float32), bitcast=True))


@triton.jit
def weight_of(both):
    return both.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def terms_at(order, panel, j, d, beyond, SIZE: tl.constexpr, EXACT: tl.constexpr):
    """The terms of SIZE places of the order; `beyond` stands for those after its end."""
    v = ()
    for r in tl.static_range(SIZE):
        if EXACT:
            both = tl.load(order + j + r)
            v = v + (weight_of(both) * _coordinate(panel, both),)
        else:
            inside = j + r < d
            both = tl.load(order + j + r, mask=inside, other=0)
            v = v + (tl.where(inside, weight_of(both) * _coordinate(panel, both), beyond),)
    return v


@triton.jit
def lead(walker, lead_index, lead_value, r, width, count):
    """The r-th outlying term of each lane; 0 where there are fewer."""
    i = tl.load(lead_index + r * width, mask=r < count, other=0)
    x = tl.load(lead_value + r * width, mask=r < count, other=0.0)
    return product_of(tl.load(walker + i), x)


@triton.jit
def first_unit(sms, GPU: tl.constexpr):
    """A unit of work is 32 lanes and a part of the walkers, handed out in shares: a ticket is the next share's number.

    A multiprocessor begins with units of its own, so that their panels stay in its cache; then it takes what others
    left. Who does a share does not change its result.
    """
    return smid() if GPU else tl.program_id(0) % sms


@triton.jit
def next_unit(unit, tickets, shares, units, sms):
    unit += sms
    if unit >= units:
        found = units
        for u in range(0, units, 128):
            some = u + tl.arange(0, 128)
            drawn = tl.load(tickets + some, mask=some < units, other=1 << 30)
            found = tl.minimum(found, tl.min(tl.where(drawn < shares, some, 1 << 30), 0))
        unit = found
    return unit
