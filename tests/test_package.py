"""What `pip install` gives: an sdist that holds all files, and a wheel, built from it without a compiler, that runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from ell0.results import Results

ROOT = Path(__file__).resolve().parent.parent


def call(*words: str | Path, cwd: Path, **environment: str) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    run = subprocess.run(list(map(str, words)), cwd=cwd, env=own, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def build(kind: str, source: Path, out: Path, **environment: str) -> Path:
    """What setuptools makes of a source tree, as pip and build call it."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    call(sys.executable, "-c", code, out, cwd=source, **environment)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of the repository; none outside of a checkout."""
    listed = call("git", "ls-files", cwd=ROOT).split() if (ROOT / ".git").exists() else []
    return [name for name in listed if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def sdist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked; made in a copy, since setuptools adds what an egg-info of an earlier build lists."""
    source = tmp_path_factory.mktemp("source") if tracked else ROOT
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    if tracked:
        (source / ".git").write_text("gitdir: " + call("git", "rev-parse", "--absolute-git-dir", cwd=ROOT))
    packed = build("sdist", source, tmp_path_factory.mktemp("sdist"), GIT_OPTIONAL_LOCKS="0")
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(packed) as file:
        file.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


def test_the_sdist_holds_every_file(sdist: Path, tracked: list[str]) -> None:
    if not tracked:
        pytest.skip("needs a git checkout, which lists the files")
    assert [name for name in tracked if not (sdist / name).exists()] == []


def test_a_wheel_made_without_a_compiler_runs_the_readme(sdist: Path, tmp_path: Path) -> None:
    for name in ("dist", "elsewhere"):
        (tmp_path / name).mkdir()
    wheel = build("wheel", sdist, tmp_path / "dist", CC="false", CXX="false")
    # A fresh environment, which finds the packages of this one by their folder, and so without ell0.
    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh", cwd=tmp_path)
    python = tmp_path / "fresh" / "bin" / "python"
    home = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (home / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    call(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)

    ask = (
        "import ell0, pathlib, torch, ell0.ops.kernel, ell0.results\n"
        "here = pathlib.Path(ell0.__file__).parent\n"
        "print(here, (here / 'py.typed').exists(), ell0.ops.kernel.builds())\n"
        "print(ell0.truncated_linear(torch.tensor([[1.0, 2.0, 100.0]]), torch.ones(1, 3), k=1).item())\n"
        "print(ell0.results.Results.here('', '', seeds=[], device='cpu').commit)\n"
    )
    commit = Results.here("", "", seeds=[], device="cpu").commit
    assert commit is not None
    said = call(python, "-c", ask, cwd=tmp_path / "elsewhere").splitlines()
    assert said == [f"{home / 'ell0'} True ()", "2.0", commit]
    assert "digits" in call(tmp_path / "fresh" / "bin" / "ell0", "run", "--list", cwd=tmp_path / "elsewhere")

    # The kernel that a compiler would have made, which takes a minute, makes the example take seconds.
    for kernel in (ROOT / "src" / "ell0" / "ops").glob("_kernel*.so"):
        shutil.copy(kernel, home / "ell0" / "ops")
    example = re.search(r"^```python\n(.*?)^```", (sdist / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert example is not None
    assert "%" in call(python, "-c", example[1], cwd=tmp_path / "elsewhere")
