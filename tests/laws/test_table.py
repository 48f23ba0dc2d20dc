"""Joins and atoms of many dims against brute force, index by index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import crowded_dims

from shardweave.errors import CutError
from shardweave.layout import Dim, Run, whole
from shardweave.layout import table as table_module
from shardweave.layout.table import Table, atoms, join, table

HUGE = 10**12
dim_lists = st.lists(crowded_dims, max_size=4)
labels = st.sampled_from(["", "", "", "q"])


def holders(given_dims: list[Dim], label: str) -> dict[int, list[tuple[int, int]]]:
    """Every index of a label: the entries and positions that hold it."""
    found: dict[int, list[tuple[int, int]]] = {}
    for entry, dim in enumerate(given_dims):
        for position, (of, index) in enumerate(dim):
            if of == label:
                found.setdefault(index, []).append((entry, position))
    return found


def walk(rows: Table, i: int) -> list[tuple[int, int]]:
    """The indices of a row, with their places in storage."""
    return [
        (int(rows.start[i] + k * rows.step[i]), int(rows.at[i] + k * rows.stride[i]))
        for k in range(int(rows.count[i]))
    ]


@given(dim_lists, labels)
def test_table(given_dims: list[Dim], label: str) -> None:
    rows = table(given_dims, label)
    found: dict[int, list[tuple[int, int]]] = {}
    for i in range(len(rows)):
        for index, position in walk(rows, i):
            found.setdefault(index, []).append((int(rows.entry[i]), position))
    assert {index: sorted(held) for index, held in found.items()} == holders(given_dims, label)


@given(dim_lists, labels, dim_lists, labels)
def test_join(dims_a: list[Dim], label_a: str, dims_b: list[Dim], label_b: str) -> None:
    a, b = table(dims_a, label_a), table(dims_b, label_b)
    common = join(a, b)
    pairs = []
    for i in range(len(common)):
        row_a, row_b = int(common.row_a[i]), int(common.row_b[i])
        for k in range(int(common.count[i])):
            index = int(common.start[i] + k * common.step[i])
            at_a, at_b = (
                int(common.at_a[i] + k * common.stride_a[i]),
                int(common.at_b[i] + k * common.stride_b[i]),
            )
            assert (index, at_a) in walk(a, row_a) and (index, at_b) in walk(b, row_b)
            pairs.append((index, (int(a.entry[row_a]), at_a), (int(b.entry[row_b]), at_b)))
    held_a, held_b = holders(dims_a, label_a), holders(dims_b, label_b)
    expected = [
        (index, one, other)
        for index in held_a.keys() & held_b.keys()
        for one in held_a[index]
        for other in held_b[index]
    ]
    assert sorted(pairs) == sorted(expected)


@given(dim_lists, labels)
def test_atoms(given_dims: list[Dim], label: str) -> None:
    found = atoms(table(given_dims, label))
    expected = holders(given_dims, label)
    seen: dict[int, list[tuple[int, int]]] = {}
    assert len(found.first) == len(found.pieces) + 1 and found.first[-1] == len(found.holders)
    assert found.pieces.entry.tolist() == list(range(len(found.pieces)))
    for atom in range(len(found.pieces)):
        indices = [index for index, _ in walk(found.pieces, atom)]
        assert indices and [at for _, at in walk(found.pieces, atom)] == list(range(len(indices)))
        for index in indices:
            assert index not in seen
            seen[index] = []
        for row in range(int(found.first[atom]), int(found.first[atom + 1])):
            held = walk(found.holders, row)
            # Each holder lists the indices of the atom in the atom's order.
            assert [index for index, _ in held] == indices
            for index, position in held:
                seen[index].append((int(found.holders.entry[row]), position))
    assert {index: sorted(held) for index, held in seen.items()} == expected


@given(dim_lists, labels)
def test_a_join_with_atoms_gives_positions_inside_them(given_dims: list[Dim], label: str) -> None:
    rows = table(given_dims, label)
    pieces = atoms(rows).pieces
    common = join(pieces, rows)
    assert int(common.count.sum()) == sum(len(held) for held in holders(given_dims, label).values())
    for i in range(len(common)):
        atom = int(common.row_a[i])
        for k in range(int(common.count[i])):
            index = int(common.start[i] + k * common.step[i])
            assert walk(pieces, atom)[int(common.at_a[i] + k * common.stride_a[i])][0] == index


def test_the_cost_is_in_runs() -> None:
    a = table([whole(HUGE), Dim([Run("", HUGE, HUGE)])], "")
    b = table([Dim([Run("", r, HUGE, 2)]) for r in range(2)], "")
    common = join(a, b)
    assert sorted(zip(common.row_a.tolist(), common.row_b.tolist(), common.count.tolist(), strict=True)) == [
        (0, 0, HUGE // 2),
        (0, 1, HUGE // 2),
        (1, 0, HUGE // 2),
        (1, 1, HUGE // 2),
    ]
    found = atoms(table([whole(HUGE), Dim([Run("", 1, HUGE // 6, 3)])], ""))
    assert int(found.pieces.count.sum()) == HUGE
    assert sorted(np.diff(found.first).tolist()) == [1, 1, 1, 2]


def test_a_short_run_has_no_more_phases_than_indices() -> None:
    assert join(table([whole(3)], ""), table([Dim([Run("", 0, 9, 10**9 + 7)])], "")).start.tolist() == [0]


def test_steps_without_a_small_common_multiple_are_refused() -> None:
    a = table([Dim([Run("", 0, 10**9, 1_000_003)])], "")
    b = table([Dim([Run("", 0, 10**9, 1_300_021)])], "")
    with pytest.raises(CutError) as caught:
        join(a, b)
    error = caught.value
    assert all([error.rule, error.where, error.equation, error.hint])
    assert f"lcm({1_000_003 * 1_300_021})" in error.equation


def test_many_runs_are_no_phases() -> None:
    n = 1_200_000
    column = np.arange(n, dtype=np.int64)
    ones, none = np.ones(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    rows = Table(none, 2 * column, ones, ones, column, ones)
    assert len(join(rows, rows)) == n
    assert len(join(rows, table([Dim([Run("", 0, n // 2, 4)])], ""))) == n // 2


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=12)


@given(intervals, intervals)
def test_few_pairs_are_compared_and_many_are_sorted_alike(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    low_a, low_b = (np.array([low for low, _ in side], dtype=np.int64) for side in (a, b))
    high_a, high_b = (np.array([low + size for low, size in side], dtype=np.int64) for side in (a, b))
    wanted = [
        (i, j) for i in range(len(a)) for j in range(len(b)) if low_a[i] < high_b[j] and low_b[j] < high_a[i]
    ]
    for few in (0, 1 << 10):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table_module, "_FEW_PAIRS", few)
            i, j = table_module._overlaps(low_a, high_a, low_b, high_b)
        assert list(zip(i.tolist(), j.tolist(), strict=True)) == wanted
