"""Fingerprints of content that add up over boxes.

The fingerprint of a box of a tensor is a sum over its words: each word times a weight that depends on where
it is in the whole tensor. Boxes that tile a tensor therefore add up to the whole, in whatever layout they
lie, and a part of a read is checked against the parts that somebody published. No two places have the same
weight, so that a moved word, a swapped row or a swapped pair is seen, which a sum, or a sum weighted by
position in a block, does not do.

**Definition.** A row, which is along the last dim, is the bytes of its elements in little-endian order, read
as signed words of 32 bits. It is cut into segments of ``SEGMENT`` words. The weight of a word is the product
of keyed numbers: one for its place in the segment, one for the segment, and one for each dim but the last.
There are ``LANES`` such weights. Sums are taken modulo the prime ``MODULUS``. An element that fills a part of
a word is that part, and the rest is zero: elements of one word add up to it, whichever boxes they are in.

**Bound.** A lane is a polynomial of degree one in each of its independent numbers. A place in the segment
takes one of 2**21 numbers, a segment and the index of each other dim one of 2**27. Two different contents
agree in a lane with probability at most ``2**-21 + dims * 2**-27``, and in all lanes below 2**-62 where there
are 16 dims or fewer. One changed element is always seen: the places' numbers of two words in a row, modulo 2
and in their two lanes, are the unit matrix, so that no change of an element, which has two words at most, is
lost in both. This guards against mistakes and damage; the numbers come from a mixer that is not made to
withstand an attacker who knows the key.

**Cost.** Almost all of it is one product of a row's words and the numbers of their places, in ``exact_sums``;
what is left is a few operations a segment.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from shardweave.errors import DtypeError, FormatError, OutsideError
from shardweave.layout.box import Box
from shardweave.layout.buffer import Buffer
from shardweave.layout.exact_sums import (
    LANES,
    MOST_TERMS,
    MOST_WORDS,
    NUMBER_BITS,
    THIRD_BITS,
    WEIGHT_BITS,
    WORD,
    Words,
    prepare,
    row_sums,
    weighted_thirds,
)
from shardweave.layout.table import Ints
from shardweave.layout.tensor import Tensor

MODULUS = (1 << 61) - 1
NUM_BYTES = 8 * LANES
"""Of a fingerprint."""
SEGMENT = MOST_WORDS
"""Words of a row that have numbers of their own; a longer row is several segments."""
SEGMENT_DIM, PLACE_DIM = 1 << 32, (1 << 32) + 1
"""Where the numbers of segments and of places in them are among those of dims."""

_TILE, _STRIP = 1 << 9, 8
"""Rows, and elements of each, that are gathered at once where they lie apart: few pages, whole lines."""
_LEAST_ROWS = 1 << 6
"""Rows that are kept together though each has many segments."""
_NUMBERS = MOST_TERMS
"""Indices of a dim whose numbers are kept together."""

_Elements = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the content of a box comes to: a residue modulo ``MODULUS`` in each lane.

    Laws:
        Fingerprints form a group under ``+`` with ``NOTHING``: those of disjoint boxes add up to that of
        their union, and a difference is that of what is left.
        ``Fingerprint.decode(bytes(f)) == f``.
    """

    lanes: tuple[int, ...]

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(tuple((a + b) % MODULUS for a, b in zip(self.lanes, other.lanes, strict=True)))

    def __sub__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(tuple((a - b) % MODULUS for a, b in zip(self.lanes, other.lanes, strict=True)))

    def __bytes__(self) -> bytes:
        return b"".join(lane.to_bytes(8, "little") for lane in self.lanes)

    @classmethod
    def decode(cls, data: bytes) -> Fingerprint:
        """The fingerprint that ``bytes()`` wrote.

        Raises:
            FormatError: The bytes are none.
        """
        lanes = tuple(int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8))
        if len(data) != NUM_BYTES or max(lanes) >= MODULUS:
            raise FormatError(
                "a fingerprint is a residue for each lane",
                where=f"{len(data)} bytes",
                equation=f"bytes({len(data)}) != {NUM_BYTES}, or a lane is not below {MODULUS}",
                hint="ask its publisher for the fingerprint again",
            )
        return cls(lanes)

    def __str__(self) -> str:
        return bytes(self).hex()[:16]


