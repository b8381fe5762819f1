"""Attacks in order of price on the rows still standing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from ..attacks.contract import Model, Victim
from ..common import Progress, Step, check_count, seeded, silent
from ..parallel import ALONE, Team
from ..results import Share
from ..threat import L0Ball
from .entries import AttackFunction, Entry, entries_of
from .evaluation import Evaluation, percent
from .flags import (
    Attacked,
    Probe,
    batches,
    beaten_flags,
    check_claims,
    clean_pass,
    doubt_flags,
    model_flags,
    output_flags,
)  # fmt: skip
from .identity import of_attack, of_model, of_value
from .state import AttackedRows, State

_NOISE = 10  # how many times the noise of a few rows the clean margins of all may differ between two runs


def evaluate(
    model: Model,
    x: Tensor,
    y: Tensor,
    ball: L0Ball,
    attacks: Mapping[str, AttackFunction | Entry] | Collection[str] | None = None,
    *,
    budgets: Collection[int] | None = None,
    batch: int = 512,
    seed: int = 0,
    state_path: Path | str | None = None,
    progress: Progress = silent,
    team: Team = ALONE,
) -> Evaluation:
    """Clean accuracy, then every attack in turn on the rows that still stand.

        evaluation = evaluate(model, x, y, L0Ball(5), {"rs": partial(sparse_rs, queries=5000)}, budgets=[1, 2, 5])
        print(evaluation)

    A row is robust only if no attack breaks it. A row misclassified from the start is broken, at no query. For the
    figure of one attack on all rows, evaluate with that attack alone.

    Args:
        model: gives logits for x; it is evaluated in eval mode.  x: ``(n, ...)``.  y: ``(n,)``, the true labels.
        attacks: names of ``ATTACKS`` or of `cascade`, or name -> configured attack, run in this order. A function that
            is not of ``ell0.attacks`` must be an `Entry`, which says whether it is white-box. Default: `cascade`; for a
            model without gradients its black-box attacks. White-box attacks named for such a model raise.
        budgets: a curve over these budgets, at most that of the ball, which always ends it. They run upwards on the
            rows still standing: a row broken with d changes is broken at every budget from d.
        batch: rows in one call of an attack, on each rank; the result does not depend on it if the model's answer for a
            row does not depend on the rest of its batch.
        seed: gives each attack, by its name, the key of its draws.
        state_path: file that is rewritten after each batch. A killed evaluation that is called again with the same
            arguments goes on from it, with any batch size.
        progress: called by rank 0 after each attack and, with that as the stage, by the attacks of ``ell0.attacks``.
        team: ranks that share the rows (`ell0.parallel`): each calls this with all of them and gets the same result.
            Rank 0 alone writes; the number of ranks may change before an evaluation goes on.

    Raises a RuntimeError if, at the end, a point lies outside the ball, or the model gives its true label by more than
    rounding explains.
    """
    entries = entries_of(attacks)
    check_count("batch", batch)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an int, got {seed!r}")
    path = team.once(partial(_checked_path, state_path))
    Victim(model, x, y, ball, finite=False)  # checks the arguments as a whole
    team.check_rows("x", len(x))
    steps = _checked_budgets(budgets, ball)
    flags = model_flags(model)
    attacked, first = Attacked(model, x, y, ball), torch.zeros(1, dtype=torch.int64, device=x.device)
    with attacked.victim(first):  # the model stays in eval mode to the end, for every attack
        probe = team.once(partial(Probe.of, model, x))
        blocked = [] if probe.differentiable else [name for name, entry in entries.items() if entry.white_box]
        if blocked and attacks is not None:
            raise ValueError(f"attacks must be black-box for a model that gives no gradient, got {', '.join(blocked)}")
        entries = {name: entry for name, entry in entries.items() if name not in blocked}
        clean, wrong, blind = clean_pass(attacked, batch, probe.differentiable, team)
        _rehearse(attacked, entries, first, seed)
        parts = {} if path is None else _identity(attacked, entries, steps, seed)
        state = State.fresh(x, clean, wrong, len(entries))
        saved = team.once(lambda: path.read_bytes() if path is not None and path.exists() else None)
        if path is not None and saved is not None:
            state = State.load(path, saved, x, parts, clean, _NOISE * probe.noise)
        report = progress if team.first else silent
        turns = list(product(filter(None, steps), enumerate(entries.items())))
        for turn, (budget, (column, (name, entry))) in enumerate(turns):
            stage = Step("attacks", turn, len(turns), f"{name}, budget {budget}")
            waiting = (state.verdict < 0) & (state.tried[:, column] < budget)
            for rows in batches(waiting.nonzero().squeeze(1), batch * team.size):
                start = time.perf_counter()
                own = team.share(rows).to(x.device)
                run = partial(_run, entry, attacked, own, budget, seeded(seed, name), partial(_within, report, stage))
                for found in team.gather(run):
                    if found is not None:
                        state.learn(column, budget, found)
                state.seconds[column] += time.perf_counter() - start
                if path is not None and team.first:
                    state.save(path, x, parts)
            if waiting.any():
                stands = percent(Share(int((state.verdict < 0).sum()), len(x)))
                report(replace(stage, done=turn + 1, note=f"{stage.note}: robust accuracy {stands}"))
        lost = check_claims(attacked, state, tuple(entries), batch, probe.random, team)
    flags += output_flags(probe, blocked, int(blind.sum()), lost, len(x))
    flags += doubt_flags(state, 0 if probe.random else lost)
    flags += beaten_flags(state, {name: entry.gradients_only for name, entry in entries.items()})
    return Evaluation(
        ball=ball,
        attacks={name: entry.white_box for name, entry in entries.items()},
        budgets=steps,
        verdict=state.verdict,
        distance=state.distance,
        x_adv=state.x_adv,
        queries=state.queries,
        tried=state.tried,
        seconds=tuple(state.seconds.tolist()),
        units=x.shape[1 if ball.unit == "feature" else 2 :].numel(),
        flags=tuple(flags),
    )


def _within(report: Progress, stage: Step, step: Step) -> None:
    report(replace(step, stage=stage))


def _run(
    entry: Entry, attacked: Attacked, rows: Tensor, budget: int, key: torch.Generator, progress: Progress
) -> AttackedRows | None:
    """What an attack finds for some rows; None if there are none."""
    if not len(rows):
        return None
    return AttackedRows.of(rows, attacked.x[rows], entry(attacked.part(rows, budget), key, rows, progress))


def _rehearse(attacked: Attacked, entries: dict[str, Entry], row: Tensor, seed: int) -> None:
    """Calls every attack on a row with a wrong label, which costs no query.

    An attack that refuses the ball or its own settings does so now, not after hours of cheaper attacks.
    """
    model, x, _, ball = attacked.part(row)
    with torch.no_grad():
        logits = model(x)
    label = (logits.argmax(1) + 1) % logits.shape[1]
    for name, entry in entries.items():
        entry((model, x, label, ball), seeded(seed, name), row)


def _identity(attacked: Attacked, entries: dict[str, Entry], budgets: tuple[int, ...], seed: int) -> dict[str, str]:
    """What must be the same for an evaluation to go on from a state."""
    values = {"x": attacked.x, "y": attacked.y, "ball": attacked.ball, "budgets": budgets, "seed": seed}
    parts = {name: of_value(name, value) for name, value in values.items()}
    parts |= {"model": of_model(attacked.model), "attacks": ", ".join(entries)}
    return parts | {f"parameters of {name}": of_attack(name, entry.attack) for name, entry in entries.items()}


def _checked_path(state_path: Path | str | None) -> Path | None:
    if state_path is None:
        return None
    path = Path(state_path)
    if path.is_dir():
        raise ValueError(f"state_path must be a file, got the folder {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"state_path must be in a folder that exists, got {str(path)!r}")
    try:
        tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.").close()
    except OSError as error:
        raise ValueError(f"state_path must be where a file can be written, got {str(path)!r} ({error})") from error
    return path


def _checked_budgets(budgets: Collection[int] | None, ball: L0Ball) -> tuple[int, ...]:
    if budgets is None:
        return (ball.budget,)
    good = all(isinstance(b, int) and not isinstance(b, bool) and 0 <= b <= ball.budget for b in budgets)
    if not good or not budgets or len(set(budgets)) < len(budgets):
        raise ValueError(f"budgets must be different ints from 0 to the ball's {ball.budget}, got {budgets!r}")
    return tuple(sorted({*budgets, ball.budget}))
