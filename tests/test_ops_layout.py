"""The trimmed product on any shape, layout and batch, its gradients to what asks for them, and its memory."""

from collections.abc import Callable
from math import nan
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ell0.ops import blocked, kernel, reference, trimmed_linear
from trimmed_cases import check, gaussian, integers, mixed


@pytest.mark.parametrize("shape", [(63,), (1, 63), (0, 63), (2, 0, 63), (5, 63), (2, 3, 63), (2, 1, 3, 63)])
@pytest.mark.parametrize("out", [0, 1, 5])
def test_any_leading_shape(backend: str, shape: tuple[int, ...], out: int) -> None:
    g = Generator().manual_seed(0)
    x = torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
    weight = gaussian(out, 63, 1, g).requires_grad_()
    bias = gaussian(1, out, 1, g)[0].requires_grad_()
    value = trimmed_linear(x, weight, bias, top=4, bottom=2)
    assert value.shape == (*shape[:-1], out), backend
    assert torch.allclose(value, reference.trimmed_linear(x, weight, bias, top=4, bottom=2))
    to_x, to_weight, to_bias = torch.autograd.grad(value.sum(), (x, weight, bias))
    flat = x.detach().reshape(-1, 63)
    expected = reference.gradients(torch.ones(len(flat), out), flat, weight.detach(), top=4, bottom=2)
    assert torch.allclose(to_x.reshape(-1, 63), expected[0])
    assert torch.allclose(to_weight, expected[1])
    assert to_x.shape == x.shape
    assert torch.equal(to_bias, torch.full_like(bias, len(flat)))


def transposed(t: Tensor) -> Tensor:
    return t.T.contiguous().T if t.dim() == 2 else strided(t)


def strided(t: Tensor) -> Tensor:
    return torch.full((*t.shape, 3), nan, dtype=t.dtype).index_copy_(-1, torch.tensor([1]), t.unsqueeze(-1))[..., 1]


def expanded(t: Tensor) -> Tensor:
    return t[:1].contiguous().expand(t.shape)


@pytest.mark.parametrize("layout", [transposed, strided, expanded])
@pytest.mark.parametrize("which", ["x", "weight", "bias", "upstream"])
def test_any_layout(backend: str, which: str, layout: Callable[[Tensor], Tensor]) -> None:
    g = Generator().manual_seed(0)
    tensors = {"x": gaussian(20, 63, 1, g), "weight": gaussian(18, 63, 1, g), "bias": gaussian(1, 18, 1, g)[0]}
    tensors["upstream"] = gaussian(20, 18, 1, g)
    tensors[which] = layout(tensors[which])
    assert 0 in tensors[which].stride() or not tensors[which].is_contiguous()

    def run(x: Tensor, weight: Tensor, bias: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        out = trimmed_linear(*leaves, top=3, bottom=5)
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    plain = run(**{name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()})
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(run(**tensors), plain, strict=True)), backend


@pytest.mark.parametrize("k", [2, 20])
def test_batches_beyond_one_slab_of_panels(k: int) -> None:
    # The kernel packs 8 MiB of samples at a time.
    g = Generator().manual_seed(k)
    x, weight = integers(2_150, 1_000, 1, g).float(), integers(2, 1_000, 1, g).float()
    x[-1] = gaussian(1, 1_000, 1, g)[0]
    upstream = gaussian(2_150, 2, 1, g).float()
    check(x, weight, None, upstream, top=k, bottom=1, backends=kernel.builds()[:1])


@pytest.mark.parametrize("batch", [1, 40])
def test_any_number_of_threads(backend: str, batch: int) -> None:
    g = Generator().manual_seed(0)
    x, weight = gaussian(batch, 63, 1, g).float(), gaussian(50, 63, 1, g).float()
    upstream = gaussian(batch, 50, 1, g).float()
    torch.set_num_threads(3)
    try:
        check(x, weight, None, upstream, top=3, bottom=2, backends=[backend])
    finally:
        torch.set_num_threads(1)


def test_inputs_are_left_alone(backend: str) -> None:
    g = Generator().manual_seed(0)
    for k in (2, 20):
        leaves = [mixed(40, 100, k, g), mixed(20, 100, k, g), gaussian(1, 20, 1, g)[0]]
        before = [t.clone() for t in leaves]
        upstream = gaussian(40, 20, 1, g)
        same = upstream.clone()
        for t in leaves:
            t.requires_grad_()
        trimmed_linear(*leaves, top=k, bottom=k).backward(upstream)
        trimmed_linear(*(t.detach() for t in leaves), top=k, bottom=k)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(leaves, before, strict=True)), backend
        assert torch.equal(upstream, same)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,), ()])
def test_gradients_to_what_asks_for_them(backend: str, wanted: tuple[int, ...]) -> None:
    g = Generator().manual_seed(0)
    leaves = [gaussian(20, 63, 1, g), gaussian(18, 63, 1, g), gaussian(1, 18, 1, g)[0]]
    upstream = gaussian(20, 18, 1, g)
    expected = [*reference.gradients(upstream, leaves[0], leaves[1], top=3, bottom=4), upstream.sum(0)]
    for i in wanted:
        leaves[i].requires_grad_()
    out = trimmed_linear(*leaves, top=3, bottom=4)
    assert out.requires_grad == bool(wanted), backend
    if wanted:
        out.backward(upstream)
    for i, t in enumerate(leaves):
        assert (t.grad is not None) == (i in wanted)
        assert t.grad is None or torch.allclose(t.grad, expected[i], rtol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize(("batch", "out", "d"), [(64, 128, 250), (3, 700, 20), (300, 2, 100)])
def test_the_torch_path_makes_nothing_larger_than_a_block(
    monkeypatch: pytest.MonkeyPatch, batch: int, out: int, d: int
) -> None:
    block = 16_384
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", block)
    g = Generator().manual_seed(0)
    x, weight = gaussian(batch, d, 1, g).float(), gaussian(out, d, 1, g).float()
    upstream = gaussian(batch, out, 1, g).float()
    check(x, weight, None, upstream, top=3, bottom=2, backends=["none"])
    with LargestTensor() as largest:
        _, cuts, *rest = blocked.forward(x, weight, None, 3, 2, keep_cuts=True)
        blocked.backward(upstream, (x, weight, x, x, cuts, *rest), to_x=True, to_weight=True)
    inputs_and_outputs = max(t.numel() for t in (x, weight, cuts))
    assert largest.elements <= max(block, inputs_and_outputs) < batch * out * d
