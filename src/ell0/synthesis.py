"""Analysis by Synthesis, a rival of the paper: one variational auto-encoder for each class [Schott19].

[Schott19] L. Schott et al., "Towards the first adversarially robust neural network model on MNIST", ICLR 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .common import check_count, seeded
from .nn import ParallelLinear
from .nn.layers import check_shape
from .threat import describe

__all__ = ["AnalysisBySynthesis", "ClassBounds"]

Pixels = Literal["grey", "binary"]

_ROWS = {"cuda": 128}  # images searched for together, 16 on a CPU; the last are filled up, so that all are alike
_DISMISSED = 0.1  # share of the codes drawn, those of least density, that are not tried
_RATE, _DECAYS, _TINY = 0.05, (0.9, 0.999), 1e-8  # of Adam
_RADIUS = 5.0  # of the ball that codes stay in


@dataclass(frozen=True)
class ClassBounds:
    """The objective of `AnalysisBySynthesis`: each auto-encoder learns the rows of its own class.

    The scores are the bounds of all classes at the codes that the encoders draw.
    """

    def at(self, epoch: int, epochs: int) -> ClassBounds:  # noqa: ARG002
        return self

    def check(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """Raises ValueError if the model has no such bounds."""
        if not isinstance(model, AnalysisBySynthesis):
            raise ValueError(f"model must be an AnalysisBySynthesis, got {type(model).__name__}")
        self(model, x, y)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(model, AnalysisBySynthesis)
        bounds = model.drawn_bounds(x)
        return bounds, -bounds.gather(1, y.unsqueeze(1)).mean()


class AnalysisBySynthesis(nn.Module):
    """Answers with the class whose decoder G explains an image best     [Schott19].

        logits[c] = max over codes z of -|x - G_c(z)|^2 - kl * |z|^2 / 2,   x mapped from [-1, 1] to [0, 1]

    which stands for a lower bound of log p(x | c), times kl and up to a constant, where z is standard normal and x
    given z is normal with variance kl / 2. The maximum is searched for: the best of ``samples`` fixed codes, then
    ``steps`` of Adam.

    Up to rounding a row does not depend on its batch. Weights get no gradient. The gradient to x is that at the codes
    found, which is the true one where they are the maximum.

    Args:
        in_shape: of an image or a row.  hidden: widths of the decoders; the encoders have them in reverse.
        latents: numbers of a code.  kl: weight of the divergence from the prior, beside the squared error.
        samples, steps: what an answer costs: distances to that many images, and passes through the decoders.
        pixels: ``"binary"`` makes the numbers of an image 0 or 1, and takes its gradient. Training sees grey ones.

    Differs from [Schott19]: fully connected layers, not convolutions; a kl of 0.1, not 1; 20 steps, not 50; no factor
    for each class, which the authors' code has for binary images alone.
    """

    objective: ClassVar = ClassBounds()
    codes: Tensor
    _sampled: tuple[object, Tensor, Tensor] | None = None

    def __init__(
        self,
        *,
        in_shape: Sequence[int] = (1, 28, 28),
        classes: int = 10,
        hidden: Sequence[int] = (256, 256),
        latents: int = 8,
        kl: float = 0.1,
        samples: int = 8000,
        steps: int = 20,
        pixels: Pixels = "grey",
    ) -> None:
        super().__init__()
        if not 0 < kl < math.inf:
            raise ValueError(f"kl must be a positive number, got {kl!r}")
        if pixels not in get_args(Pixels):
            raise ValueError(f'pixels must be "grey" or "binary", got {pixels!r}')
        self.in_shape, self.classes = check_shape("in_shape", in_shape), check_count("classes", classes, least=2)
        self.latents, self.samples = check_count("latents", latents), check_count("samples", samples)
        self.kl, self.steps, self.pixels = kl, check_count("steps", steps, least=0), pixels
        hidden = [check_count("hidden", width) for width in hidden]
        sizes = (math.prod(self.in_shape), *reversed(hidden), 2 * self.latents)
        self.encoder = nn.Sequential(*_layers(self.classes, sizes))
        self.decoder = nn.Sequential(*_layers(self.classes, (self.latents, *hidden, sizes[0])), nn.Sigmoid())
        many = math.ceil(self.samples / (1 - _DISMISSED))
        drawn = torch.randn(many, self.latents, generator=seeded(0, "codes"), device="cpu")
        kept = drawn[drawn.square().sum(1).argsort(stable=True)[: self.samples]]
        self.register_buffer("codes", kept, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``(n, *in_shape)``; result: ``(n, classes)``."""
        images = self._images(x)
        if self.pixels == "binary":
            images = (images >= 0.5).to(images.dtype)
        # Searching takes gradients, whatever the caller does.
        with torch.inference_mode(False):
            rows = _ROWS.get(x.device.type, 16)
            filled = F.pad(images.detach().clone(), (0, 0, 0, -len(x) % rows))
            found = [self._found(part) for part in filled.split(rows)]
        made, priors = (torch.cat(parts, 1)[:, : len(x)] for parts in zip(*found, strict=True))
        return -((images - made).square().sum(2) + priors).T

    def drawn_bounds(self, x: Tensor) -> Tensor:
        """The bounds of all classes at codes that the encoders draw, from torch's own generator: ``(n, classes)``."""
        images = self._images(x)
        guessed: Tensor = self.encoder(images.expand(self.classes, -1, -1))
        mean, log_variance = guessed.chunk(2, 2)
        codes = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(2) / 2
        errors: Tensor = (images - self.decoder(codes)).square().sum(2)
        return -(errors + self.kl * divergence).T

    def train(self, mode: bool = True) -> AnalysisBySynthesis:
        self._sampled = None  # weights that a CUDA graph changes have the same version
        return super().train(mode)

    def extra_repr(self) -> str:
        names = ("in_shape", "kl", "samples", "steps", "pixels")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def _images(self, x: Tensor) -> Tensor:
        if x.shape[1:] != self.in_shape:
            raise ValueError(f"x must have shape (n, {', '.join(map(str, self.in_shape))}), got {describe(x)}")
        return (x.flatten(1) + 1) / 2

    def _found(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What each decoder makes of the codes found, ``(classes, n, d)``, and the codes' share of minus the bound.

        images: ``(n, d)``.
        """
        images = images.expand(self.classes, -1, -1)
        with torch.no_grad():
            tried, offsets = self._tried()
            codes = self.codes[torch.baddbmm(offsets, images, tried.mT, alpha=-2).argmin(2)]
        first, second = torch.zeros_like(codes), torch.zeros_like(codes)
        for step in range(1, self.steps + 1):
            with torch.enable_grad():
                leaf = codes.detach().requires_grad_()
                (slope,) = torch.autograd.grad(F.mse_loss(self.decoder(leaf), images, reduction="sum"), leaf)
            # Adam in place: a step is so small that each operation counts, not its numbers.
            slope = slope.add(codes, alpha=self.kl)
            first.lerp_(slope, 1 - _DECAYS[0])
            second.mul_(_DECAYS[1]).addcmul_(slope, slope, value=1 - _DECAYS[1])
            scale = (second / (1 - _DECAYS[1] ** step)).sqrt_().add_(_TINY)
            codes = codes.addcdiv(first, scale, value=-_RATE / (1 - _DECAYS[0] ** step))
            codes = codes.flatten(0, 1).renorm(2, 0, _RADIUS).view_as(codes)
        with torch.no_grad():
            return self.decoder(codes), self._prior(codes)

    def _tried(self) -> tuple[Tensor, Tensor]:
        """Images of the fixed codes, ``(classes, samples, d)``, and what they add to their distance, kept for a while.

        Since |x|^2 is the same for all codes, the second is |G_c(z)|^2 plus the prior: ``(classes, 1, samples)``.
        """
        weights = [(weight.data_ptr(), weight._version) for weight in self.decoder.parameters()]
        if self._sampled is None or self._sampled[0] != weights:
            codes = self.codes.expand(self.classes, -1, -1)
            made = self.decoder(codes)
            self._sampled = weights, made, (made.square().sum(2) + self._prior(codes)).unsqueeze(1)
        return self._sampled[1:]

    def _prior(self, codes: Tensor) -> Tensor:
        return self.kl / 2 * codes.square().sum(2)


def _layers(parts: int, sizes: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [ParallelLinear(parts, before, after), nn.ELU()]
    return layers[:-1]
