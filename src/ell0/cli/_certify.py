"""`ell0 certify`."""

from __future__ import annotations

import math
import sys
import time
from contextlib import nullcontext, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress
from torch import nn

from .. import certify as certificates
from .. import data as sets
from .. import recipe
from ..attacks import ATTACKS
from ..parallel import together
from ..results import Results
from ..threat import L0Ball
from ._common import AttackLine, Devices, Json, Nodes, Quiet, check_out, command_words, hand_over
from ._model import check_ranks, load_model, load_rows

BUDGETS = (1, 2, 4, 8)
_BROKEN = 4  # the exit code


def certify(
    model: str,
    /,
    *,
    data: str | None = None,
    budgets: Annotated[list[int] | None, Parameter(name="--budget", negative="")] = None,
    beta: float | None = None,
    unit: Literal["feature", "pixel"] = "feature",
    method: certificates.Method = "best",
    rows: int | None = None,
    batch: int = 256,
    challenge: Annotated[bool, Parameter(negative="")] = False,
    queries: int = 1000,
    steps: int = 100,
    device: str | None = None,
    root: Path | None = None,
    devices: Devices = None,
    nodes: Nodes = 1,
    out: Path | None = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Prove how many changed inputs a model survives: a checkpoint of a run, or one of your own.

    Examples: ell0 certify runs/digits/f8certified
              ell0 certify runs/digits/f8certified --budget 1 --budget 2 --out certified.json
              ell0 certify my_package.models:build --data mine.npz --beta 1 --budget 5
              ell0 certify runs/digits/f8certified --challenge --queries 5000
              ell0 certify runs/digits/f8certified --devices 8

    Parameters
    ----------
    model
        A checkpoint (its folder or .safetensors file), or package.module:name of a model, or of a callable that makes
        one; such a module may lie in the current folder. Its first layer must be truncated or clipped; with --beta it
        may be a plain one.
    data
        digits, mnist, fashion-mnist or cifar10 (their test split), or a .npz file with arrays x and y; of a checkpoint
        the data set it was trained on, if nothing else is said.
    budgets
        Units that may change, and again for more; if nothing is said, those of 1, 2, 4 and 8 that the model can bear.
    beta
        A changed number becomes a value from -beta to beta; without it, any value.
    unit
        What counts as one change: a feature, or a pixel with all its channels.
    method
        ibp, intervals, cheap; crown, linear bounds; best, whichever of them proves more.
    rows
        The first so many of the data; without it all.
    batch
        Rows that are certified together.
    challenge
        Have every attack try each row with as many changes as were proven harmless; the exit code is 4 where one
        succeeds, which would be a fault of ell0.
    queries
        Of such attacks as search, for each row.
    steps
        Of such attacks as go by gradients, for each row.
    device
        cpu or cuda; without it a GPU where there is one.
    root
        Where the data lies: this folder, else $ELL0_DATA, else the user cache.
    out
        Write the results file here.
    """
    with together(devices, nodes, device) as team:
        if beta is not None and not 0 < beta < math.inf:
            raise ValueError(f"beta must be a number > 0, got {beta}")
        if out is not None:
            team.once(partial(check_out, out))
        asked = tuple(sorted(set(budgets or BUDGETS)))
        if asked[0] < 0:
            raise ValueError(f"budget must be an int >= 0, got {asked[0]}")
        place = recipe.device_of(device)
        network, card = load_model(model)
        if not isinstance(network, nn.Module):
            raise ValueError(f"model must be an nn.Module for bounds to pass through it, got {model!r}")
        scale: recipe.Scale = card.get("scale", "symmetric")
        x, y = (part.to(place) for part in load_rows(data or card.get("data"), root, scale, rows))
        network = network.to(place).eval()
        check_ranks(team, network, x, y)
        low, high = (-math.inf, math.inf) if beta is None else recipe.box(scale, beta)
        ball = L0Ball(0, unit, low, high)
        most = certificates.limit(network, x, ball)
        if budgets:
            # Raises where nothing can be proven for a budget: that is said, and no number given.
            certificates.radius(network, x[:1], y[:1], ball, max_budget=asked[-1], method="ibp")
        else:
            asked = tuple(budget for budget in asked if budget <= most)
        named = Path(model).name if card else model
        results = Results.here("certify", f"ell0 certify {named}", seeds=[], device=place, ranks=team.size)
        results.command += "".join(f" --budget {budget}" for budget in budgets or ())
        source = data if data is None or data in sets.NAMES else Path(data)
        given = {"data": source, "beta": beta, "unit": unit, "method": method, "rows": rows, "challenge": challenge}
        given |= {"queries": queries, "steps": steps} if challenge else {}
        results.command = command_words(results.command, certify, given)
        console = Console(stderr=True, quiet=quiet or not team.first)
        start = time.perf_counter()
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("rows certified", total=len(team.share(x)))
            # To the most that can be proven, not to what is asked for: the median is over all radii.
            radius = partial(
                certificates.radius, network, ball=ball, max_budget=most, method=method, batch=batch,
                progress=lambda done, _: bar.update(task, completed=done),
            )  # fmt: skip
            radii = team.by_row(radius, x, y)
        tried: list[certificates.Challenge] = []
        if challenge:
            console.print("attacking every row within what was proven")
            attacks = recipe.cascade(tuple(ATTACKS), queries=queries, steps=steps)
            with redirect_stderr(AttackLine(sys.stderr, None)) if quiet else nullcontext():
                mine = team.share(x), team.share(y), team.share(radii)
                tried = team.gather(lambda: certificates.challenge(network, *mine, ball, attacks, batch=batch))
        if not team.first:
            return 0
        results.seconds = round(time.perf_counter() - start, 1)
        box = {} if beta is None else {"beta": beta}
        what = {"classifier": card.get("classifier", named), "unit": unit, "method": method, **box}
        results.rows = certificates.rows(radii, (0, *(m for m in asked if m)), **what)
        fell = sum(len(one.fell) for one in tried)
        if tried:
            spent = {"queries": queries, "steps": steps, "attacks": ", ".join(tried[0].attacks)}
            rows_tried = sum(one.tried for one in tried)
            results.add(fell, what="certificates_broken", **what, **spent, n=rows_tried)
        hand_over(results, out, as_json, console, _show)
        return _BROKEN if fell else 0


def _show(results: Results) -> None:
    *shares, median = (row for row in results.rows if row["what"] != "certificates_broken")
    values = "of any value" if "beta" not in median else f"of values within ±{median['beta']:g}"
    for row in shares:
        figure = f"{100 * row['value']:5.1f} % ({100 * row['low']:.1f}-{100 * row['high']:.1f})"
        changed = f"{row['budget']} changed {row['unit']}s {values}" if row["budget"] else "clean"
        print(f"{figure}  {changed}")
    print(f"median certified radius {median['value']:g}, over {median['n']:,} rows, a misclassified one counted as -1")
    for row in results.rows:
        if row["what"] == "certificates_broken":
            print(f"{row['value']:,} of {row['n']:,} certified rows broken within their radius by {row['attacks']}")
