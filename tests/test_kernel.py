"""Loading the compiled kernel, and living without it."""

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ell0.ops import kernel, prepare, reference, trimmed_linear
from test_ops_operator import compiler_works

needs_kernel = pytest.mark.skipif(not kernel.builds(), reason="no compiled kernel on this machine")


def forget() -> None:
    for cached in (kernel._library, kernel.builds, kernel._function):
        cached.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder where the kernel is looked for."""
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "__file__", str(tmp_path / "kernel.py"))
        yield tmp_path
    forget()


def assert_works() -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 40, generator=g), torch.randn(3, 40, generator=g)
    for given in (None, prepare(weight)):
        leaf = x.clone().requires_grad_()
        out = trimmed_linear(leaf, weight, top=3, bottom=2, prepared=given)
        torch.testing.assert_close(out, reference.trimmed_linear(x, weight, top=3, bottom=2).float())
        out.sum().backward()
        expected, _ = reference.gradients(torch.ones(5, 3), x, weight, top=3, bottom=2)
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, expected.float())


def test_where_a_compiler_works_there_is_a_kernel(tmp_path: Path) -> None:
    """The extension is optional, so an install where it no longer compiles goes on without a word."""
    if not compiler_works(tmp_path):
        pytest.skip("no working C++ compiler")
    assert kernel.builds(), "the kernel did not compile, or not since there is a compiler: `make clean setup` tells"


def test_without_a_kernel_the_torch_path_serves(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel.builds() == (), folder
        assert kernel.build() == "none"
        assert_works()
    with pytest.raises(ValueError, match=r"build must be one of \['none'\] or None, got 'avx2'"):
        kernel.use("avx2")


def test_a_kernel_that_does_not_load_warns_once(folder: Path) -> None:
    (folder / "_kernel.so").write_bytes(b"not a library")
    with pytest.warns(UserWarning, match="does not load, the torch path serves instead") as caught:
        assert_works()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_works()
        assert kernel.build() == "none"


@needs_kernel
def test_a_broken_file_does_not_hide_a_good_one(folder: Path) -> None:
    installed = next(Path(reference.__file__).parent.glob("_kernel*.so"))
    (folder / "_kernel.0.so").write_bytes(b"not a library")
    shutil.copy(installed, folder / "_kernel.1.so")
    with pytest.warns(UserWarning, match="_kernel.0.so"):
        assert kernel.builds()
    assert_works()


def test_what_the_kernel_serves(backend: str) -> None:
    weight = torch.ones(2, 20)
    assert kernel.serves(weight) == kernel.serves(weight.double()) == (backend != "none")
    assert not kernel.serves(weight.half())
    assert not kernel.serves(weight.to("meta"))
    assert not kernel.serves(weight[:0])
    assert (prepare(weight).order.numel() > 0) == (backend != "none")