NOTHING = Fingerprint((0,) * LANES)
"""The fingerprint of no element, and of zeros."""


def fingerprint(array: Any, box: Box | None = None, *, key: int = 0) -> Fingerprint:
    """The fingerprint of the elements of a box.

    Laws:
        The fingerprints of boxes that tile a tensor add up to that of the tensor.
        It depends on the bits of the elements and on their indices, not on strides, memory or dtype.

    Args:
        array: The elements, a numpy array or a torch tensor on the CPU, of 1, 2, 4 or 8 bytes each.
            Its dims are in the tensor's order: where they are stored in another, pass a transposed view.
        box: Where they are in the tensor; at its beginning by default.
        key: Which family of weights. Fingerprints of different keys say nothing about each other.

    Raises:
        OutsideError: The array does not have the shape of the box.
        DtypeError: Elements of another size.

    >>> whole = np.arange(30, dtype=np.uint16).reshape(5, 6)
    >>> left, right = Box.of((0, 0), (5, 4)), Box.of((0, 4), (5, 2))
    >>> fingerprint(whole) == fingerprint(whole[:, :4], left) + fingerprint(whole[:, 4:], right)
    True
    >>> fingerprint(whole) == fingerprint(whole[[1, 0, 2, 3, 4]])
    False
    """
    elements = elements_of(array)
    *outer, columns = place_of(elements.shape, box).dims or (range(1),)
    elements = elements.reshape(1, *elements.shape) if elements.ndim else elements.reshape(1, 1)
    lanes = lanes_of(elements, [np.arange(r.start, r.stop, r.step)[None] for r in outer], columns, key=key)
    return Fingerprint(tuple(lanes[0].tolist()))


def lanes_of(array: Any, outer: Sequence[Ints], columns: range, *, key: int = 0) -> Ints:
    """The fingerprints of many parts that are alike, for little more than that of one: ``(parts, LANES)``.

    Law: each row is the lanes of ``fingerprint(part, box, key=key)`` of a part and its box.

    Args:
        array: The elements, stacked: ``(parts, *lengths, len(columns))``, as for ``fingerprint``.
        outer: For each length its indices in the tensor, ascending: ``(parts, length)``, or ``(1, length)``
            where they are those of all parts.
        columns: The indices in the last dim.
        key: As for ``fingerprint``.

    Raises:
        OutsideError: The array does not have the shape that the indices say.
        DtypeError: Elements of another size.
    """
    elements = elements_of(array)
    said = (len(elements), *(each.shape[1] for each in outer), len(columns))
    if elements.shape != said or any(len(each) not in (1, len(elements)) for each in outer):
        raise OutsideError(
            "stacked parts have indices in each dim",
            where=f"{len(elements)} parts",
            equation=f"array{elements.shape} != indices{said}",
            hint="stack the parts along a new first dim, and give the indices of one or of all",
        )
    if not elements.size:
        return np.zeros((len(elements), LANES), dtype=np.int64)
    prepare(elements.nbytes)
    return _weighted(elements, list(enumerate(outer)), columns, key)


def total_of(lanes: Ints) -> Fingerprint:
    """The sum of many fingerprints, ``(parts, LANES)``."""
    low, high = (lanes & (1 << 31) - 1).sum(axis=0).tolist(), (lanes >> 31).sum(axis=0).tolist()
    return Fingerprint(tuple((a + (b << 31)) % MODULUS for a, b in zip(low, high, strict=True)))


def place_of(shape: tuple[int, ...], box: Box | None) -> Box:
    """The box of an array of ``shape``: the one given, or the one at the beginning of its tensor.

    Raises:
        OutsideError: The box given has another shape.
    """
    found = Box.of((0,) * len(shape), shape) if box is None else box
    if found.shape != shape:
        raise OutsideError(
            "an array has the shape of the box that it holds",
            where=f"box {found}",
            equation=f"array{shape} != box{found.shape}",
            hint="pass the part of the array that the box says, its dims in the tensor's order",
        )
    return found


