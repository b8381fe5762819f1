"""What a run found, in a sentence, and why that may not be trusted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from ..results import WORST_CASE, Measurement
from .formatting import GAP, ends, figure_words, number, paper_share, percent, several, span, tenths
from .selection import (
    Rows,
    attack_of,
    attack_words,
    beta_words,
    box_of,
    effort_of,
    grouped,
    least_of,
    spent_on,
    who,
    within,
)


@dataclass(frozen=True)
class Verdict:
    """What the run found, in plain words.  kind: whose figure it is, the worst case, one attack's or a proof's."""

    kind: str
    headline: Markup
    notes: tuple[str, ...] = ()
    classifier: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.headline.striptags()}".replace(GAP, " ")


@dataclass(frozen=True)
class Flag:
    """Why figures may not be trusted.  where: which ones.  first: whether the verdict's classifier is among them."""

    words: str
    where: str
    first: bool


def verdict_of(clean: Rows, certified: Rows, worst: Rows, single: Rows, units: str, items: str) -> Verdict:
    keeps, rows = "keeps", worst or single or certified
    if worst:
        kind, chosen = "Worst case", _at_one_budget(least_of(_fairly(worst)))
        note = f"Every attack and value set counts: a test {items[:-1]} is lost as soon as one of them breaks it."
    elif single:
        chosen, many = _at_one_budget(least_of(_fairly(single))), len({attack_of(row) for row in single}) > 1
        kind = f"{'Single attacks' if many else 'One attack'}, no worst case"
        found = min(_alike(single, chosen[0]), key=lambda row: row.value)
        alone = f"{attack_of(found)} alone ({_setting(found)}){', the strongest of several' if many else ''}"
        note = f"This is {alone}, so an upper bound: the worst case of all attacks was not measured."
    elif certified:
        kind, keeps, chosen = "Proven", "is proven to keep", _at_one_budget(certified)[:1]
        note = "This is proven, so a lower bound; no attack was run."
    elif clean:
        best = max(clean, key=lambda row: row.value)
        words = Markup("{} gets <strong>{}</strong> of {} test {} right; no attack was run.")
        headline = words.format(who(best), figure_words(best), number(best.n), items)
        return Verdict("Clean accuracy", headline, classifier=who(best))
    else:
        return Verdict("Figures", Markup("These results contain no accuracy; see the figures below."))
    if len({row.get("budget") for row in rows}) > 1:
        smallest = "smallest budget: no classifier keeps half at any"
        largest = f"largest number of {units} at which a classifier keeps half"
        note += f" The verdict takes the {smallest if chosen[0].value < 0.5 else largest}."
    notes = (note, *_by_protocol(single, chosen[0])) if worst else (note,)
    if worst or single:
        notes += tuple(_proofs(certified, chosen[0], items))
    return Verdict(kind, _headline(chosen, units, items, keeps), notes, who(chosen[0]))


def _proofs(certified: Rows, best: Measurement, items: str) -> Iterator[str]:
    """What is proven of the classifier and budget of the verdict, of other rows than those of the verdict."""
    rows = [row for row in _alike(certified, best) if row.get("beta") in (None, best.get("beta"))]
    if best.certified is None and rows:
        row = max(rows, key=lambda row: row.value)
        value = "any value" if row.get("beta") is None else f"any value {within(row)}"
        yield f"Proven at this budget and {value}: {figure_words(row)} of {number(row.n)} test {items}."


def _alike(rows: Rows, other: Measurement) -> Rows:
    """Those on the same classifier and budget."""
    return [row for row in rows if who(row) == who(other) and row.get("budget") == other.get("budget")]


def _fairly(rows: Rows) -> Rows:
    """Those of the classifiers and budgets that were attacked in most ways: fewer would look like robustness."""

    def ways(some: Rows) -> set[tuple[str, str]]:
        return {(attack_words(row), effort_of(row)) for row in some}

    groups = [some for _, some in grouped(rows, lambda row: (who(row), row.get("budget")))]
    most = max(groups, key=lambda some: (len(ways(some)), max((box_of(row), spent_on(row)) for row in some)))
    return [row for some in groups if ways(some) >= ways(most) for row in some]


