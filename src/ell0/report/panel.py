"""The panel "Attack it yourself": images, recorded attacks, and the classifiers that are small enough for a script."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor, nn

from .. import files
from ..nn import InputClamp, InputScale, InputTruncation, TruncatedLinear
from ..recipe import Recipe, model, slug
from ..train import load_checkpoint
from .run_files import Run

MOST_NUMBERS = 1_000_000
"""Weights of a classifier that the panel computes; a click is answered within 150 ms."""
MOST_TOGETHER = 2_600_000
"""Weights of all of them: as base64 they leave a page below 15 MB."""
_MOST_PIXELS = 64 * 64  # each is an element of the page

Description = dict[str, Any]


@cache
def script() -> tuple[Markup, Markup]:
    """What the panel runs, and the source expression that lets a browser run this and nothing else."""
    text = "\n".join((Path(__file__).parent / name).read_text("utf-8") for name in ("network.js", "panel.js"))
    digest = base64.b64encode(sha256(text.encode()).digest()).decode()
    return Markup(text), Markup(f"'sha256-{digest}'")


def panel_of(run: Run) -> Description | None:
    """What the script of the panel reads; None if the run left no images, or images that are too large.

    Of classifiers that differ in their seed alone it takes the first. A classifier with more than `MOST_NUMBERS`
    weights, with a layer that `describe` does not know, or without a checkpoint has its recorded attacks only.
    """
    if run.folder is None or not run.exhibits:
        return None
    tensors, words = files.read_tensors(run.folder / "gallery.safetensors", "delete it")
    clean = tensors["clean"].float()
    if clean[0, 0].numel() > _MOST_PIXELS:
        return None
    folders = run.recipe.folders(run.folder) if run.recipe else {}
    others, left = _other_seeds(run.recipe) if run.recipe else (), MOST_TOGETHER
    classifiers = []
    for name in (picture["title"] for picture in run.exhibits[0][1][1:] if picture["title"] not in others):
        its = {key: tensors.get(f"{slug(name)}/{key}") for key in ("adv", "said", "says", "radius")}
        found = _network(folders.get(name), clean.shape[1:], min(left, MOST_NUMBERS))
        left -= 0 if found is None else len(found["numbers"]) * 3 // 16
        changes = zip(clean.flatten(1), its.pop("adv").float().flatten(1), strict=True)  # type: ignore[union-attr]
        attacks = [[[i, float(adv[i])] for i in (x != adv).nonzero().flatten().tolist()] for x, adv in changes]
        lists = {key: None if some is None else some.tolist() for key, some in its.items()}
        classifiers.append({"name": name, "attacks": attacks, "network": found, **lists})
    low, high = tensors["box"].tolist() if "box" in tensors else (-1.0, 1.0)
    return {
        "classifiers": classifiers,
        "images": _base64(clean),
        "shape": list(clean.shape[1:]),
        "labels": tensors["labels"].tolist(),
        "classes": list(run.data.classes) if run.data else [],
        "unit": words.get("unit", "feature"),
        "values": [low, high, 100 * max(abs(low), abs(high))],
    }


def _other_seeds(recipe: Recipe) -> list[str]:
    """The classifiers that differ from one before them in nothing but the seed."""
    first, others = list[Any](), list[str]()
    for one in recipe.everyone():
        alike = replace(one, name="", training=replace(one.training, seed=0))
        if alike in first:
            others.append(one.name)
        first.append(alike)
    return others


def _network(folder: Path | None, shape: Sequence[int], most: int) -> Description | None:
    try:
        checkpoint = load_checkpoint(folder) if folder and folder.is_dir() else None
    except FileNotFoundError:
        return None
    # Code that a card names is not run for a page.
    if checkpoint is None or "name" not in (checkpoint.card.get("model") or ()):
        return None
    if sum(tensor.numel() for tensor in checkpoint.tensors.values()) > most:
        return None
    return describe(model(checkpoint).eval(), shape)


def describe(network: nn.Module, shape: Sequence[int]) -> Description | None:
    """A classifier as network.js reads it: its layers as JSON, and all their numbers as float32 in base64.

    network: in eval mode.  shape: of one image, channels first. Returns None if there is a layer of another kind than
    those of ``models.mlp``, ``models.cnn`` and ``models.small_cnn``, with a clamp and a scale before them.
    """
    x, layers, numbers = torch.zeros(1, *shape), [], list[Tensor]()
    for layer in _leaves(network):
        before = x.shape[1:]
        with torch.no_grad():
            x = layer(x)
        found = _layer(layer, before, x.shape[1:])
        if found is None:
            return None
        words, own = found
        layers += [words] if words else []
        numbers += [torch.as_tensor(some).detach().float().flatten() for some in own]
    return {"layers": layers, "numbers": _base64(torch.cat(numbers) if numbers else torch.empty(0))}


def _leaves(network: nn.Module) -> Iterator[nn.Module]:
    if type(network) is not nn.Sequential:
        yield network
        return
    for layer in network._modules.values():  # not children(), which skips the second use of a layer
        if layer is not None:
            yield from _leaves(layer)


def _layer(layer: nn.Module, before: Sequence[int], after: Sequence[int]) -> tuple[Description, list[Any]] | None:
    """A layer in words, none if it changes no number, and its numbers; shapes are those of one sample."""
    kind = type(layer)
    if kind is nn.Flatten:
        return {}, []
    if kind is nn.ReLU:
        return {"kind": "relu"}, []
    if isinstance(layer, InputClamp):
        return {"kind": "clamp", "low": layer.low, "high": layer.high}, []
    if isinstance(layer, InputScale):
        low, high = torch.tensor(layer.low).double().view(-1), torch.tensor(layer.high).double().view(-1)
        return {"kind": "affine", "channels": len(low)}, [low, 1 / (high - low), 0 * low]
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and layer.affine and layer.running_var is not None:
        factor = layer.weight.double() / (layer.running_var.double() + layer.eps).sqrt()
        return {"kind": "affine", "channels": layer.num_features}, [layer.running_mean, factor, layer.bias]
    if isinstance(layer, InputTruncation):
        channels = before[0] if len(before) > 1 else 1
        return {"kind": "truncation", "channels": channels, "k": layer.k}, []
    if kind in (nn.Linear, TruncatedLinear) and isinstance(layer, nn.Linear) and len(before) == 1:
        k = layer.k if isinstance(layer, TruncatedLinear) else 0
        words = {"kind": "linear", "inputs": layer.in_features, "outputs": layer.out_features, "k": k}
        return words, [layer.weight, _bias(layer.bias, layer.out_features)]
    if isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        if layer.groups != 1 or layer.dilation != (1, 1):
            return None
        words = {"kind": "convolution", "inputs": list(before), "outputs": list(after)}
        words |= {"size": layer.kernel_size, "stride": layer.stride, "padding": layer.padding}
        return words, [layer.weight, _bias(layer.bias, layer.out_channels)]
    return None


def _bias(bias: Tensor | None, size: int) -> Tensor:
    return torch.zeros(size) if bias is None else bias


def _base64(numbers: Tensor) -> str:
    return base64.b64encode(numbers.numpy().astype(np.dtype("<f4")).tobytes()).decode()
