"""The scripts in benchmarks/: only checked results are timed, their rows, and their command lines."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attacks
import certify
import layer
import measure
import train
from ell0 import L0Ball, data, models, ops
from ell0.attacks import AttackResult
from ell0.certify import Objective
from ell0.nn import TruncatedLinear
from ell0.ops import reference
from ell0.results import Results
from ell0.train import PAPER_MNIST, TrainConfig
from ell0.train.stepper import Stepper
from measure import Run, timed

ROOT = Path(__file__).resolve().parent.parent


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def test_topk_baseline_is_the_layer() -> None:
    x, w, b = draw((11, 40), (7, 40), (7,))
    want = reference.trimmed_linear(x, w, b, top=3, bottom=3)
    for chunk in (1, 4, 32):
        torch.testing.assert_close(measure.topk_baseline(x, w, b, 3, chunk).double(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("wrong", ["values", "weight gradients"])
def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    right = ops.truncated_linear

    def spoiled(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
        out = right(x, weight, bias, **options)
        return out * 1.001 if wrong == "values" else out + 0.01 * (weight - weight.detach()).sum(1)

    x, w, b = draw((20, 50), (40, 50), (40,))
    layer.check(x, w, b, 5, torch.Generator())
    monkeypatch.setattr(ops, "truncated_linear", spoiled)
    with pytest.raises(AssertionError, match=wrong):
        layer.check(x, w, b, 5, torch.Generator())


def test_a_wrong_gradient_to_the_input_is_not_timed() -> None:
    x, w, grad = draw((6, 50), (40, 50), (6, 40))
    x.requires_grad_()
    out = ops.truncated_linear(x, w, k=5)
    layer.check_input_gradient(out, x, w, grad, 5)
    with pytest.raises(AssertionError, match="input gradients of the truncated layer with k=5 differ"):
        layer.check_input_gradient(out + 1e-3 * x.sum(1, keepdim=True), x, w, grad, 5)


def test_calls_take_turns() -> None:
    seen: list[str] = []
    timing = timed({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 3)
    assert "".join(seen) == "ab" * 4
    ratio = timing.ratio("a", "b")
    assert (ratio["n"], ratio["to"]) == (3, "b")
    assert ratio["low"] <= ratio["high"]
    assert ratio["value"] == pytest.approx(ratio["seconds"] / ratio["to_seconds"])


def test_quick_run_without_mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layer, "CPU", replace(layer.CPU, batch=16))
    results = layer.benchmark(Run(root=tmp_path), quick=True)
    assert results.device.endswith(" threads")
    got = {(row["data"], row["what"], row["to"], row["prepared"]) for row in results.rows}
    dense = {("forward", "dense", True), ("forward", "dense", False), ("step", "dense", False)}
    wanted = {(source, *each) for source in ("digits28", "gaussian") for each in dense}
    assert got == wanted | {("digits28", "forward", "topk", True)}
    assert all(row["value"] > 0 and (row["k"], row["weights"]) == (10, "initial") for row in results.rows)


def test_the_floor_is_that_of_the_slower_part() -> None:
    moved = 4 * (2 * 3 + 5 * 3 + 2 * 5)
    for rates, least in ((layer.Rates(copy=100.0, matrix=2.0), 30.0), (layer.Rates(copy=4.0, matrix=60.0), moved / 4)):
        row = rates.row(60.0, batch=2, d=3, out=5)
        assert row == {"bytes": moved, "operations": 60, "floor": least, "over_floor": 60.0 / least}


def test_the_benchmark_of_the_gpu_has_its_rows(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: all that it does but the clock, the memory and the kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Run, "place", torch.device("cpu"))
    few = replace(layer.GPU, batch=20, rounds=1, quick_rounds=1, chunks=(2, 4))
    few = replace(few, batches=(5, 20), inputs=(650, 784), widths=(30, 40))
    for name, value in {
        "GPU": few, "OUT": 40, "COPIED": 1000, "SQUARE": 30, "EPOCHS": 1, "_triton": lambda: "9.9",
        "_gpu_peak": lambda call, _: call() or 7,
    }.items():  # fmt: skip
        monkeypatch.setattr(layer, name, value)
    results = layer.benchmark(Run("cuda", root=small))
    assert results.versions["triton"] == "9.9"
    rates = [results.find(what="rate", unit=unit)["value"] for unit in ("bytes/s", "operations/s")]
    size, kinds = {"batch": 20, "in": 784, "out": 40}, ("initial", "trained")
    sources = ("digits28", "digits28+10@100", "gaussian", "zeros80")
    wanted = {(source, kind, 10) for source in sources for kind in kinds}
    wanted |= {("digits28", kind, k) for kind in kinds for k in (1, 10, 100)}
    rows = results.select(what="forward", to="dense", **size)
    assert sorted((row["data"], row["weights"], row["k"]) for row in rows) == sorted([*wanted, *wanted])
    assert all(row["floor"] == layer.Rates(*rates).row(1.0, *size.values())["floor"] for row in rows)
    for kind, gradient in product(kinds, ("weight", "input")):
        assert results.find(what="backward", to="dense", gradient=gradient, weights=kind, k=10, **size)["value"] > 0
    assert results.find(what="forward", to="topk", unit="x faster")["chunk"] in (2, 4)
    grown = {(row["batch"], row["in"], row["out"], row["k"]) for row in results.select(what="growth")}
    shapes = {(5, 784, 40, 10), (20, 650, 40, 10), (20, 784, 30, 10)} | {(20, 784, 40, k) for k in (1, 10, 100, 300)}
    assert grown == shapes
    assert all(row["dense"] == 7 for row in results.select(what="memory"))


def test_training_is_timed(small: Path) -> None:
    state = torch.random.get_rng_state()
    results = train.benchmark(Run(root=small), steps=2, rounds=2, batch=300)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert results.name == "bench-train-cpu"
    step = results.find(what="step", to="F(0)", mode="eager", k=10)
    assert (step["data"], step["batch"], step["n"]) == ("digits28", 300, 2)
    seconds = {k: results.find(what="epoch", unit="seconds", k=k) for k in (0, 1, 10)}
    assert all(row["images"] % 300 == 0 for row in seconds.values())
    ratio = results.find(what="epoch", unit="x", k=10)
    assert ratio["paper"] == 58
    assert ratio["value"] == pytest.approx(seconds[10]["value"] / seconds[0]["value"])
    assert len(results.rows) == 1 + 3 + 2


def test_the_estimate_of_the_topk_baseline_counts_every_step_and_query() -> None:
    model = models.mlp(k=2, in_features=16, hidden=[8])
    x, y = torch.randn(40, 16), torch.arange(40) % 10
    first = model[1]
    assert isinstance(first, TruncatedLinear)
    assert torch.allclose(train.Topk(first)(x), first(x), atol=1e-5)
    results = Results("a", "b")
    train.estimate_topk(results, model, x, y, 10)
    row = results.find(what="training", mode="topk", estimated=True)
    assert row["attack_seconds"] == pytest.approx(9 * 300 * 4 * row["forward"])
    assert row["value"] == pytest.approx(250 * 4 * row["step"] + row["attack_seconds"])


@pytest.mark.usefixtures("small")
def test_losses_that_differ_are_not_timed() -> None:
    batches = [(draw((20, 784))[0], torch.arange(20) % 10)]
    one, same, other = (Stepper(Run(seed=seed).network(10), PAPER_MNIST) for seed in (0, 0, 1))
    train.check_losses(one, same, batches, 10)
    with pytest.raises(AssertionError, match=r"^step 1 of F\(10\) has the loss "):
        train.check_losses(same, other, batches, 10)


def test_certificates_are_timed_without_mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(certify, "HIDDEN", 24)
    monkeypatch.setattr(certify, "MANY", 600)
    options: dict[str, Any] = {"images": 60, "epochs": 8, "steps": 1, "rounds": 2, "batch": 32}
    learnt: list[object] = []

    def watched(model: nn.Module, config: TrainConfig, batch_loss: Any) -> Stepper:
        learnt.append(batch_loss)
        return Stepper(model, config, batch_loss=batch_loss)

    monkeypatch.setattr(certify, "Stepper", watched)
    results = certify.benchmark(Run(root=tmp_path), **options)
    assert learnt == [None, Objective(10, ramp=0).at(0, 1), Objective(10, ramp=0, quick=True).at(0, 1)]
    assert {row["data"] for row in results.rows} == {"digits28"}
    for method in ("ibp", "best"):
        row = results.find(what="certificates", method=method, k=100, images=60, budget=32, hidden=24)
        assert 0 < row["low"] <= row["value"] <= row["high"]
        assert row["median_radius"] > 0  # a network that certifies nothing is certified in no time
    for bound in ("exact", "quick"):
        assert results.find(what=f"step, {bound} bound", to="plain step", mode="eager")["value"] > 0
    with pytest.raises(ValueError, match="images and batch must be at most the 1437 images of digits28, got 1438 and"):
        certify.benchmark(Run(root=tmp_path), **options | {"images": 1438})
    asked: list[str] = []

    def lower(*_: Any, method: str, **__: Any) -> Tensor:
        return torch.full((50,), 3 - (method == "best"))

    def other(*_: Any, method: str, **__: Any) -> Tensor:
        asked.append(method)
        return torch.full((50,), len(asked))

    for radius, said in ((lower, '"best" must be at least those by "ibp"'), (other, "the same on a processor")):
        monkeypatch.setattr(certify, "radius", radius)
        with pytest.raises(AssertionError, match=said):
            certify.benchmark(Run(root=tmp_path), **options | {"epochs": 1})


AUTHORS = """
import torch

