"""Records of a run as one JSON object: what ran, on what, and flat rows with one figure each."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

Row = dict[str, Any]
"""What was measured, as plain keys, and its figure: ``value``, ``n``, ``low``, ``high``."""


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
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def here(cls, name: str, command: str, *, seeds: list[int], device: torch.device | str, ranks: int = 1) -> Results:
        """An empty record that names the device the work is done on, the versions and the commit.

        ranks: processes that share the work, each on such a device.
        """
        named = _device(torch.device(device))
        named = named if ranks == 1 else f"{ranks} ranks, each {named}"
        return cls(name, command, commit=_commit(), device=named, versions=_versions(), seeds=seeds)

    def add(self, value: float, **what: Any) -> None:
        """Appends a row."""
        self.rows.append({**what, "value": value})

    def find(self, **what: Any) -> Row:
        """The one row with these entries."""
        rows = [row for row in self.rows if all(row.get(key) == value for key, value in what.items())]
        if len(rows) != 1:
            raise LookupError(f"{self.name} has {len(rows)} rows with {what}, not one")
        return rows[0]

    def save(self, path: Path | str) -> Path:
        """Writes the file whole."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {key: value for key, value in asdict(self).items() if key != "rows"}
        rows = ",\n".join("  " + json.dumps(row) for row in self.rows)
        text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + rows + "\n ]\n}\n"
        write_whole(path, text.encode())
        return path

    @classmethod
    def load(cls, path: Path | str) -> Results:
        """Reads what `save` wrote."""
        text = Path(path).read_text()
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a results file: {error}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file whole: a temporary name beside it, then a rename."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _commit() -> str | None:
    """The commit of this checkout, with ``-dirty`` where a tracked file differs from it; None outside of one."""
    here = Path(__file__).resolve().parent
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"],
            cwd=here, capture_output=True, text=True, check=True,
        )  # fmt: skip
        known = subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip() if known.returncode == 0 else None


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name}, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    from . import __version__

    return {
        "ell0": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
