"""A few images, clean and attacked, for the page of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median_low

import torch
from torch import nn

from ..attacks import sparse_rs
from ..data import LabelledRows
from ..files import write_tensors
from ..threat import Unit
from .plan import Recipe, ball_within, slug


def write_gallery(path: Path, recipe: Recipe, networks: Mapping[str, nn.Module], test: LabelledRows) -> None:
    """Attacks the first image of each class, up to ten, on every network; writes the nearest to an error in each case.

    As tensors: ``clean`` ``(m, channels, height, width)`` and ``labels``; for each classifier ``SLUG/adv``, and the
    labels it gives to the clean images, ``SLUG/said``, and to the attacked ones, ``SLUG/says``. The attack is sparse_rs
    with the median of the recipe's budgets and its widest box.
    """
    x, y = test
    first = torch.tensor([int((y == label).nonzero()[0]) for label in y.unique()[:10]])
    tasks = [task for task in recipe.tasks if any(task.budgets)]
    unit: Unit = "feature" if not tasks or any(task.unit == "feature" for task in tasks) else "pixel"
    budgets = [budget for task in tasks if task.unit == unit for budget in task.budgets if budget]
    beta, box_of = max(((max(task.betas), task.box_of or "") for task in recipe.tasks if task.betas), default=(1.0, ""))
    tensors = {"clean": x[first], "labels": y[first]}
    for name, network in networks.items():
        device = next(network.parameters()).device
        images, labels = x[first].to(device), y[first].to(device)
        ball = ball_within(beta, median_low(budgets) if budgets else 1, unit, box_of or None, device)
        result = sparse_rs(network, images, labels, ball, queries=500, generator=torch.Generator().manual_seed(0))
        tensors[f"{slug(name)}/adv"] = result.x_best
        with torch.no_grad():
            tensors[f"{slug(name)}/said"] = network(images).argmax(1)
            tensors[f"{slug(name)}/says"] = network(result.x_best).argmax(1)
    write_tensors(path, tensors, {})
