"""Who attends to what: a batch's attention as blocks of slots, computed without torch.

Within a document an ordered stretch of queries and another of keys have one of three relations: all keys come
first and are seen by all queries, the two are the same and each query sees up to itself, or the keys come
later and are not seen. ``blocks`` says which pairs of stretches of two ranks have the first or the second,
and every way of sharing attention between ranks reads it from there; nobody counts in cut positions. Where a
batch is not causal, all queries of a document see all of its keys.

>>> batch = SequenceLayout((8,), cp=2)
>>> [blocks(batch, 0, source) for source in range(2)]
[(Block(0:4 sees up to itself),), (Block(2:4 sees 0:4),)]
>>> [blocks(batch, 1, source) for source in range(2)]
[(Block(0:4 sees 0:2),), (Block(0:4 sees up to itself),)]
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardweave.train.sequence import SequenceLayout

Span = tuple[int, int]
"""A stretch of slots of a part: where it starts, and where it ends."""


@dataclass(frozen=True, slots=True, repr=False)
class Block:
    """A stretch of a rank's queries and the stretch of keys that it sees.

    Attributes:
        queries: Slots of the part of the rank that asks, along its sequence dim.
        keys: Slots of the part that has the keys.
        causal: Whether both are the same slots, of which each sees those up to itself; else each query sees
            every key.
    """

    queries: Span
    keys: Span
    causal: bool = False

    def __repr__(self) -> str:
        start, stop = self.queries
        keys = "up to itself" if self.causal else f"{self.keys[0]}:{self.keys[1]}"
        return f"Block({start}:{stop} sees {keys})"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Slots of one document that follow each other, in the document and in a part.

    Attributes:
        document: Which document.
        at: The first slot, counted in the part.
        position: Its position in the document.
        size: How many.
    """

    document: int
    at: int
    position: int
    size: int

    @property
    def end(self) -> int:
        """The position after its last one."""
        return self.position + self.size


@lru_cache(maxsize=1024)
def stretches(layout: SequenceLayout, rank: int | None) -> tuple[Stretch, ...]:
    """The stretches of a context rank's part, or of the whole batch for ``None``.

    Of rows (``bshd``) they are those of one row, padding included, since all rows are computed at once; of a
    packed row (``thd``) they have the real tokens only.
    """
    positions, documents, real = (a.reshape(-1) for a in (layout.positions, layout.documents, layout.is_real))
    slots = np.arange(len(positions)) if rank is None else layout.slots(rank).reshape(-1)
    if layout.form == "bshd":
        slots = slots[: len(slots) // max(len(layout.lengths), 1)]
    positions, documents, real = positions[slots], documents[slots], real[slots]
    kept = np.ones_like(real) if layout.form == "bshd" else real
    at = np.flatnonzero(kept)
    if not len(at):
        return ()
    goes_on = (np.diff(at) == 1) & (np.diff(positions[at]) == 1) & (np.diff(documents[at]) == 0)
    starts = np.flatnonzero(np.r_[True, ~goes_on])
    sizes = np.diff(np.r_[starts, len(at)])
    first = at[starts]
    return tuple(
        Stretch(*map(int, row)) for row in zip(documents[first], first, positions[first], sizes, strict=True)
    )


@lru_cache(maxsize=1024)
def blocks(layout: SequenceLayout, rank: int | None, source: int | None) -> tuple[Block, ...]:
    """What the queries of one context rank see of the keys of another.

    Stretches that lie side by side and see the same are one block, so that there is at most one for each
    document in either order. Where the batch is not causal, a document is one.

    Args:
        layout: The batch.
        rank: Whose queries; ``None`` for one that has the whole batch.
        source: Whose keys.

    Laws:
        Over all sources the blocks are what ``SequenceLayout.sees`` says of real tokens, each pair once.
    """
    found: list[Block] = []
    keys = _by_document(layout, source)
    for document, mine in _by_document(layout, rank).items():
        theirs = keys.get(document, [])
        if rank == source:
            found.append(Block(_span(mine), _span(mine), causal=layout.causal))
            continue
        if not layout.causal:
            found += [Block(_span(mine), _span(theirs))] if theirs else []
            continue
        counted = [(sum(key.end <= one.position for key in theirs), one) for one in mine]
        for count, alike in itertools.groupby(counted, lambda pair: pair[0]):
            asking = [one for _, one in alike]
            if count:
                found.append(Block(_span(asking), _span(theirs[:count])))
    return tuple(found)


def _span(of: list[Stretch]) -> Span:
    """The slots of stretches that lie side by side."""
    return of[0].at, of[-1].at + of[-1].size


def _by_document(layout: SequenceLayout, rank: int | None) -> dict[int, list[Stretch]]:
    return {
        document: list(of)
        for document, of in itertools.groupby(stretches(layout, rank), lambda s: s.document)
    }


# --- windows ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tile:
    """Some queries of a part, and all keys that one of them sees through a window.

    Attributes:
        queries: Slots of the part of the rank that asks.
        position: The position of the first of them in its document.
        keys: Stretches of the part that has the keys, and the position of the first of each.
    """

    queries: Span
    position: int
    keys: tuple[tuple[Span, int], ...]

    def mask(self, window: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Which query sees which key: ``(queries, keys)``."""
        asking = self.position + np.arange(self.queries[1] - self.queries[0])
        having = np.concatenate([first + np.arange(stop - start) for (start, stop), first in self.keys])
        back = asking[:, None] - having[None]
        seen: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = (back >= 0) & (back < window)
        return seen


@lru_cache(maxsize=1024)
def tiles(layout: SequenceLayout, rank: int | None, window: int, least: int = 256) -> tuple[Tile, ...]:
    """What a rank's queries see through a sliding window, where it has the keys of all ranks.

    Args:
        layout: The batch.
        rank: Whose queries; its keys are the parts of all ranks, one after the other. ``None`` for one that
            has the whole batch in order.
        window: How many tokens back a token sees, itself included.
        least: Queries of a tile, unless the window is longer: a mask has at most twice as many columns.
    """
    width = layout.local_shape()[-1]
    sources = [(0, None)] if rank is None else [(source * width, source) for source in range(layout.cp)]
    keys = [(offset, key) for offset, source in sources for key in stretches(layout, source)]
    found = []
    for mine in stretches(layout, rank):
        for first in range(mine.position, mine.end, max(least, window)):
            last = min(first + max(least, window), mine.end)
            seen = []
            for offset, key in keys:
                start, stop = max(key.position, first - window + 1), min(key.end, last)
                if key.document == mine.document and start < stop:
                    at = offset + key.at + start - key.position
                    seen.append(((at, at + stop - start), start))
            at = mine.at + first - mine.position
            found.append(Tile((at, at + last - first), first, tuple(seen)))
    return tuple(found)
