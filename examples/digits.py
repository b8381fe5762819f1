"""A dense and a truncated classifier of digits: clean, with random numbers of every image set to 1e6, and attacked.

Run it with ``make run``, or ``python examples/digits.py``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ell0

K = 4
VALUE = 1e6
BUDGET = 2
ATTACKED = 100


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int = 60) -> nn.Module:
    """Plain training, no attack in it: Adam on shuffled batches of 64."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of right answers, in percent."""
    with torch.no_grad():
        return float(100 * (model(x).argmax(1) == y).double().mean())


def spoil(x: Tensor, ball: ell0.L0Ball, value: float) -> Tensor:
    """``ball.budget`` numbers of every image, drawn at random, set to the value."""
    generator = torch.Generator().manual_seed(1)
    flat = x.flatten(1).clone()
    where = torch.rand(flat.shape, generator=generator).topk(ball.budget).indices
    spoiled = flat.scatter_(1, where, value).view_as(x)
    assert ball.contains(x, spoiled).all()
    return spoiled


def attacked(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of the first images that no attack breaks, in percent."""
    attacks = {
        "sparse_pgd": partial(ell0.attacks.sparse_pgd, steps=40),
        "sigma_zero": partial(ell0.attacks.sigma_zero, steps=40),
        "adaptive": partial(ell0.attacks.adaptive, queries=200),
        "sparse_rs": partial(ell0.attacks.sparse_rs, queries=200),
    }
    ball = ell0.L0Ball(BUDGET)
    return 100 * ell0.evaluate(model, x[:ATTACKED], y[:ATTACKED], ball, attacks, progress=False).robust_accuracy


def main() -> None:
    x, y = ell0.data.load("digits", "train")
    x_test, y_test = ell0.data.load("digits", "test")
    ball = ell0.L0Ball(K, low=-VALUE, high=VALUE)
    x_spoiled = spoil(x_test, ball, VALUE)
    print(f"digits, {len(x_test)} test images of 64 numbers; {K} numbers of each set to {VALUE:g}")
    print(f"{'classifier':12}{'clean':>10}{'spoiled':>10}{'attacked':>10}")
    for k in (0, K):
        torch.manual_seed(0)
        model = train(ell0.models.mlp(k, in_features=64, hidden=(256, 64)), x, y)
        name = f"truncated {k}" if k else "dense"
        shares = [accuracy(model, x_test, y_test), accuracy(model, x_spoiled, y_test), attacked(model, x_test, y_test)]
        print(f"{name:12}" + "".join(f"{share:9.1f}%" for share in shares), flush=True)
    print(f"Attacked: the first {ATTACKED} images, {BUDGET} numbers of each changed within [-1, 1] by the best of four")
    print("attacks, who choose where to strike. Truncation alone does not stop them.")


if __name__ == "__main__":
    main()
