"""Groups of two grids side by side, made by real processes from one store, and summed over in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import workers
from torch.distributed import FileStore

from shardweave.layout import Mesh, ordered
from shardweave.train.grid import GroupPlan, Over, connect, plan_groups

ENCODER = ordered("tp-dp", {"tp": 1, "dp": 2})
LLM = Mesh((("tp", 2), ("dp", 2)), ((("ep", 4),),), offset=2)
KINDS = {"tp": ("tp",), "dp": ("dp",), "ep": ("ep",), "ends": Over(("tp", "dp"), (0, -1))}


def plan() -> GroupPlan:
    return plan_groups(
        {"encoder": ENCODER, "llm": LLM}, {"encoder": {"tp": ("tp",), "dp": ("dp",)}, "llm": KINDS}
    )


def sums(rank: int, *, folder: Path) -> dict[str, Any]:
    """What the ranks of each group of this rank sum to; nothing of groups that it is not in."""
    groups = connect(plan(), rank=rank, store=FileStore(str(folder / "store"), 6), timeout_s=20)
    found: dict[str, Any] = {}
    for grid, names in groups.plan.names.items():
        for name in names:
            group = groups.find(grid, name)
            if group is None:
                continue
            total = torch.tensor([10**rank])
            if group.comm is not None:
                group.comm.allreduce([total]).wait()
            found[f"{grid}.{name}"] = (group.rank, total.item())
    assert not torch.distributed.is_initialized()
    return found


def test_each_group_sums_its_own_ranks(tmp_path: Path) -> None:
    found = workers.values(workers.run(sums, range(6), folder=tmp_path))
    for rank, mine in found.items():
        grids = {"encoder": ("tp", "dp")} if rank < 2 else {"llm": ("tp", "dp", "ep", "ends")}
        wanted = {}
        for grid, names in grids.items():
            for name in names:
                ranks = plan().ranks(rank, grid, name)
                if ranks is not None:
                    wanted[f"{grid}.{name}"] = (ranks.index(rank), sum(10**other for other in ranks))
        assert mine == wanted
    assert found[0] == {"encoder.tp": (0, 1), "encoder.dp": (0, 11)}
    assert found[4] == {"llm.tp": (0, 110000), "llm.dp": (1, 10100), "llm.ep": (2, 111100)}
    assert found[5]["llm.ends"] == (1, 100100)
