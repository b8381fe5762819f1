"""Compare the attacks with each other and with their peers on one truncated network.

    python benchmarks/attacks.py --images 100 --epochs 1
    python benchmarks/attacks.py --reference sparse-rs/rs_attacks.py --out results/bench-attacks-cpu.json
    python benchmarks/attacks.py --device cuda

foolbox is compared if it is installed. --device cuda measures only the time of sparse_rs on F(10) against F(0).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ell0 import data
from ell0.adapters.judging import borrowed_draws
from ell0.attacks import ATTACKS, AttackResult, declared
from ell0.common import check_count
from ell0.evaluation import cascade
from ell0.results import Results, Share
from ell0.threat import L0Ball
from measure import Run, add_counts, main, options, timed

T = TypeVar("T")
ROUNDS = 3
WARM_UP = 3  # queries
# No ten numbers of [-1, 1] move the logits of an untrained network that far, and differences of logits are still seen
# beside it: at 1e6 float32 would round them away, and the search would have nothing to write down.
LEAD = 1e3


class Watch(nn.Module):
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
        """Entries of a row: what a run on n images cost."""
        speed = {"queries": self.rows / n, "queries_per_second": self.rows / seconds}
        return {"seconds": seconds, **speed, "model_seconds": self.seconds}


@dataclass(frozen=True)
class Comparison:
    """The network, the images and the results that a comparison adds to.  what: entries of every row."""

    run: Run
    results: Results
    network: nn.Module
    x: Tensor
    y: Tensor
    what: dict[str, Any]

    def add(self, accuracy: float, **what: Any) -> None:
        """A share of the images, with its interval."""
        n = len(self.x)
        self.results.add(Share(round(accuracy * n), n), **self.what | what, unit="accuracy")

    def add_standing(self, result: AttackResult, **what: Any) -> None:
        """The share of the images that an attack did not break."""
        self.add(1 - float(result.success.double().mean()), **what)

    def add_distances(self, distances: Tensor, **what: Any) -> None:
        """The median of changed features, between quartiles."""
        ordered = distances.double().sort().values
        quarter = len(ordered) // 4
        spread = {"low": float(ordered[quarter]), "high": float(ordered[-quarter - 1])}
        what = self.what | what | {"n": len(ordered), **spread}
        self.results.add(float(ordered.quantile(0.5)), what="distance", unit="median features", **what)

    def add_faster(self, theirs: float, ours: Sequence[float], **what: Any) -> None:
        """Their seconds, measured once, over the median of ours; low and high are those of single rounds."""
        middle = statistics.median(ours)
        spread = {"low": theirs / max(ours), "high": theirs / min(ours), "seconds": middle, "rounds": len(ours)}
        self.results.add(theirs / middle, unit="x faster", data=self.what["data"], **spread, **what)

    def accuracy(self, x: Tensor) -> float:
        """The share of these images that the network classifies right."""
        with torch.no_grad():
            return float((self.network(x).argmax(1) == self.y).double().mean())

    def attacked(self, attack: Callable[..., AttackResult], ball: L0Ball) -> tuple[AttackResult, dict[str, float]]:
        """An attack's result and its price."""
        watch, start = Watch(self.network), time.perf_counter()
        generator = torch.Generator().manual_seed(self.run.seed)
        # A white-box attack looks into the model and must see the model itself.
        declaration = declared(attack)
        model = self.network if declaration and declaration.white_box else watch
        result = attack(model, self.x, self.y, ball, generator=generator)
        seconds = time.perf_counter() - start
        price = {"seconds": seconds, "queries": float(result.queries.double().mean())}
        price["queries_per_second"] = float(result.queries.sum()) / seconds
        return result, price | ({"model_seconds": watch.seconds} if watch.rows else {})

    def peer(self, name: str, call: Callable[[], T]) -> T | None:
        """What a peer's code returns; None if it fails, so that its fault costs no other figure."""
        try:
            return call()
        except Exception as error:
            self.run.say(f"{name} failed and is left out: {error!r}")
            return None


def benchmark(run: Run, *, epochs: int | None = None, reference: Path | None = None, **settings: int) -> Results:
    """`compare` on a processor, `speed` on a GPU."""
    if run.device == "cpu":
        return compare(run, reference=reference, **settings if epochs is None else settings | {"epochs": epochs})
    for name, value in (("epochs", epochs), ("reference", reference)):
        if value is not None:
            raise ValueError(f"{name} must be left out with --device cuda, got {value}")
    return speed(run, **settings)


