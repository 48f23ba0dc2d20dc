"""Fingerprints in torch's int64 are those of numpy, on every device that is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardweave.errors import DtypeError, OutsideError
from shardweave.layout import Box
from shardweave.layout.fingerprint import NOTHING, SEGMENT, fingerprint
from shardweave.refit import device

DTYPES = [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]

has_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


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
def test_int64_gives_what_numpy_gives(dims: list[tuple[int, int, int]], dtype: torch.dtype, key: int) -> None:
    box = Box(tuple(range(start, start + count * step, step) for start, count, step in dims))
    tensor = random_tensor(box.shape, dtype)
    assert device.in_int64(tensor, box, key=key) == fingerprint(tensor, box, key=key)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_and_other_strides(dtype: torch.dtype) -> None:
    for at in (0, 1, SEGMENT - 3, 4 * SEGMENT - 5):
        tensor = random_tensor((3, 2 * SEGMENT + 11), dtype)
        box = Box.of((5, at), tuple(tensor.shape))
        assert device.in_int64(tensor, box) == fingerprint(tensor, box)
    turned = random_tensor((7, 5, 6), dtype).permute(2, 0, 1)
    assert device.in_int64(turned) == fingerprint(turned)


def test_the_largest_sums_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most negative cells over more rows than are summed at once, and in several blocks."""
    monkeypatch.setattr(device, "_BLOCK", 3 * SEGMENT)
    cells = torch.full((8, SEGMENT), -(1 << 31), dtype=torch.int32)
    assert device.in_int64(cells) == fingerprint(cells)
    tall = torch.full(((1 << 16) + 3, 2), -(1 << 31), dtype=torch.int32)
    assert device.in_int64(tall) == fingerprint(tall)
    residues = torch.full((2, 1 << 16, 8), (1 << 61) - 2, dtype=torch.int64)
    numbers = torch.full((1 << 16, 8), 1 << 15, dtype=torch.int64)
    expected = (1 << 16) * (1 << 15) * -1 % ((1 << 61) - 1)
    assert device._fold(residues, numbers).tolist() == [[expected] * 8] * 2


def test_the_cpu_and_empty_tensors() -> None:
    tensor = random_tensor((4, 6), torch.bfloat16)
    assert device.fingerprint_of(tensor, key=3) == fingerprint(tensor, key=3)
    assert device.in_int64(tensor[:0]) == NOTHING
    with pytest.raises(OutsideError, match=r"array\(4, 6\) != box\(6, 4\)"):
        device.in_int64(tensor, Box.of((0, 0), (6, 4)))
    with pytest.raises(DtypeError):
        device.in_int64(torch.zeros(3, dtype=torch.complex128))


@has_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cuda_tensor_is_fingerprinted_where_it_is(dtype: torch.dtype) -> None:
    tensor = random_tensor((3, 67, 2 * SEGMENT + 11), dtype)
    box = Box.of((2, 1, 7), tuple(tensor.shape))
    assert device.fingerprint_of(tensor.cuda(), box) == fingerprint(tensor, box)
