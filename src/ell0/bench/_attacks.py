"""Attacks against their peers: on one model, the same images, in one run."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import data, models
from ..attacks import ATTACKS, AttackResult, declared
from ..common import check_count
from ..evaluation import Share, cascade
from ..results import Results
from ..threat import L0Ball
from ._layer import check_seed
from ._timing import Progress, timed

T = TypeVar("T")
ROUNDS = 3


def attacks(
    *,
    images: int = 1000,
    budget: int = 5,
    queries: int = 1000,
    epochs: int = 5,
    root: Path | None = None,
    require_mnist: bool = False,
    reference: Path | None = None,
    command: str = "ell0 bench attacks",
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> Results:
    """Robust accuracy, queries and time of every attack and of the peers that are here, on one F(10).

    The network is trained on clean MNIST (digits where MNIST is not found), ``epochs`` from ``seed``; the first
    ``images`` test images are attacked. Four questions, each a group of rows: what each attack leaves standing with
    values up to 1 and up to 100; whether white-box attacks and `adaptive` together break more than Sparse-RS does at
    their price, with values up to 100; `sparse_rs` against a reference implementation; `pointwise` against foolbox.
    A peer that fails is told of by ``progress``, and its rows are left out.

    Args:
        images: at least 1; where there are fewer, all.
        queries: of `sparse_rs` and `adaptive`.
        require_mnist: lets nothing stand in for MNIST.
        reference: file ``rs_attacks.py`` of the authors of Sparse-RS; its rows are left out without it.
    """
    for argument, value, least in (
        ("images", images, 1), ("budget", budget, 1), ("queries", queries, 1), ("epochs", epochs, 0),
    ):  # fmt: skip
        check_count(argument, value, least)
    check_seed(seed)
    start = time.perf_counter()
    results = Results.here("bench-attacks-cpu", command, seeds=[seed], device="cpu")
    rs_attack = None
    if reference is not None:
        rs_attack = _load_reference(reference)
        results.versions["reference"] = hashlib.sha256(reference.read_bytes()).hexdigest()[:12]
    name, training = _training(root, require_mnist)
    x, y = (t[:images] for t in data.load(name, "test", root))
    if budget > x[0].numel():
        raise ValueError(f"budget must be at most the {x[0].numel()} features of {name}, got {budget}")
    network = _network(name, *training, epochs, seed, progress)
    what = {"data": name, "network": "F(10)", "epochs": epochs, "n": len(x)}
    accuracy = _accuracy(network, x, y)
    _add(results, accuracy, what | {"what": "clean"})
    results.add(_forward_seconds(network, x), what="forward", unit="seconds", batch=len(x), **what)
    for beta in (1.0, 100.0):
        ball = L0Ball(budget, low=-beta, high=beta)
        price = _each(results, network, x, y, ball, queries, seed, what | {"beta": beta, "budget": budget}, progress)
    _at_equal_price(results, network, x, y, ball, price, seed, what | {"beta": beta, "budget": budget}, progress)
    if rs_attack is not None:
        progress("Sparse-RS of its authors")
        _against_authors(results, network, x, y, budget, queries, rs_attack, seed, what, progress)
    if importlib.util.find_spec("foolbox") is not None:
        progress("foolbox")
        _against_foolbox(results, network, x[:100], y[:100], seed, what | {"n": min(100, len(x))}, progress)
    results.seconds = round(time.perf_counter() - start, 1)
    return results


class _Watch(nn.Module):
    """A model that counts the rows it is asked about, forwards and backwards, and the time its forwards take."""

    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._model, self.seconds, self.rows = model, 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        out = self._model(x)
        self.seconds += time.perf_counter() - start
        self.rows += len(x)
        if out.requires_grad:
            out.register_hook(self._count)
        return out

    def _count(self, grad: Tensor) -> None:
        self.rows += len(grad)

    def price(self, seconds: float, n: int) -> dict[str, float]:
        """Of a run on n images that took so long."""
        return {
            "seconds": seconds,
            "queries": self.rows / n,
            "queries_per_second": self.rows / seconds,
            "model_seconds": self.seconds,
        }


def _training(root: Path | None, require_mnist: bool) -> tuple[str, tuple[Tensor, Tensor]]:
    """MNIST's training images and labels; where they are not found and not required, those of digits."""
    try:
        return "mnist", data.load("mnist", "train", root)
    except FileNotFoundError:
        if require_mnist:
            raise
        return "digits", data.load("digits", "train")


