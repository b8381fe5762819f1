"""Results in, one self-contained HTML page out: no request leaves it, and the only script is that of its panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..files import write as write_file
from ..results import CHOSEN, CLEAN
from .charts import TEMPLATES, legend_mark
from .comparison import comparison
from .formatting import INFERRED, duration, number
from .panel import panel_of, script
from .run_files import Exhibit, Run, exhibits, read
from .sections import View, view_of
from .theory_pages import malware_view, theory_view

__all__ = ["Exhibit", "Run", "Source", "exhibits", "page", "verdict", "write"]

Source = Path | str | Run
"""A run folder, a results file, or both as a value."""


def page(sources: Sequence[Source], *, panel: bool = True) -> str:
    """The page of some run folders or results files: of several their comparison, then each in turn.

    A run folder gives its results.json and, where they are there, recipe.toml, gallery.safetensors and the log.jsonl of
    each classifier, also of the runs it uses; a results file gives its rows.

    panel: whether the page of one run folder has the panel "Attack it yourself", see `panel_of`.
    """
    shared = {"CLEAN": CLEAN, "INFERRED": INFERRED, "duration": duration, "legend_mark": legend_mark, "number": number}
    runs = _runs(sources)
    if panel and len(runs) == 1:
        runs = [replace(runs[0], panel=panel_of(runs[0]))]
    views, together = [*map(_view, runs)], comparison(runs) if len(runs) > 1 else None
    template = TEMPLATES.get_template("page.html.jinja")
    return template.render(shared, views=views, together=together, script=script() if runs[0].panel else None)


def verdict(sources: Sequence[Source]) -> str:
    """What some run folders or results files found, as the top of their page has it: a line each, then all together."""
    runs = _runs(sources)
    views = [*map(_view, runs)]
    views += filter(None, [comparison(runs)] if len(runs) > 1 else [])
    names = [f"{each.results.name}:" if len(views) > 1 else "" for each in views]
    parts = [(name, each.state, str(each.verdict), each.flagged) for name, each in zip(names, views, strict=True)]
    return "\n".join(" ".join(filter(None, some)) for some in parts)


def _runs(sources: Sequence[Source]) -> list[Run]:
    if isinstance(sources, str | Path) or not sources:
        raise ValueError(f"sources must be a list of run folders or results files, at least one, got {sources!r}")
    return [source if isinstance(source, Run) else read(Path(source)) for source in sources]


def _view(run: Run) -> View:
    measured = {row.what for row in run.results.rows}
    # The curves of the manual's theory page have no classifier of a chosen k, which the verdict is about.
    mixture = run.results.select(what="robust_error", classifier=CHOSEN)
    theory = theory_view if mixture else malware_view if "evasion" in measured else None
    return theory(run.results) if theory else view_of(run)


def write(sources: Sequence[Source], out: Path | str, *, panel: bool = True) -> Path:
    """Writes the `page` whole and gives its path."""
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"out must be a file, got the folder {str(out)!r}")
    text = page(sources, panel=panel)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, text.encode())
    return out
