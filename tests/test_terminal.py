"""The command line and text from elsewhere: what a terminal sees, what it cannot show, readers that leave, mistakes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ell0 import recipe
from ell0.cli import main, options
from ell0.common import Step
from ell0.results import Results
from tiny_recipe import edited

HOSTILE = "F[/0] [clean] \x1b]8;;http://x\x1b\\ \x9b31m \u202e \u2028 \r"
SHOWN = r"F[/0] [clean] \u001b]8;;http://x\u001b\ \u009b31m \u202e \u2028 \u000d"


def test_text_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.printable(HOSTILE) == SHOWN
    harmless = "F(4): ±3\N{NO-BREAK SPACE}%\t\N{EN DASH} ü 数"
    assert options.printable(harmless) == harmless
    options.tell(HOSTILE, "b\n", sep="\n")
    assert capsys.readouterr().out == f"{SHOWN}\nb\n\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_of_a_hostile_name(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with options.show_progress(False) as progress:
        progress(Step(HOSTILE, 1, 2))
    shown = stream.getvalue()
    assert "F[/0] [clean]" in shown
    assert "8;;http" in shown
    assert "\x1b]8" not in shown
    assert "\x9b" not in shown


def test_a_run_of_a_hostile_name(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(tiny, 'name = "F(0)"', f"name = {json.dumps('0' + HOSTILE)}")
    assert main(["run", str(tiny), "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert f"0{SHOWN}" in text
        assert all(line == options.printable(line) for line in text.split("\n"))


RUN = "import sys; sys.path[:0] = {path!r}; from ell0.cli import main; sys.exit(main({words!r}))"


def command(*words: object) -> list[str]:
    return [sys.executable, "-c", RUN.format(path=sys.path, words=[str(word) for word in words])]


def test_a_stream_that_cannot_encode_gets_a_question_mark(tiny: Path, out: Path) -> None:
    words = command("run", tiny, "--out", out, "--device", "cpu")
    # The locale is ASCII, too, so that every text file is read as what it is.
    plain = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(words, capture_output=True, timeout=600, env={**os.environ, **plain})
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout
    assert (out / "report.html").exists()


def test_a_run_goes_on_when_its_reader_leaves(tiny: Path, out: Path) -> None:
    (out / "verdicts" / "0.safetensors").unlink()
    read, write = os.pipe()
    os.close(read)
    words = command("run", tiny, "--out", out, "--device", "cpu")
    assert subprocess.run(words, timeout=600, stdout=write, stderr=write).returncode == 0
    os.close(write)
    assert (out / "verdicts" / "0.safetensors").exists()
    assert (out / "report.html").exists()


@pytest.mark.parametrize(("words", "code"), [(("--help",), 0), (("run", "--help"), 0), (("--no-such",), 2)])
def test_a_help_whose_reader_leaves(words: tuple[str, ...], code: int) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command(*words), timeout=600, stdout=write, stderr=write)
    os.close(write)
    assert bool(done.returncode) == bool(code)


def test_a_printed_recipe_says_the_same(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(tiny, 'name = "F(0)"', 'name = "F\u202e\U000e0001(0)"')
    assert main(["run", str(tiny), "--print"]) == 0
    text = capsys.readouterr().out
    assert r'name = "F\u202e\U000e0001(0)"' in text
    (tmp_path / "printed.toml").write_text(text)
    assert recipe.load(tmp_path / "printed.toml").classifiers == recipe.load(tiny).classifiers


def test_closed_streams_are_no_error(tiny: Path, out: Path) -> None:
    words = command("run", tiny, "--out", out, "--device", "cpu")
    assert subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *words], timeout=600).returncode == 0


USER = 'name = "{name}"\nsummary = "a user"\nuse = ["{other}"]\n[data]\nfile = "tiny.npz"\nvalidation = true\n'


def complaint(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words, "--device", "cpu", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("ell0: ")
    assert said.count("\n") == 1
    return said


def test_ordinary_mistakes_are_one_sentence(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, other in (("a", "b"), ("b", "a")):
        Path(f"{name}.toml").write_text(USER.format(name=name, other=other))
    assert "a.toml: use must name recipes that train classifiers themselves" in complaint(["run", "a.toml"], capsys)
    measure = '[[measure]]\nwhat = "clean_accuracy"\n'
    Path("user.toml").write_text(USER.format(name="user", other="tiny") + measure)
    for out in ("runs/tiny", "runs/../runs/tiny"):
        assert "out must be another folder than that of tiny" in complaint(["run", "user.toml", "--out", out], capsys)
    Path("lines.toml").write_bytes(tiny.read_bytes().replace(b"\n", b"\r\n"))
    assert main(["run", "lines.toml", "--print"]) == 0
    assert capsys.readouterr().out == tiny.read_text()
    Path("deep.toml").write_text(f"a = {'[' * 9999}")
    assert "deep.toml must be TOML" in complaint(["run", "deep.toml"], capsys)
    for old, new in (("queries = 5\n", f"queries = {10**20}\n"), ("epochs = 3\n", f"epochs = 3\nseed = {2**64}\n")):
        text = tiny.read_text()
        edited(tiny, old, new)
        assert "less than 2**63" in complaint(["run", "tiny.toml"], capsys)
        tiny.write_text(text)
    for old in ("beta = 10.0\n", "rates = [0.05]\n", "value = "):
        text = tiny.read_text()
        edited(tiny, old, f"{old.split()[0]} = {10**400} # ")
        complaint(["run", "tiny.toml"], capsys)
        tiny.write_text(text)
    for option in ("--queries", "--budget", "--batch", "--rows", "--steps"):
        complaint(["attack", "ell0.models:mlp", "--data", "tiny.npz", option, str(10**20)], capsys)


def test_rows_that_are_no_rows_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Results("a", "b").save(tmp_path / "a.json")
    for rows in (
        f'[{{"what": "a", "value": {10**400}}}]',
        "[1, 2]",
        '{"a": 1}',
        '[{"what": "a", "value": 1, "decided": {"b": "c"}}]',
    ):
        path.write_text(f'{{"schema": 2, "name": "a", "command": "b", "rows": {rows}}}')
        assert main(["report", str(path), "--out", str(tmp_path / "a.html")]) == 1
        assert "a.json is not a results file" in capsys.readouterr().err
