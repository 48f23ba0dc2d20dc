"""Fingerprints of tensors where they are: the definition of ``layout.fingerprint`` on a device.

Bytes meet their numbers in the device's product of small integers where it has one and is exact, in int64
otherwise; the rest is additions, products, shifts and masks of int64, none of which overflows. Every device
has these and gives the same bits. What crosses to the host is one integer a lane.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from shardweave.errors import DtypeError
from shardweave.layout import Box
from shardweave.layout.fingerprint import (
    LANES,
    LOW,
    MODULUS,
    NOTHING,
    SEGMENT,
    SEGMENT_DIM,
    Fingerprint,
    fingerprint,
    numbers,
    place_of,
    places_of,
    segments_of,
)

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK_BYTES = 1 << 26
"""Bytes that are multiplied at once; in int64, with their products, 1 GiB."""
_MOST_TERMS = 1 << 16
"""Terms of 46 bits whose sum fits an int64."""
_LEAST_ROWS, _GRAIN = 32, 8
"""What CUDA's integer product asks of a matrix: so many rows, and columns in such steps."""


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
    on_cpu = tensor.device.type == "cpu"
    return fingerprint(tensor, box, key=key) if on_cpu else on_device(tensor, box, key=key)


def on_device(tensor: torch.Tensor, box: Box | None = None, *, key: int = 0) -> Fingerprint:
    """As ``fingerprint_of``, by torch alone on any device. A tensor that is not contiguous is copied once."""
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
    for at, segments, inside in segments_of(columns, SEGMENT // size, SEGMENT // size):
        rows = words[..., at].reshape(-1, len(inside)).contiguous().view(torch.int8)
        sums = _products(rows, _on(places_of(inside, size, key), tensor.device)).to(torch.int64)
        for dim, indices in ((SEGMENT_DIM, segments), *reversed(list(enumerate(outer)))):
            table = numbers(key, dim, np.array(indices)[None])[0].astype(np.int64)
            sums = _fold(sums.reshape(-1, len(indices), LANES), _on(table, tensor.device))
        total = (total + sums[0]) % MODULUS
    return Fingerprint(tuple(total.tolist()))


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
    except (NotImplementedError, RuntimeError):
        return False


def _fold(sums: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The weighted sum over the middle dim of ``(n, indices, LANES)``, as residues.

    A summand of up to 62 bits is multiplied by halves. The upper half's sum times 2**31 is a rotation of
    its 61 bits, for 2**61 is 1.
    """
    total = torch.zeros_like(sums[:, 0])
    for part, weight in zip(sums.split(_MOST_TERMS, dim=1), table.split(_MOST_TERMS), strict=True):
        low = ((part & (1 << LOW) - 1) * weight).sum(dim=1) % MODULUS
        high = ((part >> LOW) * weight).sum(dim=1) % MODULUS
        turned = ((high & (1 << 61 - LOW) - 1) << LOW) | (high >> 61 - LOW)
        total = ((total + low) % MODULUS + turned) % MODULUS
    return total


def _on(table: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(table)).to(device)
