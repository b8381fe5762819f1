"""`ell0 attack`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Parameter
from rich.console import Console
from torch import Tensor, nn

from .. import data as sets
from ..common import check_out, device_of
from ..evaluation import cascade, evaluate
from ..parallel import together
from ..results import Results
from ..threat import L0Ball, stretched
from ._common import Devices, Json, Nodes, Quiet, command_words, hand_over, shown
from ._model import check_ranks, load_model, load_rows

_TOO_FEW = 3  # the exit code


def attack(
    model: str,
    /,
    *,
    data: str | None = None,
    attacks: Annotated[list[str] | None, Parameter(name="--attack", negative="")] = None,
    budget: int = 5,
    beta: float = 1.0,
    unit: Literal["feature", "pixel"] = "feature",
    queries: int = 1000,
    steps: int = 100,
    rows: int | None = None,
    batch: int = 512,
    seed: int = 0,
    fail_under: float | None = None,
    device: str | None = None,
    root: Path | None = None,
    devices: Devices = None,
    nodes: Nodes = 1,
    out: Path | None = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Attack a model: a checkpoint of a run, or one of your own.

    Examples: ell0 attack runs/digits/f4 --budget 3 --beta 100
              ell0 attack my_package.models:build --data mine.npz --rows 500 --out attacked.json
              ell0 attack runs/digits/f4 --attack sparse_rs --attack adaptive --fail-under 0.6
              ell0 attack runs/digits/f4 --devices 8

    Parameters
    ----------
    model
        A checkpoint (its folder or .safetensors file), or package.module:name of a model, or of a callable that makes
        one; such a module may lie in the current folder.
    data
        digits, mnist, fashion-mnist or cifar10 (their test split), or a .npz file with arrays x and y; of a checkpoint
        the data set it was trained on, if nothing else is said.
    attacks
        By name, and again for more; without it all of them, gradients and two value sets.
    budget
        Units that may change.
    beta
        A changed number becomes a value from -beta to beta; behind a checkpoint trained on [0, 1], one of that range,
        stretched beta times about its middle.
    unit
        What counts as one change: a feature, or a pixel with all its channels.
    queries
        Of attacks that search, for each row.
    steps
        Of attacks by gradients, for each row.
    rows
        The first so many of the data; without it all.
    batch
        Rows that are attacked together.
    seed
        Of the attacks.
    fail_under
        A share: the exit code is 3 where robust accuracy is below it.
    device
        cpu or cuda; without it a GPU where there is one.
    root
        Where the data lies: this folder, else $ELL0_DATA, else the user cache.
    out
        Write the results file here.
    """
    with together(devices, nodes, device) as team:
        if fail_under is not None and not 0 <= fail_under <= 1:
            raise ValueError(f"fail_under must lie in [0, 1], got {fail_under}")
        if not 0 < beta < float("inf"):
            raise ValueError(f"beta must be a number > 0, got {beta}")
        if out is not None:
            team.once(partial(check_out, out))
        chosen = cascade(attacks, queries=queries, steps=steps)
        place = device_of(device)
        network, card = load_model(model)
        scale: sets.Scale = card.get("scale", "symmetric")
        ball = L0Ball(budget, unit, *stretched(sets.RANGES[scale], beta))
        x, y = (part.to(place) for part in load_rows(data or card.get("data"), root, scale, rows))
        if isinstance(network, nn.Module):
            network = network.to(place).eval()
        _check_answers(network, x)
        check_ranks(team, network, x, y)
        named = Path(model).name if card else model
        results = Results.here("attack", f"ell0 attack {named}", seeds=[seed], device=place, ranks=team.size)
        results.command += "".join(f" --attack {name}" for name in attacks or ())
        source = data if data is None or data in sets.SETS else Path(data)
        what = {
            "budget": budget,
            "beta": beta,
            "unit": unit,
            "queries": queries,
            "steps": steps,
            "rows": rows,
            "seed": seed,
        }
        results.command = command_words(results.command, attack, {"data": source, **what})
        with shown(Console(stderr=True, quiet=quiet or not team.first)) as progress:
            evaluation = evaluate(network, x, y, ball, chosen, batch=batch, seed=seed, progress=progress, team=team)
        if not team.first:
            return 0
        results.seconds = round(sum(evaluation.seconds), 1)
        results.rows = evaluation.rows(classifier=card.get("classifier", named), beta=beta)
        hand_over(results, out, as_json, Console(stderr=True, quiet=quiet), lambda _: print(evaluation))
        return _TOO_FEW if fail_under is not None and evaluation.robust_accuracy < fail_under else 0


def _check_answers(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Raises unless the model gives logits for a row of the data."""
    try:
        with torch.no_grad():
            logits = model(x[:1])
    except (RuntimeError, ValueError) as error:
        shape, reason = tuple(x.shape[1:]), str(error).splitlines()[0]
        raise ValueError(f"model must take rows of shape {shape}, as the data has them ({reason})") from error
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 1:
        raise ValueError(f"model must give logits of shape (n, classes), got {logits!r}")
