"""The Gaussian mixture of [Beliaev22]: its bounds, and exact robust errors at finite dimension; a linear classifier
trained against its exact worst case."""

from . import bounds
from .classifier import NotAttainableError, TruncatedLinearClassifier, certified_scorer
from .malware_figures import malware, read_programs
from .mixture import Mixture
from .mixture_figures import figures
from .robust_error import robust_errors
from .weights import OptimalWeights, k_trunc, optimal_weights

__all__ = [
    "Mixture",
    "NotAttainableError",
    "OptimalWeights",
    "TruncatedLinearClassifier",
    "bounds",
    "certified_scorer",
    "figures",
    "k_trunc",
    "malware",
    "optimal_weights",
    "read_programs",
    "robust_errors",
]
