"""What the README says is true: figures come from results files, commands and calls exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent


def test_figures_are_those_of_the_results_files() -> None:
    run = subprocess.run([sys.executable, "tools/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr or "README.md is not in step with results/: run tools/readme.py"


def test_a_changed_figure_is_noticed(tmp_path: Path) -> None:
    for name in ("README.md", "tools", "results"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path / name)], check=True)
    results = tmp_path / "results" / "bench-layer-cpu.json"
    results.write_text(re.sub(r'"value": [0-9.]+', '"value": 12345.6', results.read_text()))
    run = subprocess.run([sys.executable, "tools/readme.py", "--check"], cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (1, "")


def test_a_missing_figure_is_one_sentence(tmp_path: Path) -> None:
    for name in ("README.md", "tools", "results"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path / name)], check=True)
    results = tmp_path / "results" / "bench-layer-cpu.json"
    results.write_text(results.read_text().replace('"mnist"', '"digits28"'))
    before = (tmp_path / "README.md").read_text()
    run = subprocess.run([sys.executable, "tools/readme.py"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2
    assert "needs a figure that results/ does not have: bench-layer-cpu has 0 rows with" in run.stderr
    assert "'data': 'mnist'" in run.stderr
    assert run.stderr.count("\n") == 1
    assert (tmp_path / "README.md").read_text() == before


def make_targets(text: str) -> set[str]:
    """The targets of every ``make ...`` in the text's code blocks and code spans."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", text)
    calls = re.findall(r"^make ([^#\n]+)", "\n".join(blocks + spans), re.MULTILINE)
    return {word for call in calls for word in call.split() if "=" not in word}


def test_a_variable_is_no_target() -> None:
    assert make_targets("`make one A=b two` and\n```\nmake three  # make four\n```\n") == {"one", "two", "three"}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_and_files_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = make_targets(text)
    assert {"run", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\(([A-Z]+\.[a-z]+)\)", text):
        assert (ROOT / link).exists(), link


def test_make_test_full_draws_more_cases() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (profile,) = re.findall(r"^test-full:.*\n\tHYPOTHESIS_PROFILE=(\w+) .*pytest", makefile, re.MULTILINE)
    full, default = (settings.get_profile(name) for name in (profile, "default"))
    assert full.max_examples == 10 * default.max_examples
    assert not full.derandomize


# What the examples speak of and do not make: the reader's own. And less work, for a machine without the kernel.
READERS = """
import ell0, torch
torch.set_num_threads(1)
load = ell0.data.load
ell0.data.load = lambda *words: tuple(t[:20] for t in load(*words))
my_model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 9))
weight, bias = torch.randn(5, 64), torch.zeros(5)
x_adv = torch.zeros(20, 1, 8, 8)
ell0.recipe.run = lambda recipe: recipe
"""


def test_the_python_examples_run_one_after_the_other() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    code = "\n".join([READERS, *blocks])
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr
    assert "robust" in run.stdout
