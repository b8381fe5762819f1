"""Which attacks an evaluation runs, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..attacks import ATTACKS, AttackResult, declared
from ..attacks.contract import Model
from ..common import Progress, check_count, did_you_mean, silent
from ..results import CLEAN
from ..threat import L0Ball

AttackFunction = Callable[..., AttackResult]
Target = tuple[Model, Tensor, Tensor, L0Ball]


@dataclass(frozen=True)
class Entry:
    """An attack of an evaluation: ``attack(model, x, y, ball, *, generator, rows)``, and whether it is white-box."""

    attack: AttackFunction
    white_box: bool

    def __call__(
        self, on: Target, generator: torch.Generator, rows: Tensor, progress: Progress = silent
    ) -> AttackResult:
        """Runs it on a model, x, y and a ball; only a declared attack is given ``progress``."""
        more = {} if declared(self.attack) is None else {"progress": progress}
        return self.attack(*on, generator=generator, rows=rows, **more)

    @property
    def gradients_only(self) -> bool:
        """As declared; a white-box attack that is not declared is taken for one that uses gradients only."""
        own = declared(self.attack)
        return self.white_box if own is None else own.gradients_only


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
        chosen[name] = Entry(partial(known[name], **given) if given else known[name], own.white_box)
    return chosen


def entries_of(attacks: Mapping[str, AttackFunction | Entry] | Collection[str] | None) -> dict[str, Entry]:
    """What the argument ``attacks`` of `evaluate` stands for."""
    if attacks is not None and (isinstance(attacks, str) or not isinstance(attacks, Collection) or not len(attacks)):
        raise ValueError(f"attacks must be attacks by their names, or names, at least one, got {attacks!r}")
    if not isinstance(attacks, Mapping):
        return cascade(attacks)
    entries = {}
    for name, attack in attacks.items():
        if not isinstance(name, str) or name in ("", CLEAN):
            raise ValueError(f"attacks must be named by strings other than {CLEAN!r}, got {name!r}")
        if not callable(attack.attack if isinstance(attack, Entry) else attack):
            raise ValueError(f"attacks must be functions, got {attack!r} as {name!r}")
        if isinstance(attack, Entry):
            entries[name] = attack
        elif (own := declared(attack)) is not None:
            entries[name] = Entry(attack, own.white_box)
        else:
            raise ValueError(f"an attack that is not declared must be an Entry(..., white_box=...), got {name!r}")
    return entries
