"""Run folders as a recipe leaves them, with figures made up near the paper's, and what a page of them is made of."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ell0.data import load
from ell0.files import write_tensors
from ell0.results import Measurement, Results, Row, Share

REPOSITORY = Path(__file__).parent.parent
PAPER = {
    (3, 300): 0.9551, (3, 1000): 0.9473, (3, 5000): 0.9297,
    (5, 300): 0.9355, (5, 1000): 0.8965, (5, 5000): 0.8184,
    (8, 300): 0.8594, (8, 1000): 0.7324, (8, 5000): 0.5879,
}  # fmt: skip
OURS = {**PAPER, (3, 300): 0.9602, (5, 5000): 0.8391, (8, 1000): 0.7123, (8, 5000): 0.5493}
WORST = {3: 0.861, 5: 0.702, 8: 0.411}

ATTACK = 'training = { attack = { name = "sparse_rs", budget = 10 } }'
RECIPE = f"""\
name = "mnist-table1"
summary = "Table 1 of the paper, rows of MNIST"
seed = 0
data = {{ name = "mnist" }}
classifier = [
  {{ name = "F(0)", model = {{ name = "mlp", k = 0 }}, {ATTACK} }},
  {{ name = "F(10)", model = {{ name = "mlp", k = 10 }}, {ATTACK} }},
]
measure = [
  {{ what = "clean_accuracy" }},
  {{ what = "robust_accuracy", attack = "sparse_rs", budgets = [3, 5, 8], queries = [300, 1000, 5000], beta = [100.0],
     protocol = "paper" }},
  {{ what = "worst_case", budgets = [3, 5, 8], beta = [1.0, 100.0], queries = 5000, steps = 300 }},
  {{ what = "median_distance", beta = [100.0, 1.0] }},
]
quoted = [
  {{ classifier = "ABS", what = "robust_accuracy", attack = "sparse_rs", budget = 12, queries = 10000, beta = 1.0,
     value = 0.45, source = "the paper, section 5" }},
]
""".replace(",\n     ", ", ")


def interval(count: int, n: int) -> Row:
    share = Share(count, n)
    return {"value": float(share), "n": n, "low": share.low, "high": share.high}


def accuracy(share: float, n: int, **what: Any) -> Row:
    return {"what": "robust_accuracy", **what, "unit": "feature", **interval(round(share * n), n)}


def rows() -> list[Row]:
    found: list[Row] = []
    flag = "search beats gradients by 3.1 points: sparse_rs_uniform broke rows that sparse_pgd had left standing"
    for name, k in (("F(0)", 0), ("F(10)", 10)):
        who: Row = {"classifier": name, "k": k, "adversarial": True}
        clean, paper = {0: (9806, 0.9802), 10: (9871, 0.9873)}[k]
        found.append({"what": "clean_accuracy", **who, **interval(clean, 10000), "paper": paper})
        for (budget, queries), paper in PAPER.items():
            given: Row = {**who, "attack": "sparse_rs", "protocol": "paper", "beta": 100.0}
            row = accuracy(OURS[budget, queries] if k else 0.0, 10000, **given, budget=budget, queries=queries)
            found.append({**row, "paper": paper if k else 0.0, "paper_n": 512, "seconds": queries / 100})
        for (budget, share), beta in product(WORST.items(), (1.0, 100.0)):
            share = share + (0.06 if beta == 1.0 else 0.0) if k else 0.0
            what: Row = {**who, "attack": "worst case", "queries": 5000, "steps": 300, "budget": budget, "beta": beta}
            what |= {"seconds": 41.5} if budget == 8 else {}
            decided = {"clean": 14, "adaptive": round(1000 * (1 - share)) - 45, "sparse_rs_uniform": 31}
            found.append(accuracy(share, 1000, **what, decided=decided, flags=[flag] if k else []))
        for beta, ours, theirs in ((100.0, {0: 1, 10: 17}, {0: 1, 10: 17}), (1.0, {0: 9, 10: 23}, {0: 13, 10: 21})):
            how: Row = {**who, "unit": "feature", "attack": "pointwise", "beta": beta, "n": 10000, "paper": theirs[k]}
            around = {"value": ours[k], "low": ours[k] - k / 10, "high": ours[k] + k / 10}
            found.append({"what": "median_distance", **how, **around})
        times = {"training_seconds": 215.3 + k, "attack_seconds": 122.9 + k, "epoch_seconds": 0.27}
        found += [{"what": what, **who, "unit": "seconds", "value": seconds} for what, seconds in times.items()]
        ends = {"final_loss": 0.0213, "train_accuracy": 0.9931, "validation_accuracy": 0.9822}
        found += [{"what": what, **who, "value": end} for what, end in ends.items()]
    return found


def results(name: str, found: list[Row]) -> Results:
    versions = {"ell0": "0.1.0", "python": "3.12.3", "torch": "2.11.0", "numpy": "2.4.6"}
    return Results(name, f"ell0 run {name}", commit="000000000000", device="none: made up", versions=versions,
                   seeds=[0], seconds=812.4, rows=[Measurement.of(**row) for row in found], recipe=name)  # fmt: skip


def log(epochs: int, refresh: int, final: float) -> str:
    """A training whose loss falls, with an attack before each ``refresh``-th epoch."""
    lines = []
    for epoch in range(epochs):
        loss = (2.2 - final) * 0.9**epoch + final
        line = {"epoch": epoch, "loss": loss, "train_accuracy": 1 - loss / 4, "validation_accuracy": 0.985 - loss / 5}
        lines.append(json.dumps(line | {"attack_seconds": 13.1 if epoch and epoch % refresh == 0 else 0.0}) + "\n")
    return "".join(lines)


def gallery(count: int) -> dict[str, np.ndarray[Any, Any]]:
    """Digits with a few pixels set far outside the range; F(0) falls to them, F(10) does not always."""
    x, y = load("digits", "test")
    clean, labels = x[:count].numpy().reshape(-1, 1, 8, 8), y[:count].numpy()
    arrays = {"clean": clean, "labels": labels}
    draw = np.random.default_rng(0)
    for slug, changed, fall in (("f0", 1, 1), ("f10", 5, 3)):
        adv = clean.copy()
        for row in adv.reshape(count, -1):
            row[draw.choice(64, changed, replace=False)] = draw.choice([-100.0, 100.0], changed)
        says = np.where(np.arange(count) % fall == 0, (labels + 3) % 10, labels)
        arrays |= {f"{slug}/adv": adv, f"{slug}/said": labels, f"{slug}/says": says}
    return arrays


def write_gallery(folder: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> Path:
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    write_tensors(folder / "gallery.safetensors", tensors, {})
    return folder / "gallery.safetensors"


def run_folder(folder: Path, *, epochs: int = 100, images: int = 6) -> Path:
    """Everything a run leaves."""
    for slug, final in (("f0", 0.02), ("f10", 0.06)):
        (folder / slug).mkdir(parents=True)
        (folder / slug / "log.jsonl").write_text(log(epochs, 25, final))
    (folder / "recipe.toml").write_text(RECIPE)
    write_gallery(folder, gallery(images))
    results("mnist-table1", rows()).save(folder / "results.json")
    return folder


class Outline(HTMLParser):
    """What a page is made of: elements with their attributes, and its text, with plain spaces and hyphens."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._text: list[str] = []
        self._hidden = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._hidden = tag in ("style", "script")

    def handle_endtag(self, _: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._text.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self._text).replace("\N{EN DASH}", "-").split())

    def all(self, tag: str, word: str | None = None) -> list[dict[str, str | None]]:
        """Elements of a tag, with a class where one is given."""
        found = [attributes for name, attributes in self.elements if name == tag]
        return found if word is None else [one for one in found if word in (one.get("class") or "").split()]
