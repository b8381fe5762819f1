from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from ell0 import bench, models, ops
from ell0.bench import _layer
from ell0.bench._timing import timed
from ell0.evaluation import WHITE_BOX
from ell0.ops import reference
from ell0.results import Results


def test_topk_baseline_is_the_layer() -> None:
    g = torch.Generator().manual_seed(0)
    x, w, b = torch.randn(11, 40, generator=g), torch.randn(7, 40, generator=g), torch.randn(7, generator=g)
    for chunk in (1, 4, 32):
        got = _layer.topk_baseline(x, w, b, 3, chunk)
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
    _layer.check(x, w, b, 5, g)
    monkeypatch.setattr(ops, "truncated_linear", spoiled)
    with pytest.raises(AssertionError, match=wrong):
        _layer.check(x, w, b, 5, g)


def test_calls_take_turns() -> None:
    seen: list[str] = []
    timing = timed({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 3)
    assert "".join(seen) == "ab" * 4
    ratio = timing.ratio("a", "b")
    assert ratio["n"] == 3
    assert ratio["low"] <= ratio["high"]


def test_quick_run_without_mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_layer, "BATCH", 16)
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
    _layer._memory(results)
    dense, truncated = (results.find(what="memory", k=k)["value"] for k in (0, 10))
    assert dense > 0
    assert 0 < truncated <= 2 * dense + 64 * 2**20


AUTHORS = """
import torch


class RSAttack:
    def __init__(self, predict, norm, eps, n_queries, seed, verbose, device, log_path):
        assert norm == "L0"
        self.predict, self.eps, self.n_queries = predict, eps, n_queries

    def perturb(self, x, y):
        assert 0 <= x.min() and x.max() <= 1
        torch.manual_seed(0)
        points = x.clone()
        points.flatten(1)[:, : self.eps] = 1.0
        for _ in range(self.n_queries):
            self.predict(points)
        return torch.full_like(y, self.n_queries), points
"""


def test_attacks_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = partial(models.mlp, hidden=(40,))
    monkeypatch.setattr(models, "mlp", small)
    reference = tmp_path / "rs_attacks.py"
    reference.write_text(AUTHORS)
    lines: list[str] = []
    state = torch.random.get_rng_state()
    results = bench.attacks(
        images=30, budget=2, queries=40, epochs=6, root=tmp_path, reference=reference, progress=lines.append
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert lines
    clean = results.find(what="clean")
    assert clean["data"] == "digits"
    assert clean["value"] > 0.5
    for beta in (1.0, 100.0):
        rows = [row for row in results.rows if row["what"] == "attack" and row["beta"] == beta]
        union = rows[-1]
        assert union["attack"] == "union of sparse_pgd, sigma_zero, adaptive"
        assert union["value"] <= min(row["value"] for row in rows if row["attack"] in WHITE_BOX)
        assert all(row["value"] <= clean["value"] for row in rows)
    assert {row["restarts"] for row in results.rows if row["what"] == "equal price"} == {1}
    assert results.find(what="reference", attack="sparse_rs of the authors")["value"] <= clean["value"]
    assert results.find(what="overhead")["value"] > 0


def test_a_wrong_reference_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reference must be the file rs_attacks\.py"):
        bench.attacks(images=1, epochs=0, root=tmp_path, reference=tmp_path / "nothing.py")
