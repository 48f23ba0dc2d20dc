"""Value transforms: how stored values follow from logical ones, where they are not the same.

A transform is data: a name and a number. It says what was stored, so that two layouts with the
same transform move bytes untouched, and two with different ones are converted or refused, never
confused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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
        bad = self.kind == "scale" and self.constant == 0
        if self.kind not in _FORWARD or not math.isfinite(self.constant) or bad:
            raise TransformError(
                "a transform is known, finite and can be undone",
                equation=f"kind({self.kind!r}), constant({self.constant})",
                hint=f"use one of {', '.join(_FORWARD)}; a scale is not 0",
            )

    @property
    def exact(self) -> bool:
        """Whether applying and undoing it gives every bit back (away from overflow and underflow)."""
        return self.kind == "identity" or (self.kind == "scale" and math.frexp(self.constant)[0] in (0.5, -0.5))

    def apply(self, logical: Any) -> Any:
        """Stored values from logical ones, in the dtype given."""
        return np.asarray(_FORWARD[self.kind](logical, self.constant)).astype(np.asarray(logical).dtype)[()]

    def undo(self, stored: Any) -> Any:
        """Logical values from stored ones, in the dtype given."""
        return np.asarray(_BACKWARD[self.kind](stored, self.constant)).astype(np.asarray(stored).dtype)[()]


IDENTITY = Transform()
