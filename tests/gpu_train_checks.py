"""Checks of training that need a GPU, torch and numpy alone: ``python tests/gpu_train_checks.py [NAME ...]``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from balls import trades_within_one, within_one
from ell0 import L0Ball, certify, models, train
from ell0.attacks import sparse_rs
from ell0.certify import Partition, PartitionEnsemble, PartVote, RandomisedAblation
from ell0.nn import InputClamp, InputTruncation
from ell0.part_networks import PartCNN, PartMLP, PartTransformer
from ell0.synthesis import AnalysisBySynthesis, ClassBounds
from ell0.train import TrainConfig, fit
from ell0.train.rows import AUGMENTS
from ell0.train.stepper import GraphStepper, Stepper
from gpu_checks import run_checks
from small_training import Killed, run

STEPS = 20
CONFIG = TrainConfig(epochs=5, batch=64, rates=(0.05, 0.02), refresh=2, attack_batch=100)
ATTACK = partial(sparse_rs, ball=L0Ball(5, low=-100.0, high=100.0), queries=20)


def images(n: int, seed: int = 0, shape: tuple[int, ...] = (3, 32, 32)) -> tuple[Tensor, Tensor]:
    """Noise around one image for each class, in [-1, 1]."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (n,), generator=g)
    classes = torch.rand(10, *shape, generator=torch.Generator().manual_seed(99))
    return (2 * classes[y] - 1 + 0.3 * torch.randn(n, *shape, generator=g)).clamp(-1, 1), y


rows = partial(images, shape=(1, 28, 28))


def convolutions() -> nn.Module:
    """The first layers of VGG(10): truncation, convolutions, batch norm, pooling."""
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    features += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(InputTruncation((3, 32, 32), 10), *features, nn.Flatten(), nn.Linear(2048, 10)).cuda()


