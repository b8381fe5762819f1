"""Data sets as tensors, checked by hash: ``load`` reads them, ``get`` fetches them, ``status`` says what is there."""

from ._files import DataError
from ._get import get
from ._load import Status, load, status
from ._sets import CLASSES, NAMES, SPLITS

__all__ = ["CLASSES", "NAMES", "SPLITS", "DataError", "Status", "get", "load", "status"]
