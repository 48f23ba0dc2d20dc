"""Training in a world in memory: what one process comes to, and the bits that real processes come to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import train_matrix
import workers
from train_cells import Cell
from train_ranks import batches_of, fill, full_weights, parallel_of, stage_sizes

from shardweave.errors import PlanError
from shardweave.testing.world import run_world
from shardweave.train.grid import Groups
from shardweave.train.runtime import Runtime, build, group_plan
from shardweave.train.step import forward_backward

pytestmark = pytest.mark.timeout(240)
BOUND = train_matrix.BOUNDS["float64"]


def cell(**given: object) -> Cell:
    one = {"tp": 1, "cp": 1, "dp": 1, "pp": 1, "ep": 1, "etp": 1, "vp": 1}
    kind = {"form": "thd", "sharded": True, "mask": "prompt", "lengths": "ragged", "method": "ring"}
    return Cell(**{**one, **kind, **given})  # type: ignore[arg-type]


def built(one: Cell, groups: Groups) -> Runtime:
    config = train_matrix.config_of(one)
    return build(
        config,
        parallel=parallel_of(one),
        groups=groups,
        dtype="float64",
        seed=None,
        stage_sizes=stage_sizes(one, config["num_hidden_layers"]),
        cp_method=one.method,
    )


def in_memory(one: Cell, *, strict: bool) -> dict[int, train_matrix.Told]:
    told = run_world(
        lambda groups: train_matrix.played(built(one, groups), one),
        plan=group_plan(parallel_of(one)),
        timeout_s=100,
        strict=strict,
    )
    return dict(enumerate(told))


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
    found = train_matrix.compare(one, "float64", in_memory(one, strict=True), train_matrix.truth(one))
    print(found)
    assert found.worst[0] <= BOUND, f"beyond {BOUND:g}: {found}"


def test_a_world_in_memory_has_the_bits_of_processes(tmp_path: Path) -> None:
    one = cell(tp=2, cp=2, pp=2, ep=2, etp=2)
    ended = workers.run(
        train_matrix.play, range(8), cells=[one], dtypes=["float64"], folder=tmp_path, within_s=100
    )
    ours, theirs = in_memory(one, strict=False), workers.values(ended)
    for rank, (other,) in theirs.items():
        mine = ours[rank]
        for name in ("loss", "evaluated", "norm", "zeros"):
            assert getattr(mine, name) == getattr(other, name), (rank, name)
        for got, wanted in zip(mine.logprobs, other.logprobs, strict=True):
            np.testing.assert_array_equal(got, wanted)
        for kind in ("grads", "weights"):
            for got, wanted in zip(getattr(mine, kind), getattr(other, kind), strict=True):
                assert got[:2] == wanted[:2]
                np.testing.assert_array_equal(got[2], wanted[2], err_msg=f"rank {rank}, {kind} {got[0]}")


def test_a_mistake_of_one_rank_of_twelve_is_named() -> None:
    one = cell(tp=2, cp=3, dp=2)

    def work(groups: Groups) -> None:
        runtime = built(one, groups)
        fill(runtime, full_weights(train_matrix.config_of(one), runtime.dtype))
        own = runtime.parallel.mesh.coordinate(runtime.rank)["dp"]
        data = 1 - own if runtime.rank == 7 else own
        forward_backward(runtime, batches_of(one, data))

    with pytest.raises(PlanError, match="the ranks of one data rank work on the same tokens") as caught:
        run_world(work, plan=group_plan(parallel_of(one)))
    assert "[7]" in caught.value.equation
