"""CUDA graphs for attacks: what launches many small kernels is recorded once, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

__all__ = ["Graphs"]

_KNOWN = ("ell0", "torch", "torchvision")  # packages whose modules draw nothing and count nothing that torch does not
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
        """None where nothing may be replayed: not on a GPU, or a part of the model may do more than compute."""
        if not x.is_cuda or not isinstance(model, nn.Module) or model in _UNFIT:
            return None
        known = (
            type(part).__module__.split(".")[0] in _KNOWN and not part._forward_hooks and not part._forward_pre_hooks
            for part in model.modules()
        )  # fmt: skip
        return cls(model) if all(known) else None

    def run(self, key: Hashable, call: Callable[[], Any]) -> Any:
        """What the call returns. key: of what is to be replayed."""
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
        """Everything under the key, or all, will be recorded anew."""
        self._found = {} if key is None else {k: v for k, v in self._found.items() if k != key}


def recording() -> bool:
    """Whether a graph is being recorded, so that nobody may wait for a value."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
