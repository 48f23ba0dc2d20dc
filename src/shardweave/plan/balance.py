"""Which replica serves which copy: nearest first, then the least loaded.

The choice is a function of the plan so far and of nothing else, so every rank that computes it
gets the same one.
"""

from __future__ import annotations

import numpy as np

from shardweave.errors import HolderError
from shardweave.layout.table import Ints


class Loads:
    """Bytes that each rank has been asked to send so far in one plan."""

    def __init__(self, world_size: int, ranks_per_node: int | None) -> None:
        self.sent = np.zeros(world_size, dtype=np.int64)
        self.node = np.arange(world_size) // ranks_per_node if ranks_per_node else None


def choose(group: Ints, dst: Ints, num_bytes: Ints, source: Ints, first: Ints, loads: Loads) -> Ints:
    """For each move, which candidate serves it.

    A move may be served by any candidate of its group. It is served by the destination itself
    where that is one, else by a candidate on the destination's node where there is one, else by
    any; among equals the moves are dealt out in turn, starting with the least loaded.

    Args:
        group: The group of each move.
        dst: The destination rank of each move.
        num_bytes: The bytes of each move.
        source: The rank of each candidate, groups one after the other.
        first: Where each group's candidates begin, and one past the end.
        loads: Bytes sent so far; updated.

    Returns:
        The candidate of each move, as a row of ``source``.
    """
    size = first[1:] - first[:-1]
    if len(size) and int(size.min()) == 0:
        raise HolderError(
            "some rank holds every element that a plan reads",
            equation=f"{int((size == 0).sum())} groups of boxes have no holder",
            hint="the source buffer does not exist at any rank for these boxes; check its 'where'",
        )
    chosen = first[group]
    open_moves = np.flatnonzero(size[group] > 1)
    if len(open_moves):
        order = open_moves[np.argsort(group[open_moves], kind="stable")]
        starts = np.flatnonzero(np.diff(group[order], prepend=-1))
        for moves in np.split(order, starts[1:]):
            g = int(group[moves[0]])
            chosen[moves] = _deal(moves, dst, num_bytes, source[first[g] : first[g + 1]], loads) + first[g]
    settled = size[group] == 1
    _send(loads, source[chosen[settled]], dst[settled], num_bytes[settled])
    return chosen


def _send(loads: Loads, src: Ints, dst: Ints, num_bytes: Ints) -> None:
    away = src != dst
    loads.sent += np.bincount(src[away], weights=num_bytes[away], minlength=len(loads.sent)).astype(np.int64)


def _deal(moves: Ints, dst: Ints, num_bytes: Ints, ranks: Ints, loads: Loads) -> Ints:
    """The candidates of one group dealt out to its moves."""
    # Level of nearness of every candidate to every destination: 0 itself, 1 same node, 2 elsewhere.
    to = dst[moves]
    level = np.where(ranks[None, :] == to[:, None], 0, 2)
    if loads.node is not None:
        level = np.minimum(level, np.where(loads.node[ranks][None, :] == loads.node[to][:, None], 1, 2))
    best = level.min(axis=1)
    pick = np.empty(len(moves), dtype=np.int64)
    usable = level == best[:, None]
    # Moves with the same usable candidates take turns among them.
    patterns, which = np.unique(usable, axis=0, return_inverse=True)
    for p, pattern in enumerate(patterns):
        mine = np.flatnonzero(which.reshape(-1) == p)
        options = np.flatnonzero(pattern)
        turn = options[np.argsort(loads.sent[ranks[options]], kind="stable")]
        pick[mine] = turn[np.arange(len(mine)) % len(turn)]
        _send(loads, ranks[pick[mine]], to[mine], num_bytes[moves[mine]])
    return pick
