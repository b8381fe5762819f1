"""Networks that look at one part of an input at a time, for votes of parts.

Each is called with all parts of a batch at once: ``network(parts, place)`` with parts ``(m, *shape)`` and the number of
each part, place ``(m,)`` int64, returns logits ``(m, classes)``. One network serves all parts; an embedding tells it
which one it sees. In eval mode the answer to a part depends on that part alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .common import check_count
from .nn.layers import check_shape
from .nn.residual import ResidualBlock, convolution

Pool = Literal["mean", "learned"]

__all__ = ["Members", "PartCNN", "PartMLP", "PartTransformer"]


class PartMLP(nn.Module):
    """A residual MLP: hidden = first(part) + embedding[place], then ``depth`` blocks, then the logits.

        hidden <- hidden + dropout(linear(dropout(gelu(linear(norm(hidden))))))

    Args:
        shape: of a part, ``(channels, height, width)`` or ``(size,)``.  places: number of parts.
        width: of every layer.  dropout: in [0, 1).
    """

    def __init__(
        self,
        shape: Sequence[int],
        places: int,
        *,
        classes: int = 10,
        width: int = 1024,
        depth: int = 4,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.first = _linear(math.prod(check_shape("shape", shape)), check_count("width", width))
        self.place = _embedding(check_count("places", places), width)
        self.blocks = nn.ModuleList(_branch(width, width, dropout) for _ in range(check_count("depth", depth)))
        self.head = nn.Sequential(RowNorm(), _head(width, classes))

    def forward(self, parts: Tensor, place: Tensor) -> Tensor:
        hidden = self.first(parts.flatten(1))
        hidden = hidden + _embedded(self.place, place, hidden)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class PartCNN(nn.Module):
    """A residual network: a convolution plus embedding[place], ``blocks`` residual blocks for each width, a pooling.

    A block is two 3x3 convolutions with batch norm; the first block of each width but the first halves the picture.

    Args:
        shape: of a part, ``(channels, height, width)``.  places: number of parts.
        widths: channels of each stage.  blocks: in each stage.
        pool: ``"mean"`` over the positions, or ``"learned"`` weights, for each channel and position, that begin there.
    """

    def __init__(
        self,
        shape: Sequence[int],
        places: int,
        *,
        classes: int = 10,
        widths: Sequence[int] = (160,),
        blocks: int = 4,
        pool: Pool = "mean",
    ) -> None:
        super().__init__()
        if len(check_shape("shape", shape)) != 3:
            raise ValueError(f"shape must be (channels, height, width), got {shape!r}")
        if not widths:
            raise ValueError(f"widths must be at least one, got {widths!r}")
        if pool not in get_args(Pool):
            raise ValueError(f'pool must be "mean" or "learned", got {pool!r}')
        wide = [check_count("widths", width) for width in widths]
        self.first = convolution(shape[0], wide[0], picture=shape[1:])
        self.place = _embedding(check_count("places", places), wide[0])
        self.norm = nn.BatchNorm2d(wide[0])
        self.blocks, size = nn.Sequential(), list(shape[1:])
        for before, after in pairwise((0, *wide)):
            self.blocks.append(ResidualBlock(before or after, after, 2 if before else 1, size))
            size = [-(-length // 2) for length in size] if before else size
            self.blocks.extend(ResidualBlock(after, after, 1, size) for _ in range(check_count("blocks", blocks) - 1))
        # What the weights of positions differ by from those of the mean, so that decay ends there.
        self.positions = nn.Parameter(torch.zeros(wide[-1], *size)) if pool == "learned" else None
        self.head = _head(wide[-1], classes)

    def forward(self, parts: Tensor, place: Tensor) -> Tensor:
        # Convolutions of many channels are fastest with channels last.
        hidden = self.first(parts.contiguous(memory_format=torch.channels_last))
        hidden = hidden + _embedded(self.place, place, hidden)[:, :, None, None]
        hidden = self.blocks(self.norm(hidden).relu())
        pooled = hidden.mean((2, 3))
        if self.positions is not None:
            pooled = pooled + (hidden * self.positions.to(hidden.dtype)).sum((2, 3))
        logits: Tensor = self.head(pooled)
        return logits


class PartTransformer(nn.Module):
    """A transformer whose tokens are the pixels of a part, each plus embedding[pixel] and embedding[place]; their mean.

    Args:
        shape: of a part, ``(channels, height, width)`` or ``(size,)``, whose numbers are then the tokens.
        places: number of parts.  width: of a token, a multiple of ``heads``.  depth: blocks of attention and MLP.
        dropout: in [0, 1), in the MLPs and after attention.
    """

    def __init__(
        self,
        shape: Sequence[int],
        places: int,
        *,
        classes: int = 10,
        width: int = 192,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        shape = check_shape("shape", shape)
        channels, pixels = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, shape[0])
        if check_count("width", width) % check_count("heads", heads):
            raise ValueError(f"width must be a multiple of heads, got width={width} with heads={heads}")
        self.first = _linear(channels, width)
        self.place, self.pixel = _embedding(check_count("places", places), width), _embedding(pixels, width)
        self.attention = nn.ModuleList(SelfAttention(width, heads, dropout) for _ in range(check_count("depth", depth)))
        self.mlps = nn.ModuleList(_branch(width, 4 * width, dropout) for _ in range(depth))
        self.head = nn.Sequential(RowNorm(), _head(width, classes))

    def forward(self, parts: Tensor, place: Tensor) -> Tensor:
        tokens = parts.flatten(2).mT if parts.ndim > 2 else parts.unsqueeze(2)  # (m, pixels, channels)
        hidden = self.first(tokens)
        hidden = hidden + self.pixel.weight.to(hidden.dtype) + _embedded(self.place, place, hidden).unsqueeze(1)
        for attention, mlp in zip(self.attention, self.mlps, strict=True):
            hidden = hidden + attention(hidden)
            hidden = hidden + mlp(hidden)
        logits: Tensor = self.head(hidden.mean(1))
        return logits


class Members(nn.Module):
    """Several networks of parts that learn apart and answer together, by the mean of their logits.

    In training mode the parts of a batch are shared out among them, so that a step costs as much as that of one
    network, and a batch of as many times the rows gives each its own. Votes of one image go to one member where the
    members divide the batch. A batch of fewer parts than members leaves some out.

    A mean of networks depends on a part as each of them does: whatever holds of votes of one network holds of it.
    passes: forward passes of one network for an answer.
    """

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        if not len(self.networks):
            raise ValueError("networks must be at least one, got none")
        self.passes = len(self.networks)

    def forward(self, parts: Tensor, place: Tensor) -> Tensor:
        if not self.training:
            return torch.stack([network(parts, place) for network in self.networks]).mean(0)
        shares = zip(self.networks, parts.tensor_split(self.passes), place.tensor_split(self.passes), strict=True)
        return torch.cat([network(mine, its) for network, mine, its in shares if len(mine)])


class RowNorm(nn.Module):
    """Layer norm without parameters: the linear layer that follows can have them in its weights.

    Under autocast it stays in bf16, with statistics in float32, where ``nn.LayerNorm`` would write float32 and back.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, x.shape[-1:])