def compare(
    run: Run,
    *,
    images: int = 1000,
    budget: int = 5,
    queries: int = 1000,
    epochs: int = 5,
    reference: Path | None = None,
) -> Results:
    """Robust accuracy, queries and time of every attack and of the peers that are here, on one F(10).

    The network is trained on clean MNIST (digits if MNIST is not found); the first ``images`` test images are attacked.
    Four questions, each a group of rows: what each attack leaves standing with values up to 1 and up to 100; whether
    white-box attacks together break more than Sparse-RS at their price, with values up to 100; `sparse_rs` against a
    reference implementation; `pointwise` against foolbox. A peer that fails is named, and its rows are left out.

    Args:
        queries: of `sparse_rs` and `adaptive`.
        reference: file ``rs_attacks.py`` of the authors of Sparse-RS.
    """
    for argument, value, least in (
        ("images", images, 1), ("budget", budget, 1), ("queries", queries, 1), ("epochs", epochs, 0),
    ):  # fmt: skip
        check_count(argument, value, least)
    results = run.results("bench-attacks")
    rs_attack = None
    if reference is not None:
        rs_attack = _load_reference(reference)
        results.versions["reference"] = hashlib.sha256(reference.read_bytes()).hexdigest()[:12]
    name, training = _training(run)
    x, y = (t[:images] for t in data.load(name, "test", run.root))
    if budget > x[0].numel():
        raise ValueError(f"budget must be at most the {x[0].numel()} features of {name}, got {budget}")
    network = _trained(run, name, *training, epochs)
    what = {"data": name, "network": "F(10)", "epochs": epochs, "n": len(x)}
    compared = Comparison(run, results, network, x, y, what)
    compared.add(compared.accuracy(x), what="clean")
    for beta in (1.0, 100.0):
        ball = L0Ball(budget, low=-beta, high=beta)
        price = _each(compared, ball, queries)
    at_equal_price(compared, ball, price)
    if rs_attack is not None:
        run.say("Sparse-RS of its authors")
        _against_authors(compared, L0Ball(budget, low=-1.0, high=1.0), queries, rs_attack)
    if importlib.util.find_spec("foolbox") is not None:
        run.say("foolbox")
        against_foolbox(Comparison(run, results, network, x[:100], y[:100], what))
    return results


def _training(run: Run) -> tuple[str, tuple[Tensor, Tensor]]:
    """MNIST's training images and labels; those of digits if they are not found and not required."""
    try:
        return "mnist", data.load("mnist", "train", run.root)
    except FileNotFoundError:
        if run.require_mnist:
            raise
        return "digits", data.load("digits", "train")