def _network(name: str, x: Tensor, y: Tensor, epochs: int, seed: int, progress: Progress) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = models.mlp(10, in_features=x[0].numel())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        progress(f"epoch {epoch + 1} of {epochs} of F(10) on clean {name}")
        for part in torch.randperm(len(x), generator=generator).split(256):
            optimizer.zero_grad()
            F.cross_entropy(network(x[part]), y[part]).backward()
            optimizer.step()
    return network.eval()


def _accuracy(network: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((network(x).argmax(1) == y).double().mean())


def _forward_seconds(network: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        network(x)
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            network(x)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _add(results: Results, accuracy: float, what: dict[str, Any]) -> None:
    results.add(**what | Share(round(accuracy * what["n"]), what["n"]).record(), unit="accuracy")


def _run(
    network: nn.Module, x: Tensor, y: Tensor, ball: L0Ball, attack: Callable[..., AttackResult], seed: int
) -> tuple[AttackResult, dict[str, float]]:
    """An attack's result and its price."""
    watch, start = _Watch(network), time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    # An attack that looks into the model must see the model itself.
    result = attack(network if _looks_inside(attack) else watch, x, y, ball, generator=generator)
    seconds = time.perf_counter() - start
    price = {"seconds": seconds, "queries": float(result.queries.double().mean())}
    price["queries_per_second"] = float(result.queries.sum()) / seconds
    if watch.rows:
        price["model_seconds"] = watch.seconds
    return result, price


def _looks_inside(attack: Callable[..., AttackResult]) -> bool:
    own = declared(attack)
    return own is not None and own.white_box


def _each(
    results: Results,
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: L0Ball,
    queries: int,
    seed: int,
    what: dict[str, Any],
    progress: Progress,
) -> float:
    """A row for each attack and one for the union of the white-box ones; gives the queries of the union and of
    `sparse_rs` together: what an evaluation with that union pays for, and one without could spend on `sparse_rs`."""
    # The first value set of an attack stands under its plain name.
    entries = {
        name.replace("_corners", "").replace("_uniform", ", uniform"): entry
        for name, entry in cascade(queries=queries).items()
    }
    broken, spent, seconds, plain = torch.zeros(len(x), dtype=torch.bool), 0.0, 0.0, 0.0
    for name, entry in entries.items():
        progress(f"{name}, values up to {what['beta']:g}")
        result, price = _run(network, x, y, ball, entry.attack, seed)
        _add(results, 1 - float(result.success.double().mean()), what | price | {"what": "attack", "attack": name})
        if entry.white_box:
            broken |= result.success
            spent += price["queries"]
            seconds += price["seconds"]
        if name == "sparse_rs":
            plain = price["queries"]
    white = ", ".join(name for name, entry in entries.items() if entry.white_box)
    union = {"what": "attack", "attack": f"union of {white}", "queries": spent, "seconds": seconds}
    _add(results, 1 - float(broken.double().mean()), what | union)
    return spent + plain


def _at_equal_price(
    results: Results,
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: L0Ball,
    price: float,
    seed: int,
    what: dict[str, Any],
    progress: Progress,
) -> None:
    """Sparse-RS with ``price`` queries on average: in one run, and in restarts, two or as many as there are 1,000s."""
    for restarts in (1, max(2, round(price / 1000))):
        progress(f"sparse_rs at the price of the union, restarts={restarts}")
        # A row that breaks early spends less, so the limit is raised until the average is reached.
        queries = max(1, round(price / restarts))
        while True:
            attack = partial(ATTACKS["sparse_rs"], queries=queries, restarts=restarts)
            result, paid = _run(network, x, y, ball, attack, seed)
            if paid["queries"] >= price or result.success.all() or queries * restarts > 20 * price:
                break
            queries = int(queries * min(2.0, 1.1 * price / paid["queries"])) + 1
        settings = {"what": "equal price", "attack": "sparse_rs", "restarts": restarts, "limit": queries * restarts}
        _add(results, 1 - float(result.success.double().mean()), what | paid | settings)


def _tried(peer: str, call: Callable[[], T], progress: Progress) -> T | None:
    """What a peer's code gives; where it fails, None, so that its fault costs no other figure."""
    try:
        return call()
    except Exception as error:
        progress(f"{peer} failed and is left out: {error!r}")
        return None


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds torch and numpy for peers, which draw from the global generators, and gives these back as they were."""
    state = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002


def _faster(theirs: float, ours: Sequence[float]) -> dict[str, Any]:
    """Their seconds, measured once, over the median of ours; low and high are those of single rounds."""
    return {
        "value": theirs / statistics.median(ours),
        "low": theirs / max(ours),
        "high": theirs / min(ours),
        "unit": "x faster",
        "seconds": statistics.median(ours),
        "rounds": len(ours),
    }


def _against_authors(
    results: Results,
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    budget: int,
    queries: int,
    rs_attack: Any,
    seed: int,
    what: dict[str, Any],
    progress: Progress,
) -> None:
    """Our `sparse_rs` and the authors' on the network and on a model that costs nothing."""
    name = "sparse_rs of the authors"
    square = x if x.ndim == 4 else x.view(len(x), 1, 1, -1)
    logits = torch.eye(int(y.max()) + 2)[y]  # never wrong, whatever the input

    def free(z: Tensor) -> Tensor:
        return logits[: len(z)]

    def run(model: Callable[[Tensor], Tensor], count: int) -> tuple[Tensor, float]:
        # The authors' code knows the box [0, 1] only.
        attack = rs_attack(
            lambda unit: model(2 * unit - 1).clone(), norm="L0", eps=budget, n_queries=count, seed=seed, verbose=False,
            device="cpu", log_path=None,
        )  # fmt: skip
        start = time.perf_counter()
        with _seeded(seed):
            _, points = attack.perturb((square + 1) / 2, y)
        return 2 * points - 1, time.perf_counter() - start

    def both() -> tuple[float, dict[str, float], float]:
        watch, few = _Watch(network).eval(), 20
        points, seconds = run(lambda z: watch(z.view(-1, *x.shape[1:])), queries)
        return _accuracy(network, points.view_as(x), y), watch.price(seconds, len(x)), run(free, few)[1] / few

    theirs = _tried(name, both, progress)
    if theirs is None:
        return
    standing, price, seconds = theirs
    what = what | {"beta": 1.0, "budget": budget, "what": "reference", "limit": queries}
    _add(results, standing, what | price | {"attack": name})
    ball = L0Ball(budget)
    ours, price = _run(network, x, y, ball, partial(ATTACKS["sparse_rs"], queries=queries), seed)
    _add(results, 1 - float(ours.success.double().mean()), what | price | {"attack": "sparse_rs"})
    timing = timed({"ours": lambda: ATTACKS["sparse_rs"](free, x, y, ball, queries=queries)}, ROUNDS)
    results.add(
        **_faster(seconds, [total / queries for total in timing.seconds["ours"]]), what="overhead", attack="sparse_rs",
        to=name, batch=len(x), budget=budget, n=len(x), data=what["data"],
    )  # fmt: skip


def _load_reference(path: Path) -> Any:
    """The authors' class ``RSAttack``."""
    rule = f"reference must be the file rs_attacks.py of the authors of Sparse-RS, got {path}"
    if not path.is_file():
        raise ValueError(rule)
    try:
        with _first_on_path(path.resolve().parent):
            found = runpy.run_path(str(path))
    except Exception as error:
        raise ValueError(f"{rule} ({type(error).__name__}: {error})") from error
    if "RSAttack" not in found:
        raise ValueError(f"{rule}, which has no RSAttack")
    return found["RSAttack"]


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _against_foolbox(
    results: Results, network: nn.Module, x: Tensor, y: Tensor, seed: int, what: dict[str, Any], progress: Progress
) -> None:
    """Median distances over any number of changed features, 10 repeats, and what they take."""
    ball, never = L0Ball(x[0].numel()), x[0].numel()

    def run(attack: str, repeats: int, **settings: Any) -> tuple[Tensor, dict[str, float]]:
        foolbox = importlib.import_module("foolbox")
        results.versions["foolbox"] = foolbox.__version__
        watch = _Watch(network).eval()
        fmodel = foolbox.PyTorchModel(watch, bounds=(-1, 1), device="cpu")
        call = getattr(foolbox.attacks, attack)(**settings)
        start = time.perf_counter()
        with _seeded(seed):
            points = [call.run(fmodel, x, foolbox.criteria.Misclassification(y)) for _ in range(repeats)]
        seconds = time.perf_counter() - start
        return _distances(points, network, x, y, ball), watch.price(seconds, len(x))

    repeats, steps = 10, 100
    pointwise = _tried(
        "foolbox PointwiseAttack", partial(run, "PointwiseAttack", repeats, l2_binary_search=False), progress
    )
    fmn = _tried("foolbox L0FMNAttack", partial(run, "L0FMNAttack", 1, steps=steps), progress)
    for name, theirs, setting in (
        ("foolbox PointwiseAttack", pointwise, {"repeats": repeats}),
        ("foolbox L0FMNAttack", fmn, {"steps": steps}),
    ):
        if theirs is not None:
            _distance_row(results, theirs[0], what | theirs[1] | setting | {"attack": name})
    ours: tuple[tuple[str, Callable[..., AttackResult]], ...] = (
        ("pointwise", partial(ATTACKS["pointwise"], repeats=repeats)),
        ("sigma_zero", partial(ATTACKS["sigma_zero"], steps=steps, minimise=True)),
    )
    for name, attack in ours:
        result, price = _run(network, x, y, ball, attack, seed)
        _distance_row(results, torch.where(result.success, result.distance, never), what | price | {"attack": name})
        if name == "pointwise" and pointwise is not None:
            again = [_run(network, x, y, ball, attack, seed)[1]["seconds"] for _ in range(ROUNDS - 1)]
            results.add(
                **_faster(pointwise[1]["seconds"], [price["seconds"], *again]), what="speed", attack=name,
                to="foolbox PointwiseAttack", batch=len(x), n=len(x), data=what["data"],
            )  # fmt: skip


def _distances(runs: Iterable[Tensor], network: nn.Module, x: Tensor, y: Tensor, ball: L0Ball) -> Tensor:
    """The smallest number of changed features over the runs, 0 where misclassified, d where never."""
    best = torch.full((len(x),), x[0].numel())
    with torch.no_grad():
        for points in runs:
            best = torch.where(network(points).argmax(1) != y, torch.minimum(best, ball.count(x, points)), best)
        return torch.where(network(x).argmax(1) != y, 0, best)


def _distance_row(results: Results, distances: Tensor, what: dict[str, Any]) -> None:
    ordered = distances.double().sort().values
    quarter = len(ordered) // 4
    results.add(
        float(ordered.quantile(0.5)), what="distance", unit="median features", low=float(ordered[quarter]),
        high=float(ordered[-quarter - 1]), **what,
    )  # fmt: skip
