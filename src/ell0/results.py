"""Figures of a run as one JSON file: what ran, on what, and one `Measurement` a row."""

from __future__ import annotations

import base64
import json
import math
import platform
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from . import files

__all__ = ["CLEAN", "SCHEMA", "WORST_CASE", "Figure", "Measurement", "Results", "Share", "median"]

SCHEMA = 2
"""The version of the layout of a results file; other versions are refused."""
_SEAL = b'{\n "sha256": "'  # what a file begins with; the SHA-256 of the rest follows

WORST_CASE = "worst case"
"""The attack of a measurement that all attacks decided together."""

CLEAN = "clean"
"""What decided a row that is misclassified without an attack."""

EQUAL, OPTIMAL = "Bayes weights, k = m", "best weights, k = m"
CHOSEN, OPTIMAL_CHOSEN, CLIPPED = "Bayes weights, k chosen", "best weights, k chosen", "clipped"
"""The classifiers of `ell0 theory`, as its rows and its page name them."""
PLAIN, HARDENED, OURS = "logistic regression", "logistic regression, C against evasion", "TruncatedLinearClassifier"
MONOTONE = "logistic regression, weights >= 0"
"""The detectors of `ell0 theory malware`."""

Row = dict[str, Any]
"""What a measurement says of itself, ``what`` and its identity, without a figure."""


class Figure(float):
    """A number measured over n rows, with its 95 % interval, ``low`` to ``high``."""

    n: int
    low: float
    high: float
    verdicts: str | None = None

    def __new__(cls, value: float, n: int, low: float, high: float) -> Self:
        self = super().__new__(cls, value)
        self.n, self.low, self.high = n, low, high
        return self

    def __reduce__(self) -> Any:  # a copy, of a share too, is a plain figure
        return Figure, (float(self), self.n, self.low, self.high)


class Share(Figure):
    """A share of n rows, with its Wilson interval."""

    def __new__(cls, count: int, n: int) -> Self:
        share, z = count / n, statistics.NormalDist().inv_cdf(0.975)
        centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
        # The ends are exactly 0 and 1 there, but for rounding.
        low, high = 0.0 if count == 0 else centre - half, 1.0 if count == n else centre + half
        return super().__new__(cls, share, n, low, high)

    @classmethod
    def of(cls, rows: Tensor) -> Self:
        """The share of the rows that are true, of ``(n,)`` bool. A `Measurement` of it keeps which ones they are."""
        share = cls(int(rows.sum()), len(rows))
        share.verdicts = base64.b64encode(np.packbits(rows.cpu().numpy()).tobytes()).decode()
        return share


def median(counts: Tensor) -> Figure:
    """The median of ``(n,)`` counts, with an interval from their order alone.

    The numbers of those below and above the median are binomial(n, 1/2), so it lies between the j-th least and the
    j-th largest, but for a chance of 2 P(B < j).
    """
    counts, n = counts.sort().values, len(counts)
    j, ways, chance = 0, 1, 1  # of the 2**n outcomes, those with B = j and those with B <= j
    while 40 * chance <= 2**n:
        j += 1
        ways = ways * (n - j + 1) // j
        chance += ways
    j = max(j, 1)  # with few rows no j does, and the interval is the whole range
    return Figure(statistics.median(counts.tolist()), n, float(counts[j - 1]), float(counts[n - j]))


