"""Fingerprints of tensors where they are: the definition of ``layout.fingerprint`` in torch's int64.

Only additions, products, shifts and masks of int64, none of which overflows: every device has them, and gives
the same bits. What crosses to the host is one integer a lane.
"""

from __future__ import annotations

import numpy as np
import torch

from shardweave.errors import DtypeError
from shardweave.layout import Box
from shardweave.layout.fingerprint import (
    CELL_BYTES,
    CELL_DIM,
    LANES,
    MODULUS,
    NOTHING,
    SEGMENT,
    SEGMENT_DIM,
    Fingerprint,
    cells_of,
    fingerprint,
    place_of,
    segments_of,
    weights,
)

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 24
"""Cells that are worked on at once; as int64 and their products, a few hundred MiB."""
_LOW, _HIGH = 31, 30
"""The bits of a residue of 61 that are multiplied at once, and those that are left."""
_MOST_TERMS = 1 << 16
"""Terms of 46 bits whose sum fits an int64."""


def fingerprint_of(tensor: torch.Tensor, box: Box | None = None, *, key: int = 0) -> Fingerprint:
    """The fingerprint of the elements of a box, taken on the tensor's device.

    Law: it is ``fingerprint(tensor.cpu(), box, key=key)``, which is also what is called for the CPU.

    Args:
        tensor: The elements, with words of 1, 2, 4 or 8 bytes; its dims are in the logical tensor's order.
        box: Where they are in the logical tensor; at its beginning by default.
        key: Which family of weights.

    Raises:
        OutsideError: The tensor does not have the shape of the box.
        DtypeError: Words of another size.
    """
    return (
        fingerprint(tensor, box, key=key) if tensor.device.type == "cpu" else in_int64(tensor, box, key=key)
    )


def in_int64(tensor: torch.Tensor, box: Box | None = None, *, key: int = 0) -> Fingerprint:
    """As ``fingerprint_of``, in int64 on any device. A tensor that is not contiguous is copied once."""
    size = tensor.element_size()
    if size not in _WORDS:
        raise DtypeError(
            "the words of a fingerprint have 1, 2, 4 or 8 bytes",
            where=f"a tensor of {tensor.dtype}",
            equation=f"itemsize({size})",
            hint="view the tensor as one of real numbers",
        )
    box = place_of(tuple(tensor.shape), box)
    if not box.numel:
        return NOTHING
    words = tensor.detach().view(_WORDS[size])
    if not words.ndim:
        words, box = words.reshape(1), Box.of((0,), (1,))
    *outer, columns = box.dims
    total = torch.zeros(LANES, dtype=torch.int64, device=tensor.device)
    segment = SEGMENT * CELL_BYTES // size
    for at, segments, inside in segments_of(columns, segment, segment):
        rows = words[..., at].reshape(-1, len(inside))
        sums = _row_sums(rows, inside, key)
        for dim, numbers in ((SEGMENT_DIM, segments), *reversed(list(enumerate(outer)))):
            table = _on(weights(key, dim, np.array(numbers)), tensor.device)
            sums = _fold(sums.reshape(-1, len(numbers), LANES), table)
        total = (total + sums[0]) % MODULUS
    return Fingerprint(tuple(total.tolist()))


def _row_sums(rows: torch.Tensor, inside: range, key: int) -> torch.Tensor:
    """Each row of one segment times the weights of its cells, ``(rows, LANES)``; 58 bits at most."""
    first, last = cells_of(inside, rows.element_size())
    table = _on(weights(key, CELL_DIM, np.arange(first, last)).T, rows.device)
    offset = inside.start - first * CELL_BYTES // rows.element_size()
    place = slice(offset, offset + (len(inside) - 1) * inside.step + 1, inside.step)
    found = []
    for block in rows.split(max(_BLOCK // (last - first), 1)):
        cells = torch.zeros((len(block), last - first), dtype=torch.int32, device=rows.device)
        cells.view(rows.dtype)[:, place] = block
        wide = cells.to(torch.int64)
        found.append(torch.stack([(wide * lane).sum(dim=1) for lane in table], dim=1))
    return torch.cat(found)


def _fold(sums: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The weighted sum over the middle dim of ``(n, indices, LANES)``, as residues.

    A summand of up to 62 bits is multiplied by halves. The upper half's sum times 2**31 is a rotation of
    its 61 bits, for 2**61 is 1.
    """
    total = torch.zeros_like(sums[:, 0])
    for part, weight in zip(sums.split(_MOST_TERMS, dim=1), table.split(_MOST_TERMS), strict=True):
        low = ((part & (1 << _LOW) - 1) * weight).sum(dim=1) % MODULUS
        high = ((part >> _LOW) * weight).sum(dim=1) % MODULUS
        turned = ((high & (1 << _HIGH) - 1) << _LOW) | (high >> _HIGH)
        total = ((total + low) % MODULUS + turned) % MODULUS
    return total


def _on(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device)
