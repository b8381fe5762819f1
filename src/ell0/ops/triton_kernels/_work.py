"""How the work is handed out.

A unit of work is 32 lanes and a part of the walkers, handed out in shares: a ticket is the next share's number. A
multiprocessor begins with units of its own, so that their panels stay in its cache; then it takes what others left. Who
does a share does not change its result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import smid


@triton.jit
def first_unit(sms, GPU: tl.constexpr):
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
