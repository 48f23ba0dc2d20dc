"""Training in a world in memory: what one process comes to, and the bits that real processes come to."""

from __future__ import annotations

import pytest
import train_matrix
from train_cells import Cell
from train_ranks import batches_of, built, fill, full_weights, parallel_of

from shardweave.errors import PlanError
from shardweave.testing.world import run_world
from shardweave.train.grid import Groups
from shardweave.train.runtime import group_plan
from shardweave.train.step import forward_backward

pytestmark = pytest.mark.timeout(240)
BOUND = train_matrix.BOUNDS["float64"]


def cell(**given: object) -> Cell:
    one = {"tp": 1, "cp": 1, "dp": 1, "pp": 1, "ep": 1, "etp": 1, "vp": 1}
    kind = {"form": "thd", "sharded": True, "mask": "prompt", "lengths": "ragged", "method": "ring"}
    return Cell(**{**one, **kind, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "one",
    [
        cell(tp=2, cp=3, dp=2),
        cell(tp=2, cp=3, dp=2, ep=4, method="gather", form="bshd"),
        cell(tp=2, cp=3, dp=2, pp=2, ep=2, etp=2, vp=2, mask="empty_rank"),
    ],
    ids=str,
)
def test_twelve_and_more_ranks_equal_one_process(one: Cell) -> None:
    true = train_matrix.truth(one)  # before a world: torch imports more when an optimizer is made
    found = train_matrix.compare(one, "float64", train_matrix.in_memory(one, "float64", strict=True), true)
    print(found)
    assert found.worst[0] <= BOUND, f"beyond {BOUND:g}: {found}"


def test_a_world_in_memory_has_the_bits_of_processes() -> None:
    one = cell(tp=2, cp=2, pp=2, ep=2, etp=2)
    (theirs,) = train_matrix.on_processes([one], ["float64"])
    assert train_matrix.differences(train_matrix.in_memory(one, "float64"), theirs) == []


def test_a_mistake_of_one_rank_of_twelve_is_named() -> None:
    one = cell(tp=2, cp=3, dp=2)

    def work(groups: Groups) -> None:
        runtime = built(one, groups, train_matrix.config_of(one))
        fill(runtime, full_weights(train_matrix.config_of(one), runtime.dtype))
        own = runtime.parallel.mesh.coordinate(runtime.rank)["dp"]
        data = 1 - own if runtime.rank == 7 else own
        forward_backward(runtime, batches_of(one, data))

    with pytest.raises(PlanError, match="the ranks of one data rank work on the same tokens") as caught:
        run_world(work, plan=group_plan(parallel_of(one)))
    assert "[7]" in caught.value.equation
