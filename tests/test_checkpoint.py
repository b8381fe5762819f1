"""Checkpoints: a file format that safetensors reads, and damage that never passes for weights."""

from __future__ import annotations

import copy
import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ell0 import train
from ell0.files import FileError, read_tensors
from ell0.files import encode_tensors as encode
from small_training import CONFIG, network, rows, same

TENSORS = {
    "b": torch.tensor([True, False, True]),
    "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.zeros(0, 3),
    "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "count": torch.tensor(2**40),
    "byte": torch.arange(5, dtype=torch.uint8),
}


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    return read_tensors(path, "delete it", own=("card",))


def write_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_tensors_come_back_here_and_in_the_safetensors_package(tmp_path: Path) -> None:
    words = {"format": "pt", "ü": "ß"}
    path = write_file(tmp_path / "ours", encode(TENSORS, words))
    assert read(path)[1] == words
    files = [read(path)[0]]
    with suppress(ImportError):
        from safetensors.torch import load_file, save_file

        save_file({name: t.contiguous() for name, t in TENSORS.items()}, tmp_path / "theirs", words)
        assert read(tmp_path / "theirs")[1] == words
        files += [load_file(path), read(tmp_path / "theirs")[0]]
    for tensors in files:
        assert tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0, equal_nan=True)
            tensors[name].zero_()  # they may be written to


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_no_damage_gives_anything_but_a_sentence(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int) -> None:
    content = bytearray(encode(TENSORS, {"card": "{}"}))
    path, at = tmp_path_factory.getbasetemp() / "damaged", at % len(content)
    with pytest.raises(FileError, match=r"damaged is (damaged|altered).*: delete it$"):
        read(write_file(path, bytes(content[:at])))
    if content[at] != byte:
        content[at] = byte
        with pytest.raises(FileError, match=r"damaged is (damaged|altered).*: delete it$"):
            read(write_file(path, bytes(content)))


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": 1}, 0, "is damaged"),
        ({"a": entry("F32", [2], 0, 8)}, 9, "it has 1 bytes too many"),
        ({"a": entry("F32", [2], 0, 8)}, 7, "ends outside of the file"),
        ({"a": entry("F32", [3], 0, 8)}, 8, "a has 8 bytes, which do not fill F32"),
        ({"a": entry("F4", [2], 0, 8)}, 8, "a has 8 bytes, which do not fill F4"),
        ({"a": entry("F32", [-1, -2], 0, 8)}, 8, "a has 8 bytes"),
        ({"a": entry("F32", [0, 2**62, 2**62], 0, 0)}, 0, "a has 0 bytes"),
        ({"a": entry("U8", [4], 2, 6)}, 6, "a does not lie where the tensor before it ends"),
        ({"__metadata__": {"a": 1}}, 0, "its metadata must be strings"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, header: object, data: int, message: str) -> None:
    head = json.dumps(header).encode()
    path = write_file(tmp_path / "lie", len(head).to_bytes(8, "little") + head + bytes(data))
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    model, card = network(nn.Linear(2, 3), nn.BatchNorm1d(3)), {"name": "F(3)", "k": [3, None]}
    path = train.save_checkpoint(tmp_path / "m.safetensors", model, card)
    checkpoint = train.load_checkpoint(path)
    other = network(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert not same(model, other)
    checkpoint.into(other)
    assert same(model, other)
    assert checkpoint.card == card
    assert checkpoint.about["model"] == repr(model)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(nn.Linear(2, 4)), "0.bias has the shape (3,) in it and (4,) here (and 1 more)"),
        (nn.Sequential(nn.Linear(2, 3, bias=False)), "the model has no 0.bias"),
        (nn.Sequential(nn.Linear(2, 3), nn.PReLU()), "the checkpoint has no 1.weight"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path, other: nn.Module, message: str) -> None:
    path = train.save_checkpoint(tmp_path / "m.safetensors", nn.Sequential(nn.Linear(2, 3)))
    before = copy.deepcopy(other)
    with pytest.raises(ValueError, match=f"^the checkpoint must be of this architecture, but {re.escape(message)}$"):
        train.load_checkpoint(path).into(other)
    assert same(other, before)


def test_what_a_checkpoint_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        train.save_checkpoint(tmp_path / "m.safetensors", nn.Linear(1, 1), {"a": object()})
    with pytest.raises(ValueError, match="card must be made of JSON values"):
        train.fit(network(), rows(), CONFIG, out=tmp_path, card={"a": object()})
    with pytest.raises(ValueError, match=r"^a file cannot hold z of type torch\.complex64$"):
        encode({"z": torch.zeros(1, dtype=torch.complex64)}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("card", ["half a ca", "3", '["a"]'])
def test_a_damaged_card_is_one_sentence(tmp_path: Path, card: str) -> None:
    path = write_file(tmp_path / "m.safetensors", encode({}, {"card": card}))
    with pytest.raises(ValueError, match=r"m\.safetensors is damaged, its card is not a JSON object: give another"):
        train.load_checkpoint(path)
