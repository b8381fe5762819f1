"""Every reader of files on altered ones: a sentence or a value, never a traceback; kills at every file operation."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import resource
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ell0 import data, files, recipe, report, train
from ell0.data import SETS, sources
from ell0.recipe import verdicts
from ell0.report import run_files
from ell0.results import Results, Row, Share
from ell0.theory import read_programs
from report_runs import gallery, log, write_gallery
from small_training import network
from spied_evaluation import evaluate_line
from test_data import idx, install, png
from test_recipe_run import figures, weights
from tiny_recipe import TINY, write_recipe

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
CASES, KILLS = (5000, 1000) if FULL else (200, 20)
SECONDS, MEMORY = 5.0, 1 << 20  # of the processor, and kB

WORDS = b'null [] {} "" -1 1e999 NaN true 999999999999999999999999999999 "\\u001b[31m" 0.5 [1] \0'.split(b" ")
NUMBERS = [0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 31, 0x00FFFFFF]


def altered(content: bytes, chance: random.Random) -> bytes:
    """The content with one to three changes: bits, bytes, parts lost, doubled or moved, other numbers and words."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        at, other = (chance.randrange(len(content) + 1) for _ in range(2))
        length = chance.choice((1, 1, 4, 16, 64, 1000))
        kind = chance.randrange(9)
        if kind == 0:
            content = content[:at]
        elif kind == 1:
            content = content[:at] + content[at + length :]
        elif kind == 2:
            content = content[:at] + content[other : other + length] + content[at:]
        elif kind == 3:
            content = content[:at] + chance.randbytes(length) + content[at + length :]
        elif kind == 4:
            number = chance.choice(NUMBERS).to_bytes(4, chance.choice(("little", "big")))
            content = content[:at] + number + content[at + 4 :]
        elif kind in (5, 6):
            words = list(re.finditer(rb'-?\d+(\.\d+)?|"[^"]*"|true|false|null', content[:5000]))
            if words:
                word = chance.choice(words)
                content = content[: word.start()] + chance.choice(WORDS) + content[word.end() :]
        elif at < len(content):
            content = content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
    return content


def resealed(content: bytes) -> bytes:
    """As a forger leaves it: with a SHA-256 that fits."""
    before = content[:8] + files._SEAL
    return files.sealed(before, content[len(before) + 64 :])


@dataclass(frozen=True)
class Reader:
    """A file as it is written, and what reads it.

    sealed: an altered one is never accepted.  forged: makes the seal anew.  errors: those that are a sentence.
    """

    content: bytes
    read: Callable[[Path], object]
    name: str = "file"
    sealed: bool = False
    forged: Callable[[bytes], bytes] | None = None
    errors: tuple[type[BaseException], ...] = (ValueError, OSError)


def written(path: Path, *_: object) -> bytes:
    return path.read_bytes()


def checkpoint(folder: Path) -> Reader:
    model = network()
    words = {"name": "mlp", "k": 1, "in_features": 12, "hidden": [10], "classes": 3}
    path = train.save_checkpoint(folder / "a", model, {"model": words, "classifier": "F(1)"})
    return Reader(written(path), lambda path: recipe.model(train.load_checkpoint(path)), sealed=True, forged=resealed)


def verdict(folder: Path) -> Reader:
    one = verdicts.Verdicts(1.0, ("clean", "a"), torch.tensor([0, -1, 1]), torch.tensor([0, -1, 2]))
    verdicts.save(folder / "v" / "a", "digest", [one, replace(one, beta=2.0)])

    def read(path: Path) -> None:
        found = verdicts.load(path, "digest")
        if found is None:
            raise files.FileError("it is found again")
        verdicts.decided(found, 3, 1)

    return Reader(written(folder / "v" / "a"), read, sealed=True, forged=resealed)


def state(folder: Path) -> Reader:
    evaluate_line(state_path=folder / "a")
    return Reader(written(folder / "a"), lambda path: evaluate_line(state_path=path), sealed=True, forged=resealed)


def pictures(folder: Path) -> Reader:
    path = write_gallery(folder, gallery(2))
    return Reader(written(path), lambda path: run_files.gallery(path, ["F(0)", "F(10)"]), sealed=True, forged=resealed)


def results(folder: Path, sealed: bool = True) -> Reader:
    found = Results("a", "ell0 run a", commit="0", device="none", versions={"torch": "2"}, seeds=[0])
    more: Row = {"classifier": "F(0)", "k": 0, "budget": 2, "beta": 1.0, "queries": 9, "unit": "feature", "n": 20}
    found.add(
        Share.of(torch.arange(20) < 10),
        what="robust_accuracy",
        attack="worst case",
        **more,
        low=0.3,
        high=0.7,
        decided={"clean": 2},
        flags=["b"],
    )
    found.add(
        0.9, what="clean_accuracy", classifier="F(0)", n=20, low=0.8, high=1.0, paper=0.9, paper_n=10, seconds=1.5
    )
    content = found.save(folder / "a").read_bytes()
    if not sealed:
        content = re.sub(rb' "sha256": "\w+",\n', b"", content)
    return Reader(content, lambda path: report.page([path]), sealed=sealed)


def epochs(folder: Path) -> Reader:
    results(folder)
    (folder / "a").rename(folder / "results.json")
    (folder / "recipe.toml").write_text(TINY)
    write_recipe(folder)
    (folder / "f0").mkdir()
    content = log(2, 1, 0.1).encode()
    return Reader(content, lambda path: report.page([path.parent.parent]), name="f0/log.jsonl")


def toml(folder: Path) -> Reader:
    write_recipe(folder)
    return Reader(TINY.encode(), recipe.load, name="a.toml")


