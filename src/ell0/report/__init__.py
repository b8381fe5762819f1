"""Results in, one self-contained HTML page out: no script, and no request leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..common import write_whole
from . import charts
from .formatting import INFERRED, Cell, duration
from .run_files import Run, read
from .theory_pages import malware_view, theory_view
from .views import View, view_of

__all__ = ["page", "verdict", "write"]


def page(sources: Sequence[Path | str]) -> str:
    """The page of some run folders or results files, in their order.

    A run folder gives its results.json and, where they are there, recipe.toml, gallery.npz and the log.jsonl of each
    classifier, also of the runs it uses; a results file gives its rows.
    """
    views = _views(sources)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    environment.tests["cell"] = lambda value: isinstance(value, Cell)
    environment.globals |= {
        name: getattr(charts, name) for name in ("LEFT", "RIGHT", "TOP", "BOTTOM", "classes", "mark")
    }
    return environment.get_template("page.html.jinja").render(views=views, INFERRED=INFERRED)


def verdict(sources: Sequence[Path | str]) -> str:
    """What each of some run folders or results files found, as the top of their page has it: a line of text each."""
    views = _views(sources)
    lines = []
    for each in views:
        name = f"{each.results.name}:" if len(views) > 1 else ""
        lines.append(" ".join(filter(None, [name, each.state, str(each.verdict), each.flagged])))
    return "\n".join(lines)


def _views(sources: Sequence[Path | str]) -> list[View]:
    if isinstance(sources, str | Path) or not sources:
        raise ValueError(f"sources must be a list of run folders or results files, at least one, got {sources!r}")
    return [_view(read(Path(source))) for source in sources]


def _view(run: Run) -> View:
    measured = {row.get("what") for row in run.results.rows}
    if "robust_error" in measured:
        return theory_view(run.results)
    return malware_view(run.results) if "evasion" in measured else view_of(run)


def write(sources: Sequence[Path | str], out: Path | str) -> Path:
    """Writes the page whole and gives its path."""
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"out must be a file, got the folder {str(out)!r}")
    text = page(sources)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, text.encode())
    return out
