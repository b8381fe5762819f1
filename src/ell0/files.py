"""Every file of a run is read and written here: no link is followed, sizes are bounded, digests are checked."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import stat
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "FileError", "check_out", "encode_tensors", "locked", "read", "read_npz", "read_tensors", "sealed",
    "sweep", "unsealed", "write", "write_tensors",
]  # fmt: skip

MOST = 1 << 30
"""Bytes that a file may have, or claim, unless its reader says otherwise."""
_MOST_HEADER = 1 << 24
_MOST_CLAIMED, _MOST_RATIO = 1 << 28, 200  # bytes that a compressed array may claim, or times the bytes of its file
_DIGITS = 64  # of a SHA-256 in hex
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class FileError(ValueError):
    """A file cannot be used; the message says which one, what is wrong with it, and what to do."""


def read(path: Path, most: int = MOST) -> bytes:
    """The content of a plain file of at most so many bytes; raises FileError for a link, a device or a larger file."""
    with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise FileError(f"{path} has {size:,} bytes, more than the {most:,} that it may have: give another file")
        return file.read(size)


def write(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Writes a file whole: under a temporary name beside it, to the disk, then renamed. A link is replaced.

    previous: what the file that was there is renamed to.
    """
    handle, part = _part(path)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        if previous is not None and path.exists():
            path.replace(previous)
        part.replace(path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(f"{path} could not be written: {error.strerror}") from error
        raise
    _sync(path.parent)


def sweep(folder: Path, name: str | None = None) -> None:
    """Removes temporary files that killed processes left in a folder, of one file or of all."""
    for left in folder.glob(f".{'*' if name is None else escape(name)}.{'?' * 8}.part"):
        with suppress(OSError):
            handle = _open(left, os.O_RDWR)
            try:
                if _lock(handle):
                    left.unlink()
            finally:
                os.close(handle)


def check_out(out: Path, name: str = "out") -> None:
    """Raises OSError if a file cannot be written there. Makes its folder, and removes what a kill left beside it."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, part = _part(out)
        os.close(handle)
        part.unlink()
    except OSError as error:
        raise OSError(f"{name} must be a name in a folder that can be written, got {out} ({error})") from error
    if out.exists() and not out.is_file():
        raise OSError(f"{name} must be a file or a new name, got {out}{', a folder' if out.is_dir() else ''}")
    sweep(out.parent, out.name)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Holds the lock of this name, and says whether it could; the lock of a process that dies is released."""
    handle = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        yield _lock(handle)
    finally:
        os.close(handle)


def _open(path: Path, flags: int) -> int:
    try:
        handle = os.open(path, flags | _NO_LINK, 0o666)
    except OSError:
        if path.is_symlink():
            raise FileError(f"{path} is a link, which is not followed: put a file in its place") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileError(f"{path} is no plain file: put one in its place")
    return handle


def _part(path: Path) -> tuple[int, Path]:
    """A new temporary file beside a path, locked while it is written; its mode is what the umask leaves."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    handle = _open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    _lock(handle)
    return handle, part


def _lock(handle: int) -> bool:
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows, or a file system without locks
        pass
    return True


def _sync(folder: Path) -> None:
    """Makes sure that the names in a folder are on the disk."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sealed(before: bytes, after: bytes) -> bytes:
    """Content with the SHA-256 of all the rest, in hex, between its two parts."""
    found = hashlib.sha256(before)
    found.update(after)
    return b"".join((before, found.hexdigest().encode(), after))


def unsealed(content: bytes, before: bytes) -> bool | None:
    """Whether the content is as it was `sealed`; None if it does not begin so."""
    if not content.startswith(before):
        return None
    end, rest = len(before) + _DIGITS, memoryview(content)
    found = hashlib.sha256(before)
    found.update(rest[end:])
    return found.hexdigest().encode() == content[len(before) : end]


# The safetensors format, a header in JSON, then raw numbers; reading it runs no code.
#   8 bytes, little-endian: the length of the header
#   header: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {str: str}}
#   data: begin and end count from its first byte; the tensors fill it without gaps
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES = {**_FLOATS, **_INTEGERS, "BOOL": torch.bool}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_SEAL = b'{"__metadata__": {"sha256": "'


def encode_tensors(tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> bytes:
    """A safetensors file of tensors and words, sealed by the SHA-256 that its metadata begin with."""
    header: dict[str, Any] = {_METADATA: {"sha256": "", **words}}
    parts, begin = list[bytes](), 0
    # Wide types first: every tensor then begins at a multiple of its own size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if tensor.dtype not in _NAMES:
            raise ValueError(f"a file cannot hold {name} of type {tensor.dtype}")
        parts.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        end = begin + len(parts[-1])
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    head = json.dumps(header).encode()
    head += b" " * (-(len(head) + _DIGITS) % 8)
    length = (len(head) + _DIGITS).to_bytes(8, "little")
    return sealed(length + _SEAL, b"".join([head[len(_SEAL) :], *parts]))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> None:
    """Writes what `read_tensors` reads."""
    write(path, encode_tensors(tensors, words))


def read_tensors(
    path: Path, todo: str, most: int = MOST, *, own: Collection[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, on the CPU, and its words; raises FileError, which ends with ``todo``, if it was altered.

    own: words that only ell0 writes; also accept a safetensors file from elsewhere, with none of them and no SHA-256.
    """
    content = read(path, most)
    whole = unsealed(content, content[:8] + _SEAL)
    if whole is False:
        raise FileError(f"{path} is altered, its content does not fit the SHA-256 in it: {todo}")
    if whole is None and own is None:
        raise FileError(f"{path} is damaged or of another version of ell0: {todo}")
    try:
        tensors, words = _decoded(memoryview(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{path} is damaged or not a safetensors file ({error}): {todo}") from error
    if whole is None and words.keys() & {"sha256", *(own or ())}:
        raise FileError(f"{path} is altered or of another version of ell0, it has no SHA-256 in its place: {todo}")
    words.pop("sha256", None)
    return tensors, words


def _decoded(content: memoryview) -> tuple[dict[str, Tensor], dict[str, str]]:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, _MOST_HEADER):
        raise ValueError(f"its {len(content)} bytes are too few for a header, or its header is too long")
    header = json.loads(bytes(content[8 : 8 + length]))
    data = content[8 + length :]
    words = header.pop(_METADATA, {})
    if not all(isinstance(text, str) for text in words.values()):
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
        tensor = torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
        tensors[name] = tensor.view(torch.uint8) != 0 if dtype is torch.bool else tensor  # a byte may be 2
        last = end
    if last != len(data):
        raise ValueError(f"it has {len(data) - last} bytes too many")
    return tensors, words


_NPY = re.compile(
    rb"\x93NUMPY(?:\x01.(?P<short>..)|[\x02\x03].(?P<long>....))"
    rb"\{'descr': '(?P<dtype>[<>|][biuf]\d\d?)', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>[\d, ]*)\)",
    re.DOTALL,
)


def read_npz(path: Path, names: Collection[str]) -> tuple[dict[str, npt.NDArray[Any]], list[str]]:
    """The arrays of these names in a file that NumPy wrote, and the names of all; a link is followed.

    Raises FileError if the file is damaged, holds other than numbers, or claims far more numbers than it has bytes.
    """
    try:
        with os.fdopen(_open(path.resolve(), os.O_RDONLY), "rb") as file, zipfile.ZipFile(file) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            most = max(_MOST_CLAIMED, _MOST_RATIO * os.fstat(file.fileno()).st_size)
            return {name: _array(archive, members[name], most) for name in names if name in members}, list(members)
    except (ValueError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        rule = "must be a .npz file that NumPy wrote, without pickled objects"
        raise FileError(f"{path} {rule} ({error}): write it again with numpy.savez") from error


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> npt.NDArray[Any]:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.file_size > most:
        raise ValueError(f"{member.filename} claims {member.file_size:,} bytes, or is not packed as NumPy packs")
    raw = archive.read(member)
    head = _NPY.match(raw, 0, 10_000)
    if head is None:
        raise ValueError(f"{member.filename} is no array of numbers")
    length = head["short"] or head["long"]
    start = 8 + len(length) + int.from_bytes(length, "little")
    values = np.frombuffer(memoryview(raw)[start:], head["dtype"].decode())
    shape = [int(size) for size in head["shape"].split(b",") if size.strip()]
    return values.reshape(shape, order="F" if head["fortran"] == b"True" else "C")
