"""Training: clean, against an attack, or on another objective. A killed training resumes to the same weights."""

from .checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from .config import PAPER_CIFAR10, PAPER_MNIST, TrainConfig
from .loop import Epoch, Training, fit
from .stepper import TrainingObjective
from .trades import Trades

__all__ = [
    "PAPER_CIFAR10",
    "PAPER_MNIST",
    "Checkpoint",
    "Epoch",
    "Trades",
    "TrainConfig",
    "Training",
    "TrainingObjective",
    "fit",
    "load_checkpoint",
    "save_checkpoint",
]
