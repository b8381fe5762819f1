"""Attacks against their peers: on one model, the same images, in one run."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import data, models
from ..attacks import ATTACKS, AttackResult
from ..evaluation import WHITE_BOX, Share
from ..results import Results
from ..threat import L0Ball
from ._timing import Progress


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

    Args:
        queries: of `sparse_rs` and `adaptive`.
        require_mnist: lets nothing stand in for MNIST.
        reference: file ``rs_attacks.py`` of the authors of Sparse-RS; its rows are left out without it.
    """
    start = time.perf_counter()
    authors = None if reference is None else _load_reference(reference)
    results = Results.here("bench-attacks-cpu", command, seeds=[seed], device="cpu")
    name, network = _network(root, require_mnist, epochs, seed, progress)
    x, y = (t[:images] for t in data.load(name, "test", root))
    what = {"data": name, "network": "F(10)", "epochs": epochs, "n": len(x)}
    accuracy = _accuracy(network, x, y)
    _add(results, accuracy, what | {"what": "clean"})
    results.add(_forward_seconds(network, x), what="forward", unit="seconds", batch=len(x), **what)
    for beta in (1.0, 100.0):
        ball = L0Ball(budget, low=-beta, high=beta)
        spent = _each(results, network, x, y, ball, queries, seed, what | {"beta": beta, "budget": budget}, progress)
    _at_equal_price(results, network, x, y, ball, spent, seed, what | {"beta": beta, "budget": budget}, progress)
    if authors is not None:
        progress("Sparse-RS of its authors")
        _against_authors(results, network, x, y, budget, queries, authors, seed, what)
    if importlib.util.find_spec("foolbox") is not None:
        progress("foolbox")
        _against_foolbox(results, network, x[:100], y[:100], seed, what | {"n": min(100, len(x))})
    results.seconds = round(time.perf_counter() - start, 1)
    return results


