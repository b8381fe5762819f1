"""Tables of a TOML file, read key by key: a wrong word raises an error that names its place."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..common import did_you_mean

T = TypeVar("T")
D = TypeVar("D")


@contextmanager
def named(where: object) -> Iterator[None]:
    """Puts the place before the message of an error about a value."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: {error}") from error


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What a value may be: in words, and as a function that returns the value, or None if it is not of this kind."""

    words: str
    read: Callable[[Any], T | None]
    choices: tuple[str, ...] = ()


def whole(least: int) -> Kind[int]:
    def read(value: Any) -> int | None:
        good = isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63
        return value if good else None

    return Kind(f"an int >= {least}", read)


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if good else None


TEXT: Kind[str] = Kind("a text", lambda value: value if isinstance(value, str) and value else None)
FLAG: Kind[bool] = Kind("true or false", lambda value: value if isinstance(value, bool) else None)
_TABLE: Kind[dict[str, Any]] = Kind("a table", lambda value: value if isinstance(value, dict) else None)
_TABLES: Kind[list[Any]] = Kind("tables in [[ ]]", lambda it: it if it == [] or _is_tables(it) else None)
NUMBER: Kind[float] = Kind("a number", _number)
POSITIVE: Kind[float] = Kind("a number > 0", lambda value: number if (number := _number(value) or 0) > 0 else None)


def choice(*choices: str) -> Kind[str]:
    words = f"one of {', '.join(map(repr, choices))}"
    return Kind(words, lambda value: value if isinstance(value, str) and value in choices else None, choices)


def many(kind: Kind[T], repeated: bool = False) -> Kind[tuple[T, ...]]:
    """A list of the kind, not empty; no value twice, unless repeated. A single value stands for a list of one."""

    def read(value: Any) -> tuple[T, ...] | None:
        items = [kind.read(item) for item in (value if isinstance(value, list) else [value])]
        good = tuple(item for item in items if item is not None)
        return good if good and len(good) == len(items) and (repeated or len(set(good)) == len(good)) else None

    return Kind(f"a list of {'' if repeated else 'different '}values, each {kind.words}", read, kind.choices)


def to_toml(content: Mapping[str, Any], place: str = "") -> str:
    """Tables, lists, texts, finite numbers, true and false as TOML, from which `tomllib` reads the same."""
    tables = {key: value for key, value in content.items() if isinstance(value, dict) or _is_tables(value)}
    text = "".join(f"{_key(key)} = {_value(value)}\n" for key, value in content.items() if key not in tables)
    for key, value in tables.items():
        name = place + _key(key)
        heads = [(f"[[{name}]]", item) for item in value] if isinstance(value, list) else [(f"[{name}]", value)]
        text += "".join(f"\n{head}\n{to_toml(table, f'{name}.')}" for head, table in heads)
    return text


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: object) -> str:
    # TOML writes texts, numbers and lists as JSON does, except for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass
class TomlTable:
    """A table and its place. Keys are read one by one; `close` raises for those that nobody asked for."""

    where: str
    content: dict[str, Any]
    _asked: list[str] = field(default_factory=list)

    def need(self, key: str, kind: Kind[T]) -> T:
        value = self.take(key, kind, None)
        if value is None:
            near = did_you_mean(key, self._unknown()).replace("did you mean", "rename")
            raise ValueError(f"{self.where}: {key} is missing{near}")
        return value

    def take(self, key: str, kind: Kind[T], default: D) -> T | D:
        self._asked.append(key)
        if key not in self.content:
            return default
        value = self.content[key]
        read = kind.read(value)
        if read is None:
            large = isinstance(value, int) and value >= 2**63
            hint = "; it must be less than 2**63" if large else did_you_mean(value, kind.choices)
            raise ValueError(f"{self.where}: {key} must be {kind.words}, got {value!r}{hint}")
        return read

    def need_table(self, key: str) -> TomlTable:
        return TomlTable(f"{self.where}, {key}", self.need(key, _TABLE))

    def table(self, key: str) -> TomlTable | None:
        content = self.take(key, _TABLE, None)
        return None if content is None else TomlTable(f"{self.where}, {key}", content)

    def tables(self, key: str) -> list[TomlTable]:
        """The tables of an array, each named by its number."""
        content = self.take(key, _TABLES, [])
        return [TomlTable(f"{self.where}, {key} {i}", item) for i, item in enumerate(content, 1)]

    def rest(self, allowed: list[str]) -> dict[str, Any]:
        """The values of those of the allowed keys that are there, unchecked."""
        self._asked += allowed
        return {key: self.content[key] for key in allowed if key in self.content}

    def close(self) -> None:
        """Raises ValueError for a key that nobody asked for."""
        for key in self._unknown():
            raise ValueError(f"{self.where}: unknown key {key!r}{did_you_mean(key, self._asked)}")

    def _unknown(self) -> list[str]:
        return [key for key in self.content if key not in self._asked]
