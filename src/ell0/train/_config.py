"""How a network is trained: one frozen value, and the two of the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..attacks.contract import check_count

Schedule = Literal["steps", "cosine"]
Optimizer = Literal["sgd", "adam"]
Precision = Literal["fp32", "tf32", "bf16"]
Augment = Literal["none", "crop-flip", "shift"]


@dataclass(frozen=True)
class TrainConfig:
    """The parameters of a training.

    epochs, batch: passes over the rows, and rows of a step.
    rates: learning rates. By ``"steps"`` each holds for an equal share of the epochs, in whole epochs; ``"cosine"`` has
        one, from which the rate falls to 0 over all steps.
    warm_up: share of all steps in which a cosine first rises, from 0; in [0, 1).
    momentum: of SGD; of Adam its first beta.  weight_decay: times the weights, added to the gradient.
    refresh: an attack runs before the epochs refresh, 2 * refresh, ..., counted from 0.
    augment: ``"crop-flip"``: in a step each image, those of X' too, is moved by up to 4 pixels in both directions,
        with 0 where nothing comes in, and mirrored every other time. ``"shift"``: by up to 1 pixel, with the nearest of
        its pixels where nothing comes in, so that a changed pixel of the edge may appear more than once. For x
        ``(n, channels, height, width)``.
    seed: gives the order of the rows in each epoch, how they are augmented, the key of each attack, and what a model
        draws (dropout). The weights are the caller's.
    precision: ``"tf32"`` is for the dense products on a GPU, in steps, attacks and validation; ``"bf16"`` for the
        forward of the steps (autocast), while weights, attacks and validation stay in float32.
    attack_precision: of the attack; None: as ``precision`` says. In ``"bf16"`` margins are rounded, so that X' may hold
        points which break the network only when it is rounded like that.
    channels_last: the weights of convolutions lie as a GPU's fast ones want them, and stay so; no value changes. None:
        where the model is on a GPU.
    compile: ``torch.compile`` for the forward of whole batches.
    graph: whole batches are replayed from a CUDA graph; None: where the model is on a GPU.
    attack_batch: rows of one call of the attack; None: 1,024 on the CPU, up to 32,768 on a GPU.
    """

    epochs: int = 250
    batch: int = 256
    rates: tuple[float, ...] = (0.001,)
    schedule: Schedule = "steps"
    warm_up: float = 0.0
    optimizer: Optimizer = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    refresh: int = 25
    augment: Augment = "none"
    seed: int = 0
    precision: Precision = "fp32"
    attack_precision: Precision | None = None
    channels_last: bool | None = None
    compile: bool = False
    graph: bool | None = None
    attack_batch: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "refresh"):
            check_count(name, getattr(self, name))
        if self.attack_batch is not None:
            check_count("attack_batch", self.attack_batch)
        check_count("seed", self.seed, least=0)
        kinds = {"schedule": Schedule, "optimizer": Optimizer, "augment": Augment, "precision": Precision}
        if self.attack_precision is not None:
            kinds["attack_precision"] = Precision
        for name, kind in kinds.items():
            if getattr(self, name) not in get_args(kind):
                words = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name} must be one of {words}, got {getattr(self, name)!r}")
        if not isinstance(self.rates, tuple) or not self.rates or not all(_is_number(rate) for rate in self.rates):
            raise ValueError(f"rates must be a tuple of at least one number >= 0, got {self.rates!r}")
        if not _is_number(self.weight_decay):
            raise ValueError(f"weight_decay must be a number >= 0, got {self.weight_decay!r}")
        for name in ("momentum", "warm_up"):
            if not _is_number(getattr(self, name)) or getattr(self, name) >= 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)!r}")
        if self.schedule == "cosine" and len(self.rates) > 1:
            raise ValueError(f'rates must be one for schedule="cosine", got {self.rates!r}')
        if self.schedule == "steps" and self.warm_up:
            raise ValueError(f'warm_up must be 0 for schedule="steps", got {self.warm_up!r}')
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile must be True or False, got {self.compile!r}")
        for name in ("graph", "channels_last"):
            if not isinstance(getattr(self, name), bool | None):
                raise ValueError(f"{name} must be True, False or None, got {getattr(self, name)!r}")

    def rates_of(self, epoch: int, steps: int) -> list[float]:
        """The learning rate of each step of an epoch."""
        if self.schedule == "steps":
            return [self.rates[epoch * len(self.rates) // self.epochs]] * steps
        return [self._cosine((epoch + (step + 0.5) / steps) / self.epochs) for step in range(steps)]

    def _cosine(self, share: float) -> float:
        """The rate when this share of the training is done."""
        if share < self.warm_up:
            return self.rates[0] * share / self.warm_up
        return self.rates[0] * (1 + math.cos(math.pi * (share - self.warm_up) / (1 - self.warm_up))) / 2

    def attacks_before(self, epoch: int) -> bool:
        """Whether an adversarial training attacks before this epoch."""
        return epoch > 0 and epoch % self.refresh == 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


PAPER_MNIST = TrainConfig()
"""The paper's training of F(k) on MNIST     ([Beliaev22] appendix, table 4)."""

PAPER_CIFAR10 = TrainConfig(
    batch=128,
    rates=(0.2, 0.1, 0.05, 0.025, 0.01, 0.005, 0.0025, 0.001, 0.0005, 0.00025),
    weight_decay=5e-4,
)
"""The paper's training of VGG(k) on CIFAR-10: each rate for 25 epochs     ([Beliaev22] appendix, table 5)."""
