"""The command line as a whole: what it imports, its help, its exit codes, and its output."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from ell0 import __version__
from ell0.cli import app, main, options
from ell0.common import Step
from ell0.data import SETS
from ell0.results import Results

COMMANDS = ["run", "attack", "certify", "report", "theory", "theory malware", "data get", "data list"]


def test_help_and_version_import_no_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'scipy', 'sklearn', 'jinja2'):\n"
        "    sys.modules[name] = None\n"
        "from ell0.cli import main\n"
        "sys.exit(max(main([*command.split(), '--help']) for command in sys.argv[1:]) or main(['--version']))\n"
    )
    run = subprocess.run([sys.executable, "-c", code, "", *COMMANDS], capture_output=True, text=True, timeout=1200)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[-1] == __version__


@pytest.mark.parametrize("command", COMMANDS)
def test_each_example_stands_on_its_own_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found: Any = app
    for word in command.split():
        found = found[word]
    assert isinstance(found, App)
    assert found.default_command is not None
    block = re.search(r"```\n(.*?)```", found.default_command.__doc__ or "", re.DOTALL)
    assert block is not None
    examples = [line.strip() for line in block[1].splitlines() if line.strip()]
    assert all(example.startswith(f"ell0 {command}") for example in examples)
    assert main([*command.split(), "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("ell0 ")] == examples


@pytest.mark.parametrize(
    ("words", "said"),
    [(["run", "--quit"], "--quiet"), (["atack"], "attack"), (["data", "get"], "name"), (["bench"], "bench")],
)
def test_a_wrong_word_is_code_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert said.lower() in (shown.out + shown.err).lower()


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ell0.data.status", interrupted)
    assert main(["data", "list"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_data_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "--root", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == set(SETS)
    assert "ell0 data get mnist" in lines["mnist"]
    assert lines["digits"].endswith("scikit-learn")


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_one_line_on_a_terminal_and_a_line_for_each_stage_elsewhere(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    steps = Step("rows [b]", 3, 9), Step("queries", 1, stage=Step("rows", 3, 9))
    for quiet in (True, False):
        assert written.getvalue() == ""
        with options.show_progress(quiet) as progress:
            for step in steps:
                progress(step)
    assert (written.getvalue() == "3/9 rows [b]\n") == (not terminal)
    assert ("3/9 rows: 1 queries" in written.getvalue()) == terminal


def test_results_are_shown_before_they_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / ("a" * 90) / "[b]c" / "out.json"
    results = Results("some", "ell0 any")
    options.hand_over(results, out, options.WorkOptions(), lambda _: print("shown"))
    assert tuple(capsys.readouterr()) == ("shown\n", f"written to {out}\n")
    assert out.exists()
    options.hand_over(results, out, options.WorkOptions(as_json=True, quiet=True), lambda _: None)
    shown = capsys.readouterr()
    assert (json.loads(shown.out)["name"], shown.err) == ("some", "")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Results, "save", full)
    with pytest.raises(OSError, match="No space"):
        options.hand_over(results, out, options.WorkOptions(), lambda _: print("shown"))
    assert capsys.readouterr().out == "shown\n"


def test_the_command_names_what_was_given_beyond_the_defaults() -> None:
    def command(*, seed: int = 0, fast: bool = False, sizes: tuple[int, ...] = (1,)) -> None: ...

    given = {"seed": 0, "fast": True, "sizes": (3, 4), "attack": ["a", "b"], "data": Path("far/mine.npz"), "rows": None}
    words = options.command_words("ell0 any", command, given | {"queries": 1000, "steps": 7})
    assert words == "ell0 any --fast --sizes 3 4 --attack a --attack b --data mine.npz --steps 7"


def test_out_is_tried_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ell0.report.write", lambda *_: pytest.fail("something was done"))
    assert main(["report", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"ell0: out must be a file or a new name, got {tmp_path}, a folder\n"
