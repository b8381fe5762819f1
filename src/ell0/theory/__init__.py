"""The Gaussian mixture of [Beliaev22]: its bounds, and exact robust errors at finite dimension; a linear classifier
trained against its exact worst case."""

from . import bounds
from .classifier import NotAttainableError, TruncatedLinearClassifier
from .malware_figures import malware, read_programs
from .mixture import Mixture
from .mixture_figures import figures
from .robust_error import robust_errors

__all__ = [
    "Mixture",
    "NotAttainableError",
    "TruncatedLinearClassifier",
    "bounds",
    "figures",
    "malware",
    "read_programs",
    "robust_errors",
]
