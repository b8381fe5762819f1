"""Sparse attacks on one contract: the same call, the same `AttackResult`, every claim checked.

[Croce22]: Sparse-RS, AAAI 2022.  [Schott19]: Towards the first adversarially robust neural network model on MNIST, ICLR
2019.  [Cina25]: sigma-zero, ICLR 2025.  [Zhong24]: Towards efficient training and evaluation of robust models against
l0 bounded adversarial perturbations, ICML 2024.
"""

from collections.abc import Callable

from .adaptive import adaptive
from .contract import AttackResult
from .pointwise import pointwise
from .sigma_zero import sigma_zero
from .sparse_pgd import sparse_pgd
from .sparse_rs import sparse_rs

__all__ = ["ATTACKS", "AttackResult", "adaptive", "pointwise", "sigma_zero", "sparse_pgd", "sparse_rs"]

ATTACKS: dict[str, Callable[..., AttackResult]] = {
    "sparse_rs": sparse_rs,
    "pointwise": pointwise,
    "sigma_zero": sigma_zero,
    "sparse_pgd": sparse_pgd,
    "adaptive": adaptive,
}
"""Every attack by its name."""
