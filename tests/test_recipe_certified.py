"""Certificates in recipes, on the command line and on the page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ell0 import L0Ball, certify, data, models, recipe, report
from ell0.certify.certificates import NetworkBounds
from ell0.cli import main
from ell0.cli.certify import _broken
from ell0.common import digest
from ell0.recipe.verdicts import Verdicts, certified_radii, decided
from ell0.report.sections import certified_section
from ell0.results import Measurement, Results
from ell0.train import load_checkpoint, save_checkpoint
from tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINED = """
[[classifier]]
name = "F(3) certified"
model = { name = "mlp", k = 3, hidden = [8] }
[classifier.training]
epochs = 6
batch = 16
rates = [0.02]
optimizer = "adam"
certified = { budget = 2, ramp = 0.5, power = 0.1 }
[[measure]]
what = "certified_accuracy"
classifiers = ["F(2)", "F(3) certified"]
budgets = [1, 2]
[[measure]]
what = "certified_accuracy"
classifiers = ["F(3) certified"]
budgets = [1, 2]
beta = [1.0]
method = "ibp"
rows = 20
[[measure]]
what = "clean_accuracy"
"""


def added(tiny: Path, text: str) -> Path:
    tiny.write_text(tiny.read_text().replace('[[measure]]\nwhat = "clean_accuracy"\n', text, 1))
    return tiny


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proven")
    return recipe.run(added(write_recipe(folder), TRAINED), out=folder / "run", device="cpu")


def test_a_recipe_certifies(certified: Path) -> None:
    results = Results.load(certified / "results.json")
    x, y = data.read_npz(certified.parent / "tiny.npz")
    network = recipe.model(load_checkpoint(certified / "f3certified"))
    radii = certify.radius(network.eval(), x, y)
    for budget in (1, 2):
        of = {"what": "certified_accuracy", "classifier": "F(3) certified", "budget": budget}
        row, boxed = results.find(**of, method="best"), results.find(**of, beta=1.0)
        assert (row["value"], row["n"]) == (float((radii >= budget).double().mean()), len(x))
        assert (boxed["n"], boxed["method"]) == (20, "ibp")
    median = results.find(what="certified_radius", classifier="F(3) certified", method="best")
    assert median["value"] == float(radii.double().quantile(0.5))
    there, read = [row.key for row in results.rows], recipe.load(certified / "recipe.toml")
    assert all(row in there for row in read.asked())
    assert read.classifiers[-1].objective == certify.Objective(2, ramp=0.5, power=0.1)


def test_every_share_keeps_its_rows(certified: Path) -> None:
    x, y = data.read_npz(certified.parent / "tiny.npz")
    network = recipe.model(load_checkpoint(certified / "f3certified")).eval()
    with torch.no_grad():
        right = network(x).argmax(1) == y
    results, kept = Results.load(certified / "results.json"), 0
    for row in results.rows:
        if row.what in ("clean_accuracy", "robust_accuracy", "certified_accuracy") and "over" not in row:
            verdicts, n = row.row_verdicts(), row["n"]
            assert row.rows_sha256 == digest(x[:n], y[:n])
            assert not row.decided or verdicts.sum() == n - sum(row.decided.values())
            kept += 1
            if row["classifier"] == "F(3) certified":
                assert verdicts.equal(right) if row.what == "clean_accuracy" else not (verdicts & ~right[:n]).any()
    assert kept > 20
    own = {"classifier": "F(3) certified", "budget": 1}
    attacked = results.find(attack="worst case", beta=10.0, **own).row_verdicts()
    proven = results.find(what="certified_accuracy", method="best", **own).row_verdicts()
    assert proven.equal(certify.radius(network, x, y) >= 1)
    assert not (proven[: len(attacked)] & ~attacked).any()


def test_the_sandwich_is_in_the_worst_case(certified: Path) -> None:
    results = Results.load(certified / "results.json")
    for name, budget, beta in product(("F(2)", "F(3) certified"), (1, 2), (1.0, 10.0)):
        row = results.find(attack="worst case", classifier=name, budget=budget, beta=beta)
        assert 0 <= row["certified"] <= row["value"]
    assert "certified" not in results.find(attack="worst case", classifier="F(0)", budget=1, beta=1.0)
    assert "Proven and broken" in report.page([certified])


def test_certificates_come_first_and_worst_cases_last(certified: Path) -> None:
    whats = [task.what for task in recipe.load(certified / "recipe.toml").tasks]
    turns = [{"certified_accuracy": 0, "worst_case": 2}.get(what, 1) for what in whats]
    assert turns == sorted(turns)
    assert set(turns) == {0, 1, 2}
    pixels, clean = (task for task in recipe.load("cifar-fpa").tasks if "method" not in task.row)
    assert pixels.unit == "pixel"
    assert clean.shares_rows(pixels)  # in whatever unit


def test_a_certificate_and_an_attack_that_disagree_stop_a_run() -> None:
    certificate = Verdicts.certificate(math.inf, torch.tensor([-1, 2, 3]))
    fine = Verdicts(10.0, ("clean", "rs"), torch.tensor([0, 1, -1]), torch.tensor([0, 3, -1]))
    for one, other in product((certificate, fine), repeat=2):
        one.check(other)
    broken = Verdicts(10.0, ("clean", "rs"), torch.tensor([0, 1, 1]), torch.tensor([0, 3, 3]))
    for one, other in ((certificate, broken), (broken, certificate)):
        with pytest.raises(ValueError, match="row 2 is certified for 3 changes, and rs broke it with 3"):
            one.check(other)
    Verdicts.certificate(1.0, torch.tensor([-1, 2, 3])).check(broken)  # the error lies outside its box


def test_what_is_proven_is_counted_on_all_rows_and_in_the_box() -> None:
    # The second has not all rows.
    evidence = [Verdicts.certificate(b, torch.tensor(radii)) for b, radii in ((5.0, [1, 0, 2]), (math.inf, [2, 2]))]
    assert certified_radii([], 3, 1.0) is None
    assert (found := certified_radii(evidence, 3, 5.0)) is not None
    assert found.tolist() == [1, 0, 2]
    assert (found := certified_radii(evidence, 2, 5.0)) is not None
    assert found.tolist() == [2, 2]  # the better of two proofs of a row
    assert certified_radii(evidence, 3, 6.0) is None
    assert decided(evidence, 3, 3)[0] == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TRAINED.replace('classifiers = ["F(2)", "F(3) certified"]\n', ""), "F(0): certified accuracy"),
        (TRAINED.replace("budgets = [1, 2]", "budgets = [1, 4]", 1), "no certificate exists"),
        (TRAINED.replace("power = 0.1", "power = 1.5"), "certified: power must be 0 or lie in [0.001, 1], got 1.5"),
        (TRAINED.replace('method = "ibp"', 'method = "ipb"'), "did you mean 'ibp'"),
    ],
)
def test_what_cannot_be_certified_is_said_before_anything_is_trained(
    tiny: Path, tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe.run(added(tiny, text), out=tmp_path / "run", device="cpu")
    assert not list((tmp_path / "run").glob("*/checkpoint.safetensors"))


def certify_words(run: Path, folder: Path) -> list[str]:
    x, y = data.read_npz(run.parent / "tiny.npz")
    np.savez(folder / "mine.npz", x=x, y=y)
    return ["certify", str(run / "f3certified"), "--data", str(folder / "mine.npz"), "--device", "cpu"]


def test_the_command_certifies_a_checkpoint(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = certify_words(certified, tmp_path)
    file = tmp_path / "certified.json"
    assert main([*words, "--budget", "2", "--budget", "1", "--out", str(file), "--quiet"]) == 0
    assert "2 features changed, any value" in capsys.readouterr().out
    results, run = Results.load(file), Results.load(certified / "results.json")
    assert results.command == "ell0 certify f3certified --budget 2 --budget 1 --data mine.npz"
    for budget in (1, 2):
        what = {"what": "certified_accuracy", "classifier": "F(3) certified", "budget": budget, "method": "best"}
        assert results.find(**what)["value"] == run.find(**what)["value"]
    assert main([*words, "--budget", "2", "--beta", "1", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][-1]["beta"] == 1.0
    for wrong, said in (
        (["--budget", "1", "--budget", "4"], "no certificate exists"),
        (["--budget", "-1"], "budget must be an int >= 0, got -1"),
        (["--beta", "0"], "beta must be a number > 0"),
        (["--rows", "25"], "rows must satisfy 1 <= rows <= 24, the rows of the data, got 25"),
    ):
        assert main([*words, *wrong, "--quiet"]) == 1
        assert said in capsys.readouterr().err
    assert main([*words, "--json", "--quiet"]) == 0  # of 1, 2, 4 and 8 only what k = 3 can bear
    shares = json.loads(capsys.readouterr().out)["rows"][:-1]
    assert [row["budget"] for row in shares] == [0, 1, 2]


def test_the_command_has_certificates_challenged(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*certify_words(certified, tmp_path), "--quiet", "--challenge", "--queries", "30", "--steps", "10"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"] == "ell0 certify f3certified --challenge --data mine.npz --queries 30 --steps 10"
    row = found["rows"][-1]
    share = next(one for one in found["rows"] if one.get("budget") == 1)
    assert (row["what"], row["value"]) == ("certificates_broken", 0)
    assert row["n"] == round(share["value"] * share["n"]) > 0
    # A bound that claims too much falls, and that is said.
    monkeypatch.setattr(NetworkBounds, "radius", lambda *given, **_: torch.full_like(given[2], 3))
    file = tmp_path / "certified.json"
    assert main([*words, "--out", str(file)]) == 4
    told = capsys.readouterr()
    assert (told.out, file.exists()) == ("", False)
    assert "certificates do not hold, so nothing is shown as proven" in told.err
    assert re.search(r"row \d+, proven for 3 changes, falls to sparse_rs", told.err)
    # The ball of the command is that of the attacks.
    challenge = Mock(return_value=certify.Challenge(24, torch.tensor([1]), ("spy",), ("spy",), ()))
    monkeypatch.setattr(certify, "challenge", challenge)
    assert main([*words, "--beta", "2"]) == 4
    assert "row 1, proven for 3 changes, falls to spy" in capsys.readouterr().err
    assert repr(challenge.call_args.args[4]) == repr(L0Ball(0, low=-2.0, high=2.0))


def test_broken_rows_have_the_numbers_of_the_data() -> None:
    found = certify.Challenge(3, torch.tensor([0, 2]), ("sparse_rs", "adaptive"), ("sparse_rs", "adaptive"), ())
    assert list(_broken(found, rank=1, ranks=2, radii=torch.arange(6))) == [
        "row 1, proven for 1 changes, falls to sparse_rs",
        "row 5, proven for 5 changes, falls to adaptive",
    ]


def test_the_median_is_over_all_radii_whatever_budgets_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network that copies two inputs to its logits: in a box that holds them no change can turn the answer."""
    words = {"name": "mlp", "k": 1, "in_features": 4, "hidden": [4], "classes": 2, "clamp": False}
    network = models.mlp(1, in_features=4, hidden=(4,), classes=2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network[-1].bias.copy_(torch.tensor([1.0, 0.0]))  # type: ignore[operator]
    path = save_checkpoint(tmp_path / "sure.safetensors", network, {"model": words})
    np.savez(tmp_path / "mine.npz", x=np.zeros((3, 4), np.float32), y=np.zeros(3, np.int64))
    asked = ["certify", str(path), "--data", str(tmp_path / "mine.npz"), "--beta", "1", "--budget", "1"]
    assert main([*asked, "--json", "--quiet", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][-1]["value"] == 4


def certified_row(budget: int, value: float, **more: Any) -> Measurement:
    entries = {"classifier": "F", "unit": "feature", "budget": budget, **more}
    return Measurement.of("certified_accuracy", value, **entries)


def test_the_gap_is_that_of_the_rows_attacked() -> None:
    certified = [certified_row(1, 0.6), certified_row(2, 0.4), certified_row(1, 0.7, beta=1.0)]
    worst = [
        certified_row(1, 0.9, attack="worst case", beta=1.0, certified=0.8),
        certified_row(1, 0.75, attack="worst case", beta=100.0, certified=0.65),
    ]
    radius = Measurement.of("certified_radius", 1.0, classifier="F", low=0.0, high=2.0)
    part = certified_section(certified, [radius], worst, "pixels")
    assert part.table is not None
    any_value, alone, boxed = part.table.lines
    shown = [(getattr(line[4], "value", line[4]), line[-1]) for line in (any_value, alone, boxed)]
    assert shown == [("75.0\u00a0%", "10.0\u00a0%"), ("\N{EN DASH}",) * 2, ("90.0\u00a0%", "10.0\u00a0%")]
    *_, chart = part.charts  # the box has one budget alone, no curve
    assert [(line.name, [(p.x, p.y) for p in line.points]) for line in chart.series] == [
        ("certified", [(1, 60.0), (2, 40.0)]),
        ("stands under attack", [(1, 75.0)]),
    ]
    assert part.certified == {"bounds": True, "votes": {}, "medians": ["F 1 (0\N{EN DASH}2)"]}


def test_the_curves_are_those_of_the_same_rows() -> None:
    """Of fewer rows more may be lost than is proven of all."""
    certified = [certified_row(m, value, n=100) for m, value in ((1, 0.9), (2, 0.8), (3, 0.1))]
    worst = [
        certified_row(m, value, attack="worst case", beta=1.0, n=10, certified=proven)
        for m, value, proven in ((1, 0.8, 0.7), (2, 0.6, 0.5))
    ]
    for rows, points, note in (
        (worst, [(1, 70.0), (2, 50.0)], "any value; the 10 rows that were attacked"),
        ([replace(row, n=100) for row in worst], [(1, 90.0), (2, 80.0), (3, 10.0)], "any value"),
    ):
        *_, chart = certified_section(certified, [], rows, "inputs").charts
        proven, attacked = chart.series
        assert chart.note == note
        assert [(p.x, p.y) for p in proven.points] == points
        assert [(p.x, p.y) for p in attacked.points] == [(1, 80.0), (2, 60.0)]


def test_certificates_of_other_terms_are_lines_of_their_own() -> None:
    certified = [certified_row(m, 1 / m, **more) for more in ({}, {"method": "ibp"}, {"unit": "pixel"}) for m in (1, 2)]
    part = certified_section(certified, [], [], "inputs")
    notes = ["any value", "any value, by ibp", "any value, counted in pixels"]
    assert [chart.note for chart in part.charts] == notes
    assert all(len(line.points) == 2 for chart in part.charts for line in chart.series)
    assert part.table is not None
    assert [line[2] for line in part.table.lines] == [note for note in notes for _ in (1, 2)]


def test_the_curve_begins_at_clean_accuracy_and_has_the_published_medians() -> None:
    sure = {"classifier": "G", "beside": {"confidence": 0.9}}
    certified = [certified_row(m, 0.9 - m / 10, n=9, **more) for more in ({}, sure) for m in (4, 2)]
    certified += [certified_row(m, 0.1, beta=1.0) for m in (2, 4)]
    clean = [Measurement.of("clean_accuracy", value, classifier="F", n=n) for value, n in ((0.4, 3), (0.95, 9))]
    quoted = [Measurement.of("certified_radius", 7, classifier="A", unit=unit) for unit in ("feature", "pixel")]
    quoted.append(Measurement.of("clean_accuracy", 0.5, classifier="A"))
    any_value, boxed = certified_section(certified, [], [], "inputs", clean, quoted).charts
    lines = {line.name: [(p.x, round(p.y, 9)) for p in line.points] for line in any_value.series}
    assert lines == {
        "F": [(0, 95.0), (2, 70.0), (4, 50.0)],
        "G, with 90.0\u00a0% confidence": [(2, 70.0), (4, 50.0)],
        "A, published median 7": [(7, 50.0)],
    }
    assert [line.published for line in any_value.series] == [False, False, True]
    assert (any_value.note, any_value.y.label) == ("any value", "certified accuracy")
    assert [line.name for line in boxed.series] == ["F"]
    drawing = any_value.drawing()
    assert len(drawing["lines"]) == 2
    assert [kind for kind, _, _ in drawing["marks"] if "paper" in kind] == ["c2 d2 paper"]