class RSAttack:
    def __init__(self, predict, norm, eps, n_queries, **_):
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

FOOLBOX = """
import sys
import numpy as np
import torch

__version__ = "9.9"
drawn = []
attacks = criteria = sys.modules[__name__]

class PyTorchModel:
    def __init__(self, model, bounds, device):
        assert isinstance(model, torch.nn.Module) and not model.training
        self.model = model

def Misclassification(y): ...

class PointwiseAttack:
    def __init__(self, l2_binary_search): ...

    def run(self, fmodel, x, criterion):
        drawn.append(np.random.random())
        fmodel.model(x)
        return x + 1.5 * torch.rand_like(x)

class L0FMNAttack:
    def __init__(self, steps):
        self.steps = steps

    def run(self, fmodel, x, criterion):
        for _ in range(self.steps):
            fmodel.model(x.clone().requires_grad_()).sum().backward()
        return -x
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A small network, and a folder without MNIST that holds the authors' file and, first on the path, foolbox."""
    monkeypatch.setattr(models, "mlp", partial(models.mlp, hidden=(40,)))
    (tmp_path / "rs_attacks.py").write_text(AUTHORS)
    (tmp_path / "foolbox.py").write_text(FOOLBOX)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "foolbox", raising=False)
    yield tmp_path
    sys.modules.pop("foolbox", None)


