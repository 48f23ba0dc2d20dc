"""Fingerprints of content that add up over boxes.

The fingerprint of a box of a tensor is a sum over its bytes: each byte times a weight that depends on where
it is in the whole tensor. Boxes that tile a tensor therefore add up to the whole, in whatever layout they
lie, and a part of a read is checked against the parts that somebody published. No two places have the same
weight, so that a moved word, a swapped row or a swapped pair is seen, which a sum, or a sum weighted by
position in a block, does not do.

**Definition.** Bytes are those of the elements in little-endian order, as signed integers. A row, which is
along the last dim, is cut into segments of ``SEGMENT`` bytes. The weight of a byte is the product of small
keyed numbers: one for its place in the segment, one for the segment, and one for each dim but the last.
There are ``LANES`` such weights. Sums are taken modulo the prime ``MODULUS``.

**Bound.** A lane is a polynomial of degree one in each of its independent numbers. A place in the segment
takes one of 64 numbers, a segment and the index of each other dim one of 2**16. Two different contents agree
in a lane with probability at most ``1/64 + dims/2**16``, and in all lanes below 2**-95. One changed element
is always seen: in any eight bytes in a row the places' numbers, modulo 2 and in eight lanes, are the unit
matrix, so that no change of them is lost in all of these. This guards against mistakes and damage; the
numbers come from a mixer that is not made to withstand an attacker who knows the key.

**Cost.** Almost all of it is one product of two matrices of small integers, the bytes and the numbers of
their places, which processors have instructions for; what is left is a few operations a segment. Where torch
is loaded its integer product is used, which is exact; otherwise single-precision floats, whose every partial
sum is an integer of at most 24 bits. The bits are the same.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from shardweave.errors import DtypeError, FormatError, OutsideError
from shardweave.layout.box import Box
from shardweave.layout.buffer import Buffer
from shardweave.layout.table import Ints
from shardweave.layout.tensor import Tensor

MODULUS = (1 << 61) - 1
LANES = 16
SEGMENT = 4096
"""Bytes of a row that have numbers of their own; a longer row is several segments."""
SEGMENT_DIM, BYTE_DIM = 1 << 32, (1 << 32) + 1
"""Where the numbers of segments and of places in them are among those of dims."""

_EXACT = 2048
"""Products of a byte (2**7) and a number of a place (2**6) whose sum is exact in float32 (2**24)."""
_BLOCK_BYTES = 1 << 20
"""Bytes that are multiplied at once: a part of the second-level cache."""
_CACHE_LINE = 64
"""Bytes that are read by reading any of them."""
_MOST_ROWS = 1 << 12
"""Rows whose sums are weighted at once."""
_TILE = 1 << 9
"""Columns that are gathered at once where they do not lie side by side, so that a cache line is read once."""
_NUMBERS = 1 << 12
"""Indices of a dim whose numbers are kept together."""
LOW = 31
"""The bits of a residue of 61 that are multiplied at once."""

_Words = NDArray[Any]
Sums = NDArray[np.int32]


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
        if len(data) != 8 * LANES or max(lanes) >= MODULUS:
            raise FormatError(
                "a fingerprint is a residue for each lane",
                where=f"{len(data)} bytes",
                equation=f"bytes({len(data)}) != 8 * lanes({LANES}), or a lane is not below {MODULUS}",
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
        array: The elements, a numpy array or a torch tensor on the CPU, with words of 1, 2, 4 or 8 bytes.
            Its dims are in the tensor's order: where they are stored in another, pass a transposed view.
        box: Where they are in the tensor; at its beginning by default.
        key: Which family of weights. Fingerprints of different keys say nothing about each other.

    Raises:
        OutsideError: The array does not have the shape of the box.
        DtypeError: Words of another size.

    >>> whole = np.arange(30, dtype=np.uint16).reshape(5, 6)
    >>> left, right = Box.of((0, 0), (5, 4)), Box.of((0, 4), (5, 2))
    >>> fingerprint(whole) == fingerprint(whole[:, :4], left) + fingerprint(whole[:, 4:], right)
    True
    >>> fingerprint(whole) == fingerprint(whole[[1, 0, 2, 3, 4]])
    False
    """
    words = words_of(array)
    *outer, columns = place_of(words.shape, box).dims or (range(1),)
    words = words.reshape(1, *words.shape) if words.ndim else words.reshape(1, 1)
    lanes = lanes_of(words, [np.arange(r.start, r.stop, r.step)[None] for r in outer], columns, key=key)
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
        DtypeError: Words of another size.
    """
    words = words_of(array)
    said = (len(words), *(each.shape[1] for each in outer), len(columns))
    if words.shape != said or any(len(each) not in (1, len(words)) for each in outer):
        raise OutsideError(
            "stacked parts have indices in each dim",
            where=f"{len(words)} parts",
            equation=f"array{words.shape} != indices{said}",
            hint="stack the parts along a new first dim, and give the indices of one or of all",
        )
    total = np.zeros((len(words), LANES), dtype=np.int64)
    if words.size:
        size = SEGMENT // words.itemsize
        most = size if words.strides[-1] == words.itemsize else _TILE
        for at, segments, inside in segments_of(columns, size, most):
            part = words[..., at].reshape(*words.shape[:-1], len(segments), len(inside))
            dims = [*enumerate(outer), (SEGMENT_DIM, np.array(segments)[None])]
            total = (total + _weighted(part, dims, places_of(inside, words.itemsize, key), key)) % MODULUS
    return total


def total_of(lanes: Ints) -> Fingerprint:
    """The sum of many fingerprints, ``(parts, LANES)``."""
    low, high = (lanes & (1 << LOW) - 1).sum(axis=0).tolist(), (lanes >> LOW).sum(axis=0).tolist()
    return Fingerprint(tuple((a + (b << LOW)) % MODULUS for a, b in zip(low, high, strict=True)))


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
        words = words_of(arrays[name])
        if words.shape != buffer.shape:
            raise OutsideError(
                "a stored array has the shape that its buffer says",
                where=f"array {name!r}",
                equation=f"array{words.shape} != buffer{buffer.shape}",
                hint="describe the state with the layout that it was made by",
            )
        # A dim of one index for each separate index dim, then all in the tensor's order.
        words = words.reshape(*(1 for _ in positions), *words.shape).transpose(back)
        place = dict(zip(buffer.separate, positions, strict=True))
        for piece in pieces:
            if all(at in piece.at.dims[d] for d, at in place.items()):
                dims, at = list(piece.box.dims), [slice(r.start, r.stop, r.step) for r in piece.at.dims]
                for d, position in place.items():
                    i = piece.at.dims[d].index(position)
                    dims[d], at[d] = dims[d][i : i + 1], slice(0, 1)
                found[piece.tensor] += fingerprint(words[tuple(at)], Box(tuple(dims)), key=key)
    return found


def words_of(array: Any) -> _Words:
    """An array's words as unsigned integers: a view of a numpy array or of a torch tensor on the CPU.

    Raises:
        DtypeError: Words of another size than 1, 2, 4 or 8 bytes, or not in this machine's order.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        size = array.element_size()
        array = array.detach().view(sizes[size]).numpy() if size in sizes else np.empty(0, f"V{size}")
    found = np.asarray(array)
    size = found.dtype.itemsize
    if size not in (1, 2, 4, 8) or found.dtype.hasobject or not found.dtype.isnative:
        raise DtypeError(
            "the words of a fingerprint have 1, 2, 4 or 8 bytes, in this machine's order",
            where=f"an array of {found.dtype}",
            equation=f"itemsize({size})",
            hint="view the array as unsigned integers of one of these sizes",
        )
    return found.view(f"u{size}")


