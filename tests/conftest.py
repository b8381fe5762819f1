"""What tests share: how long the properties run, the backends, runs for recipes and the report, a browser."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from ell0 import recipe, report
from ell0.ops import kernel
from report_runs import Outline, run_folder
from small_training import FakeGraph, FakeStream, nothing
from tiny_recipe import write_recipe

# `make test` is never red by luck: it draws the same cases every time. `make test-full` draws new ones, which has to be
# said: a profile takes what it does not name from "default".
settings.register_profile("default", max_examples=200, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=2000, deadline=None, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# The workers of pytest-xdist share few cores, and a second OpenMP thread in each would spin while it waits for one.
torch.set_num_threads(1)


@pytest.fixture(params=[*kernel.BUILDS, "none"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each build of the kernel, skipped where this machine cannot run it, and "none": the torch path."""
    if request.param not in (*kernel.builds(), "none"):
        pytest.skip(f"no {request.param} build of the kernel that this machine can run")
    kernel.use(request.param)
    yield request.param
    kernel.use(None)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A recipe that takes seconds."""
    return write_recipe(tmp_path)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of it that nothing disturbed."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    return recipe.run(write_recipe(folder), out=folder / "run", device="cpu")


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with figures made up, which tests of the report read and copy."""
    return run_folder(tmp_path_factory.mktemp("runs") / "mnist-table1")


@pytest.fixture(scope="session")
def outline(run: Path) -> Outline:
    """What the page of that run folder is made of."""
    return Outline(report.page([run]))


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph of steps asks of CUDA, where there is no GPU."""
    for name, value in (
        ("CUDAGraph", FakeGraph),
        ("graph", nothing),
        ("stream", nothing),
        ("Stream", lambda _: FakeStream()),
        ("current_stream", lambda _: FakeStream()),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