@dataclass(frozen=True, eq=False)
class Measurement(Mapping[str, Any]):
    """One figure, over n rows, with its interval. As a mapping it is its row in JSON.

    identity: which figure it is: classifier, k, attack, budget, unit, beta, queries, steps, split, ...
    decided: rows lost to each attack, or to `CLEAN`.  flags: why the value may not be trusted, a sentence each.
    paper, paper_n: the paper's value, and over how many rows.  certified: the share of the same rows that is proven.
    seconds, beside: what the work took, and its other figures.
    verdicts: of a share, which rows it counts: ``np.packbits`` in base64, see `row_verdicts`.
    rows_sha256: `ell0.common.digest` of these rows and their labels.
    """

    what: str
    value: float
    n: int | None = None
    low: float | None = None
    high: float | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    decided: Mapping[str, int] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    paper: float | None = None
    paper_n: int | None = None
    seconds: float | None = None
    certified: float | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)
    verdicts: str | None = None
    rows_sha256: str | None = None

    @classmethod
    def of(cls, what: str, value: float, **entries: Any) -> Self:
        """A measurement of a number or a `Figure`. entries: its fields, and its identity, where None is left out."""
        if isinstance(value, Figure):
            entries |= {"n": value.n, "low": value.low, "high": value.high, "verdicts": value.verdicts}
            value = float(value)
        given = {name: entries.pop(name) for name in _FIELDS if name in entries}
        given["flags"] = tuple(given.get("flags", ()))
        identity = {key: entry for key, entry in entries.items() if entry is not None}
        return cls(what, value, identity=identity, **given)

    def row_verdicts(self) -> Tensor:
        """Which rows the share counts, ``(n,)`` bool; raises ValueError if it keeps none, or others than its value."""
        raw = np.frombuffer(base64.b64decode(self.verdicts or "", validate=True), np.uint8)
        rows = torch.from_numpy(np.unpackbits(raw)[: self.n]).bool()
        if (
            self.verdicts is None
            or len(raw) != -(-(self.n or 0) // 8)
            or int(rows.sum()) != round(self.value * len(rows))
        ):
            raise ValueError(f"verdicts must be those of {self.value:g} of {self.n} rows, got {self.verdicts!r}")
        return rows

    @property
    def key(self) -> Row:
        """What it says of itself, without its figure."""
        return {"what": self.what, **self.identity}

    @cached_property
    def _row(self) -> Row:
        figures = {name: getattr(self, name) for name in _FIELDS} | {"flags": list(self.flags)}
        return {**self.key, "value": self.value} | {k: v for k, v in figures.items() if v not in (None, {}, [])}

    def __getitem__(self, key: str) -> Any:
        return self._row[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


_FIELDS = tuple(each.name for each in fields(Measurement) if each.name not in ("what", "value", "identity"))
_FIGURES = ("value", "low", "high", "paper", "seconds", "certified")
_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys((*_FIGURES, "k", "budget", "queries", "steps", "beta"), (int | float, "a number")),
    **dict.fromkeys(("n", "paper_n"), (int, "an int")),
    **dict.fromkeys(
        ("what", "classifier", "attack", "unit", "box", "protocol", "verdicts", "rows_sha256"), (str, "a text")
    ),
    **{"decided": (dict, "an object"), "beside": (dict, "an object"), "flags": (list, "a list")},
}


@dataclass
class Results:
    """One results file, as it lies under ``results/``."""

    name: str
    command: str
    recipe: str | None = None
    commit: str | None = None
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    seconds: float = 0.0
    rows: list[Measurement] = field(default_factory=list)

    @classmethod
    def here(cls, name: str, command: str, *, seeds: list[int], device: torch.device | str, ranks: int = 1) -> Results:
        """An empty record that names commit, versions and device, of which each of the ``ranks`` processes has one."""
        from . import __version__

        named = ("" if ranks == 1 else f"{ranks} ranks, each ") + _device(torch.device(device))
        versions = {"ell0": __version__, "python": platform.python_version()}
        versions |= {"torch": torch.__version__, "numpy": np.__version__}
        return cls(name, command, commit=_commit(), device=named, versions=versions, seeds=seeds)

    def add(self, value: float, **entries: Any) -> None:
        """Appends a measurement. entries: ``what``, and those of `Measurement.of`."""
        self.rows.append(Measurement.of(value=value, **entries))

    def select(self, **entries: Any) -> list[Measurement]:
        """The measurements with these entries."""
        return [row for row in self.rows if all(row.get(key) == value for key, value in entries.items())]

    def find(self, **entries: Any) -> Measurement:
        """The one measurement with these entries."""
        rows = self.select(**entries)
        if len(rows) != 1:
            raise LookupError(f"{self.name} has {len(rows)} rows with {entries}, not one")
        return rows[0]

    def plain(self) -> dict[str, Any]:
        """All of it as plain values, as JSON has it."""
        return {"schema": SCHEMA, **vars(self), "rows": [dict(row) for row in self.rows]}

    def save(self, path: Path | str) -> Path:
        """Writes the file whole."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        head = self.plain()
        rows = ",\n".join("  " + json.dumps(row) for row in head.pop("rows"))
        text = json.dumps(head, indent=1)[2:-2] + f',\n "rows": [\n{rows}\n ]\n}}\n'
        files.write(path, files.sealed(_SEAL, f'",\n{text}'.encode()))
        return path

    @classmethod
    def load(cls, path: Path | str) -> Results:
        """Reads what `save` wrote; raises FileError if it was altered. Files of before have no SHA-256."""
        raw = files.read(Path(path))
        try:
            whole, content = files.unsealed(raw, _SEAL), dict(json.loads(raw, parse_int=_whole))
            if whole is False or (whole is None and "sha256" in content):
                raise ValueError("it was altered, its content does not fit the SHA-256 in it")
            content.pop("sha256", None)
            schema, rows = content.pop("schema", 1), content.pop("rows")
            if not isinstance(rows, list):
                raise ValueError(f"rows must be a list, got {rows!r}")
            if schema == SCHEMA:
                return cls(**content, rows=[_read(i, dict(row)) for i, row in enumerate(rows, 1)])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            wrong = f"{error} is missing" if isinstance(error, KeyError) else error
            todo = "restore it from a copy, or measure again in a new folder"
            raise files.FileError(f"{path} is not a results file: {wrong}; {todo}") from error
        other = f"{path} was written by another version of ell0 (schema {schema}, this one reads {SCHEMA})"
        raise files.FileError(f"{other}: measure again in a new folder, by `{content.get('command')}`")


def _whole(digits: str) -> int:
    if len(digits) > 300:  # beyond the largest float, with which a page counts
        raise ValueError(f"a number must have at most 300 digits, got {len(digits)}")
    return int(digits)


def _read(number: int, row: Row) -> Measurement:
    for key, value in {"what": None, "value": None, **row}.items():
        kind, words = _TYPES.get(key, (object, ""))
        if not isinstance(value, kind):
            raise ValueError(f"{key} of row {number} must be {words}, got {value!r}")
    if not all(isinstance(count, int) for count in row.get("decided", {}).values()):
        raise ValueError(f"decided of row {number} must hold numbers, got {row['decided']!r}")
    if not all(isinstance(flag, str) for flag in row.get("flags", ())):
        raise ValueError(f"flags of row {number} must be texts, got {row['flags']!r}")
    return Measurement.of(**row)


def _commit() -> str | None:
    """The commit of this checkout, with ``-dirty`` where a tracked file differs from it, or of the installed wheel."""
    words = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    here, tracked = Path(__file__).resolve().parent, ["git", "ls-files", "--error-unmatch", __file__]
    try:
        subprocess.run(tracked, cwd=here, capture_output=True, check=True)
        return subprocess.run(words, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        recorded = here / "commit.txt"  # which setup.py wrote
        return recorded.read_text().strip() if recorded.exists() else None


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return f"{[*models, platform.processor() or platform.machine()][0]}, {torch.get_num_threads()} threads"
