"""Fingerprints by torch alone are those of numpy, on every device that is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardweave.errors import DtypeError, OutsideError
from shardweave.layout import Box
from shardweave.layout.exact_sums import LANES, Words
from shardweave.layout.fingerprint import (
    MODULUS,
    NOTHING,
    SEGMENT,
    Fingerprint,
    fingerprint,
    lanes_of,
)
from shardweave.refit import device

DTYPES = [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]

BYTES = 4 * SEGMENT
"""Of a segment."""

has_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def alone(tensor: torch.Tensor, box: Box | None = None, *, key: int = 0) -> Fingerprint:
    """The fingerprint of a box by torch alone."""
    *outer, columns = (box or Box.of((0,) * tensor.ndim, tuple(tensor.shape))).dims or (range(1),)
    parts = tensor[None] if tensor.ndim else tensor.reshape(1, 1)
    lanes = device.on_device(parts, [np.array(r, dtype=int)[None] for r in outer], columns, key=key)
    return Fingerprint(tuple(lanes[0].tolist()))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    size = dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, size), dtype=np.uint8)
    raw[raw > 1] &= 1 if dtype is torch.bool else 255
    return torch.from_numpy(raw).view(dtype)[..., 0]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(1, 3)), max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, (1 << 64) - 1),
)
def test_torch_alone_gives_what_numpy_gives(
    dims: list[tuple[int, int, int]], dtype: torch.dtype, key: int
) -> None:
    box = Box(tuple(range(start, start + count * step, step) for start, count, step in dims))
    tensor = random_tensor(box.shape, dtype)
    assert alone(tensor, box, key=key) == fingerprint(tensor, box, key=key)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_and_other_strides(dtype: torch.dtype) -> None:
    for at in (0, 1, BYTES - 3, BYTES - 5):
        tensor = random_tensor((3, 2 * BYTES + 11), dtype)
        box = Box.of((5, at), tuple(tensor.shape))
        assert alone(tensor, box) == fingerprint(tensor, box)
    turned = random_tensor((7, 5, 6), dtype).permute(2, 0, 1)
    assert alone(turned) == fingerprint(turned)


@pytest.mark.parametrize("exact", [True, False], ids=["doubles", "int64"])
def test_both_products_are_the_same(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most negative words, in several blocks, and rows of part of a word."""
    monkeypatch.setattr(device, "_BLOCK_WORDS", 3 * SEGMENT)
    monkeypatch.setattr(device, "_is_exact", lambda on: exact)
    multiply, most = getattr(device, "_doubles" if exact else "_wide"), []

    def noted(rows: torch.Tensor, table: Words) -> torch.Tensor:
        most.append(rows.numel())
        return multiply(rows, table)

    monkeypatch.setattr(device, "_doubles" if exact else "_wide", noted)
    for shape in ((8, BYTES), (40, 12), (3, 7), (4, 1), (1, 10 * BYTES + 3)):
        for tensor in (torch.full(shape, -128, dtype=torch.int8), random_tensor(shape, torch.bfloat16)):
            assert alone(tensor) == fingerprint(tensor)
    lowest = torch.full((8, SEGMENT), -(1 << 31), dtype=torch.int32)
    assert alone(lowest) == fingerprint(lowest)
    assert max(most) == 3 * SEGMENT, "whether many rows or one long one"


def test_the_largest_sums_do_not_overflow() -> None:
    """More rows than are summed at once, and the largest sums."""
    tall = torch.full(((1 << 16) + 3, 2), -(1 << 31), dtype=torch.int32)
    assert alone(tall) == fingerprint(tall)
    for one in (-(1 << 62), 1 << 62, MODULUS - 1):
        sums = torch.full((2, 1, 1 << 15, LANES), one, dtype=torch.int64)
        numbers = torch.full((1, 1, 1 << 15, LANES), 1 << 27, dtype=torch.int64)
        expected = (1 << 15) * (1 << 27) * one % MODULUS
        assert device._fold(sums, numbers).tolist() == [[[expected] * LANES]] * 2


def test_a_device_without_an_exact_product_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    product = device._doubles

    def without(rows: torch.Tensor, table: Words) -> torch.Tensor:
        raise TypeError("this device has no doubles")

    try:
        for wrong in (lambda rows, table: product(rows, table).float().to(torch.int64), without):
            device._is_exact.cache_clear()
            monkeypatch.setattr(device, "_doubles", wrong)
            assert not device._is_exact(cpu)
    finally:
        device._is_exact.cache_clear()


def test_the_cpu_and_empty_tensors() -> None:
    tensor = random_tensor((4, 6), torch.bfloat16)
    assert device.fingerprint_of(tensor, key=3) == fingerprint(tensor, key=3)
    assert alone(tensor[:0]) == NOTHING == device.fingerprint_of(tensor[:0])
    with pytest.raises(OutsideError, match=r"array\(4, 6\) != box\(6, 4\)"):
        device.fingerprint_of(tensor, Box.of((0, 0), (6, 4)))
    with pytest.raises(DtypeError):
        alone(torch.zeros(3, dtype=torch.complex128))


def test_stacked_parts_are_those_of_numpy() -> None:
    """Indices of their own in the first dim, those of all in the second."""
    tensor = random_tensor((3, 2, 5, 2 * BYTES + 6), torch.bfloat16)
    outer = [np.array([[4, 5], [0, 9], [1, 2]]), np.arange(7, 12)[None]]
    columns = range(3, 2 * BYTES + 9)
    wanted = lanes_of(tensor, outer, columns, key=2)
    assert np.array_equal(device.on_device(tensor, outer, columns, key=2), wanted)
    assert np.array_equal(device.lanes_of(tensor, outer, columns, key=2), wanted)


@has_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cuda_tensor_is_fingerprinted_where_it_is(dtype: torch.dtype) -> None:
    tensor = random_tensor((3, 67, 2 * BYTES + 11), dtype)
    box = Box.of((2, 1, 7), tuple(tensor.shape))
    assert device.fingerprint_of(tensor.cuda(), box) == fingerprint(tensor, box)
