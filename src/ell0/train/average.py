"""An exponential average of weights, changed in place so that a CUDA graph can hold it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """The average of a model's weights and running statistics over the steps of a training.

    In step t, counted from 1:     average <- average + max(1 - decay, 10 / (9 + t)) * (weights - average)

    so it begins at the weights after the first step and looks back over a tenth of the steps, until decay limits it.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay, self._buffers = decay, {name for name, _ in model.named_buffers()}
        # The model's own memory: a step and a checkpoint write to it in place.
        self._values = {name: own for name, own in model.state_dict().items() if own.is_floating_point()}
        self._averages = {name: own.clone() for name, own in self._values.items()}
        self._steps = torch.zeros((), device=next(model.parameters()).device)

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights after a step."""
        self._steps += 1
        weight, averages = (10 / (9 + self._steps)).clamp(min=1 - self._decay), list(self._averages.values())
        # All at once: a kernel for each tensor would take longer than its work.
        moved = torch._foreach_sub(list(self._values.values()), averages)
        torch._foreach_mul_(moved, weight)
        torch._foreach_add_(averages, moved)

    def of_buffers(self) -> list[Tensor]:
        """Those of the model's statistics."""
        return [average for name, average in self._averages.items() if name in self._buffers]

    def state(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        return {"average": self._steps} | {f"average/{name}": its for name, its in self._averages.items()}

    @torch.no_grad()
    def take(self) -> None:
        """Gives the model the average for good."""
        for name, value in self._values.items():
            value.copy_(self._averages[name])

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the model has the average."""
        weights = {name: value.clone() for name, value in self._values.items()}
        self.take()
        try:
            yield
        finally:
            for name, value in self._values.items():
                value.copy_(weights[name])
