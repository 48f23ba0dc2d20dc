"""Whether boxes overlap, against every pair of boxes."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.layout import tiling
from shardweave.layout.tiling import find_overlap


@st.composite
def box_lists(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    num_dims = draw(st.integers(0, 4))
    n = draw(st.integers(0, 12 if num_dims else 3))
    size = draw(st.sampled_from([3, 6, 10**12]))

    def column() -> list[int]:
        return draw(st.lists(st.integers(0, size), min_size=n, max_size=n))

    low = np.array([column() for _ in range(num_dims)], dtype=np.int64).reshape(num_dims, n).T
    # Empty boxes too, and ends before their starts.
    high = np.array([column() for _ in range(num_dims)], dtype=np.int64).reshape(num_dims, n).T
    group = np.array(draw(st.lists(st.sampled_from([0, 1, 7]), min_size=n, max_size=n)), dtype=np.int64)
    return group, low, high


def overlap(group: np.ndarray, low: np.ndarray, high: np.ndarray, i: int, j: int) -> bool:
    inner = np.minimum(high[i], high[j]) - np.maximum(low[i], low[j])
    return bool(group[i] == group[j] and np.all(inner > 0))


@given(box_lists())
def test_against_every_pair(case: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    pairs = [pair for pair in itertools.combinations(range(len(case[0])), 2) if overlap(*case, *pair)]
    found = find_overlap(*case)
    assert found in pairs if pairs else found is None


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_random_tiling_and_one_box_too_many(num_dims: int, depth: int, data: st.DataObject) -> None:
    tiles = [((0,) * num_dims, (8,) * num_dims)]
    for _ in range(depth):  # cut each tile along a dim of its own
        halves = []
        for low, high in tiles:
            d = data.draw(st.integers(0, num_dims - 1))
            cut = data.draw(st.integers(low[d], high[d]))
            halves += [(low, (*high[:d], cut, *high[d + 1 :])), ((*low[:d], cut, *low[d + 1 :]), high)]
        tiles = halves
    low, high = np.array([t[0] for t in tiles]), np.array([t[1] for t in tiles])
    group = np.zeros(len(tiles), dtype=np.int64)
    assert find_overlap(group, low, high) is None
    extra = data.draw(st.tuples(*[st.integers(0, 7)] * num_dims))
    low, high = np.vstack([low, [extra]]), np.vstack([high, [[i + 1 for i in extra]]])
    found = find_overlap(np.append(group, 0), low, high)
    assert found is not None and found[1] == len(tiles) and overlap(np.append(group, 0), low, high, *found)
    assert find_overlap(np.append(group, 1), low, high) is None


@pytest.mark.parametrize("shape", [(100_000,), (1000, 100), (50, 40, 50)])
def test_a_grid_of_a_hundred_thousand_boxes(shape: tuple[int, ...]) -> None:
    corner = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), -1).reshape(-1, len(shape))
    order = np.random.default_rng(0).permutation(len(corner))
    low = corner[order] * 3
    high = low + 3
    group = np.zeros(len(low), dtype=np.int64)
    assert find_overlap(group, low, high) is None
    high[12_345, -1] += 1
    if corner[order][12_345, -1] == shape[-1] - 1:
        high[12_345, -1] -= 1
        low[12_345, -1] -= 1
    found = find_overlap(group, low, high)
    assert found is not None and 12_345 in found and overlap(group, low, high, *found)


def test_keys_of_large_numbers_do_not_overflow() -> None:
    n = 5000
    low = np.stack([np.arange(n) * 10**14, np.zeros(n, dtype=np.int64)], 1)
    high = low + np.array([10**14, 10**18])
    group = np.arange(n) // 2  # two boxes a group, thousands of groups far apart
    assert find_overlap(group, low, high) is None
    low[777, 0] -= 10**13
    assert find_overlap(group, low, high) == (776, 777)


@pytest.mark.parametrize("num_dims", [2, 3])
def test_boxes_staggered_in_every_dim(num_dims: int) -> None:
    n = 3000
    steps = np.arange(n)[:, None] * np.ones(num_dims, dtype=np.int64)
    low, high = steps * 2, steps * 2 + 5  # each overlaps its next two in every dim
    low[:, 0], high[:, 0] = np.arange(n) * 5, np.arange(n) * 5 + 5  # and none in the first
    group = np.arange(n) % 2
    assert find_overlap(group, low, high) is None
    high[1500, 0] += 6
    assert find_overlap(group, low, high) == (1500, 1502)
    # Nested boxes fall into the most pieces; each holds the next, but in different groups.
    low, high = (
        np.repeat(np.arange(n)[:, None], num_dims, 1),
        np.repeat(3 * n - np.arange(n)[:, None], num_dims, 1),
    )
    assert find_overlap(np.arange(n), low, high) is None
    group = np.arange(n)
    group[2000] = group[17]
    assert find_overlap(group, low, high) == (17, 2000)


@pytest.mark.parametrize("pairs", [1, 7, 1 << 20])
def test_pairs_answer_as_pieces_do(monkeypatch: pytest.MonkeyPatch, pairs: int) -> None:
    """The way for staggered boxes, forced on boxes of any kind, with blocks that end anywhere."""
    monkeypatch.setattr(tiling, "_MOST_PIECES", 0)
    monkeypatch.setattr(tiling, "_PAIRS", pairs)
    rng = np.random.default_rng(pairs)
    found = 0
    for _ in range(300):
        n, dims = int(rng.integers(2, 12)), int(rng.integers(2, 5))
        group = rng.integers(0, 2, n)
        low = rng.integers(0, 12, (n, dims))
        high = low + rng.integers(1, 6, (n, dims))
        wanted = any(
            group[i] == group[j] and bool(((low[i] < high[j]) & (low[j] < high[i])).all())
            for i in range(n)
            for j in range(i)
        )
        pair = find_overlap(group, low, high)
        assert (pair is not None) == wanted
        if pair is not None:
            i, j = pair
            found += 1
            assert group[i] == group[j] and ((low[i] < high[j]) & (low[j] < high[i])).all()
    assert 0 < found < 300


def test_staggered_boxes_take_bounded_memory() -> None:
    """Thin disjoint rods along all three axes: cut at every edge they would be millions of pieces."""
    n = 700
    at = np.arange(n)
    low = np.zeros((3 * n, 3), dtype=np.int64)
    high = np.full((3 * n, 3), 3 * n, dtype=np.int64)
    for axis, (a, b) in enumerate([(1, 2), (2, 0), (0, 1)]):
        rods = slice(axis * n, (axis + 1) * n)
        # Of two rods along different axes one is at residue 0 and one at 1 in the dim that they share.
        low[rods, a], low[rods, b] = 3 * at, 3 * ((at * 11) % n) + 1
        high[rods, a], high[rods, b] = low[rods, a] + 1, low[rods, b] + 1
    tracemalloc.start()
    assert find_overlap(np.zeros(3 * n, dtype=np.int64), low, high) is None
    assert tracemalloc.get_traced_memory()[1] < 256 << 20
    tracemalloc.stop()
    low[0, 1], high[0, 1] = 0, 3 * n
    assert find_overlap(np.zeros(3 * n, dtype=np.int64), low, high) is not None
