"""One step of training: the only place where gradients are taken and weights change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel import ALONE, Team
from ..precision import dense_products
from ._config import TrainConfig

Stage = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""What a model learns from a batch: scores ``(m, classes)``, largest at the label where the row counts as right, and
the loss. Equal stages do the same."""


class Objective(Protocol):
    """What a model learns in the course of its training; its ``repr`` says all there is to know of it.

    One with an attribute ``rounds = True`` may be trained in bf16: its stages are then called under autocast.
    """

    def at(self, epoch: int, epochs: int) -> Stage:
        """What it learns in an epoch."""
        ...


WARM_UP = 3  # steps before a capture, as many as torch asks for
_SECOND_BETA = 0.999


class Lesson(nn.Module):
    """A model and what it learns; None: by the cross-entropy of its logits."""

    def __init__(self, model: nn.Module, config: TrainConfig, stage: Stage | None) -> None:
        super().__init__()
        self.model, self.stage, self._bf16 = model, stage, config.precision == "bf16"

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._bf16, cache_enabled=False):
            if self.stage is not None:
                return self.stage(self.model, x, y)
            logits = self.model(x)
        return logits, F.cross_entropy(logits.float() if self._bf16 else logits, y)


class Stepper:
    """A model in train mode, its optimizer and a step, by which it learns from a batch.

    rate: the learning rate, a scalar on the device, which may be written to between steps.
    totals: ``(2,)`` float64 on the device: the losses and the rows classified right, summed over rows until `take`.
    """

    mode = "eager"

    def __init__(self, model: nn.Module, config: TrainConfig, team: Team = ALONE, stage: Stage | None = None) -> None:
        self.model, self.stage, self._config, self._team = model, stage, config, team
        self._plain = team.averaged(Lesson(model, config, stage), _layers(model) if stage is None else ())
        named = zip(model.named_parameters(), self._plain.parameters(), strict=False)
        self._names = {part: name for (name, whole), part in named if whole.requires_grad}
        self._device = next(iter(self._names)).device
        self.rate = torch.tensor(config.rates[0], dtype=torch.float32, device=self._device)
        self.totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._optimizer = self._build()
        self._forward: Callable[..., tuple[Tensor, Tensor]] = (
            torch.compile(self._plain) if config.compile else self._plain
        )
        self._whole = len(team.share(torch.arange(config.batch)))

    def step(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        """Learns from a batch and gives its loss.

        x: ``(m, ...)``.  y: ``(m,)``.  weight: of its loss; where ranks have a share of the batch each, and not all of
            the same size, that of this rank to the mean share.
        """
        # A smaller last batch would be compiled anew for every size.
        return self._learn(self._forward if len(x) == self._whole else self._plain, x, y, weight)

    def take(self) -> tuple[float, float]:
        """The totals, which begin anew."""
        loss, right = self.totals.tolist()
        self.totals.zero_()
        return loss, right

    def state(self) -> dict[str, Tensor]:
        """The tensors of the optimizer, by their kind and the name of the parameter; this rank's part of them."""
        return {
            f"{kind}/{name}": tensor
            for parameter, name in self._names.items()
            for kind, tensor in self._optimizer.state[parameter].items()
        }

    def whole_state(self) -> dict[str, Tensor]:
        """The same, whole, for rank 0; where it is sharded the others must ask too, and get nothing."""
        if not self._team.sharded:
            return self.state()
        whole = {}
        for name, part in self.state().items():
            tensor = self._team.joined(part)
            if self._team.first:
                whole[name] = tensor.cpu()  # there is no room for all of them on the device
        return whole

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state` or, on another number of ranks, `whole_state` gave."""
        own = self.state()
        if own.keys() != state.keys() or any(own[name].shape != state[name].shape for name in own):
            raise ValueError("the checkpoint must hold the optimizer's state for this model, and it does not")
        for name, tensor in own.items():
            tensor.copy_(self._team.parted(state[name], tensor))

    def _learn(self, lesson: Callable[..., tuple[Tensor, Tensor]], x: Tensor, y: Tensor, weight: float) -> Tensor:
        self._optimizer.zero_grad()
        scores, loss = lesson(x, y)
        loss.backward(torch.full_like(loss, weight))
        if self._team.sharded:
            self._optimizer.param_groups[0]["lr"] = float(self.rate)
        self._optimizer.step()
        loss = loss.detach()
        self.totals += torch.stack((loss * len(y), (scores.detach().argmax(1) == y).sum()))
        return loss

    def _build(self) -> torch.optim.Optimizer:
        """The fused kernels are the only ones that read the rate from the device, as a graph must.

        Of sharded parameters SGD's knows nothing, and Adam's makes all of them whole in its first step.
        """
        config, parameters, sharded = self._config, list(self._names), self._team.sharded
        rate, kernels = (config.rates[0], {"foreach": True}) if sharded else (self.rate, {"fused": True})
        if config.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(
                parameters, rate, config.momentum, weight_decay=config.weight_decay, **kernels
            )
            kinds = ["momentum_buffer"] if config.momentum else []
        else:
            optimizer = torch.optim.Adam(
                parameters, rate, (config.momentum, _SECOND_BETA), weight_decay=config.weight_decay,
                capturable=self._device.type == "cuda" and not sharded, **kernels,
            )  # fmt: skip
            kinds = ["exp_avg", "exp_avg_sq"]
        # Made here and not in the first step, so that a checkpoint and a graph have something to write to.
        for parameter in parameters:
            optimizer.state[parameter] = {kind: torch.zeros_like(parameter) for kind in kinds}
            if config.optimizer == "adam":
                optimizer.state[parameter]["step"] = torch.zeros((), device="cpu" if sharded else self._device)
        return optimizer


class GraphStepper(Stepper):
    """The same, its step captured once in a CUDA graph and replayed for every batch of the shape of ``x``.

    x, y: a batch to capture with; the model ends as it was, and no step is counted.
    """

    mode = "graph"

    def __init__(self, model: nn.Module, config: TrainConfig, x: Tensor, y: Tensor, stage: Stage | None = None) -> None:
        super().__init__(model, config, stage=stage)
        self._x, self._y = x.clone(), y.clone()
        changed = [*model.parameters(), *model.buffers(), *self.state().values(), self.totals]
        before = [tensor.detach().clone() for tensor in changed]
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                super().step(self._x, self._y)
        torch.cuda.current_stream(self._device).wait_stream(side)
        # Gradients are to be made inside the graph's own memory.
        self._optimizer.zero_grad()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = super().step(self._x, self._y)
        # The steps of the warm-up are taken back in place, where the graph looks.
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)

    def step(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        """Learns from a batch and gives its loss, in a tensor that the next step may write to."""
        if len(x) != len(self._x):
            return self._learn(self._plain, x, y, weight)
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        return self._loss


def _layers(model: nn.Module) -> list[str]:
    """The names in a `Lesson` of the parts of a model that are called one after the other, each by its own forward.

    One, if that is not known, or if two of them have a parameter in common.
    """

    def parts(module: nn.Module, name: str) -> Iterator[str]:
        if type(module).forward is not nn.Sequential.forward:
            yield from [name] if any(True for _ in module.parameters()) else []
            return
        for its, part in module.named_children():
            yield from parts(part, f"{name}.{its}")

    tied = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
    return ["model"] if tied else list(parts(model, "model"))


@contextmanager
def attack_precision(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Inside, models compute as the attack of a training is to see them."""
    precision = config.attack_precision or ("tf32" if config.precision == "tf32" else "fp32")
    rounded = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    with dense_products(tf32=precision == "tf32" and device.type == "cuda"), rounded:
        yield
