"""Runs of recipes: what they measure and leave, and that one killed anywhere ends with the same figures."""

from __future__ import annotations

import errno
import math
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import ell0
from ell0 import recipe, report
from ell0.common import Step, digest
from ell0.data import SETS
from ell0.evaluation import Evaluation, cascade
from ell0.files import read_tensors, write_tensors
from ell0.recipe import gallery, measuring, running
from ell0.recipe.measuring import Subject, measure
from ell0.recipe.models import build
from ell0.recipe.plan import BoxedAttack, Task
from ell0.recipe.verdicts import Verdicts
from ell0.results import Measurement, Results, median
from ell0.threat import L0Ball
from ell0.train import load_checkpoint
from tiny_recipe import edited

pytestmark = pytest.mark.usefixtures("one_thread")


def figures(run: Path) -> list[Measurement]:
    """The rows of a run without times."""
    rows = Results.load(run / "results.json").rows
    return [replace(row, seconds=None) for row in rows if not row.what.endswith("_seconds")]


def weights(run: Path) -> dict[str, str]:
    paths = sorted(run.glob("*/checkpoint.safetensors"))
    return {path.parent.name: digest(*map(digest, load_checkpoint(path).tensors.values())) for path in paths}


def same_runs(one: Path, other: Path) -> bool:
    return (figures(one), weights(one)) == (figures(other), weights(other))


def test_a_run_leaves_what_the_report_reads(tiny: Path, tmp_path: Path) -> None:
    stages: list[Step] = []
    out = recipe.run(tiny, out=tmp_path / "run", device="cpu", progress=stages.append)
    names = {path.name for path in out.iterdir()}
    assert names == {".format", ".lock", "recipe.toml", "results.json", "gallery.safetensors", "verdicts", "f0", "f2"}
    assert (out / "recipe.toml").read_bytes() == tiny.read_bytes()
    assert len((out / "f2" / "log.jsonl").read_text().splitlines()) == 4
    results = Results.load(out / "results.json")
    assert (results.name, results.command, results.recipe, results.seeds) == ("tiny", "ell0 run tiny.toml", "tiny", [0])
    whats = [(row["what"], row["classifier"]) for row in results.rows]
    for name in ("F(0)", "F(2)"):
        kinds = ("clean_accuracy", "training_seconds", "robust_accuracy", "median_distance")
        assert [whats.count((kind, name)) for kind in kinds] == [1, 1, 4 + 4, 1]
    assert [step.done for step in stages if step.stage is None] == list(range(1, (stages[0].total or 0) + 1))
    epochs = {step.done for step in stages if step.what == "epoch" and step.stage and "F(2)" in step.stage.what}
    assert epochs == {1, 2, 3, 4}


def test_rows_say_what_was_measured(whole: Path) -> None:
    results = Results.load(whole / "results.json")
    single = results.find(classifier="F(2)", attack="sparse_rs", budget=2, queries=8)
    assert (single["k"], single["adversarial"], single["beta"], single["unit"]) == (2, True, 10.0, "feature")
    assert (single["protocol"], single["n"], single["paper"], single["paper_n"]) == ("paper", 24, 0.5, 512)
    assert single["low"] <= single["value"] <= single["high"]
    assert sum("paper" in row for row in results.rows) == 1
    for budget in (1, 2):
        narrow, wide = (
            results.find(classifier="F(0)", attack="worst case", budget=budget, beta=beta) for beta in (1.0, 10.0)
        )
        assert wide["value"] <= narrow["value"]
        assert (wide["n"], wide["queries"], wide["steps"]) == (20, 8, 3)
        assert sum(wide.decided.values()) == round(20 * (1 - wide["value"]))
    median = results.find(what="median_distance", classifier="F(0)")
    assert 0 <= median["low"] <= median["value"] <= median["high"] <= 16


def test_the_gallery_holds_points_of_the_ball(whole: Path) -> None:
    arrays, _ = read_tensors(whole / "gallery.safetensors", "")
    assert arrays["labels"].tolist() == [0, 1, 2]
    for slug in ("f0", "f2"):
        assert L0Ball(2, low=-10, high=10).contains(arrays["clean"], arrays[f"{slug}/adv"]).all()
        assert (arrays[f"{slug}/adv"] != arrays["clean"]).any()
        network = recipe.model(load_checkpoint(whole / slug))
        for said, points in (("said", arrays["clean"]), ("says", arrays[f"{slug}/adv"])):
            assert network(points).argmax(1).tolist() == arrays[f"{slug}/{said}"].tolist()


