"""Hooks of mkdocs.yml: what the site has beside docs/*.md.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages, docstrings the API reference. ``<!-- site: NAME -->`` stands
for a part that is made from code or results: NAME is a key of ``PARTS``.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from textwrap import dedent
from types import MappingProxyType, ModuleType
from typing import Any, Literal, get_args, get_origin

import field_table
import recipe_keys
import theory_curves

import ell0
from ell0 import parallel, synthesis

ROOT = Path(__file__).resolve().parent.parent
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
ROOMS = {name: room for name in ell0.__all__ if isinstance(room := getattr(ell0, name), ModuleType)}
ROOMS |= {"parallel": parallel, "synthesis": synthesis}
NAMES, LINE = r"\w+(?:, \w+)*", "\n"
PARTS: dict[str, Callable[[], str]] = {
    "curves": theory_curves.figure,
    "keys": recipe_keys.tables,
    "results": field_table.table,
}


def pages() -> dict[str, str]:
    """Every generated page: its place on the site, and its Markdown."""
    found = {place: (ROOT / name).read_text() for name, place in TOP.items()}
    found |= {"CITATION.cff": (ROOT / "CITATION.cff").read_text()}
    return found | api()


def relinked(text: str, depth: int = 0) -> str:
    """Markdown of the repository with the links of the site."""
    up = "../" * depth
    text = re.sub(r"\]\((?:\.\./)*docs/", f"]({up}", text)
    for name, place in {**TOP, "CITATION.cff": "CITATION.cff"}.items():
        text = re.sub(rf"\]\((?:\.\./)*{re.escape(name)}", f"]({up}{place}", text)
    return text


def api() -> dict[str, str]:
    """The API reference: a page for ell0 and one for each room, with every name of its ``__all__``."""
    rooms = {"ell0": ell0, **{f"ell0.{name}": room for name, room in ROOMS.items()}}
    links = {room: {name: f"{room}.md#{room}.{name}" for name in module.__all__} for room, module in rooms.items()}
    times = Counter(name for room in links.values() for name in room)
    clear = {name: place for room in links.values() for name, place in room.items() if times[name] == 1}
    found = {}
    for room, module in rooms.items():
        places = clear | links["ell0"] | links[room]
        entries = (_entry(room, module, name, places) for name in sorted(links[room], key=str.lower))
        parts = [f"# {room}", prose(inspect.getdoc(module) or "", places), *chain(*entries)]
        found[f"reference/{room}.md"] = "\n\n".join(parts)
    return found


def _entry(room: str, module: Any, name: str, places: Mapping[str, str]) -> Iterator[str]:
    thing = getattr(module, name)
    head = f"## {_linked(name)} {{ #{room}.{name.strip('_')} }}"
    if isinstance(thing, ModuleType):
        yield f"{head}\n\nA module, [`{thing.__name__}`]({f'{room}.{name}.md' if name in ROOMS else f'{room}.md'})."
        yield prose(inspect.getdoc(thing) or "", places)
    elif callable(thing) and not hasattr(thing, "__origin__"):
        yield f"{head}\n\n{_signature(name, thing)}"
        yield prose(_doc(thing), places)
        for each, member in vars(thing).items() if inspect.isclass(thing) else ():
            bound = getattr(member, "__func__", member)
            shown = inspect.isfunction(bound) or isinstance(member, property)
            if shown and not each.startswith("_") and (words := _doc(bound)):
                yield f"### {name}.{_linked(each)} {{ #{room}.{name}.{each} }}"
                yield "" if isinstance(member, property) else _signature(each, bound)
                yield prose(words, places)
    else:
        kind = "One of" if get_origin(thing) is Literal else f"A `{type(thing).__name__}`:"
        keys = get_args(thing) if get_origin(thing) is Literal else thing
        plain = isinstance(thing, str | int | float)
        words = ", ".join(f"`{key}`" for key in keys) if isinstance(keys, Mapping | tuple) else f"`{thing!r}`" * plain
        yield f"{head}\n\n{f'{kind} {words}'.rstrip(' :')}."


def _doc(thing: Any) -> str:
    """Its own docstring: not that of a base class, nor what a dataclass makes up."""
    doc = inspect.cleandoc(thing.__doc__ or "")
    return "" if doc.startswith(f"{getattr(thing, '__name__', '')}(") else doc


class _Bare(str):
    """An annotation that is shown as it is written."""

    __repr__ = str.__str__


def _signature(name: str, thing: Callable[..., Any]) -> str:
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return f"```python\n{name}\n```"

    def bare(annotation: Any) -> Any:
        return _Bare(annotation) if isinstance(annotation, str) else annotation

    given = [each.replace(annotation=bare(each.annotation)) for each in found.parameters.values()]
    returns = found.empty if inspect.isclass(thing) else bare(found.return_annotation)
    found = found.replace(parameters=given, return_annotation=returns)
    text = f"{name}{found}"
    if len(text) > 100:
        marked = [str(found.replace(parameters=[each], return_annotation=found.empty))[1:-1] for each in given]
        stars = next((i for i, each in enumerate(given) if each.kind is each.KEYWORD_ONLY), None)
        if stars is not None and not any(each.kind is each.VAR_POSITIONAL for each in given):
            marked = [*marked[:stars], "*", *(each.removeprefix("*, ") for each in marked[stars:])]
        end = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
        text = f"{name}(\n    " + ",\n    ".join(marked) + f",\n){end}"
    text = re.sub(r"<function (\w+) at \w+>", r"\1", re.sub(r"<[\w.]+ object at \w+>|<factory>", "...", text))
    return f"```python\n{text}\n```"


def prose(doc: str, places: Mapping[str, str]) -> str:
    """A docstring as Markdown: formulas stay as they are, ``name: ...`` becomes a list, known names are links."""
    text = re.sub(r"^Args:\n((?:    .*\n|\n)+)", lambda found: f"\n{dedent(found[1])}", doc + "\n", flags=re.MULTILINE)
    text = re.sub(rf"(?<=\.)  (?={NAMES}: )", "\n", text)
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            blocks.append(f"```text\n{dedent(block)}\n```")
            continue
        listed = False
        for i, line in enumerate(lines):
            if entry := re.match(f"({NAMES}): ", line):
                lines[i] = f"{'' if listed else LINE}- ``{entry[1]}``: {line[entry.end() :].strip()}"
                listed = True
            else:
                lines[i] = line.strip()
        blocks.append(_linked("\n".join(lines), places))
    return "\n\n".join(blocks)


def _linked(text: str, places: Mapping[str, str] = MappingProxyType({})) -> str:
    """Text with Markdown's own signs escaped, and with links from the names between backticks."""

    def part(words: str) -> str:
        if not words.startswith("`"):
            return re.sub(r"([*_<\[\]])", r"\\\1", words)
        name = words.strip("`")
        return f"[`{name}`]({places[name]})" if name in places and not words.startswith("``") else words

    return "".join(map(part, re.split(r"(``.+?``|`[^`]+`)", text)))


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    from mkdocs.structure.files import File

    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Gives a page the links of the site, and its parts."""
    text = relinked(markdown, page.file.src_uri.count("/"))
    if "<!-- site: results -->" in text:
        page.meta["hide"] = ["toc"]  # a wide table
    return re.sub(r"<!-- site: (\w+) -->", lambda found: PARTS[found[1]](), text)
