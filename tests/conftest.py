"""What every test shares: how long the properties run, and the backends."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from ell0.ops import kernel

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
