"""The runtime equals one process at every layout: log-probabilities, loss, gradients, norm, two updates.

Ranks are threads of one process, but for some cells of 2, 4 and 8 ranks, which are processes too.
"""

from __future__ import annotations

import itertools

import pytest
import train_matrix
from train_cells import Cell, all_cells, pairwise

CELLS = pairwise()
BY_SIZE = {size: list(cells) for size, cells in itertools.groupby(CELLS, key=lambda cell: cell.world_size)}
PARTS = [
    pytest.param(cells[at : at + 4], id=f"{size} ranks, {at} to {at + len(cells[at : at + 4]) - 1}")
    for size, cells in BY_SIZE.items()
    for at in range(0, len(cells), 4)
]


def test_the_cells_have_every_pair_of_choices() -> None:
    left = set().union(*(cell.pairs for cell in all_cells())) - set().union(*(cell.pairs for cell in CELLS))
    assert not left


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cells", PARTS)
def test_a_layout_equals_one_process(cells: list) -> None:
    found = list(train_matrix.run(cells, list(train_matrix.BOUNDS)))
    for errors in found:
        print(errors)
    for dtype, bound in train_matrix.BOUNDS.items():
        worst = train_matrix.worst_of(found, dtype)
        assert worst.worst[0] <= bound, f"beyond {bound:g}: {worst}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cell", train_matrix.ON_PROCESSES, ids=str)
def test_processes_come_to_the_same_bits(cell: Cell) -> None:
    """What is compared above in memory is what processes over gloo have."""
    true, bounds = train_matrix.truth(cell), train_matrix.BOUNDS
    for dtype, told in zip(bounds, train_matrix.on_processes([cell], list(bounds)), strict=True):
        errors = train_matrix.compare(cell, dtype, told, true)
        print(errors)
        assert errors.worst[0] <= bounds[dtype], f"beyond {bounds[dtype]:g}: {errors}"
        assert not train_matrix.differences(told, train_matrix.in_memory(cell, dtype)), dtype


def test_processes_are_of_every_size_and_cut_over_every_axis() -> None:
    cells = train_matrix.ON_PROCESSES
    assert [cell.world_size for cell in cells] == [2, 4, 8]
    assert all(cell.valid for cell in cells)
    for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "vp"):
        assert max(getattr(cell, axis) for cell in cells) > 1, axis


@pytest.mark.timeout(240)
def test_in_bfloat16_a_layout_is_as_near_as_one_rank() -> None:
    """Rounding is of the size of what is compared, so a layout is held against one rank and not a bound.

    Threefold, as these are largest errors, and each rank rounds its part of a sum before it is added.
    """
    one = Cell("thd", 1, 1, 1, 1, 1, 1, 1, False, "all", "ragged", "ring")
    many = [
        Cell("thd", 2, 2, 1, 1, 2, 2, 1, True, "all", "ragged", "ring"),
        Cell("bshd", 1, 2, 1, 2, 2, 1, 2, False, "all", "ragged", "gather"),
    ]
    (alone,) = train_matrix.run([one], ["bfloat16"])
    for errors in train_matrix.run(many, ["bfloat16"]):
        print(alone, errors, sep="\n")
        for kind in ("logprobs", "grads"):
            assert errors.by_kind[kind][0] <= 3 * alone.by_kind[kind][0], (kind, alone, errors)