def test_a_finished_run_is_not_done_again(tiny: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "results.json"}
    rows = Results.load(out / "results.json").rows
    monkeypatch.setattr(running, "measure", lambda *_: pytest.fail("something was measured"))
    recipe.run(tiny, out=out, device="cpu")
    assert Results.load(out / "results.json").rows == rows
    assert {path: path.read_bytes() for path in before} == before


class Stop(BaseException):
    """Stands for a kill between two stages."""


def test_a_run_stopped_at_any_stage_goes_on_to_the_same_figures(tiny: Path, whole: Path, tmp_path: Path) -> None:
    for moment in (5, 13, 24):
        out = tmp_path / f"stopped-{moment}"
        with pytest.raises(Stop):
            recipe.run(tiny, out=out, device="cpu", progress=Mock(side_effect=[*[None] * moment, Stop]))
        assert not (out / "gallery.safetensors").exists()
        recipe.run(tiny, out=out, device="cpu")
        assert same_runs(out, whole), moment
        assert not list(out.glob("evaluation*"))


def test_an_evaluation_stopped_in_the_middle_goes_on(
    tiny: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first box of a worst case is done, the second is not.
    calls = Mock(side_effect=[*[None] * 9, Stop, *[None] * 99])
    monkeypatch.setattr(measuring, "evaluate", lambda *given, **more: (ell0.evaluate(*given, **more), calls())[0])
    with pytest.raises(Stop):
        recipe.run(tiny, out=tmp_path / "run", device="cpu")
    assert list((tmp_path / "run").glob("evaluation*-beta*.safetensors"))
    results = tmp_path / "run" / "results.json"
    replace(Results.load(results), seconds=1000.0).save(results)
    recipe.run(tiny, out=tmp_path / "run", device="cpu")
    assert same_runs(tmp_path / "run", whole)
    assert Results.load(results).seconds >= 1000


def test_killed_processes_go_on_to_the_same_bits(tiny: Path, whole: Path, tmp_path: Path) -> None:
    code = "import sys, torch; torch.set_num_threads(1); from ell0 import recipe; "
    code += "recipe.run(sys.argv[1], out=sys.argv[2], device='cpu', progress=lambda _: print(1, flush=True))"
    killed, moments = tmp_path / "killed", random.Random(0)
    for most in (12, 6):  # stages and epochs of which a run has told, long before its end
        with subprocess.Popen([sys.executable, "-c", code, str(tiny), str(killed)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(moments.randint(1, most)):
                process.stdout.readline()
            time.sleep(moments.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
    recipe.run(tiny, out=killed, device="cpu")
    assert same_runs(killed, whole)


def test_a_recipe_uses_the_classifiers_of_another(tiny: Path, tmp_path: Path) -> None:
    user = tmp_path / "user.toml"
    user.write_text(
        'name = "user"\nsummary = "a user"\nuse = ["tiny"]\n[data]\nfile = "tiny.npz"\nvalidation = true\n'
        '[[measure]]\nwhat = "clean_accuracy"\nsplit = "validation"\n'
    )
    out = recipe.run(user, out=tmp_path / "runs" / "user", device="cpu")
    beside = tmp_path / "runs" / "tiny"
    assert not (beside / "results.json").exists()
    assert recipe.load(user).folders(out) == {"F(0)": beside / "f0", "F(2)": beside / "f2"}
    assert recipe.load(out / "recipe.toml").folders(out) == recipe.load(user).folders(out)
    results = Results.load(out / "results.json")
    assert results.find(what="clean_accuracy", classifier="F(2)", split="validation")["n"] == 6
    trained = weights(beside)
    recipe.run(tiny, out=beside, device="cpu")
    assert weights(beside) == trained
    user.write_text(user.read_text().replace("validation = true\n", ""))
    with pytest.raises(ValueError, match=r"user\.toml: data must be that of tiny"):
        recipe.load(user)


def test_a_folder_that_is_not_free_is_left_alone(tiny: Path, out: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="holds a run of this recipe already"):
        recipe.run(tiny, out=out, resume=False, device="cpu")
    edited(
        tiny,
        '[classifier.model]\nname = "mlp"\nk = 0\nhidden = [8]',
        'model = {name = "mlp", k = 0, hidden = [8]}  # so',
    )
    assert running.finished(out, recipe.load(tiny))  # the same in another layout
    edited(tiny, "epochs = 3", "epochs = 2")
    with pytest.raises(ValueError, match="holds one of another recipe"):
        recipe.run(tiny, out=out, device="cpu")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    for wrong in ("1", None):
        (out / ".format").unlink() if wrong is None else (out / ".format").write_text(wrong)
        with pytest.raises(ValueError, match="holds a run of another version of ell0: give another out"):
            recipe.run(tiny, out=out, device="cpu")
    (tmp_path / "full").mkdir()
    for file, said in ((tmp_path / "full" / "thesis.tex", "holds other files"), (tmp_path / "file", "File exists")):
        file.touch()
        with pytest.raises((ValueError, OSError), match=said):
            recipe.run(tiny, out=tmp_path / file.relative_to(tmp_path).parts[0], device="cpu")
        assert file.read_bytes() == b""
    with pytest.raises(ValueError, match="device must be such as"):
        recipe.run(tiny, out=tmp_path / "new", device="gpu")


def test_other_data_and_a_corrupted_checkpoint_are_refused(tiny: Path, out: Path, tmp_path: Path) -> None:
    path = out / "f0" / "checkpoint.safetensors"
    whole = path.read_bytes()
    for spoiled in (whole[:-7], b"\xff" * 100, b""):
        path.write_bytes(spoiled)
        with pytest.raises(ValueError, match=r"checkpoint\.safetensors") as raised:
            recipe.run(tiny, out=out, device="cpu")
        assert "\n" not in str(raised.value)
        assert path.read_bytes() == spoiled
    path.write_bytes(whole)
    with np.load(tmp_path / "tiny.npz") as file:
        arrays = dict(file)
    arrays["x_test"][0] *= 0.5
    np.savez(tmp_path / "tiny.npz", **arrays)
    with pytest.raises(ValueError, match="differs in: measured_rows"):
        recipe.run(tiny, out=out, device="cpu")


def test_a_full_disk_loses_nothing(tiny: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=[*[None] * 4, OSError(errno.ENOSPC, "No space left on device"), *[None] * 99])
    real = Results.save
    monkeypatch.setattr(Results, "save", lambda results, path: (full(), real(results, path))[1])
    with pytest.raises(OSError, match="No space left"):
        recipe.run(tiny, out=tmp_path / "run", device="cpu")
    recipe.run(tiny, out=tmp_path / "run", device="cpu")
    assert same_runs(tmp_path / "run", whole)


def evaluation(verdict: list[int], distance: list[int], attacks: list[str], beta: float) -> Evaluation:
    n = len(verdict)
    nothing = torch.zeros(n, len(attacks), dtype=torch.int64)
    return Evaluation(
        L0Ball(2, low=-beta, high=beta), dict.fromkeys(attacks, False), (1, 2), torch.tensor(verdict),
        torch.tensor(distance), torch.zeros(n, 1), nothing, nothing, torch.zeros(n) > 0,
        (0.5,) * len(attacks), 9, (f"flag {beta:g}",),
    )  # fmt: skip


def test_the_worst_case_is_over_boxes_too(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    attacks = list(cascade(queries=1, steps=1))
    # Rows: wrong from the start; broken in both boxes, nearer in the wide one; in the narrow box alone; in none.
    found = {
        1.0: evaluation([0, 2, 1, -1], [0, 2, 1, -1], attacks, 1.0),
        10.0: evaluation([0, 1, -1, -1], [0, 1, -1, -1], attacks, 10.0),
    }
    monkeypatch.setattr(Subject, "evaluate", lambda _self, _ball, beta, _attacks, _budgets, _radii: found[beta])
    one = recipe.load(tiny).classifiers[0]
    row = {"what": "robust_accuracy", "attack": "worst case", "queries": 1, "steps": 1}
    task = Task(one, "worst_case", row, (1, 2), (1.0, 10.0))
    subject = Subject(torch.nn.Identity(), torch.zeros(4, 1), torch.zeros(4), 0, Path("none"))
    rows = {(row["beta"], row["budget"]): row for row in measure(task, subject)[0]}
    assert {key: row["value"] for key, row in rows.items()} == {
        (1.0, 1): 0.5, (1.0, 2): 0.25, (10.0, 1): 0.25, (10.0, 2): 0.25,
    }  # fmt: skip
    decided = [rows[10.0, 2].decided["clean"], rows[10.0, 2].decided[attacks[0]], rows[1.0, 2].decided[attacks[1]]]
    assert decided == [1, 2, 1]
    assert rows[10.0, 1].flags == ("values within 1: flag 1", "values within 10: flag 10")
    assert sum(row.get("seconds", 0) for row in rows.values()) == len(attacks)
    # What other measures found counts on the rows they share, within their box and at their distance.
    standing = torch.tensor([-1, -1, -1, 1, 1]), torch.tensor([-1, -1, -1, 2, 1])
    wider = Verdicts(100.0, ("clean",), *torch.zeros(2, 4).long())
    near, shorter = (Verdicts(10.0, ("clean", "search alone"), *(part[:n] for part in standing)) for n in (5, 3))
    for some, value in (([near, wider], 0.0), ([wider], 0.25), ([shorter], 0.25)):
        more = {(row["beta"], row["budget"]): row for row in measure(task, subject, some)[0]}
        assert more[10.0, 2]["value"] == value
        assert {key: row["value"] for key, row in more.items() if key != (10.0, 2)} == {
            (1.0, 1): 0.5, (1.0, 2): 0.25, (10.0, 1): 0.25,
        }  # fmt: skip
        assert more[10.0, 2].decided.get("search alone", 0) == (value == 0)


def test_a_worst_case_skips_what_is_proven_within_its_box(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    attacks, given = list(cascade(queries=1, steps=1)), dict[float, Any]()

    def evaluated(_self: Subject, _ball: L0Ball, beta: float, *rest: Any) -> Evaluation:
        given[beta] = rest[-1]
        return evaluation([0, 2, 1, -1], [0, 2, 1, -1], attacks, beta)

    monkeypatch.setattr(Subject, "evaluate", evaluated)
    row = {"what": "robust_accuracy", "attack": "worst case", "queries": 1, "steps": 1}
    task = Task(recipe.load(tiny).classifiers[0], "worst_case", row, (1, 2), (1.0, 10.0))
    subject = Subject(torch.nn.Identity(), torch.zeros(4, 1), torch.zeros(4), 0, Path("none"))
    narrow = Verdicts.certificate(1.0, torch.tensor([-1, 1, 0, 2]))
    wide = Verdicts.certificate(10.0, torch.tensor([-1, 0, 0, 3]))
    for known, expected in (
        ([narrow], {1.0: [-1, 1, 0, 2], 10.0: None}),
        ([narrow, wide], {1.0: [-1, 1, 0, 3], 10.0: [-1, 0, 0, 3]}),
    ):
        rows, _ = measure(task, subject, known)
        assert given == {1.0: None, 10.0: None}  # unless it is asked for
        shares = {(found["beta"], found["budget"]): found.get("certified") for found in rows}
        assert shares[1.0, 1] == 0.5
        assert shares[10.0, 1] == (None if len(known) == 1 else 0.25)
        measure(replace(task, skip_proven=True), subject, known)
        assert {beta: None if radii is None else radii.tolist() for beta, radii in given.items()} == expected


def test_no_single_attack_beats_the_worst_case(tiny: Path, tmp_path: Path) -> None:
    edited(tiny, "queries = [4, 8]", "queries = [4, 400]\nrows = 20")
    edited(tiny, "queries = 8\nvalue", "queries = 400\nvalue")
    edited(tiny, "queries = 8\nsteps = 3", "queries = 1\nsteps = 1")
    results = Results.load(recipe.run(tiny, out=tmp_path / "run", device="cpu") / "results.json")
    found = 0
    for name, budget in product(("F(0)", "F(2)"), (1, 2)):
        of = {"classifier": name, "budget": budget, "beta": 10.0}
        worst = results.find(attack="worst case", **of)
        assert worst["value"] <= results.find(attack="sparse_rs", queries=400, **of)["value"]
        found += worst.decided["sparse_rs alone"]
    assert found > 0


def test_what_was_found_with_other_weights_is_found_again(tiny: Path, out: Path, whole: Path) -> None:
    results = Results.load(out / "results.json")
    results.rows = [replace(row, value=0.75) for row in results.rows]
    results.save(out / "results.json")
    changed, spoiled = out / "verdicts" / "0.safetensors", out / "verdicts" / "12.safetensors"
    tensors, words = read_tensors(changed, "")
    write_tensors(changed, tensors, {**words, "made_from": "others"})
    spoiled.write_bytes(b"no archive")
    recipe.run(tiny, out=out, device="cpu")
    tasks, before = recipe.load(tiny).tasks, Results.load(whole / "results.json")
    now = Results.load(out / "results.json")
    assert len(now.rows) == len(before.rows)
    for number, task in enumerate(tasks):
        for what in task.identities():
            expected = before.find(**what)["value"] if number in (0, 12) else 0.75
            assert now.find(**what)["value"] == expected


def test_a_classifier_has_its_own_seed_and_is_measured_in_eval_mode(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited(tiny, "epochs = 3", "epochs = 3\nseed = 5")
    spied, stopped = Mock(side_effect=build), Mock(side_effect=Stop)
    monkeypatch.setattr(running, "build", spied)
    monkeypatch.setattr(running, "measure", stopped)
    with pytest.raises(Stop):
        recipe.run(tiny, out=tmp_path / "run", device="cpu")
    assert not stopped.call_args.args[1].network.training
    assert [call.args[1] for call in spied.call_args_list if len(call.args) > 1] == [5, 0]


def test_only_the_same_rows_and_units_are_shared(tiny: Path) -> None:
    loaded = recipe.load(tiny)
    task = loaded.tasks[-1]
    others = [replace(task, row=task.row | row) for row in ({"split": "validation"}, {"unit": "pixel"})]
    others += [replace(task, classifier=loaded.classifiers[0]), replace(task, first=3), replace(task, box_of="mnist")]
    assert not any(task.shares_rows(other) for other in others)
    assert task.shares_rows(task)
    # What holds for any value holds in every box.
    assert task.shares_rows(replace(others[-1], betas=()))


def test_two_processes_do_not_share_a_folder(tiny: Path, whole: Path, tmp_path: Path) -> None:
    out, refused = tmp_path / "run", list[object]()

    def again(step: Step) -> None:
        if step.stage is not None:
            return
        with pytest.raises(recipe.BusyError, match="another process is at work in") as raised:
            recipe.run(tiny, out=out, device="cpu")
        refused.append(raised.value)

    recipe.run(tiny, out=out, device="cpu", progress=again)
    assert refused
    assert same_runs(out, whole)


def test_a_run_leaves_threads_alone(tiny: Path, tmp_path: Path) -> None:
    edited(tiny, 'name = "tiny"', 'name = "tiny"\nthreads = 2')
    seen: list[int] = []

    def progress(_: Step) -> None:
        seen.append(torch.get_num_threads())
        if len(seen) == 4:  # two threads for a whole run would wait for each other
            raise Stop

    with pytest.raises(Stop):
        recipe.run(tiny, out=tmp_path / "run", device="cpu", progress=progress)
    assert set(seen) == {2}
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("n", "j"), [(3, 1), (5, 1), (6, 1), (8, 1), (9, 2), (25, 8), (100, 40)])
def test_the_interval_of_a_median_is_that_of_the_tables(n: int, j: int) -> None:
    """The ranks of the sign test's table; with fewer than six rows no interval reaches 95 %, and it is the range."""
    made = evaluation([1] * n, list(range(1, n + 1)), ["a"], 1.0)
    record = replace(made, distance=made.distance.flip(0)).rho()
    assert (record.low, record.high, record.n) == (j, n + 1 - j, n)
    if n >= 6:
        assert 2 * sum(math.comb(n, i) for i in range(j)) <= 0.05 * 2**n
    assert record == (n + 1) / 2


def test_the_gallery_counts_in_the_units_of_its_budget(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited(tiny, "budgets = [1, 2]", 'unit = "pixel"\nbudgets = [6, 7]')
    edited(tiny, "budget = 2\nqueries = 8", "budget = 6\nqueries = 8")
    attack = Mock(side_effect=Stop)
    monkeypatch.setattr(gallery, "sparse_rs", attack)
    images = torch.zeros(3, 1, 4, 4), torch.arange(3)
    with pytest.raises(Stop):
        gallery.write_gallery(tiny, recipe.load(tiny), {"": nn.Linear(2, 2)}, images)
    assert repr(attack.call_args.args[3]) == repr(L0Ball(6, "pixel", -10.0, 10.0))


def subject(network: nn.Module, x: torch.Tensor, y: torch.Tensor, folder: Path) -> Subject:
    return Subject(network, x, y, 0, folder / "state")


def test_shares_over_the_rows_classified_rightly(tiny: Path, tmp_path: Path) -> None:
    edited(tiny, "rows = 20", "rows = 18\nfirst = 4\nover = 'right'")
    edited(tiny, 'beta = [10.0]\nprotocol = "paper"', "beta = [10.0]\nrows = 18\nfirst = 4\npart = 7\nover = 'right'")
    folder = recipe.run(tiny, out=tmp_path / "run", device="cpu")
    results, checked = Results.load(folder / "results.json"), 0
    x, y = (torch.from_numpy(np.load(tmp_path / "tiny.npz")[key])[4:22] for key in ("x_test", "y_test"))
    for name in ("F(0)", "F(2)"):
        network = recipe.model(load_checkpoint(folder / name.lower().replace("(", "").replace(")", "")))
        right = int((network.eval()(x).argmax(1) == y).sum())
        assert right > 0
        for one in results.select(classifier=name, what="robust_accuracy", over="right"):
            whole = results.find(**{**one.key, "over": None}, part=None)
            assert (whole.n, one.n, one["first"], one.decided, one.seconds) == (18, right, 4, {}, None)
            assert round(one.value * right) == round(whole.value * 18)
            assert one.paper == whole.paper
            checked += one.value > whole.value
    assert checked
    weaker = edited(tiny, "rows = 18\nfirst = 4\npart = 7", "rows = 7\nfirst = 4")
    alone = Results.load(recipe.run(weaker, out=tmp_path / "part", device="cpu") / "results.json")
    for one in results.select(part=7):
        same = alone.find(**{**one.key, "part": None}, over=None)
        assert (one.n, one.value, one.rows_sha256) == (7, same.value, same.rows_sha256)
    page = report.write([folder], tmp_path / "page.html").read_text()
    assert page.count("Of the rows classified rightly") == 1


def test_no_row_is_classified_rightly(tiny: Path, tmp_path: Path) -> None:
    task = replace(recipe.load(tiny).tasks[2], right=True)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    x = torch.zeros(4, 1, 4, 4)
    whole, none = measure(task, subject(network, x, (network(x).argmax(1) + 1) % 3, tmp_path))[0]
    assert (whole.value, whole.n, none.value, none.n, none["over"]) == (0.0, 4, 0.0, 0, "right")


class Mean(nn.Module):
    """Class 1 where the sum of all numbers, however they are spread, is above 0.5."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.full((len(x),), 0.5), x.flatten(1).sum(1)], 1)


def test_values_lie_in_the_box_of_the_normalised_images(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors for low and high go through evaluations, their states and the worst case of several boxes."""
    loaded = recipe.load(tiny)
    x, y = torch.full((6, 3, 4, 4), -1.0), torch.zeros(6, dtype=torch.int64)
    x[:2, 0, 0, 0] = 50.0  # misclassified
    low, high = SETS["cifar10"].box(1.0)
    calls: list[tuple[Any, Any]] = []

    def spied(*given: Any, **more: Any) -> Evaluation:
        calls.append((given, more))
        return ell0.evaluate(*given, **more)

    monkeypatch.setattr(measuring, "evaluate", spied)
    row = {"what": "robust_accuracy", "attack": "worst case", "queries": 20, "steps": 3, "unit": "pixel"}
    worst = Task(loaded.classifiers[0], "worst_case", row, (1, 3), (1.0, 100.0), box_of="cifar10", right=True)
    single = replace(
        worst, what="robust_accuracy", row={**row, "attack": "sparse_rs", "budget": 1, "beta": 100.0}, betas=(100.0,),
        attack=BoxedAttack("sparse_rs", 100.0, "pixel", {"queries": 20}, "cifar10"),
    )  # fmt: skip
    found, boxes = measure(worst, subject(Mean(), x, y, tmp_path))
    values = {(one["beta"], one["budget"], one.get("over")): (one.value, one.n) for one in found}
    # 48 numbers of -1 need a lift of more than 48, which only the wide box can give with few pixels.
    assert values[1.0, 3, None] == (4 / 6, 6)
    assert values[1.0, 3, "right"] == (1.0, 4)
    assert values[100.0, 1, None] == (0.0, 6)
    assert [one.beta for one in boxes] == [1.0, 100.0]
    alone, _ = measure(single, subject(Mean(), x, y, tmp_path.parent))
    assert [(one.value, one.n) for one in alone] == [(0.0, 6), (0.0, 4)]
    (narrow, _), (_, more), (given, _) = calls
    assert torch.equal(narrow[3].low, low)
    assert torch.equal(narrow[3].high, high)
    assert str(more["state_path"]).endswith("state-beta100.safetensors")
    assert repr(given[3]) == repr(L0Ball(1, "pixel", *SETS["cifar10"].box(100.0)))


def test_a_run_in_the_box_of_a_set(tmp_path: Path) -> None:
    """From the training attack to the page, with a checkpoint that names its box."""
    path = tmp_path / "boxed.toml"
    path.write_text(
        'name = "boxed"\nsummary = "boxed"\n[data]\nname = "digits"\ntrain_rows = 64\n'
        '[[classifier]]\nname = "F(1)"\n[classifier.model]\nname = "mlp"\nk = 1\nhidden = [8]\nnormalise = true\n'
        "[classifier.training]\nepochs = 2\nrefresh = 1\nrounds = true\n[classifier.training.attack]\n"
        'name = "sparse_rs"\nbudget = 2\nqueries = 5\nbeta = 10.0\nbox = "normalised"\n'
        '[[measure]]\nwhat = "worst_case"\nbudgets = [1]\nbeta = [1.0, 10.0]\nqueries = 5\nsteps = 2\nrows = 9\n'
        'box = "normalised"\n[[measure]]\nwhat = "median_distance"\nrule = "foolbox-flat"\nrepeats = 2\n'
        'count = ["changed", "positions", "fallen"]\nrows = 30\nfirst = 9\nbox = "normalised"\n'
    )
    folder = recipe.run(path, out=tmp_path / "run", device="cpu")
    results = Results.load(folder / "results.json")
    assert {row["box"] for row in results.rows if "beta" in row} == {"normalised"}
    changed, positions, fallen = results.select(what="median_distance")
    assert [row["unit"] for row in (changed, positions, fallen)] == ["feature", "pixel", "pixel"]
    assert {row["first"] for row in (changed, positions, fallen)} == {9}
    assert changed.value == positions.value <= fallen.value  # one channel; a row may have no fallen pixel
    page = report.write([folder], tmp_path / "page.html").read_text()
    assert "within 10 times the normalised range" in page
    assert "pixels with a channel that fell" in page


def test_three_counts_of_the_same_runs(tmp_path: Path, tiny: Path) -> None:
    """Two channels of a pixel must fall, in one class of rows; one must rise, in the other."""

    class Falls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ends = torch.stack([(x[:, :2, 0, 0] < -0.5).sum(1) == 2, x[:, 2, 1, 1] > 0.5], 1).any(1)
            return torch.stack([torch.full((len(x),), 0.5), ends.float()], 1)

    x, y = torch.zeros(40, 3, 2, 2), torch.zeros(40, dtype=torch.int64)
    x[:3, 2, 1, 1] = 1.0  # misclassified
    task = recipe.load(tiny).tasks[0]
    attack = BoxedAttack("pointwise", 1.0, "feature", {"rule": "foolbox", "repeats": 1})
    row = {"what": "median_distance", "attack": "pointwise", "unit": "feature", "beta": 1.0}
    kinds = ("changed", "positions", "fallen")
    task = replace(task, what="median_distance", row=row, betas=(1.0,), attack=attack, counts=kinds)
    spied = Mock(side_effect=median)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "median", spied)
        found, (verdicts,) = measure(task, subject(Falls(), x, y, tmp_path))
    assert [(one["count"], one["unit"], one.n) for one in found] == [
        ("changed", "feature", 40), ("positions", "pixel", 40), ("fallen", "pixel", 40),
    ]  # fmt: skip
    changed, positions, fallen = (call.args[0].tolist() for call in spied.call_args_list)
    assert changed[:3] == positions[:3] == [0, 0, 0]
    assert fallen[:3] == [10_000] * 3
    # A run ends with one number that rose, or with two that fell at one pixel, which counts once.
    assert set(changed[3:]) == {1, 2}
    assert set(positions[3:]) == {1}
    assert fallen[3:] == [1 if count == 2 else 10_000 for count in changed[3:]]
    assert verdicts.verdict.tolist() == [0] * 3 + [1] * 37
    # What only the network in TF32 gets wrong is not broken.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring.Subject, "fast_network", Falls())
        _, (verdicts,) = measure(task, subject(nn.Sequential(Falls(), nn.Softmin(1)), x, y, tmp_path))
    assert verdicts.verdict.tolist() == [-1] * 40
