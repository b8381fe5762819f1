"""The shape of the house: which room may import which, what is public, what an import needs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ell0

PACKAGE = Path(ell0.__file__).parent
ROOMS = [
    "common", "threat", "ops", "nn", "models", "data", "attacks", "results", "parallel", "precision", "evaluation",
    "train", "certify", "theory", "recipe", "report", "cli",
]  # fmt: skip


def _files(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py")) if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]


def _imported_rooms(path: Path) -> set[str]:
    """Rooms of ell0 that a file imports, however the import is written."""
    here = ("ell0", *path.relative_to(PACKAGE).with_suffix("").parts)
    here = here[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "ell0" and len(parts) > 1 and parts[1] in ROOMS:
                found.add(parts[1])
    return found


def test_every_room_is_listed() -> None:
    names = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").exists())}
    assert names - {"__init__", "__pycache__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_above_it(room: str) -> None:
    above = set(ROOMS[: ROOMS.index(room)]) | {room}
    for path in _files(room):
        assert _imported_rooms(path) <= above, path


def test_relative_imports_are_seen() -> None:
    assert _imported_rooms(PACKAGE / "cli" / "_run.py") >= {"results", "recipe", "report"}
    assert _imported_rooms(PACKAGE / "nn" / "surgery.py") == {"nn", "ops"}


def test_public_names() -> None:
    assert set(ell0.__all__) == {
        "ATTACKS",
        "L0Ball",
        "__version__",
        "attacks",
        "certify",
        "data",
        "evaluate",
        "models",
        "nn",
        "ops",
        "recipe",
        "train",
        "truncate",
        "truncated_linear",
    }
    assert set(ell0.ops.__all__) == {
        "Prepared",
        "check_clip",
        "check_k",
        "clipped_linear",
        "cuts",
        "keep_mask",
        "prepare",
        "trimmed_linear",
        "trimmed_conv2d",
        "trimmed_linears",
        "truncated_linear",
    }
    for module in (ell0, *(importlib.import_module(f"ell0.{room}") for room in ROOMS)):
        assert all(hasattr(module, name) for name in getattr(module, "__all__", ()))


def test_a_declared_attack_is_imported_by_its_room() -> None:
    """A new attack is one module and one import line; this fails if the line is forgotten."""
    for path in _files("attacks"):
        for node in ast.parse(path.read_text()).body:
            calls = [d.func for d in getattr(node, "decorator_list", ()) if isinstance(d, ast.Call)]
            if any(isinstance(call, ast.Name) and call.id == "attack" for call in calls):
                name = getattr(node, "name", "")
                own = getattr(ell0.attacks, name, None)
                assert isinstance(own, ell0.attacks.Attack), f"attacks/__init__.py must import {name} from .{path.stem}"


def test_import_needs_torch_and_numpy_alone() -> None:
    code = (
        "import sys\n"
        "for name in ('sklearn', 'scipy', 'rich', 'cyclopts', 'matplotlib', 'jinja2', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "import ell0, torch\n"
        "print(ell0.models.mlp(2, in_features=9, hidden=(4,))(torch.zeros(1, 9)).shape)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "torch.Size([1, 10])" in run.stdout
