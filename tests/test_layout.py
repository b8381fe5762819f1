"""The shape of the house: which room may import what, names, what is public, what an import needs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import ell0

PACKAGE = Path(ell0.__file__).parent
ROOMS = [
    "common", "files", "threat", "ops", "nn", "wrapping", "models", "part_networks", "synthesis", "data", "attacks",
    "results", "parallel", "precision", "evaluation", "adapters", "train", "certify", "theory", "recipe", "report",
    "export", "cli",
]  # fmt: skip
FILES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[list[str]]:
    """What a file imports of ell0, however the import is written: a room, then modules and names in it."""
    here = ("ell0", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(FILES[path]):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == "ell0" and rest and rest[0] in ROOMS:
                yield rest


def test_every_room_is_listed() -> None:
    names = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").exists())}
    assert names - {"__init__", "__pycache__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_above_it(room: str) -> None:
    above = set(ROOMS[: ROOMS.index(room)]) | {room}
    for path in FILES:
        if room_of(path) == room:
            assert {names[0] for names in imported(path)} <= above, path


def test_imports_inside_functions_are_seen() -> None:
    assert {names[0] for names in imported(PACKAGE / "cli" / "run.py")} >= {"results", "recipe", "report", "parallel"}
    assert ["ops", "blocked"] in [names[:2] for names in imported(PACKAGE / "certify" / "truncated.py")]


def test_no_room_imports_a_private_name_of_another() -> None:
    for path in FILES:
        for room, *names in imported(path):
            private = [name for name in names if name.startswith("_") and not name.startswith("__")]
            assert room == room_of(path) or not private, (path, room, names)


def test_no_class_name_stands_twice() -> None:
    names = [node.name for tree in FILES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert {name for name, times in Counter(names).items() if times > 1} == set()


def test_public_names() -> None:
    assert set(ell0.__all__) == {
        "ATTACKS", "L0Ball", "__version__", "attacks", "certify", "data", "evaluate", "evaluation", "export", "models",
        "nn", "ops", "part_networks", "recipe", "report", "results", "theory", "train", "truncate", "truncated_linear",
        "wrap",
    }  # fmt: skip
    assert set(ell0.ops.__all__) == {
        "Prepared", "check_k", "cuts", "keep_mask", "prepare", "trimmed_linear",
        "trimmed_linears", "truncated_linear",
    }  # fmt: skip
    for module in (ell0, *(importlib.import_module(f"ell0.{room}") for room in ROOMS)):
        assert all(hasattr(module, name) for name in getattr(module, "__all__", ()))
    assert set(ell0.__all__) <= set(dir(ell0))
    with pytest.raises(AttributeError, match="module 'ell0' has no attribute 'attak'"):
        ell0.attak  # type: ignore[attr-defined]  # noqa: B018


def test_a_declared_attack_is_imported_by_its_room() -> None:
    """A new attack is one module and one import line; this fails if the line is forgotten."""
    for path in (PACKAGE / "attacks").glob("*.py"):
        for node in FILES[path].body:
            calls = [d.func for d in getattr(node, "decorator_list", ()) if isinstance(d, ast.Call)]
            if any(isinstance(call, ast.Name) and call.id == "attack" for call in calls):
                name = getattr(node, "name", "")
                own = getattr(ell0.attacks, name, None)
                assert isinstance(own, ell0.attacks.Attack), f"attacks/__init__.py must import {name} from .{path.stem}"


def test_import_needs_torch_and_numpy_alone() -> None:
    code = (
        "import sys\n"
        "names = 'sklearn scipy rich cyclopts matplotlib jinja2 safetensors lightning_fabric'\n"
        "sys.modules.update(dict.fromkeys(names.split()))\n"
        "import ell0, torch\n"
        "from ell0 import ATTACKS, L0Ball, certify, data, evaluate, nn, ops, recipe, train, truncate\n"
        "assert all(recipe.load(name) for name in recipe.names())\n"
        "print(ell0.models.mlp(2, in_features=9, hidden=(4,))(torch.zeros(1, 9)).shape)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr
    assert "torch.Size([1, 10])" in run.stdout
