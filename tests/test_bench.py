"""The scripts in benchmarks/: only checked results are timed, their rows, and their command lines."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tables
import torch
from torch import Tensor
from torch.nn import functional as F

import attacks
import certify
import groups
import in_part
import layer
import measure
import peers
import train
import votes_search
from ell0 import data, models, ops
from ell0.certify import Partition, rules
from ell0.ops import kernel, reference
from ell0.results import OURS, Results
from ell0.train import PAPER_MNIST
from ell0.train.stepper import Stepper
from measure import Run

ROOT = Path(__file__).resolve().parent.parent


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def test_topk_baseline_is_the_layer() -> None:
    x, w, b = draw((11, 40), (7, 40), (7,))
    want = reference.trimmed_linear(x, w, b, top=3, bottom=3)
    for chunk in (1, 4, 32):
        torch.testing.assert_close(measure.topk_baseline(x, w, b, 3, chunk).double(), want, rtol=0, atol=1e-4)


def test_tools_are_asked_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.SCRIPTS, "no_such_tool, any", "robust = 0.0")
    results = peers.peers(Run(), images=4, epochs=1, scripts=("ell0, sparse_rs", "no_such_tool, any"))
    (row,) = results.select(what="tool")
    assert (row["attack"], row.n, row.beside) == ("ell0, sparse_rs", 4, {"lines": 4, "times": 1.0, "knows": "logits"})


def test_a_tool_is_given_only_what_it_has_shown() -> None:
    """Rows: broken within three pixels, by more of them, outside the range, not at all, wrong from the start."""

    def model(x: Tensor) -> Tensor:
        return torch.stack([torch.full((len(x),), 0.5), x.flatten(1).amax(1)], 1)

    images, labels = torch.zeros(5, 1, 2, 4), torch.tensor([0, 0, 0, 0, 1])
    points = images.clone().flatten(1)
    points[0, :3], points[1, :4], points[2, 0] = 1.0, 1.0, 2.0
    names = {"model": model, "images": images, "labels": labels, "points": points.view_as(images), "torch": torch}
    exec(peers.CHECKED, names)
    assert names["robust"] == pytest.approx(3 / 5)


@pytest.mark.parametrize("wrong", ["values", "weight gradients", "input gradients"])
def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    right = ops.truncated_linear

    def spoiled(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
        out = right(x, weight, bias, **options)
        wrongly = {
            "values": 0.001 * out,
            "weight gradients": 0.01 * (weight - weight.detach()).sum(1),
            "input gradients": 0.01 * (x - x.detach()).sum(1, keepdim=True),
        }
        return out + wrongly[wrong]

    def check() -> None:
        x, w, b, grad = draw((20, 50), (40, 50), (40,), (20, 40))
        layer.check(x, w, b, 5, torch.Generator())
        layer.check_input_gradient(ops.truncated_linear(x.requires_grad_(), w, b, k=5), x, w, grad, 5)

    check()
    monkeypatch.setattr(ops, "truncated_linear", spoiled)
    with pytest.raises(AssertionError, match=f"{wrong} of the truncated layer with k=5 differ"):
        check()


def test_the_layer_is_timed_without_mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layer, "CPU", replace(layer.CPU, batch=16))
    slowest = (kernel.builds() or ("none",))[-1]
    results = layer.benchmark(Run(root=tmp_path), quick=True, build=slowest)
    kernel.use(None)
    assert (results.name, results.versions["kernel"]) == (f"bench-layer-{slowest}-cpu", slowest)
    got = {(row["data"], row["what"], row["to"], row.get("prepared")) for row in results.rows}
    dense = {("forward", "dense", True), ("forward", "dense", False), ("step", "dense", False)}
    wanted = {(source, *each) for source in ("digits28", "gaussian") for each in dense}
    assert got == wanted | {("digits28", "forward", "topk", True), ("digits28", "backward", "dense", None)}
    assert all(row["value"] > 0 and (row["k"], row["weights"]) == (10, "initial") for row in results.rows)


def test_the_benchmark_of_the_gpu_has_its_rows(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: all that it does but the clock and the kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Run, "place", torch.device("cpu"))
    monkeypatch.setattr(layer, "import_module", lambda _: Mock(__version__="9.9"))
    few = replace(layer.GPU, batch=20, rounds=1, chunks=(2, 4))
    shrunk = {"GPU": few, "OUT": 40, "COPIED": 1000, "SQUARE": 30, "EPOCHS": 1}
    for name, value in shrunk.items():
        monkeypatch.setattr(layer, name, value)
    results = layer.benchmark(Run("cuda", root=small))
    size, kinds = {"batch": 20, "in": 784, "out": 40}, ("initial", "trained")
    sources = ("digits28", "digits28+10@100", "gaussian", "zeros80")
    wanted = {(source, kind, 10) for source in sources for kind in kinds}
    wanted |= {(source, kind, k) for source in ("digits28", "gaussian") for kind in kinds for k in layer.KS}
    rows = results.select(what="forward", to="dense", **size)
    assert sorted((row["data"], row["weights"], row["k"]) for row in rows) == sorted([*wanted, *wanted])
    assert all(row["floor"] > 0 for row in rows)
    for kind, gradient, k in product(kinds, ("weight", "input"), layer.KS):
        row = results.find(what="backward", to="dense", gradient=gradient, data="digits28", weights=kind, k=k, **size)
        assert row.value > 0
    assert results.find(what="forward", to="topk", unit="x faster")["chunk"] in (2, 4)


def test_training_is_timed(small: Path) -> None:
    state = torch.random.get_rng_state()
    results = train.benchmark(Run(root=small), steps=2, rounds=2, batch=300)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert results.name == "bench-train-cpu"
    step = results.find(what="step", to="F(0)", mode="eager", k=10)
    assert (step["data"], step["batch"], step["n"]) == ("digits28", 300, 2)
    seconds = {k: results.find(what="epoch", unit="seconds", k=k) for k in (0, 1, 10)}
    ratio = results.find(what="epoch", unit="x", k=10, paper=58)
    assert ratio["value"] == pytest.approx(seconds[10]["value"] / seconds[0]["value"])
    x, y = draw((40, 784))[0], torch.arange(40) % 10
    train.estimate_topk(results, Run().network(2), x, y, 10)
    row = results.find(what="training", mode="topk", estimated=True)
    assert row["attack_seconds"] == pytest.approx(9 * 300 * 4 * row["forward"])
    assert row["value"] == pytest.approx(250 * 4 * row["step"] + row["attack_seconds"])
    one, same, other = (Stepper(Run(seed=seed).network(10), PAPER_MNIST) for seed in (0, 0, 1))
    train.check_losses(one, same, [(x, y)], 10)
    with pytest.raises(AssertionError, match=r"^step 1 of F\(10\) has the loss "):
        train.check_losses(same, other, [(x, y)], 10)


def test_certificates_are_timed_without_mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(certify, "HIDDEN", 24)
    monkeypatch.setattr(certify, "MANY", 600)
    results = certify.benchmark(Run(root=tmp_path), images=60, epochs=8, steps=1, rounds=2, batch=32)
    assert {row["data"] for row in results.rows} == {"digits28"}
    for method in ("ibp", "best"):
        row = results.find(what="certificates", method=method, k=100, images=60, budget=32, hidden=24)
        assert 0 < row["low"] <= row["value"] <= row["high"]
        assert row["median_radius"] > 0  # a network that certifies nothing is certified in no time
    for bound in ("exact", "quick"):
        assert results.find(what=f"step, {bound} bound", to="plain step", mode="eager")["value"] > 0


def test_votes_are_timed_against_their_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "VOTES", (("mlp", 8, (4, 4), 10), ("cnn", 8, (4, 4), 3), ("cnn", 12, (6, 6), 3)))
    monkeypatch.setitem(certify.SIZES["cpu"], "cnn", {"widths": (4,), "blocks": 1})
    results = certify.benchmark(Run(), votes=True, images=1, rounds=1)
    ratios = results.select(what="votes", to="passes", n=1)
    assert [(row["network"], row["parts"], row["images"]) for row in ratios] == [
        ("mlp", 16, 16), ("cnn", 16, 8), ("cnn", 36, 8)
    ]  # fmt: skip
    assert all(row.value > 0 for row in ratios)
    assert [row["side"] for row in results.select(what="growth")] == [8, 12]


def test_wrong_radii_are_not_timed() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 40, 3) + torch.tensor([1.5, 0.0, 0.0])
    y = torch.zeros(6, dtype=torch.int64)
    reached = torch.ones(6, 40, dtype=torch.bool)
    found = rules.radii(logits.double(), y, reached, "duel", 0.5, 0.0, 0.0)
    assert int(found.min()) > 0
    certify.check_radii(logits, y, 0.5, found)
    for wrong in (1, -2):
        with pytest.raises(AssertionError, match="or one less, by rounding"):
            certify.check_radii(logits, y, 0.5, found + wrong)


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
import torch

__version__ = "9.9"
attacks = criteria = sys.modules[__name__]

class PyTorchModel:
    def __init__(self, model, bounds, device):
        assert isinstance(model, torch.nn.Module) and not model.training
        self.model = model

def Misclassification(y): ...

class PointwiseAttack:
    def __init__(self, l2_binary_search): ...

    def run(self, fmodel, x, criterion):
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
    reference = small / "rs_attacks.py"
    states = torch.random.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    results = attacks.benchmark(Run(root=small), images=30, budget=2, queries=40, epochs=6, reference=reference)
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert str(np.random.get_state()) == states[1]  # noqa: NPY002
    clean = results.find(what="clean", data="digits")["value"]
    assert clean > 0.5
    for beta in (1.0, 100.0):
        *single, union = results.select(what="attack", beta=beta)
        assert union["attack"] == "union of sparse_pgd, sigma_zero, adaptive"
        assert all(row["value"] <= clean for row in single)
        assert all(union["value"] <= row["value"] for row in single if row["attack"] in union["attack"][9:])
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
    assert all(results.find(what=what)["value"] > 0 for what in ("overhead", "speed"))


@pytest.mark.parametrize(
    ("name", "line", "lost"),
    [
        ("foolbox.py", "return -x", {"foolbox L0FMNAttack"}),
        ("foolbox.py", '__version__ = "9.9"', {"foolbox L0FMNAttack", "foolbox PointwiseAttack"}),
        ("rs_attacks.py", "torch.manual_seed(0)", {"sparse_rs of the authors", "sparse_rs"}),
    ],
)
def test_a_peer_that_fails_loses_its_own_rows_alone(small: Path, name: str, line: str, lost: set[str]) -> None:
    (small / name).write_text((small / name).read_text().replace(line, "raise RuntimeError('no luck')"))
    lines: list[str] = []
    options: dict[str, Any] = {"images": 5, "budget": 2, "queries": 5, "epochs": 0}
    results = attacks.compare(Run(root=small, say=lines.append), **options, reference=small / "rs_attacks.py")
    assert any(line.endswith(" failed and is left out: RuntimeError('no luck')") for line in lines)
    got = {row["attack"] for row in results.rows if row["what"] in ("reference", "distance")}
    peers = {"foolbox L0FMNAttack", "foolbox PointwiseAttack", "sparse_rs of the authors"}
    assert got == (peers | {"pointwise", "sigma_zero", "sparse_rs"}) - lost
    assert len(results.select(what="equal price")) == 2


def test_every_row_stands_while_the_speed_is_measured(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = attacks.speed(Run(root=small), images=3000, queries=5)  # more images than there are
    assert results.name == "bench-attacks-cpu"
    seconds = {k: results.find(what="attack seconds", k=k)["value"] for k in (0, 10)}
    row = results.find(what="attack", to="F(0)", images=3000, queries=5, budget=10)
    assert row["value"] == seconds[10] / seconds[0]
    monkeypatch.setattr(attacks, "LEAD", -1.0)
    with pytest.raises(AssertionError, match=r"^9 of 9 rows broke, and none can$"):
        attacks.speed(Run(root=small), images=9, queries=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attacks, "speed", measured := Mock())
    attacks.benchmark(Run("cuda"), images=7)
    assert measured.call_args.kwargs == {"images": 7}
    with pytest.raises(ValueError, match="epochs must be left out with --device cuda, got 0"):
        attacks.benchmark(Run("cuda"), epochs=0)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (train.benchmark, {"steps": 0}, "steps must be an int >= 1, got 0"),
        (train.benchmark, {"batch": 10**6}, r"batch must be at most the \d+ images of digits28, got 1000000"),
        (certify.benchmark, {"rounds": 0}, "rounds must be an int >= 1, got 0"),
        (certify.benchmark, {"images": 1438}, "images and batch must be at most the 1437 images of .*, got 1438 .*"),
        (attacks.speed, {"queries": 0}, "queries must be an int >= 1, got 0"),
        (attacks.speed, {"budget": 785}, "budget must be at most the 784 features of digits28, got 785"),
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


def test_a_wrong_reference_is_refused(tmp_path: Path) -> None:
    path, known = tmp_path / "rs_attacks.txt", list(sys.path)
    for text, reason in (("import no_such_module", r" \(ModuleNotFoundError: "), ("", ", which has no RSAttack$")):
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


def test_a_command_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--threads", 0, "threads must satisfy 1 <= threads <= "),
        ("--seed", 2**64, f"seed must satisfy 0 <= seed < 2**64, got {2**64}"),
        ("--device", "cuda", "torch finds no CUDA GPU: device must be \"cpu\", got 'cuda'"),
        ("--out", "/dev/null/a.json", "out must be a name in a folder that can be written, got "),
    ],
)
def test_an_error_is_one_sentence_before_the_work(
    option: str, value: object, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command(lambda _: pytest.fail("something was measured"), option, str(value)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"layer.py: {said}")
    assert error.count("\n") == 1


def test_scripts_need_torch_and_numpy_alone() -> None:
    code = (
        "import runpy, sys\n"
        "sys.modules.update(dict.fromkeys(('sklearn', 'scipy', 'rich', 'cyclopts', 'jinja2', 'foolbox')))\n"
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


@pytest.mark.parametrize("reference", ["", "some where/rs_attacks.py"])
def test_make_runs_the_benchmarks_and_then_writes_the_docs(reference: str, tmp_path: Path) -> None:
    given = ["--reference", reference] if reference else []
    for target, script, peer in (("bench", "layer", []), ("bench-attacks", "attacks", given)):
        make = ["make", "--no-print-directory", "--dry-run", target, f"REFERENCE={reference}"]
        run = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
        *_, measured, tables, figures = (shlex.split(line)[1:] for line in run.stdout.splitlines())
        wanted = ["--require-mnist", "--threads", "2", *peer, "--out", f"results/bench-{script}-cpu.json"]
        assert measured == [f"benchmarks/{script}.py", *wanted]
        assert (tables, figures) == (["tools/tables.py"], ["tools/figures.py"])
    with pytest.raises(FileNotFoundError, match="run `ell0 data get mnist"):
        Run(root=tmp_path, require_mnist=True).images()


def test_the_command_of_a_count_can_be_given_again() -> None:
    parser = measure.options("some.py", None)
    measure.add_counts(parser, training_rows="rows")
    found = Mock(return_value=Results("some", ""))
    assert measure.main(found, parser, ["--training-rows", "3"]) == 0
    assert found.call_args.args[0].command == "python benchmarks/some.py --training-rows 3"
    assert found.call_args.kwargs == {"training_rows": 3}


def test_votes_are_compared_on_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of 80 malware rows and more harmless ones as many are drawn; 16 of 20 features tell them apart."""
    draw = np.random.default_rng(0)
    y = np.arange(260) < 80
    x = draw.random((260, 20)) < np.where(np.arange(20) < 16, 0.15 + 0.7 * y[:, None], 0.5)
    np.savez(tmp_path / "some.npz", X=np.packbits(x, axis=1), d=20, y=y.astype(int))
    monkeypatch.setattr(groups, "LINEAR", ((2, 1),))
    monkeypatch.setattr(groups, "VOTES", ((5, 1), (10, 2)))
    monkeypatch.setattr(groups, "TRAINING", replace(groups.TRAINING, epochs=8, batch=32))
    results = groups.benchmark(Run(), data=tmp_path / "some.npz")
    assert results.name == "votes-some"
    for name in (OURS, groups.VOTE):
        shares = [row.value for row in results.select(classifier=name, n=32)]
        assert len(shares) == 6  # clean, four budgets, the median
        assert shares[:5] == sorted(shares[:5], reverse=True)
        assert shares[0] > 0.8
        assert results.find(classifier=name, what="certified_radius").value >= 1
    assert results.find(what="certified_radius", classifier=groups.VOTE)["parts"] in (5, 10)


