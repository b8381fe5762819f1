"""The panel "Attack it yourself": its networks against torch's, what it holds, and what a browser makes of it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import chromium
from ell0 import certify, models, recipe, report
from ell0.cli import main
from ell0.files import read_tensors
from ell0.nn import InputClamp, InputScale, TruncatedLinear
from ell0.recipe import gallery
from ell0.report import panel, run_files
from ell0.train import load_checkpoint
from report_runs import Outline
from tiny_recipe import write_recipe

NODE = shutil.which("node")
NETWORK = Path(report.__file__).parent / "network.js"

# Reads a network and images as JSON, writes the logits of each image in base64.
_RUN = """
const {network: description, images} = JSON.parse(require("fs").readFileSync(0, "utf8"));
const answer = network(description);
const bytes = images.map((one) => Buffer.from(answer(floats(one)).buffer).toString("base64"));
console.log(JSON.stringify(bytes));
"""


def _coded(x: Tensor) -> str:
    return base64.b64encode(x.numpy().tobytes()).decode()


def _answers(description: dict[str, Any], x: Tensor) -> Tensor:
    """The logits that node computes."""
    assert NODE is not None
    given = json.dumps({"network": description, "images": [_coded(one) for one in x]})
    script = NETWORK.read_text() + _RUN
    run = subprocess.run([NODE, "-e", script], input=given, capture_output=True, text=True, check=True)
    rows = [np.frombuffer(base64.b64decode(one), np.float32) for one in json.loads(run.stdout)]
    return torch.from_numpy(np.stack(rows))


def _with_batch_norm() -> nn.Module:
    network = models.cnn(widths=(4, 6), depth=2, hidden=(8,), in_shape=(1, 8, 8))
    network.train()(torch.randn(64, 1, 8, 8))  # so that mean and deviation are not 0 and 1
    return network


CASES = {
    "F(0)": lambda: models.mlp(0, in_features=64, hidden=(32, 16)),
    "F(8)": lambda: models.mlp(8, in_features=64, hidden=(32,)),
    "F(31)": lambda: models.mlp(31, in_features=64, hidden=(16,)),
    "clamped": lambda: nn.Sequential(
        InputClamp(-1.0, -0.8), InputScale(-1.0, -0.8), *models.mlp(0, in_features=64, hidden=(32,))
    ),
    "clamped, truncated": lambda: nn.Sequential(InputClamp(), *models.mlp(3, in_features=64, hidden=(32,))),
    "small_cnn": lambda: models.small_cnn(5, in_shape=(1, 8, 8), width=4),
    "small_cnn of colours": lambda: nn.Sequential(
        InputScale.normalising([0.4, 0.5, 0.6], [0.2, 0.3, 0.1]), models.small_cnn(2, in_shape=(3, 5, 6), width=4)
    ),
    "batch norm": _with_batch_norm,
}


def _states(shape: tuple[int, ...], seed: int, n: int = 200) -> Tensor:
    """Images with ties, each changed in up to eight places: black, white, any value, or infinite."""
    generator = np.random.default_rng(seed)
    x = generator.choice(np.linspace(-1, 1, 17, dtype=np.float32), (n, int(np.prod(shape))))
    for row in x:
        places = generator.choice(len(row), generator.integers(9), replace=False)
        row[places] = generator.choice([-1.0, 0.0, 1.0, 100.0, -100.0, np.inf, -np.inf], len(places))
    return torch.from_numpy(x).view(n, *shape)


@pytest.mark.skipif(NODE is None, reason="no node on this machine")
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_the_script_answers_as_torch(make: Any) -> None:
    torch.manual_seed(0)
    network = make().eval()
    with torch.no_grad():
        next(network.parameters())[::3, ::2] = 0.0  # where 0 * inf counts
    shape = (3, 5, 6) if isinstance(network[0], InputScale) and len(network) == 2 else (1, 8, 8)
    description = panel.describe(network, shape)
    assert description is not None
    x = _states(shape, 1)
    with torch.no_grad():
        expected = network(x)
    found = _answers(description, x)
    scale = expected.nan_to_num(0, 0, 0).abs().amax(1, keepdim=True).clamp(min=1)
    assert expected.isfinite().all(1).sum() >= 50
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-4, equal_nan=True)


@pytest.mark.skipif(NODE is None, reason="no node on this machine")
def test_every_product_and_sum_is_rounded() -> None:
    """In float64 the answers would be 2^-24, 1 + 2^-23 and -1 + 2^-24."""
    product = 1 + 2**-12
    for k, x, weight, expected in (
        (0, [1.0, product], [-(1 + 2**-11), product], 0.0),
        (0, [1.0] * 3, [1.0, 2**-24, 2**-24], 1.0),
        (1, [1.0] * 7, [9.0, -9.0, -1.0, *[2**-26] * 4], -1.0),
    ):
        layer = TruncatedLinear(len(x), 1, k, bias=False)
        layer.weight.data.copy_(torch.tensor(weight))
        description = panel.describe(layer, (len(x),))
        assert description is not None
        assert _answers(description, torch.tensor([x])).item() == expected


RECIPE = """
name = "tiny"
summary = "a dense classifier, and one with a proof"
data = { file = "tiny.npz" }
[training]
epochs = 30
batch = 20
rates = [0.02]
optimizer = "adam"
[[classifier]]
name = "F(0)"
model = { name = "mlp", k = 0, hidden = [8] }
[[classifier]]
name = "F(2)"
model = { name = "mlp", k = 2, hidden = [8] }
training = { certified = { budget = 1 } }
[[measure]]
what = "certified_accuracy"
classifiers = ["F(2)"]
budgets = [1]
[[measure]]
what = "worst_case"
budgets = [2]
beta = [10.0]
queries = 20
steps = 3
rows = 3
"""


@pytest.fixture(scope="module")
def panel_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three images of 4 x 4 pixels and two classifiers, one of them with a proof."""
    folder = tmp_path_factory.mktemp("panel")
    write_recipe(folder).write_text(RECIPE)
    return recipe.run(folder / "tiny.toml", out=folder / "run", device="cpu")


