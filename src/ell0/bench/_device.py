"""The device a benchmark runs on, and its name in the results."""

from __future__ import annotations

from typing import Literal, get_args

import torch

Device = Literal["cpu", "cuda"]


def check_device(device: Device) -> torch.device:
    """The device; raises where it is not here."""
    if device not in get_args(Device):
        raise ValueError(f'device must be "cpu" or "cuda", got {device!r}')
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError('device must be "cpu" where torch finds no CUDA GPU, got "cuda"')
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def card(device: torch.device) -> str:
    """What the names of results end with: ``"h200"`` of an NVIDIA H200, ``"cpu"`` of every processor."""
    return torch.cuda.get_device_name(device).split()[-1].lower() if device.type == "cuda" else "cpu"
