"""Blocks of attention: over all sources, each pair of tokens that see each other, and each once."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardweave.train.blocks import Block, blocks, tiles
from shardweave.train.sequence import SequenceLayout

layouts = st.builds(
    SequenceLayout,
    st.lists(st.integers(0, 23), min_size=1, max_size=5).map(tuple),
    st.sampled_from(["bshd", "thd"]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["zigzag", "contiguous"]),
)
both = st.one_of(layouts, layouts.map(lambda layout: dataclasses.replace(layout, form="thd", causal=False)))


def slots_of(layout: SequenceLayout, rank: int | None, row: int) -> NDArray[np.int64]:
    """The slots of a rank's part of one row, or of the whole row, as numbers of the whole batch."""
    everything = np.arange(np.prod(layout.shape)).reshape(layout.shape)
    part = everything if rank is None else layout.slots(rank)
    return part[row] if layout.form == "bshd" else part


def rows_of(layout: SequenceLayout) -> range:
    return range(len(layout.lengths) if layout.form == "bshd" else 1)


def seen(block: Block) -> NDArray[np.bool_]:
    shape = block.queries[1] - block.queries[0], block.keys[1] - block.keys[0]
    return np.tri(*shape, dtype=bool) if block.causal else np.ones(shape, dtype=bool)


def check(
    layout: SequenceLayout, found: NDArray[np.int64], queries: NDArray[np.int64], window: int | None
) -> None:
    """How often each query of a row meets each slot of the batch, against what the layout says."""
    real = layout.is_real.reshape(-1)
    wanted = layout.sees(queries, np.arange(len(real)), window=window)
    mine = real[queries]
    assert (found[mine] == wanted[mine]).all()


@given(both)
def test_blocks_are_what_slots_see(layout: SequenceLayout) -> None:
    ranks: list[int | None] = [None, *range(layout.cp)]
    for rank in ranks:
        for row in rows_of(layout):
            queries = slots_of(layout, rank, row)
            found = np.zeros((len(queries), int(np.prod(layout.shape))), dtype=np.int64)
            for source in [None] if rank is None else range(layout.cp):
                keys = slots_of(layout, source, row)
                for block in blocks(layout, rank, source):
                    at = np.ix_(np.arange(*block.queries), keys[slice(*block.keys)])
                    found[at] += seen(block)
            check(layout, found, queries, None)


@given(layouts, st.integers(1, 25), st.integers(1, 9))
def test_tiles_are_what_slots_see_through_a_window(layout: SequenceLayout, window: int, least: int) -> None:
    ranks: list[int | None] = [None, *range(layout.cp)]
    for rank in ranks:
        for row in rows_of(layout):
            queries = slots_of(layout, rank, row)
            sources = [None] if rank is None else list(range(layout.cp))
            keys = np.concatenate([slots_of(layout, source, row) for source in sources])
            found = np.zeros((len(queries), int(np.prod(layout.shape))), dtype=np.int64)
            for tile in tiles(layout, rank, window, least):
                having = np.concatenate([keys[slice(*span)] for span, _ in tile.keys])
                mask = tile.mask(window)
                assert mask.any(1).all() and mask.shape[1] <= 2 * max(least, window)
                found[np.ix_(np.arange(*tile.queries), having)] += mask
            check(layout, found, queries, window)


@given(layouts)
def test_one_block_a_document_and_source(layout: SequenceLayout) -> None:
    documents = 1 if layout.form == "bshd" else len(layout.lengths)
    for rank in range(layout.cp):
        for source in range(layout.cp):
            assert len(blocks(layout, rank, source)) <= documents


@given(layouts)
def test_a_rank_sees_its_own_tokens_first(layout: SequenceLayout) -> None:
    """Every real query is in a block of its own rank: merging starts there, from a sum that is not empty."""
    for rank in range(layout.cp):
        asking = set(range(layout.local_shape()[-1]))
        for block in blocks(layout, rank, rank):
            assert block.causal and block.queries == block.keys
            asking -= set(range(*block.queries))
        padding = slots_of(layout, rank, 0)[sorted(asking)]
        assert not layout.is_real.reshape(-1)[padding].any()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(2, 5))
def test_the_zigzag_balances(parts: list[int], cp: int) -> None:
    """Ranks have the same number of pairs to compute, where no document is padded."""
    layout = SequenceLayout(tuple(2 * cp * part for part in parts), "thd", cp)
    pairs = [
        sum(seen(block).sum() for source in range(cp) for block in blocks(layout, rank, source))
        for rank in range(cp)
    ]
    assert pairs == [layout.work(rank) for rank in range(cp)]
    assert len(set(pairs)) == 1
