"""The Triton kernels: on the GPU where there is one, else in Triton's interpreter, on small shapes."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from ell0.ops import gpu

CHECKS = Path(__file__).parent / "gpu_checks.py"
NAMES = (
    "alone", "mixed", "counts", "cuts", "scales", "ties", "rounding", "pairs", "determinism", "size", "prepared",
    "empty",
)  # fmt: skip
needs_triton = pytest.mark.skipif(not gpu.available(), reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize("names", [NAMES[:1], NAMES[1:2], NAMES[2:]], ids=" ".join)
def test_kernels(names: tuple[str, ...]) -> None:
    environment = dict(os.environ) if torch.cuda.is_available() else os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, CHECKS, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok (") == len(names)


def test_without_triton_the_gpu_is_served_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "available", lambda: False)
    assert not gpu.serves(torch.empty(3, 40, device="meta"))


@needs_triton
@pytest.mark.parametrize("size", [8, 16])
def test_networks_sort(size: int) -> None:
    """All zeros and ones are enough (Knuth, volume 3, section 5.3.4)."""
    kernels = gpu._kernels()
    for bits in product((0, 1), repeat=size):
        values = compared(list(bits), kernels.SORT8 if size == 8 else kernels.SORT16)
        assert values == sorted(bits, reverse=True)


@needs_triton
@pytest.mark.parametrize("size", range(17))
def test_networks_merge_what_falls_and_rises(size: int) -> None:
    comparators, places = gpu._kernels().merge(size)
    for first, last in product(range(size + 1), repeat=2):
        values = [1 if i < first or i >= size - last else 0 for i in range(size)]
        merged = compared(values, comparators)
        assert [merged[p] for p in places] == sorted(values, reverse=True)


def compared(values: list[int], comparators: tuple[tuple[int, int], ...]) -> list[int]:
    values = list(values)
    for i, j in comparators:
        values[i], values[j] = max(values[i], values[j]), min(values[i], values[j])
    return values
