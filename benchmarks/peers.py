"""Ask the same of ell0, foolbox, torchattacks and ART: which share of the rows stays right if three pixels change?

    python benchmarks/peers.py --out results/bench-peers-cpu.json

Each script is what a user of the tool writes, given ``model``, ``images`` in [0, 1] and ``labels``, for a share whose
points have been checked: changed pixels, range and answers. Settings are the tool's defaults unless the name says
otherwise. Tools that are not installed are left out; see peers.lock.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from typing import Any

import torch

from ell0 import data, models, train
from ell0.results import Results, Share
from measure import Run, add_counts, main, options

BUDGET, REPEATS = 3, 3
SLOW = 10.0  # seconds; what takes longer is measured once
CHECKED = """
changed = (points != images).any(1).flatten(1).sum(1)
inside = ((points >= 0) & (points <= 1)).flatten(1).all(1)
with torch.no_grad():
    wrong = (model(images).argmax(1) != labels) | (model(points).argmax(1) != labels) & (changed <= 3) & inside
robust = 1 - wrong.float().mean().item()
"""
OURS = """
import ell0
ball = ell0.L0Ball.of(images, 3, unit="pixel")
evaluation = ell0.evaluate(model, images, labels, ball{attacks})
robust = evaluation.robust_accuracy
"""
KNOWS = {"gradient": ("all", "sparse_pgd"), "decision": ("pointwise", "Pointwise")}
"""What an attack is told of the model, by a word of its name; else the logits."""
SCRIPTS = {
    "ell0, all its attacks": OURS.format(attacks=""),
    **{f"ell0, {name}": OURS.format(attacks=f', ["{name}"]') for name in ("sparse_pgd", "pointwise", "sparse_rs")},
    "ell0, sparse_rs, 200 queries": OURS.format(attacks=', ell0.evaluation.cascade(["sparse_rs"], queries=200)'),
    "foolbox, PointwiseAttack": f"""
import foolbox
import torch
fmodel = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
attack = foolbox.attacks.PointwiseAttack(l2_binary_search=False)
points, _, _ = attack(fmodel, images, labels, epsilons=None)
{CHECKED}""",
    "torchattacks, OnePixel": f"""
import torch
import torchattacks
attack = torchattacks.OnePixel(model, pixels=3)
points = attack(images, labels)
{CHECKED}""",
    "ART, PixelAttack": f"""
import torch
from art.attacks.evasion import PixelAttack
from art.estimators.classification import PyTorchClassifier
loss, shape = torch.nn.CrossEntropyLoss(), tuple(images.shape[1:])
classifier = PyTorchClassifier(model, loss=loss, input_shape=shape, nb_classes=10, clip_values=(0, 1))
attack = PixelAttack(classifier, th=3, verbose=False)
points = torch.from_numpy(attack.generate(images.numpy(), labels.numpy()))
{CHECKED}""",
}


def lines(script: str) -> int:
    return sum(bool(line.strip()) for line in script.splitlines())


def peers(run: Run, *, images: int = 50, epochs: int = 30, scripts: Sequence[str] = tuple(SCRIPTS)) -> Results:
    """A small CNN on digits, asked by each script. Seconds are those of the processor, the least of three calls."""
    results, (x, y) = run.results("bench-peers"), data.load("digits", "test")
    torch.manual_seed(run.seed)
    model = models.small_cnn(0, in_shape=(1, 8, 8)).eval()
    config = train.TrainConfig(epochs=epochs, batch=128, rates=(0.003,), optimizer="adam")
    rows, labels = data.load("digits", "train")
    train.fit(model, ((rows + 1) / 2, labels), config)
    first = None
    for name in scripts:
        package = name.partition(",")[0]
        if importlib.util.find_spec(package.lower()) is None:
            run.say(f"{package} is not installed: left out")
            continue
        took: list[float] = []
        for count in (1, *[images] * REPEATS):  # one row first: imports are not measured
            if len(took) > 1 and took[-1] > SLOW:
                break
            torch.manual_seed(run.seed)
            names: dict[str, Any] = {"model": model, "images": (x[:count] + 1) / 2, "labels": y[:count]}
            start = time.process_time()
            exec(SCRIPTS[name], names)
            took.append(time.process_time() - start)
        least = min(took[1:])
        first = first or least
        share = Share(round(names["robust"] * images), images)
        knows = next((what for what, words in KNOWS.items() if any(word in name for word in words)), "logits")
        beside = {"lines": lines(SCRIPTS[name]), "times": round(least / first, 2), "knows": knows}
        run.say(f"{name}: {share:.3f}, {least:.1f} s")
        given = {"what": "tool", "attack": name, "budget": BUDGET, "unit": "accuracy", "beside": beside}
        results.add(share, **given, seconds=round(least, 2))
    return results


if __name__ == "__main__":
    parser = options(__file__, __doc__)
    add_counts(parser, images="rows attacked (default: 50)", epochs="of training (default: 30)")
    raise SystemExit(main(peers, parser))
