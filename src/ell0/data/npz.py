"""Inputs and labels of one's own, from a NumPy file."""

import zipfile
from pathlib import Path

import numpy as np
import torch

from .loading import Rows


def read_npz(path: Path | str, x_name: str = "x", y_name: str = "y") -> Rows:
    """Inputs and labels from a NumPy ``.npz`` file: x ``(n, ...)`` floating point, finite, and y ``(n,)`` ints >= 0."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (x_name, y_name) if name in file.files}
            names = ", ".join(file.files) or "none"
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} does not exist: give a .npz file with {x_name} and {y_name}") from error
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} must be a .npz file that NumPy wrote, without pickled objects ({error})") from error
    if len(arrays) != 2:
        raise ValueError(f"{path} must have the arrays {x_name} and {y_name}, got {names}")
    x, y = arrays.values()
    if x.ndim < 2 or not len(x) or not np.issubdtype(x.dtype, np.floating) or not np.isfinite(x).all():
        raise ValueError(
            f"{path}: {x_name} must be finite floating-point numbers of shape (n, ...), scaled for the model, "
            f"got {x.dtype} of shape {x.shape}"
        )
    if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
        raise ValueError(f"{path}: {y_name} must be {len(x)} ints >= 0, got {y.dtype} of shape {y.shape}")
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64))