def test_attacks_are_compared(small: Path) -> None:
    lines: list[str] = []
    reference = small / "rs_attacks.py"
    states = torch.random.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    options: dict[str, Any] = {"images": 30, "budget": 2, "queries": 40, "epochs": 6, "reference": reference}
    results = attacks.benchmark(Run(root=small, say=lines.append), **options)
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert str(np.random.get_state()) == states[1]  # noqa: NPY002
    assert not any("failed" in line for line in lines)
    clean = results.find(what="clean", data="digits")["value"]
    assert clean > 0.5
    for beta in (1.0, 100.0):
        *single, union = results.select(what="attack", beta=beta)
        assert union["attack"] == "union of sparse_pgd, sigma_zero, adaptive"
        assert union["value"] <= min(
            row["value"] for row in single if row["attack"] in union["attack"].split(" of ")[1]
        )
        assert all(row["value"] <= clean for row in single)
    price = union["queries"] + results.find(what="attack", attack="sparse_rs", beta=100.0)["queries"]
    dear = results.select(what="equal price")
    assert [row["restarts"] for row in dear] == [1, 2]
    assert all(row["queries"] >= price or row["value"] == 0 or row["limit"] > 20 * price for row in dear)
    assert results.versions["reference"] == hashlib.sha256(reference.read_bytes()).hexdigest()[:12]
    assert results.versions["foolbox"] == "9.9"
    theirs = results.find(what="reference", attack="sparse_rs of the authors")
    assert (theirs["value"] <= clean, theirs["queries"]) == (True, 40)
    assert results.find(what="distance", attack="foolbox PointwiseAttack")["queries"] == 10
    assert results.find(what="distance", attack="foolbox L0FMNAttack")["queries"] == 2 * 100
    for row in (results.find(what="overhead"), results.find(what="speed")):
        assert 0 < row["low"] <= row["value"] <= row["high"]
        assert row["rounds"] == 3


