"""Data sets as tensors, checked by hash: ``load`` reads them, ``get`` fetches them, ``status`` says what is there."""

from ell0.data._files import DataError
from ell0.data._get import get
from ell0.data._load import Status, load, status
from ell0.data._sets import NAMES, SPLITS

__all__ = ["NAMES", "SPLITS", "DataError", "Status", "get", "load", "status"]
