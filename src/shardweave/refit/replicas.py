"""Replicas among publishers: elements that several ranks hold, compared before any of them is sent.

Which replica an element comes from is the planner's choice. So if replicas differ, what arrives is a
mixture that no rank of the trainer has, and that no seal of what was sent can notice. Here each rank takes
the fingerprint of what others hold too, and all ranks that hold the same have to come to the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NoReturn

import numpy as np

from shardweave.errors import ReplicaError
from shardweave.layout import PAD, Box, Buffer, Layout, Tensor
from shardweave.layout.box import intersect_range
from shardweave.layout.fingerprint import NOTHING, Fingerprint
from shardweave.layout.table import Ints
from shardweave.move.transport import Arrays
from shardweave.refit import verify
from shardweave.refit.device import fingerprint_of

Ranges = tuple[range, ...]
"""Indices of one dim."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Elements of a tensor that are held more than once.

    Attributes:
        tensor: The tensor.
        elements: Which: the product of these indices of each dim.
        holders: The rank, and the number of its rule, of each that holds them. All are compared with the
            first.
    """

    tensor: Tensor
    elements: tuple[Ranges, ...]
    holders: tuple[tuple[int, int], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the holders, ascending."""
        return tuple(dict.fromkeys(rank for rank, _ in self.holders))

    def __str__(self) -> str:
        return f"tensor {self.tensor.name!r} {' x '.join(map(_brief, self.elements))}"


def _brief(ranges: Ranges) -> str:
    return ",".join(str(Box((each,)))[1:-1] for each in ranges).join("[]")


@functools.lru_cache(maxsize=16)
def shared(layout: Layout) -> tuple[Shared, ...]:
    """What is held more than once, in an order that every rank finds.

    Holders whose bits are not comparable, as they store another dtype or transform, are not compared.

    >>> from shardweave.layout import BufferRule, Mesh, Part, Tensor
    >>> w, two = Tensor("w", (3,), "float32"), Mesh((("dp", 2),))
    >>> shared(Layout("", two, (BufferRule("w", (Part(w),), w.dims),)))[0].ranks
    (0, 1)
    """
    found: list[Shared] = []
    for tensor, rules in layout.holders.items():
        kinds: dict[object, dict[tuple[Ranges, ...], list[tuple[int, int]]]] = {}
        for number, part in rules:
            rule = layout.rules[number]
            kind = kinds.setdefault((rule.dtype, rule.transform), {})
            for ranks in _alike(layout.entries(rule)):
                at = [layout.mesh.offset + int(rank) for rank in ranks]
                buffer = rule.at(layout.mesh, at[0])
                assert buffer is not None
                elements = tuple(_indices(buffer, d, part.label) for d in range(len(buffer.dims)))
                if all(elements):
                    kind.setdefault(elements, []).extend((rank, number) for rank in at)
        for held in kinds.values():
            found += [Shared(tensor, e, tuple(sorted(of))) for e, of in held.items() if len(of) > 1]
            # Without a declared replica no two buffers have an element in common: the layout is proved.
            if any(part.replica for _, part in rules):
                for (e, of), (f, others) in itertools.combinations(held.items(), 2):
                    common = tuple(_common(a, b) for a, b in zip(e, f, strict=True))
                    if all(common):
                        found.append(Shared(tensor, common, (min(of), min(others))))
    return tuple(found)


def _alike(entries: Ints) -> Iterator[list[int]]:
    """The ranks of a rule by what they hold."""
    groups: dict[bytes, list[int]] = {}
    for rank, entry in enumerate(entries):
        if not (len(entry) and entry[0] < 0):
            groups.setdefault(entry.tobytes(), []).append(rank)
    yield from groups.values()


def _indices(buffer: Buffer, dim: int, label: str) -> Ranges:
    runs = [r for r in buffer.dims[dim].runs if r.label is not PAD and r.label in ("", label)]
    return tuple(range(r.start, r.last + 1, r.step) for r in sorted(runs, key=lambda r: r.start))


def _common(some: Ranges, others: Ranges) -> Ranges:
    met = (intersect_range(a, b) for a, b in itertools.product(some, others))
    return tuple(each for each in met if len(each))


# --- what ranks say of them ---------------------------------------------------------------------

Taken = list[tuple[Shared, Fingerprint]]
"""What a rank has of all that it shares, in the order of ``shared``."""


