"""Whether boxes overlap: the n-dimensional question behind "exactly once".

Boxes are cut along one dim at every edge of a box of their group, which turns the question into
the same one with a dim less, in smaller groups; in the last dim it is a sort. The dim that makes
the fewest cuts goes first. For boxes that come from products of dims, which is what every plan
is made of, nothing is cut twice and the cost is O(n log n). Boxes that are staggered in every dim
would fall into ever more pieces; they are compared pair by pair along the dim that tells most of
them apart, in bounded memory.
"""

from __future__ import annotations

import numpy as np

from shardweave.layout.table import Ints, within

_MOST_PIECES = 8
"""How many pieces a box may fall into, on average, before pairs are cheaper."""
_PAIRS = 1 << 20
"""Pairs that are compared at once."""


def find_overlap(group: Ints, low: Ints, high: Ints) -> tuple[int, int] | None:
    """Two boxes of one group that have an element in common, or ``None`` where there are none.

    Law: the answer is ``None`` exactly when no two boxes of one group share an element.

    Args:
        group: The group of each box, ``(n,)``; boxes of different groups never overlap.
        low: First index of each box, ``(n, dims)``.
        high: One past the last index of each box, ``(n, dims)``.

    >>> import numpy as np
    >>> low, high = np.array([[0, 0], [0, 3], [2, 2]]), np.array([[4, 3], [2, 6], [4, 6]])
    >>> find_overlap(np.zeros(3, dtype=np.int64), low, high)
    (0, 2)
    """
    low, high = _ranked(low, high)
    row = np.flatnonzero(np.all(high > low, axis=1)) if low.shape[1] else np.arange(len(group))
    group = np.unique(group[row], return_inverse=True)[1].astype(np.int64) if len(row) else group[row]
    left = list(range(low.shape[1]))
    while True:
        # A group of one box has nothing to overlap with.
        counts = np.bincount(group) if len(group) else np.zeros(0, dtype=np.int64)
        crowded = counts[group] > 1
        row, group = row[crowded], group[crowded]
        if not len(row):
            return None
        if not left:
            order = np.argsort(group, kind="stable")
            return _pair(row, order[0], order[1])
        if len(left) == 1:
            d = left[0]
            order = np.lexsort((low[row, d], group))
            starts, ends, groups = low[row, d][order], high[row, d][order], group[order]
            # Where any two overlap, two neighbours do: what begins between them begins inside the first.
            hit = np.flatnonzero((groups[1:] == groups[:-1]) & (starts[1:] < ends[:-1]))
            return _pair(row, order[hit[0]], order[hit[0] + 1]) if len(hit) else None
        cuts = [_slabs(group, low[row, d], high[row, d]) for d in left]
        best = min(range(len(left)), key=lambda k: int((cuts[k][1] - cuts[k][0]).sum()))
        first, last = cuts[best]
        counts = last - first
        if int(counts.sum()) > _MOST_PIECES * len(row):
            return _compare_pairs(row, group, low, high, left)
        row, group = np.repeat(row, counts), np.repeat(first, counts) + within(counts)
        group = np.unique(group, return_inverse=True)[1].astype(np.int64)
        left.pop(best)


def _compare_pairs(row: Ints, group: Ints, low: Ints, high: Ints, left: list[int]) -> tuple[int, int] | None:
    """Two boxes of one group that overlap in all dims that are left, by comparing neighbours in one."""
    low, high = low[row][:, left], high[row][:, left]
    span = int(high.max()) + 1
    begin, end = low + group[:, None] * span, high + group[:, None] * span
    # Sorted by where they begin, a box can only overlap with those that begin before it ends.
    orders = np.argsort(begin, axis=0, kind="stable")
    reach = [
        np.searchsorted(begin[order, d], end[order, d]) - np.arange(1, len(row) + 1)
        for d, order in enumerate(orders.T)
    ]
    best = int(np.argmin([int(counts.sum()) for counts in reach]))
    order, counts = orders[:, best], reach[best]
    blocks = np.cumsum(counts) // _PAIRS
    for block in range(int(blocks[-1]) + 1):
        i = np.flatnonzero(blocks == block)
        first = np.repeat(i, counts[i])
        second = first + 1 + within(counts[i])
        a, b = order[first], order[second]
        hit = np.flatnonzero(((low[a] < high[b]) & (low[b] < high[a])).all(axis=1))
        if len(hit):
            return _pair(row, int(a[hit[0]]), int(b[hit[0]]))
    return None


def _ranked(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """The same boxes with each edge replaced by its rank in its dim: keys stay far below 2**63."""
    edges = np.stack([low, high])
    for d in range(low.shape[1]):
        edges[..., d] = np.unique(edges[..., d], return_inverse=True)[1].reshape(2, -1)
    return edges[0], edges[1]


def _pair(row: Ints, i: int, j: int) -> tuple[int, int]:
    a, b = int(row[i]), int(row[j])
    return (a, b) if a < b else (b, a)


def _slabs(group: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """The slabs between edges of a group that each interval spans, as first and one past last."""
    span = int(high.max()) + 1
    low, high = low + group * span, high + group * span
    edges = np.unique(np.concatenate([low, high]))
    return np.searchsorted(edges, low), np.searchsorted(edges, high)
