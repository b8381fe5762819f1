"""The safetensors format: a header in JSON, then raw numbers; reading it runs no code.

8 bytes, little-endian: the length of the header
header: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {str: str}}
data: begin and end count from its first byte; the tensors fill it without gaps
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_MOST = 100_000_000  # bytes of a header, as the format has it


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The content of a file."""
    # Wide types first: every tensor then begins at a multiple of its own size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    parts: list[bytes] = []
    begin = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _WORDS or name == _METADATA:
            raise ValueError(f"a checkpoint cannot hold {name} of type {tensor.dtype}")
        parts.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        end = begin + len(parts[-1])
        header[name] = {"dtype": _WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([len(head).to_bytes(8, "little"), head, *parts])


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, on the CPU, and its metadata; raises ValueError if it is not whole."""
    content = memoryview(path.read_bytes())
    try:
        return _decode(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error


def _decode(content: memoryview) -> tuple[dict[str, Tensor], dict[str, str]]:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(_MOST, len(content) - 8):
        raise ValueError(f"its {len(content)} bytes are too few for a header")
    try:
        header = json.loads(bytes(content[8 : 8 + length]))
    except ValueError:
        raise ValueError("its header is not JSON") from None
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise ValueError("its header does not name tensors")
    data = content[8 + length :]
    metadata = header.pop(_METADATA, {})
    if not all(isinstance(word, str) for word in metadata.values()):
        raise ValueError("its metadata are not words")
    at = 0
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != at or not begin <= end <= len(data):
            raise ValueError(f"{name} does not lie where the tensor before it ends, or ends outside of the file")
        tensors[name] = _tensor(name, entry, data[begin:end])
        at = end
    if at != len(data):
        raise ValueError(f"it has {len(data) - at} bytes too many")
    return tensors, metadata


def _tensor(name: str, entry: dict[str, Any], data: memoryview) -> Tensor:
    shape, word = entry["shape"], entry["dtype"]
    if word not in _DTYPES:
        raise ValueError(f"{name} has the unknown type {word!r}")
    # Sizes beside a 0 cost no bytes, and still torch must be able to count with them.
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(s or 1 for s in shape) >= 2**63:
        raise ValueError(f"{name} has the shape {shape!r}")
    dtype = _DTYPES[word]
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{name} has {len(data)} bytes, which do not fill the shape {tuple(shape)}")
    # A copy of its own: torch wants memory that it may write to, at a multiple of the type's size.
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)