def _trained(run: Run, name: str, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    network = run.network(10, in_features=x[0].numel())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(run.seed)
    for epoch in range(epochs):
        run.say(f"epoch {epoch + 1} of {epochs} of F(10) on clean {name}")
        for part in torch.randperm(len(x), generator=generator).split(256):
            optimizer.zero_grad()
            F.cross_entropy(network(x[part]), y[part]).backward()
            optimizer.step()
    return network.eval()


def _each(compared: Comparison, ball: L0Ball, queries: int) -> float:
    """A row for each attack and one for the union of the white-box ones.

    Returns the queries of the union and of `sparse_rs` together: what an evaluation with that union pays for, and one
    without could spend on `sparse_rs`.
    """
    entries = {
        name.replace("_corners", "").replace("_uniform", ", uniform"): entry
        for name, entry in cascade(queries=queries).items()
    }
    what = {"what": "attack", "beta": float(ball.high), "budget": ball.budget}
    broken = torch.zeros(len(compared.x), dtype=torch.bool)
    union = {"queries": 0.0, "seconds": 0.0}
    for name, entry in entries.items():
        compared.run.say(f"{name}, values up to {ball.high:g}")
        result, price = compared.attacked(entry.attack, ball)
        compared.add_standing(result, **what, **price, attack=name)
        if entry.white_box:
            broken |= result.success
            union = {key: union[key] + price[key] for key in union}
        if name == "sparse_rs":
            searched = price["queries"]
    together = "union of " + ", ".join(name for name, entry in entries.items() if entry.white_box)
    compared.add(1 - float(broken.double().mean()), **what, **union, attack=together)
    return union["queries"] + searched


def at_equal_price(compared: Comparison, ball: L0Ball, price: float) -> None:
    """Sparse-RS with ``price`` queries on average: in one run, and in restarts, two or as many as there are 1,000s."""
    for restarts in (1, max(2, round(price / 1000))):
        compared.run.say(f"sparse_rs at the price of the union, restarts={restarts}")
        # A row that breaks early spends less, so the limit is raised until the average is reached.
        queries = max(1, round(price / restarts))
        while True:
            result, paid = compared.attacked(partial(ATTACKS["sparse_rs"], queries=queries, restarts=restarts), ball)
            if paid["queries"] >= price or result.success.all() or queries * restarts > 20 * price:
                break
            queries = int(queries * min(2.0, 1.1 * price / paid["queries"])) + 1
        settings = {"attack": "sparse_rs", "restarts": restarts, "limit": queries * restarts}
        box = {"beta": float(ball.high), "budget": ball.budget}
        compared.add_standing(result, what="equal price", **box, **paid, **settings)


def _against_authors(compared: Comparison, ball: L0Ball, queries: int, rs_attack: Any) -> None:
    """Our `sparse_rs` and the authors' on the network and on a model that costs nothing."""
    name, x, y, seed = "sparse_rs of the authors", compared.x, compared.y, compared.run.seed
    square = x if x.ndim == 4 else x.view(len(x), 1, 1, -1)
    logits = torch.eye(int(y.max()) + 2)[y]  # never wrong, whatever the input

    def free(z: Tensor) -> Tensor:
        return logits[: len(z)]

    def run(model: Callable[[Tensor], Tensor], count: int) -> tuple[Tensor, float]:
        # The authors' code knows the box [0, 1] only.
        attack = rs_attack(
            lambda unit: model(2 * unit - 1).clone(), norm="L0", eps=ball.budget, n_queries=count, seed=seed,
            verbose=False, device="cpu", log_path=None,
        )  # fmt: skip
        start = time.perf_counter()
        with borrowed_draws(seed):
            _, points = attack.perturb((square + 1) / 2, y)
        return 2 * points - 1, time.perf_counter() - start

    def both() -> tuple[float, dict[str, float], float]:
        watch, few = Watch(compared.network).eval(), 20
        points, seconds = run(lambda z: watch(z.view(-1, *x.shape[1:])), queries)
        return compared.accuracy(points.view_as(x)), watch.price(seconds, len(x)), run(free, few)[1] / few

    theirs = compared.peer(name, both)
    if theirs is None:
        return
    standing, price, seconds = theirs
    what = {"what": "reference", "beta": 1.0, "budget": ball.budget, "limit": queries}
    compared.add(standing, **what, **price, attack=name)
    attack = partial(ATTACKS["sparse_rs"], queries=queries)
    ours, price = compared.attacked(attack, ball)
    compared.add_standing(ours, **what, **price, attack="sparse_rs")
    timing = timed({"ours": lambda: attack(free, x, y, ball)}, ROUNDS)
    each = [total / queries for total in timing.seconds["ours"]]
    size = {"batch": len(x), "budget": ball.budget, "n": len(x)}
    compared.add_faster(seconds, each, what="overhead", attack="sparse_rs", to=name, **size)


def _load_reference(path: Path) -> Any:
    """The authors' class ``RSAttack``."""
    rule = f"reference must be the file rs_attacks.py of the authors of Sparse-RS, got {path}"
    if not path.is_file():
        raise ValueError(rule)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        found = runpy.run_path(str(path))
    except Exception as error:
        raise ValueError(f"{rule} ({type(error).__name__}: {error})") from error
    finally:
        sys.path.pop(0)
    if "RSAttack" not in found:
        raise ValueError(f"{rule}, which has no RSAttack")
    return found["RSAttack"]


def against_foolbox(compared: Comparison) -> None:
    """Median distances over any number of changed features, 10 repeats, and what they take."""
    x, y = compared.x, compared.y
    ball, repeats, steps = L0Ball(x[0].numel(), low=-1.0, high=1.0), 10, 100

    def run(attack: str, times: int, **settings: Any) -> tuple[Tensor, dict[str, float]]:
        foolbox = importlib.import_module("foolbox")
        compared.results.versions["foolbox"] = foolbox.__version__
        watch = Watch(compared.network).eval()
        fmodel = foolbox.PyTorchModel(watch, bounds=(-1, 1), device="cpu")
        call = getattr(foolbox.attacks, attack)(**settings)
        start = time.perf_counter()
        with borrowed_draws(compared.run.seed):
            points = [call.run(fmodel, x, foolbox.criteria.Misclassification(y)) for _ in range(times)]
        price = watch.price(time.perf_counter() - start, len(x))
        return _distances(points, compared.network, x, y, ball), price

    foreign: dict[str, tuple[dict[str, int], Callable[[], tuple[Tensor, dict[str, float]]]]] = {
        "PointwiseAttack": ({"repeats": repeats}, partial(run, "PointwiseAttack", repeats, l2_binary_search=False)),
        "L0FMNAttack": ({"steps": steps}, partial(run, "L0FMNAttack", 1, steps=steps)),
    }
    prices: dict[str, dict[str, float]] = {}
    for name, (setting, call) in foreign.items():
        theirs = compared.peer(f"foolbox {name}", call)
        if theirs is not None:
            compared.add_distances(theirs[0], **theirs[1], **setting, attack=f"foolbox {name}")
            prices[name] = theirs[1]
    ours: dict[str, Callable[..., AttackResult]] = {
        "pointwise": partial(ATTACKS["pointwise"], repeats=repeats),
        "sigma_zero": partial(ATTACKS["sigma_zero"], steps=steps, minimise=True),
    }
    for name, attack in ours.items():
        result, price = compared.attacked(attack, ball)
        compared.add_distances(torch.where(result.success, result.distance, ball.budget), **price, attack=name)
        if name == "pointwise" and "PointwiseAttack" in prices:
            again = [compared.attacked(attack, ball)[1]["seconds"] for _ in range(ROUNDS - 1)]
            what = {"what": "speed", "attack": name, "to": "foolbox PointwiseAttack", "batch": len(x), "n": len(x)}
            compared.add_faster(prices["PointwiseAttack"]["seconds"], [price["seconds"], *again], **what)


def _distances(runs: Iterable[Tensor], network: nn.Module, x: Tensor, y: Tensor, ball: L0Ball) -> Tensor:
    """The smallest number of changed features over the runs: 0 for a misclassified image, d if none succeeds."""
    best = torch.full((len(x),), x[0].numel())
    with torch.no_grad():
        for points in runs:
            best = torch.where(network(points).argmax(1) != y, torch.minimum(best, ball.count(x, points)), best)
        return torch.where(network(x).argmax(1) != y, 0, best)


def speed(run: Run, *, images: int = 60_000, budget: int = 10, queries: int = 300) -> Results:
    """Seconds of `sparse_rs` on F(10) and F(0), their ratio and, on a GPU, the peak memory, with every row standing.

    Every image is labelled class 0, whose logit has a lead that no attack takes, so all rows pay for all queries.
    Raises AssertionError if one does not.  images: attacked at once; repeated if there are fewer.
    """
    for argument, value in (("images", images), ("budget", budget), ("queries", queries)):
        check_count(argument, value)
    results, place = run.results("bench-attacks"), run.place
    name, found, _ = run.images()
    if budget > found.shape[1]:
        raise ValueError(f"budget must be at most the {found.shape[1]} features of {name}, got {budget}")
    x = found[torch.arange(images) % len(found)].to(place)
    ball = L0Ball(budget, low=-1.0, high=1.0)
    what = {
        "attack": "sparse_rs", "data": name, "weights": "initial", "images": images, "n": 1, "budget": budget,
        "queries": queries,
    }  # fmt: skip
    seconds: dict[int, float] = {}
    for k in (0, 10):
        model = run.network(k).to(place).eval()
        with torch.no_grad():
            model[-1].bias[0] += LEAD  # type: ignore[index, operator]
        run.say(f"sparse_rs on F({k}): {WARM_UP} queries to warm up")
        _seconds(model, x, ball, WARM_UP, run.seed)
        run.say(f"sparse_rs on F({k}): {queries} queries for each of {images} images")
        if place.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place)
            before = torch.cuda.memory_allocated(place)
        seconds[k] = _seconds(model, x, ball, queries, run.seed)
        rate = {"queries_per_second": images * queries / seconds[k]}
        results.add(seconds[k], what="attack seconds", unit="seconds", k=k, **rate, **what)
        if place.type == "cuda":
            results.add(torch.cuda.max_memory_allocated(place) - before, what="memory", unit="bytes", k=k, **what)
    both = {"seconds": seconds[10], "to_seconds": seconds[0]}
    results.add(seconds[10] / seconds[0], what="attack", to="F(0)", unit="x", k=10, **both, **what)
    return results