@pytest.mark.usefixtures("small")
def test_foolbox_draws_the_same_in_every_run() -> None:
    x, y = (part[:5] for part in data.load("digits", "test"))
    network = models.mlp(2, in_features=64).eval()
    drawn = []
    for seed in (3, 3, 4):
        attacks.against_foolbox(attacks.Comparison(Run(seed=seed), Results("a", "b"), network, x, y, {"data": "a"}))
        drawn.append(tuple(sys.modules["foolbox"].drawn[-10:]))
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 10


@pytest.mark.parametrize(
    ("peer", "name", "line"),
    [
        ("PointwiseAttack", "foolbox.py", "return x + 1.5 * torch.rand_like(x)"),
        ("L0FMNAttack", "foolbox.py", "return -x"),
        ("all of foolbox", "foolbox.py", '__version__ = "9.9"'),
        ("the authors", "rs_attacks.py", "torch.manual_seed(0)"),
    ],
)
def test_a_peer_that_fails_loses_its_own_rows_alone(small: Path, peer: str, name: str, line: str) -> None:
    text = (small / name).read_text()
    assert text.count(line) == 1
    (small / name).write_text(text.replace(line, "raise RuntimeError('no luck')"))
    lines: list[str] = []
    options: dict[str, Any] = {"images": 5, "budget": 2, "queries": 5, "epochs": 0}
    results = attacks.compare(Run(root=small, say=lines.append), **options, reference=small / "rs_attacks.py")
    failed = [line for line in lines if line.endswith(" failed and is left out: RuntimeError('no luck')")]
    assert len(failed) == (2 if peer == "all of foolbox" else 1)
    kinds = {row["what"] for row in results.rows}
    peers = {row["attack"] for row in results.rows if row["what"] in ("reference", "distance")}
    assert "equal price" in kinds
    assert {"pointwise", "sigma_zero"} <= peers
    assert ("overhead" in kinds) == ("sparse_rs of the authors" in peers) == (peer != "the authors")
    assert ("speed" in kinds) == ("foolbox PointwiseAttack" in peers) == (peer in ("L0FMNAttack", "the authors"))
    assert ("foolbox L0FMNAttack" in peers) == (peer in ("PointwiseAttack", "the authors"))


@pytest.mark.parametrize(("price", "restarts"), [(30.0, [1, 2]), (1400.0, [1, 2]), (2600.0, [1, 3])])
def test_sparse_rs_spends_the_price_in_one_run_and_in_restarts(
    monkeypatch: pytest.MonkeyPatch, price: float, restarts: list[int]
) -> None:
    def one_falls(
        _model: object, x: Tensor, y: Tensor, ball: L0Ball, *, queries: int, restarts: int, generator: object
    ) -> AttackResult:
        """Of two rows the first breaks at once and the second never."""
        assert (ball.budget, generator is None) == (1, False)
        spent = torch.tensor([1, queries * restarts])
        return AttackResult(x, torch.tensor([True, False]), y, spent, x, torch.zeros(2))

    monkeypatch.setattr(attacks, "ATTACKS", {"sparse_rs": one_falls})
    results, x, y = Results("a", "b"), torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    compared = attacks.Comparison(Run(), results, nn.Linear(4, 2), x, y, {"data": "a"})
    attacks.at_equal_price(compared, L0Ball(1), price)
    assert [row["restarts"] for row in results.rows] == restarts
    for row in results.rows:
        assert row["value"] == 0.5
        assert row["limit"] == 2 * row["queries"] - 1
        assert price <= row["queries"] <= 1.2 * price