def held(buffer: Buffer, arrays: Mapping[str, Any], *, key: int = 0) -> dict[Tensor, Fingerprint]:
    """The fingerprint of what a buffer holds of each of its tensors; padding is not looked at.

    Law: where a layout holds each element once, those of all ranks add up to that of the whole tensor,
    whose box begins at the first number of each index dim.

    Args:
        buffer: The buffer of a rank.
        arrays: Its stored arrays by name.
        key: As for ``fingerprint``.
    """
    found = {part.tensor: NOTHING for part in buffer.parts}
    back = tuple(int(i) for i in np.argsort((*buffer.separate, *buffer.stacked)))
    pieces = list(buffer.pieces())
    for name, positions in buffer.members():
        elements = elements_of(arrays[name])
        if elements.shape != buffer.shape:
            raise OutsideError(
                "a stored array has the shape that its buffer says",
                where=f"array {name!r}",
                equation=f"array{elements.shape} != buffer{buffer.shape}",
                hint="describe the state with the layout that it was made by",
            )
        # A dim of one index for each separate index dim, then all in the tensor's order.
        elements = elements.reshape(*(1 for _ in positions), *elements.shape).transpose(back)
        place = dict(zip(buffer.separate, positions, strict=True))
        for piece in pieces:
            if all(at in piece.at.dims[d] for d, at in place.items()):
                dims, at = list(piece.box.dims), [slice(r.start, r.stop, r.step) for r in piece.at.dims]
                for d, position in place.items():
                    i = piece.at.dims[d].index(position)
                    dims[d], at[d] = dims[d][i : i + 1], slice(0, 1)
                found[piece.tensor] += fingerprint(elements[tuple(at)], Box(tuple(dims)), key=key)
    return found


def elements_of(array: Any) -> _Elements:
    """An array's elements as unsigned integers: a view of a numpy array or of a torch tensor on the CPU.

    Raises:
        DtypeError: Elements of another size than 1, 2, 4 or 8 bytes, or not little-endian.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        size = array.element_size()
        array = array.detach().view(sizes[size]).numpy() if size in sizes else np.empty(0, f"V{size}")
    found = np.asarray(array)
    size = found.dtype.itemsize
    little = found.dtype.isnative and sys.byteorder == "little"
    if size not in (1, 2, 4, 8) or found.dtype.hasobject or not little:
        raise DtypeError(
            "the elements of a fingerprint have 1, 2, 4 or 8 bytes, in little-endian order",
            where=f"an array of {found.dtype}",
            equation=f"itemsize({size})",
            hint="view the array as unsigned integers of one of these sizes",
        )
    return found.view(f"u{size}")


# --- numbers ------------------------------------------------------------------------------------


def numbers(key: int, dim: int, indices: Ints) -> Ints:
    """The keyed numbers of some indices of a dim, from 1 to 2**27.

    Args:
        key: The key.
        dim: The dim.
        indices: ``(rows, n)``, ascending in each row.

    Returns:
        ``(rows, n, LANES)``.
    """
    if not indices.size:
        return np.empty((*indices.shape, LANES), dtype=np.int64)
    first, last = int(indices.min()), int(indices.max())
    if last - first > 2 * indices.size + _NUMBERS:
        return _drawn(key, dim, indices)
    blocks = range(first // _NUMBERS, last // _NUMBERS + 1)
    kept = [_kept(key, dim, block) for block in blocks]
    table = kept[0] if len(kept) == 1 else np.concatenate(kept)
    at = indices - blocks[0] * _NUMBERS
    consecutive = len(at) == 1 and at[0, -1] - at[0, 0] == at.size - 1
    return table[None, at[0, 0] : at[0, -1] + 1] if consecutive else table[at]


@functools.lru_cache(maxsize=128)
def _kept(key: int, dim: int, block: int) -> Ints:
    return _drawn(key, dim, np.arange(block * _NUMBERS, (block + 1) * _NUMBERS))


def _drawn(key: int, dim: int, indices: Ints) -> Ints:
    return (_bits(key, dim, indices) >> np.uint64(64 - WEIGHT_BITS)).astype(np.int64) + 1


@functools.lru_cache(maxsize=8)
def places(key: int) -> Words:
    """The numbers of the words of a segment, ``(LANES, SEGMENT)``, of ``NUMBER_BITS`` bits with their sign.

    Word ``i`` is odd in the lane that is ``i`` modulo ``LANES``, else even.
    """
    at = np.arange(SEGMENT)
    drawn = (_bits(key, PLACE_DIM, at) >> np.uint64(65 - NUMBER_BITS)).astype(np.int64)
    even = 2 * drawn - (1 << NUMBER_BITS - 1)
    found = even + (at[:, None] % LANES == np.arange(LANES))
    return np.ascontiguousarray(found.T, dtype=np.int32)


def _bits(key: int, dim: int, indices: Ints) -> NDArray[np.uint64]:
    """Sixty-four bits for each index and lane."""
    with np.errstate(over="ignore"):
        seed = _mix(_mix(np.array([key & (1 << 64) - 1], dtype=np.uint64)) + np.uint64(dim))
        lanes = np.arange(LANES, dtype=np.uint64)
        return _mix(indices.astype(np.uint64)[..., None] * np.uint64(LANES) + lanes + seed)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64, with its increment: a bijection that spreads every bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


# --- words --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a row, and the words that they are.

    Args:
        at: Which elements.
        segments: Which segments, all of them with the same places.
        places: The places of the words in each of these, at most ``SEGMENT`` different ones.
        within: Where each element is in a word of its own; None where elements fill their words. Words of one
            place have no byte in common, so that they add up to one word.
    """

    at: slice
    segments: Ints
    places: Ints
    within: Ints | None