def test_a_search_over_votes_measures_validation_images_and_fills_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: dict[str, Any] = {"width": 16, "depth": 1, "dropout": 0.0}
    plain = votes_search.Candidate((votes_search.Grid((2, 4)),), "mlp", small, 1)
    sheared = plain.on(votes_search.Grid((2, 4), block=(2, 1), shear=2), votes_search.Grid((4, 2)))
    seen = plain.on(more={"seen": 2}, augment="warp-colour", epochs=9, members=2)
    made = {"8 parts": plain, "8 parts, two families": sheared, "8 parts, 2 seen": seen}
    made["8 parts, wrong"] = plain.on(budget=4)
    monkeypatch.setattr(votes_search, "TRIED", made)
    monkeypatch.setattr(votes_search, "DATA", "digits")
    monkeypatch.setattr(votes_search, "TRAINING", replace(votes_search.TRAINING, batch=64, precision="fp32"))
    said: list[str] = []
    results = votes_search.benchmark(Run(say=said.append), seconds=1, images=100)
    assert said[-1].startswith("8 parts, wrong failed: budget must be below half")
    assert {row["classifier"] for row in results.rows} == {"8 parts", "8 parts, two families", "8 parts, 2 seen"}
    assert {row.get("method") for row in results.rows} == {None, "hard", "plurality", "run-off"}
    shares = [row.value for row in results.select(what="certified_accuracy", classifier="8 parts", method=None)]
    assert shares == sorted(shares, reverse=True)
    assert shares[3:] == [0.0] * 6  # half of the parts, and more
    assert results.select(classifier="8 parts, 2 seen")[0].beside["epochs"] == 9
    results.commit = "000000000000"
    results.save(tmp_path / "results" / "votes-search.json")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    lines = tables.table("votes-search").split("\n")
    assert [line.split(" | ")[0] for line in lines[2:8]] == [
        *("| 8 parts", "| 8 parts, hard", "| 8 parts, plurality", "| 8 parts, run-off", "| 8 parts, two families"),
        "| 8 parts, 2 seen",
    ]
    assert not votes_search.tried(Run(say=said.append), "8 parts", seconds=1, until=0.0, images=100)
    assert said[-1] == "8 parts is left out: the time is over"
    with pytest.raises(ValueError, match="only must name candidates"):
        votes_search.benchmark(Run(), only="8 parts + 9 parts")


