"""The law of block scales: an index is in block ``index // block``, at the place of its own in blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.errors import CutError
from shardweave.layout import PAD, Dim, Run, chunk, concat, on_grid, pad, take, whole

blocks = st.integers(1, 6)


@given(st.integers(0, 40), blocks)
def test_a_whole_dim_has_all_blocks(size: int, block: int) -> None:
    assert on_grid(whole(size), block, {"": size}) == whole(-(-size // block))


@given(st.data(), blocks, st.integers(1, 9))
def test_every_index_is_in_the_block_at_its_place(data: st.DataObject, block: int, count: int) -> None:
    """Blocks in any order, some more than once, some left out."""
    size = block * count
    ids = data.draw(st.lists(st.integers(0, count - 1), max_size=12))
    dim = take(whole(size), ids, block)
    found = [index for _, index in on_grid(dim, block, {"": size})]
    assert found == ids
    assert [index // block for _, index in dim] == [found[at // block] for at in range(len(dim))]


@given(st.integers(1, 60), blocks, st.integers(1, 5))
def test_chunks_along_blocks_tile_the_grid(size: int, block: int, parts: int) -> None:
    padded = -(-size // block) * block
    shares = [chunk(whole(padded), parts, part, block=block) for part in range(parts)]
    cut_to_size = [
        Dim(Run("", r.start, min(r.start + r.count, size) - r.start) for r in s.runs) for s in shares
    ]
    found = concat(*(on_grid(dim, block, {"": size}) for dim in cut_to_size))
    assert found == whole(-(-size // block))


@given(st.integers(0, 40), st.integers(0, 40), blocks)
def test_a_cut_is_refused_exactly_where_a_block_is_cut(start: int, count: int, block: int) -> None:
    size = start + count + 7 * block
    dim = Dim([Run("", start, count)])
    held = {index for _, index in dim}
    all_or_none = all(
        held >= set(range(b, b + block)) or not held & set(range(b, b + block)) for b in range(0, size, block)
    )
    if all_or_none:
        assert len(on_grid(dim, block, {"": size})) * block == count
    else:
        with pytest.raises(CutError, match=r"% block\("):
            on_grid(dim, block, {"": size})


@given(st.integers(1, 9), blocks, st.integers(1, 4))
def test_padding_is_whole_blocks_of_padding(count: int, block: int, more: int) -> None:
    dim = pad(whole(count * block), (count + more) * block)
    assert on_grid(dim, block, {"": count * block}) == Dim([Run("", 0, count), Run(PAD, 0, more)])
