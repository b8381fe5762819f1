"""How torch makes products of float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["dense_products"]

_BACKENDS: Any = torch.backends  # whose newer names have no types
_SWITCHES = (
    _BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn,
    _BACKENDS.mkldnn.matmul, _BACKENDS.mkldnn.conv, _BACKENDS.mkldnn.rnn,
)  # fmt: skip


@contextmanager
def dense_products(*, tf32: bool) -> Iterator[None]:
    """Inside, all products are in TF32 or none is. The switches are torch's own, of the whole process."""
    # Torch has two sets of them, and refuses to read the older where they disagree.
    precisions = [switch.fp32_precision for switch in _SWITCHES]
    matmul, cudnn = _read(torch.get_float32_matmul_precision), _read(lambda: torch.backends.cudnn.allow_tf32)
    try:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        for switch in _SWITCHES:
            switch.fp32_precision = "tf32" if tf32 else "ieee"
        yield
    finally:
        torch.set_float32_matmul_precision(matmul or ("high" if precisions[0] == "tf32" else "highest"))
        torch.backends.cudnn.allow_tf32 = cudnn is not False
        for switch, precision in zip(_SWITCHES, precisions, strict=True):
            switch.fp32_precision = "none"  # what stands above it holds, as it may have before
            if switch.fp32_precision != precision:
                switch.fp32_precision = precision


def _read(switch: Callable[[], Any]) -> Any:
    try:
        return switch()
    except RuntimeError:
        return None