def test_radii_of_families_hold_against_every_change_of_pixels() -> None:
    """One family: as a vote alone. Two: the worst of all changed pixels, whose parts then say anything."""
    draw, y = torch.Generator().manual_seed(0), torch.zeros(1, dtype=torch.int64)
    owners = [grid.partition((1, 6, 6)).owner for grid in votes_search.few((2, 3), (3, 2))]
    parts, found = torch.stack((owners[0], 6 + owners[1]), 1), set()
    for _ in range(60):
        logits = torch.randn(1, 12, 3, generator=draw, dtype=torch.float64) + torch.tensor([1.5, 0.0, 0.0])
        one = logits[:, :6]
        alone = rules.radii(one, y, torch.ones(1, 6, dtype=torch.bool), "duel", 0.5, 0.0, 0.0)
        wrong = int(rules.scores(one, "duel", 0.5).argmax()) != 0
        assert int(votes_search.radii(one, y, owners[:1], 0.5)) == (-1 if wrong else int(alone))
        found.add(held := int(votes_search.radii(logits, y, owners, 0.5)))
        for m, worst in product(range(1, min(held, 2) + 1), (1, 2)):
            touched = parts[torch.tensor([*combinations(range(36), m)])].flatten(1)
            after = logits.repeat(len(touched), 1, 1)
            after[torch.arange(len(touched)).unsqueeze(1), touched] = 9.0 * torch.eye(3, dtype=torch.float64)[worst]
            assert not rules.scores(after, "duel", 0.5).argmax(1).any()
    assert {0, 1, 2} <= found