def pieces(columns: range, itemsize: int, most: int) -> Iterator[Piece]:
    """A row cut where segments begin, and into elements that fill words and those that do not.

    Args:
        columns: The elements' indices.
        itemsize: Bytes of an element.
        most: How many segments a piece may have.
    """
    count, each = len(columns), max(WORD // itemsize, 1)
    head = min(-columns.start % each, count) if columns.step == 1 else count
    tail = (count - head) % each
    yield from _single(columns, range(head), itemsize)
    word, end = ((columns.start + i) * itemsize // WORD for i in (head, count - tail))
    at = head
    while word < end:
        segment, first = divmod(word, SEGMENT)
        width = min(end - word, SEGMENT - first)
        turns = min((end - word) // SEGMENT, most) if width == SEGMENT else 1
        elements = turns * width * WORD // itemsize
        yield Piece(
            slice(at, at + elements),
            np.arange(segment, segment + turns),
            np.arange(first, first + width),
            None,
        )
        at, word = at + elements, word + turns * width
    yield from _single(columns, range(count - tail, count), itemsize)


def _single(columns: range, which: range, itemsize: int) -> Iterator[Piece]:
    """Elements that do not fill the words that they are in, each in a word of its own; or in two."""
    at, size = which.start, SEGMENT * WORD // itemsize
    while at < which.stop:
        segment, first = divmod(columns[at], size)
        count = min(which.stop - at, (size - 1 - first) // columns.step + 1)
        inside = np.arange(count) * columns.step + first
        words = inside[:, None] * itemsize // WORD + np.arange(max(itemsize // WORD, 1))
        within = inside % (WORD // itemsize) if itemsize < WORD else None
        yield Piece(slice(at, at + count), np.array([segment]), words.reshape(-1), within)
        at += count


def _in_words(elements: _Elements, within: Ints | None) -> Words:
    """Elements ``(..., n)`` as the words of their piece, ``(..., words)``."""
    size = elements.itemsize
    if within is not None:
        return elements.astype(np.int32, order="C") << (8 * size * within).astype(np.int32)
    if elements.strides[-1] == size:
        return elements.view(np.int32)
    together = np.empty(elements.shape, dtype=elements.dtype)
    for at in range(0, elements.shape[-1], _STRIP):
        together[..., at : at + _STRIP] = elements[..., at : at + _STRIP]
    return together.view(np.int32)


# --- sums ---------------------------------------------------------------------------------------


def _weighted(elements: _Elements, dims: Sequence[tuple[int, Ints]], columns: range, key: int) -> Ints:
    """What parts come to, ``(parts, LANES)``.

    Args:
        elements: ``(parts, *lengths, columns)``.
        dims: For each length which dim it is, and its indices, ``(parts or 1, length)``.
        columns: The indices in the last dim.
        key: The key.
    """
    lengths = elements.shape[:-1]
    segments = len(columns) * elements.itemsize // (SEGMENT * WORD) + 1
    side_by_side = elements.strides[-1] == elements.itemsize
    side_by_side &= columns.step == 1 or elements.itemsize >= WORD
    most = max(MOST_TERMS // segments, _LEAST_ROWS) if side_by_side else _TILE
    if math.prod(lengths) > most:  # in halves of the longest dim
        d = max(range(len(lengths)), key=lengths.__getitem__)
        halves = []
        for at in (slice(lengths[d] // 2), slice(lengths[d] // 2, None)):
            mine = [(dim, i[at] if d == 0 and len(i) > 1 else i) for dim, i in dims]
            if d:
                mine[d - 1] = (dims[d - 1][0], dims[d - 1][1][:, at])
            halves.append(_weighted(elements[(slice(None),) * d + (at,)], mine, columns, key))
        return (halves[0] + halves[1]) % MODULUS if d else np.concatenate(halves)
    total = np.zeros((len(elements), LANES), dtype=np.int64)
    at_once = MOST_TERMS // math.prod(lengths) if side_by_side else 1
    for piece in pieces(columns, elements.itemsize, at_once):
        words = _in_words(elements[..., piece.at], piece.within)
        words = words.reshape(*lengths, len(piece.segments), len(piece.places))
        sums = _row_sums(words, places(key)[:, piece.places])
        mine = [*dims, (SEGMENT_DIM, piece.segments[None])]
        # The longest dim first: what is left for the others is the shorter.
        order = sorted(range(len(mine)), key=lambda d: -sums.shape[1 + d])
        sums = np.moveaxis(sums, [1 + d for d in order], range(1, len(mine) + 1))
        for d in order:
            sums = _fold(sums, numbers(key, *mine[d]))
        total = (total + sums) % MODULUS
    return total


def _row_sums(words: Words, table: Words) -> Ints:
    """As ``row_sums``, for rows in any number of dims: ``(*lengths, LANES)`` of ``(*lengths, words)``."""
    *lengths, width = words.shape
    steps = [(n, stride) for n, stride in zip(lengths, words.strides, strict=False) if n > 1]
    if any(stride != n * inner for (_, stride), (n, inner) in itertools.pairwise(steps)):
        # Rows that are not one matrix as they lie are several.
        shortest = min((d for d, n in enumerate(lengths) if n > 1), key=lengths.__getitem__)
        parts = np.moveaxis(words, shortest, 0)
        return np.stack([_row_sums(part, table) for part in parts], axis=shortest)
    stride = steps[-1][1] if steps else width * WORD
    rows = as_strided(words, (math.prod(lengths), width), (stride, words.strides[-1]))
    return row_sums(rows, table).reshape(*lengths, LANES)


def _fold(sums: Ints, weights: Ints) -> Ints:
    """The weighted sum over the second dim, modulo ``MODULUS``: ``(parts, *rest, LANES)``.

    Args:
        sums: ``(parts, length, *rest, LANES)``, from ``-2**62`` to ``2**62``.
        weights: ``(parts or 1, length, LANES)``.
    """
    parts, length, *rest, _ = sums.shape
    high, middle, low = weighted_thirds(sums.reshape(parts, length, -1, LANES), weights)
    found: Ints = (turned((turned(high % MODULUS) + middle) % MODULUS) + low) % MODULUS
    return found.reshape(parts, *rest, LANES)


def turned(residues: Any) -> Any:
    """Residues times ``2**THIRD_BITS``, which turns their 61 bits, for ``2**61`` is 1."""
    low = (1 << 61 - THIRD_BITS) - 1
    return (residues & low) << THIRD_BITS | residues >> 61 - THIRD_BITS
