"""A few images, clean and attacked, for the page of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median_low

import torch
from torch import Tensor, nn

from .. import certify
from ..attacks import sparse_rs
from ..attacks.contract import Model
from ..data import LabelledRows
from ..evaluation import cascade, evaluate
from ..files import write_tensors
from ..precision import dense_products
from ..threat import Unit
from .plan import Recipe, ball_within, slug


def write_gallery(path: Path, recipe: Recipe, networks: Mapping[str, nn.Module], test: LabelledRows) -> None:
    """Attacks the first image of each class, up to ten, on every network; writes the nearest to an error in each case.

    The attack is sparse_rs with the median of the recipe's budgets and its widest box; where the recipe measures a
    worst case, what its cascade breaks a row with comes first. The tensors are those of `pictures`, and ``SLUG/radius``
    ``(m,)`` where the recipe certifies the classifier for any value.
    """
    x, y = test
    first = first_of_each(y)
    tasks = [task for task in recipe.tasks if any(task.budgets)]
    unit: Unit = "feature" if not tasks or any(task.unit == "feature" for task in tasks) else "pixel"
    budgets = [budget for task in tasks if task.unit == unit for budget in task.budgets if budget]
    widest = max((task for task in recipe.tasks if task.betas), key=lambda task: max(task.betas), default=None)
    beta, box_of = (max(widest.betas), widest.box_of) if widest else (1.0, recipe.data.box)
    tensors: dict[str, Tensor] = {}
    for name, network in networks.items():
        device = next(network.parameters()).device
        images, labels = x[first].to(device), y[first].to(device)
        ball = ball_within(beta, median_low(budgets) if budgets else 1, unit, box_of, device)
        result = sparse_rs(network, images, labels, ball, queries=500, generator=torch.Generator().manual_seed(0))
        x_adv = result.x_best
        for task in recipe.tasks:
            if (task.what, task.classifier.name) == ("worst_case", name):
                spent = {"queries": min(500, task.row["queries"]), "steps": min(100, task.row["steps"])}
                found = evaluate(network, images, labels, ball, cascade(**spent))
                fell = (found.verdict > 0).to(device).view(-1, *[1] * (x.ndim - 1))
                x_adv = torch.where(fell, found.x_adv, x_adv)
        tensors |= pictures(name, network, images, labels, x_adv, recipe.data.box or (-1.0, 1.0))
        if radii := [*_radii(recipe, name, unit, network, images, labels)]:
            tensors[f"{slug(name)}/radius"] = torch.stack(radii).amax(0).cpu()
    write_tensors(path, tensors, {"unit": unit})


def _radii(recipe: Recipe, name: str, unit: Unit, network: nn.Module, x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """What each certificate of the recipe proves of a classifier's rows, for any value and beyond any confidence."""
    for task in recipe.tasks:
        if (task.what, task.classifier.name, task.unit) != ("certified_accuracy", name, unit) or task.betas:
            continue
        certifier, ball = certify.certifier(network, task.row.get("method", "best")), task.certified_ball
        if certifier.confidence is None:
            with dense_products(tf32=False):
                yield certifier.radius(x, y, ball, max_budget=certifier.limit(x, ball))


def first_of_each(y: Tensor) -> Tensor:
    """Where the first row of each class stands, up to ten: ``(m,)`` int64."""
    return torch.tensor([int((y == label).nonzero()[0]) for label in y.unique()[:10]], device=y.device)


def pictures(
    name: str, network: Model, x: Tensor, y: Tensor, x_adv: Tensor, box: tuple[float, float]
) -> dict[str, Tensor]:
    """A gallery as tensors: ``clean`` ``(m, channels, height, width)``, ``labels``, and the ``box`` of clean values.

    For the classifier ``SLUG/adv``, and the labels it gives to the clean images, ``SLUG/said``, and to the attacked
    ones, ``SLUG/says``.
    """
    with torch.no_grad():
        said, says = (network(images).argmax(1) for images in (x, x_adv))
    tensors = {
        "clean": x,
        "labels": y,
        f"{slug(name)}/adv": x_adv,
        f"{slug(name)}/said": said,
        f"{slug(name)}/says": says,
    }
    return {"box": torch.tensor(box, dtype=torch.float64)} | {key: value.cpu() for key, value in tensors.items()}