class SelfAttention(nn.Module):
    """Attention of the tokens ``(m, tokens, width)`` of a part to each other."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.dropout = RowNorm(), nn.Dropout(dropout)
        self.into, self.out = _linear(width, 3 * width, gain=1.0), _linear(width, width, gain=0.0)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # Not torch's fused kernels: they put m on an axis of a CUDA grid that ends at 65,535, and tokens are few.
        weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
        found: Tensor = self.dropout(self.out((weights @ value).transpose(1, 2).flatten(2)))
        return found


def _branch(width: int, hidden: int, dropout: float) -> nn.Sequential:
    """A block of an MLP; at first it adds nothing."""
    into, out = _linear(width, hidden), _linear(hidden, width, gain=0.0)
    return nn.Sequential(RowNorm(), into, nn.GELU(), nn.Dropout(dropout), out, nn.Dropout(dropout))


def _linear(before: int, after: int, gain: float = 2.0**0.5) -> nn.Linear:
    layer = nn.Linear(before, after)
    nn.init.normal_(layer.weight, std=gain * before**-0.5)
    nn.init.zeros_(layer.bias)
    return layer


def _head(width: int, classes: int) -> nn.Linear:
    """Small logits at first: a vote that is sure of nothing costs log(classes)."""
    return _linear(width, check_count("classes", classes, least=2), gain=0.1)


def _embedding(number: int, width: int) -> nn.Embedding:
    layer = nn.Embedding(number, width)
    nn.init.normal_(layer.weight, std=0.1)
    return layer


def _embedded(embedding: nn.Embedding, place: Tensor, like: Tensor) -> Tensor:
    """Embeddings ``(m, width)`` in the precision of ``like``: rounded before the gather, so that it moves half."""
    return F.embedding(place, embedding.weight.to(like.dtype))
