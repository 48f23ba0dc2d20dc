"""What ranks of two grids do in `tests/cases/test_grid_cases.py`, apart so that a process imports little."""

from __future__ import annotations

import torch

from shardweave.layout import Mesh
from shardweave.testing.guard import guard
from shardweave.train.collectives import sum_all
from shardweave.train.grid import GRID, GroupPlan, Groups, Over, Ranks, plan_groups
from shardweave.train.parallel import Parallel

HERE, BESIDE = "here", "beside"


def plan(parallel: Parallel) -> GroupPlan:
    """The ends of the stages of one grid; beside it one whose stages are neighbours, on the same ranks."""
    beside = Mesh((("pp", parallel.pp), ("dp", parallel.dp)), offset=parallel.offset)
    return plan_groups(
        {BESIDE: beside, HERE: parallel.mesh},
        {BESIDE: {"dp": ("dp",), "pp": ("pp",)}, HERE: {"ends": Over(("pp",), (0, -1))}},
    )


def ends(groups: Groups) -> tuple[Ranks, float]:
    """The sum over the ends of the stages of what ranks have: 1, 2, 3 and so on."""
    with guard(groups.of(HERE)):
        group = groups.of(HERE).get(GRID, "ends")
        own = torch.tensor([groups.rank - groups.plan.grids[HERE].offset + 1.0])
        return group.ranks, sum_all(own, group=group).item()
