"""Tables of a TOML file, taken key by key: a wrong word is an error that names its place."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What a value may be: in words, and as a function that gives the value, or None if it is not of this kind."""

    words: str
    read: Callable[[Any], T | None]
    choices: tuple[str, ...] = ()


def whole(least: int) -> Kind[int]:
    def read(value: Any) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None

    return Kind(f"an int >= {least}", read)


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _positive(value: Any) -> float | None:
    number = _number(value)
    return number if number is not None and number > 0 else None


TEXT: Kind[str] = Kind("a text", lambda value: value if isinstance(value, str) and value else None)
FLAG: Kind[bool] = Kind("true or false", lambda value: value if isinstance(value, bool) else None)
NUMBER: Kind[float] = Kind("a number", _number)
POSITIVE: Kind[float] = Kind("a number > 0", _positive)
ANYTHING: Kind[Any] = Kind("a value", lambda value: value)


def choice(*choices: str) -> Kind[str]:
    words = f"one of {', '.join(map(repr, choices))}"
    return Kind(words, lambda value: value if isinstance(value, str) and value in choices else None, choices)


def many(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """A list of the kind, not empty, no value twice; a single value stands for a list of one."""

    def read(value: Any) -> tuple[T, ...] | None:
        items = [kind.read(item) for item in (value if isinstance(value, list) else [value])]
        good = [item for item in items if item is not None]
        return tuple(good) if good and len(set(good)) == len(good) == len(items) else None

    return Kind(f"a list of different values, each {kind.words}", read, kind.choices)


def sizes() -> Kind[tuple[int, ...]]:
    """A list of ints >= 1, which may repeat."""
    one = whole(1)

    def read(value: Any) -> tuple[int, ...] | None:
        good = isinstance(value, list) and all(one.read(item) is not None for item in value)
        return tuple(value) if good else None

    return Kind("a list of ints >= 1", read)


def written(content: Mapping[str, Any], place: str = "") -> str:
    """Tables, lists, texts, finite numbers, true and false as TOML, from which `tomllib` reads the same."""
    tables = {key: value for key, value in content.items() if isinstance(value, dict) or _is_tables(value)}
    plain = (f"{_key(key)} = {_value(value)}\n" for key, value in content.items() if key not in tables)
    text = "".join(plain)
    for key, value in tables.items():
        name = place + _key(key)
        heads = [(f"[[{name}]]", item) for item in value] if isinstance(value, list) else [(f"[{name}]", value)]
        text += "".join(f"\n{head}\n{written(table, f'{name}.')}" for head, table in heads)
    return text


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: object) -> str:
    """A text, a number or a list of them is what it is in JSON, but for pairs of escapes and one control character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass
class Table:
    """A table and its place. Keys are taken one by one; `close` complains about those that nobody asked for."""

    where: str
    content: dict[str, Any]
    _asked: list[str] = field(default_factory=list)

    def need(self, key: str, kind: Kind[T]) -> T:
        """The value of a key that must be there."""
        if key not in self.content:
            hint = _near(key, self._strangers(), "; did you mean it by {!r}?")
            raise ValueError(f"{self.where}: {key} is missing{hint}")
        return self._read(key, kind)

    def take(self, key: str, kind: Kind[T], default: D) -> T | D:
        """The value of a key that may be left out."""
        self._asked.append(key)
        return self._read(key, kind) if key in self.content else default

    def table(self, key: str) -> Table | None:
        """The table under a key."""
        self._asked.append(key)
        if key not in self.content:
            return None
        if not isinstance(self.content[key], dict):
            raise ValueError(f"{self.where}: {key} must be a table, got {self.content[key]!r}")
        return Table(f"{self.where}, {key}", self.content[key])

    def tables(self, key: str) -> list[Table]:
        """The tables of an array, each named by its number."""
        self._asked.append(key)
        found = self.content.get(key, [])
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise ValueError(f"{self.where}: {key} must be tables, written [[{key}]], got {found!r}")
        return [Table(f"{self.where}, {key} {i}", item) for i, item in enumerate(found, 1)]

    def rest(self, allowed: list[str]) -> dict[str, Any]:
        """What is left, if it is among these keys, as it is written."""
        self._asked += allowed
        return {key: self.content[key] for key in allowed if key in self.content}

    def close(self) -> None:
        """Raises for a key that nobody asked for."""
        for key in self._strangers():
            raise ValueError(f"{self.where}: {key!r} is no key here{_near(key, self._asked)}")

    def _read(self, key: str, kind: Kind[T]) -> T:
        self._asked.append(key)
        value = self.content[key]
        read = kind.read(value)
        if read is None:
            hint = _near(value, kind.choices) if isinstance(value, str) else ""
            raise ValueError(f"{self.where}: {key} must be {kind.words}, got {value!r}{hint}")
        return read

    def _strangers(self) -> list[str]:
        return [key for key in self.content if key not in self._asked]


def _near(word: str, known: Sequence[str], ask: str = "; did you mean {!r}?") -> str:
    """A question about the known word that is nearest, or nothing."""
    near = get_close_matches(word, known, n=1, cutoff=0.5)
    return ask.format(near[0]) if near else ""
