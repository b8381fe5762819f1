from __future__ import annotations

import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ell0 import __version__, bench, cli
from ell0.cli import main
from ell0.cli._common import hand_over
from ell0.results import Results


@pytest.fixture
def fake_bench(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    calls: list[dict[str, object]] = []

    def layer(**options: object) -> Results:
        calls.append(options)
        results = Results("bench-layer-cpu", str(options["command"]), device="a machine")
        results.add(2.5, what="forward", to="dense", unit="x", k=10, batch=1, data="mnist", **{"in": 2, "out": 3})
        results.add(2.0**20, what="memory", unit="bytes", k=10, batch=1, **{"in": 2, "out": 3})
        return results

    def attacks(**options: object) -> Results:
        calls.append(options)
        options["progress"]("a peer failed: [bold]why[/bold]")  # type: ignore[operator]
        results = Results("bench-attacks-cpu", str(options["command"]), device="a machine")
        results.add(0.25, what="clean", unit="accuracy", n=4)
        results.add(0.0125, what="forward", unit="seconds", n=4)
        results.add(
            0.5, what="attack", attack="adaptive", unit="accuracy", beta=100.0, queries=12.3, seconds=0.5,
            queries_per_second=4321.0,
        )  # fmt: skip
        results.add(7.0, what="distance", attack="pointwise", unit="median features")
        results.add(87.2, what="overhead", attack="sparse_rs", to="a peer", unit="x faster")
        return results

    def train(**options: object) -> Results:
        calls.append(options)
        results = Results("bench-train-cpu", str(options["command"]), device="a machine")
        what: dict[str, Any] = {"what": "epoch", "k": 10, "mode": "eager", "batch": 2}
        results.add(0.25, unit="seconds", **what)
        results.add(1.5, unit="x", to="F(0)", paper=58.0, **what)
        return results

    def certify(**options: object) -> Results:
        calls.append(options)
        results = Results("bench-certify-cpu", str(options["command"]), device="a machine")
        results.add(0.5, what="certificates", method="ibp", unit="seconds", images=7)
        results.add(3.25, what="step, quick bound", unit="x", to="plain step", batch=2)
        return results

    def attack_speed(**options: object) -> Results:
        calls.append(options)
        results = Results("bench-attacks-h200", str(options["command"]), device="a card")
        results.add(1.25, what="attack", attack="sparse_rs", to="F(0)", unit="x", k=10, queries=300, seconds=2.0)
        results.add(2.0**20, what="memory", attack="sparse_rs", unit="bytes", k=10)
        return results

    monkeypatch.setattr(bench, "layer", layer)
    monkeypatch.setattr(bench, "train", train)
    monkeypatch.setattr(bench, "certify", certify)
    monkeypatch.setattr(bench, "attack_speed", attack_speed)
    monkeypatch.setattr(bench, "attacks", attacks)
    return calls


def test_bench_layer_shows_and_writes(
    fake_bench: list[dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    assert main(["bench", "layer", "--quick", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "2.5x dense" in shown.out
    assert "1.0 MiB" in shown.out
    assert fake_bench[0]["quick"] is True
    assert Results.load(out).command == "ell0 bench layer --quick"


def test_bench_attacks_shows_and_writes(
    fake_bench: list[dict[str, object]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out, reference = tmp_path / "a.json", tmp_path / "rs_attacks.py"
    words = ["bench", "attacks", "--images", "3", "--require-mnist", "--reference", str(reference), "--out", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr()
    lines = [line.split() for line in shown.out.splitlines()]
    for row in (
        "clean 25.0 %",
        "forward 0.0125 seconds",
        "attack adaptive 100 50.0 % 12 0.5 4321",
        "distance pointwise 7 median features",
        "overhead sparse_rs 1/87 of the time",
    ):
        assert row.split() in lines
    assert "a peer failed: [bold]why[/bold]" in shown.err
    (given,) = fake_bench
    assert (given["images"], given["require_mnist"], given["reference"]) == (3, True, reference)
    command = "ell0 bench attacks --images 3 --require-mnist --reference rs_attacks.py"
    assert Results.load(out).command == command


def test_rows_of_a_gpu_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def layer(**options: object) -> Results:
        results = Results("bench-layer-h200", str(options["command"]), device="a card", versions={"triton": "3"})
        results.add(4e12, what="rate", unit="bytes/s", n=3)
        size = {"batch": 1, "in": 2, "out": 3}
        results.add(1.5, what="backward", gradient="input", to="dense", unit="x", k=10, data="mnist", **size)
        results.add(2.0**20, what="memory", part="step", unit="bytes", k=10, **size)
        return results

    monkeypatch.setattr(bench, "layer", layer)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", "layer", "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    assert "a card, triton kernel" in shown
    lines = [line.split() for line in shown.splitlines()]
    for row in ("rate 4e+12 bytes/s", "backward, input 1x2>3 mnist 10 1.5x dense", "memory, step 1x2>3 10 1.0 MiB"):
        assert row.split() in lines


def test_bench_certify_shows_and_writes(
    fake_bench: list[dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    assert main(["bench", "certify", "--images", "7", "--out", str(out)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in ("certificates ibp 7 0.5 seconds", "step, quick bound 2 3.2x plain step"):
        assert row.split() in lines
    assert (fake_bench[0]["device"], fake_bench[0]["images"]) == ("cpu", 7)
    assert Results.load(out).command == "ell0 bench certify --images 7"


def test_bench_train_shows_and_writes(
    fake_bench: list[dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    assert main(["bench", "train", "--steps", "3", "--out", str(out)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in ("epoch F(10) eager 2 0.25 seconds", "epoch F(10) eager 2 1.5x F(0) 58x"):
        assert row.split() in lines
    assert (fake_bench[0]["device"], fake_bench[0]["steps"]) == ("cpu", 3)
    assert Results.load(out).command == "ell0 bench train --steps 3"


def test_attacks_on_a_gpu_are_those_of_attack_speed(
    fake_bench: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", "attacks", "--device", "cuda", "--images", "7"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in ("attack sparse_rs on F(10) 1.2x F(0) 300 2", "memory sparse_rs on F(10) 1.0 MiB"):
        assert row.split() in lines
    (given,) = fake_bench
    assert given["command"] == "ell0 bench attacks --device cuda --images 7"
    assert (given["device"], given["images"]) == ("cuda", 7)
    assert not {"queries", "budget", "epochs", "reference"} & set(given)
    for words in (["--epochs", "0"], ["--reference", "rs_attacks.py"]):
        assert main(["bench", "attacks", "--device", "cuda", *words]) == 1
        assert capsys.readouterr().err.startswith(f"ell0: {words[0][2:]} must be left out with --device cuda, got ")
    assert len(fake_bench) == 1


def test_the_command_names_what_was_given_beyond_the_defaults(fake_bench: list[dict[str, object]]) -> None:
    for words in (
        "bench layer",
        "bench layer --require-mnist --seed 4",
        "bench attacks",
        "bench layer --device cuda --quick",
        "bench train",
        "bench train --device cuda --rounds 2 --batch 3",
        "bench attacks --images 7 --budget 2 --queries 3 --epochs 0 --seed 9",
    ):
        assert main(shlex.split(words)) == 0
        assert fake_bench[-1]["command"] == f"ell0 {words}"


def test_the_defaults_are_those_of_the_functions() -> None:
    for here, there in (
        (cli.bench_layer, bench.layer),
        (cli.bench_train, bench.train),
        (cli.bench_attacks, bench.attacks),
        (cli.bench_attacks, bench.attack_speed),
    ):
        ours, theirs = (inspect.signature(function).parameters for function in (here, there))
        shared = set(ours) & set(theirs)
        assert {"seed", "root", "require_mnist"} < shared
        for name in shared:
            # None: not given, and the function's own default holds.
            assert ours[name].default in (None, theirs[name].default)


def test_help_names_the_defaults_of_both_functions() -> None:
    told = " ".join((cli.bench_attacks.__doc__ or "").split())
    at_cpu, at_gpu = (inspect.signature(function).parameters for function in (bench.attacks, bench.attack_speed))
    for name in ("images", "budget", "queries"):
        (line,) = re.findall(rf"(?<= {name} )[A-Z][^:]*: (.*?)\.(?= |$)", told)
        assert [int(number) for number in re.findall(r"\d+", line)] == [at_cpu[name].default, at_gpu[name].default]


def test_a_full_disk_loses_no_figures(
    fake_bench: list[dict[str, object]],  # noqa: ARG001
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: Results, path: Path) -> Path:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Results, "save", full)
    assert main(["bench", "layer", "--quick", "--json", "--out", str(tmp_path / "a.json")]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["rows"]
    assert "No space left on device" in shown.err


def test_json_goes_to_standard_output_alone(
    fake_bench: list[dict[str, object]],  # noqa: ARG001
    capsys: pytest.CaptureFixture[str],
) -> None:
    for what, value in (("layer", 2.5), ("attacks", 0.25)):
        assert main(["bench", what, "--json", "--quiet"]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["rows"][0]["value"] == value
        assert shown.err == ""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["bench", "layer", "--threads", "0"], 1, "threads must satisfy 1 <= threads <= "),
        (["bench", "layer", "--threads", f"{2**70}"], 1, f"got {2**70}"),
        (["bench", "layer", "--seed", "-1"], 1, "seed must satisfy 0 <= seed < 2**64, got -1"),
        (["bench", "layer", "--seed", f"{2**64}"], 1, f"seed must satisfy 0 <= seed < 2**64, got {2**64}"),
        (["bench", "attacks", "--images", "0"], 1, "images must be an int >= 1, got 0"),
        (["bench", "attacks", "--reference", "/none.py"], 1, "reference must be the file rs_attacks.py"),
        (["bench", "train", "--steps", "0"], 1, "steps must be an int >= 1, got 0"),
        (["data", "get", "mnits"], 1, "mnits"),
        (["data", "get", "digits"], 1, "need no get"),
    ],
)
def test_an_error_is_one_sentence(words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("ell0: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("what", ["layer", "train", "attacks"])
def test_a_gpu_that_is_not_here_is_one_sentence(
    what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", what, "--device", "cuda", "--quiet"]) == 1
    error = capsys.readouterr().err
    assert error == 'ell0: device must be "cpu" where torch finds no CUDA GPU, got "cuda"\n'


def test_out_is_tried_before_the_work(
    fake_bench: list[dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for out, said in (
        (tmp_path, "a folder"),
        (tmp_path / "file" / "a.json", "a folder that can be written"),
        (tmp_path / ("a" * 300), "a folder that can be written"),
        (tmp_path / "pipe", "a file or a new name"),
    ):
        assert main(["bench", "layer", "--out", str(out)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("ell0: out must be a ")
        assert said in error
        assert str(out) in error
        assert error.count("\n") == 1
    assert fake_bench == []
    assert {path.name for path in tmp_path.iterdir()} == {"file", "pipe"}
    assert main(["bench", "layer", "--out", str(tmp_path / "new" / "a.json")]) == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_make_bench_stops_at_once_without_mnist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    makefile = (Path(__file__).resolve().parent.parent / "Makefile").read_text()
    (words,) = re.findall(r"^bench:.*\n\t\$\(BIN\)/ell0 (.*)$", makefile, re.MULTILINE)
    monkeypatch.delenv("ELL0_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr("ell0.bench._layer.timed", lambda *_: pytest.fail("something was timed"))
    assert main(shlex.split(words)) == 1
    assert "`ell0 data get mnist`" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("reference", ["", "some where/rs_attacks.py"])
def test_make_bench_attacks_passes_a_reference_only_where_there_is_one(reference: str) -> None:
    run = subprocess.run(
        ["make", "--dry-run", "bench-attacks", f"REFERENCE={reference}"],
        cwd=Path(__file__).resolve().parent.parent, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (line,) = [line for line in run.stdout.splitlines() if "bench attacks" in line]
    given = ["--reference", reference] if reference else []
    assert shlex.split(line)[1:-2] == ["bench", "attacks", "--require-mnist", "--threads", "2", *given]


@pytest.mark.parametrize(
    ("words", "said"), [(["bench", "layer", "--quik"], "--quick"), (["bnch"], "bench"), (["data", "get"], "name")]
)
def test_a_wrong_word_is_code_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert said.lower() in (shown.out + shown.err).lower()


def test_data_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "--root", str(tmp_path), "--json"]) == 0
    sets = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert sets["digits"]["problem"] is None
    assert "ell0 data get mnist" in sets["mnist"]["problem"]
    assert main(["data", "list", "--root", str(tmp_path)]) == 0


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(**_: object) -> Results:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "layer", interrupted)
    assert main(["bench", "layer"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer", "--help"]) == 0
    assert "ell0 bench layer --quick" in capsys.readouterr().out


def test_installed_command_starts() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import sys; from ell0.cli import main; sys.exit(main(['--version']))"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout.strip() == __version__


def test_the_place_of_a_results_file_is_one_line(tmp_path: Path) -> None:
    said, out = io.StringIO(), tmp_path / ("a" * 60) / "[b]c" / "out.json"
    hand_over(Results("some", "ell0 bench"), out, False, Console(file=said, width=80), lambda _: None)
    assert said.getvalue() == f"written to {out}\n"
    assert out.exists()
