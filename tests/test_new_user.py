"""A new user: a network and data of one's own, in every shape they come in, from arrays to pages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import chromium
import ell0
from ell0.cli import main
from ell0.evaluation import Evaluation
from ell0.results import Results

NETWORK = """
import torch

def build(in_shape, classes, width=4):
    channels, height, breadth = in_shape
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, width, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(width * height * breadth, classes),
    )
"""
RECIPE = """
name = "my-sweep"
summary = "My network on my images"
[data]
file = "mine.npz"
low = 0.0
high = 1.0
[[classifier]]
name = "mine"
model.python = "a_users_network:build"
training = { epochs = 5, batch = 16, rates = [0.01], optimizer = "adam" }
[[measure]]
what = "clean_accuracy"
[[measure]]
what = "worst_case"
budgets = [1, 3]
queries = 10
steps = 2
rows = 9
[sweep]
seed = [0, 1]
"""
SHORT = {"sparse_rs": partial(ell0.attacks.sparse_rs, queries=40)}


class Answers(nn.Module):
    """A network whose answer is a dict."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.network(x), "input": x}


def images(n: int) -> tuple[Any, Any]:
    """Channels last, in [0, 1]: three classes, each bright in two lines."""
    draw, y = np.random.default_rng(n), np.arange(n) % 3
    x = draw.uniform(0, 0.6, (n, 6, 6, 1)).astype(np.float32)
    for i, label in enumerate(y):
        x[i, 2 * label : 2 * label + 2] += 0.4
    return x, y


@pytest.mark.usefixtures("one_thread")
def test_a_new_user_comes_from_arrays_to_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_users_network.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    (x_train, y_train), (last, y) = images(120), images(18)
    x = np.ascontiguousarray(last.transpose(0, 3, 1, 2))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        cnn = ell0.recipe.imported("a_users_network:build")((1, 6, 6), 3)
    config = ell0.train.TrainConfig(epochs=6, batch=16, rates=(0.01,), optimizer="adam")
    rows = torch.from_numpy(x_train).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(y_train)
    ell0.train.fit(cnn, rows, config, out="fitted")

    ball = ell0.L0Ball.of(x, 8, unit="pixel")
    with pytest.raises(ValueError, match="got channels last"):
        ell0.evaluate(cnn, np.pad(last, [(0, 0), (0, 0), (0, 0), (0, 2)]), y, ball, SHORT)
    plain = ell0.evaluate(cnn, x, y, ball, SHORT)
    assert plain.clean_accuracy > 0.8 > plain.robust_accuracy > 0
    assert "8 pixels changed, values in [0.0" in str(plain)
    loader = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=6)
    for found in (
        ell0.evaluate(cnn, loader, ball=ball, attacks=SHORT),
        ell0.evaluate(Answers(cnn), x, y, ball, SHORT),
        ell0.evaluate(ell0.wrap(lambda x: cnn(x.permute(0, 3, 1, 2)), channels_last=True), x, y, ball, SHORT),
    ):
        assert isinstance(found, Evaluation)
        assert found.verdict.tolist() == plain.verdict.tolist()

    forest = RandomForestClassifier(9, random_state=0).fit(x_train.reshape(120, -1), y_train)
    flat = last.reshape(18, -1)
    assert ell0.evaluate(forest, flat, y, ell0.L0Ball.of(flat, 6), SHORT).robust_accuracy < 1
    dense = nn.Linear(36, 1)
    torch.nn.init.ones_(dense.weight)
    alone = ell0.evaluate(
        dense, flat, (flat.sum(1) + dense.bias.item() > 0).astype(int), ell0.L0Ball(2, low=0.0, high=1.0), SHORT
    )
    assert alone.clean_accuracy >= 1

    np.savez("mine.npz", x_train=rows[0].numpy(), y_train=y_train, x_test=x, y_test=y)
    (tmp_path / "net.py").write_text("from a_users_network import build\ndef mine():\n    return build((1, 6, 6), 3)\n")
    words = (
        "attack net:mine --weights fitted --data mine.npz --low 0 --high 1 --unit pixel --budget 4 --attack sparse_rs"
    )
    assert (
        main([*words.split(), "--queries", "30", "--page", "attack.html", "--save-examples", "adv.npz", "--quiet"]) == 0
    )
    (tmp_path / "sweep.toml").write_text(RECIPE)
    assert main(["run", "sweep.toml", "--allow-code", "--device", "cpu", "--quiet"]) == 0
    swept = tmp_path / "runs" / "my-sweep"  # by its name, not by that of its file
    for seed in (0, 1):
        results = Results.load(swept / f"my-sweep-seed{seed}" / "results.json")
        assert results.find(what="clean_accuracy").value > 0.8
    page = (swept / "report.html").read_text()
    assert "A figure of several seeds is their mean" in page
    if chromium.FOUND is not None:
        for path in (tmp_path / "attack.html", swept / "report.html"):
            for width in (360, 1440):
                wide, complaints = chromium.look(path, "document.documentElement.scrollWidth", width=width)
                assert (wide, complaints) == (width, [])
