"""The Gaussian mixture of [Beliaev22], its bounds mended, exact robust errors at finite dimension; a linear classifier
trained against its worst case."""

from ._bounds import (
    PowerLaw,
    alpha_opt_bound,
    alpha_trunc_bound,
    asymptotic_lower_bound,
    c1,
    c2,
    c_of_eps,
    finite_lower_bound,
    log_k_opt_bound,
    log_k_trunc_bound,
    q_of_eps,
    theorem_range,
    upper_bound,
)
from ._classifier import NotAttainableError, TruncatedLinearClassifier, select_k
from ._mixture import Decay, Erasure, Mixture, Prefix, erase, erase_probability, erased_log_density
from ._robust import Estimate, RobustErrors, best_k, clip_grid, clipped_errors, k_grid, truncated_errors

__all__ = [
    "Decay",
    "Erasure",
    "Estimate",
    "Mixture",
    "NotAttainableError",
    "PowerLaw",
    "Prefix",
    "RobustErrors",
    "TruncatedLinearClassifier",
    "alpha_opt_bound",
    "alpha_trunc_bound",
    "asymptotic_lower_bound",
    "best_k",
    "c1",
    "c2",
    "c_of_eps",
    "clip_grid",
    "clipped_errors",
    "erase",
    "erase_probability",
    "erased_log_density",
    "finite_lower_bound",
    "k_grid",
    "log_k_opt_bound",
    "log_k_trunc_bound",
    "q_of_eps",
    "select_k",
    "theorem_range",
    "truncated_errors",
    "upper_bound",
]