def network(norm: bool = False, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    layers = models.mlp(10, hidden=(128, 64))
    return (nn.Sequential(nn.BatchNorm2d(1), *layers, nn.Dropout(dropout)) if norm else layers).cuda()


def close(one: nn.Module, other: nn.Module, most: float = 1e-4) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        difference = float((a.double() - b.double()).abs().max())
        assert difference <= most, f"{name} differs by {difference}"


def train_both(config: TrainConfig, norm: bool = False) -> None:
    """20 steps under a schedule, one of them on a smaller batch, eager and from a graph."""
    x, y = (t.cuda() for t in rows(config.batch * STEPS))
    networks = network(norm, dropout=0.0), network(norm, dropout=0.0)  # a graph draws other numbers
    eager = Stepper(networks[0], config)
    graph = GraphStepper(networks[1], config, x[: config.batch], y[: config.batch])
    close(*networks, 0.0)
    for i in range(STEPS):
        part = slice(i * config.batch, (i + 1) * config.batch - (17 if i == 7 else 0))
        rate = config.rates_of(i * config.epochs // STEPS, 1)[0]
        losses = []
        for stepper in (eager, graph):
            stepper.rate.fill_(rate)
            losses.append(float(stepper.step(x[part], y[part])))
        assert abs(losses[0] - losses[1]) <= 1e-4, f"step {i} has the losses {losses}"
    close(*networks)
    (loss, right), (loss_, right_) = eager.take(), graph.take()
    assert abs(loss - loss_) <= 1e-3 * loss
    assert abs(right - right_) <= 2
    assert losses[0] < 2, "nothing was learnt, so nothing was compared"


def check_graph_and_eager() -> None:
    train_both(CONFIG)
    train_both(replace(CONFIG, optimizer="adam", rates=(0.001, 0.0005)))
    train_both(replace(CONFIG, weight_decay=1e-3), norm=True)


def check_bounds() -> None:
    """Training on the bound and on its quick version, behind a clamp, with and without graphs."""
    config = replace(CONFIG, optimizer="adam", rates=(0.001,), epochs=3)
    for quick in (False, True):
        networks = []
        for graph in (False, True):
            torch.manual_seed(0)
            networks.append(nn.Sequential(InputClamp(), *models.mlp(0, hidden=(128,))).cuda())
            objective = certify.Objective(3, quick=quick, ramp=0.7)
            training = fit(networks[-1], rows(330), replace(config, graph=graph), objective=objective)
            assert training.epochs[-1].loss < 2.3
        close(networks[0], networks[1], most=1e-3)


def stop_and_go_on(make: Callable[[], nn.Module], stops: tuple[int, ...], most: float, **arguments: Any) -> None:
    """Stopped at a report of progress and called again, a training and its checkpoint end as without a stop."""
    whole = run(None, make(), attack=ATTACK, **arguments)
    for stop in stops:
        with tempfile.TemporaryDirectory() as folder:
            out, models = Path(folder), (make(), make())
            with suppress(Killed):
                run(out, make(), stop, attack=ATTACK, **arguments)
            assert train.load_checkpoint(out).about["epoch"] < CONFIG.epochs
            run(out, models[0], attack=ATTACK, **arguments)
            train.load_checkpoint(out).into(models[1])
            for model in models:
                close(model, whole, most)


def check_resume() -> None:
    """The same bits as without a stop, statistics and dropout included; and a bf16 run in rounds on moved images."""
    make = partial(network, norm=True)
    stop_and_go_on(make, (0, 1, 3, 6, 8), 0.0, data=rows(330), config=CONFIG, validation=rows(100, seed=1))
    config = replace(CONFIG, rounds=True, augment="crop-flip-once", precision="bf16", attack_precision="bf16")
    # Else a convolution may sum its gradients in any order.
    with torch.backends.cudnn.flags(deterministic=True):
        stop_and_go_on(convolutions, (1, 4, 8), 1e-3, data=images(330), config=config, validation=None)


def waits_for_nothing(work: Callable[[], object]) -> None:
    """Raises if the work waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_no_step_waits_for_the_device() -> None:
    x, y = (t.cuda() for t in rows(64))
    dense = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).cuda()
    rate, order = torch.tensor(0.1, device="cuda"), torch.arange(64, device="cuda")

    def learn(stepper: Stepper) -> None:
        stepper.rate.copy_(rate)
        stepper.step(x[order], y[order])

    for stepper in (GraphStepper(network(), CONFIG, x, y), Stepper(dense, CONFIG)):
        stepper.step(x, y)
        waits_for_nothing(partial(learn, stepper))


def check_images() -> None:
    """From a graph and eager, in double precision: the same weights and statistics."""
    config = replace(CONFIG, augment="crop-flip", rates=(0.02,), schedule="cosine", warm_up=0.1)
    networks = []
    # Else a rounding may decide which of two pixels is pooled. On the CPU weights keep their layout.
    x, y = images(330)
    for device, graph in (("cpu", False), ("cuda", False), ("cuda", True)):
        model = convolutions().double().to(device)
        fit(model, (x.double(), y), replace(config, epochs=1, graph=graph))
        networks.append(model.cuda())
        assert int(model.get_buffer("2.num_batches_tracked")) == 6
        laid = model.get_parameter("1.weight").is_contiguous(memory_format=torch.channels_last)
        assert laid == (device == "cuda")
    for model in networks[1:]:
        close(networks[0], model, 1e-6)


def check_augmented_rows() -> None:
    """The same on both devices, and no wait for the device."""
    (x, _), g = images(50), torch.Generator().manual_seed(0)
    for moves in AUGMENTS.values():
        rows, ways = torch.randint(50, (64,), generator=g), moves.draw(64, g)
        on_gpu = [tensor.cuda() for tensor in (x, rows, ways)]
        waits_for_nothing(partial(moves.moved, *on_gpu))
        assert torch.equal(moves.moved(*on_gpu).cpu(), moves.moved(x, rows, ways))


def check_attack_in_the_step() -> None:
    """A graph holds the attack: draws of its own in every replay, given by the seed, losses as without a graph."""
    x, y = (t.cuda() for t in images(256))
    trades = trades_within_one(60, "pixel", steps=5)
    for precision in ("fp32", "bf16"):
        kind: dict[str, Any] = {"precision": precision}
        config = replace(CONFIG, batch=len(x), **kind)
        graph = GraphStepper(convolutions(), config, x, y, trades)
        eager = Stepper(convolutions(), config, batch_loss=trades)
        losses = []
        for stepper in (graph, eager):
            stepper.rate.fill_(0.0)
            torch.manual_seed(1)
            found = [stepper.step(x, y).clone() for _ in range(40)]
            losses.append(torch.stack(found).double())
            assert losses[-1].isfinite().all()
            assert len(losses[-1].unique()) > 30, losses[-1]
            assert stepper.model.training
        one, other = (float(some.mean()) for some in losses)
        error = float(sum(some.var() / len(some) for some in losses)) ** 0.5
        assert abs(one - other) < 5 * error + 1e-3, (one, other, error)
        again, before = [], [buffer.clone() for buffer in graph.model.buffers()]
        for seed in (2, 2, 3):
            # The statistics move from step to step, and the attack sees them.
            for buffer, value in zip(graph.model.buffers(), before, strict=True):
                buffer.copy_(value)
            torch.manual_seed(seed)
            again.append(torch.stack([graph.step(x, y).clone() for _ in range(3)]))
        assert (again[0] - again[1]).abs().max() < 0.1 * (again[0] - again[2]).abs().max(), again
    waits_for_nothing(partial(eager.step, x, y))
    config = replace(CONFIG, epochs=10, rates=(0.002,), precision="bf16")
    training = fit(convolutions(), images(640), config, objective=trades_within_one(60, "pixel", steps=5))
    assert training.epochs[-1].train_accuracy > 0.9, [epoch.train_accuracy for epoch in training.epochs]


def check_votes() -> None:
    """The rivals' steps are captured, they learn, and each replay hides other pixels; copies vote in bf16, folded."""
    x, y = (t.cuda() for t in images(640))
    base = models.cnn(in_shape=(6, 32, 32), widths=(16, 32), depth=2)
    ablation = RandomisedAblation(base, 200, selection=50, samples=200, precision="bf16").cuda()
    config = TrainConfig(epochs=20, batch=64, rates=(0.002,), optimizer="adam", graph=True)
    ensemble = PartitionEnsemble(models.resnet9(), (3, 32, 32), 16).cuda()
    for model, objective in ((ensemble, ensemble.objective), (ablation, None)):
        training = fit(model, (x, y), config, objective=objective)
        assert training.epochs[-1].loss < 0.7 * training.epochs[0].loss, training.epochs
        radii = cast(certify.Certifier, model.eval()).radius(x[:40], y[:40], within_one(1, "pixel"))
        assert float(radii.double().mean()) > 0, radii
    for model, batch_loss in ((ensemble, ensemble.objective.at(0, 1)), (ablation, None)):
        stepper = GraphStepper(model.train(), replace(config, rates=(0.0,)), x[:64], y[:64], batch_loss)
        losses = {float(stepper.step(x[:64], y[:64])) for _ in range(3)}
        assert len(losses) == 3, losses


def check_part_networks() -> None:
    """With AdamW and an average: a step waits for nothing, a graph ends as eager steps do, and bf16 learns.

    Then a pixel touches its own part alone, bit for bit and whatever its value, and the radii are the CPU's.
    """
    (x, y), partition = images(640), Partition.strides((3, 32, 32), (8, 8))
    kinds: dict[Any, dict[str, Any]] = {
        PartMLP: {"width": 128, "depth": 2, "dropout": 0.0},
        PartCNN: {"widths": (16, 32), "blocks": 1, "pool": "learned"},
        PartTransformer: {"width": 32, "depth": 2, "dropout": 0.0},
    }
    config = replace(CONFIG, epochs=4, rates=(0.003,), optimizer="adamw", weight_decay=0.05, ema=0.9)
    objective = certify.VoteObjective(5)
    for kind, settings in kinds.items():
        networks = []
        for graph in (False, True):
            torch.manual_seed(0)
            networks.append(PartVote(kind(partition.part_shape, 64, **settings), partition).cuda())
            with torch.backends.cudnn.flags(deterministic=True):
                fit(networks[-1], (x, y), replace(config, graph=graph), objective=objective)
        # Not the weights: Adam makes whole steps of the roundings of a gradient that is 0, as of the keys' bias.
        with torch.no_grad():
            one, other = (model.eval().part_logits(x[:200].cuda()) for model in networks)
        assert (one - other).abs().mean() < 0.02 * one.std(), (one, other)
        eager = Stepper(networks[0].train(), replace(config, precision="bf16"), batch_loss=objective.at(3, 4))
        batch = x[:64].cuda(), y[:64].cuda()
        eager.step(*batch)
        waits_for_nothing(partial(eager.step, *batch))
        model = PartVote(kind(partition.part_shape, 64, **settings), partition, mirrored=True).cuda()
        how = replace(config, epochs=12, precision="bf16")
        training = fit(model, (x, y), how, objective=certify.VoteObjective(3), validation=images(200, seed=1))
        assert (training.epochs[-1].validation_accuracy or 0.0) > 0.3, training.epochs
        clean, label, others = x[:200].cuda(), y[:200].cuda(), (torch.arange(64) != partition.owner[5 * 32 + 9]).cuda()
        with torch.no_grad():
            before = model.eval().part_logits(clean)
            for value in (torch.nan, torch.inf, -1e30):
                changed = clean.clone()
                changed[:, :, 5, 9] = value
                after = model.part_logits(changed)
                assert torch.equal(after[:, others], before[:, others]), (kind, value)
                assert after.isfinite().all()
        radii = model.radius(clean, label).cpu()
        assert float((radii > 0).double().mean()) > 0.1, radii
        assert float((radii == model.cpu().radius(x[:200], y[:200])).double().mean()) > 0.95, kind


def check_synthesis() -> None:
    """Auto-encoders learn in a graph, of whose steps the images kept for answers follow; answers are the CPU's."""
    x, y = images(640)
    torch.manual_seed(0)
    model = AnalysisBySynthesis(in_shape=(3, 32, 32), hidden=(32,), latents=2, samples=50).cuda()
    config = TrainConfig(epochs=20, batch=64, rates=(0.005,), optimizer="adam", graph=True)
    training = fit(model, (x, y), config, objective=ClassBounds(), validation=images(200, seed=1))
    assert (training.epochs[-1].validation_accuracy or 0.0) > 0.9, training.epochs
    logits = model.eval()(x[:200].cuda()).cpu()
    torch.testing.assert_close(logits, model.cpu()(x[:200]), rtol=1e-3, atol=1e-2)


CHECKS: dict[str, Callable[[], None]] = {
    "graph": check_graph_and_eager,
    "bounds": check_bounds,
    "resume": check_resume,
    "sync": check_no_step_waits_for_the_device,
    "augment": check_augmented_rows,
    "images": check_images,
    "votes": check_votes,
    "part networks": check_part_networks,
    "synthesis": check_synthesis,
    "trades": check_attack_in_the_step,
}


if __name__ == "__main__":
    if torch.cuda.is_available():
        sys.exit(run_checks(CHECKS, sys.argv[1:]))
    print("skipped: torch finds no CUDA GPU")
