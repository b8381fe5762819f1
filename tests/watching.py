"""What torch does, step by step: whether a CUDA graph could hold it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What waits for the host, or gives as many numbers as meet a condition.
WAITS = ("lift_fresh", "_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.", "is_nonzero")


class Watch(TorchDispatchMode):
    """done: functions, their arguments and results, in order.  seen: the names of those that no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        masks = name.startswith("aten.index") and any(_is_mask(t) for t in tree_leaves(args[1]))
        if masks or any(word in name for word in WAITS):
            self.seen.append(name)
        out = func(*args, **kwargs)
        self.done.append((func, args, kwargs, out))
        return out

    def again(self) -> None:
        """The same on the same tensors, and its results in the same places."""
        for func, args, kwargs, out in self.done:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


def _is_mask(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.dtype == torch.bool
