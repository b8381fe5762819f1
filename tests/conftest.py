"""What every test shares: how long the properties run, which tests wait for `make test-full`, and the backends."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from ell0.ops import kernel

# `make test` is never red by luck: it draws the same cases every time. `make test-full` draws new ones.
settings.register_profile("default", max_examples=200, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# The workers of pytest-xdist share few cores, and a second OpenMP thread in each would spin while it waits for one.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests marked `full` out unless -m says what to run."""
    if config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(params=[*kernel.builds(), "none"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each build of the kernel that this machine can run, and "none": the torch path."""
    kernel.use(request.param)
    yield request.param
    kernel.use(None)
