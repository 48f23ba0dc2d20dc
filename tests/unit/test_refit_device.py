"""Fingerprints in torch's int64 are those of numpy, on every device that is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardweave.errors import DtypeError, OutsideError
from shardweave.layout import Box
from shardweave.layout.fingerprint import LANES, NOTHING, SEGMENT, fingerprint
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
def test_torch_alone_gives_what_numpy_gives(
    dims: list[tuple[int, int, int]], dtype: torch.dtype, key: int
) -> None:
    box = Box(tuple(range(start, start + count * step, step) for start, count, step in dims))
    tensor = random_tensor(box.shape, dtype)
    assert device.on_device(tensor, box, key=key) == fingerprint(tensor, box, key=key)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_and_other_strides(dtype: torch.dtype) -> None:
    for at in (0, 1, SEGMENT - 3, SEGMENT - 5):
        tensor = random_tensor((3, 2 * SEGMENT + 11), dtype)
        box = Box.of((5, at), tuple(tensor.shape))
        assert device.on_device(tensor, box) == fingerprint(tensor, box)
    turned = random_tensor((7, 5, 6), dtype).permute(2, 0, 1)
    assert device.on_device(turned) == fingerprint(turned)


@pytest.mark.parametrize("exact", [True, False], ids=["integer product", "int64"])
def test_both_products_are_the_same(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most negative bytes, in several blocks, and fewer and narrower rows than the product takes."""
    monkeypatch.setattr(device, "_BLOCK_BYTES", 3 * SEGMENT)
    monkeypatch.setattr(device, "_is_exact", lambda on: exact)
    for shape in ((8, SEGMENT), (40, 12), (3, 7)):
        for tensor in (torch.full(shape, -128, dtype=torch.int8), random_tensor(shape, torch.bfloat16)):
            assert device.on_device(tensor) == fingerprint(tensor)


def test_the_largest_sums_do_not_overflow() -> None:
    """More rows than are summed at once, and the largest residues."""
    tall = torch.full(((1 << 16) + 3, 2), -(1 << 31), dtype=torch.int32)
    assert device.on_device(tall) == fingerprint(tall)
    residues = torch.full((2, 1 << 16, LANES), (1 << 61) - 2, dtype=torch.int64)
    numbers = torch.full((1 << 16, LANES), 1 << 15, dtype=torch.int64)
    expected = (1 << 16) * (1 << 15) * -1 % ((1 << 61) - 1)
    assert device._fold(residues, numbers).tolist() == [[expected] * LANES] * 2


def test_a_device_without_an_exact_product_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    product = torch._int_mm

    def refusing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    try:
        for wrong in (lambda a, b: product(a, b).clamp(min=-(1 << 24)), refusing):
            device._is_exact.cache_clear()
            monkeypatch.setattr(torch, "_int_mm", wrong)
            assert not device._is_exact(cpu)
    finally:
        device._is_exact.cache_clear()


def test_the_cpu_and_empty_tensors() -> None:
    tensor = random_tensor((4, 6), torch.bfloat16)
    assert device.fingerprint_of(tensor, key=3) == fingerprint(tensor, key=3)
    assert device.on_device(tensor[:0]) == NOTHING
    with pytest.raises(OutsideError, match=r"array\(4, 6\) != box\(6, 4\)"):
        device.on_device(tensor, Box.of((0, 0), (6, 4)))
    with pytest.raises(DtypeError):
        device.on_device(torch.zeros(3, dtype=torch.complex128))


@has_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cuda_tensor_is_fingerprinted_where_it_is(dtype: torch.dtype) -> None:
    tensor = random_tensor((3, 67, 2 * SEGMENT + 11), dtype)
    box = Box.of((2, 1, 7), tuple(tensor.shape))
    assert device.fingerprint_of(tensor.cuda(), box) == fingerprint(tensor, box)
