"""Value transforms: how stored values follow from logical ones, where they are not the same.

A transform is data: a name and a number. It says what was stored, so that two layouts with the
same transform move bytes untouched, and two with different ones are converted or refused, never
confused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from shardweave.errors import TransformError

_FORWARD: dict[str, Callable[[Any, float], Any]] = {
    "identity": lambda x, _: x,
    "scale": lambda x, c: x * c,
    "shift": lambda x, c: x + c,
    "neg_exp": lambda x, _: -np.exp(x),
}
_BACKWARD: dict[str, Callable[[Any, float], Any]] = {
    "identity": lambda x, _: x,
    "scale": lambda x, c: x / c,
    "shift": lambda x, c: x - c,
    "neg_exp": lambda x, _: np.log(-x),
}


@dataclass(frozen=True, slots=True)
class Transform:
    """Stored values as a function of logical values.

    Kinds: ``identity``; ``scale`` (stored = logical * constant, as a bias divided by the ranks that
    sum it); ``shift`` (stored = logical + constant, as a norm weight around 0); ``neg_exp``
    (stored = -exp(logical), as the decay of a state-space layer).

    >>> Transform("scale", 0.25).apply(np.float32(8))
    np.float32(2.0)
    """

    kind: str = "identity"
    constant: float = 0.0

    def __post_init__(self) -> None:
        constant = float(self.constant)
        takes_one = self.kind in ("scale", "shift")
        bad = (self.kind == "scale" and constant == 0) or (constant != 0 and not takes_one)
        if self.kind not in _FORWARD or not math.isfinite(constant) or bad:
            raise TransformError(
                "a transform is known, finite and can be undone",
                where="a buffer's transform",
                equation=f"kind({self.kind!r}), constant({constant})",
                hint=f"use one of {', '.join(_FORWARD)}; scale takes a constant that is not 0, shift any",
            )
        # What changes nothing is the identity, so that it moves bytes untouched.
        if (self.kind, constant) in (("scale", 1.0), ("shift", 0.0)):
            object.__setattr__(self, "kind", "identity")
            constant = 0.0
        object.__setattr__(self, "constant", constant)

    @property
    def exact(self) -> bool:
        """Whether applying and undoing it gives every bit back (away from overflow and underflow)."""
        power_of_two = math.frexp(self.constant)[0] in (0.5, -0.5)
        return self.kind == "identity" or (self.kind == "scale" and power_of_two)

    def apply(self, logical: Any) -> Any:
        """Stored values from logical ones, in the dtype given."""
        return np.asarray(_FORWARD[self.kind](logical, self.constant)).astype(np.asarray(logical).dtype)[()]

    def undo(self, stored: Any) -> Any:
        """Logical values from stored ones, in the dtype given."""
        return np.asarray(_BACKWARD[self.kind](stored, self.constant)).astype(np.asarray(stored).dtype)[()]


IDENTITY = Transform()

Operation = tuple[str, float]
"""What is done to values: ``add``, ``multiply`` or ``divide`` with a number; ``neg_exp``; ``log_neg``."""

_DO = {"scale": "multiply", "shift": "add", "neg_exp": "neg_exp"}
_UNDO = {"scale": "divide", "shift": "add", "neg_exp": "log_neg"}


def change(src: Transform, dst: Transform) -> tuple[Operation, ...]:
    """What makes the values that ``dst`` stores of those that ``src`` stores, first to last.

    Two operations become one only where the one has a constant that is exact.

    Laws:
        ``change(t, t) == ()``.
        Carried out, it is ``dst.apply(src.undo(stored))`` but for rounding.

    >>> change(Transform("shift", -1.0), IDENTITY), change(Transform("scale", 0.5), Transform("scale", 0.125))
    ((('add', 1.0),), (('multiply', 0.25),))
    """
    if src == dst:
        return ()
    a, b = src.constant, dst.constant
    if src.kind == dst.kind == "shift" and Fraction(b) - Fraction(a) == Fraction(b - a):
        return (("add", b - a),)
    if src.kind == dst.kind == "scale":
        if math.isfinite(b / a) and Fraction(b) / Fraction(a) == Fraction(b / a):
            return (("multiply", b / a),)
        if math.isfinite(a / b) and Fraction(a) / Fraction(b) == Fraction(a / b):
            return (("divide", a / b),)
    undo = [(_UNDO[src.kind], -a if src.kind == "shift" else a)] if src != IDENTITY else []
    return (*undo, *([(_DO[dst.kind], b)] if dst != IDENTITY else []))
