"""Finding, among many boxes, those that touch another one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Boxes:
    """Boxes of one space, of which those that touch another box are found fast.

    Args:
        offsets, shapes: One row a box.

    >>> boxes = Boxes([(0, 0), (0, 4), (2, 0)], [(2, 4), (2, 4), (2, 8)])
    >>> boxes.touching((1, 5), (3, 6))
    [1, 2]
    """

    def __init__(self, offsets: Sequence[Sequence[int]], shapes: Sequence[Sequence[int]]) -> None:
        self.low: NDArray[np.int64] = np.array(offsets, np.int64).reshape(len(offsets), -1 if offsets else 0)
        self.high: NDArray[np.int64] = self.low + np.array(shapes, np.int64).reshape(self.low.shape)
        # Sorted along the first dim, only a stretch of them can touch: those that begin before the
        # other's end, less those up to which all have ended before its begin.
        first = self.low[:, :1].ravel()
        self._order = np.argsort(first, kind="stable") if first.size else np.arange(len(offsets))
        self._begin = first[self._order] if first.size else first
        self._reach = np.maximum.accumulate(self.high[self._order, 0]) if first.size else first

    def touching(
        self, low: Sequence[int] | NDArray[np.int64], high: Sequence[int] | NDArray[np.int64]
    ) -> list[int]:
        """The numbers of the boxes that share an element with the one from ``low`` to below ``high``."""
        near = self._order
        if not near.size:
            return []
        if self._begin.size:
            start = int(np.searchsorted(self._reach, low[0], side="right"))
            near = near[start : int(np.searchsorted(self._begin, high[0], side="left"))]
        # Where one begins within the other; an empty box shares no element with anything.
        begin, end = np.maximum(self.low[near], low), np.minimum(self.high[near], high)
        hit = (begin < end).all(axis=1)
        found: list[int] = np.sort(near[hit]).tolist()
        return found
