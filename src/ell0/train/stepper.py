"""One step of training: the only place where gradients are taken and weights change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel import ALONE, Team
from .average import Average
from .config import TrainConfig

BatchLoss = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``batch_loss(model, x, y)``: scores ``(m, classes)``, largest at the label if the row counts as right, and the loss.
Equal ones compute the same."""


class TrainingObjective(Protocol):
    """What a model learns in each epoch; a dataclass of its settings, so that a resumed training can compare them.

    With an attribute ``bf16 = True`` it may be trained in bf16: its losses are then called under autocast.
    """

    def at(self, epoch: int, epochs: int) -> BatchLoss:
        """The loss of an epoch."""

    def check(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Raises ValueError if the model cannot be trained on it with rows like these."""


def float_logits(model: nn.Module, x: Tensor) -> Tensor:
    """The logits, in float32 if autocast made them bf16."""
    logits: Tensor = model(x)
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The `BatchLoss` of a training without an objective."""
    logits = float_logits(model, x)
    return logits, F.cross_entropy(logits, y)


class ModelWithLoss(nn.Module):
    """Scores and loss of a batch, as one module, which is what ranks average the gradients of."""

    def __init__(self, model: nn.Module, batch_loss: BatchLoss, bf16: bool, average: Average | None) -> None:
        super().__init__()
        self.model, self._batch_loss, self._bf16 = model, batch_loss, bf16
        if average is not None:
            # The statistics of ranks differ: as buffers, those of rank 0 reach the others.
            for place, buffer in enumerate(average.of_buffers()):
                self.register_buffer(f"average{place}", buffer)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._bf16, cache_enabled=False):
            return self._batch_loss(self.model, x, y)


class Stepper:
    """A model in train mode with its optimizer; `step` trains on one batch.

    batch_loss: None is `cross_entropy`.
    rate: the learning rate, a scalar on the device; write to it between steps.  average: None without one.
    totals: ``(2,)`` float64 on the device: losses and rows classified right, summed over rows until `take`.
    """

    mode = "eager"

    def __init__(
        self, model: nn.Module, config: TrainConfig, team: Team = ALONE, batch_loss: BatchLoss | None = None
    ) -> None:
        self.model, self.batch_loss = model, batch_loss
        self.average = Average(model, config.ema) if config.ema else None
        with_loss = ModelWithLoss(model, batch_loss or cross_entropy, config.precision == "bf16", self.average)
        self._forward = team.averaged(with_loss)
        self._names = {weights: name for name, weights in model.named_parameters() if weights.requires_grad}
        self._device = next(iter(self._names)).device
        self.rate = torch.tensor(config.rates[0], dtype=torch.float32, device=self._device)
        self.totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._optimizer = self._build(config)

    def step(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        """Trains on a batch x ``(m, ...)``, y ``(m,)`` and returns its loss.

        weight: of the loss; on several ranks the size of this rank's share of the batch over the mean share.
        """
        self._optimizer.zero_grad()
        found: tuple[Tensor, Tensor] = self._forward(x, y)
        scores, loss = found
        loss.backward(torch.full_like(loss, weight))
        self._optimizer.step()
        if self.average is not None:
            self.average.update()
        self.totals += torch.stack((loss.detach() * len(y), (scores.detach().argmax(1) == y).sum()))
        return loss.detach()

    def take(self) -> tuple[float, float]:
        """Returns the totals and sets them to 0."""
        loss, right = self.totals.tolist()
        self.totals.zero_()
        return loss, right

    def state(self) -> dict[str, Tensor]:
        """The tensors of optimizer and average, by kind and name of the parameter."""
        return self._optimizer_state() | ({} if self.average is None else self.average.state())

    def load(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state` returned."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def restart(self) -> None:
        """Makes the optimizer a new one, in place: a graph keeps the addresses of its tensors."""
        for tensor in self._optimizer_state().values():
            tensor.zero_()

    def _optimizer_state(self) -> dict[str, Tensor]:
        return {
            f"{kind}/{name}": tensor
            for parameter, name in self._names.items()
            for kind, tensor in self._optimizer.state[parameter].items()
        }

    def _build(self, config: TrainConfig) -> torch.optim.Optimizer:
        """Only the fused kernels read the rate from the device, as a graph must."""
        parameters, momentum, decay = list(self._names), config.momentum, config.weight_decay
        optimizer: torch.optim.Optimizer
        apart = config.optimizer in ("nesterov", "adamw")
        groups = self._decayed_apart() if apart else [{"params": parameters}]
        if config.optimizer in ("sgd", "nesterov"):
            optimizer = torch.optim.SGD(groups, self.rate, momentum, weight_decay=decay, nesterov=apart, fused=True)
            kinds = ["momentum_buffer"] if momentum else []
        else:
            betas, captured = (momentum, 0.999), self._device.type == "cuda"
            adam = torch.optim.AdamW if apart else torch.optim.Adam
            optimizer = adam(groups, self.rate, betas, weight_decay=decay, capturable=captured, fused=True)
            kinds = ["exp_avg", "exp_avg_sq"]
        # Made here and not in the first step, so that a checkpoint and a graph have something to write to.
        for parameter in parameters:
            optimizer.state[parameter] = {kind: torch.zeros_like(parameter) for kind in kinds}
            if "exp_avg" in kinds:
                optimizer.state[parameter]["step"] = torch.zeros((), device=self._device)
        return optimizer

    def _decayed_apart(self) -> list[dict[str, Any]]:
        """Two groups of parameters; the second, biases, norms and embeddings, does not decay."""
        embeddings = {m.weight for m in self.model.modules() if isinstance(m, nn.Embedding)}
        spared = [each for each in self._names if each.ndim < 2 or each in embeddings]
        decayed = [each for each in self._names if each.ndim >= 2 and each not in embeddings]
        return [{"params": some} | rest for some, rest in ((decayed, {}), (spared, {"weight_decay": 0.0})) if some]


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
            for _ in range(3):  # as many as torch asks for before a capture
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


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Inside, parameters begin without gradients. At the end modes (train or eval) and gradients are as before."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        yield
