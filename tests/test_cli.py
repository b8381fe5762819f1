from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ell0 import __version__
from ell0.cli import main
from ell0.cli._common import hand_over
from ell0.results import Results


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
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


@pytest.mark.parametrize(
    ("words", "said"), [(["run", "--quit"], "--quiet"), (["atack"], "attack"), (["data", "get"], "name")]
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
    hand_over(Results("some", "ell0 any"), out, False, Console(file=said, width=80), lambda _: None)
    assert said.getvalue() == f"written to {out}\n"
    assert out.exists()
