"""`ell0 certify`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from .. import certify as certificates
from .. import data as sets
from ..attacks import ATTACKS
from ..common import check_out, device_of
from ..evaluation import cascade
from ..parallel import together
from ..results import Results
from ..threat import L0Ball, stretched
from ._common import Devices, Json, Nodes, Quiet, command_words, hand_over
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
        one; such a module may lie in the current folder. Its first layer must be truncated or clipped, or with --beta a
        plain one; or it certifies by votes.
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
        Have every attack try each row with as many changes as were proven harmless. Should one succeed, nothing is
        shown as proven, the rows are named, and the exit code is 4.
    queries
        Of attacks that search, for each row, with --challenge.
    steps
        Of attacks by gradients, for each row, with --challenge.
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
        attacks = cascade((*ATTACKS, "sparse_rs_uniform"), queries=queries, steps=steps)
        place = device_of(device)
        network, card = load_model(model)
        if not isinstance(network, nn.Module):
            raise ValueError(f"model must be an nn.Module for bounds to pass through it, got {model!r}")
        certifier = certificates.certifier(network, method)
        if challenge and certifier.forwards is not None:
            raise ValueError(f"challenge must be left out for {model!r}: it certifies by votes, which have no gradient")
        scale: sets.Scale = card.get("scale", "symmetric")
        x, y = (part.to(place) for part in load_rows(data or card.get("data"), root, scale, rows))
        network = network.to(place).eval()
        check_ranks(team, network, x, y)
        low, high = (-math.inf, math.inf) if beta is None else stretched(sets.RANGES[scale], beta)
        ball = L0Ball(0, unit, low, high)
        certifier.check(x[:1], replace(ball, budget=asked[-1] if budgets else 0))
        most = certifier.limit(x, ball)
        asked = asked if budgets else tuple(budget for budget in asked if budget <= most)
        named = Path(model).name if card else model
        results = Results.here(
            "certify", f"ell0 certify {named}", seeds=[0] if challenge else [], device=place, ranks=team.size
        )
        results.command += "".join(f" --budget {budget}" for budget in budgets or ())
        source = data if data is None or data in sets.SETS else Path(data)
        given = {"data": source, "beta": beta, "unit": unit, "method": method, "rows": rows, "challenge": challenge}
        given |= {"queries": queries, "steps": steps} if challenge else {}
        results.command = command_words(results.command, certify, given)
        console = Console(stderr=True, quiet=quiet or not team.first)
        start = time.perf_counter()
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("rows certified", total=len(team.share(x)))

            # To the most that can be proven, not to what is asked for: the median is over all radii.
            def radius(x: Tensor, y: Tensor, places: Tensor) -> Tensor:
                return certifier.radius(
                    x, y, ball, max_budget=most, rows=places, batch=batch,
                    progress=lambda step: bar.update(task, completed=step.done),
                )  # fmt: skip

            radii = team.by_row(radius, x, y, torch.arange(len(x), device=place))
        results.seconds = round(time.perf_counter() - start, 1)
        tried: list[certificates.Challenge] = []
        if challenge:
            console.print("attacking every row within what was proven")
            mine = team.share(x), team.share(y), team.share(radii)
            tried = team.gather(lambda: certificates.challenge(network, *mine, ball, attacks, batch=batch))
        if not team.first:
            return 0
        if broken := [words for rank, one in enumerate(tried) for words in _broken(one, rank, team.size, radii)]:
            print(
                f"ell0: {len(broken)} certificates do not hold, so nothing is shown as proven; please report this:",
                *broken, sep="\n  ", file=sys.stderr,
            )  # fmt: skip
            return _BROKEN
        box = {} if beta is None else {"beta": beta}
        cost = {"forwards": certifier.forwards, "confidence": certifier.confidence}
        about: dict[str, Any] = {key: value for key, value in cost.items() if value is not None}
        what = {"classifier": card.get("classifier", named), "unit": unit, **(about or {"method": method}), **box}
        results.rows = certificates.rows(radii, (0, *(m for m in asked if m)), **what)
        if tried:
            flags = list(dict.fromkeys(flag for one in tried for flag in one.flags))
            spent = {"queries": queries, "steps": steps, "attacks": ", ".join(attacks), "flags": flags}
            results.add(0, what="certificates_broken", **what, **spent, n=sum(one.tried for one in tried))
        hand_over(results, out, as_json, console, _show)
        return 0


def _broken(found: certificates.Challenge, rank: int, ranks: int, radii: Tensor) -> Iterator[str]:
    """What an attack broke of a rank's share, by the numbers that the rows have in the data."""
    for place, name in zip(found.fell.tolist(), found.by, strict=True):
        row = place * ranks + rank
        yield f"row {row}, proven for {int(radii[row])} changes, falls to {name}"


def _show(results: Results) -> None:
    *shares, median = (row for row in results.rows if row.what != "certificates_broken")
    values = "of any value" if "beta" not in median else f"of values within ±{median['beta']:g}"
    for row in shares:
        figure = f"{100 * row.value:5.1f} % ({100 * row['low']:.1f}-{100 * row['high']:.1f})"
        changed = f"{row['budget']} changed {row['unit']}s {values}" if row["budget"] else "clean"
        print(f"{figure}  {changed}")
    print(f"median certified radius {median.value:g}, over {median.n:,} rows, a misclassified one counted as -1")
    for row in results.rows:
        if row.what == "certificates_broken":
            print(f"none of {row.n:,} certified rows falls within its radius to {row['attacks']}")
