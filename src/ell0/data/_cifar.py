"""The batches of CIFAR-10, binary and Python; the Python ones are pickles, and are read without running any."""

import pickletools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_PIXELS = 3 * 32 * 32


def read_binary(contents: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Images ``(n, 3, 32, 32)`` and labels ``(n,)``; a row is a label byte, then 1024 R, 1024 G, 1024 B."""
    rows = np.concatenate([np.frombuffer(data, np.uint8).reshape(-1, 1 + _PIXELS) for data in contents])
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def read_python(contents: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Images ``(n, 3, 32, 32)`` and labels ``(n,)`` from pickled dictionaries with ``data`` and ``labels``."""
    batches = [_batch(parse_pickle(data)) for data in contents]
    return np.concatenate([x for x, _ in batches]).reshape(-1, 3, 32, 32), np.concatenate([y for _, y in batches])


def _batch(tree: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    match tree:
        case {
            "labels": list(labels),
            "data": Node(
                "numpy.core.multiarray _reconstruct",
                _,
                (1, (int(n), int(width)), Node("numpy dtype", ("u1", *_)), False, str(pixels)),
            ),
        } if len(labels) == n and width == _PIXELS and len(pixels) == n * width:
            return np.frombuffer(pixels.encode("latin-1"), np.uint8).reshape(n, width), np.array(labels, np.uint8)
    raise ValueError(f"a CIFAR-10 batch is a dictionary with n labels and an (n, {_PIXELS}) array of bytes")


@dataclass
class Node:
    """What a pickle asks to be built: a name, its arguments, its state. Nothing is ever imported or called."""

    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None


_NAMES = {"numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"}
_VALUES = {"BININT", "BININT1", "BININT2", "INT", "LONG1", "SHORT_BINSTRING", "BINSTRING", "BINUNICODE"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


def parse_pickle(data: bytes) -> Any:
    """The value of a Python 2 pickle of plain data and numpy arrays, objects left as inert ``Node``s.

    Byte strings become ``str`` by latin-1. Any opcode or name that such a batch has no need of is refused.
    """
    try:
        return _parse(data)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a pickle whose stack does not add up ({type(error).__name__}: {error})") from None


def _parse(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> list[Any]:
        items = []
        while (item := stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    for opcode, arg, position in pickletools.genops(data):
        name = opcode.name
        if name in _VALUES:
            stack.append(arg)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[arg] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "APPEND":
            item = stack.pop()
            stack[-1].append(item)
        elif name == "APPENDS":
            items = since_mark()
            stack[-1].extend(items)
        elif name == "SETITEM":
            item, key = stack.pop(), stack.pop()
            stack[-1][key] = item
        elif name == "SETITEMS":
            items = since_mark()
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in _TUPLES:
            items = [stack.pop() for _ in range(_TUPLES[name])]
            stack.append(tuple(items[::-1]))
        elif name == "GLOBAL" and arg in _NAMES:
            stack.append(Node(arg))
        elif name == "REDUCE":
            args, function = stack.pop(), stack.pop()
            stack.append(Node(function.name, args))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name == "STOP":
            return stack.pop()
        elif name != "PROTO":
            what = f"{name} {arg!r}" if isinstance(arg, str) else name
            raise ValueError(f"a pickle that asks for {what} at byte {position}, which is never run here")
    raise ValueError("a pickle without an end")
