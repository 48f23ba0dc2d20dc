"""Fingerprints of tensors where they are: the definition of ``layout.fingerprint`` on a device.

Words meet their numbers in the device's product of doubles where that is exact, in int64 otherwise; the rest
is additions, products, shifts and masks of int64, none of which overflows. Every device has these and gives
the same bits. What crosses to the host is one integer a lane.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from shardweave.errors import DtypeError
from shardweave.layout import Box
from shardweave.layout import fingerprint as reference
from shardweave.layout.exact_sums import (
    LANES,
    LOW_BITS,
    MOST_TERMS,
    NUMBER_BITS,
    WORD,
    Words,
    in_halves,
    in_thirds,
)
from shardweave.layout.fingerprint import (
    MODULUS,
    SEGMENT,
    SEGMENT_DIM,
    Fingerprint,
    Piece,
    numbers,
    pieces,
    place_of,
    places,
    turned,
)
from shardweave.layout.table import Ints

_ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK_WORDS = 1 << 24
"""Words that are made doubles at once, 128 MiB; in int64, with their products, twice as much."""


def fingerprint_of(tensor: torch.Tensor, box: Box | None = None, *, key: int = 0) -> Fingerprint:
    """The fingerprint of the elements of a box, taken on the tensor's device.

    Law: it is ``fingerprint(tensor.cpu(), box, key=key)``.

    Args:
        tensor: The elements, of 1, 2, 4 or 8 bytes each; its dims are in the logical tensor's order.
        box: Where they are in the logical tensor; at its beginning by default.
        key: Which family of weights.

    Raises:
        OutsideError: The tensor does not have the shape of the box.
        DtypeError: Elements of another size.
    """
    *outer, columns = place_of(tuple(tensor.shape), box).dims or (range(1),)
    parts = tensor[None] if tensor.ndim else tensor.reshape(1, 1)
    lanes = lanes_of(parts, [np.arange(r.start, r.stop, r.step)[None] for r in outer], columns, key=key)
    return Fingerprint(tuple(lanes[0].tolist()))


def lanes_of(tensor: torch.Tensor, outer: Sequence[Ints], columns: range, *, key: int = 0) -> Ints:
    """The fingerprints of many parts that are alike, taken on the tensor's device: ``(parts, LANES)``.

    Law: it is ``layout.fingerprint.lanes_of(tensor.cpu(), ...)``, which is what is called for the CPU.

    Args:
        tensor: ``(parts, *lengths, len(columns))``.
        outer: For each length its indices, of one part or of all.
        columns: The indices in the last dim.
        key: As for ``fingerprint_of``.

    Raises:
        DtypeError: Elements of another size.
    """
    if tensor.device.type == "cpu":
        return reference.lanes_of(tensor, outer, columns, key=key)
    return on_device(tensor, outer, columns, key=key)


def on_device(tensor: torch.Tensor, outer: Sequence[Ints], columns: range, *, key: int = 0) -> Ints:
    """As ``lanes_of``, by torch alone on any device. A tensor that is not contiguous is copied once."""
    size = tensor.element_size()
    if size not in _ELEMENTS:
        raise DtypeError(
            "the elements of a fingerprint have 1, 2, 4 or 8 bytes",
            where=f"a tensor of {tensor.dtype}",
            equation=f"itemsize({size})",
            hint="view the tensor as one of real numbers",
        )
    parts, device = len(tensor), tensor.device
    total = torch.zeros((parts, LANES), dtype=torch.int64, device=device)
    if tensor.numel():
        elements = tensor.detach().view(_ELEMENTS[size])
        for piece in pieces(columns, size, most=max(_BLOCK_WORDS // SEGMENT, 1)):
            rows = elements[..., piece.at].reshape(parts * math.prod(tensor.shape[1:-1]), -1)
            sums = _row_sums(rows, piece, places(key)[:, piece.places])
            for dim, indices in ((SEGMENT_DIM, piece.segments[None]), *reversed(list(enumerate(outer)))):
                table = _on(numbers(key, dim, indices), device)
                sums = _fold(sums.reshape(parts, -1, indices.shape[1], LANES), table[:, None])
            total = (total + sums.reshape(parts, LANES)) % MODULUS
    found: Ints = total.cpu().numpy()
    return found


def _in_words(elements: torch.Tensor, piece: Piece) -> torch.Tensor:
    """As in the reference: rows of elements as rows of words of a segment; a contiguous copy if need be."""
    size, width = elements.element_size(), len(piece.places)
    if piece.within is not None:
        bits = 8 * size
        unsigned = elements.to(torch.int32) & (1 << bits) - 1
        return unsigned << _on(bits * piece.within, elements.device).to(torch.int32)
    packed = elements.contiguous()
    if packed.data_ptr() % WORD or packed.storage_offset() * size % WORD:
        packed = packed.clone()
    return packed.view(-1).view(torch.int32).view(-1, width)


def _row_sums(rows: torch.Tensor, piece: Piece, table: Words) -> torch.Tensor:
    """The words of rows times their numbers, exactly, ``(rows * segments, LANES)``."""
    multiply = _doubles if _is_exact(rows.device) else _wide
    step = max(_BLOCK_WORDS // (len(piece.segments) * len(piece.places)), 1)
    return torch.cat([multiply(_in_words(block, piece), table) for block in rows.split(step)])


def _doubles(rows: torch.Tensor, table: Words) -> torch.Tensor:
    halves = _on(in_halves(table), rows.device)
    high, low = (rows.to(torch.float64) @ halves).to(torch.int64).split(LANES, dim=1)
    found: torch.Tensor = (high << LOW_BITS) + low
    return found


def _wide(rows: torch.Tensor, table: Words) -> torch.Tensor:
    lanes, wide = _on(table.astype(np.int64), rows.device), rows.to(torch.int64)
    return torch.stack([(wide * lane).sum(dim=1) for lane in lanes], dim=1)


@functools.cache
def _is_exact(device: torch.device) -> bool:
    """Whether a device has the product of doubles, and it is right for the largest sums there are."""
    words = torch.tensor([[-(1 << 31)], [(1 << 31) - 1], [-1]], dtype=torch.int32, device=device)
    largest = np.array([[-(1 << NUMBER_BITS - 1)], [(1 << NUMBER_BITS - 1) - 1], [-1]], dtype=np.int32)
    rows, table = words.repeat(1, SEGMENT), largest.repeat(SEGMENT, axis=1)
    try:
        return torch.equal(_doubles(rows, table), _wide(rows, table))
    except torch.OutOfMemoryError:  # says nothing of the product, and is not to be remembered
        raise
    except (RuntimeError, TypeError):  # how backends refuse doubles; NotImplementedError is a RuntimeError
        return False


def _fold(sums: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """As in the reference, over the third dim of ``(parts, n, indices, LANES)``, which may be longer."""
    total = torch.zeros_like(sums[:, :, 0])
    for part, weight in zip(sums.split(MOST_TERMS, dim=2), table.split(MOST_TERMS, dim=2), strict=True):
        found = torch.zeros_like(total)
        for third in in_thirds(part):
            found = (turned(found) + (third * weight).sum(dim=2)) % MODULUS
        total = (total + found) % MODULUS
    return total


def _on(table: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(table)).to(device)