def _seconds(model: nn.Module, x: Tensor, ball: L0Ball, queries: int, seed: int) -> float:
    """Of one attack; raises unless every row stood to the end."""
    labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    wait = torch.cuda.synchronize if x.device.type == "cuda" else lambda _: None
    generator = torch.Generator().manual_seed(seed)
    wait(x.device)
    start = time.perf_counter()
    result = ATTACKS["sparse_rs"](model, x, labels, ball, queries=queries, generator=generator)
    wait(x.device)
    seconds = time.perf_counter() - start
    if result.success.any() or not (result.queries == queries).all():
        raise AssertionError(f"{int(result.success.sum())} of {len(x)} rows broke, and none can")
    return seconds


if __name__ == "__main__":
    parser = options(__file__, __doc__)
    add_counts(
        parser, images="images to attack (default: 1,000 test images; cuda: 60,000 training images)",
        budget="features that may change (default: 5; cuda: 10)",
        queries="queries of sparse_rs and adaptive for each image (default: 1,000; cuda: 300)",
        epochs="epochs of training F(10) on clean images (default: 5; not with cuda)",
    )  # fmt: skip
    parser.add_argument("--reference", type=Path, help="rs_attacks.py of the authors of Sparse-RS; not with cuda")
    sys.exit(main(benchmark, parser))
