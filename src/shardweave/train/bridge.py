"""From the activations of one grid to those of another: a plan, and its adjoint.

Two modules of one job lie on ranks of their own, on the same ones, or on some in common, each with its own
degrees. What one computes the other goes on with, row by row: a patch of an image, a token. Which rows a rank
has is a dim, as with weights, so that the way from one grid to the other is a ``Plan``, proved before a row
moves: every row that is wanted comes from the rank that has it, once, whatever the numbers of ranks are.

On each side, a row is on one rank: between blocks ranks have slots of their own. The bridge is then a
permutation of rows over all ranks of both grids, and its adjoint the inverse one. Nothing is summed, nothing
is sent twice, and no scale appears.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardweave.errors import PlanError
from shardweave.layout import BufferRule, Dim, Layout, Mesh, Part, Run, along
from shardweave.layout import Tensor as Logical
from shardweave.plan import Plan, plan
from shardweave.train.collectives import exchange
from shardweave.train.grid import Group

Ints = NDArray[np.int64]

ROWS = "rows"
"""The name of what is moved."""


def rows_on(
    mesh: Mesh, axes: Sequence[str], held: Callable[..., Ints], *, num_rows: int, width: int
) -> Layout:
    """The layout of rows over the ranks of a grid; ranks that differ on other axes are not there.

    Args:
        mesh: The ranks.
        axes: The axes over which rows are cut; of the others the first rank has them.
        held: For a coordinate on each axis, the rows that a rank has, in the order in which it has them.
        num_rows: How many there are in all.
        width: Elements of a row.

    >>> mesh = Mesh((("dp", 2), ("pp", 2)), offset=4)
    >>> found = rows_on(mesh, ("dp",), lambda d: np.arange(d, 5, 2), num_rows=5, width=8)
    >>> [len(buffer.dims[0]) for rank in mesh.ranks for buffer in found.buffers(rank)]
    [3, 2]
    """
    rows = Logical(ROWS, (num_rows, width), "float32")
    others = tuple((name, (0,)) for name, size in mesh.axes if name not in axes and size > 1)
    dim = along(mesh, tuple(axes), lambda *at: Dim(_runs(held(*at))))
    return Layout(ROWS, mesh, (BufferRule(ROWS, (Part(rows),), (dim, *rows.dims[1:]), where=others),))


def _runs(rows: Ints) -> list[Run]:
    """Numbers as runs of consecutive ones."""
    if not len(rows):
        return []
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    starts, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(rows)]])
    return [
        Run("", int(rows[start]), int(end - start))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class Bridge:
    """Rows from where one grid has them to where another one wants them.

    Attributes:
        plan: The way, proved.
        group: All ranks of both grids.

    Laws:
        ``backward`` of ``over`` is the inverse permutation: its gradients are where the rows came from.
        What is sent between ranks has the size of the rows that are wanted by other ranks, each once.
    """

    plan: Plan
    group: Group

    @property
    def moved(self) -> int:
        """Elements of rows that all ranks send to other ones."""
        return sum(
            int(family.numel[family.box][family.src != family.dst].sum()) for family in self.plan.families
        )

    @cached_property
    def _indices(self) -> tuple[list[Ints], list[Ints]]:
        """For each rank of the group, which of my rows go to it, and where those of it come to lie here."""
        me = self.group.global_rank(self.group.rank)
        out: list[list[Ints]] = [[] for _ in self.group.ranks]
        into: list[list[Ints]] = [[] for _ in self.group.ranks]
        place = {rank: i for i, rank in enumerate(self.group.ranks)}
        for family in self.plan.families:
            for box, src, dst in zip(
                family.box.tolist(), family.src.tolist(), family.dst.tolist(), strict=True
            ):
                count = int(family.count[box, 0])
                if src == me:
                    at, step = int(family.src_at[box, 0]), int(family.src_step[box, 0])
                    out[place[dst]].append(at + step * np.arange(count))
                if dst == me:
                    at, step = int(family.dst_at[box, 0]), int(family.dst_step[box, 0])
                    into[place[src]].append(at + step * np.arange(count))
        empty = np.zeros(0, dtype=np.int64)
        return [np.concatenate([empty, *each]) for each in out], [
            np.concatenate([empty, *each]) for each in into
        ]

    def over(self, rows: Tensor) -> Tensor:
        """This rank's rows of the second grid, given those of the first. Every rank of both calls it.

        Args:
            rows: What this rank has of the first grid's rows, ``(held, width)``; none where it is not in it.
                Its gradient is the second grid's, once every rank takes its backward.

        Raises:
            PlanError: It has another number of rows than the plan says.
        """
        out, into = self._indices
        held = sum(map(len, out))
        if rows.shape[0] != held:
            raise PlanError(
                "a rank has the rows that the plan says",
                where=f"rank {self.group.global_rank(self.group.rank)}",
                equation=f"rows({rows.shape[0]}) != held({held})",
                hint="both sides are described from one batch; describe what this rank computed",
            )
        device = rows.device
        parts = rows.index_select(0, torch.from_numpy(np.concatenate(out)).to(device))
        arrived = exchange(parts, [len(one) for one in out], [len(one) for one in into], group=self.group)
        order = torch.from_numpy(np.argsort(np.concatenate(into), kind="stable")).to(device)
        return arrived.index_select(0, order)


def bridge(src: Layout, dst: Layout, *, group: Group) -> Bridge:
    """The way from one layout of rows to another.

    Args:
        src: From ``rows_on``: every row on one rank.
        dst: The same of the other grid.
        group: All ranks of both.

    Raises:
        PlanError: Ranks of a grid are not in the group, or the layouts are of different rows.
        GapError, OverlapError: A row is on no rank of a side, or on two.
    """
    strange = sorted({*src.mesh.ranks, *dst.mesh.ranks} - set(group.ranks))
    if strange:
        raise PlanError(
            "a bridge is between ranks of one group",
            where=f"group {group.name}",
            equation=f"ranks {', '.join(map(str, strange))} are not in it",
            hint="plan a group across both grids: plan_groups(..., across={'world': (one, other)})",
        )
    return Bridge(plan(src, dst), group)
