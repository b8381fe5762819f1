"""What a run found, in a sentence, and why that may not be trusted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ..results import Row
from ._rows import attack_of, effort_of, figure_words, grouped, is_worst, least_of, spent_on, who
from ._words import beta_words, number, percent, series


@dataclass(frozen=True)
class Verdict:
    """What the run found, in plain words.  kind: whose figure it is, the worst case or one attack's."""

    kind: str
    headline: Markup
    notes: tuple[Markup, ...]
    classifier: str | None = None


@dataclass(frozen=True)
class Flag:
    """Why figures may not be trusted.  where: which ones.  first: whether the verdict's classifier is among them."""

    words: str
    where: str
    first: bool


def verdict_of(clean: list[Row], worst: list[Row], single: list[Row], units: str, items: str) -> Verdict:
    if worst:
        chosen = _at_one_budget(least_of(worst))
        note = Markup("Every attack and value set counts: a test {} is lost as soon as one of them breaks it. {}")
        notes = (note.format(items[:-1], _choice(chosen, worst, units)), *_by_protocol(single, chosen[0]))
        return Verdict("Worst case", _headline(chosen, units, items), notes, who(chosen[0]))
    if single:
        chosen = _at_one_budget(_strongest(single))
        note = Markup("This is {} alone ({}), so an upper bound: the worst case over all attacks was not measured. {}")
        words = note.format(attack_of(chosen[0]), _setting(chosen[0]), _choice(chosen, single, units))
        return Verdict("One attack, no worst case", _headline(chosen, units, items), (words,), who(chosen[0]))
    if clean:
        best = max(clean, key=lambda row: row["value"])
        headline = Markup("{} gets <strong>{}</strong> of {} test {} right; no attack was run.").format(
            who(best), figure_words(best), number(best.get("n")), items
        )
        return Verdict("Clean accuracy", headline, (), who(best))
    return Verdict("Figures", Markup("These results hold no accuracy; their figures stand below."), ())


def _strongest(rows: list[Row]) -> list[Row]:
    """The rows of one attack with the widest values and the most queries, the lowest of each classifier and budget."""
    top = max((row.get("beta") or 0, spent_on(row)) for row in rows)
    return least_of(row for row in rows if (row.get("beta") or 0, spent_on(row)) == top)


def _at_one_budget(rows: list[Row]) -> list[Row]:
    """The rows a verdict speaks of, best first.

    Of the budgets that most classifiers share it takes the largest at which one of them keeps half of the rows, else
    the smallest.
    """
    budgets: dict[Any, list[Row]] = {}
    for row in rows:
        budgets.setdefault(row.get("budget") or 0, []).append(row)
    most = max(map(len, budgets.values()))
    shared = sorted(budget for budget, group in budgets.items() if len(group) == most)
    held = [budget for budget in shared if max(row["value"] for row in budgets[budget]) >= 0.5]
    return sorted(budgets[held[-1] if held else shared[0]], key=lambda row: -row["value"])


def _headline(chosen: list[Row], units: str, items: str) -> Markup:
    best, *others = chosen
    if len(others) > 2:
        # Truncated against plain networks, whichever is best: the strongest rival and the weakest.
        rivals = [row for row in others if (row.get("k") == 0) != (best.get("k") == 0)] or others
        others = rivals[:1] + rivals[1:][-1:]
    words = "{} keeps <strong>{}</strong> of {} test {} right when {} set to any value{}"
    sentence = Markup(words).format(
        who(best), figure_words(best), number(best.get("n")), items, _changes(best.get("budget"), units), _within(best)
    )
    rest = [Markup("{} keeps <strong>{}</strong>").format(who(row), percent(row["value"])) for row in others]
    return Markup("; ").join([sentence, *([Markup(" and ").join(rest)] if rest else [])]) + "."


def _choice(chosen: list[Row], rows: list[Row], units: str) -> str:
    """Why the verdict speaks of this budget, where there were several."""
    if len({row.get("budget") for row in rows}) == 1:
        return ""
    if chosen[0]["value"] < 0.5:
        return "The verdict takes the smallest budget: at none does a classifier keep half."
    return f"The verdict takes the largest number of {units} at which a classifier keeps half."


def _by_protocol(single: list[Row], best: Row) -> Iterator[Markup]:
    """The figure of the paper's protocol for the classifier and budget of the verdict, with most queries."""
    alike = ("classifier", "budget")
    rows = [
        row for row in single if row.get("protocol") == "paper" and all(row.get(key) == best.get(key) for key in alike)
    ]
    for row in _strongest(rows) if rows else ():
        paper = f"; the paper reports {percent(row['paper'])}" if row.get("paper") is not None else ""
        words = "By the paper protocol ({}, {}, n = {}) the same classifier keeps {}{}."
        yield Markup(words).format(attack_of(row), _setting(row), number(row.get("n")), figure_words(row), paper)


def _changes(budget: Any, units: str) -> str:
    return f"1 {units[:-1]} is" if budget == 1 else f"{number(budget)} {units} are"


def _within(row: Row) -> str:
    beta = row.get("beta")
    return "" if beta is None else f" within ±{number(beta)}"


def _setting(row: Row) -> str:
    return ", ".join(filter(None, [effort_of(row), beta_words(row.get("beta"))]))


def flags_of(rows: list[Row], first: str | None) -> list[Flag]:
    """Each flag once, with the rows that carry it, those of the classifier ``first`` before the others."""
    flagged = [row for row in rows if row.get("flags")]
    where: dict[str, list[Row]] = {}
    for row in flagged:
        for words in row["flags"].split("; ") if isinstance(row["flags"], str) else row["flags"]:
            where.setdefault(str(words), []).append(row)
    flags = []
    for words, carriers in where.items():
        places = []
        for name, some in grouped(carriers, who):
            budgets = {row.get("budget") or 0 for row in some}
            every = budgets == {row.get("budget") or 0 for row in rows if is_worst(row) and who(row) == name}
            places.append(name if every else f"{name}, budget {series([number(b) for b in sorted(budgets)])}")
        flags.append(Flag(words, "; ".join(places), first in {who(row) for row in carriers}))
    return sorted(flags, key=lambda flag: not flag.first)
