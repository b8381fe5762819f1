"""ell0.data.load: layouts, splits, scaling, and one sentence for every file that is missing, short or altered."""

import gzip
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from ell0 import data
from ell0.data import SETS
from ell0.data.sources import read_png
from ell0.files import FileError
from ell0.nn import InputScale

Bytes = npt.NDArray[np.uint8]
TRAIN, TEST = 50, 20


def idx(array: Bytes) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def install(monkeypatch: pytest.MonkeyPatch, name: str, contents: Sequence[bytes]) -> dict[str, bytes]:
    """Makes these the contents that a set is known by; gives them by file name."""
    dataset = SETS[name]
    files = tuple(
        replace(file, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for file, content in zip(dataset.files, contents, strict=True)
    )
    count = len(dataset.train)
    monkeypatch.setitem(SETS, name, replace(dataset, train=files[:count], test=files[count:]))
    return {file.name: content for file, content in zip(files, contents, strict=True)}


Tiny = dict[str, dict[str, bytes]]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tiny:
    """The sets with a few random images each; name -> file name -> content."""
    monkeypatch.delenv("ELL0_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    made: Tiny = {}
    for name in ("mnist", "fashion-mnist"):
        arrays = [rng.integers(0, 256, shape, np.uint8) for n in (TRAIN, TEST) for shape in ((n, 6, 5), (n,))]
        arrays[0][0, 0, :2] = 0, 255
        made[name] = install(monkeypatch, name, [idx(array) for array in arrays])
    rows = [rng.integers(0, 256, (TRAIN // 5, 3073), np.uint8) for _ in range(6)]
    made["cifar10"] = install(monkeypatch, "cifar10", [row.tobytes() for row in rows])
    return made


def put(folder: Path, contents: dict[str, bytes], gz: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}{'.gz' * gz}").write_bytes(gzip.compress(content) if gz else content)
    return folder


def one_sentence(error: BaseException, *words: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert ". " not in text
    for word in words:
        assert word in text, text


def test_every_set_is_complete() -> None:
    assert list(SETS) == ["digits", "mnist", "fashion-mnist", "cifar10"]
    for dataset in SETS.values():
        assert (len(dataset.classes), len(dataset.shape)) == (10, 3)
        assert len(dataset.mean) == len(dataset.deviation) == dataset.shape[0]
        assert all(file.size and len(file.sha256) == 64 for file in dataset.files)
        if not dataset.package:
            assert dataset.sources[0].address.startswith("https://")
            assert not dataset.sources[-1].address.startswith("http")


@pytest.mark.parametrize("beta", [1.0, 1.3, 100.0])
def test_the_box_is_that_of_the_papers_supplement(beta: float) -> None:
    low, high = SETS["mnist"].box(beta)
    assert (low.dtype, low.shape) == (torch.float32, (1, 1, 1))
    assert torch.equal(torch.cat([low, high]).flatten(), torch.tensor([-beta, beta]))
    cifar = SETS["cifar10"]
    ends = cifar.box(beta)
    swapped = replace(cifar, mean=cifar.mean[::-1], deviation=cifar.deviation[::-1]).box(beta)
    assert all(torch.equal(one.flip(0), other) for one, other in zip(ends, swapped, strict=True))
    assert all(end.shape == (3, 1, 1) for end in ends)
    # MIN and MAX of the supplement, over all channels.
    least, most = -2.429065704345703, 2.7537312507629395
    wanted = [(least + most) / 2 + side * beta * (most - least) / 2 for side in (-1, 1)]
    for end, number in zip(ends, wanted, strict=True):
        normalised = InputScale.normalising(cifar.mean, cifar.deviation)(end.unsqueeze(0))
        torch.testing.assert_close(normalised, torch.full_like(normalised, number), rtol=1e-5, atol=1e-5)
    if beta == 100:
        assert [round(number, 2) for number in wanted] == [-258.98, 259.3]
        assert all(((end.abs() - 104.8).abs() < 2.5).all() for end in ends)


def test_the_digits_have_their_mean_and_deviation() -> None:
    x, _ = data.load("digits", "train+validation")
    assert SETS["digits"].mean + SETS["digits"].deviation == tuple(
        round(float(m((x + 1) / 2)), 4) for m in (torch.mean, torch.std)
    )


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw", "mnist/MNIST/raw"])
def test_mnist_layouts(tiny: Tiny, tmp_path: Path, folder: str, gz: bool) -> None:
    put(tmp_path / "root" / folder, tiny["mnist"], gz)
    x, y = data.load("mnist", "train+validation", tmp_path / "root")
    pixels, labels = (tiny["mnist"][f"train-{kind}-ubyte"] for kind in ("images-idx3", "labels-idx1"))
    images = np.frombuffer(pixels, np.uint8, offset=16).reshape(TRAIN, 1, 6, 5)
    assert (x.dtype, y.dtype, y.tolist()) == (torch.float32, torch.int64, list(labels[8:]))
    assert x[0, 0, 0, :2].tolist() == [-1.0, 1.0]
    torch.testing.assert_close(x.double(), torch.from_numpy(images / 127.5 - 1.0), atol=1e-6, rtol=0)
    assert data.load("mnist", "test", str(tmp_path / "root"))[0].shape == (TEST, 1, 6, 5)


@pytest.mark.parametrize("folder", ["", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_cifar_layouts(tiny: Tiny, tmp_path: Path, folder: str) -> None:
    put(tmp_path / folder, tiny["cifar10"])
    x, y = data.load("cifar10", "train+validation", tmp_path)
    contents = b"".join(tiny["cifar10"][f"data_batch_{i}.bin"] for i in range(1, 6))
    rows = np.frombuffer(contents, np.uint8).reshape(TRAIN, 3073)
    assert y.tolist() == rows[:, 0].tolist()
    pixels = torch.from_numpy(rows[:, 1:].reshape(TRAIN, 3, 32, 32) / 127.5 - 1.0)
    torch.testing.assert_close(x.double(), pixels, atol=1e-6, rtol=0)
    assert len(data.load("cifar10", "test", tmp_path)[1]) == TRAIN // 5


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_splits_cut_the_training_part(tiny: Tiny, tmp_path: Path, name: str) -> None:
    put(tmp_path, tiny["mnist"])
    splits = ("train+validation", "train", "validation")
    whole, train, validation = (data.load(name, split, tmp_path) for split in splits)
    assert len(validation[1]) == len(whole[1]) // 10
    for i in range(2):
        assert torch.equal(torch.cat([train[i], validation[i]]), whole[i])


def test_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data.load("digits", "test")
    assert x.shape == (360, 1, 8, 8)
    assert (x.min().item(), x.max().item()) == (-1.0, 1.0)
    pixels, labels = load_digits(return_X_y=True)
    both = [torch.cat(pair) for pair in zip(data.load("digits", "train+validation"), (x, y), strict=True)]
    assert np.array_equal(both[0].flatten(1), pixels / 8 - 1)
    assert np.array_equal(both[1], labels)
    monkeypatch.setattr("sklearn.datasets.load_digits", lambda return_X_y: (pixels + 1, labels))  # noqa: ARG005, N803
    with pytest.raises(FileError, match="scikit-learn"):
        data.load("digits", "train")


def test_unknown_words() -> None:
    for name, split, said in (("MNIST", "train", "'MNIST'; did you mean 'mnist'"), ("digits", "tets", "mean 'test'")):
        with pytest.raises(ValueError, match=f"must be one of .*{said}"):
            data.load(name, split)


def test_search_order(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, env, cache = tmp_path / "root", tmp_path / "env", tmp_path / "cache" / "ell0"
    put(cache / "mnist", tiny["mnist"])
    assert data.status()[1].where == str(cache / "mnist")
    monkeypatch.setenv("ELL0_DATA", str(env))
    assert data.status()[1].where == str(cache / "mnist")
    put(env / "mnist", tiny["mnist"])
    assert data.status()[1].where == str(env / "mnist")
    put(root, tiny["mnist"], gz=True)
    assert data.status(root)[1].where == str(root)
    # An explicit root is the only place: the copies elsewhere do not stand in for it.
    with pytest.raises(FileNotFoundError):
        data.load("mnist", "test", tmp_path / "nothing")


def test_sets_of_the_same_file_names_are_told_apart(tiny: Tiny, tmp_path: Path) -> None:
    put(tmp_path, tiny["mnist"])
    with pytest.raises(FileError, match=r"it is t10k-images-idx3-ubyte of mnist") as caught:
        data.load("fashion-mnist", "test", tmp_path)
    one_sentence(caught.value)
    put(tmp_path / "FashionMNIST/raw", tiny["fashion-mnist"])
    labels = [data.load(name, "test", tmp_path)[1].tolist() for name in ("mnist", "fashion-mnist")]
    assert labels[0] != labels[1]


def test_status(tiny: Tiny, tmp_path: Path) -> None:
    put(tmp_path / "mnist", tiny["mnist"])
    put(tmp_path / "cifar10", tiny["cifar10"])
    (tmp_path / "cifar10" / "data_batch_2.bin").write_bytes(b"")
    digits, mnist, fashion, cifar = data.status(tmp_path)
    assert digits == data.Status("digits", "scikit-learn", None)
    assert mnist == data.Status("mnist", str(tmp_path / "mnist"), None)
    assert (fashion.where, cifar.where) == (None, str(tmp_path / "cifar10"))
    assert "ell0 data get fashion-mnist" in str(fashion.problem)
    assert "data_batch_2.bin is short" in str(cifar.problem)


def test_missing_files_are_named(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "a b"
    put(root, {name: content for name, content in tiny["cifar10"].items() if name != "data_batch_3.bin"})
    monkeypatch.setenv("ELL0_DATA", str(root))
    lost = (
        f"{root} has 5 of 6 cifar10 files, data_batch_3.bin is missing: run `ell0 data get cifar10`, or set ELL0_DATA"
    )
    for name, place, words in (
        ("cifar10", None, (lost,)),
        (
            "mnist",
            None,
            (f"{root} or ", "has 0 of 4 mnist files, train-images-idx3-ubyte, train-", "are missing: run "),
        ),
        ("mnist", root, (f"`ell0 data get mnist --root '{root}'`, or pass another root",)),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            data.load(name, "test", place)
        one_sentence(caught.value, *words)


Breakage = Callable[[bytes], bytes]
BREAKAGES: list[tuple[bool, Breakage, str]] = [
    (True, lambda c: gzip.compress(c)[:-200], "is short"),
    (True, lambda c: c[:0], "is short"),
    (True, lambda _: b"<html>moved</html>", "is not a whole gzip file"),
    (True, lambda c: gzip.compress(c + b"0"), "is too long"),
    (False, lambda c: c[:-1], "is short, it has 1,515 bytes instead of 1,516"),
    (False, lambda c: c + b"0", "is too long, it has 1,517 bytes"),
    (False, lambda c: c[:700] + bytes([c[700] ^ 1]) + c[701:], "is altered, its SHA-256 begins with"),
]


@pytest.mark.parametrize(("gz", "breakage", "words"), BREAKAGES)
def test_broken_idx_files(tiny: Tiny, tmp_path: Path, gz: bool, breakage: Breakage, words: str) -> None:
    put(tmp_path, tiny["mnist"], gz)
    path = tmp_path / f"train-images-idx3-ubyte{'.gz' * gz}"
    path.write_bytes(breakage(tiny["mnist"]["train-images-idx3-ubyte"]))
    with pytest.raises(FileError) as caught:
        data.load("mnist", "train", tmp_path)
    one_sentence(caught.value, f"{path} {words}", "run `ell0 data get mnist")
    data.load("mnist", "test", tmp_path)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(image: Bytes, filters: Sequence[int], header: bytes = b"\x08\x02\0\0\0") -> bytes:
    """Encode with the given filter for each row: the formulas of the standard, one byte after the other."""
    height, width, _ = image.shape
    rows = image.reshape(height, -1).astype(int)
    raw = bytearray()
    for y, kind in enumerate(filters):
        raw.append(kind)
        for x in range(3 * width):
            a = rows[y, x - 3] if x >= 3 else 0
            b = rows[y - 1, x] if y else 0
            c = rows[y - 1, x - 3] if y and x >= 3 else 0
            nearest = min((a, b, c), key=lambda v, p=a + b - c: abs(p - v))  # type: ignore[misc]
            guess = (0, a, b, (a + b) // 2, nearest)[kind] if kind <= 4 else 0
            raw.append((rows[y, x] - guess) % 256)
    packed = zlib.compress(bytes(raw))
    body = png_chunk(b"IHDR", struct.pack(">II", width, height) + header) + png_chunk(b"tEXt", b"made\0here")
    body += png_chunk(b"IDAT", packed[:7]) + png_chunk(b"IDAT", packed[7:]) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@settings(deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
    st.integers(0, 2**32 - 1),
    st.sampled_from([6, 256]),  # few values: the Paeth predictor ties
)
def test_png_filters(width: int, filters: list[int], seed: int, values: int) -> None:
    image = np.random.default_rng(seed).integers(0, values, (len(filters), width, 3), np.uint8)
    assert np.array_equal(read_png(png(image, filters), *image.shape[:2]), image)


def test_broken_png() -> None:
    image = np.zeros((2, 3, 3), np.uint8)
    good = png(image, [0, 1])
    wrong = [png(image, [0, 0], header) for header in (b"\x08\x06\0\0\0", b"\x08\x02\0\0\1")]
    for broken in (b"GIF89a" + good, good[:50], png(image, [0]), png(image[:1], [0]), *wrong):
        with pytest.raises(ValueError, match=r"PNG|reshape"):
            read_png(broken, 2, 3)
    # Nothing that a header claims costs memory, and nothing inflates further than one byte too many.
    tall = good.replace(struct.pack(">II", 3, 2), struct.pack(">II", 1, 1 << 26))
    bomb = good[:33] + png_chunk(b"IDAT", zlib.compress(bytes(10**6)))
    for forged, said in ((tall, "its header is 00 00 00 01 04"), (bomb, "array of size 21 ")):
        with pytest.raises(ValueError, match=said):
            read_png(forged, 2, 3)


def has(name: str) -> bool:
    return "ELL0_DATA" in os.environ and next(s for s in data.status() if s.name == name).problem is None


@pytest.mark.skipif(not has("mnist"), reason="ELL0_DATA does not point to MNIST")
def test_real_mnist() -> None:
    x, y = data.load("mnist", "train")
    assert x.shape == (54_000, 1, 28, 28)
    assert y[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.load("mnist", "test")[1].bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.skipif(not has("cifar10"), reason="ELL0_DATA does not point to CIFAR-10")
def test_real_cifar10() -> None:
    x, y = data.load("cifar10", "train+validation")
    assert y.bincount().tolist() == [5000] * 10
    mean = torch.tensor([0.49139968, 0.48215841, 0.44653091], dtype=torch.float64)
    torch.testing.assert_close((x.mean((0, 2, 3), dtype=torch.float64) + 1) / 2, mean, atol=1e-6, rtol=0)
