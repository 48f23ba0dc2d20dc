"""Regions: unions of boxes that lie in columns, compared and brought to one form.

Two questions are asked of many boxes at once, and neither looks at an element or at pairs of boxes:

*Do these boxes come to the same?* A box is known by its corners, each with a sign; where boxes meet, corners
cancel. What is left when the corners of many boxes are added up says how often each element is held, and is
nothing exactly where that is zero everywhere. So a tiling is proved by one sort.

*What is the region, however it was cut?* It falls into slabs along its first dim, as long as what is held
across a slab does not change, and what is held across is a region of a dim less. Then what goes on through
several slabs is one box. That form follows from the region alone, and no two boxes of it make a box.
"""

from __future__ import annotations

import numpy as np

from shardweave.errors import OutsideError
from shardweave.layout.table import Ints, within

MOST_CORNERS = 1 << 22
"""The most corners, and the most boxes that cutting may make: what is looked at comes from files too."""
_MOST_SLABS = 16
"""Into how many slabs boxes may fall on average. Those of products fall into none; a staircase is refused."""


def balance(group: Ints, low: Ints, high: Ints, sign: Ints) -> tuple[Ints, Ints, Ints]:
    """The corners that are left of boxes that are added up: group, place and number of each, in that order.

    Laws:
        Nothing is left exactly where each group holds each element zero times, counted with signs.
        The first corner left of a group is the first element, by its places, that it holds not zero times,
        and its number is how often.

    Args:
        group: The group of each box, ``(n,)``.
        low: First index of each box, ``(n, dims)``.
        high: One past the last index of each box, ``(n, dims)``.
        sign: How often each box counts, ``(n,)``.

    >>> import numpy as np
    >>> low, high, sign = np.array([[0], [3], [0]]), np.array([[4], [6], [6]]), np.array([1, 1, -1])
    >>> _, place, number = balance(np.zeros(3, dtype=np.int64), low, high, sign)
    >>> place.tolist(), number.tolist()
    ([[3], [4]], [1, -1])
    """
    full = np.all(high > low, axis=1)
    if not full.all():
        group, low, high, sign = group[full], low[full], high[full], sign[full]
    # A dim in which all boxes are alike has the same two corners for all.
    told = np.flatnonzero((low != low[:1]).any(axis=0) | (high != high[:1]).any(axis=0))
    _bounded(len(group) << len(told), f"{len(group)} boxes in {len(told)} dims")
    place, number, who = low[:, told], sign, group
    for d, ends in enumerate(high[:, told].T):
        other = place.copy()
        other[:, d] = np.tile(ends, 1 << d)
        place, number = np.concatenate([place, other]), np.concatenate([number, -number])
        who = np.concatenate([who, who])
    order = np.lexsort((*place.T[::-1], who))
    place, number, who = place[order], number[order], who[order]
    new = np.ones(len(who), dtype=np.bool_)
    new[1:] = (who[1:] != who[:-1]) | (place[1:] != place[:-1]).any(axis=1)
    first = np.flatnonzero(new)
    number = np.add.reduceat(number, first) if len(first) else number
    left = number != 0
    first = first[left]
    whole = np.repeat(low[:1], len(first), axis=0)
    whole[:, told] = place[first]
    return who[first], whole, number[left]


