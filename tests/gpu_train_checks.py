"""Checks of training that need a GPU, torch and numpy alone: ``python tests/gpu_train_checks.py [NAME ...]``."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ell0 import L0Ball, certify, models, train
from ell0.attacks import sparse_rs
from ell0.certify import PartitionEnsemble, RandomisedAblation
from ell0.nn import InputClamp, InputTruncation
from ell0.train import Trades, TrainConfig, fit
from ell0.train.rows import AUGMENTS
from ell0.train.stepper import GraphStepper, Stepper
from gpu_checks import run_checks

STEPS = 20
CONFIG = TrainConfig(epochs=5, batch=64, rates=(0.05, 0.02), refresh=2, attack_batch=100)
ATTACK = partial(sparse_rs, ball=L0Ball(5, low=-100.0, high=100.0), queries=20)


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise around one image for each class, in [-1, 1], most of it at -1 as in MNIST."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (n,), generator=g)
    classes = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(99))
    x = (classes[y] + 0.2 * torch.randn(n, 1, 28, 28, generator=g)).clamp(0, 1)
    return torch.where(x < 0.7, -1.0, 2 * x - 1), y


def images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise around one colour image for each class, in [-1, 1]."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (n,), generator=g)
    classes = torch.rand(10, 3, 32, 32, generator=torch.Generator().manual_seed(99))
    return (2 * classes[y] - 1 + 0.3 * torch.randn(n, 3, 32, 32, generator=g)).clamp(-1, 1), y


def convolutions() -> nn.Module:
    """The first layers of VGG(10): truncation, convolutions, batch norm, pooling."""
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    features += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(InputTruncation((3, 32, 32), 10), *features, nn.Flatten(), nn.Linear(2048, 10)).cuda()


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = models.mlp(10, hidden=(128, 64))
    if norm:
        layers = nn.Sequential(nn.BatchNorm2d(1), *layers, nn.Dropout(0.1))
    return layers.to("cuda")


def close(one: nn.Module, other: nn.Module, most: float = 1e-4) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        difference = float((a.double() - b.double()).abs().max())
        assert difference <= most, f"{name} differs by {difference}"


def train_both(config: TrainConfig, norm: bool = False) -> None:
    """20 steps under a schedule, one of them on a smaller batch, eager and from a graph."""
    x, y = (t.cuda() for t in rows(config.batch * STEPS))
    networks = network(norm), network(norm)
    for model in networks:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # a graph draws other numbers
    before = {name: tensor.clone() for name, tensor in networks[0].state_dict().items()}
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
    moved = max(float((t.double() - before[name].double()).abs().max()) for name, t in networks[0].state_dict().items())
    assert moved > 1e-3, "nothing was learnt, so nothing was compared"
    (loss, right), (loss_, right_) = eager.take(), graph.take()
    assert abs(loss - loss_) <= 1e-3 * loss
    assert abs(right - right_) <= 2


def check_graph_and_eager() -> None:
    train_both(CONFIG)
    train_both(replace(CONFIG, optimizer="adam", rates=(0.001, 0.0005)))
    train_both(replace(CONFIG, weight_decay=1e-3), norm=True)


def check_fit_with_and_without_graphs() -> None:
    """A last batch that is smaller, a rate that changes at every step, X' of an attack before the last epoch."""
    config = replace(CONFIG, schedule="cosine", rates=(0.05,), warm_up=0.1, epochs=3)
    networks, trainings = (network(), network()), []
    for model, graph in zip(networks, (False, True), strict=True):
        trainings.append(fit(model, rows(330), replace(config, graph=graph), validation=rows(100, seed=1)))
    close(*networks)
    for one, other in zip(*(training.epochs for training in trainings), strict=True):
        assert abs(one.loss - other.loss) <= 1e-4
        assert one.rate == other.rate
    training = fit(network(), rows(330), replace(config, graph=True), ATTACK)
    assert training.epochs[-1].appended > 0


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


class Killed(BaseException):
    pass


def stop_and_go_on(make: Callable[[], nn.Module], stops: tuple[int, ...], most: float, **arguments: Any) -> None:
    """Stopped at any report of progress and called again, a training and its checkpoint end as without a stop."""

    def run(out: str | None = None, stop: int | None = None) -> nn.Module:
        events = itertools.count()

        def progress(_: object) -> None:
            if next(events) == stop:
                raise Killed

        model = make()
        fit(model, attack=ATTACK, out=out, progress=progress, **arguments)
        return model

    whole = run()
    close(run(), whole, most)
    for stop in stops:
        with tempfile.TemporaryDirectory() as folder:
            stopped = False
            try:
                run(folder, stop)
            except Killed:
                stopped = True
            assert stopped
            close(run(folder), whole, most)
            loaded = make()
            train.load_checkpoint(folder).into(loaded)
            close(loaded, whole, most)


