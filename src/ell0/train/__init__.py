"""Training, clean or against an attack; killed at any moment it goes on to the same weights."""

from ._checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ._config import PAPER_CIFAR10, PAPER_MNIST, TrainConfig
from ._fit import fit
from ._record import AttackStage, Epoch, Training
from ._step import Objective
from ._trades import Trades

__all__ = [
    "PAPER_CIFAR10",
    "PAPER_MNIST",
    "AttackStage",
    "Checkpoint",
    "Epoch",
    "Objective",
    "Trades",
    "TrainConfig",
    "Training",
    "fit",
    "load_checkpoint",
    "save_checkpoint",
]