def _content(folder: Path) -> Any:
    return panel.panel_of(run_files.read(folder))


def test_what_the_panel_holds(panel_run: Path) -> None:
    arrays, _ = read_tensors(panel_run / "gallery.safetensors", "")
    content = _content(panel_run)
    dense, truncated = content["classifiers"]
    assert (dense["name"], dense["radius"], truncated["name"]) == ("F(0)", None, "F(2)")
    assert truncated["radius"] == arrays["f2/radius"].tolist()
    assert (content["shape"], content["values"], content["labels"]) == ([1, 4, 4], [-1, 1, 100], [0, 1, 2])
    network = recipe.model(load_checkpoint(panel_run / "f2")).eval()
    assert truncated["network"] == panel.describe(network, (1, 4, 4))
    for i, changes in enumerate(truncated["attacks"]):
        attacked = arrays["clean"][i].flatten()
        for place, value in changes:
            attacked[place] = value
        assert attacked.equal(arrays["f2/adv"][i].flatten())


def test_a_proof_of_the_gallery_is_that_of_the_run(panel_run: Path) -> None:
    """The first images of each class are the first three rows of the test split."""
    found = [read_tensors(path, "") for path in (panel_run / "verdicts").glob("*.safetensors")]
    (radii,) = (tensors["distance"][0] for tensors, words in found if json.loads(words["names"]) == ["certificate"])
    arrays, _ = read_tensors(panel_run / "gallery.safetensors", "")
    assert arrays["f2/radius"].tolist() == radii[:3].tolist()
    assert max(radii[:3]) >= 1


