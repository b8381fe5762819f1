"""What the README says is true: figures come from results files, commands and calls exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert run.returncode == 1, run.stderr


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_and_files_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", text):
        if target in ("setup", "run", "test", "test-full", "bench", "lint"):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\(([A-Z]+\.[a-z]+)\)", text):
        assert (ROOT / link).exists(), link


def test_the_python_example_runs() -> None:
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    setting = (
        "import torch\n"
        "my_model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 9))\n"
        "weight, bias = torch.randn(5, 64), torch.zeros(5)\n"
        "x_adv = torch.zeros(360, 1, 8, 8)\n"
    )
    code = setting + example.replace("out = ell0", "x = x.flatten(1); x_adv = x; out = ell0")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