def take(layouts: Iterable[Layout], rank: int, arrays: Arrays) -> Taken:
    """The fingerprints of what a rank shares.

    Args:
        layouts: The publishers' layouts.
        rank: One of them.
        arrays: What it has.

    Raises:
        ReplicaError: It holds elements twice, and they differ.
    """
    taken: Taken = []
    for layout in layouts:
        for one in _of(layout, rank):
            numbers = [number for holder, number in one.holders if holder == rank]
            buffers = [layout.rules[number].at(layout.mesh, rank) for number in numbers]
            prints = [_fingerprint(buffer, one, arrays) for buffer in buffers if buffer is not None]
            for buffer, other in zip(buffers, prints, strict=True):
                if other != prints[0]:
                    first, name = (each.name for each in (buffers[0], buffer) if each is not None)
                    _refuse(one, f"rank {rank}, {first!r} and {name!r}", prints[0], other)
            taken.append((one, prints[0]))
    return taken


def _of(layout: Layout, rank: int) -> list[Shared]:
    return [one for one in shared(layout) if rank in one.ranks]


def digests(taken: Taken) -> dict[str, str]:
    """What a rank tells everybody: one digest for all that it shares with the same ranks.

    Its key is the first of these ranks, and a digest of them: there may be a thousand.
    """
    together: dict[tuple[int, ...], bytearray] = {}
    for one, found in taken:
        if len(one.ranks) > 1:
            together.setdefault(one.ranks, bytearray()).extend(bytes(found))
    return {
        f"{ranks[0]}/{_digest(repr(ranks).encode())}": _digest(prints) for ranks, prints in together.items()
    }


def _digest(data: bytes | bytearray) -> str:
    return blake2b(data, digest_size=12).hexdigest()


def differing(said: Mapping[int, Mapping[str, str]]) -> tuple[int, int] | None:
    """The first two ranks whose ``digests`` are not those of replicas, if there are any."""
    for rank, mine in sorted(said.items()):
        for key, digest in mine.items():
            first = int(key.partition("/")[0])
            if said[first].get(key) != digest:
                return first, rank
    return None


def encode(taken: Taken) -> bytes:
    """What a rank says to whoever looks for the difference."""
    return verify.encode_pieces(found for _, found in taken)


def refuse(layouts: Sequence[Layout], first: tuple[int, bytes], other: tuple[int, bytes]) -> NoReturn:
    """Say what two ranks, given with what they encoded, differ in.

    Raises:
        ReplicaError: Always.
    """
    (a, here), (b, there) = first, other
    where = f"rank {a} and rank {b}"
    mine, theirs = _said(layouts, a, here), _said(layouts, b, there)
    for one, found in mine.items():
        if theirs.get(one, found) != found:
            _refuse(one, where, found, theirs[one])
    raise ReplicaError("replicas hold the same bytes", where=where, equation="digests differ", hint=_HINT)


def _said(layouts: Sequence[Layout], rank: int, data: bytes) -> dict[Shared, Fingerprint]:
    ones = (one for layout in layouts for one in _of(layout, rank))
    return dict(zip(ones, verify.decode_pieces(data), strict=False))


_HINT = "the copies drifted apart, or one is of another step; find out which before anything is served"


def _refuse(one: Shared, where: str, a: Fingerprint, b: Fingerprint) -> NoReturn:
    raise ReplicaError(
        "replicas hold the same bytes",
        where=f"{where}, {one}",
        equation=f"fingerprint({a}) != fingerprint({b})",
        hint=_HINT,
    )


def _fingerprint(buffer: Buffer, one: Shared, arrays: Arrays) -> Fingerprint:
    total = NOTHING
    separate = buffer.separate
    order = np.argsort((*separate, *buffer.stacked)).tolist()
    for piece in buffer.pieces():
        if piece.tensor != one.tensor:
            continue
        dims = [
            [(common, _places(b, a, common)) for r in ranges if len(common := intersect_range(b, r))]
            for b, a, ranges in zip(piece.box.dims, piece.at.dims, one.elements, strict=True)
        ]
        for block in itertools.product(*dims):
            for positions in itertools.product(*(block[d][1] for d in separate)):
                array = arrays[buffer.member(positions)]
                view = array[tuple(_slice(block[d][1]) for d in buffer.stacked)]
                view = view.reshape(*(1 for _ in separate), *view.shape).permute(order)
                box = [indices for indices, _ in block]
                for d, position in zip(separate, positions, strict=True):
                    at = block[d][1].index(position)
                    box[d] = box[d][at : at + 1]
                total = total + fingerprint_of(view, Box(tuple(box)))
    return total


def _places(box: range, at: range, common: range) -> range:
    """Where indices of a stretch lie."""
    first, last = at[box.index(common[0])], at[box.index(common[-1])]
    return range(first, last + 1, (last - first) // (len(common) - 1) if len(common) > 1 else 1)


def _slice(places: range) -> slice:
    return slice(places.start, places.stop, places.step)
