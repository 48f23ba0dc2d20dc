"""Fingerprints of tensors where they are: the definition of ``layout.fingerprint`` on a device.

Bytes meet their numbers in the device's product of small integers where it has one and is exact, in int64
otherwise; the rest is additions, products, shifts and masks of int64, none of which overflows. Every device
has these and gives the same bits. What crosses to the host is one integer a lane.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from shardweave.errors import DtypeError
from shardweave.layout import Box
from shardweave.layout import fingerprint as reference
from shardweave.layout.fingerprint import (
    LANES,
    LOW,
    MODULUS,
    SEGMENT,
    SEGMENT_DIM,
    Fingerprint,
    numbers,
    place_of,
    places_of,
    segments_of,
)
from shardweave.layout.table import Ints

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK_BYTES = 1 << 26
"""Bytes that are multiplied at once; in int64, with their products, 1 GiB."""
_MOST_TERMS = 1 << 16
"""Terms of 46 bits whose sum fits an int64."""
_LEAST_ROWS, _GRAIN = 32, 8
"""What CUDA's integer product asks of a matrix: so many rows, and columns in such steps."""


def fingerprint_of(tensor: torch.Tensor, box: Box | None = None, *, key: int = 0) -> Fingerprint:
    """The fingerprint of the elements of a box, taken on the tensor's device.

    Law: it is ``fingerprint(tensor.cpu(), box, key=key)``.

    Args:
        tensor: The elements, with words of 1, 2, 4 or 8 bytes; its dims are in the logical tensor's order.
        box: Where they are in the logical tensor; at its beginning by default.
        key: Which family of weights.

    Raises:
        OutsideError: The tensor does not have the shape of the box.
        DtypeError: Words of another size.
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
        DtypeError: Words of another size.
    """
    if tensor.device.type == "cpu":
        return reference.lanes_of(tensor, outer, columns, key=key)
    return on_device(tensor, outer, columns, key=key)


def on_device(tensor: torch.Tensor, outer: Sequence[Ints], columns: range, *, key: int = 0) -> Ints:
    """As ``lanes_of``, by torch alone on any device. A tensor that is not contiguous is copied once."""
    size = tensor.element_size()
    if size not in _WORDS:
        raise DtypeError(
            "the words of a fingerprint have 1, 2, 4 or 8 bytes",
            where=f"a tensor of {tensor.dtype}",
            equation=f"itemsize({size})",
            hint="view the tensor as one of real numbers",
        )
    parts, device = len(tensor), tensor.device
    total = torch.zeros((parts, LANES), dtype=torch.int64, device=device)
    if tensor.numel():
        words = tensor.detach().view(_WORDS[size])
        for at, segments, inside in segments_of(columns, SEGMENT // size, SEGMENT // size):
            rows = words[..., at].reshape(-1, len(inside)).contiguous().view(torch.int8)
            sums = _products(rows, _on(places_of(inside, size, key), device)).to(torch.int64)
            for dim, indices in ((SEGMENT_DIM, np.array(segments)[None]), *reversed(list(enumerate(outer)))):
                table = _on(numbers(key, dim, indices).astype(np.int64), device)
                sums = _fold(sums.reshape(parts, -1, indices.shape[1], LANES), table[:, None])
            total = (total + sums.reshape(parts, LANES)) % MODULUS
    found: Ints = total.cpu().numpy()
    return found


def _products(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The bytes of rows times their numbers, exactly, ``(rows, LANES)``."""
    multiply = _integer if _is_exact(rows.device) else _wide
    return torch.cat([multiply(block, table) for block in rows.split(max(_BLOCK_BYTES // len(table), 1))])


def _integer(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    short, ragged = max(_LEAST_ROWS - len(rows), 0), -len(table) % _GRAIN
    if short or ragged:
        rows = torch.nn.functional.pad(rows, (0, ragged, 0, short))
        table = torch.nn.functional.pad(table, (0, 0, 0, ragged))
    return torch._int_mm(rows, table)[: len(rows) - short]


def _wide(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    wide = rows.to(torch.int64)
    return torch.stack([(wide * lane).sum(dim=1) for lane in table.T.to(torch.int64)], dim=1)


@functools.cache
def _is_exact(device: torch.device) -> bool:
    """Whether a device has the integer product, and it is right for the largest sums there are."""
    rows = torch.tensor([[-128], [127], [-1]], dtype=torch.int8, device=device).repeat(1, SEGMENT)
    table = torch.tensor([[-64, 63] * (LANES // 2)], dtype=torch.int8, device=device).repeat(SEGMENT, 1)
    try:
        return torch.equal(_integer(rows, table).to(torch.int64), _wide(rows, table))
    except RuntimeError:  # which NotImplementedError is too
        return False


def _fold(sums: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The weighted sum over the third dim of ``(parts, n, indices, LANES)``, as residues.

    A summand of up to 62 bits is multiplied by halves. The upper half's sum times 2**31 is a rotation of
    its 61 bits, for 2**61 is 1.
    """
    total = torch.zeros_like(sums[:, :, 0])
    for part, weight in zip(sums.split(_MOST_TERMS, dim=2), table.split(_MOST_TERMS, dim=2), strict=True):
        low = ((part & (1 << LOW) - 1) * weight).sum(dim=2) % MODULUS
        high = ((part >> LOW) * weight).sum(dim=2) % MODULUS
        turned = ((high & (1 << 61 - LOW) - 1) << LOW) | (high >> 61 - LOW)
        total = ((total + low) % MODULUS + turned) % MODULUS
    return total


def _on(table: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(table)).to(device)
