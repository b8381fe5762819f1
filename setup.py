"""Builds the CPU kernel: one source, compiled once for each instruction set.

Everything else is in pyproject.toml. The extension is optional: without a compiler the install goes on, and the
torch path serves.
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

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


kernel = Extension(
    "ell0.ops._kernel",
    sources=[str(CSRC / "kernel.cpp")],
    depends=[str(path) for path in sorted(CSRC.glob("*.h"))],
    extra_link_args=["-fopenmp"],
    language="c++",
    optional=True,
)
setup(ext_modules=[kernel], cmdclass={"build_ext": BuildKernel})