def cut(group: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """The boxes cut along the edges of their group, until any two of it are equal or disjoint.

    Returns:
        For each part the box that it is of, its low and high, and a number that equal parts of a group share.
    """
    values, low, high = _ranked(low, high)
    row, number = np.arange(len(group)), group
    low, high = low.copy(), high.copy()
    for d in range(low.shape[1]):
        edges, first, last = _slabs(number, low[:, d], high[:, d])
        parts = last - first
        _bounded(int(parts.sum()), f"{len(group)} boxes")
        row, low, high = np.repeat(row, parts), np.repeat(low, parts, axis=0), np.repeat(high, parts, axis=0)
        number = np.repeat(first, parts) + within(parts)
        low[:, d], high[:, d] = edges[number, 1], edges[number + 1, 1]
    number = np.unique(number, return_inverse=True)[1].astype(np.int64)
    return row, _values(values, low), _values(values, high), number


def merged(group: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """The one form of the region of each group, sorted by group and place.

    Laws:
        Boxes of one region, however it was cut, have the same form, and it is that of its own boxes.
        No two boxes of it make one box.

    Args:
        group: The group of each box, ``(n,)``. Boxes of one group are disjoint.
        low: First index of each box, ``(n, dims)``.
        high: One past the last index of each box, ``(n, dims)``.

    >>> import numpy as np
    >>> low, high = np.array([[0, 0], [0, 2], [1, 0]]), np.array([[1, 2], [1, 4], [3, 2]])
    >>> _, low, high = merged(np.zeros(3, dtype=np.int64), low, high)
    >>> low.tolist(), high.tolist()
    ([[0, 0], [1, 0]], [[1, 4], [3, 2]])
    """
    full = np.all(high > low, axis=1)
    if not full.any():
        return group[full], low[full], high[full]
    values, low, high = _ranked(low[full], high[full])
    group, low, high = _merged(group[full], low, high)
    order = np.lexsort((*low.T[::-1], group))
    return group[order], _values(values, low[order]), _values(values, high[order])


def _merged(group: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    if not low.shape[1]:
        group = np.unique(group)
        none = np.zeros((len(group), 0), dtype=np.int64)
        return group, none, none
    edges, first, last = _slabs(group, low[:, 0], high[:, 0])
    parts = last - first
    _bounded(int(parts.sum()), f"{len(group)} boxes", most=max(1 << 12, _MOST_SLABS * len(group)))
    row = np.repeat(np.arange(len(group)), parts)
    slab, low, high = _merged(np.repeat(first, parts) + within(parts), low[row, 1:], high[row, 1:])
    group, begin, end = edges[slab, 0], edges[slab, 1], edges[slab + 1, 1]
    order = np.lexsort((begin, *high.T, *low.T, group))
    group, begin, end, low, high = group[order], begin[order], end[order], low[order], high[order]
    new = np.ones(len(group), dtype=np.bool_)
    new[1:] = (
        (group[1:] != group[:-1])
        | (begin[1:] != end[:-1])
        | (low[1:] != low[:-1]).any(axis=1)
        | (high[1:] != high[:-1]).any(axis=1)
    )
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(group)) - 1
    return (
        group[starts],
        np.column_stack([begin[starts], low[starts]]),
        np.column_stack([end[ends], high[starts]]),
    )


def _slabs(group: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """The edges of all groups as ``(group, edge)`` rows, and those at which each interval begins and ends."""
    span = 1 + int(high.max(initial=0))
    names, number = np.unique(group, return_inverse=True)
    begin, end = low + number * span, high + number * span
    keys = np.unique(np.concatenate([begin, end]))
    edges = np.column_stack([names[keys // span], keys % span])
    return edges, np.searchsorted(keys, begin), np.searchsorted(keys, end)


def _ranked(low: Ints, high: Ints) -> tuple[list[Ints], Ints, Ints]:
    """The same boxes with each edge replaced by its rank in its dim, so that keys stay far below 2**63."""
    edges = np.stack([low, high])
    values = []
    for d in range(low.shape[1]):
        found, number = np.unique(edges[..., d], return_inverse=True)
        values.append(found)
        edges[..., d] = number.reshape(2, -1)
    return values, edges[0], edges[1]


def _values(values: list[Ints], ranks: Ints) -> Ints:
    return np.stack([found[ranks[:, d]] for d, found in enumerate(values)], axis=1) if values else ranks


def _bounded(count: int, what: str, *, most: int = MOST_CORNERS) -> None:
    if count > most:
        raise OutsideError(
            "boxes are few enough to be looked at together",
            where=what,
            equation=f"{count} corners or parts > {most}",
            hint="a damaged or hostile description can say anything; merge blocks that lie side by side",
        )
