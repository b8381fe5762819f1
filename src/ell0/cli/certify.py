"""`ell0 certify`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from .options import BoxOptions, Flag, ModelName, RowOptions, WorkOptions, hand_over, show_progress, tell

if TYPE_CHECKING:
    from torch import Tensor

    from ..certify import Challenge
    from ..results import Results
    from ..threat import L0Ball

BUDGETS = (1, 2, 4, 8)
BROKEN = 4  # exit code if an attack breaks a certificate


def certify(
    model: ModelName,
    /,
    *,
    budgets: Annotated[list[int] | None, Parameter(name="--budget")] = None,
    box: BoxOptions = BoxOptions(),
    subject: RowOptions = RowOptions(),
    challenge: Flag = False,
    save_radii: Path | None = None,
    work: WorkOptions = WorkOptions(),
) -> int:
    """Prove how many changed inputs a model survives: the checkpoint of a run, or a model of your own.

    Changed values are any, or those that --beta or --low and --high allow: then the first layer need not be truncated.

    ```
    ell0 certify runs/digits/f8certified
    ell0 certify runs/digits/f8certified --challenge --queries 5000
    ell0 certify my_models:build --data mine.npz --beta 1 --page out.html
    ```

    Args:
        budgets: Number of changes to certify; repeat for several. Default: those of 1, 2, 4 and 8 that the model can
            have a certificate for.
        challenge: Attack each row with as many changes as were proven harmless (see --queries and --steps). If an
            attack succeeds, print the rows instead of certificates and exit with code 4.
        save_radii: File (.npz) to write the certified radius of each row to, with its label: radius, y.
    """
    import torch
    from torch import nn

    from .. import certify as certificates
    from ..attacks import ATTACKS
    from ..common import check_count, digest
    from ..evaluation import cascade
    from ..files import check_out
    from ..parallel import together
    from ..threat import L0Ball
    from .model import load, save_arrays

    with together(work.devices, work.nodes, work.device) as team:
        for budget in budgets or ():
            check_count("budget", budget, least=0)
        ends = box.given()
        if save_radii is not None:
            team.once(partial(check_out, save_radii, "save_radii"))
        names = dict.fromkeys((*ATTACKS, *cascade(queries=1, steps=1)))
        attacks = cascade(names, queries=subject.queries, steps=subject.steps)
        loaded = load(model, subject, work, team)
        network, x, y = loaded.network, loaded.x, loaded.y
        if not isinstance(network, nn.Module):
            raise ValueError(f"model must be an nn.Module for bounds to pass through it, got {model!r}")
        certifier = certificates.certifier(network)
        if challenge and certifier.confidence is not None:
            raise ValueError(
                f"challenge must be left out for {model!r}, whose certificates hold with a probability alone"
            )
        ball = L0Ball(0, subject.unit, *(ends or (-math.inf, math.inf)))
        certifier.check(x[:1], replace(ball, budget=max(budgets or [0])))
        most = certifier.limit(x, ball)
        seeds = [0] if challenge else []
        results = loaded.results(certify, seeds, team, budget=budgets, **asdict(box), challenge=challenge)
        start = time.perf_counter()
        tried: list[Challenge] = []
        with show_progress(work.quiet or not team.first) as progress:

            def radius(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
                # To the most that can be proven, not to what is asked for: the median is over all radii.
                certified = partial(certifier.radius, x, y, ball, max_budget=most, rows=rows, batch=subject.batch)
                return certified(progress=progress)

            radii = team.by_row(radius, x, y, torch.arange(len(x), device=x.device))
            results.seconds = round(time.perf_counter() - start, 1)
            if challenge:
                mine = team.share(x), team.share(y), team.share(radii)
                attacked = partial(certificates.challenge, network, *mine, ball, attacks, batch=subject.batch)
                tried = team.gather(partial(attacked, progress=progress))
        if not team.first:
            return 0
        if broken := [words for rank, one in enumerate(tried) for words in _broken(one, rank, team.size, radii)]:
            failed = f"{len(broken)} certificates do not hold, so nothing is shown as proven; please report this:"
            tell(f"ell0: {failed}", *broken, sep="\n  ", file=sys.stderr)
            return BROKEN
        cost = {key: getattr(certifier, key) for key in ("forwards", "confidence", "rounding")}
        about: dict[str, Any] = {"method": "best"} if certifier.forwards is None else cost
        about |= {"classifier": loaded.classifier, "unit": subject.unit, **ball.entries}
        asked = budgets or [budget for budget in BUDGETS if budget <= most]
        results.rows = certificates.rows(radii, sorted({0, *asked}), **about, rows_sha256=digest(x, y))
        if tried:
            about |= {"queries": subject.queries, "steps": subject.steps, "attacks": ", ".join(attacks)}
            flags = list(dict.fromkeys(flag for one in tried for flag in one.flags))
            results.add(0, what="certificates_broken", **about, flags=flags, n=sum(one.tried for one in tried))
        hand_over(results, subject.out, work, partial(_show, ball))
        loaded.write_page(results, work.quiet)
        if save_radii is not None:
            save_arrays(save_radii, work.quiet, radius=radii.cpu().numpy(), y=y.cpu().numpy())
        return 0


def _broken(found: Challenge, rank: int, ranks: int, radii: Tensor) -> Iterator[str]:
    """A line for each row of a rank's share that an attack broke, with the row's number in the data."""
    for place, name in zip(found.fell.tolist(), found.by, strict=True):
        row = place * ranks + rank
        yield f"row {row}, proven for {int(radii[row])} changes, falls to {name}"


def _show(ball: L0Ball, results: Results) -> None:
    for row in results.rows:
        if row.what == "certified_accuracy":
            changed = str(replace(ball, budget=row["budget"])) if row["budget"] else "clean"
            tell(f"{100 * row.value:5.1f} % ({100 * row['low']:.1f}-{100 * row['high']:.1f})  {changed}")
        elif row.what == "certified_radius":
            tell(f"median certified radius {row.value:g} of {row.n:,} rows; a misclassified row counts as -1")
        else:
            tell(f"no attack breaks any of {row.n:,} certified rows within its radius: {row['attacks']}")
