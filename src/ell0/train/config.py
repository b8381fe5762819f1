"""How a network is trained: one frozen value, and the paper's two."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal, get_args

from ..common import check_count

Schedule = Literal["steps", "cosine", "triangle"]
Optimizer = Literal["sgd", "nesterov", "adam", "adamw"]
Precision = Literal["fp32", "tf32", "bf16"]
Augment = Literal["none", "crop-flip", "crop-flip-once", "crop-flip-reflect", "shift", "bend", "warp-colour"]


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training.

    epochs, batch: passes over the rows, and rows of a step.
    rates: learning rates. With ``"steps"`` each holds for an equal share of the epochs, in whole epochs; ``"cosine"``
        takes one rate, which falls to 0 over all steps, ``"triangle"`` one which falls in a line.
    warm_up: share of all steps, in [0, 1), over which a cosine or a triangle rises from 0 first.
    momentum: of SGD; for Adam its first beta.
    weight_decay: added to the gradient, times the weights. ``"adamw"`` decays the weights themselves, by the rate times
        this; it and ``"nesterov"`` spare biases, norms (all with fewer than two axes) and embeddings.
    ema: decay of an exponential average of weights and running statistics, in [0, 1): the average is what validation
        sees and what the model has in the end. The first steps count more, so the start is soon forgotten. 0: none.
    refresh: the attack runs before the epochs refresh, 2 * refresh, ..., counted from 0.
    rounds: True: every ``refresh`` epochs, also without an attack, begin a round. It has a new optimizer (momentum 0)
        and keeps its batches in all its epochs. Default: one optimizer, and new batches in each epoch.
    augment: ``"crop-flip"`` moves each image of a step, also those of X', by up to 4 pixels in both directions, fills
        with 0 and mirrors half of them. ``"crop-flip-once"`` does it once, before the first epoch, and fills with black
        (-1), so the attack gets the moved images. ``"crop-flip-reflect"`` is ``"crop-flip"`` with the image mirrored at
        its outermost pixels in place of 0. ``"shift"`` moves each image of a step by up to 1 pixel and fills with the
        nearest pixel. ``"bend"`` turns, zooms, slants, shifts and bends each image of a step, by interpolation: for
        digits and the like. ``"warp-colour"`` turns, zooms and shifts each image of a step, mirrors half of them and
        changes brightness, contrast and saturation.
    seed: determines the order of rows, the augmentation, the draws of the attack and of the model (dropout). The caller
        initialises the weights.
    precision: ``"tf32"``: dense products on a GPU, in steps, attacks and validation; ``"bf16"``: the forward pass of
        steps (autocast), with an objective only if its ``bf16`` is true, while weights, attacks and validation stay in
        float32.
    attack_precision: precision of the attack. Default: float32, or TF32 if ``precision`` says so. ``"bf16"`` rounds
        margins, so X' may hold points that break only the rounded network.
    graph: replay whole batches from a CUDA graph, if the model is on a GPU and there is one rank.
    attack_batch: rows of one call of the attack. Default: 1,024 on the CPU, up to 32,768 on a GPU.
    """

    epochs: int = 250
    batch: int = 256
    rates: tuple[float, ...] = (0.001,)
    schedule: Schedule = "steps"
    warm_up: float = 0.0
    optimizer: Optimizer = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    ema: float = 0.0
    refresh: int = 25
    rounds: bool = False
    augment: Augment = "none"
    seed: int = 0
    precision: Precision = "fp32"
    attack_precision: Precision | None = None
    graph: bool = True
    attack_batch: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "refresh", *(["attack_batch"] if self.attack_batch is not None else [])):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        object.__setattr__(self, "seed", check_count("seed", self.seed, least=0))
        kinds = {"schedule": Schedule, "optimizer": Optimizer, "augment": Augment, "precision": Precision}
        kinds |= {} if self.attack_precision is None else {"attack_precision": Precision}
        for name, kind in kinds.items():
            if getattr(self, name) not in get_args(kind):
                words = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name} must be one of {words}, got {getattr(self, name)!r}")
        if not isinstance(self.rates, tuple) or not self.rates or not all(_is_number(rate) for rate in self.rates):
            raise ValueError(f"rates must be a tuple of at least one number >= 0, got {self.rates!r}")
        if not _is_number(self.weight_decay):
            raise ValueError(f"weight_decay must be a number >= 0, got {self.weight_decay!r}")
        for name in ("momentum", "warm_up", "ema"):
            if not _is_number(getattr(self, name)) or getattr(self, name) >= 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)!r}")
        if self.schedule != "steps" and len(self.rates) > 1:
            raise ValueError(f'rates must be one for schedule="{self.schedule}", got {self.rates!r}')
        if self.schedule == "steps" and self.warm_up:
            raise ValueError(f'warm_up must be 0 for schedule="steps", got {self.warm_up!r}')
        for name in ("rounds", "graph"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def rates_of(self, epoch: int, steps: int) -> list[float]:
        """The learning rate of each step of an epoch."""
        if self.schedule == "steps":
            return [self.rates[epoch * len(self.rates) // self.epochs]] * steps
        (rate,), rates = self.rates, []
        for step in range(steps):
            done = (epoch + (step + 0.5) / steps) / self.epochs
            fallen = (done - self.warm_up) / (1 - self.warm_up)
            left = (1 + math.cos(math.pi * fallen)) / 2 if self.schedule == "cosine" else 1 - fallen
            rates.append(rate * (done / self.warm_up if done < self.warm_up else left))
        return rates

    def attacks_before(self, epoch: int) -> bool:
        """Whether adversarial training attacks before this epoch."""
        return epoch > 0 and epoch % self.refresh == 0

    def batches_of(self, epoch: int) -> int:
        """The epoch for which the batches of this one are drawn: itself, or with ``rounds`` the first of its round."""
        return epoch - epoch % self.refresh if self.rounds else epoch


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


PAPER_MNIST = TrainConfig()
"""The paper's training of F(k) on MNIST, with one optimizer for all epochs     ([Beliaev22] appendix, table 4).

Differs from [Beliaev22]'s supplement: each epoch draws its batches; there the 25 epochs between two attacks keep them.
"""

_CIFAR10_RATES = (0.2, 0.1, 0.05, 0.025, 0.01, 0.005, 0.0025, 0.001, 0.0005, 0.00025)
PAPER_CIFAR10 = TrainConfig(batch=128, rates=_CIFAR10_RATES, weight_decay=5e-4, rounds=True, augment="crop-flip-once")
"""The paper's training of VGG(k) on CIFAR-10: ten rounds of 25 epochs, each with its rate, and images that are moved
once     ([Beliaev22] appendix, table 5; rounds and images as in its supplement)."""
