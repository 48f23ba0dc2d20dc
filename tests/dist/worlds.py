"""The same work on ranks in memory or on real processes: what compares values asks the first, which take a
fraction of the time, and asks the second often enough to see that they agree.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workers
from torch.distributed import FileStore

from shardweave.layout import Mesh
from shardweave.testing.world import run_world
from shardweave.train.grid import GroupPlan, Groups, connect, plan_groups

MEMORY, GLOO = "memory", "gloo"


def plan_of(**axes: int) -> GroupPlan:
    """Groups of each axis and of all, of a grid of these axes."""
    kinds = {**{name: (name,) for name in axes}, "all": tuple(axes)}
    return plan_groups({"model": Mesh(tuple(axes.items()))}, {"model": kinds})


def ranks(
    work: Callable[..., Any], *, plan: GroupPlan, over: str = MEMORY, within_s: float = 50.0, **given: Any
) -> dict[int, Any]:
    """What `work(groups, **given)` returns on each rank of a plan.

    In memory a patch is one for all ranks: where a rank patches something, they are processes.
    """
    members = sorted({rank for mesh in plan.grids.values() for rank in mesh.ranks})
    if over == MEMORY:

        def live(groups: Groups) -> Any:
            return work(groups, **given) if groups.rank in members else None

        found = run_world(live, plan=plan, timeout_s=within_s)
        return {rank: found[rank] for rank in members}
    assert over == GLOO
    with tempfile.TemporaryDirectory() as folder:
        ended = workers.run(
            _connected,
            members,
            task=work,
            plan=plan,
            store=Path(folder) / "store",
            given=given,
            within_s=within_s,
        )
    return workers.values(ended)


def _connected(
    rank: int, *, task: Callable[..., Any], plan: GroupPlan, store: Path, given: dict[str, Any]
) -> Any:
    groups = connect(plan, rank=rank, store=FileStore(str(store), plan.world_size), timeout_s=30)
    found = task(groups, **given)
    assert not torch.distributed.is_initialized(), "something made the global group"
    return found
