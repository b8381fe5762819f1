"""Which attacks run, and evaluation: attacks in order of price on the rows still standing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attacks import ATTACKS, AttackResult, declared, sparse_pgd, sparse_rs
from ..attacks.contract import Victim
from ..common import Progress, Step, check_count, did_you_mean, seeded, silent
from ..files import check_out
from ..parallel import ALONE, Team
from ..precision import dense_products
from ..results import CLEAN, Share
from ..threat import L0Ball
from ..wrapping import as_rows, joined, wrap
from .evaluation import Evaluation, percent
from .flags import PROBED, Attacked, Probe, Ran, check_claims, clean_pass, raised, unfounded
from .identity import of_attack, of_model, of_value
from .state import State, compact

_NOISE = 10  # how many times the noise of a few rows the clean margins of all may differ between two runs

AttackFunction = Callable[..., AttackResult]


@dataclass(frozen=True)
class Entry:
    """An attack of an evaluation: ``attack(model, x, y, ball, *, generator, rows)``, and whether it is white-box.

    optional: it is left out if the model has no gradient for it; such a model is refused otherwise.
    """

    attack: AttackFunction
    white_box: bool
    optional: bool = False


def cascade(
    names: Collection[str] | None = None, *, queries: int | None = None, steps: int | None = None
) -> dict[str, Entry]:
    """Attacks for `ell0.evaluate`, in the order of their names. None: the default ones, the cheapest first.

    Args:
        names: of ``ATTACKS`` or of the default ones.
        queries, steps: what each may spend on a row, whichever of the two it counts. None: its own default.
    """
    spent = {key: value for key, value in (("queries", queries), ("steps", steps)) if value is not None}
    for key, value in spent.items():
        check_count(key, value)
    default: dict[str, AttackFunction] = {}
    for attack in sorted((a for a in ATTACKS.values() if a.cascade is not None), key=lambda a: a.cascade or 0):
        default |= {f"{attack.name}_{name}": partial(attack, **given) for name, given in attack.variants.items()}
        default |= {} if attack.variants else {attack.name: attack}
    known: dict[str, AttackFunction] = {**ATTACKS, **default}
    chosen: dict[str, Entry] = {}
    for name in default if names is None else names:
        if name not in known:
            raise ValueError(f"attack must be one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}")
        if name in chosen:
            raise ValueError(f"attacks must differ, got {name!r} twice")
        own = declared(known[name])
        assert own is not None
        given = {key: value for key, value in spent.items() if key in own.settings}
        chosen[name] = Entry(partial(known[name], **given) if given else known[name], own.white_box, names is None)
    return chosen


PRESETS: dict[str, dict[str, AttackFunction]] = {
    "saa": {
        "sparse_pgd_unprojected": partial(sparse_pgd, steps=10_000, gradient="unprojected"),
        "sparse_pgd_projected": partial(sparse_pgd, steps=10_000, gradient="projected"),
        "sparse_rs": partial(sparse_rs, queries=10_000),
    }
}
"""Attacks that the literature reports together. saa: Sparse-AutoAttack [Zhong24], reported on CIFAR-10 at 20 pixels."""


def _entries(attacks: Mapping[str, AttackFunction | Entry] | Collection[str] | None) -> dict[str, Entry]:
    if attacks is not None and (isinstance(attacks, str) or not isinstance(attacks, Collection) or not len(attacks)):
        raise ValueError(f"attacks must be attacks by their names, or names, at least one, got {attacks!r}")
    if not isinstance(attacks, Mapping):
        return cascade(attacks)
    entries = {}
    for name, attack in attacks.items():
        if not isinstance(name, str) or name in ("", CLEAN):
            raise ValueError(f"attacks must be named by strings other than {CLEAN!r}, got {name!r}")
        if not isinstance(attack, Entry) and (own := declared(attack)):
            attack = Entry(attack, own.white_box)
        if not isinstance(attack, Entry) or not callable(attack.attack):
            rule = "attacks must be functions of ell0.attacks, or Entry(function, white_box=...)"
            raise ValueError(f"{rule}, got {attack!r} as {name!r}")
        entries[name] = attack
    return entries


def evaluate(
    model: Any,
    x: Any,
    y: Any = None,
    ball: L0Ball | None = None,
    attacks: Mapping[str, AttackFunction | Entry] | Collection[str] | None = None,
    *,
    preset: str | None = None,
    budgets: Collection[int] | None = None,
    radii: Tensor | None = None,
    batch: int = 512,
    seed: int = 0,
    tf32: bool = False,
    state_path: Path | str | None = None,
    progress: Progress = silent,
    team: Team = ALONE,
) -> Evaluation:
    """Clean accuracy, then every attack in turn on the rows that still stand.

        ball = L0Ball(5, low=0.0, high=1.0)
        evaluation = evaluate(model, x, y, ball, {"rs": partial(sparse_rs, queries=5000)}, budgets=[1, 2, 5])
        print(evaluation)

    A row is robust only if no attack breaks it; a row misclassified from the start is broken. For the figure of one
    attack on all rows, evaluate with that attack alone.

    Args:
        model: gives logits for x; it is evaluated in eval mode. Whatever `ell0.wrap` takes by itself will do, a
            scikit-learn classifier for one; probabilities with a gradient are attacked by their logarithms.
        x: ``(n, ...)``, a tensor or an array; or, without y, a DataLoader, a Dataset or an iterable of pairs (x, y),
            read whole before the first attack.
        y: ``(n,)``, the true labels.  ball: must be given.
        attacks: names of ``ATTACKS`` or of `cascade`, or name -> configured attack, run in this order. A function that
            is not of ``ell0.attacks`` must be an `Entry`. Default: `cascade`, its black-box attacks if the model has
            no gradient; other white-box attacks then raise.
        preset: in place of attacks. ``"saa"``: Sparse-PGD with either gradient, then Sparse-RS, 10,000 steps and
            queries each, the ensemble that others report for 20 pixels.
        budgets: a curve over these budgets, at most that of the ball, which always ends it.
        radii: certified radii ``(n,)``, as `ell0.certify.radius` gives them for this ball: a row is not attacked with
            budgets up to its own, where no attack can succeed. Default: every row is attacked.
        batch: rows in one call of an attack, on each rank; no verdict depends on it if no answer of the model does.
        seed: gives each attack, by its name, the key of its draws.
        tf32: on a GPU, attacks query in TF32, several times faster; a row is broken only if the model also errs in
            float32 on the point that was found.
        state_path: file that is rewritten after each batch. A killed evaluation that is called again with the same
            arguments goes on from it, with any batch size.
        progress: called by rank 0 after each attack and, with that as the stage, by the attacks of ``ell0.attacks``.
        team: ranks that share the rows (`ell0.parallel`): each calls this with all of them and gets the same result.
            Rank 0 alone writes; the number of ranks may change before an evaluation goes on.

    Raises a RuntimeError if, at the end, a point lies outside the ball or within the certified radius of its row, or
    the model gives its true label by more than rounding explains.
    """
    if preset is not None:
        if preset not in PRESETS:
            known = ", ".join(map(repr, PRESETS))
            raise ValueError(f"preset must be {known}, got {preset!r}{did_you_mean(preset, PRESETS)}")
        if attacks is not None:
            raise ValueError(f"attacks must be left out beside preset, got {attacks!r}")
        attacks = PRESETS[preset]
    entries = _entries(attacks)
    check_count("batch", batch)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an int, got {seed!r}")
    path = None if state_path is None else Path(state_path)
    if path is not None:
        team.once(partial(check_out, path, "state_path"))
    if isinstance(y, L0Ball):
        raise ValueError("ball must be given by its name if there is no y: evaluate(model, loader, ball=ball)")
    if not isinstance(ball, L0Ball):
        raise ValueError(f"ball must be an L0Ball, such as ball=L0Ball.of(x, 5), got {ball!r}")
    budgets = _checked_budgets(budgets, ball)
    x, y = joined(model, x, batch, path is not None) if y is None else as_rows(model, x, y)
    Victim(model, x, y, ball, finite=False)  # checks the arguments as a whole
    radii = torch.full((len(x),), -1, device="cpu") if radii is None else torch.as_tensor(radii)
    if radii.dtype != torch.int64 or radii.shape != (len(x),):
        rule = f"radii must be int64 of shape ({len(x)},), as certify.radius gives them"
        raise ValueError(f"{rule}, got {radii.dtype} of shape {tuple(radii.shape)}")
    radii = radii.cpu()
    team.check_rows("x", len(x))
    first = torch.zeros(1, dtype=torch.int64, device=x.device)
    few = torch.arange(min(len(x), PROBED), device=x.device)
    with Attacked(model, x, y, ball).victim(few) as victim:  # the model stays in eval mode, for every attack
        attacked_model = victim.model  # wrapped, if it gave something else than logits
        probe = team.once(partial(Probe.of, attacked_model, x))
        if probe.softmaxed and not probe.blind:
            attacked_model = wrap(attacked_model, probabilities=True)
        attacked = Attacked(attacked_model, x, y, ball)
        # Attacks of ell0 follow a surrogate where the model has no gradient of its own.
        needs = {name: int(declared(entry.attack) is not None) for name, entry in entries.items() if entry.white_box}
        blocked = [name for name, most in needs.items() if probe.blind > most]
        if refused := [name for name in blocked if not entries[name].optional]:
            raise ValueError(f"attacks must be black-box for a model that gives no gradient, got {', '.join(refused)}")
        entries = {name: entry for name, entry in entries.items() if name not in blocked}
        clean, wrong, useless = clean_pass(attacked, batch, probe.blind, team)
        _rehearse(attacked, entries, first, seed)
        parts = {} if path is None else _identity(attacked, entries, budgets, seed, tf32, radii)
        state = State.fresh(x, clean, wrong, len(entries))
        saved = team.once(partial(State.read, path))
        if path is not None and saved is not None:
            fresh, state = state, State.load(path, saved, state, parts, _NOISE * probe.noise)
            state.forget(unfounded(attacked, state, fresh, batch, probe.random, team), fresh)
        report = progress if team.first else silent
        turns = list(product(filter(None, budgets), enumerate(entries.items())))
        for turn, (budget, (column, (name, entry))) in enumerate(turns):
            stage = Step("attacks", turn, len(turns), f"{name}, budget {budget}")
            stands = (state.verdict < 0) & (radii < budget)
            waiting = (stands & (state.tried[:, column] < budget)).nonzero().squeeze(1)
            for rows in waiting.split(batch * team.size) if len(waiting) else ():
                began = time.perf_counter()
                own = team.share(rows).to(x.device)
                key, inside = seeded(seed, name), _inside(report, stage)
                run = partial(_run, entry.attack, attacked, own, budget, key, inside, tf32)
                for found in filter(None, team.gather(run)):
                    state.learn(column, budget, found)
                state.seconds[column] += time.perf_counter() - began
                if path is not None and team.first:
                    state.save(path, x, parts)
            if len(waiting):
                robust = percent(Share(int((state.verdict < 0).sum()), len(x)))
                report(replace(stage, done=turn + 1, note=f"{stage.note}: robust accuracy {robust}"))
        # Rounding may turn a row that no change can be proven for.
        if len(refuted := ((state.verdict >= 0) & (state.distance <= radii) & (radii > 0)).nonzero()):
            row = int(refuted[0])
            said = f"row {row} has a certified radius of {int(radii[row])}, and a point at {int(state.distance[row])}"
            raise RuntimeError(f"radii must hold, but {said} is misclassified")
        lost = check_claims(attacked, state, tuple(entries), batch, probe.random, team)
    ran = {name: Ran.of(entry.attack, entry.white_box) for name, entry in entries.items()}
    return Evaluation(
        ball=ball,
        attacks={name: entry.white_box for name, entry in entries.items()},
        budgets=budgets,
        seconds=tuple(state.seconds.tolist()),
        units=x.shape[1 if ball.unit == "feature" else 2 :].numel(),
        flags=raised(model, probe, state, ran, blocked, useless, lost, ball.doubt(x), next(filter(None, budgets), 0)),
        **{key: getattr(state, key) for key in ("verdict", "distance", "x_adv", "queries", "tried", "late")},
    )


def _inside(report: Progress, stage: Step) -> Progress:
    return lambda step: report(replace(step, stage=stage))


def _run(
    attack: AttackFunction,
    attacked: Attacked,
    rows: Tensor,
    budget: int,
    key: torch.Generator,
    progress: Progress,
    tf32: bool,
) -> list[Tensor]:
    """What an attack finds for some rows, as `State.learn` takes it; nothing if there are none."""
    if not len(rows):
        return []
    more = {} if declared(attack) is None else {"progress": progress}
    if not tf32:
        result = attack(*attacked.part(rows, budget), generator=key, rows=rows, **more)
    else:
        with dense_products(tf32=True):
            result = attack(*attacked.part(rows, budget), generator=key, rows=rows, **more)
        result = _confirmed(result, attacked, rows)
    return compact(rows, attacked.x[rows], result)


def _confirmed(result: AttackResult, attacked: Attacked, rows: Tensor) -> AttackResult:
    """The result without the points on which the model does not err in float32."""
    with dense_products(tf32=False), attacked.victim(rows) as victim:
        wrong = victim.errs(result.x_adv, torch.arange(len(rows), device=rows.device))
    stands = result.success & ~wrong
    x_adv = torch.where(stands.view(-1, *[1] * (attacked.x.ndim - 1)), victim.x, result.x_adv)
    return replace(
        result, x_adv=x_adv, success=result.success & wrong, distance=torch.where(stands, -1, result.distance)
    )


def _rehearse(attacked: Attacked, entries: dict[str, Entry], row: Tensor, seed: int) -> None:
    """Calls every attack on a row with a wrong label: one that refuses the ball or its settings does so now."""
    model, x, _, ball = attacked.part(row)
    with torch.no_grad():
        logits = model(x)
    label = (logits.argmax(1) + 1) % logits.shape[1]
    for name, entry in entries.items():
        entry.attack(model, x, label, ball, generator=seeded(seed, name), rows=row)


def _identity(
    attacked: Attacked,
    entries: dict[str, Entry],
    budgets: tuple[int, ...],
    seed: int,
    tf32: bool,
    radii: Tensor,
) -> dict[str, str]:
    """What must be the same for an evaluation to go on from a state."""
    values = {"x": attacked.x, "y": attacked.y, "ball": attacked.ball, "budgets": budgets, "seed": seed, "tf32": tf32}
    values |= {"radii": radii} if (radii >= 0).any() else {}
    parts = {name: of_value(name, value) for name, value in values.items()}
    parts |= {"model": of_model(attacked.model), "attacks": ", ".join(entries)}
    return parts | {f"parameters of {name}": of_attack(name, entry.attack) for name, entry in entries.items()}


def _checked_budgets(budgets: Collection[int] | None, ball: L0Ball) -> tuple[int, ...]:
    if budgets is None:
        return (ball.budget,)
    budgets = [check_count("budgets", budget, least=0) for budget in budgets]
    if not budgets or len(set(budgets)) < len(budgets) or max(budgets) > ball.budget:
        raise ValueError(f"budgets must be different ints from 0 to the ball's {ball.budget}, got {budgets!r}")
    return tuple(sorted({*budgets, ball.budget}))
