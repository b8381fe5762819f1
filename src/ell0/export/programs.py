"""A model as an ONNX file, or as a `torch.export` file."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..files import check_out, write
from ..ops.blocked import thresholds
from ..ops.reference import products
from ..threat import describe
from ..train.stepper import restored

BLOCK = 16
"""Outputs whose products are held at once: a truncated layer in ONNX takes some 16 times the memory of its input."""


def save_onnx(path: Path | str, model: nn.Module, x: Tensor) -> Path:
    """Writes an ONNX file, with an input ``x (n, ...)`` for any n and an output ``logits``; needs the extra ``onnx``.

    Truncated layers become a partial sort (TopK) and sums, a block of outputs at a time, for runtimes that know no
    ell0. The model is exported as it answers in eval mode. x: rows, of which only shape and dtype are used.
    """
    path = Path(path)
    program = _program(path, model, x)
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("save_onnx needs onnxscript: pip install 'ell0[onnx]'") from error
    table = torch.export.default_decompositions()
    table[torch.ops.ell0.trimmed_linear.default] = _by_selection
    with torch.no_grad(), _quiet():
        plain = program.run_decompositions(table)
        made = torch.onnx.export(plain, dynamo=True, verbose=False, input_names=["x"], output_names=["logits"])
    assert made is not None
    write(path, made.model_proto.SerializeToString())
    return path


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from warning of its own code, and of torchvision, which nothing here uses."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*treespec", FutureWarning)
            yield
    finally:
        log.setLevel(before)


def save_program(path: Path | str, model: nn.Module, x: Tensor) -> Path:
    """Writes a `torch.export` file (``.pt2``) for any number of rows, which loads without the model's code.

    It calls ell0's operator, so it runs with the kernels of the machine that loads it; it has no gradients through
    truncated layers. The model is exported as it answers in eval mode. x: rows, of which only shape and dtype are used.
    """
    path, content = Path(path), io.BytesIO()
    torch.export.save(_program(path, model, x), content)
    write(path, content.getvalue())
    return path


def load_program(path: Path | str) -> nn.Module:
    """The model of a file of `save_program`, in eval mode, on the device that it was exported on."""
    return torch.export.load(path).module()  # importing this room has registered the operator


def _program(path: Path, model: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    check_out(path, "path")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(x, Tensor) or x.ndim < 2 or not len(x):
        raise ValueError(f"x must be rows, a tensor (n, ...) with n > 0, got {describe(x)}")
    rows = x[:1].detach().repeat(2, *[1] * (x.ndim - 1))  # torch takes a batch of 1 for a constant
    with restored(model), torch.no_grad():
        model.eval()
        try:
            model(rows)  # a model may keep what it computes once, which cannot be traced
            return torch.export.export(model, (rows,), dynamic_shapes=({0: torch.export.Dim("n")},))
        except Exception as error:  # torch raises errors of many kinds here
            reason = str(error).strip().split("\n")[0]
            name = type(model).__name__
            raise ValueError(f"model must be one that torch.export can trace, got {name}: {reason}") from error


def _by_selection(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """`torch.ops.ell0.trimmed_linear` in operators that every runtime has, looping over blocks of outputs."""
    *_, counts, _keep_cuts = rest
    (rows, d), pairs = weight.shape, list(zip(counts[::2], counts[1::2], strict=True))
    blocks = nn.functional.pad(weight, (0, 0, 0, -rows % BLOCK)).view(-1, BLOCK, d)

    def body(state: Tensor, block: Tensor, x: Tensor) -> list[Tensor]:
        terms = products(x, block)
        sums = torch.stack([_trimmed_sum(terms, *pair) for pair in pairs])
        return [state.clone(), sums.masked_fill(terms.isnan().any(-1), torch.nan)]

    # Not torch's function of that name: it compiles the body, and keeps what it compiled, with the shapes of before.
    _, found = torch.ops.higher_order.scan(body, [x.new_zeros(1)], [blocks], (x,))  # (blocks, pairs, n, BLOCK)
    out = found.permute(1, 2, 0, 3).flatten(2)[..., :rows]
    nothing = x.new_empty(0)
    return out if bias is None else out + bias, nothing, nothing.int(), nothing.int()


def _trimmed_sum(terms: Tensor, top: int, bottom: int) -> Tensor:
    """The sum over the last dimension without the ``top`` largest and ``bottom`` smallest terms.

    The terms between the two cuts, and those tied with a cut that stay; a product with none of them would be 0 * inf.
    """
    high, low, *removed = thresholds(terms, top, bottom)
    inside = (terms < high.unsqueeze(-1)) & (terms > low.unsqueeze(-1))
    total = torch.where(inside, terms, 0.0).sum(-1)
    for cut, gone in zip((high, low), removed, strict=True):
        stay = (terms == cut.unsqueeze(-1)).sum(-1) - gone
        total = total + torch.where(stay > 0, cut * stay, 0.0)
    return torch.where(high == low, high * (terms.shape[-1] - top - bottom), total)