def npz(folder: Path, save: Callable[..., None] = np.savez) -> Reader:
    save(folder / "a.npz", x=np.zeros((4, 3)), y=np.arange(4))
    return Reader(written(folder / "a.npz"), data.read_npz)


def programs(folder: Path) -> Reader:
    x = np.random.default_rng(0).integers(0, 2, (6, 9), np.uint8)
    np.savez(folder / "a.npz", X=np.packbits(x, axis=1), d=9, y=np.arange(6) % 2)
    return Reader(written(folder / "a.npz"), read_programs)


def images(folder: Path, patch: pytest.MonkeyPatch) -> Reader:
    rng = np.random.default_rng(0)
    contents = [idx(rng.integers(0, 9, shape, np.uint8)) for n in (6, 4) for shape in ((n, 28, 28), (n,))]
    for name, content in install(patch, "mnist", contents).items():
        (folder / name).write_bytes(content)
    name = SETS["mnist"].test[0].name
    return Reader((folder / name).read_bytes(), lambda _: data.load("mnist", "test", folder), name=name, sealed=True)


def batch(folder: Path, patch: pytest.MonkeyPatch) -> Reader:
    rows = np.random.default_rng(0).integers(0, 9, (6, 2, 3073), np.uint8)
    for name, content in install(patch, "cifar10", [part.tobytes() for part in rows]).items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    name = f"{SETS['cifar10'].test[0].name}.gz"
    whole = data.load("cifar10", "test", folder)

    def read(_: Path) -> None:
        # The name and the time in the head of a gz file, and what follows its end, are not content.
        assert all(
            torch.equal(one, other) for one, other in zip(data.load("cifar10", "test", folder), whole, strict=True)
        )

    return Reader((folder / name).read_bytes(), read, name=name)


def sheet(_: Path) -> Reader:
    content = png(np.random.default_rng(0).integers(0, 256, (5, 8, 3), np.uint8), [0, 1, 2, 3, 4])
    return Reader(content, lambda path: sources.read_png(path.read_bytes(), 5, 8), errors=sources.FAILURES)


def archive(folder: Path) -> Reader:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("a", "b" * 150, "c"):
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = 300, {"comment": "ü"}
            tar.addfile(member, io.BytesIO(bytes(300)))

    def read(path: Path) -> None:
        (folder / "a.tgz").write_bytes(gzip.compress(path.read_bytes(), 1))
        list(sources._members(folder / "a.tgz", "ac"))

    return Reader(buffer.getvalue(), read, errors=sources.FAILURES)


READERS: dict[str, Callable[..., Reader]] = {
    "checkpoint": checkpoint, "verdicts": verdict, "state": state, "gallery": pictures, "results": results,
    "results of before": lambda folder: results(folder, sealed=False), "log": epochs, "recipe": toml, "npz": npz,
    "compressed npz": lambda folder: npz(folder, np.savez_compressed), "programs": programs, "IDX": images,
    "binary batch": batch, "PNG": sheet, "tar": archive,
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_altered_files_give_a_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = READERS[name]
    reader = make(tmp_path, monkeypatch) if make in (images, batch) else make(tmp_path)
    path = tmp_path / reader.name
    path.write_bytes(reader.content)
    reader.read(path)
    before, accepted = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for case in range(CASES):
        chance = random.Random(f"{name} {case}")
        content = altered(reader.content, chance)
        forged = reader.forged is not None and case % 2
        content = reader.forged(content) if reader.forged is not None and forged else content
        path.write_bytes(content)
        start = time.process_time()
        try:
            reader.read(path)
        except reader.errors as error:
            if isinstance(error, UnicodeError | json.JSONDecodeError):
                raise AssertionError(f"case {case} of {name}") from error
        except Exception as error:
            raise AssertionError(f"case {case} of {name}") from error
        else:
            accepted += 1
            assert not reader.sealed or forged or content == reader.content, f"case {case} of {name} was accepted"
        assert time.process_time() - start < SECONDS, f"case {case} of {name}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY
    assert accepted < CASES


MICRO = """
name = "micro"
summary = "a recipe for kills"
[data]
file = "tiny.npz"
train_rows = 32
[[classifier]]
name = "F(1)"
model = { name = "mlp", k = 1, hidden = [4] }
[classifier.training]
epochs = 2
batch = 16
rates = [0.05]
refresh = 1
attack = { name = "sparse_rs", budget = 1, queries = 2 }
[[measure]]
what = "clean_accuracy"
[[measure]]
what = "robust_accuracy"
budgets = [1]
queries = [2]
rows = 6
"""


def test_killed_at_file_operations_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """A power loss at that moment, too, as far as it leaves what was synced."""
    write_recipe(tmp_path)
    (tmp_path / "micro.toml").write_text(MICRO)
    words = [sys.executable, str(Path(__file__).with_name("killed_run.py")), str(tmp_path / "micro.toml")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words += [str(tmp_path / "runs"), str(KILLS)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=3000)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80
    whole, *others = sorted((tmp_path / "runs").glob("*/"), key=lambda path: path.name != "whole")
    exact = [path.relative_to(whole) for path in whole.rglob("*") if path.parent.name == "verdicts"]
    exact += [Path("gallery.safetensors"), Path("recipe.toml"), Path(".format")]
    assert len(others) == min(KILLS, int(done.stdout)) + 1
    for out in others:
        assert (figures(out), weights(out)) == (figures(whole), weights(whole)), out
        names = {path.relative_to(out) for path in out.rglob("*")}
        assert names == {path.relative_to(whole) for path in whole.rglob("*")}, out
        assert all((out / path).read_bytes() == (whole / path).read_bytes() for path in exact), out
