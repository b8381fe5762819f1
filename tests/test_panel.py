"""The panel "Attack it yourself": its networks against torch's, what it holds, and what a browser makes of it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ell0 import models, report
from ell0.nn import InputClamp, InputScale
from ell0.report import panel

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