def test_a_proof_within_a_box_or_with_a_confidence_is_none_of_the_panel(
    panel_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, network = recipe.load(panel_run / "recipe.toml"), recipe.model(load_checkpoint(panel_run / "f2")).eval()
    given: Any = "F(2)", "feature", network, torch.zeros(1, 1, 4, 4), torch.zeros(1, dtype=torch.int64)
    assert len([*gallery._radii(plan, *given)]) == 1
    boxed = replace(plan, tasks=tuple(replace(task, betas=(1.0,)) for task in plan.tasks))
    assert [*gallery._radii(boxed, *given)] == []
    monkeypatch.setattr(certify, "certifier", lambda *_: SimpleNamespace(confidence=0.99))
    assert [*gallery._radii(plan, *given)] == []


def test_the_gallery_takes_what_the_worst_case_found(
    panel_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery, "sparse_rs", lambda _, x, *__, **___: SimpleNamespace(x_best=x))
    before, _ = read_tensors(panel_run / "gallery.safetensors", "")
    plan, network = recipe.load(panel_run / "recipe.toml"), recipe.model(load_checkpoint(panel_run / "f0")).eval()
    path, test = tmp_path / "gallery.safetensors", (before["clean"], before["labels"])
    gallery.write_gallery(path, plan, {"F(0)": network}, test)
    arrays, words = read_tensors(path, "")
    assert words["unit"] == "feature"
    fell = (arrays["f0/adv"] != arrays["clean"]).flatten(1).sum(1)
    assert 1 <= fell.max() <= 2
    assert (fell > 0).equal((arrays["f0/says"] != arrays["labels"]) & (arrays["f0/said"] == arrays["labels"]))


def test_large_and_strange_networks_have_recorded_attacks(
    panel_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def live(folder: Path) -> list[bool]:
        return [one["network"] is not None for one in _content(folder)["classifiers"]]

    size = sum(each.numel() for each in load_checkpoint(panel_run / "f0").tensors.values())
    assert live(panel_run) == [True, True]
    for name, most, expected in (
        ("MOST_NUMBERS", size - 1, [False, False]),
        ("MOST_NUMBERS", size, [True, True]),
        ("MOST_TOGETHER", 2 * size - 1, [True, False]),
        ("MOST_TOGETHER", 2 * size, [True, True]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(panel, name, most)
            assert live(panel_run) == expected
    moved = shutil.copytree(panel_run, tmp_path / "moved", ignore=shutil.ignore_patterns("checkpoint*"))
    assert live(moved) == [False, False]
    with monkeypatch.context() as patch:
        patch.setattr(panel, "_MOST_PIXELS", 15)
        assert _content(panel_run) is None
    strange = [models.resnet9(in_shape=(1, 8, 8)), nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Sigmoid())]
    strange += [nn.Sequential(nn.Conv2d(1, 4, 3, dilation=2), nn.Flatten(), nn.Linear(64, 10))]
    for network in strange:
        assert panel.describe(network.eval(), (1, 8, 8)) is None


def test_of_seeds_the_first_is_shown() -> None:
    plan = recipe.load("mnist-certified")
    others = panel._other_seeds(plan)
    assert [one.name for one in plan.everyone() if one.name not in others] == [
        f"F(0) for {budget}, seed 0" for budget in (6, 10, 16)
    ]
    assert panel._other_seeds(recipe.load("digits")) == []


def test_the_page_runs_this_script_alone(panel_run: Path, tmp_path: Path) -> None:
    page = report.page([panel_run])
    (code,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(sha256(code.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'\"" in page
    out = tmp_path / "page.html"
    assert main(["report", str(panel_run), "--out", str(out), "--no-panel"]) == 0
    plain = Outline(out.read_text())
    assert not plain.all("script")
    assert "Attack it yourself" in Outline(page).text
    assert "Attack it yourself" not in plain.text


# Clicks these pixels, one after the other; gives what the panel shows after each: its link, answers and logits.
_CLICKS = """{pixels}.map(pixel => {{
  document.querySelectorAll("[role=gridcell]")[pixel].click();
  return [document.querySelector("[data-part=link]").hash, [...document.querySelectorAll(".says")].map(
    e => [e.textContent.split(" ")[1], e.dataset.logits.split(" ")])];
}})"""

# Goes to addresses, one after the other, and gives what the panel shows at each.
_ADDRESSES = """(async () => {{
  const found = [], frame = document.defaultView;
  for (const hash of {hashes}) {{
    const moved = new Promise(done => frame.addEventListener("hashchange", done, {{once: true}}));
    frame.location.hash = hash;
    await moved;
    found.push([document.querySelector("[data-part=link]").hash, [...document.querySelectorAll(".says")].map(
      e => [e.textContent.split(" ")[1], e.dataset.logits.split(" ")])]);
  }}
  return found;
}})()"""


def compare(folder: Path, shown: list[tuple[str, list[tuple[str, list[str]]]]]) -> int:
    """Checks that answers and logits of each state are those of torch; gives how many are finite."""
    arrays, _ = read_tensors(folder / "gallery.safetensors", "")
    names = [one["name"] for one in _content(folder)["classifiers"]]
    networks = [recipe.model(load_checkpoint(folder / recipe.slug(name))).eval() for name in names]
    finite = 0
    for link, answers in shown:
        image, *changes = link.removeprefix("#attack=").split(",")
        x = arrays["clean"][int(image)].clone()
        for place, value in (change.split(":") for change in changes):
            x.view(-1)[int(place)] = float(value.replace("Infinity", "inf"))
        for network, (says, found) in zip(networks, answers, strict=True):
            with torch.no_grad():
                expected = network(x[None])[0]
            scale = expected.nan_to_num(0, 0, 0).abs().max().clamp(min=1)
            numbers = torch.tensor([float(one.replace("Infinity", "inf")) for one in found])
            torch.testing.assert_close(numbers / scale, expected / scale, rtol=0, atol=1e-4, equal_nan=True)
            assert int(says) == expected.argmax()
            finite += int(expected.isfinite().all())
    return finite


@pytest.fixture(scope="module")
def page(panel_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write([panel_run], tmp_path_factory.mktemp("pages") / "page.html")


@chromium.needed
def test_answers_in_a_browser_are_those_of_torch(panel_run: Path, page: Path) -> None:
    """For 100 clicks, and for 100 addresses with infinite values among them."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(16, size=100).tolist()
    clicks, complaints = chromium.look(page, _CLICKS.format(pixels=pixels), width=1440)
    assert complaints == []
    assert len({link for link, _ in clicks}) > 90
    assert compare(panel_run, clicks) == 2 * 100
    values = ["-1", "1", "100", "0.25", "Infinity", "-Infinity"]
    hashes = []
    for i in range(100):
        places = sorted(generator.choice(16, generator.integers(1, 6), replace=False))
        hashes.append(f"#attack={i % 3}" + "".join(f",{place}:{generator.choice(values)}" for place in places))
    shown, complaints = chromium.look(page, _ADDRESSES.format(hashes=json.dumps(hashes)), width=1440)
    assert complaints == []
    assert [link for link, _ in shown] == hashes
    assert 50 < compare(panel_run, shown) < 200


# What Tab should reach on the page, in this order, and which of them has the focus.
_STOPS = """(() => {
  const all = [...document.querySelectorAll("a[href], button:not(:disabled), summary, input, [tabindex='0']")]
    .filter(e => e.tagName === "SUMMARY" || !e.closest("details:not([open])"));
  return [all.map(e => e.dataset.part || e.role || e.tagName), all.indexOf(document.activeElement)];
})()"""
# The cell with the focus, its words, and what has changed.
_CELL = """[[...document.querySelectorAll("[role=gridcell]")].indexOf(document.activeElement),
  document.activeElement.ariaLabel, document.querySelector("[data-part=link]").hash]"""


@chromium.needed
def test_the_keyboard_alone_does_everything(page: Path) -> None:
    with chromium.opened(page, width=360) as tab:
        (stops, _), reached = tab.run(_STOPS), []
        for _ in stops:
            tab.press("Tab")
            reached.append(tab.run(_STOPS)[1])
        assert reached == [*range(len(stops))]
        panel_stops = [one for one in stops if one in ("gridcell", "reset", "next", "link", "BUTTON")]
        assert sorted(panel_stops) == ["BUTTON", "BUTTON", "gridcell", "link", "next", "reset"]

        def go(stop: int) -> None:
            while tab.run(_STOPS)[1] != stop:
                tab.press("Tab")

        go(stops.index("gridcell"))
        found = [tab.run(_CELL)]
        for key in ("ArrowUp", "ArrowLeft", "Enter", "Enter", " ", "Enter", "Home", "ArrowLeft", "Enter"):
            tab.press(key)
            found.append(tab.run(_CELL))
        assert [place for place, *_ in found] == [10, 6, 5, 5, 5, 5, 5, 4, 4, 4]
        states = [link.split(",")[1:] for *_, link in found]
        assert states == [[], [], [], ["5:-1"], ["5:1"], ["5:100"], [], [], [], ["4:-1"]]
        assert found[5][1] == "row 2, column 2: value 100, changed"
        go(stops.index("BUTTON"))
        tab.press(" ")
        assert tab.run(_CELL)[2] not in ("#attack=0", found[-1][2])  # the replay has begun
        for part, hash_ in (("reset", "#attack=0"), ("next", "#attack=1")):
            go(stops.index(part))
            tab.press("Enter")
            assert tab.run(_CELL)[2] == hash_
        assert tab.complaints() == []


# Replays the attack on each classifier; what is said meanwhile, and after it.
_REPLAYS = """(async () => {
  const found = [], all = selector => [...document.querySelectorAll(selector)];
  const read = selector => all(selector).map(e => e.textContent);
  for (const index of [0, 1]) {
    const button = all(".answer button")[index], states = [];
    button.click();
    for (let i = 0; i < 3; i++) {
      states.push(document.querySelector("[data-part=link]").hash.split(",").length - 1);
      await new Promise(done => setTimeout(done, 410));
    }
    found.push([button.textContent, states, ...[".says", ".proof", "[role=status]"].map(read)]);
  }
  const shown = "[data-part=picture], [role=status]";
  document.querySelector("[data-part=reset]").click();
  const reset = read(shown);
  document.querySelector("[data-part=next]").click();
  return [found, reset, read(shown)];
})()"""


@chromium.needed
def test_a_replay_goes_pixel_by_pixel(panel_run: Path, page: Path) -> None:
    (found, reset, following), complaints = chromium.look(page, _REPLAYS, width=360, dark=True)
    assert complaints == []
    arrays, _ = read_tensors(panel_run / "gallery.safetensors", "")
    for index, slug in enumerate(("f0", "f2")):
        words, states, says, proofs, (status,) = found[index]
        changed = int((arrays["clean"][0] != arrays[f"{slug}/adv"][0]).sum())
        assert states == [min(i, changed) for i in (1, 2, 3)]
        answer = int(arrays[f"{slug}/says"][0])
        assert says[index] == f"says {answer} {'✗' if answer else '✓'}"
        plural = "" if changed == 1 else "s"
        assert words == f"Replay its attack: {changed} pixel{plural}, {'breaks it' if answer else 'it stands'}"
        assert status.startswith(f"{changed} pixel{plural} changed. ")
        radius = int(arrays["f2/radius"][0])
        end = "this answer cannot change" if changed <= radius else "beyond the proof"
        proven = f"{radius} proven: {end}" if radius else "none proven"
        assert proofs == [f"{changed} changed, no proof", f"{changed} changed, {proven}"]
    assert reset == ["Image 1 of 3: 0", "0 pixels changed. Every answer is right."]
    assert following[0] == "Image 2 of 3: 1"


@chromium.needed
def test_a_panel_of_recorded_attacks(panel_run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(panel_run, tmp_path / "moved", ignore=shutil.ignore_patterns("checkpoint*"))
    page = report.write([moved], tmp_path / "page.html")
    script = """(document.querySelectorAll("[role=gridcell]")[3].click(),
      [[...document.querySelectorAll(".says")].map(e => e.textContent), document.querySelector("[data-part=link]").hash,
       document.querySelector("[data-part=live]").hidden, document.querySelector("[data-part=recorded]").hidden])"""
    found, complaints = chromium.look(page, script, width=360)
    assert (found, complaints) == ([["says 0 ✓", "says 0 ✓"], "#attack=0", True, False], [])


@chromium.needed
@pytest.mark.parametrize(
    ("unit", "counts"), [("pixel", ["1 pixel", "2 pixels"]), ("feature", ["3 inputs", "6 inputs"])]
)
def test_a_pixel_of_colours(
    panel_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str, counts: list[str]
) -> None:
    """It changes with all its channels, which count as one pixel or as three inputs."""
    one: Any = {"name": "C", "attacks": [[]], "said": [0], "says": [0], "radius": [3 if unit == "feature" else 1]}
    one["network"] = panel.describe(models.small_cnn(in_shape=(3, 4, 4), width=2).eval(), (3, 4, 4))
    clean = torch.zeros(3, 4, 4)
    clean[:, 1, 3] = -1.0  # which black does not change
    content: Any = {"classifiers": [one], "images": _coded(clean), "shape": [3, 4, 4], "labels": [0]}
    content |= {"classes": ["<i>zero"], "unit": unit, "values": [-1.0, 1.0, 100.0]}
    monkeypatch.setattr(report, "panel_of", lambda _: content)
    page = report.write([panel_run], tmp_path / "page.html")
    script = """[5, 6, 7].map(pixel => (document.querySelectorAll("[role=gridcell]")[pixel].click(),
      ["[role=status]", ".proof", "[data-part=picture]", "button:disabled"]
        .map(e => document.querySelector(e).textContent).concat(document.querySelector("[data-part=link]").hash)))"""
    (first, second, third), complaints = chromium.look(page, script, width=360)
    assert complaints == []
    assert [first[0].split(" changed")[0], second[0].split(" changed")[0]] == counts
    proven = one["radius"][0]
    assert first[1] == f"{proven} changed, {proven} proven: this answer cannot change"
    assert second[1] == f"{2 * proven} changed, {proven} proven: beyond the proof"
    assert first[2:] == ["Image 1 of 1: <i>zero", "No attack on it was recorded", "#attack=0,5:-1,21:-1,37:-1"]
    assert ",7:1," in third[-1]
