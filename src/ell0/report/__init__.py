"""Results in, one self-contained HTML page out: no script, and no request leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..common import write_whole
from ..results import CLEAN
from .charts import TEMPLATES, legend_mark
from .formatting import INFERRED, duration, number
from .run_files import Exhibit, Run, exhibits, read
from .sections import View, view_of
from .theory_pages import malware_view, theory_view

__all__ = ["Exhibit", "Run", "Source", "exhibits", "page", "verdict", "write"]

Source = Path | str | Run
"""A run folder, a results file, or both as a value."""


def page(sources: Sequence[Source]) -> str:
    """The page of some run folders or results files, in their order.

    A run folder gives its results.json and, where they are there, recipe.toml, gallery.npz and the log.jsonl of each
    classifier, also of the runs it uses; a results file gives its rows.
    """
    shared = {"CLEAN": CLEAN, "INFERRED": INFERRED, "duration": duration, "legend_mark": legend_mark, "number": number}
    return TEMPLATES.get_template("page.html.jinja").render(shared, views=_views(sources))


def verdict(sources: Sequence[Source]) -> str:
    """What each of some run folders or results files found, as the top of their page has it: a line of text each."""
    views = _views(sources)
    names = [f"{each.results.name}:" if len(views) > 1 else "" for each in views]
    parts = [(name, each.state, str(each.verdict), each.flagged) for name, each in zip(names, views, strict=True)]
    return "\n".join(" ".join(filter(None, some)) for some in parts)


def _views(sources: Sequence[Source]) -> list[View]:
    if isinstance(sources, str | Path) or not sources:
        raise ValueError(f"sources must be a list of run folders or results files, at least one, got {sources!r}")
    views = []
    for run in (source if isinstance(source, Run) else read(Path(source)) for source in sources):
        measured = {row.what for row in run.results.rows}
        theory = theory_view if "robust_error" in measured else malware_view if "evasion" in measured else None
        views.append(theory(run.results) if theory else view_of(run))
    return views


def write(sources: Sequence[Source], out: Path | str) -> Path:
    """Writes the page whole and gives its path."""
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"out must be a file, got the folder {str(out)!r}")
    text = page(sources)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, text.encode())
    return out
