"""Which replica serves which copy: nearest first, then in turn, starting with the least loaded.

The choice is a function of the two layouts and of the order of their tensors, so every rank that
computes it gets the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardweave.layout.table import Ints, within

MOST_PARTS = 64
"""The most parts that one box is cut into, so that several replicas serve it."""

# Where one replica is asked at most once more than another, sixteen turns keep it within a sixteenth.
_TURNS = 16


@dataclass(frozen=True, slots=True)
class Candidates:
    """The ranks that can serve the moves of each group.

    Attributes:
        rank: Global ranks, group after group, each once in its group.
        group: The group of each.
        first: Where the ranks of each group begin, and one past the end.
    """

    rank: Ints
    group: Ints
    first: Ints


@dataclass(frozen=True, slots=True)
class Deal:
    """Part ``part`` of ``parts`` of move ``move`` is sent by rank ``src``; ordered by move and part."""

    move: Ints
    part: Ints
    parts: Ints
    src: Ints


class Loads:
    """Bytes that each rank of the source has been asked to send so far in one plan."""

    def __init__(self, ranks: range, ranks_per_node: int | None) -> None:
        self.ranks = ranks
        self.ranks_per_node = ranks_per_node
        self.sent = np.zeros(len(ranks), dtype=np.int64)

    def of(self, rank: Ints) -> Ints:
        """The bytes that each of some ranks has been asked to send."""
        return self.sent[rank - self.ranks.start]

    def add(self, src: Ints, dst: Ints, num_bytes: Ints) -> None:
        """Count copies; what stays on its rank is not sent."""
        sent = np.where(src == dst, 0, num_bytes)
        added = np.bincount(src - self.ranks.start, weights=sent, minlength=len(self.ranks))
        self.sent += added.astype(np.int64)


def stretch(width: Ints, part: Ints, parts: Ints) -> tuple[Ints, Ints]:
    """Where each part begins and ends of ``width`` places cut into ``parts``."""
    return width * part // parts, width * (part + 1) // parts


def deal(
    candidates: Candidates, *, group: Ints, dst: Ints, num_bytes: Ints, width: Ints, loads: Loads
) -> Deal:
    """Who serves each move.

    A rank serves itself where it can; else a candidate on the destination's node does where there is
    one; else any. Among equals, moves of one size are dealt out in turn, and cut into as many parts as
    give every candidate the same number of them.

    Laws:
        The parts of a move are ``0..parts - 1``, each once, and ``parts <= width``.
        ``src`` is a candidate of the move's group.

    Args:
        candidates: Who can serve each group; every group has at least one.
        group: The group of each move.
        dst: The destination rank of each move.
        num_bytes: The bytes of each move.
        width: Into how many parts each move can be cut at most.
        loads: Bytes sent so far; updated.
    """
    first, last = candidates.first[group], candidates.first[group + 1]
    src = candidates.rank[first]
    settled = last - first == 1
    if not settled.all():
        own = _serves_itself(candidates, group, dst)
        src, settled = np.where(own, dst, src), settled | own
    loads.add(src[settled], dst[settled], num_bytes[settled])
    moves = np.flatnonzero(settled)
    deals = [Deal(moves, np.zeros_like(moves), np.ones_like(moves), src[moves])]
    left = np.flatnonzero(~settled)
    if loads.ranks_per_node is not None and len(left):
        # A bucket is a group and a node: ranks and moves of one bucket are near each other.
        num_nodes = 1 + max(int(candidates.rank.max()), int(dst.max())) // loads.ranks_per_node
        at = candidates.group * num_nodes + candidates.rank // loads.ranks_per_node
        wanted = group[left] * num_nodes + dst[left] // loads.ranks_per_node
        near = np.isin(wanted, at)
        deals.append(_in_turn(candidates.rank, at, wanted[near], left[near], dst, num_bytes, width, loads))
        left = left[~near]
    if len(left):
        deals.append(
            _in_turn(candidates.rank, candidates.group, group[left], left, dst, num_bytes, width, loads)
        )
    if len(deals) == 1:
        return deals[0]
    joined = (np.concatenate([getattr(one, name) for one in deals]) for name in Deal.__slots__)
    move, part, parts, sources = joined
    order = np.lexsort((part, move))
    return Deal(move[order], part[order], parts[order], sources[order])


def _serves_itself(candidates: Candidates, group: Ints, rank: Ints) -> NDArray[np.bool_]:
    """Whether each rank is a candidate of its group."""
    low, high = int(candidates.rank.min()), int(candidates.rank.max())
    if int(rank.max()) < low or int(rank.min()) > high:
        return np.zeros(len(rank), dtype=np.bool_)
    span = 1 + max(high, int(rank.max()))
    return np.isin(group * span + rank, candidates.group * span + candidates.rank)


def _in_turn(
    ranks: Ints, at: Ints, wanted: Ints, moves: Ints, dst: Ints, num_bytes: Ints, width: Ints, loads: Loads
) -> Deal:
    """Moves dealt out to the ranks of the bucket that each wants; ``at`` is the bucket of each rank."""
    order = np.lexsort((ranks, loads.of(ranks), at))
    ranks, at = ranks[order], at[order]
    first = np.searchsorted(at, wanted, "left")
    choices = np.searchsorted(at, wanted, "right") - first

    order = np.lexsort((num_bytes[moves], wanted))  # stable, so moves stay in order
    moves, wanted, first, choices = moves[order], wanted[order], first[order], choices[order]
    sizes = num_bytes[moves]
    differs = np.zeros(len(moves), dtype=np.int64)
    differs[1:] = (wanted[1:] != wanted[:-1]) | (sizes[1:] != sizes[:-1])
    alike = np.cumsum(differs)
    number = np.bincount(alike)[alike]
    even = np.minimum(choices // np.gcd(number, choices), -(-_TURNS * choices // number))
    parts = np.minimum(np.minimum(even, MOST_PARTS), np.maximum(width[moves], 1))

    row = np.repeat(np.arange(len(moves)), parts)
    part = within(parts)
    turn = within(np.bincount(alike, weights=parts).astype(np.int64))
    src = ranks[first[row] + turn % choices[row]]
    low, high = stretch(width[moves[row]], part, parts[row])
    loads.add(src, dst[moves[row]], sizes[row] // np.maximum(width[moves[row]], 1) * (high - low))
    return Deal(moves[row], part, parts[row], src)
