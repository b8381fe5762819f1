from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ell0 import bench, ops
from ell0.ops import reference
from ell0.results import Results


def test_topk_baseline_is_the_layer() -> None:
    g = torch.Generator().manual_seed(0)
    x, w, b = torch.randn(11, 40, generator=g), torch.randn(7, 40, generator=g), torch.randn(7, generator=g)
    for chunk in (1, 4, 32):
        got = bench.topk_baseline(x, w, b, 3, chunk)
        torch.testing.assert_close(got.double(), reference.trimmed_linear(x, w, b, top=3, bottom=3), rtol=0, atol=1e-4)


@pytest.mark.parametrize("wrong", ["values", "weight gradients"])
def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    right = ops.truncated_linear

    def spoiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options: object) -> torch.Tensor:
        if wrong == "values":
            return right(x, weight, bias, **options) * 1.001  # type: ignore[arg-type]
        out = right(x, weight, bias, **options)  # type: ignore[arg-type]
        return out + 0.01 * (weight - weight.detach()).sum(1)

    g = torch.Generator().manual_seed(0)
    x, w, b = torch.randn(20, 50, generator=g), torch.randn(40, 50, generator=g), torch.randn(40, generator=g)
    bench.check(x, w, b, 5, g)
    monkeypatch.setattr(ops, "truncated_linear", spoiled)
    with pytest.raises(AssertionError, match=wrong):
        bench.check(x, w, b, 5, g)


def test_calls_take_turns() -> None:
    seen: list[str] = []
    timing = bench.timed({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 3)
    assert "".join(seen) == "ab" * 4
    ratio = timing.ratio("a", "b")
    assert ratio["n"] == 3
    assert ratio["low"] <= ratio["high"]


def test_quick_run_without_mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "BATCH", 16)
    lines: list[str] = []
    results = bench.layer(quick=True, root=tmp_path, progress=lines.append)
    assert lines
    assert results.device.endswith(" threads")
    assert {row["data"] for row in results.rows} == {"digits28", "gaussian"}
    for data in ("digits28", "gaussian"):
        for what in (
            {"what": "forward", "to": "dense", "prepared": True},
            {"what": "forward", "to": "dense", "prepared": False},
            {"what": "forward", "to": "topk"},
            {"what": "step", "to": "dense"},
        ):
            assert results.find(data=data, k=10, weights="initial", **what)["value"] > 0


def test_mnist_can_be_required(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="ell0 data get mnist"):
        bench.layer(quick=True, root=tmp_path, require_mnist=True)


def test_peak_memory_is_told() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells the peak")
    results = Results("a", "b")
    bench._memory(results)
    dense, truncated = (results.find(what="memory", k=k)["value"] for k in (0, 10))
    assert dense > 0
    assert 0 < truncated <= 2 * dense + 64 * 2**20