def test_every_row_stands_while_the_speed_is_measured(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = attacks.speed(Run(root=small), images=3000, queries=5)  # more images than there are
    assert results.name == "bench-attacks-cpu"
    seconds = {k: results.find(what="attack seconds", k=k)["value"] for k in (0, 10)}
    row = results.find(what="attack", to="F(0)")
    assert row["value"] == seconds[10] / seconds[0]
    assert (row["images"], row["queries"], row["budget"]) == (3000, 5, 10)
    assert len(results.rows) == 3
    monkeypatch.setattr(attacks, "LEAD", -1.0)
    with pytest.raises(AssertionError, match=r"^9 of 9 rows broke, and none can$"):
        attacks.speed(Run(root=small), images=9, queries=5)


def test_a_gpu_gets_the_speed_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given: list[dict[str, int]] = []
    monkeypatch.setattr(attacks, "speed", lambda _, **settings: given.append(settings))
    attacks.benchmark(Run("cuda"), images=7)
    assert given == [{"images": 7}]
    for name, value in (("epochs", 0), ("reference", Path("rs_attacks.py"))):
        with pytest.raises(ValueError, match=f"^{name} must be left out with --device cuda, got {value}$"):
            attacks.benchmark(Run("cuda"), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (train.benchmark, {"steps": 0}, "steps must be an int >= 1, got 0"),
        (train.benchmark, {"batch": 10**6}, r"batch must be at most the \d+ images of digits28, got 1000000"),
        (certify.benchmark, {"rounds": 0}, "rounds must be an int >= 1, got 0"),
        (attacks.speed, {"queries": 0}, "queries must be an int >= 1, got 0"),
        (attacks.speed, {"budget": 785}, "budget must be at most the 784 features of digits28, got 785"),
        (attacks.compare, {"images": -300}, "images must be an int >= 1, got -300"),
        (attacks.compare, {"epochs": -1}, "epochs must be an int >= 0, got -1"),
        (attacks.compare, {"budget": 65}, "budget must be at most the 64 features of digits, got 65"),
    ],
)
def test_bad_arguments_are_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: Any, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(models, "mlp", lambda *_, **__: pytest.fail("something was built"))
    with pytest.raises(ValueError, match=f"^{message}$"):
        function(Run(root=tmp_path), **arguments)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "$"),
        ("import a_module_that_nobody_has", r" \(ModuleNotFoundError: "),
        ("class Other: pass", ", which has no RSAttack$"),
    ],
)
def test_a_wrong_reference_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    path, known = tmp_path / "rs_attacks.txt", list(sys.path)
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"^reference must be the file rs_attacks.py .*, got {path}{reason}"):
        attacks.compare(Run(root=tmp_path), reference=path)
    assert sys.path == known


def command(function: Callable[..., Results], *words: str) -> int:
    parser = measure.options("some/layer.py", "Time something.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--reference", type=Path)
    measure.add_counts(parser, images="how many")
    return measure.main(function, parser, words)


