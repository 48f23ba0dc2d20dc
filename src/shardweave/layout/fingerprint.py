"""Fingerprints of content that add up over boxes.

The fingerprint of a box of a tensor is a sum over its elements: the element's word times a weight that
depends on its index in the whole tensor. Boxes that tile a tensor therefore add up to the whole, in
whatever layout they lie, and a part of a read is checked against the parts that somebody published.
No two places have the same weight, so that a moved word, a swapped row or a swapped pair is seen,
which a sum, or a sum weighted by position in a block, does not do.

**Definition.** Rows are cut into cells of four bytes, read as little-endian signed integers; a word of
one or two bytes fills its part of a cell, one of eight is two cells. Cells fall into segments of
``SEGMENT``. The weight of a cell is the product of one small keyed number for each dim but the last,
one for the segment, and one for the cell in its segment; there are ``LANES`` such weights. Sums are
taken modulo the prime ``MODULUS``.

**Bound.** A lane is a polynomial of degree one in each of its ``dims + 1`` independent numbers, which
take 2**16 values. Two different contents agree in it with probability at most ``(dims + 1) / 2**16``,
and in all lanes with at most ``((dims + 1) / 2**16)**LANES``: below 2**-109 for a family of matrices
over layers and experts. One changed element is always seen. This guards against mistakes and damage;
the numbers come from a mixer that is not made to withstand an attacker who knows the key.

**Cost.** Cells become float64 and meet their weights in a matrix product whose every partial sum is an
integer of at most 53 bits, so it is exact in any order. What is left is a few operations a row.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import DtypeError, FormatError, OutsideError
from shardweave.layout.box import Box
from shardweave.layout.buffer import Buffer
from shardweave.layout.table import Ints
from shardweave.layout.tensor import Tensor

MODULUS = (1 << 61) - 1
LANES = 8
SEGMENT = 4096
"""Cells of a row that have weights of their own; a longer row is several segments."""
EXACT = 128
"""Products of a cell (2**31) and a weight (2**15) whose sum is exact in float64 (2**53)."""

CELL_BYTES = 4
_BLOCK = 1 << 16
"""Cells that are worked on at once: as float64, a part of the second-level cache."""
_TILE = 1 << 9
"""Columns that are gathered at once where they do not lie side by side, so that a cache line is read once."""
_MOST_ROWS = 1 << 12
_LOW = 31
SEGMENT_DIM, CELL_DIM = 1 << 32, (1 << 32) + 1
"""Where the numbers of segments and of cells are among those of dims."""

_Words = NDArray[Any]


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
    box = place_of(words.shape, box)
    totals = [0] * LANES
    if box.numel:
        if not words.ndim:
            words, box = words.reshape(1), Box.of((0,), (1,))
        for weights, lanes in _sums(words, box, key):
            for lane, (weight, value) in enumerate(zip(weights, lanes, strict=True)):
                totals[lane] += weight * value
    return Fingerprint(tuple(total % MODULUS for total in totals))


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


# --- weights ------------------------------------------------------------------------------------


def weights(key: int, dim: int, indices: Ints) -> Ints:
    """The small keyed numbers of some indices of a dim, one a lane: from -2**15 to 2**15 without 0."""
    with np.errstate(over="ignore"):
        seed = _mix(np.array([key & (1 << 64) - 1], dtype=np.uint64))
        seed = _mix(seed + np.uint64(dim))
        # A mixed word is the numbers of four lanes.
        words = indices.astype(np.uint64)[:, None] * np.uint64(LANES // 4) + np.arange(
            LANES // 4, dtype=np.uint64
        )
        mixed = _mix(words + seed)
    numbers = mixed.astype("<u8").view("<u2").astype(np.int64).reshape(len(indices), LANES)
    numbers -= 1 << 15
    numbers[numbers >= 0] += 1
    return numbers


def _mix(x: NDArray[Any]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64, with its increment: a bijection that spreads every bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


@functools.lru_cache(maxsize=8)
def _cell_weights(key: int) -> NDArray[np.float64]:
    """The numbers of the cells of a segment."""
    return weights(key, CELL_DIM, np.arange(SEGMENT)).astype(np.float64)


# --- sums ---------------------------------------------------------------------------------------


def _sums(words: _Words, box: Box, key: int) -> Iterator[tuple[list[int], list[int]]]:
    """Weights and values, lane by lane, whose products add up to the fingerprint of a box."""
    *outer, columns = box.dims
    size = CELL_BYTES * SEGMENT // words.itemsize
    most = size if words.strides[-1] == words.itemsize else _TILE
    for at, segments, inside in segments_of(columns, size, most):
        part = words[..., at].reshape(*words.shape[:-1], len(segments), len(inside))
        dims = [*enumerate(outer), (SEGMENT_DIM, segments)]
        # The longest dim becomes rows; the others are walked one index at a time.
        rows = max(range(len(dims)), key=lambda d: (len(dims[d][1]), d))
        walked = [d for d in range(len(dims)) if d != rows]
        numbers = [weights(key, dims[d][0], np.array(dims[d][1])).tolist() for d in walked]
        part = part.transpose(*walked, rows, len(dims))
        for index in itertools.product(*(range(len(dims[d][1])) for d in walked)):
            chosen = [column[i] for column, i in zip(numbers, index, strict=True)]
            weight = [math.prod(lane) for lane in zip(*chosen, strict=True)] or [1] * LANES
            yield weight, _rows(part[index], *dims[rows], inside, key)


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


def cells_of(inside: range, itemsize: int) -> tuple[int, int]:
    """The first cell that some indices of a segment lie in, and one past the last."""
    return inside.start * itemsize // CELL_BYTES, -(-(inside[-1] + 1) * itemsize // CELL_BYTES)


def _rows(words: _Words, dim: int, numbers: range, inside: range, key: int) -> list[int]:
    """The sum of rows of one segment, weighted by their numbers, in each lane; an exact integer."""
    first, last = cells_of(inside, words.itemsize)
    table = _cell_weights(key)[first:last]
    step = min(max(_BLOCK // (last - first), 1), _MOST_ROWS)
    floats = np.empty((min(step, len(words)), last - first))
    weight = np.zeros((0, LANES), dtype=np.int64)
    totals = [0] * LANES
    for start in range(0, len(words), step):
        block = words[start : start + step]
        x = floats[: len(block)]
        np.copyto(x, _cells(block, inside, first, last))
        if len(weight) < len(block):  # made for many blocks at once
            some = step * max(_MOST_ROWS // step, 1)
            weight = weights(key, dim, np.array(numbers[start : start + some]))
        mine, weight = weight[: len(block)], weight[len(block) :]
        sums = _products(x, table)
        # A row comes to 58 bits at most: its halves times a weight still add up in 63.
        low = np.einsum("rk,rk->k", sums & (1 << _LOW) - 1, mine).tolist()
        high = np.einsum("rk,rk->k", sums >> _LOW, mine).tolist()
        totals = [t + a + (b << _LOW) for t, a, b in zip(totals, low, high, strict=True)]
    return totals


def _cells(block: _Words, inside: range, first: int, last: int) -> NDArray[np.int32]:
    """The cells ``first`` to ``last`` of some rows, zero where the rows have no element."""
    size = block.itemsize
    origin, width = first * CELL_BYTES // size, (last - first) * CELL_BYTES // size
    if len(inside) == width and block.strides[-1] == size:
        return block.view("<i4")
    cells = np.zeros((len(block), last - first), dtype="<i4")
    offset = inside.start - origin
    cells.view(block.dtype)[:, offset : offset + (len(inside) - 1) * inside.step + 1 : inside.step] = block
    return cells


def _products(cells: NDArray[np.float64], table: NDArray[np.float64]) -> Ints:
    """Rows of cells times their weights, exactly: no product sums more than ``EXACT`` cells."""
    full = len(table) // EXACT
    whole = full * EXACT
    stretches = cells[:, :whole].reshape(len(cells), full, EXACT).transpose(1, 0, 2)
    products = np.matmul(stretches, table[:whole].reshape(full, EXACT, LANES))
    sums: Ints = products.astype(np.int64).sum(axis=0)
    if whole < len(table):
        sums += (cells[:, whole:] @ table[whole:]).astype(np.int64)
    return sums
