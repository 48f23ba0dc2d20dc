"""A model that follows another one of the same shape, each on a grid of its own.

In reinforcement learning a policy is trained beside a reference that has older weights of it and is only
asked for probabilities. The two need different degrees: one has gradients and states of an optimizer, the
other none. From time to time the reference takes the policy's weights: a plan from one layout to the other,
carried out between the ranks of both, bit for bit, and nobody gathers a whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardweave.errors import PlanError
from shardweave.layout import Layout
from shardweave.move import (
    MEMORY_BYTES,
    CollectiveTransport,
    MemoryTransport,
    Report,
    Schedule,
    Transport,
    replay,
    schedule,
)
from shardweave.plan import Plan, plan
from shardweave.train.collectives import sum_all
from shardweave.train.grid import Group


@dataclass(frozen=True)
class Following:
    """How the weights of one model come to another.

    Attributes:
        steps: What this rank does.
        group: All ranks of both.
    """

    steps: Schedule
    group: Group

    @property
    def plan(self) -> Plan:
        """From the layout of the one to that of the other."""
        return self.steps.plan

    def refresh(self, leader: Mapping[str, Tensor], follower: Mapping[str, Tensor]) -> Report:
        """Take the leader's weights. Every rank of both calls it, and returns when its own part is done.

        Args:
            leader: The weights that this rank has of the leader; empty where it is not in its grid.
            follower: Those of the follower, to write to; padding is left as it is.

        Returns:
            What this rank sent and received.

        Raises:
            PlanError, DtypeError: Arrays are not those of the layouts; on all ranks, before a byte moves.
            TransportError, TransportTimeoutError: A rank is gone or does not come.
        """
        with torch.no_grad():
            src = {name: weight.detach() for name, weight in leader.items()}
            dst = {name: weight.detach() for name, weight in follower.items()}
            self._agree(src, dst)
            return replay(
                self.steps, transport=self._transport({**src, **dst}), src=src, dst=dst, endpoints={}
            )

    def _transport(self, arrays: Mapping[str, Tensor]) -> Transport:
        if self.group.comm is None:  # a rank alone has no messages
            return MemoryTransport({}, rank=self.steps.rank)
        device = str(next((array.device for array in arrays.values()), "cpu"))
        return CollectiveTransport(group=self.group.comm, ranks=self.group.ranks, device=device)

    def _agree(self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor]) -> None:
        """Refuse arrays that are not those of the layouts, on every rank alike."""
        wanted = self.steps.touched
        wrong = ""
        for side, arrays, forms in (("leader", src, wanted[0]), ("follower", dst, wanted[1])):
            for name, (shape, dtype) in forms.items():
                array = arrays.get(name)
                found = "none" if array is None else f"{array.dtype} {tuple(array.shape)}"
                if found != f"{dtype} {tuple(shape)}":
                    wrong = wrong or f"{side}'s {name!r}: {found} != {dtype} {tuple(shape)}"
        count = sum_all(torch.tensor([int(bool(wrong))]), group=self.group)
        if int(count):
            raise PlanError(
                "ranks have the arrays of their layouts when one model follows another",
                where=f"rank {self.steps.rank}",
                equation=wrong or f"{int(count)} other ranks have not",
                hint="give the weights as they were built; a rank of both grids has those of both models",
            )


def follow(leader: Layout, follower: Layout, *, group: Group, memory_bytes: int = MEMORY_BYTES) -> Following:
    """Plan how a model follows another one, once for as long as their layouts stay.

    Args:
        leader: What every rank holds of the leader, by its grid's global ranks.
        follower: The same of the follower.
        group: All ranks of both grids; ``plan_groups(..., across=...)``.
        memory_bytes: The most that a rank sends and receives at a time.

    Raises:
        PlanError: Tensors of the follower are not the leader's, or ranks are not in the group.
        DtypeError: The follower's dtype cannot hold the leader's values.
    """
    strange = sorted({*leader.mesh.ranks, *follower.mesh.ranks} - set(group.ranks))
    if strange:
        raise PlanError(
            "a model follows another one between ranks of one group",
            where=f"group {group.name}",
            equation=f"ranks {', '.join(map(str, strange))} are not in it",
            hint="plan a group across both grids: plan_groups(..., across={'world': (one, other)})",
        )
    way = plan(leader, follower)
    return Following(schedule(way, rank=group.global_rank(group.rank), memory_bytes=memory_bytes), group)
