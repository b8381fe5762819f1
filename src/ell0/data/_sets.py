"""What each data set is made of: file names, sizes, digests, and the reader of its form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
import numpy.typing as npt

from . import _cifar, _idx

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class File:
    """One file; size and digest (``"algorithm:hex"``) are those of the uncompressed content."""

    name: str
    size: int
    digest: str
    magic: bytes = b""


@dataclass(frozen=True)
class Form:
    """One of the forms a set is published in.

    ``read`` turns the contents of one part into images ``(n, channels, height, width)`` and labels ``(n,)``, uint8.
    """

    train: tuple[File, ...]
    test: tuple[File, ...]
    read: Callable[[Sequence[bytes]], tuple[Bytes, Bytes]]
    gz: bool = False

    @property
    def files(self) -> tuple[File, ...]:
        return self.train + self.test


@dataclass(frozen=True)
class DataSet:
    """A set in files; ``folders`` are its usual places below a root, the first of ``forms`` is the one we write."""

    name: str
    folders: tuple[str, ...]
    forms: tuple[Form, ...]
    noun: str


def _idx_form(*digests: str) -> Form:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    magics = (_idx.IMAGES, _idx.LABELS) * 2
    files = tuple(map(File, names, sizes, (f"sha256:{d}" for d in digests), magics))
    return Form(files[:2], files[2:], _idx.read_pair, gz=True)


def _cifar_form(
    suffix: str, sizes: Sequence[int], md5s: Sequence[str], read: Callable[[Sequence[bytes]], tuple[Bytes, Bytes]]
) -> Form:
    names = [f"data_batch_{i}{suffix}" for i in range(1, 6)] + [f"test_batch{suffix}"]
    files = tuple(map(File, names, sizes, (f"md5:{d}" for d in md5s)))
    return Form(files[:5], files[5:], read)


_MNIST = _idx_form(
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
_FASHION = _idx_form(
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
_CIFAR_BINARY = _cifar_form(
    ".bin",
    [30_730_000] * 6,
    (
        "5dd7e06a14cb22eb9f671a540d1b7c25",
        "5ea93a67294ea407fff1d09f752e9692",
        "942cd6a4bcdd0dd3c604fbe906cb4421",
        "ae636b3ba5c66a11e91e8cb52e771fcb",
        "53f37980c15c3d472c316c40844f3f0d",
        "803d5f7f4d78ea53de84dbe85f74fb6d",
    ),
    _cifar.read_binary,
)
_CIFAR_PYTHON = _cifar_form(
    "",
    (31_035_704, 31_035_320, 31_035_999, 31_035_696, 31_035_623, 31_035_526),
    (
        "c99cafc152244af753f735de768cd75f",
        "d4bba439e000b95fd0a9bffe97cbabec",
        "54ebc095f3ab1f0389bbae665268c751",
        "634d18415352ddfa80567beed471001a",
        "482c414d41f54cd18b22e5b47cb7c3cb",
        "40351d587109b95175f43aff81a1287e",
    ),
    _cifar.read_python,
)

SETS: dict[str, DataSet] = {
    "mnist": DataSet("mnist", ("MNIST/raw",), (_MNIST,), "files"),
    "fashion-mnist": DataSet("fashion-mnist", ("FashionMNIST/raw",), (_FASHION,), "files"),
    "cifar10": DataSet(
        "cifar10", ("cifar-10-batches-bin", "cifar-10-batches-py"), (_CIFAR_BINARY, _CIFAR_PYTHON), "batches"
    ),
}
NAMES: tuple[str, ...] = ("digits", *SETS)
CLASSES: dict[str, tuple[str, ...]] = {
    "fashion-mnist": (
        "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
    ),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}  # fmt: skip
"""What the labels of a set mean, where they are not digits."""

SPLITS: tuple[str, ...] = ("train", "validation", "test", "train+validation")


def one_of(argument: str, value: str, allowed: Sequence[str], note: str = "") -> str:
    """The value if it is allowed; otherwise a ValueError that names the nearest allowed one."""
    if value in allowed:
        return value
    near = get_close_matches(value.lower(), allowed, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{argument} must be one of {', '.join(map(repr, allowed))}{note}, got {value!r}{hint}")