def check_resume() -> None:
    """The same bits as without a stop, statistics and dropout included; and an augmented bf16 run of convolutions."""
    make = partial(network, norm=True)
    stop_and_go_on(make, (0, 1, 3, 6, 8), 0.0, data=rows(330), config=CONFIG, validation=rows(100, seed=1))
    config = replace(CONFIG, augment="crop-flip", precision="bf16", attack_precision="bf16")
    # Else a convolution may sum its gradients in any order.
    with torch.backends.cudnn.flags(deterministic=True):
        stop_and_go_on(convolutions, (1, 4, 8), 1e-3, data=images(330), config=config)


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
    """From a graph and eager, in double precision: the same weights and statistics; and a bf16 run that learns."""
    config = replace(CONFIG, augment="crop-flip", rates=(0.02,))
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
    # The images are noise, which is another image once it is moved.
    half = replace(config, augment="none", precision="bf16", attack_precision="bf16")
    model = convolutions()
    training = fit(model, images(640), half, ATTACK, validation=images(200, seed=1))
    first, last = training.epochs[0], training.epochs[-1]
    assert last.loss < first.loss
    assert last.validation_accuracy is not None
    assert last.validation_accuracy > 0.5, last.validation_accuracy
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


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
    trades = Trades(60, "pixel", steps=5)
    makes: list[Callable[[], nn.Module]] = [convolutions, partial(learnt_vgg, x, y)]
    for precision, make in itertools.product(("fp32", "bf16"), makes):
        kind: dict[str, Any] = {"precision": precision}
        config = replace(CONFIG, batch=len(x), **kind)
        graph, eager = GraphStepper(make(), config, x, y, trades), Stepper(make(), config, batch_loss=trades)
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
        print(f"  {precision}: loss {one:.4f} from a graph, {other:.4f} without, +- {error:.4f}")
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
    training = fit(convolutions(), images(640), config, objective=Trades(60, "pixel", steps=5))
    assert training.epochs[-1].train_accuracy > 0.9, [epoch.train_accuracy for epoch in training.epochs]


def learnt_vgg(x: Tensor, y: Tensor) -> nn.Module:
    """VGG(0) behind a clamp, its weights and statistics of a few epochs."""
    torch.manual_seed(0)
    model = nn.Sequential(InputClamp(), *models.vgg19(0)).cuda()
    with torch.backends.cudnn.flags(deterministic=True):
        fit(model, (x, y), replace(CONFIG, epochs=3, rates=(0.02,)))
    return model


def check_precisions() -> None:
    """Each trains, and torch's switches end as they were."""
    switches = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.allow_tf32
    kinds: list[dict[str, Any]] = [{"precision": "tf32"}, {"precision": "bf16"}]
    for kind in kinds:
        training = fit(network(), rows(640), replace(CONFIG, **kind))
        assert training.epochs[-1].loss < training.epochs[0].loss, kind
    after = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.allow_tf32
    assert (after[0] == "tf32", after[1]) == (switches[0] == "tf32", switches[1])


def check_votes() -> None:
    """The rivals' steps are captured, they learn, and each replay hides other pixels; copies vote in bf16, folded."""
    x, y = (t.cuda() for t in images(640))
    base = models.cnn(in_shape=(6, 32, 32), widths=(16, 32), depth=2)
    ablation = RandomisedAblation(base, 200, selection=50, samples=200, precision="bf16").cuda()
    config = TrainConfig(epochs=20, batch=64, rates=(0.002,), optimizer="adam", graph=True)
    for model in (PartitionEnsemble((3, 32, 32), 16, hidden=(32,)).cuda(), ablation):
        training = fit(model, (x, y), config)
        assert training.epochs[-1].loss < 0.5 * training.epochs[0].loss, training.epochs
        radii = model.eval().radius(x[:40], y[:40], L0Ball(1, "pixel"))
        assert float(radii.double().mean()) > 0, radii
    stepper = GraphStepper(ablation.train(), replace(config, rates=(0.0,)), x[:64], y[:64])
    losses = {float(stepper.step(x[:64], y[:64])) for _ in range(3)}
    assert len(losses) == 3, losses


CHECKS: dict[str, Callable[[], None]] = {
    "graph": check_graph_and_eager,
    "fit": check_fit_with_and_without_graphs,
    "bounds": check_bounds,
    "resume": check_resume,
    "sync": check_no_step_waits_for_the_device,
    "precisions": check_precisions,
    "augment": check_augmented_rows,
    "images": check_images,
    "votes": check_votes,
    "trades": check_attack_in_the_step,
}


if __name__ == "__main__":
    if torch.cuda.is_available():
        sys.exit(run_checks(CHECKS, sys.argv[1:]))
    print("skipped: torch finds no CUDA GPU")
