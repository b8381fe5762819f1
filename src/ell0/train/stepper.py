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
from .config import TrainConfig

BatchLoss = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``batch_loss(model, x, y)``: scores ``(m, classes)``, largest at the label if the row counts as right, and the loss.
Equal ones compute the same."""


class TrainingObjective(Protocol):
    """What a model learns in each epoch; a dataclass of its settings, so that a resumed training can compare them.

    With an attribute ``rounds = True`` it may be trained in bf16: its losses are then called under autocast.
    """

    def at(self, epoch: int, epochs: int) -> BatchLoss:
        """The loss of an epoch."""
        ...

    def check(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Raises ValueError if the model cannot be trained on it with rows like these."""
        ...


WARM_UP = 3  # steps before a capture, as many as torch asks for
_SECOND_BETA = 0.999


class ModelWithLoss(nn.Module):
    """Scores and loss of a batch; batch_loss None: the cross-entropy of the logits."""

    def __init__(self, model: nn.Module, config: TrainConfig, batch_loss: BatchLoss | None) -> None:
        super().__init__()
        self.model, self._batch_loss, self._bf16 = model, batch_loss, config.precision == "bf16"

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._bf16, cache_enabled=False):
            if self._batch_loss is not None:
                return self._batch_loss(self.model, x, y)
            logits = self.model(x)
        return logits, F.cross_entropy(logits.float() if self._bf16 else logits, y)


class Stepper:
    """A model in train mode with its optimizer; `step` trains on one batch.

    rate: the learning rate, a scalar on the device; write to it between steps.
    totals: ``(2,)`` float64 on the device: losses and rows classified right, summed over rows until `take`.
    """

    mode = "eager"

    def __init__(
        self, model: nn.Module, config: TrainConfig, team: Team = ALONE, batch_loss: BatchLoss | None = None
    ) -> None:
        self.model, self.batch_loss, self._config, self._team = model, batch_loss, config, team
        layers = layer_names(model) if batch_loss is None else ()
        self._forward = team.averaged(ModelWithLoss(model, config, batch_loss), layers)
        named = zip(model.named_parameters(), self._forward.parameters(), strict=False)
        self._names = {part: name for (name, whole), part in named if whole.requires_grad}
        self._device = next(iter(self._names)).device
        self.rate = torch.tensor(config.rates[0], dtype=torch.float32, device=self._device)
        self.totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._optimizer = self._build()

    def step(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        """Trains on a batch x ``(m, ...)``, y ``(m,)`` and returns its loss.

        weight: of the loss; on several ranks the size of this rank's share of the batch over the mean share.
        """
        self._optimizer.zero_grad()
        scores: Tensor
        loss: Tensor
        scores, loss = self._forward(x, y)
        loss.backward(torch.full_like(loss, weight))
        if self._team.sharded:
            self._optimizer.param_groups[0]["lr"] = float(self.rate)
        self._optimizer.step()
        self.totals += torch.stack((loss.detach() * len(y), (scores.detach().argmax(1) == y).sum()))
        return loss.detach()

    def take(self) -> tuple[float, float]:
        """Returns the totals and sets them to 0."""
        loss, right = self.totals.tolist()
        self.totals.zero_()
        return loss, right

    def state(self) -> dict[str, Tensor]:
        """This rank's part of the optimizer's tensors, by kind and name of the parameter."""
        return {
            f"{kind}/{name}": tensor
            for parameter, name in self._names.items()
            for kind, tensor in self._optimizer.state[parameter].items()
        }

    def whole_state(self) -> dict[str, Tensor]:
        """The whole state, for rank 0. Of a sharded team every rank must call it; the others get nothing."""
        if not self._team.sharded:
            return self.state()
        whole = {}
        for name, part in self.state().items():
            tensor = self._team.joined(part)
            if self._team.first:
                whole[name] = tensor.cpu()  # the device has no room for all of them
        return whole

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state`, or `whole_state` on any number of ranks, returned."""
        for name, tensor in self.state().items():
            tensor.copy_(self._team.parted(state[name], tensor))

    def _build(self) -> torch.optim.Optimizer:
        """Only the fused kernels read the rate from the device, as a graph must.

        For sharded parameters SGD has none, and Adam's makes all of them whole in its first step.
        """
        config, parameters, sharded = self._config, list(self._names), self._team.sharded
        rate, kernels = (config.rates[0], {"foreach": True}) if sharded else (self.rate, {"fused": True})
        optimizer: torch.optim.Optimizer
        if config.optimizer == "sgd":
            optimizer = torch.optim.SGD(parameters, rate, config.momentum, weight_decay=config.weight_decay, **kernels)
            kinds = ["momentum_buffer"] if config.momentum else []
        else:
            betas, captured = (config.momentum, _SECOND_BETA), self._device.type == "cuda" and not sharded
            optimizer = torch.optim.Adam(
                parameters, rate, betas, weight_decay=config.weight_decay, capturable=captured, **kernels
            )
            kinds = ["exp_avg", "exp_avg_sq"]
        # Made here and not in the first step, so that a checkpoint and a graph have something to write to.
        for parameter in parameters:
            optimizer.state[parameter] = {kind: torch.zeros_like(parameter) for kind in kinds}
            if config.optimizer == "adam":
                optimizer.state[parameter]["step"] = torch.zeros((), device="cpu" if sharded else self._device)
        return optimizer


class GraphStepper(Stepper):
    """A `Stepper` whose step is captured in a CUDA graph and replayed for every batch of the shape of ``x``.

    x, y: a batch to capture with. Capturing changes neither the model nor the totals.
    """

    mode = "graph"

    def __init__(
        self, model: nn.Module, config: TrainConfig, x: Tensor, y: Tensor, batch_loss: BatchLoss | None = None
    ) -> None:
        super().__init__(model, config, batch_loss=batch_loss)
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
        # The warm-up steps are undone in place: the graph keeps these addresses.
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)

    def step(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        """Trains on a batch and returns its loss, in a tensor that the next step overwrites."""
        if len(x) != len(self._x):
            return super().step(x, y, weight)
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        return self._loss


def layer_names(model: nn.Module) -> list[str]:
    """Names in a `ModelWithLoss` of the layers that are called one after the other, each through its own forward.

    One name, that of the model, if they are not known or two of them share a parameter.
    """

    def layers(module: nn.Module, name: str) -> Iterator[str]:
        if type(module).forward is nn.Sequential.forward:
            for child, layer in module.named_children():
                yield from layers(layer, f"{name}.{child}")
        elif any(True for _ in module.parameters()):
            yield name

    tied = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
    return ["model"] if tied else list(layers(model, "model"))


@contextmanager
def attack_precision(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Inside, models compute in the precision of the attack."""
    precision = config.attack_precision or ("tf32" if config.precision == "tf32" else "fp32")
    rounded = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    with dense_products(tf32=precision == "tf32" and device.type == "cuda"), rounded:
        yield


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """At the end every module is in the mode (train or eval) that it was in before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