# --- numbers ------------------------------------------------------------------------------------


def numbers(key: int, dim: int, indices: Ints) -> NDArray[np.float32]:
    """The small keyed numbers of some indices of a dim, from -2**15 to 2**15 without 0.

    Args:
        key: The key.
        dim: The dim.
        indices: ``(rows, n)``, ascending in each row.

    Returns:
        ``(rows, n, LANES)``.
    """
    if not indices.size:
        return np.empty((*indices.shape, LANES), dtype=np.float32)
    first, last = int(indices.min()), int(indices.max())
    if last - first > 2 * indices.size + _NUMBERS:
        return _from_bits(_bits(key, dim, indices))
    blocks = range(first // _NUMBERS, last // _NUMBERS + 1)
    kept = [_kept(key, dim, block) for block in blocks]
    table = kept[0] if len(kept) == 1 else np.concatenate(kept)
    at = indices - blocks[0] * _NUMBERS
    consecutive = len(at) == 1 and at[0, -1] - at[0, 0] == at.size - 1
    return table[None, at[0, 0] : at[0, -1] + 1] if consecutive else table[at]


@functools.lru_cache(maxsize=128)
def _kept(key: int, dim: int, block: int) -> NDArray[np.float32]:
    return _from_bits(_bits(key, dim, np.arange(block * _NUMBERS, (block + 1) * _NUMBERS)))


def _from_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    found = bits.astype(np.float32)
    found -= 1 << 15
    found += found >= 0
    return found


@functools.lru_cache(maxsize=8)
def places(key: int) -> NDArray[np.int8]:
    """The numbers of the bytes of a segment, ``(SEGMENT, LANES)``.

    They are from -64 to 63: two products with a byte that was made unsigned fit 16 bits, which processors
    without newer instructions add up in. Byte ``i`` is odd in the lanes that are ``i`` modulo 8, else even.
    """
    at = np.arange(SEGMENT)
    even = 2 * ((_bits(key, BYTE_DIM, at) & 63).astype(np.int8) - np.int8(32))
    found: NDArray[np.int8] = even + (at[:, None] % 8 == np.arange(LANES) % 8)
    return found.astype(np.int8)


def _bits(key: int, dim: int, indices: Ints) -> NDArray[np.uint16]:
    """Sixteen bits for each index and lane."""
    with np.errstate(over="ignore"):
        seed = _mix(_mix(np.array([key & (1 << 64) - 1], dtype=np.uint64)) + np.uint64(dim))
        # A mixed word is the bits of four lanes.
        steps = np.arange(LANES // 4, dtype=np.uint64)
        words = indices.astype(np.uint64)[..., None] * np.uint64(LANES // 4) + steps
        return _mix(words + seed).astype("<u8").view("<u2")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64, with its increment: a bijection that spreads every bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


# --- sums ---------------------------------------------------------------------------------------


def segments_of(columns: range, size: int, most: int) -> Iterator[tuple[slice, range, range]]:
    """A range cut where segments of ``size`` begin, and after ``most`` indices.

    Each piece is places in the range, segments, and indices in each of them.
    """
    at = 0
    while at < len(columns):
        segment, first = divmod(columns[at], size)
        count = min(len(columns) - at, (size - 1 - first) // columns.step + 1, most)
        turns = (len(columns) - at) // size if columns.step == 1 and count == size else 1
        yield (
            slice(at, at + turns * count),
            range(segment, segment + turns),
            range(first, first + (count - 1) * columns.step + 1, columns.step),
        )
        at += turns * count


def places_of(inside: range, itemsize: int, key: int) -> NDArray[np.int8]:
    """The numbers of the bytes of some elements of a segment, ``(len(inside) * itemsize, LANES)``."""
    table = places(key).reshape(-1, itemsize, LANES)
    return table[inside.start : inside.stop : inside.step].reshape(-1, LANES)


def _weighted(words: _Words, dims: Sequence[tuple[int, Ints]], table: NDArray[np.int8], key: int) -> Ints:
    """What parts of one segment come to, ``(parts, LANES)``: each row's sum times the numbers of its dims.

    Args:
        words: ``(parts, *lengths, columns)``.
        dims: For each length which dim it is, and its indices, ``(parts or 1, length)``.
        table: The numbers of the bytes of a row.
        key: The key.
    """
    lengths = words.shape[:-1]
    if math.prod(lengths) > _MOST_ROWS:  # in halves of the longest dim
        d = max(range(len(lengths)), key=lengths.__getitem__)
        halves = []
        for at in (slice(lengths[d] // 2), slice(lengths[d] // 2, None)):
            mine = [(dim, i[at] if d == 0 and len(i) > 1 else i) for dim, i in dims]
            if d:
                mine[d - 1] = (dims[d - 1][0], dims[d - 1][1][:, at])
            halves.append(_weighted(words[(slice(None),) * d + (at,)], mine, table, key))
        return (halves[0] + halves[1]) % MODULUS if d else np.concatenate(halves)
    # The longest dim first: what is left for the others is the shorter.
    order = sorted(range(len(dims)), key=lambda d: -lengths[1 + d])
    sums = np.moveaxis(_products(words, table), [1 + d for d in order], range(1, len(lengths)))
    first, *others = (numbers(key, *dims[d]) for d in order)
    # At most _MOST_ROWS sums of 25 bits, times 16: exact in float64.
    found: Ints = _fold(sums.astype(np.float64), first.astype(np.float64)).astype(np.int64)
    for each in others:
        # Summands of up to 62 bits are multiplied by halves. The upper half's sum times 2**31 is a rotation
        # of its 61 bits, for 2**61 is 1.
        weights = each.astype(np.int64)
        low = _fold(found & (1 << LOW) - 1, weights) % MODULUS
        high = _fold(found >> LOW, weights) % MODULUS
        found = (low + ((high & (1 << 61 - LOW) - 1) << LOW | high >> 61 - LOW)) % MODULUS
    return found


def _fold(sums: NDArray[Any], weights: NDArray[Any]) -> NDArray[Any]:
    """The weighted sum over the second dim."""
    parts, length, *rest, _ = sums.shape
    folded = np.einsum("plrk,plk->prk", sums.reshape(parts, length, -1, LANES), weights)
    return np.asarray(folded).reshape(parts, *rest, LANES)


# --- the product --------------------------------------------------------------------------------


def _products(words: _Words, table: NDArray[np.int8]) -> Sums:
    """The bytes of rows times their numbers, exactly: ``(*lengths, LANES)`` of ``(*lengths, columns)``."""
    *lengths, columns = words.shape
    steps = [(n, stride) for n, stride in zip(lengths, words.strides, strict=False) if n > 1]
    if any(stride != n * inner for (_, stride), (n, inner) in itertools.pairwise(steps)):
        # Rows that are not one matrix as they lie are several.
        shortest = min((d for d, n in enumerate(lengths) if n > 1), key=lengths.__getitem__)
        parts = np.moveaxis(words, shortest, 0)
        return np.stack([_products(part, table) for part in parts], axis=shortest)
    stride = steps[-1][1] if steps else columns * words.itemsize
    rows = as_strided(words, (math.prod(lengths), columns), (stride, words.strides[-1]))
    sums = np.empty((len(rows), LANES), dtype=np.int32)
    side_by_side = words.strides[-1] == words.itemsize and stride >= 0
    multiply = _kernel()
    step = max(_BLOCK_BYTES // len(table), 1) if not side_by_side else len(rows)
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        block = block if side_by_side else np.ascontiguousarray(block)
        multiply(block.view(np.int8), table, sums[start : start + step])
    return sums.reshape(*lengths, LANES)


_Kernel = Callable[[NDArray[np.int8], NDArray[np.int8], Sums], None]


def _kernel() -> _Kernel:
    """What multiplies: torch where it is loaded and exact, numpy otherwise."""
    torch = sys.modules.get("torch")
    return _multiply_in_torch if torch is not None and _is_exact(torch) else _multiply


def _multiply(rows: NDArray[np.int8], table: NDArray[np.int8], out: Sums) -> None:
    """The product in single precision; no sum is of more than ``_EXACT`` bytes."""
    out[...] = 0
    floats = table.astype(np.float32)
    step = max(_BLOCK_BYTES // len(table), 1)
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        for at in range(0, len(table), _EXACT):
            found = block[:, at : at + _EXACT].astype(np.float32) @ floats[at : at + _EXACT]
            out[start : start + step] += found.astype(np.int32)


def _multiply_in_torch(rows: NDArray[np.int8], table: NDArray[np.int8], out: Sums) -> None:
    torch = sys.modules["torch"]
    if not rows.flags.writeable:  # which torch does not look at without a warning
        rows = rows.copy()
    step = max(_BLOCK_BYTES // len(table), 1)
    blocks = torch.from_numpy(rows).split(step), torch.from_numpy(out).split(step)
    numbers = torch.from_numpy(table)
    for block, sums in zip(*blocks, strict=True):
        if len(table) < SEGMENT:
            # The product reads many rows at once, which no processor foresees where they are short. Bytes
            # that were just read in order are in the cache.
            np.add.reduce(block.numpy()[:, ::_CACHE_LINE], axis=None, dtype=np.int8)
        torch._int_mm(block, numbers, out=sums)


@functools.cache
def _is_exact(torch: Any) -> bool:
    """Whether torch has the product on this processor, and it is right for the largest sums there are."""
    rows = np.array([[-128], [127], [-1]], dtype=np.int8).repeat(SEGMENT, axis=1)
    table = np.full((SEGMENT, LANES), -64, dtype=np.int8)
    table[:, 1::2] = 63
    expected, got = np.empty((2, len(rows), LANES), dtype=np.int32)
    _multiply(rows, table, expected)
    try:
        _multiply_in_torch(rows, table, got)
    except (AttributeError, RuntimeError):
        return False
    return np.array_equal(expected, got)
