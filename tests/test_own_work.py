"""A user's own data, own network and own weights: in recipes, on the command line, and on pages."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ell0
from ell0 import recipe, train
from ell0.cli import main
from ell0.files import read_tensors
from ell0.recipe import models
from ell0.recipe.splits import DataSource, read_splits
from ell0.recipe.toml import to_toml
from ell0.results import Results
from report_runs import Outline

pytestmark = pytest.mark.usefixtures("one_thread")

NETWORK = """
from pathlib import Path
import ell0
import torch
Path("ran").touch()
def build(in_shape=(1, 6, 6), classes=3, width=4):
    c, h, w = in_shape
    layers = [torch.nn.Conv2d(c, width, 3), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width * (h - 2) * (w - 2), classes))
class Linear(torch.nn.Sequential):
    def __init__(self, in_features=36, k=0):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(in_features, 3))
cnn = build()
ready, plain = Linear(), torch.nn.Sequential(*Linear())
def broken():
    return torch.nn.Flatten(0)
def asking(in_shape, classes):
    return build(in_shape, classes)
def forest():
    from sklearn.ensemble import RandomForestClassifier
    x = torch.rand(30, 36, generator=torch.Generator().manual_seed(0)).numpy()
    return RandomForestClassifier(3, random_state=0).fit(x, [0, 1, 2] * 10)
class Answers(Linear):
    def forward(self, x):
        return {"logits": super().forward(x), "features": x}
def wrapped():
    return ell0.wrap(Answers())
