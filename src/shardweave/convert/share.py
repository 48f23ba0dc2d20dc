"""Which part of a conversion is whose, and whether what they wrote beside each other is whole.

A part is a stretch of the target in the order of its files, so that processes seldom write into the same
file, and never into the same bytes. Nothing is said for it: each process computes all parts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from shardweave.convert.execute import checksums_of, side_by_side
from shardweave.errors import WriteError
from shardweave.store.manifest import ITEMSIZE, Extent, Manifest, StoredTensor

_PAGE_BYTES = 64 << 10
"""What a file system may write as one: hosts that write into one page of a file may undo each other."""

_T = TypeVar("_T")
Task = tuple[str, int]
"""Extents that are filled together: the key, and the number of the first."""


def cut(items: Sequence[_T], sizes: Sequence[int], parts: int) -> list[list[_T]]:
    """Items in stretches of about the same size, in their order.

    No stretch is larger than its share by more than the largest item.

    >>> cut("abcdef", [5, 1, 1, 1, 3, 4], 3)
    [['a'], ['b', 'c', 'd', 'e'], ['f']]
    """
    found: list[list[_T]] = [[] for _ in range(parts)]
    total = max(1, sum(sizes))
    for item, size, end in zip(items, sizes, accumulate(sizes), strict=True):
        # Whose the middle of an item is, theirs is the item.
        found[min(parts - 1, (2 * end - size) * parts // (2 * total))].append(item)
    return found


def tasks_of(target: Manifest, parts: int) -> list[set[Task]]:
    """The tasks of each part."""
    tasks = [(tensor, numbers) for tensor in target.tensors.values() for numbers in side_by_side(tensor)]
    tasks.sort(key=lambda task: (task[0].extents[task[1][0]].file, task[0].extents[task[1][0]].start))
    sizes = [sum(_size(tensor, n) for n in numbers) for tensor, numbers in tasks]
    return [set(part) for part in cut([(t.key, numbers[0]) for t, numbers in tasks], sizes, parts)]


def tensors_of(held: Mapping[str, StoredTensor], parts: int) -> list[dict[str, StoredTensor]]:
    """The tensors of each part, to be read whole."""
    tensors = sorted(held.values(), key=lambda t: [(e.file, e.start) for e in t.extents[:1]])
    found = cut(tensors, [tensor.num_bytes for tensor in tensors], parts)
    return [{tensor.key: tensor for tensor in part} for part in found]


def check_borders(
    target: Manifest,
    parts: Sequence[set[Task]],
    mine: int,
    recorded: Mapping[tuple[str, int], Mapping[str, Any]],
) -> int:
    """Read again what others wrote into pages that this part wrote into; returns how many extents.

    Called when all are done. Each reads what its neighbours wrote and not its own, as a file system may keep
    for a host what that host wrote.

    Raises:
        WriteError: An extent has other bytes than those that were written.
    """
    found = sorted(set(_beside(target, parts, mine)), key=lambda each: (each[0].key, each[1]))
    for tensor, number in found:
        extent, wanted = tensor.extents[number], recorded.get((tensor.key, number))
        if wanted is None:
            raise _torn(target, extent, f"{tensor.key!r} is in no journal")
        got = checksums_of(target, tensor, number)
        if got["xxh3_128"] != wanted["xxh3_128"]:
            raise _torn(
                target, extent, f"xxh3_128 of {tensor.key!r}: {got['xxh3_128']} != {wanted['xxh3_128']}"
            )
    return len(found)


def _beside(target: Manifest, parts: Sequence[set[Task]], mine: int) -> Iterator[tuple[StoredTensor, int]]:
    whose = {task: part for part, tasks in enumerate(parts) for task in tasks}
    by_file: dict[str, list[tuple[int, int, int, StoredTensor, int]]] = {}
    for tensor in target.tensors.values():
        for numbers in side_by_side(tensor):
            part = whose[tensor.key, numbers[0]]
            for number in numbers:
                extent, size = tensor.extents[number], _size(tensor, number)
                if size:
                    place = (extent.start, extent.start + size, part, tensor, number)
                    by_file.setdefault(extent.file, []).append(place)
    for places in by_file.values():
        places.sort(key=lambda place: place[:2])
        starts = [place[0] for place in places]
        for before, after in pairwise(places):
            if before[2] == after[2] or mine not in (before[2], after[2]):
                continue
            # Around a border between parts: all that lies in the same page.
            low, high = (before[1] - 1) // _PAGE_BYTES, after[0] // _PAGE_BYTES
            if low != high:
                continue
            last = bisect_right(starts, (high + 1) * _PAGE_BYTES - 1)
            first = last
            while first and places[first - 1][1] > low * _PAGE_BYTES:
                first -= 1
            yield from ((tensor, number) for _, _, part, tensor, number in places[first:last] if part != mine)


def _size(tensor: StoredTensor, number: int) -> int:
    return tensor.extents[number].numel * ITEMSIZE[tensor.dtype]


def _torn(target: Manifest, extent: Extent, equation: str) -> WriteError:
    return WriteError(
        "what processes write beside each other stays as it was written",
        where=f"{target.root / extent.file} at byte {extent.start}",
        equation=equation,
        hint="run the same command again with one process, which mends it: the hosts do not see each "
        "other's writes on this file system",
    )
