"""Every Python example of README.md and docs/ runs and reaches a sensible result."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ell0

ROOT = Path(__file__).resolve().parent.parent
Names = dict[str, Any]


def accuracy(names: Names) -> float:
    return float((names["model"](names["x"]).argmax(1) == names["y"]).float().mean())


def readme(names: Names) -> None:
    own, attacked, certified = names["evaluation"], names["attacked"], names["certified"]
    assert own.clean_accuracy > 0.85
    assert 0 < own.robust_accuracy < 0.4
    assert not own.flags
    assert "3 features changed, values in [0, 1]" in str(own)
    assert attacked.clean_accuracy > 0.85
    assert 0.45 < certified[2] <= attacked.robust_accuracy
    assert certified[2] < certified[1]


def attacks(names: Names) -> None:
    assert names["evaluation"].clean_accuracy > 0.8
    assert not names["evaluation"].flags
    x, model = names["x"], names["my_model"]
    for name in ("normalised", "shares", "second", "last", "arrays"):
        expected = model(x).log_softmax(1) if name == "shares" else model(x)
        torch.testing.assert_close(names[name](x), expected, msg=name)
    assert 60 < names["result"].success.sum() <= 100 - 100 * names["evaluation"].robust_accuracy


def training(names: Names) -> None:
    assert accuracy(names) > 0.8
    assert names["out"].shape == (2, 20, 5)


def certificates(names: Names) -> None:
    assert names["shares"][2] > 0.4
    assert (names["lower"] <= names["upper"]).all()
    assert names["radii"].max() >= 2


def scaling(names: Names) -> None:
    assert names["evaluation"].clean_accuracy > 0.9
    assert names["evaluation"].robust_accuracy > 0.1


def theory(names: Names) -> None:
    assert names["classifier"].score(names["x"][300:], names["y"][300:]) > 0.9
    assert (names["radii"] >= 2).mean() > 0.5
    assert names["search"].best_score_ > 0.8


def export(names: Names) -> None:
    with torch.no_grad():
        logits = names["model"].eval()(names["x"])
        torch.testing.assert_close(names["program"](names["x"]), logits)
        assert torch.equal(names["again"](names["x"]), logits)


def tutorial_proven(names: Names) -> None:
    near, far, clamped = (names[name].robust_accuracy for name in ("dense_near", "dense_far", "clamped_far"))
    assert far < 0.1 < 0.25 < near
    assert abs(near - clamped) < 0.05
    shares, attacked = names["shares"], names["proven_far"].robust_accuracy
    assert 0.5 < shares[2] <= attacked
    assert attacked > near
    assert names["tried"].tried > 10


def tutorial_audit(names: Names) -> None:
    assert any("zero or NaN gradients" in flag for flag in names["weak"].flags)
    assert names["found"].robust_accuracy < 0.3 < 0.6 < names["weak"].robust_accuracy
    assert names["changed"][names["worst"]] == 1


def tutorial_malware(names: Names) -> None:
    assert names["evasion"](names["hardened"], 5) < 0.2 < 0.4 < names["evasion"](names["plain"], 5)
    assert names["evaluation"].robust_accuracy < 0.8
    assert any("outside the box" in flag for flag in names["evaluation"].flags)


DOCUMENTS: dict[str, Callable[[Names], None]] = {
    "README.md": readme,
    "docs/attacks.md": attacks,
    "docs/training.md": training,
    "docs/certificates.md": certificates,
    "docs/export.md": export,
    "docs/scaling.md": scaling,
    "docs/theory.md": theory,
    "docs/tutorial-audit.md": tutorial_audit,
    "docs/tutorial-malware.md": tutorial_malware,
    "docs/tutorial-proven.md": tutorial_proven,
}


ELSEWHERE = {"docs/tools.md"}  # in test_adapters.py, with the libraries or stand-ins for them


def blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def test_every_document_with_an_example_is_checked() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert {str(path.relative_to(ROOT)) for path in documents if blocks(path)} == {*DOCUMENTS, *ELSEWHERE}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_examples_reach_a_sensible_result(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: Names = {}
    monkeypatch.chdir(tmp_path)
    fit = ell0.train.fit

    def checked(model: nn.Module, data: tuple[Tensor, Tensor], *arguments: Any, **named: Any) -> Any:
        found = fit(model, data, *arguments, **named)
        with torch.no_grad():
            learnt = (copy.deepcopy(model).eval()(data[0]).argmax(1) == data[1]).float().mean()
        assert learnt > 0.75, "the example trains nothing"
        return found

    monkeypatch.setattr(ell0.train, "fit", checked)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks(ROOT / document):
            exec(compile(block, document, "exec"), names)
    DOCUMENTS[document](names)
