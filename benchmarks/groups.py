"""Compare votes over groups of features with a truncated linear classifier, on a table of programs.

python benchmarks/groups.py --data drebin215.npz --out results/votes-drebin215.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ell0.certify import Partition, PartVote, VoteObjective, rows
from ell0.common import check_count
from ell0.part_networks import PartMLP
from ell0.results import OURS, Measurement, Results
from ell0.theory import NotAttainableError, TruncatedLinearClassifier, read_programs
from ell0.train import TrainConfig, fit
from measure import Run, add_counts, main, options

LINEAR = ((4, 2), (10, 2), (10, 4))  # k and budget of the linear classifier
VOTES = ((21, 2), (43, 4), (72, 8))  # parts of a vote and the budget it is trained for
BUDGETS = (0, 1, 2, 4, 8)  # of the figures
JUDGED = 11  # numbers of changed features, from 0 on, whose mean certified accuracy decides a choice
TRAINING = TrainConfig(25, 256, (3e-3,), schedule="cosine", optimizer="adamw", weight_decay=0.02, ema=0.98)
VOTE = "vote of parts"

Radii = Callable[[Tensor, Tensor], Tensor]


def benchmark(run: Run, *, data: Path, training_rows: int = 1500) -> Results:
    """Certified accuracy and radius where any feature, of any row, takes any value.

    As many harmless rows as malware are drawn from the distinct ones and split 3 : 1 : 1 into train, validation and
    test. Of each classifier the settings with the highest certified accuracy on the validation split are taken.

    Args:
        data: an npz file as for `ell0 theory malware`.  training_rows: at most, of the train split.
    """
    check_count("training_rows", training_rows)
    results = Results.here(f"votes-{data.stem}", run.command, seeds=[run.seed], device="cpu")
    table, draw = read_programs(data).distinct(), np.random.default_rng(run.seed)
    classes = [draw.permutation(np.flatnonzero(table.malware == label)) for label in (False, True)]
    order = draw.permutation(np.concatenate([part[: min(map(len, classes))] for part in classes]))
    x, y = torch.from_numpy(table.x[order]).float(), torch.from_numpy(table.malware[order]).long()
    ends = [len(order) * 3 // 5, len(order) * 4 // 5]
    (x_train, x_val, x_test), (y_train, y_val, y_test) = x.tensor_split(ends), y.tensor_split(ends)
    train = x_train[:training_rows], y_train[:training_rows]
    made: dict[str, list[tuple[Radii, dict[str, Any]]]] = {OURS: [], VOTE: []}
    for k, budget in LINEAR:
        run.say(f"{OURS}, k = {k}, budget = {budget}")
        with suppress(NotAttainableError):
            made[OURS].append((linear(*train, k, budget), {"k": k, "trained_for": budget}))
    for parts, budget in VOTES:
        run.say(f"{VOTE}, {parts} parts, budget = {budget}")
        made[VOTE].append((vote(*train, parts, budget, run.seed), {"parts": parts, "trained_for": budget}))
    for name, candidates in made.items():
        radii, settings = max(candidates, key=lambda one: score(one[0](x_val, y_val)))
        what = {"classifier": name, "unit": "feature", "features": x.shape[1], **settings}
        for row in rows(radii(x_test, y_test), BUDGETS, **what):
            results.rows.append(clean(row) if row.get("budget") == 0 else row)
    return results


def linear(x: Tensor, y: Tensor, k: int, budget: int) -> Radii:
    model = TruncatedLinearClassifier(k=k, budget=budget, tol=1e-2, random_state=0).fit(x.numpy(), y.numpy())

    def radii(rows: Tensor, labels: Tensor) -> Tensor:
        found = torch.from_numpy(model.certified_radius(rows.numpy()))
        return torch.where(torch.from_numpy(model.predict(rows.numpy())) == labels, found, -1)

    return radii


def vote(x: Tensor, y: Tensor, parts: int, budget: int, seed: int) -> Radii:
    torch.manual_seed(seed)
    partition = Partition.dealt(x.shape[1:], parts)
    model = PartVote(PartMLP(partition.part_shape, parts, classes=2, width=32, depth=1, dropout=0.1), partition)
    fit(model, (x, y), TRAINING, objective=VoteObjective(budget))
    return model.eval().radius


def score(radii: Tensor) -> float:
    """Certified accuracy, mean over the budgets that decide."""
    return float(np.mean([float((radii >= m).double().mean()) for m in range(JUDGED)]))


def clean(row: Measurement) -> Measurement:
    """Certified accuracy at 0 changes, under its own name."""
    identity = {key: value for key, value in row.identity.items() if key != "budget"}
    return Measurement("clean_accuracy", row.value, n=row.n, low=row.low, high=row.high, identity=identity)


if __name__ == "__main__":
    parser = options(__file__, __doc__)
    parser.add_argument("--data", type=Path, required=True, help="npz file: X (np.packbits of rows), d, y (1: malware)")
    add_counts(parser, training_rows="rows to train on at most (default: 1,500)")
    sys.exit(main(benchmark, parser))
