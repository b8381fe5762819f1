"""`ell0 attack`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from .options import BoxOptions, ModelName, RowOptions, WorkOptions, hand_over, show_progress, tell

TOO_FEW = 3  # exit code if robust accuracy is below --fail-under


def attack(
    model: ModelName,
    /,
    *,
    attacks: Annotated[list[str] | None, Parameter(name="--attack")] = None,
    budget: int = 5,
    box: BoxOptions = BoxOptions(),
    subject: RowOptions = RowOptions(),
    seed: int = 0,
    fail_under: float | None = None,
    save_examples: Path | None = None,
    work: WorkOptions = WorkOptions(),
) -> int:
    """Attack a model: the checkpoint of a run, or a model of your own.

    Changed values lie in the range of the data, [-1, 1] for the data sets, or in what --beta or --low and --high say.

    ```
    ell0 attack runs/digits/f4 --budget 3 --beta 100
    ell0 attack my_package.models:build --data mine.npz --low 0 --high 1
    ell0 attack runs/digits/f4 --fail-under 0.6 --out attacked.json
    ell0 attack my_models:build --weights runs/mine --data mine.npz
    ell0 attack runs/digits/f4 --page f4.html --save-examples f4.npz
    ell0 attack runs/digits/f4 --devices 8
    ```

    Args:
        attacks: Attack to run; repeat for several. Default: all but pointwise, sparse_rs with two value sets.
        budget: Features or pixels that the attacker may change.
        seed: Seed of the attacks.
        fail_under: Exit with code 3 if robust accuracy is below this share.
        save_examples: File (.npz) to write attacked rows to: x_adv, which is x where the row stands, x, y, distance
            (changes; 0: misclassified without an attack, -1: the row stands), and the attack that each fell to, by.
    """
    from ..common import digest
    from ..evaluation import cascade, evaluate
    from ..files import check_out
    from ..parallel import together
    from ..threat import L0Ball
    from .model import load, save_arrays

    with together(work.devices, work.nodes, work.device) as team:
        if fail_under is not None and not 0 <= fail_under <= 1:
            raise ValueError(f"fail_under must lie in [0, 1], got {fail_under}")
        ends = box.given()
        if save_examples is not None:
            team.once(partial(check_out, save_examples, "save_examples"))
        entries = cascade(attacks, queries=subject.queries, steps=subject.steps)
        loaded = load(model, subject, work, team)
        ball = L0Ball(budget, subject.unit, *(ends or loaded.range))
        results = loaded.results(attack, [seed], team, attack=attacks, budget=budget, **asdict(box), seed=seed)
        with show_progress(work.quiet or not team.first) as progress:
            attacked = partial(evaluate, loaded.network, loaded.x, loaded.y, ball, entries, batch=subject.batch)
            evaluation = attacked(seed=seed, progress=progress, team=team)
        if not team.first:
            return 0
        results.seconds = round(sum(evaluation.seconds), 1)
        results.rows = evaluation.rows(classifier=loaded.classifier, rows_sha256=digest(loaded.x, loaded.y))
        hand_over(results, subject.out, work, lambda _: tell(evaluation))
        loaded.write_page(results, work.quiet, evaluation.x_adv)
        if save_examples is not None:
            rows = {"x_adv": evaluation.x_adv, "x": loaded.x, "y": loaded.y, "distance": evaluation.distance}
            arrays: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in rows.items()}
            save_arrays(save_examples, work.quiet, **arrays, by=[name or "" for name in evaluation.decided])
        return TOO_FEW if fail_under is not None and evaluation.robust_accuracy < fail_under else 0
