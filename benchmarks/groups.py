"""How many communicators a rank makes, beside what Megatron's parallel_state makes at the same degrees.

    python benchmarks/groups.py           1,024 and 16,384 ranks; a second
    python benchmarks/groups.py --tiny    8 and 16 ranks

Nothing is started and nothing is connected: both sides are counted from the lists of ranks.
``torch.distributed.new_group`` is called by every rank for every group, whoever is in it, so that a rank of
Megatron makes one call for each list of each kind: also for lists of one rank, and for lists that another
kind has too. Here a rank makes what it is in, each list once, and none where it is alone. What it is in are
the groups of ``Parallel.groups``: those that ``shardweave train`` makes.

megatron-core 0.16.1 itself makes one call more than its kinds have lists, and those of gloo by default
besides; ``tests/oracle/test_megatron_groups.py`` counts them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass

from shardweave.train.grid import GroupPlan, Over, plan_groups
from shardweave.train.parallel import Parallel

UPSTREAM: Mapping[str, Over] = {
    "TENSOR_MODEL_PARALLEL_GROUP": Over(("tp",)),
    "CONTEXT_PARALLEL_GROUP": Over(("cp",)),
    "DATA_PARALLEL_GROUP": Over(("dp",)),
    "DATA_PARALLEL_GROUP_WITH_CP": Over(("cp", "dp")),
    "PIPELINE_MODEL_PARALLEL_GROUP": Over(("pp",)),
    "MODEL_PARALLEL_GROUP": Over(("tp", "pp")),
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": Over(("tp", "cp")),
    "TENSOR_AND_DATA_PARALLEL_GROUP": Over(("tp", "dp")),
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": Over(("tp", "cp", "dp")),
    "EMBEDDING_GROUP": Over(("pp",), (0, -1)),
    "POSITION_EMBEDDING_GROUP": Over(("pp",), (0,)),
    "EXPERT_MODEL_PARALLEL_GROUP": Over(("ep",)),
    "EXPERT_TENSOR_PARALLEL_GROUP": Over(("etp",)),
    "EXPERT_DATA_PARALLEL_GROUP": Over(("edp",)),
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": Over(("etp", "ep")),
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": Over(("etp", "ep", "pp")),
}
"""The kinds of groups of ``megatron.core.parallel_state``, by their descriptions, on one grid."""

LARGE = {
    "1,024 ranks": {"language": Parallel(tp=8, cp=2, pp=8, dp=8, ep=8)},
    "16,384 ranks": {"language": Parallel(tp=8, cp=2, pp=16, dp=64, ep=64)},
    "1,024 ranks, an encoder on half of them": {
        "language": Parallel(tp=8, cp=2, pp=8, dp=8, ep=8),
        "vision": Parallel(tp=2, dp=256, offset=512),
    },
}
TINY = {
    "8 ranks": {"language": Parallel(tp=2, pp=2, dp=2, ep=2)},
    "16 ranks, an encoder on half of them": {
        "language": Parallel(tp=2, cp=2, pp=2, dp=2, ep=2),
        "vision": Parallel(tp=2, dp=4, offset=8),
    },
}


@dataclass(frozen=True)
class Counted:
    """Communicators of a world.

    Attributes:
        upstream: The calls of every rank, where each makes every list of every kind of every grid.
        most: The calls of the busiest rank here, and ``mean`` of a rank on average.
        total: The communicators that there are then, all ranks together.
        plan_s: How long it took to plan them.
    """

    upstream: int
    most: int
    mean: float
    total: int
    plan_s: float


def counted(grids: Mapping[str, Parallel]) -> Counted:
    """Both sides of one world."""
    upstream = upstream_plan(grids)
    begin = time.perf_counter()
    across = {"world": tuple(grids)} if len(grids) > 1 else {}
    meshes = {name: of.mesh for name, of in grids.items()}
    plan = plan_groups(meshes, {name: of.groups for name, of in grids.items()}, across=across)
    took = time.perf_counter() - begin
    return Counted(upstream.num_groups, plan.most_calls, plan.mean_calls, len(plan.communicators), took)


def upstream_plan(grids: Mapping[str, Parallel]) -> GroupPlan:
    """The kinds of Megatron on each grid."""
    return plan_groups({name: of.mesh for name, of in grids.items()}, dict.fromkeys(grids, UPSTREAM))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="worlds of a few ranks")
    given = parser.parse_args(arguments)
    print(f"{'':40} {'upstream':>9} {'most':>6} {'mean':>7} {'ratio':>8} {'in all':>8} {'seconds':>8}")
    for name, grids in (TINY if given.tiny else LARGE).items():
        one = counted(grids)
        print(
            f"{name:40} {one.upstream:9,} {one.most:6} {one.mean:7.3f} {one.most / one.upstream:8.4%} "
            f"{one.total:8,} {one.plan_s:8.3f}"
        )


if __name__ == "__main__":
    main()
