"""Foolbox's Pointwise on the networks of `ell0 run mnist-table2`: medians of single runs, and of the nearest of ten.

    pip install -c constraints.txt -e '.[foolbox]'
    python tools/foolbox_medians.py runs results/mnist-foolbox.json [FOLDER OF THE DATA]

They show which of the two the paper's table 2 holds.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from ell0 import data, models, train
from ell0.results import Results

IMAGES, RUNS = 200, 10


def distances(network: nn.Module, x: Tensor, y: Tensor, beta: float, run: int) -> Tensor:
    """Pixels that one run changes: 0 where the network errs anyway, all where the attack finds nothing."""
    foolbox = importlib.import_module("foolbox")
    torch.manual_seed(run)
    start = foolbox.attacks.SaltAndPepperNoiseAttack(steps=100, across_channels=True)
    attack = foolbox.attacks.PointwiseAttack(init_attack=start, l2_binary_search=False)
    bounded = foolbox.PyTorchModel(network, bounds=(-beta, beta), device="cpu")
    right = (network(x).argmax(1) == y).nonzero().squeeze(1)
    found = torch.zeros(len(x), dtype=torch.int64)
    points = attack.run(bounded, x[right], foolbox.criteria.Misclassification(y[right]))
    changed = (points != x[right]).flatten(1).sum(1)
    found[right] = torch.where(network(points).argmax(1) != y[right], changed, x[0].numel())
    return found


def main() -> int:
    runs, out = Path(sys.argv[1]), Path(sys.argv[2])
    root = sys.argv[3] if len(sys.argv) > 3 else None
    x, y = (part[:IMAGES] for part in data.load("mnist", "test", root=root))
    command = "python tools/foolbox_medians.py runs results/mnist-foolbox.json"
    results = Results.here("mnist-foolbox", command, seeds=list(range(RUNS)), device="cpu")
    results.versions["foolbox"] = importlib.import_module("foolbox").__version__
    begun = time.perf_counter()
    for k in (10, 0):
        network = models.mlp(k=k)
        train.load_checkpoint(runs / f"mnist-f{k}" / f"f{k}").into(network)
        for beta in (1.0, 100.0):
            each: list[Tensor] = []
            for run in range(RUNS):
                try:
                    each.append(distances(network.eval(), x, y, beta, run))
                except AssertionError:  # of foolbox: its noise found no start for some image
                    print(f"F({k}), values within {beta:g}: run {run} has no start", file=sys.stderr)
            if not each:
                raise SystemExit(f"F({k}), values within {beta:g}: no run of foolbox has a start")
            medians = [float(found.median()) for found in each]
            nearest = float(torch.stack(each).amin(0).median())
            what = {"what": "median_distance", "classifier": f"F({k})", "beta": beta, "n": len(x)}
            what["attack"] = "foolbox PointwiseAttack"
            spread = {"low": min(medians), "high": max(medians)}
            results.add(statistics.median(medians), **what, repeats=1, runs=len(each), **spread)
            results.add(nearest, **what, repeats=len(each))
            results.seconds = round(time.perf_counter() - begun, 1)
            results.save(out)
            print(what, sorted(medians), nearest, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
