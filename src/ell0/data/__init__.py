"""Data sets as tensors, checked by hash. `load` reads one, `get` fetches it, `status` says which are here."""

from .dataset import DataSet
from .fetch import get
from .loading import SPLITS, LabelledRows, Status, load, read_npz, status
from .sets import SETS

__all__ = ["SETS", "SPLITS", "DataSet", "LabelledRows", "Status", "get", "load", "read_npz", "status"]
