"""FP8 in blocks: against plain code block by block, on shards, and where shards cut blocks."""

from __future__ import annotations

import math

import pytest
import torch

from shardweave.errors import CutError, DtypeError, GeometryError, OutsideError, TransformError
from shardweave.layout import concat, cut, even, whole
from shardweave.refit.quantise import quantise


def plain(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The recipe, one block after the other."""
    rows, columns = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale_inv = torch.full((math.ceil(rows / block[0]), math.ceil(columns / block[1])), math.nan)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            place = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            one = weight[place].float()
            scale = one.abs().max() / 448.0
            scale_inv[i, j] = scale
            values[place] = (one / scale).to(torch.float8_e4m3fn)
    return values, scale_inv


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    rows = torch.logspace(-4, 4, shape[-2])[:, None]
    return (torch.randn(*shape, generator=generator) * rows).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(300, 258), (128, 384), (5, 7), (1, 129)], ids=str)
def test_blocks_are_those_of_the_recipe(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = drawn(*shape, dtype=dtype)
    weight[weight == 0] = 1
    values, scale_inv = quantise(weight)
    expected = plain(weight, (128, 128))
    assert same(values, expected[0]) and torch.equal(scale_inv, expected[1])


def test_the_error_is_half_of_the_last_place() -> None:
    weight = drawn(300, 258)
    values, scale_inv = quantise(weight)
    each = scale_inv.double().repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :258]
    error = (weight.double() - values.double() * each).abs()
    bound = each * torch.maximum(values.double().abs() / 16, torch.tensor(2.0**-10)) * (1 + 2**-20)
    assert (error <= bound).all() and error.max() > 0


def test_a_shard_on_the_grid_is_the_shard_of_the_whole() -> None:
    weight = drawn(24, 22)
    values, scale_inv = quantise(weight, block=(4, 8))
    for a, b in ((0, 8), (8, 24)):
        for c, d in ((0, 16), (16, 22)):
            rows, columns = cut(whole(24), a, b), cut(whole(22), c, d)
            found = quantise(
                weight[a:b, c:d], rows=rows, columns=columns, shapes={"": (24, 22)}, block=(4, 8)
            )
            assert same(found[0], values[a:b, c:d])
            assert torch.equal(found[1], scale_inv[a // 4 : b // 4, c // 8 : -(-d // 8)])


def test_a_fused_buffer_is_its_parts_fused() -> None:
    """Gate and up of a rank, as an engine holds them: the blocks of each count from its own first row."""
    gate, up, shapes = drawn(16, 10), drawn(24, 10), {"gate": (16, 10), "up": (24, 10)}
    apart = [quantise(part, block=(4, 8)) for part in (gate, up)]
    for rank in range(2):
        rows = concat(even(whole(16, "gate"), 2, rank), even(whole(24, "up"), 2, rank))
        held = torch.cat([part.chunk(2)[rank] for part in (gate, up)])
        values, scale_inv = quantise(held, rows=rows, shapes=shapes, block=(4, 8))
        assert same(values, torch.cat([part.chunk(2)[rank] for part, _ in apart]))
        assert torch.equal(scale_inv, torch.cat([scales.chunk(2)[rank] for _, scales in apart]))
    short = concat(whole(14, "gate"), whole(24, "up"))
    with pytest.raises(CutError, match=r"end\(14\) % block\(4\) = 2"):
        quantise(drawn(38, 10), rows=short, shapes={**shapes, "gate": (14, 10)}, block=(4, 8))


def test_258_columns_over_two_ranks_are_3_blocks_and_not_4() -> None:
    """vime #133, mcore-bridge #32: each rank counted its own blocks, and the scales were of no weight."""
    weight = drawn(128, 258)
    assert quantise(weight)[1].shape == (1, 3)
    for rank, message in enumerate((r"end\(129\) % block\(128\) = 1", r"start\(129\) % block\(128\) = 1")):
        shard, columns = weight.chunk(2, dim=1)[rank], even(whole(258), 2, rank)
        with pytest.raises(CutError, match=message):
            quantise(shard, columns=columns, shapes={"": (128, 258)})
        local = quantise(shard, columns=columns, shapes={"": (128, 258)}, unaligned="local")
        assert local[1].shape == (1, 2)
        expected = plain(shard, (128, 128))
        assert same(local[0], expected[0]) and torch.equal(local[1], expected[1])


def test_experts_have_blocks_of_their_own() -> None:
    weight = drawn(3, 10, 6)
    values, scale_inv = quantise(weight, block=(4, 4))
    assert scale_inv.shape == (3, 3, 2)
    for expert in range(3):
        expected = plain(weight[expert], (4, 4))
        assert same(values[expert], expected[0]) and torch.equal(scale_inv[expert], expected[1])


def test_many_blocks_are_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardweave.refit.quantise._AT_ONCE", 50)
    weight = drawn(23, 10)
    found, expected = quantise(weight, block=(2, 4)), plain(weight, (2, 4))
    assert same(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_blocks_of_nothing_and_of_next_to_nothing_are_finite() -> None:
    weight = torch.zeros(2, 4)
    weight[1, 2:] = torch.tensor([1e-45, -3e-39])
    values, scale_inv = quantise(weight, block=(2, 2))
    assert torch.isfinite(values.float()).all() and (scale_inv > 0).all()
    assert not values.float()[:, :2].any()
    assert torch.equal(quantise(weight[:0], block=(2, 2))[1], torch.empty(0, 2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    weight = torch.ones(5, 3)
    weight[4, 1] = bad
    with pytest.raises(TransformError, match=r"\[\d, 1\]"):
        quantise(weight, block=(2, 2))


def test_half_given_shards_and_other_dtypes_are_refused() -> None:
    weight = torch.ones(4, 4)
    with pytest.raises(OutsideError, match=r"rows: \[0:8\] of \(8\), held 4"):
        quantise(weight, shapes={"": (8, 4)})
    with pytest.raises(OutsideError, match=r"columns: \[2:6\] of \(4\), held 4"):
        quantise(weight, columns=cut(whole(6), 2, 6), shapes={"": (4, 4)})
    with pytest.raises(OutsideError, match=r"rows: up\[0:4\] of gate\(4\), held 4"):
        quantise(weight, rows=whole(4, "up"), shapes={"gate": (4, 4)})
    with pytest.raises(OutsideError, match="rows and columns"):
        quantise(weight[0])
    with pytest.raises(DtypeError, match="float64"):
        quantise(weight.double())
    with pytest.raises(GeometryError, match="'global'"):
        quantise(weight, unaligned="global")
