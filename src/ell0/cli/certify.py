"""`ell0 certify`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from .options import Flag, RowOptions, WorkOptions, command_words, hand_over, show_progress

if TYPE_CHECKING:
    from torch import Tensor

    from ..certify import Challenge
    from ..results import Results

BUDGETS = (1, 2, 4, 8)
BROKEN = 4
"""Exit code if an attack breaks a certificate."""


def certify(
    model: str,
    /,
    *,
    budgets: Annotated[list[int] | None, Parameter(name="--budget")] = None,
    beta: float | None = None,
    method: Literal["ibp", "best"] = "best",
    subject: RowOptions = RowOptions(),
    batch: int = 256,
    challenge: Flag = False,
    work: WorkOptions = WorkOptions(),
) -> int:
    """Prove how many changed inputs a model survives: the checkpoint of a run, or a model of your own.

    ```
    ell0 certify runs/digits/f8certified
    ell0 certify runs/digits/f8certified --budget 1 --budget 2
    ell0 certify runs/digits/f8certified --challenge --queries 5000
    ell0 certify my_package.models:build --data mine.npz --beta 1
    ell0 certify runs/digits/f8certified --devices 8 --out certified.json
    ```

    Parameters
    ----------
    model
        Folder or .safetensors file of a checkpoint, or package.module:name of a model or of a function that returns
        one. The module may lie in the current folder. The first layer must be truncated; with --beta it may be a plain
        one.
    budgets
        Number of changes to certify; repeat for several. Default: those of 1, 2, 4 and 8 that the model can have a
        certificate for.
    beta
        Changed values lie between -beta and beta. Default: any value.
    method
        How to bound the network: ibp (intervals, cheap), or best (the better of intervals and linear bounds).
    batch
        Rows certified together.
    challenge
        Attack each row with as many changes as were proven harmless (see --queries and --steps). If an attack
        succeeds, print the rows instead of certificates and exit with code 4.
    """
    import torch
    from torch import nn

    from .. import certify as certificates
    from ..attacks import ATTACKS
    from ..evaluation import cascade
    from ..parallel import together
    from ..threat import L0Ball
    from .model import load

    with together(work.devices, work.nodes, work.device) as team:
        asked = tuple(sorted(set(budgets or BUDGETS)))
        if asked[0] < 0:
            raise ValueError(f"budget must be an int >= 0, got {asked[0]}")
        attacks = cascade((*ATTACKS, "sparse_rs_uniform"), queries=subject.queries, steps=subject.steps)
        loaded = load(model, subject, work, team)
        network, x, y = loaded.network, loaded.x, loaded.y
        if not isinstance(network, nn.Module):
            raise ValueError(f"model must be an nn.Module for bounds to pass through it, got {model!r}")
        certifier = certificates.certifier(network, method)
        if challenge and certifier.forwards is not None:
            raise ValueError(f"challenge must be left out for {model!r}: it certifies by votes, which have no gradient")
        ball = L0Ball(0, subject.unit, *loaded.box(beta))
        certifier.check(x[:1], replace(ball, budget=asked[-1] if budgets else 0))
        most = certifier.limit(x, ball)
        asked = asked if budgets else tuple(budget for budget in asked if budget <= most)
        given: dict[str, Any] = {"budget": budgets, "data": loaded.source, "beta": beta}
        given |= {"unit": subject.unit, "method": method, "rows": subject.rows, "challenge": challenge}
        spent = {"queries": subject.queries, "steps": subject.steps}
        command = command_words(f"ell0 certify {loaded.name}", certify, given | (spent if challenge else {}))
        results = loaded.results(command, [0] if challenge else [], team)
        start = time.perf_counter()
        tried: list[Challenge] = []
        with show_progress(work.quiet or not team.first) as progress:

            def radius(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
                # To the most that can be proven, not to what is asked for: the median is over all radii.
                return certifier.radius(x, y, ball, max_budget=most, rows=rows, batch=batch, progress=progress)

            radii = team.by_row(radius, x, y, torch.arange(len(x), device=x.device))
            results.seconds = round(time.perf_counter() - start, 1)
            if challenge:
                mine = team.share(x), team.share(y), team.share(radii)
                attacked = partial(certificates.challenge, network, *mine, ball, attacks, batch=batch)
                tried = team.gather(partial(attacked, progress=progress))
        if not team.first:
            return 0
        if broken := [words for rank, one in enumerate(tried) for words in _broken(one, rank, team.size, radii)]:
            print(
                f"ell0: {len(broken)} certificates do not hold, so nothing is shown as proven; please report this:",
                *broken, sep="\n  ", file=sys.stderr,
            )  # fmt: skip
            return BROKEN
        cost = {"forwards": certifier.forwards, "confidence": certifier.confidence}
        about: dict[str, Any] = {key: value for key, value in cost.items() if value is not None} or {"method": method}
        about |= {} if beta is None else {"beta": beta}
        what = {"classifier": loaded.classifier, "unit": subject.unit, **about}
        results.rows = certificates.rows(radii, (0, *(m for m in asked if m)), **what)
        if tried:
            flags = list(dict.fromkeys(flag for one in tried for flag in one.flags))
            names = ", ".join(attacks)
            n = sum(one.tried for one in tried)
            results.add(0, what="certificates_broken", **what, **spent, attacks=names, flags=flags, n=n)
        hand_over(results, subject.out, work, _show)
        return 0


def _broken(found: Challenge, rank: int, ranks: int, radii: Tensor) -> Iterator[str]:
    """A line for each row of a rank's share that an attack broke, with the row's number in the data."""
    for place, name in zip(found.fell.tolist(), found.by, strict=True):
        row = place * ranks + rank
        yield f"row {row}, proven for {int(radii[row])} changes, falls to {name}"


def _show(results: Results) -> None:
    *shares, median = (row for row in results.rows if row.what != "certificates_broken")
    values = "of any value" if median.get("beta") is None else f"of values within ±{median['beta']:g}"
    for row in shares:
        figure = f"{100 * row.value:5.1f} % ({100 * row['low']:.1f}-{100 * row['high']:.1f})"
        changed = f"{row['budget']} changed {row['unit']}s {values}" if row["budget"] else "clean"
        print(f"{figure}  {changed}")
    print(f"median certified radius {median.value:g} of {median.n:,} rows; a misclassified row counts as -1")
    for row in results.rows:
        if row.what == "certificates_broken":
            print(f"no attack breaks any of {row.n:,} certified rows within its radius: {row['attacks']}")
