"""Whole matrices of the model out of the parts that ranks hold, and back: for what no part can tell alone.

Each matrix has an owner among the ranks that hold some of it, and ``matrix_plan.py`` says who. The others
send it what they have; it computes, once for all, and sends to each rank what that needs. A matrix is that of
the model, whatever way it is cut, with no row of padding: so no bit of the result depends on the layout, on
the owner, or on whether replicas share their state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardweave.errors import UnknownNameError
from shardweave.layout import Box
from shardweave.layout.layout import format_ranks
from shardweave.train.collectives import send_parts
from shardweave.train.grid import Group, Groups, Ranks
from shardweave.train.matrix_plan import Choose, MatrixPlan, plan_matrices
from shardweave.train.muon import newton_schulz
from shardweave.train.reduction import ReducePlan


class Matrices:
    """The matrices of a rank, and the messages by which they come together.

    Attributes:
        plan: Who has and does what.
        group: All ranks that take part.
    """

    def __init__(self, plan: ReducePlan, choose: Choose, groups: Groups, *, sharded: bool) -> None:
        """Plan the messages.

        Args:
            plan: How gradients are summed: the state lies where they end up.
            choose: The settings of arrays.
            groups: The groups of this rank.
            sharded: Whether replicas share the state.

        Raises:
            GapError: Some ranks that hold a matrix treat it in another way.
            UnknownNameError: The ranks that hold parts of matrices have no group.
        """
        self.plan = plan_matrices(plan, choose, sharded=sharded)
        self.group = _group_of(groups, self.plan.ranks)
        self._rank = plan.rank
        self._rounds = tuple(
            _round(self.plan, dtype, self.group)
            for dtype in sorted({matrix.dtype for matrix in self.plan.matrices}, key=str)
        )

    def orthogonalise(self, flats: Sequence[Tensor]) -> None:
        """Make directions orthogonal, in place. All ranks of the group call it at the same time.

        Args:
            flats: For each bucket what this rank has of it, as ``sum_gradients`` gives them.
        """
        for each in self._rounds:
            self._run(each, flats)

    def _run(self, each: _Round, flats: Sequence[Tensor]) -> None:
        matrices, places = self.plan.matrices, self.plan.places
        device = flats[0].device if flats else torch.device("cpu")

        def mine(keys: _Keys) -> Iterator[Tensor]:
            return (places[key].view(flats) for key in keys)

        came = self._swap(each, [[*mine(keys)] for keys in each.to_owner], each.from_sender, device)
        results: dict[int, Tensor] = {}
        for number in each.owned:
            matrix = matrices[number]
            whole = torch.empty(matrix.shape, dtype=each.dtype, device=device)
            for at, block in enumerate(matrix.blocks):
                key = number, at
                _of(whole, block.box).copy_(came[key] if key in came else places[key].view(flats))
            results[number] = newton_schulz(whole, matrix.settings)

        def done(keys: _Keys) -> list[Tensor]:
            return [_of(results[number], matrices[number].blocks[at].box) for number, at in keys]

        came = self._swap(each, [done(keys) for keys in each.to_holder], each.from_owner, device)
        for key, values in came.items():
            places[key].view(flats).copy_(values)
        for number in each.owned:
            for at, block in enumerate(matrices[number].blocks):
                if self._rank in block.ranks:
                    places[number, at].view(flats).copy_(_of(results[number], block.box))

    def _swap(
        self, each: _Round, out: Sequence[list[Tensor]], into: Sequence[_Keys], device: torch.device
    ) -> dict[tuple[int, int], Tensor]:
        """Send blocks to each rank, and receive those of the given numbers."""
        boxes = [[self.plan.matrices[n].blocks[at].box for n, at in keys] for keys in into]
        if not any(map(len, out)) and not any(map(len, into)) and self.group.comm is None:
            return {}
        nothing = torch.empty(0, dtype=each.dtype, device=device)
        parts = [torch.cat([b.to(each.dtype).reshape(-1) for b in some]) if some else nothing for some in out]
        came = [nothing.new_empty(sum(box.numel for box in some)) for some in boxes]
        send_parts(parts, came, group=self.group)
        return {
            key: values.view(box.shape)
            for keys, some, flat in zip(into, boxes, came, strict=True)
            for key, box, values in zip(keys, some, flat.split([box.numel for box in some]), strict=True)
        }


_Keys = Sequence[tuple[int, int]]
"""Blocks by the numbers of matrix and block."""


class _Round(NamedTuple):
    """The messages of one dtype: for each rank of the group, the blocks that go to it or come from it."""

    dtype: torch.dtype
    owned: tuple[int, ...]
    to_owner: tuple[_Keys, ...]
    from_sender: tuple[_Keys, ...]
    to_holder: tuple[_Keys, ...]
    from_owner: tuple[_Keys, ...]


def _round(plan: MatrixPlan, dtype: torch.dtype, group: Group) -> _Round:
    me = group.ranks[group.rank]
    lists: tuple[dict[int, list[tuple[int, int]]], ...] = tuple(defaultdict(list) for _ in range(4))
    to_owner, from_sender, to_holder, from_owner = lists
    some = [(n, matrix) for n, matrix in enumerate(plan.matrices) if matrix.dtype == dtype]
    for number, matrix in some:
        for at, block in enumerate(matrix.blocks):
            if block.sender != matrix.owner:
                if block.sender == me:
                    to_owner[matrix.owner].append((number, at))
                if matrix.owner == me:
                    from_sender[block.sender].append((number, at))
            for rank in block.ranks:
                if rank != matrix.owner == me:
                    to_holder[rank].append((number, at))
                if rank == me != matrix.owner:
                    from_owner[matrix.owner].append((number, at))
    owned = tuple(number for number, matrix in some if matrix.owner == me)
    return _Round(dtype, owned, *(tuple(each[rank] for rank in group.ranks) for each in lists))


def _of(matrix: Tensor, box: Box) -> Tensor:
    rows, columns = (slice(r.start, r.stop, r.step) for r in box.dims)
    return matrix[rows, columns]


def _group_of(groups: Groups, ranks: Ranks) -> Group:
    """The smallest group of this rank that has all these ranks."""
    if ranks == (groups.rank,):
        return Group("alone", ranks, 0)
    found = [groups.find(grid, name) for grid, names in groups.plan.names.items() for name in names]
    fit = [group for group in found if group is not None and set(ranks) <= set(group.ranks)]
    if not fit:
        raise UnknownNameError(
            "ranks that hold parts of a matrix have a group",
            where=f"rank {groups.rank}",
            equation=f"{format_ranks(ranks)} are in no group of {', '.join(groups.plan.names)}",
            hint="plan a group of all ranks of a stage",
        )
    return min(fit, key=lambda group: group.size)