def _at_one_budget(rows: Rows) -> Rows:
    """Rows at one budget, best first: the largest that most classifiers share where one keeps half, else the least.

    Not the budget 0, if there are others.
    """
    budgets = dict(grouped([row for row in rows if row.get("budget")] or rows, lambda row: row.get("budget") or 0))
    most = max(map(len, budgets.values()))
    shared = sorted(budget for budget, group in budgets.items() if len(group) == most)
    held = [budget for budget in shared if max(row.value for row in budgets[budget]) >= 0.5]
    return sorted(budgets[held[-1] if held else shared[0]], key=lambda row: -row.value)


def _headline(chosen: Rows, units: str, items: str, keeps: str) -> Markup:
    best, *others = chosen
    if len(others) > 2:
        # Truncated against plain networks, whichever is best: the strongest rival and the weakest.
        rivals = [row for row in others if (row.get("k") == 0) != (best.get("k") == 0)] or others
        others = rivals[:1] + ([min(rivals[1:], key=lambda row: row.value)] if rivals[1:] else [])
    budget, box = best.get("budget"), within(best)
    verb, value = "is" if budget == 1 else "are", f"any value {box}" if box else "any value"
    seeds = best.beside.get("seeds")  # a mean, whose spread is no interval
    share = percent(best.value) if seeds else figure_words(best)
    words = Markup("{} {} <strong>{}</strong> of {} test {} right")
    sentence = words.format(who(best), keeps, share, number(best.n), items)
    sentence += f" when {several(budget, units)} {verb} set to {value}" if budget else ""
    if seeds:
        sentence += f", on average over {seeds} seeds (from {percent(best.low)} to {percent(best.high)})"
    if best.certified is not None:
        sentence += Markup(", and <strong>{}</strong> is proven").format(percent(best.certified))
    rest = [Markup("{} keeps <strong>{}</strong>").format(who(row), percent(row.value)) for row in others]
    return Markup("; ").join([sentence, *([Markup(" and ").join(rest)] if rest else [])]) + "."


def _by_protocol(single: Rows, best: Measurement) -> Iterator[str]:
    """The figure of the paper's protocol for the classifier and budget of the verdict, with most queries."""
    rows = [row for row in _alike(single, best) if row.get("protocol") == "paper"]
    if rows:
        row = max(rows, key=lambda row: (box_of(row), spent_on(row), -row.value))
        share, how = paper_share(row), f"{attack_of(row)}, {_setting(row)}, n = {number(row.n)}"
        interval = f" ({span(share, tenths)} if it took n = {number(share.n)})" if share else ""
        paper = "" if row.paper is None else f"; the paper reports {percent(row.paper)}{interval}"
        yield f"By the paper protocol ({how}) the same classifier keeps {figure_words(row)}{paper}."


def _setting(row: Measurement) -> str:
    return ", ".join(filter(None, [effort_of(row), beta_words(row)]))


def flags_of(rows: Rows, worst: Rows, single: Rows, first: str | None) -> list[Flag]:
    """Each flag once, with the rows that carry it, those of the classifier ``first`` before the others."""
    where: dict[str, Rows] = {}
    carried = [(words, row) for row in rows for words in row.flags]
    for words, row in (*carried, *_not_the_worst(worst, single)):
        where.setdefault(words, []).append(row)
    flags = []
    for words, carriers in where.items():
        places = []
        for name, some in grouped(carriers, who):
            budgets = {row.get("budget") or 0 for row in some}
            every = budgets == {
                row.get("budget") or 0 for row in rows if attack_of(row) == WORST_CASE and who(row) == name
            }
            places.append(name if every else f"{name}, budget {', '.join(number(b) for b in sorted(budgets))}")
        flags.append(Flag(words, "; ".join(places), first in {who(row) for row in carriers}))
    return sorted(flags, key=lambda flag: not flag.first)


def _not_the_worst(worst: Rows, single: Rows) -> Iterator[tuple[str, Measurement]]:
    """Where one attack alone left less than the worst case: on the same rows, or by more than chance."""
    for row in least_of(worst):
        for one in _alike(single, row):
            same = one.n == row.n and one.value < row.value
            apart = ends(one)[1] < ends(row)[0]
            if box_of(one) <= box_of(row) and (same or apart):
                words = f"{attack_of(one)} alone ({_setting(one)}) leaves {figure_words(one)}"
                yield f"not the worst case: {words}, all attacks together left {figure_words(row)}", row
