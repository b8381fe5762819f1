"""What is installed: an sdist with all files, a wheel made from it without a compiler; locked packages alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import lock
import pytest

from ell0 import ops
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


def test_the_tests_of_the_sdist_collect(sdist: Path) -> None:
    words = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests")
    said = call(*words, cwd=sdist, PYTHONPATH=str(sdist / "src"))
    assert {line.split("::")[0] for line in said.splitlines() if "::" in line} == {
        f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py")
    }


def locked(name: str) -> dict[str, str]:
    """The versions that a lock file pins; all of its lines are entries with hashes."""
    entries, text = list(lock.ENTRY.finditer((ROOT / name).read_text())), (ROOT / name).read_text()
    assert text == lock.HEAD + "".join(entry[0] for entry in entries)
    assert [entry["name"] for entry in entries if not entry["hashes"]] == []
    return {entry["name"]: entry["version"] for entry in entries}


def test_lock_files_pin_and_hash_each_package_once() -> None:
    requirements, peers, torch, cpu = map(locked, ("requirements.lock", "peers.lock", "torch.lock", "torch-cpu.lock"))
    assert cpu == {"torch": f"{torch['torch']}+cpu"}
    assert not requirements.keys() & (peers.keys() | torch.keys())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = chain(project["dependencies"], *project["optional-dependencies"].values())
    names = {re.split(r"[^\w-]", each)[0] for each in wanted}
    assert names - {"ell0"} <= requirements.keys() | peers.keys() | torch.keys()


def test_the_environment_is_what_the_lock_files_name() -> None:
    made_from = Path(sys.prefix, ".locked")
    if not made_from.exists() or made_from.read_text() != (ROOT / "requirements.lock").read_text():
        pytest.skip("needs the environment that make setup makes of these lock files")
    # Not those of sys.path: setuptools puts what it has copied there once it is imported.
    found = metadata.distributions(path=[sysconfig.get_path("purelib")])
    installed = {re.sub(r"[-_.]+", "-", each.name).lower(): each.version for each in found}
    torch = locked("torch-cpu.lock" if installed["torch"].endswith("+cpu") else "torch.lock")
    own = {name: version for name, version in installed.items() if name not in ("ell0", "pip")}
    assert own.items() <= (locked("requirements.lock") | torch).items()


def test_make_installs_nothing_but_locked_files() -> None:
    said = call("make", "--dry-run", "--always-make", "test", "run", "dist", "test-peers", "bench-attacks", cwd=ROOT)
    installs = [line for line in said.splitlines() if " pip install " in line]
    assert {line.split()[-1] for line in installs} == {"torch.lock", "requirements.lock", "peers.lock", "."}
    for line in installs:
        assert (
            "--no-deps --only-binary :all: --require-hashes -r" in line or "--no-deps --no-build-isolation -e ." in line
        )
    assert "build --no-isolation" in said


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
    call(*pip, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=tmp_path)

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
    for kernel in Path(ops.__file__).parent.glob("_kernel*.so"):
        shutil.copy(kernel, home / "ell0" / "ops")
    example = re.search(r"^```python\n(.*?)^```", (sdist / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert example is not None
    assert "%" in call(python, "-c", example[1], cwd=tmp_path / "elsewhere")