def test_a_command_prints_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    out = tmp_path / "new" / "a.json"

    def benchmark(run: Run, **options: Any) -> Results:
        given.append({"seed": run.seed, "root": run.root, **options})
        run.say("working")
        results = Results("bench-any", run.command, device="a machine")
        results.add(2.5, what="forward", to="dense", unit="x", k=10)
        return results

    words = ["--require-mnist", "--seed", "4", "--quick", "--reference"]
    assert command(benchmark, *words, "far/rs_attacks.py", "--root", "x", "--out", str(out)) == 0
    assert given == [{"seed": 4, "root": Path("x"), "quick": True, "reference": Path("far/rs_attacks.py")}]
    shown = capsys.readouterr()
    assert shown.out == "bench-any: a machine\nforward: 2.5 x dense, k 10\n"
    assert shown.err == f"working\nwritten to {out}\n"
    assert Results.load(out).command == f"python benchmarks/layer.py {' '.join(words)} rs_attacks.py"
    assert [path.name for path in out.parent.iterdir()] == ["a.json"]
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(Results, "save", Mock(side_effect=full))
    assert command(benchmark, "--out", str(out)) == 1
    shown = capsys.readouterr()
    assert "forward: 2.5 x dense" in shown.out  # a full disk loses no figure
    assert "No space left on device" in shown.err


def test_an_error_is_one_sentence_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for option, value, said in (
        ("--threads", 0, "threads must satisfy 1 <= threads <= "),
        ("--threads", 2**70, f"got {2**70}"),
        ("--seed", -1, "seed must satisfy 0 <= seed < 2**64, got -1"),
        ("--seed", 2**64, f"seed must satisfy 0 <= seed < 2**64, got {2**64}"),
        ("--device", "cuda", "device must be \"cpu\" where torch finds no CUDA GPU, got 'cuda'"),
        ("--out", tmp_path, f"{tmp_path}, a folder"),
        ("--out", tmp_path / "file" / "a.json", "out must be a name in a folder that can be written, got "),
        ("--out", tmp_path / ("a" * 300), "out must be a name in a folder that can be written, got "),
        ("--out", tmp_path / "pipe", "out must be a file or a new name, got "),
    ):
        assert command(lambda _: pytest.fail("something was measured"), option, str(value)) == 1
        error = capsys.readouterr().err
        assert said in error
        assert error.startswith("layer.py: ")
        assert error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"file", "pipe"}


def test_scripts_need_torch_and_numpy_alone() -> None:
    code = (
        "import runpy, sys\n"
        "for name in ('sklearn', 'scipy', 'rich', 'cyclopts', 'jinja2', 'foolbox'):\n"
        "    sys.modules[name] = None\n"
        "sys.path.insert(0, 'benchmarks')\n"
        "for script in sys.argv[1:]:\n"
        "    sys.argv = [script, '--help']\n"
        "    try:\n"
        "        runpy.run_path(f'benchmarks/{script}', run_name='__main__')\n"
        "    except SystemExit as end:\n"
        "        assert not end.code\n"
    )
    scripts = [f"{name}.py" for name in ("attacks", "certify", "layer", "train")]
    run = subprocess.run([sys.executable, "-c", code, *scripts], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr
    for option in ("--device", "--require-mnist", "--threads", "--seed", "--root", "--out"):
        assert run.stdout.count(f"  {option} ") == len(scripts)
    assert all(f"python benchmarks/{script} --" in run.stdout for script in scripts)


def test_make_runs_the_benchmarks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`make bench` stops at once without MNIST, and `make bench-attacks` passes a reference if there is one."""

    def words(target: str, script: str, reference: str = "") -> list[str]:
        make = ["make", "--dry-run", target, f"REFERENCE={reference}"]
        run = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
        (line,) = [line for line in run.stdout.splitlines() if script in line]
        return shlex.split(line)[2:]

    for peer in ("", "some where/rs_attacks.py"):
        given = ["--reference", peer] if peer else []
        wanted = ["--require-mnist", "--threads", "2", *given, "--out", "results/bench-attacks-cpu.json"]
        assert words("bench-attacks", "benchmarks/attacks.py", peer) == wanted
    monkeypatch.delenv("ELL0_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(models.__file__).parent.parent))
    options = ["1" if word == "2" else word for word in words("bench", "benchmarks/layer.py")]  # any machine has one
    command = [sys.executable, str(ROOT / "benchmarks" / "layer.py"), *options]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 1
    assert run.stderr.startswith("layer.py: ")
    assert "`ell0 data get mnist`" in run.stderr
    assert run.stderr.count("\n") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
