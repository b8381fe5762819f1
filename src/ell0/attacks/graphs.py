"""CUDA graphs for attacks: what launches many small kernels is recorded once, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

__all__ = ["Graphs"]

_KNOWN = ("torch.nn.modules", "ell0.nn", "ell0.models")  # whose modules only compute
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FILLED = 0.75  # share of a recorded batch that must be rows still asked about
_UNFIT: WeakSet[nn.Module] = WeakSet()  # models that could not be recorded


class Graphs:
    """Calls that are replayed: the first runs and warms up, the second is recorded, later ones are replays.

    A call must read and change the same tensors each time, and wait for nothing. What it returns, a replay overwrites.
    A model that cannot be recorded is not tried again: then every call runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any] | None] = {}

    @classmethod
    def of(cls, model: object, x: Tensor) -> Graphs | None:
        """None where nothing may be replayed: not on the current GPU, or a part of the model may not only compute."""
        if not _at_hand(x) or not isinstance(model, nn.Module) or model in _UNFIT:
            return None
        return cls(model) if all(map(_only_computes, model.modules())) else None

    def run(self, key: Hashable, call: Callable[[], Any]) -> Any:
        """What the call returns. key: names the call."""
        if key not in self._found or self._model in _UNFIT:
            self._found[key] = None
            return call()
        found = self._found[key]
        if found is None:
            found = self._found[key] = self._record(call)
        if found is None:
            return call()
        graph, answer = found
        graph.replay()
        return answer

    def _record(self, call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any] | None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                answer = call()
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a failed recording leaves its own
            torch.cuda.synchronize()
            _UNFIT.add(self._model)
            return None
        return graph, answer

    def forget(self, key: Hashable = None) -> None:
        """Drops the recording of this key, or all of them."""
        self._found = {} if key is None else {k: v for k, v in self._found.items() if k != key}


def _at_hand(x: Tensor) -> bool:
    """Whether x lies on the current GPU: work for another one would not be recorded."""
    return x.is_cuda and x.device.index == torch.cuda.current_device()


def _only_computes(part: nn.Module) -> bool:
    """Whether a module does what its class says, and that is a layer of torch or ell0: it counts and keeps nothing."""
    home = f"{type(part).__module__}."
    own = "forward" not in vars(part) and not any(getattr(part, hooks) for hooks in _HOOKS)
    return own and any(home.startswith(f"{known}.") for known in _KNOWN)


def recording() -> bool:
    """Whether a graph is being recorded, so that nobody may wait for a value."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
