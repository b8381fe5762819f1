"""Builds the CPU kernel, one source compiled once for each instruction set, and records the commit.

Everything else is in pyproject.toml. The extension is optional: without a compiler the install goes on, and the
torch path serves. Wheels and sdists hold ell0/commit.txt, which results name.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

CSRC = Path("src/ell0/ops/csrc")
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
TARGETS = {"generic": []}
if platform.machine() in ("x86_64", "AMD64"):
    avx2 = ["-mavx2", "-mfma", "-mbmi", "-mbmi2"]
    TARGETS |= {"avx2": avx2, "avx512": [*avx2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl"]}


class BuildKernel(build_ext):
    """Compiles kernel.cpp once for each target, under its own name."""

    def build_extension(self, ext: Extension) -> None:
        source = ext.sources.pop()
        for name, flags in TARGETS.items():
            ext.extra_objects += self.compiler.compile(
                [source],
                output_dir=str(Path(self.build_temp, name)),
                macros=[("NAME", name)],
                extra_postargs=FLAGS + flags,
                depends=ext.depends,
            )
        super().build_extension(ext)


def record_commit(package: Path) -> None:
    """Writes the commit of this checkout into a copy of the package; an unpacked sdist has it already."""
    words = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    if Path(".git").exists():
        commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        (package / "commit.txt").write_text(commit)


class BuildPackage(build_py):
    """Copies the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            record_commit(Path(self.build_lib, "ell0"))


class Sdist(sdist):
    """Packs the sources."""

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        super().make_release_tree(base_dir, files)
        record_commit(Path(base_dir, "src", "ell0"))


kernel = Extension(
    "ell0.ops._kernel",
    sources=[str(CSRC / "kernel.cpp")],
    depends=[str(path) for path in sorted(CSRC.glob("*.h"))],
    extra_link_args=["-fopenmp"],
    language="c++",
    optional=True,
)
setup(ext_modules=[kernel], cmdclass={"build_ext": BuildKernel, "build_py": BuildPackage, "sdist": Sdist})