def test_bounds_inside_parts_hold_against_changes_on_a_grid() -> None:
    """Three parts of four pixels: whatever up to radius pixels become, the vote answers as before."""
    draw, partition, found = torch.Generator().manual_seed(0), Partition.strides((1, 2, 6), (1, 3)), set()
    for seed in range(16):
        torch.manual_seed(seed)
        model, y = in_part.BoundedParts(partition, 2, 5).double(), torch.arange(1)
        model.shift.data[:, 0, 0] += seed / 4
        x = (1.3 * torch.rand(1, 1, 2, 6, generator=draw) - 1.2).double()
        quick, tight = (model.leads(x, y, quick=each) for each in (True, False))
        assert (quick <= tight + 1e-9).all()
        costs, dearest = tight[0] - tight, in_part.increments(tight).sort(2, descending=True).values.cumsum(2)
        for shared in product(range(4), repeat=3):  # so many changes in each of the parts
            if m := sum(shared):
                assert (costs[list(shared), 0, range(3)].sum(0) <= dearest[0, :, m - 1] + 1e-9).all()
        found.add(radius := int(in_part.radii(model, x, y)))
        if radius > 0:
            places = torch.tensor([*combinations(range(12), min(radius, 3))])
            values = torch.tensor([*product((-1.0, 5.0), repeat=places.shape[1])]).double()
            points = x.flatten(1).repeat(len(places) * len(values), 1)
            points.scatter_(1, places.repeat_interleave(len(values), 0), values.repeat(len(places), 1))
            after = model.leads(points.view(-1, 1, 2, 6), y.expand(len(points)), quick=False)[0].sum(1)
            assert after[:, 1:].amin() > 0
    assert {-1, 0, 2, 3} <= found


def test_in_part_bounds_are_measured_beside_one_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, y = data.load("digits", "train")
    rows = F.pad(x, (10, 10, 10, 10), value=-1.0), y
    monkeypatch.setattr(data, "load", lambda *_: rows)
    monkeypatch.setattr(in_part, "TRIED", (((7, 7), 1, 4), ((2, 2), 2, 4)))
    results = in_part.benchmark(Run(), images=60, epochs=2)
    assert len(results.rows) == 3 * 10
    results.commit = "000000000000"
    results.save(tmp_path / "results" / "votes-in-part.json")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    lines = tables.table("votes-in-part").split("\n")[2:5]
    assert [line.split(" | ")[0] for line in lines] == [
        "| 49 parts, bounds for 1 inside", "| 4 parts, bounds for 2 inside", "| one network, bounds"
    ]  # fmt: skip
