"""Times of several things, measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """Seconds of several things, measured in turns so that a slow moment of the machine hits all of them."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds of one of them."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, to: str) -> dict[str, Any]:
        """Median over median; low and high are the ratios of single rounds."""
        rounds = [a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=True)]
        return {
            "value": self.median(name) / self.median(to),
            "n": len(rounds),
            "low": min(rounds),
            "high": max(rounds),
            "seconds": self.median(name),
        }


def timed(calls: Mapping[str, Callable[[], object]], rounds: int) -> Timing:
    """Runs every call once to warm up, then all of them ``rounds`` times in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return Timing(seconds)


def cuda_timed(calls: Mapping[str, Callable[[], object]], rounds: int) -> Timing:
    """As `timed`, by the clock of the current CUDA device.

    Calls are queued and nobody waits between them: where the device is slower than the host, the host's time is hidden.
    """
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return Timing({name: [start.elapsed_time(end) / 1000 for start, end in pairs] for name, pairs in events.items()})


def timer(device: torch.device) -> Callable[[Mapping[str, Callable[[], object]], int], Timing]:
    """`timed` or `cuda_timed`."""
    return cuda_timed if device.type == "cuda" else timed
