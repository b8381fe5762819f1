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

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES = {**_FLOATS, **_INTEGERS, "BOOL": torch.bool}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The content of a file."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    parts, begin = list[bytes](), 0
    # Wide types first: every tensor then begins at a multiple of its own size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if tensor.dtype not in _NAMES:
            raise ValueError(f"a checkpoint cannot hold {name} of type {tensor.dtype}")
        parts.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        end = begin + len(parts[-1])
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([len(head).to_bytes(8, "little"), head, *parts])


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, on the CPU, and its metadata; raises ValueError if the file is damaged."""
    try:
        return _decode(memoryview(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error


def _decode(content: memoryview) -> tuple[dict[str, Tensor], dict[str, str]]:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise ValueError(f"its {len(content)} bytes are too few for a header")
    header = json.loads(bytes(content[8 : 8 + length]))
    data = content[8 + length :]
    metadata = header.pop(_METADATA, {})
    if not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata must be strings")
    last, tensors = 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], _DTYPES.get(entry["dtype"])
        if begin != last or not begin <= end <= len(data):
            raise ValueError(f"{name} does not lie where the tensor before it ends, or ends outside of the file")
        # Torch must be able to count with the sizes beside a 0 too, which cost no bytes.
        sizes = all(type(size) is int and size >= 0 for size in shape) and math.prod(s or 1 for s in shape) < 2**63
        if dtype is None or not sizes or math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"{name} has {end - begin} bytes, which do not fill {entry['dtype']} {shape}")
        # A copy: torch wants memory that it may write to, at a multiple of the type's size.
        raw = bytearray(data[begin:end])
        tensors[name] = torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
        last = end
    if last != len(data):
        raise ValueError(f"it has {len(data) - last} bytes too many")
    return tensors, metadata
