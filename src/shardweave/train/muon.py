"""Muon: the direction in which a matrix is moved is made orthogonal first.

What Muon does to a matrix it does to all of it: no element of the direction can be known from a part of the
momentum. ``matrices.py`` brings the parts of a matrix together, without the padding that a layout may have
added, and calls ``newton_schulz``; what is here is the rest, which goes element by element. Formulas, names
and defaults are those of ``torch.optim.Muon``.

>>> adjusted_ratio((6, 4), "spectral"), adjusted_ratio((9, 4), "original"), adjusted_ratio((4, 9), "original")
(2.449489742783178, 1.5, 1.0)
>>> found = newton_schulz(torch.tensor([[3.0, 1.0], [0.0, 2.0], [1.0, 0.0]], dtype=torch.float64), Muon())
>>> [round(float(value), 2) for value in torch.linalg.svdvals(found)]
[0.83, 0.83]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardweave.errors import PlanError
from shardweave.train.arrays import Held
from shardweave.train.schedules import Schedule

MOMENTUM = "momentum_buffer"
"""The name of Muon's only state beside masters."""

_CHUNK = 1 << 16
"""Elements that are updated at once on a processor: they stay in its caches."""

Adjust = Literal["original", "match_rms_adamw", "spectral"]
"""How the learning rate follows from the shape of a matrix."""


@dataclass(frozen=True, slots=True)
class Muon:
    """Momentum whose direction is made orthogonal, with decoupled weight decay.

    Attributes:
        lr: The learning rate, or a function of the number of the update.
        momentum: How much of the momentum stays.
        nesterov: Whether the direction is one step ahead of the momentum.
        weight_decay: The share of a weight that it loses, times the learning rate.
        ns_steps: Steps of Newton-Schulz.
        ns_coefficients: Of its polynomial: of ``x``, ``x**3`` and ``x**5``.
        eps: The least norm that a direction is divided by.
        adjust_lr_fn: ``"original"`` and ``"match_rms_adamw"`` as in torch: ``sqrt(max(1, rows / columns))``
            and ``0.2 * sqrt(max(rows, columns))``, of which the second moves weights about as far as AdamW
            does with its learning rate; ``"spectral"`` is Megatron's ``sqrt(max(rows, columns))``.
        ns_dtype: In which dtype matrices are sent and made orthogonal; ``None`` for that of their masters.
            torch always takes ``"bfloat16"``.
    """

    lr: float | Schedule = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    ns_steps: int = 5
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    eps: float = 1e-7
    adjust_lr_fn: Adjust = "original"
    ns_dtype: Literal["bfloat16", "float32", "float64"] | None = None

    def rate(self, step: int) -> float:
        """The learning rate of an update, counted from 1, before it follows from the shape."""
        return self.lr(step) if callable(self.lr) else self.lr

    def rule(self, held: Held) -> MuonRule:
        """How an array is updated.

        Raises:
            PlanError: It holds something else than matrices, or matrices of several shapes.
        """
        shapes = sorted({part.shape for part in held.parts})
        if len(shapes) > 1 or any(len(shape) != 2 for shape in shapes):
            raise PlanError(
                "Muon updates matrices, and those of an array have one shape",
                where=f"array {held.name!r}",
                equation=f"shapes of its tensors: {', '.join(map(str, shapes))}",
                hint="choose AdamW for it; muon_for_matrices(muon, adamw) does so for norms and biases",
            )
        return MuonRule(self, adjusted_ratio(shapes[0], self.adjust_lr_fn) if shapes else 1.0)


class MuonRule(NamedTuple):
    """Muon for the matrices of one array.

    Attributes:
        settings: The settings.
        ratio: The learning rate over that of the settings.
    """

    settings: Muon
    ratio: float

    @property
    def states(self) -> tuple[str, ...]:
        """The states that it keeps."""
        return (MOMENTUM,)

    def prepare(self, grad: Tensor, momentum: Tensor) -> None:
        """Bring the momentum up to date, and make of a gradient the direction that is to be orthogonal."""
        for g, m in zip(_pieces(grad), _pieces(momentum), strict=True):
            m.lerp_(g, 1 - self.settings.momentum)
            if self.settings.nesterov:
                g.lerp_(m, self.settings.momentum)
            else:
                g.copy_(m)

    def update(self, values: Tensor, direction: Tensor, momentum: Tensor, *, step: int) -> None:
        """Move values along a direction that was made orthogonal."""
        rate = self.settings.rate(step)
        for v, d in zip(_pieces(values), _pieces(direction), strict=True):
            v.mul_(1 - rate * self.settings.weight_decay)
            v.add_(d, alpha=-rate * self.ratio)


def _pieces(flat: Tensor) -> tuple[Tensor, ...]:
    return flat.split(_CHUNK) if flat.device.type == "cpu" else (flat,)


def adjusted_ratio(shape: tuple[int, ...], how: Adjust) -> float:
    """What the learning rate of a matrix is multiplied by.

    Args:
        shape: Rows and columns of the matrix of the model: not of a share of it, and without padding.
        how: As in ``Muon``.
    """
    rows, columns = shape
    if how == "original":
        return math.sqrt(max(1, rows / columns))
    return math.sqrt(max(rows, columns)) * (0.2 if how == "match_rms_adamw" else 1)


def newton_schulz(matrix: Tensor, settings: Muon) -> Tensor:
    """A matrix whose singular values were brought to about 1, its singular vectors kept.

    Args:
        matrix: The whole of it. It is overwritten.
        settings: Steps, coefficients and eps.

    Returns:
        A tensor of the same shape and dtype.
    """
    a, b, c = settings.ns_coefficients
    upright = matrix.size(0) > matrix.size(1)
    found = matrix.T if upright else matrix
    found.div_(found.norm().clamp(min=settings.eps))
    for _ in range(settings.ns_steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if upright else found
