"""How torch makes products of float32 on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["dense_products"]


@contextmanager
def dense_products(device: torch.device, *, tf32: bool) -> Iterator[None]:
    """Inside, torch's own switches say so for all of them; convolutions would be in TF32 if nobody said otherwise."""
    if device.type != "cuda":
        yield
        return
    # The newer names can always be read, and writing to the older ones keeps both in step.
    matmul = torch.backends.cuda.matmul.fp32_precision == "tf32"
    convolution = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    try:
        _allow_tf32(tf32, tf32)
        yield
    finally:
        _allow_tf32(matmul, convolution)


def _allow_tf32(matmul: bool, convolution: bool) -> None:
    torch.set_float32_matmul_precision("high" if matmul else "highest")
    torch.backends.cudnn.allow_tf32 = convolution