class _Watch:
    """A model that counts the rows it is asked about and the time it takes."""

    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        self._model, self.seconds, self.rows = model, 0.0, 0

    def __call__(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        out = self._model(x)
        self.seconds += time.perf_counter() - start
        self.rows += len(x)
        return out


def _network(
    root: Path | None, require_mnist: bool, epochs: int, seed: int, progress: Progress
) -> tuple[str, nn.Module]:
    try:
        name, (x, y) = "mnist", data.load("mnist", "train", root)
    except FileNotFoundError:
        if require_mnist:
            raise
        name, (x, y) = "digits", data.load("digits", "train")
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
    return name, network.eval()


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
    function = attack.func if isinstance(attack, partial) else attack
    return function in {ATTACKS[name] for name in WHITE_BOX}


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
    """A row for each attack and one for the union of the white-box ones; gives what that union cost in queries."""
    settings: dict[str, Callable[..., AttackResult]] = {
        "sparse_pgd": ATTACKS["sparse_pgd"],
        "sigma_zero": ATTACKS["sigma_zero"],
        "adaptive": partial(ATTACKS["adaptive"], queries=queries),
        "sparse_rs": partial(ATTACKS["sparse_rs"], queries=queries),
        "sparse_rs, uniform": partial(ATTACKS["sparse_rs"], queries=queries, values="uniform"),
    }
    broken, spent, seconds = torch.zeros(len(x), dtype=torch.bool), 0.0, 0.0
    for name, attack in settings.items():
        progress(f"{name}, values up to {what['beta']:g}")
        result, price = _run(network, x, y, ball, attack, seed)
        _add(results, 1 - float(result.success.double().mean()), what | price | {"what": "attack", "attack": name})
        if name in WHITE_BOX:
            broken |= result.success
            spent += price["queries"]
            seconds += price["seconds"]
    union = {"what": "attack", "attack": "union of " + ", ".join(WHITE_BOX), "queries": spent, "seconds": seconds}
    _add(results, 1 - float(broken.double().mean()), what | union)
    return spent


def _at_equal_price(
    results: Results,
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: L0Ball,
    spent: float,
    seed: int,
    what: dict[str, Any],
    progress: Progress,
) -> None:
    """Sparse-RS with as many queries on average as the union took: in one run, and in restarts of 1,000."""
    for restarts in sorted({1, max(1, round(spent / 1000))}):
        progress(f"sparse_rs at the price of the union, {restarts} restarts")
        # A row that breaks early spends less, so the limit is raised until the average is reached.
        queries = max(1, round(spent / restarts))
        while True:
            attack = partial(ATTACKS["sparse_rs"], queries=queries, restarts=restarts)
            result, price = _run(network, x, y, ball, attack, seed)
            if price["queries"] >= spent or result.success.all() or queries * restarts > 20 * spent:
                break
            queries = int(queries * min(2.0, 1.1 * spent / price["queries"])) + 1
        settings = {"what": "equal price", "attack": "sparse_rs", "restarts": restarts, "limit": queries * restarts}
        _add(results, 1 - float(result.success.double().mean()), what | price | settings)


def _against_authors(
    results: Results,
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    budget: int,
    queries: int,
    authors: Any,
    seed: int,
    what: dict[str, Any],
) -> None:
    """Our `sparse_rs` and the authors' on the network and on a model that costs nothing."""
    square = x if x.ndim == 4 else x.view(len(x), 1, 1, -1)

    def run(model: Callable[[Tensor], Tensor], count: int) -> tuple[Tensor, float]:
        # The authors' code knows the box [0, 1] only.
        attack = authors.RSAttack(
            lambda unit: model(2 * unit - 1).clone(), norm="L0", eps=budget, n_queries=count, seed=seed, verbose=False,
            device="cpu", log_path=None,
        )  # fmt: skip
        start = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            _, points = attack.perturb((square + 1) / 2, y)
        return 2 * points - 1, time.perf_counter() - start

    ball = L0Ball(budget)
    points, seconds = run(lambda z: network(z.view(-1, *x.shape[1:])), queries)
    standing = _accuracy(network, points.view_as(x), y)
    what = what | {"beta": 1.0, "budget": budget, "what": "reference", "limit": queries}
    _add(results, standing, what | {"attack": "sparse_rs of the authors", "seconds": seconds})
    ours, price = _run(network, x, y, ball, partial(ATTACKS["sparse_rs"], queries=queries), seed)
    _add(results, 1 - float(ours.success.double().mean()), what | price | {"attack": "sparse_rs"})

    logits = torch.eye(int(y.max()) + 2)[y]  # never wrong, whatever the input

    def free(z: Tensor) -> Tensor:
        return logits[: len(z)]

    few = 20
    theirs = run(free, few)[1] / few
    start = time.perf_counter()
    ATTACKS["sparse_rs"](free, x, y, ball, queries=queries)
    mine = (time.perf_counter() - start) / queries
    results.add(
        theirs / mine, what="overhead", attack="sparse_rs", to="sparse_rs of the authors", unit="x faster",
        seconds=mine, batch=len(x), budget=budget, n=len(x), data=what["data"],
    )  # fmt: skip


def _load_reference(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"reference must be the file rs_attacks.py of the authors of Sparse-RS, got {path}")
    with _first_on_path(path.resolve().parent):
        spec = importlib.util.spec_from_file_location("sparse_rs_of_the_authors", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _against_foolbox(
    results: Results, network: nn.Module, x: Tensor, y: Tensor, seed: int, what: dict[str, Any]
) -> None:
    """Median distances over any number of changed features, 10 repeats, and what they take."""
    foolbox = importlib.import_module("foolbox")
    fmodel = foolbox.PyTorchModel(network, bounds=(-1, 1), device="cpu")
    ball = L0Ball(x[0].numel())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pointwise = foolbox.attacks.PointwiseAttack(l2_binary_search=False)
        theirs, seconds = _distances(
            (pointwise.run(fmodel, x, foolbox.criteria.Misclassification(y)) for _ in range(10)), network, x, y, ball
        )
        _distance_row(results, theirs, what | {"attack": "foolbox PointwiseAttack", "repeats": 10, "seconds": seconds})
        fmn = foolbox.attacks.L0FMNAttack(steps=100)
        near, fmn_seconds = _distances(
            (fmn.run(fmodel, x, foolbox.criteria.Misclassification(y)) for _ in range(1)), network, x, y, ball
        )
        _distance_row(results, near, what | {"attack": "foolbox L0FMNAttack", "steps": 100, "seconds": fmn_seconds})
    for name, attack in (
        ("pointwise", partial(ATTACKS["pointwise"], repeats=10)),
        ("sigma_zero", partial(ATTACKS["sigma_zero"], steps=100, minimise=True)),
    ):
        result, price = _run(network, x, y, ball, attack, seed)
        units = torch.where(result.success, result.distance, x[0].numel())
        _distance_row(results, units, what | price | {"attack": name})
        if name == "pointwise":
            results.add(
                seconds / price["seconds"], what="speed", attack=name, to="foolbox PointwiseAttack", unit="x faster",
                batch=len(x), n=len(x), data=what["data"],
            )  # fmt: skip


def _distances(runs: Iterable[Tensor], network: nn.Module, x: Tensor, y: Tensor, ball: L0Ball) -> tuple[Tensor, float]:
    """The smallest number of changed features over the runs, 0 where misclassified, d where never; and the seconds."""
    start = time.perf_counter()
    best = torch.full((len(x),), x[0].numel())
    for points in runs:
        with torch.no_grad():
            wrong = network(points).argmax(1) != y
        best = torch.where(wrong, torch.minimum(best, ball.count(x, points)), best)
    with torch.no_grad():
        best = torch.where(network(x).argmax(1) != y, 0, best)
    return best, time.perf_counter() - start


def _distance_row(results: Results, distances: Tensor, what: dict[str, Any]) -> None:
    ordered = distances.double().sort().values
    quarter = len(ordered) // 4
    results.add(
        float(ordered.quantile(0.5)), what="distance", unit="median features", low=float(ordered[quarter]),
        high=float(ordered[-quarter - 1]), **what,
    )  # fmt: skip
