"""A recipe for tests, and its data."""

from pathlib import Path
from typing import Any

import numpy as np

TINY = """
name = "tiny"
summary = "a recipe for tests"
[data]
file = "tiny.npz"
validation = true
[[classifier]]
name = "F(0)"
[classifier.model]
name = "mlp"
k = 0
hidden = [8]
[classifier.training]
epochs = 3
batch = 16
rates = [0.05]
[[classifier]]
name = "F(2)"
[classifier.model]
name = "mlp"
k = 2
hidden = [8]
[classifier.training]
epochs = 4
batch = 16
rates = [0.05]
refresh = 2
[classifier.training.attack]
name = "sparse_rs"
budget = 2
queries = 5
beta = 10.0
[[measure]]
what = "clean_accuracy"
[[measure]]
what = "robust_accuracy"
budgets = [1, 2]
queries = [4, 8]
beta = [10.0]
protocol = "paper"
[[measure]]
what = "worst_case"
budgets = [1, 2]
beta = [10.0, 1.0]
queries = 8
steps = 3
rows = 20
[[measure]]
what = "median_distance"
repeats = 2
beta = [10.0]
[[paper]]
classifier = "F(2)"
what = "robust_accuracy"
budget = 2
queries = 8
value = 0.5
n = 512
"""


def write_recipe(folder: Path) -> Path:
    """A recipe and its data: three classes of 4 x 4 images, each bright in its own rows."""
    generator = np.random.default_rng(0)

    def images(n: int) -> tuple[Any, Any]:
        y = np.arange(n) % 3
        x = generator.normal(0, 0.3, (n, 1, 4, 4)).astype(np.float32)
        x[np.arange(n), 0, y] += 0.6
        return x.clip(-1, 1), y

    (x_train, y_train), (x_test, y_test) = images(60), images(24)
    np.savez(folder / "tiny.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    path = folder / "tiny.toml"
    path.write_text(TINY)
    return path


def edited(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path
