"""All results of robustness as one table: results/*.json, the paper's figures, and those that recipes quote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from html import escape
from pathlib import Path

from tables import clean_results

from ell0 import recipe
from ell0.results import WORST_CASE, Measurement, Results

ROOT = Path(__file__).resolve().parent.parent
HERE, RIVAL, PAPER, QUOTED = "measured here", "rival, measured here", "the paper", "quoted"
RIVALS = ("ablation", "partition", "abs")
"""Models of recipes that are methods of others."""
SHARES = ("robust_accuracy", "certified_accuracy", "evasion")
COUNTS = {"median_distance": "median distance", "certified_radius": "median radius", "median_radius": "median radius"}

AUTHORS = "Beliaev et al. 2022"


@dataclass(frozen=True)
class Line:
    """One line of the table, a cell each. attacked, proven: a share of rows, or a median count of changes."""

    data: str
    model: str
    whose_figure: str
    threat_model: str
    clean: str = ""
    attacked: str = ""
    by: str = ""
    proven: str = ""
    n: str = ""
    cost: str = ""
    command_or_source: str = ""


def lines() -> list[Line]:
    """Every line once: of each results file, then what recipes quote."""
    found = [
        line for path in sorted((ROOT / "results").glob("*.json")) for line in of_results(clean_results(path.stem))
    ]
    for name in recipe.names():
        one = recipe.load(name)
        for figure in one.quoted:
            row = Measurement.of(**figure)
            line = Line(one.data.name or "", row["classifier"], QUOTED, _threat(row), n=_count(row.n))
            found.append(_with(replace(line, command_or_source=figure["source"]), row))
    return list(dict.fromkeys(found))


def of_results(results: Results) -> Iterator[Line]:
    """The lines of one results file; benchmarks and theory have none."""
    known = recipe.load(results.recipe) if results.recipe in recipe.names() else None
    models = {one.name: one.model.get("name", "") for one in known.everyone()} if known else {}
    for row in results.rows:
        if row.what not in (*SHARES, *COUNTS) or {"over", "part", "split"} & row.keys() or "classifier" not in row:
            continue
        data = row.get("data") or (known.data.name if known else None) or results.name.partition("-")[2]
        name, source = row["classifier"], row.get("source")
        its = [each for each in results.select(classifier=name) if each.get("source") == source]
        clean = next((each for each in its if each.what == "clean_accuracy" and "split" not in each), None)
        trained = [each for each in its if each.what == "training_seconds"]
        cost = [f"{_time(trained[0].value)} on {results.device}"] if trained else []
        if "forwards" in row.beside:
            cost.append(f"{row.beside['forwards']:,} passes")
        whose = QUOTED if source else RIVAL if models.get(name) in RIVALS else HERE
        line = Line(data, name, whose, _threat(row), n=_count(row.n), cost=", ".join(cost))
        line = replace(line, command_or_source=source or f"`{results.command}`")
        yield _with(replace(line, clean=_percent(clean.value if clean else None)), row)
        if row.paper is not None:
            paper = replace(line, whose_figure=PAPER, n=_count(row.paper_n), cost="")
            paper = replace(paper, clean=_percent(clean.paper if clean else None), command_or_source=AUTHORS)
            yield _with(paper, Measurement.of(row.what, row.paper, **row.identity))


def _with(line: Line, row: Measurement) -> Line:
    """The line with its figure: a share of rows, or a median number of changes."""
    if row.what in COUNTS:
        text = f"{COUNTS[row.what]} {row.value:g}{_interval(row, '{:g}')}"
        found = {"attacked": text, "by": _by(row)} if row.what == "median_distance" else {"proven": text}
        return replace(line, **found)
    if row.what == "evasion":  # exact: what the best attacker leaves is proven
        kept = Measurement.of("kept", 1 - row.value, low=1 - row["high"], high=1 - row["low"])
        return replace(line, attacked=_share(kept), proven=_share(kept), by="the exact worst case")
    if row.what == "certified_accuracy":
        return replace(line, proven=_share(row))
    return replace(line, attacked=_share(row), by=_by(row), proven=_percent(row.certified))


def _share(row: Measurement) -> str:
    return f"{row.value:.1%}{_interval(row, '{:.1%}')}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _count(n: int | None) -> str:
    return f"{n:,}" if n else ""


def _interval(row: Measurement, form: str) -> str:
    return "" if row.low is None or row.high is None else f" ({form.format(row.low)} to {form.format(row.high)})"


def _by(row: Measurement) -> str:
    name = "all attacks" if row.get("attack") == WORST_CASE else str(row.get("attack", ""))
    spent = [f"{row[key]:,} {key}" for key in ("queries", "steps", "repeats") if key in row]
    return ", ".join([name, *(str(row[key]) for key in ("values", "rule", "count") if key in row), *spent])


def _threat(row: Measurement) -> str:
    """How many units change, and to which values."""
    unit, quoted = row.get("unit", "feature"), "source" in row
    units = unit if row.get("budget") == 1 else f"{unit}s"
    if row.what in ("evasion", "median_radius"):
        return f"{row['budget']} {units} added to malware" if "budget" in row else f"{units} added to malware"
    changed = f"{row['budget']:,} {units}" if "budget" in row else units
    beta = row.get("beta")
    times = "" if beta in (None, 1) else f"{beta:g} times "
    box = f"within {times}the range" if beta else "values: see the source" if quoted else "any value"
    return f"{changed}, {box}" + (", of normalised images" if row.get("box") == "normalised" else "")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds / 60:.3g} min"


def table() -> str:
    """The table as HTML, which site/sort.js sorts and filters."""
    words = (each.name.replace("_", " ") for each in fields(Line))
    head = "".join(f"<th><button type=button>{word}</button></th>" for word in words)
    cells = ([re.sub("`(.*?)`", r"<code>\1</code>", escape(cell)) for cell in astuple(line)] for line in lines())
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
    box = '<label>Only lines with <input type="search" id="field-filter"></label> <output id="field-count"></output>'
    whole = f'<table id="field" class="lines">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    return f'<p>{box}</p>\n<div class="field">{whole}</div>\n'