"""

RECIPE = """
name = "mine"
summary = "My own rows, and my own network"
[data]
file = "mine.npz"
low = 0.0
high = 1.0
[[classifier]]
name = "mine, seed {seed}"
[classifier.model]
python = "my_nets:Linear"
[classifier.training]
epochs = 4
batch = 16
rates = [0.05]
optimizer = "adam"
seed = [0, 1]
[[measure]]
what = "clean_accuracy"
[[measure]]
what = "worst_case"
budgets = [2]
beta = [4.0]
queries = 9
steps = 2
rows = 6
"""


def rows(n: int) -> dict[str, Any]:
    """Images in [0, 1], each bright in two lines of its class."""
    draw = np.random.default_rng(n)
    y = np.arange(n) % 3
    x = draw.uniform(0, 0.6, (n, 1, 6, 6)).astype(np.float32)
    for i, label in enumerate(y):
        x[i, 0, 2 * label : 2 * label + 2] += 0.4
    return {"x": x, "y": y}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, data and a module of a name of its own: a module is imported once."""
    trained, tested = rows(90), rows(24)
    np.savez(tmp_path / "mine.npz", x_train=trained["x"], y_train=trained["y"], x_test=tested["x"], y_test=tested["y"])
    np.savez(tmp_path / "rows.npz", **tested)  # the same rows for `ell0 attack` alone
    name = f"my_nets_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(NETWORK)
    (tmp_path / "mine.toml").write_text(RECIPE.replace("my_nets", name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def module(home: Path) -> str:
    return next(home.glob("my_nets_*.py")).stem


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_a_recipe_takes_own_rows_and_own_code(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mine.toml", "--device", "cpu", "--quiet"]) == 1
    assert f"to run the code {module(home)}:Linear: read it, then add --allow-code" in told(capsys)
    assert not (home / "ran").exists()
    assert main(["run", "mine.toml", "--device", "cpu", "--quiet", "--allow-code"]) == 0
    assert (home / "ran").exists()
    results = Results.load(home / "runs" / "mine" / "results.json")
    assert results.command == "ell0 run mine.toml --allow-code"
    for seed in (0, 1):
        assert results.find(what="clean_accuracy", classifier=f"mine, seed {seed}").value > 0.8
    assert {(row["beta"], row["box"]) for row in results.select(attack="worst case")} == {(4, "[0, 1]")}
    page = Outline((home / "runs" / "mine" / "report.html").read_text())
    assert "set to any value within 4 times [0, 1]" in page.text
    gallery, _ = read_tensors(home / "runs" / "mine" / "gallery.safetensors", "")
    assert gallery["box"].tolist() == [0, 1]
    changed = gallery["mineseed0/adv"][gallery["mineseed0/adv"] != gallery["clean"]]
    assert (float(changed.min()), float(changed.max())) == (-1.5, 2.5)
    # The checkpoint names its code, so it is as careful.
    words = ["attack", "runs/mine/mineseed0", "--data", "rows.npz", "--budget", "1", "--attack", "sparse_rs"]
    assert main([*words, "--quiet"]) == 1
    assert "allow_code must be true" in told(capsys)
    assert main([*words, "--quiet", "--allow-code", "--json"]) == 0
    shown = [json.loads(capsys.readouterr().out)["rows"]]
    words[words.index("rows.npz")] = "mine.npz"  # its test split
    assert main([*words, "--quiet", "--allow-code", "--json"]) == 0
    shown.append(json.loads(capsys.readouterr().out)["rows"])
    assert [row["value"] for row in shown[0]] == [row["value"] for row in shown[1]]


def test_a_model_of_ones_own_is_measured_as_it_is_without_training(home: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
    data = tuple(map(torch.from_numpy, (rows(90)["x"], rows(90)["y"])))
    config = train.TrainConfig(epochs=8, batch=16, rates=(0.02,), optimizer="adam")
    train.fit(network, (data[0], data[1]), config, out=home / "fitted")
    content = tomllib.loads((home / "mine.toml").read_text())
    one = {"name": "given", "model": {"python": f"{module(home)}:Linear"}, "weights": "fitted"}
    bare = {"name": "bare", "model": {"python": f"{module(home)}:ready"}}
    content |= {"classifier": [one, bare], "measure": content["measure"][:1]}
    (home / "mine.toml").write_text(to_toml(content))
    folder = recipe.run(home / "mine.toml", device="cpu", allow_code=True)
    results = Results.load(folder / "results.json")
    assert [row.what for row in results.rows] == ["clean_accuracy", "clean_accuracy"]
    x, y = (torch.from_numpy(rows(24)[name]) for name in "xy")
    assert results.find(classifier="given").value == (network.eval()(x).argmax(1) == y).float().mean().item()
    assert results.find(classifier="given").value > results.find(classifier="bare").value
    saved = train.load_checkpoint(folder / "given")
    torch.testing.assert_close(saved.tensors, dict(network.state_dict()))
    assert recipe.run(home / "mine.toml", device="cpu", allow_code=True) == folder
    assert not (folder / "given" / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (":Linear", "", "model: model must be package.module:name, got 'my_nets"),
        (":Linear", ":Liner", "did you mean 'Linear'?"),
        (":Linear", ":broken", "model must give logits of shape (1, 3) for a row (1, 6, 6), got a tensor (36,)"),
        (":Linear", ":Answers", "got dict; return ell0.wrap(network) if the logits are part of its answer"),
        (":Linear", ":ready\"\nk = \"1", "k must be a list of different values, each an int >= 0"),
        (":Linear", ":ready\"\nwidth = 3\ndummy = \"1", "model must be a function to take width, dummy, got"),
        (":Linear", ":torch", "is not a callable object"),
        (":Linear", ":Linear\"\nwidth = 3\ndummy = \"1", "unexpected keyword argument"),
        ("my_nets", "no_nets", "No module named 'no_nets"),
        ("[classifier.training]", "[classifier]\nweights = 'x'", "TOML"),
        ("low = 0.0\n", "", "data: low and high must both be given, low below high, got None and 1.0"),
        ("high = 1.0", "high = 0.5", "must have values within low and high, got"),
        ("low = 0.0\nhigh = 1.0\n", "", "low and high must be given for values of"),
        ("file = \"mine.npz\"", "name = \"digits\"", "data: unknown key 'low'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_own_work_is_one_sentence(home: Path, old: str, new: str, said: str) -> None:
    text = (home / "mine.toml").read_text()
    assert old in text
    (home / "mine.toml").write_text(text.replace(old, new))
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        recipe.run(home / "mine.toml", device="cpu", allow_code=True)
    assert said in str(raised.value)
    assert not (home / "runs").exists()


def test_a_network_that_returns_a_dict_is_attacked_and_wrapped_in_a_recipe(home: Path) -> None:
    words = f"attack {module(home)}:Answers --data rows.npz --attack sparse_rs --queries 9 --budget 2 --page out.html"
    assert main([*words.split(), "--quiet", "--device", "cpu"]) == 0
    assert len(Outline(Path("out.html").read_text()).all("li", "exhibit")) > 0
    content = tomllib.loads((home / "mine.toml").read_text().replace(":Linear", ":wrapped"))
    content |= {"measure": content["measure"][:1]}
    (home / "mine.toml").write_text(to_toml(content))
    folder = recipe.run(home / "mine.toml", device="cpu", allow_code=True)
    assert Results.load(folder / "results.json").find(classifier="mine, seed 1", what="clean_accuracy").value > 0.8


def test_weights_are_not_trained_further(home: Path) -> None:
    text = (home / "mine.toml").read_text().replace("[classifier.model]", 'weights = "fitted"\n[classifier.model]')
    (home / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match="classifier 1: must have weights or training, and not both"):
        recipe.load(home / "mine.toml")


def test_the_range_of_a_file_is_asked_for_unless_it_is_plain(tmp_path: Path) -> None:
    def read(low: float, high: float, box: tuple[float, float] | None = None) -> None:
        x = np.linspace(low, high, 20, dtype=np.float32).reshape(5, 4)
        y = np.arange(5) % 2
        np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        read_splits(DataSource(None, tmp_path / "a.npz", None, False, box), None)

    read(-1, 1)
    read(-0.3, 0.2)
    read(0, 255, (0, 255))
    for low, high in ((0, 1), (-1, 0), (0, 255), (-2, 0.5), (0.25, 0.75)):
        with pytest.raises(ValueError, match=f"write low = {low:g} and high = {high:g}, or a wider range"):
            read(low, high)


def test_a_model_is_built_by_what_its_function_asks_for(home: Path) -> None:
    words = {"python": f"{module(home)}:build", "width": 5}
    full = models.fitted(words, (1, 6, 6), 3)
    assert full == {**words, "in_shape": (1, 6, 6), "classes": 3}
    one, two = (models.build(full, seed=1)[0].weight for _ in range(2))  # type: ignore[index]
    torch.testing.assert_close(one, two)
    assert one.shape[0] == 5
    ready = {"python": f"{module(home)}:ready"}
    assert models.fitted(ready, (1, 6, 6), 3) == ready
    assert models.build(ready, 0) is not models.build(ready, 0)


def test_attack_writes_a_page_and_its_examples(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = models.build({"python": f"{module(home)}:Linear"}, seed=0)
    data = tuple(map(torch.from_numpy, (rows(90)["x"], rows(90)["y"])))
    config = train.TrainConfig(epochs=8, batch=16, rates=(0.02,), optimizer="adam")
    train.fit(network, (data[0], data[1]), config, out=home / "fitted")
    words = ["attack", f"{module(home)}:Linear", "--weights", "fitted", "--data", "rows.npz", "--budget", "6"]
    words += ["--attack", "sparse_rs", "--queries", "40", "--device", "cpu"]
    assert main([*words, "--page", "new/out.html", "--save-examples", "new/adv.npz", "--json"]) == 0
    shown = capsys.readouterr()
    command = json.loads(shown.out)["command"]
    assert "--weights fitted" in command
    assert "out.html" not in command
    assert shown.err.endswith("written to new/out.html\nwritten to new/adv.npz\n")
    with np.load("new/adv.npz") as file:
        x, y, x_adv, distance, by = (file[name] for name in ("x", "y", "x_adv", "distance", "by"))
    np.testing.assert_array_equal(x, rows(24)["x"])
    with torch.no_grad():
        said = network.eval()(torch.from_numpy(x_adv)).argmax(1).numpy()
    assert {"", "sparse_rs"} <= set(by.tolist()) <= {"", "clean", "sparse_rs"}
    np.testing.assert_array_equal(said != y, by != "")
    np.testing.assert_array_equal((x != x_adv).sum((1, 2, 3)), np.maximum(distance, 0))
    page = Outline(Path("new/out.html").read_text())
    assert "Clean and attacked images" in page.text
    assert len(page.all("li", "exhibit")) == 3
    assert len(page.all("rect", "changed")) == sum(max(0, distance[i]) for i in first_right(y, by))
    assert main(["report", "new/out.html", "--out", "x.html"]) == 1


def test_attack_leaves_out_what_a_model_has_no_gradient_for(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"attack {module(home)}:forest --data rows.npz --budget 2 --queries 5 --device cpu --quiet".split()
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "sparse_rs_corners" in said
    assert "sparse_pgd, sigma_zero, adaptive left out" in said
    assert main([*words, "--attack", "adaptive"]) == 1
    assert "attacks must be black-box for a model that gives no gradient, got adaptive" in told(capsys)


def test_a_function_that_needs_arguments_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = module(home)
    assert main(["attack", f"{name}:asking", "--data", "rows.npz", "--quiet"]) == 1
    said = told(capsys)
    assert f"give {name}:mine with def mine(): return asking(...), got '{name}:asking' (missing" in said


@pytest.mark.parametrize(("old", "new"), [("budgets = [2]", 'budgets = [2]\nunit = "pixel"'), (":Linear", ":build")])
def test_channels_last_are_refused_before_any_training(
    home: Path, capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    with np.load("mine.npz") as file:
        arrays = {key: file[key].transpose(0, 2, 3, 1) if key.startswith("x") else file[key] for key in file}
    np.savez("mine.npz", **arrays)
    (home / "mine.toml").write_text((home / "mine.toml").read_text().replace(old, new))
    assert main(["run", "mine.toml", "--device", "cpu", "--allow-code"]) == 1
    said = capsys.readouterr().err
    assert "got channels last, (1, 6, 6, 1): use x.permute(0, 3, 1, 2), of an array x.transpose(0, 3, 1, 2)" in said
    assert "training" not in said
    assert main(["attack", f"{module(home)}:cnn", "--data", "mine.npz", "--quiet"]) == 1
    assert "got channels last, (24, 6, 6, 1): use x.permute" in told(capsys)
    network = recipe.imported(f"{module(home)}:cnn")
    with pytest.raises(ValueError, match="model must take rows of the shape of x, got channels last"):
        ell0.evaluate(network, arrays["x_test"], arrays["y_test"], ell0.L0Ball(1, low=0.0, high=1.0))


def test_a_narrow_box_is_measured_and_flagged(home: Path) -> None:
    (home / "mine.toml").write_text((home / "mine.toml").read_text().replace("beta = [4.0]", "beta = [0.1]"))
    folder = recipe.run(home / "mine.toml", device="cpu", allow_code=True)
    row = Results.load(folder / "results.json").find(classifier="mine, seed 1", attack="worst case", budget=2)
    assert row.flags[0].startswith("values within 0.1: clean values outside the box")


def first_right(y: Any, by: Any) -> list[int]:
    """The first row of each class that is right without an attack."""
    return [next(i for i in range(len(y)) if y[i] == label and by[i] != "clean") for label in range(3)]


def test_certify_writes_a_page_and_radii(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"certify {module(home)}:plain --data rows.npz --beta 1 --device cpu --budget 1".split()
    assert main([*words, "--page", "proof.html", "--save-radii", "radii.npz", "--json", "--quiet"]) == 0
    shown = json.loads(capsys.readouterr().out)
    with np.load("radii.npz") as file:
        radius, y = file["radius"], file["y"]
    np.testing.assert_array_equal(y, rows(24)["y"])
    proven = next(row for row in shown["rows"] if row["what"] == "certified_accuracy" and row["budget"] == 1)
    assert proven["value"] == (radius >= 1).mean()
    assert "Proven and broken" in Outline(Path("proof.html").read_text()).text


def test_a_page_that_cannot_be_written_is_said_before_the_work(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("page", "save-examples"):
        (home / "folder").mkdir(exist_ok=True)
        words = ["attack", f"{module(home)}:ready", "--data", "rows.npz", f"--{option}", "folder", "--quiet"]
        assert main(words) == 1
        assert f"{option.replace('-', '_')} must be a file or a new name, got folder" in told(capsys)


def test_print_shows_a_recipe_to_copy(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("digits", "mnist-fig1a"):
        assert main(["run", name, "--print"]) == 0
        (home / "copy.toml").write_text(capsys.readouterr().out)
        assert recipe.load("copy.toml") == recipe.load(name)
