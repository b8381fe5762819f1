"""Sparse attacks on one contract: the same call, the same `AttackResult`, every claim checked.

[Croce22]: Sparse-RS, AAAI 2022.  [Schott19]: Towards the first adversarially robust neural network model on MNIST, ICLR
2019.  [Cina25]: sigma-zero, ICLR 2025.  [Zhong24]: Towards efficient training and evaluation of robust models against
l0 bounded adversarial perturbations, ICML 2024.
"""

from .contract import AttackResult
from .declare import ATTACKS, Attack, attack, declared

# isort: off
# One line for each attack, in the order of ATTACKS.
from .sparse_rs import sparse_rs as sparse_rs
from .pointwise import pointwise as pointwise
from .sigma_zero import sigma_zero as sigma_zero
from .sparse_pgd import sparse_pgd as sparse_pgd
from .adaptive import adaptive as adaptive

__all__ = ["ATTACKS", "Attack", "AttackResult", "attack", "declared", *ATTACKS]
