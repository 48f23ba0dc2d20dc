"""Process groups of meshes: planned for every rank without torch, then made for one.

``plan_groups`` is arithmetic: which lists of ranks need a communicator, and who is in which. It can be
printed and compared for any world, also one of 16,384 ranks, before a process exists. ``connect`` makes the
communicators of one rank from a store. No global group is read or made, so that several grids, an encoder's
beside a language model's, live in one world and cannot be mixed up.

- Equal lists of ranks share a communicator; a list of one rank needs none.
- All ranks make what they share in one order, so that none waits for another in a ring.
- A rank that is not a member of a group is told so, and a group that nobody planned is an error: neither
  is ever rank 0 of 1 by default.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from shardweave.errors import GeometryError, MeshError, TransportError, UnknownNameError
from shardweave.layout import Mesh
from shardweave.layout.layout import format_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Ranks = tuple[int, ...]


# --- plans --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Over:
    """Groups over some axes of a mesh, or of some of their members.

    Attributes:
        axes: The axes that the members of a group differ on.
        members: Positions in each group of those that are in it, negative ones from the end; all by default.
            The first and the last stage of a pipeline are ``Over(("pp",), (0, -1))``.

    >>> list(Over(("pp",), (0, -1)).groups(Mesh((("tp", 2), ("pp", 3)))))
    [(0, 4), (1, 5)]
    """

    axes: tuple[str, ...]
    members: tuple[int, ...] | None = None

    def groups(self, mesh: Mesh) -> Iterator[Ranks]:
        """The lists of ranks, each ascending."""
        for ranks in mesh.groups(*self.axes):
            if self.members is None:
                yield ranks
            else:
                yield tuple(sorted({ranks[at] for at in self.members}))


@dataclass(frozen=True)
class GroupPlan:
    """Which groups there are in a world.

    Attributes:
        grids: The meshes by name.
        names: For each grid, its groups by name.
        communicators: The lists of ranks that need one, in the order in which they are made.

    Laws:
        Same input, same plan, on every rank.
        No two communicators have the same ranks, and none has one rank.
        The groups of one name of a grid are disjoint.
    """

    grids: Mapping[str, Mesh]
    names: Mapping[str, Mapping[str, Over]]
    communicators: tuple[Ranks, ...]

    @property
    def world_size(self) -> int:
        """One more than the highest rank of a grid."""
        return max(mesh.ranks.stop for mesh in self.grids.values())

    @cached_property
    def of_rank(self) -> Mapping[int, tuple[int, ...]]:
        """The numbers of the communicators that each rank is a member of, ascending."""
        found: dict[int, list[int]] = {}
        for number, ranks in enumerate(self.communicators):
            for rank in ranks:
                found.setdefault(rank, []).append(number)
        return {rank: tuple(numbers) for rank, numbers in found.items()}

    def ranks(self, rank: int, grid: str, name: str) -> Ranks | None:
        """The group of a rank, or ``None`` where it is not a member of any of that name.

        Raises:
            UnknownNameError: There is no such grid or group.
        """
        mesh, over = self.grids.get(grid), self.names.get(grid, {}).get(name)
        if mesh is None or over is None:
            known = ", ".join(f"{g}.{n}" for g, names in self.names.items() for n in names)
            raise UnknownNameError(
                "a group that is asked for was planned",
                where=f"rank {rank}",
                equation=f"{grid}.{name} is not among {known}",
                hint="plan it with plan_groups(); a group is never made on the side",
            )
        if rank not in mesh.ranks:
            return None
        group = mesh.group(rank, *over.axes)
        if over.members is not None:
            group = tuple(sorted({group[at] for at in over.members}))
        return group if rank in group else None

    def __str__(self) -> str:
        most = max((len(numbers) for numbers in self.of_rank.values()), default=0)
        lines = [
            f"{self.world_size} ranks, {len(self.communicators)} communicators, "
            f"a rank is in {most} of them at most"
        ]
        for grid, names in self.names.items():
            mesh = self.grids[grid]
            lines.append(f"{grid}: {mesh}")
            for name, over in names.items():
                groups = list(over.groups(mesh))
                sizes = sorted({len(ranks) for ranks in groups})
                first = format_ranks(groups[0], 4)
                lines.append(
                    f"  {name}: {len(groups)} of {', '.join(map(str, sizes))} ranks, the first {first}"
                )
        return "\n".join(lines)


def plan_groups(
    grids: Mapping[str, Mesh], groups: Mapping[str, Mapping[str, Sequence[str] | Over]]
) -> GroupPlan:
    """Which communicators the groups of some grids need.

    Args:
        grids: Meshes of one world by name. Two have the same ranks, or none in common.
        groups: For each grid, the axes of each group by name.

    Raises:
        MeshError: Two grids overlap in part, an axis is not of its mesh, or of no one factorisation with the
            others of its group.
        UnknownNameError: Groups are given of a grid that there is not.

    >>> mesh = Mesh((("tp", 2), ("dp", 2)))
    >>> plan = plan_groups({"llm": mesh}, {"llm": {"tp": ("tp",), "dp": ("dp",), "all": ("tp", "dp")}})
    >>> print(plan)
    4 ranks, 5 communicators, a rank is in 3 of them at most
    llm: tp=2,dp=2
      tp: 2 of 2 ranks, the first ranks 0, 1
      dp: 2 of 2 ranks, the first ranks 0, 2
      all: 1 of 4 ranks, the first ranks 0, 1, 2, 3
    """
    strange = sorted(set(groups) - set(grids))
    if strange:
        raise UnknownNameError(
            "groups are those of a grid",
            equation=f"{', '.join(strange)} not among grids({', '.join(grids)})",
            hint="name each grid in both arguments",
        )
    _check_apart(grids)
    names = {
        grid: {name: axes if isinstance(axes, Over) else Over(tuple(axes)) for name, axes in of.items()}
        for grid, of in groups.items()
    }
    wanted = {
        ranks: None
        for grid, of in names.items()
        for over in of.values()
        for ranks in over.groups(grids[grid])
        if len(ranks) > 1
    }
    return GroupPlan(dict(grids), names, tuple(wanted))


def _check_apart(grids: Mapping[str, Mesh]) -> None:
    items = sorted(grids.items(), key=lambda item: (item[1].offset, item[1].size))
    for (a, first), (b, second) in itertools.pairwise(items):
        if first.ranks != second.ranks and second.offset < first.ranks.stop:
            raise MeshError(
                "two grids have the same ranks or none in common",
                where=f"grids {a!r} and {b!r}",
                equation=f"ranks {first.offset}..{first.ranks.stop - 1} and "
                f"{second.offset}..{second.ranks.stop - 1} overlap",
                hint="give the second one an offset, or make both of the same size",
            )


# --- groups of one rank -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """What one rank knows of a group that it is in.

    Attributes:
        name: As planned.
        ranks: Its global ranks, ascending. Position in it is the rank in the group.
        rank: This rank's position.
        comm: The communicator (a process group of torch); ``None`` where there is nobody else.
    """

    name: str
    ranks: Ranks
    rank: int
    comm: Any = None

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank comes first in it, as the source of what all of it shall have."""
        return self.rank == 0

    def global_rank(self, position: int) -> int:
        """The global rank at a position, counted round: -1 is the last, ``size`` the first again."""
        return self.ranks[position % len(self.ranks)]


class Groups:
    """The groups of one rank of one world, by grid and name."""

    def __init__(self, plan: GroupPlan, rank: int, comms: Mapping[Ranks, Any]) -> None:
        self.plan, self.rank = plan, rank
        self._comms = dict(comms)
        self._known: dict[tuple[str, str], Group | None] = {}

    def find(self, grid: str, name: str) -> Group | None:
        """A group, or ``None`` where this rank is not a member of any of that name.

        Raises:
            UnknownNameError: Nobody planned it.
        """
        key = grid, name
        if key not in self._known:
            ranks = self.plan.ranks(self.rank, grid, name)
            self._known[key] = (
                None
                if ranks is None
                else Group(f"{grid}.{name}", ranks, ranks.index(self.rank), self._comms.get(ranks))
            )
        return self._known[key]

    def get(self, grid: str, name: str) -> Group:
        """A group that this rank is a member of.

        Raises:
            UnknownNameError: Nobody planned it.
            GeometryError: This rank is not a member.
        """
        found = self.find(grid, name)
        if found is None:
            raise GeometryError(
                "a rank uses groups that it is a member of",
                where=f"rank {self.rank}, group {grid}.{name}",
                equation=f"rank({self.rank}) in no group of that name on {self.plan.grids[grid]}",
                hint="ask find(), which says None, where not every rank is a member",
            )
        return found

    def close(self) -> None:
        """Let go of all communicators, each once. Whoever waits in one of them is freed, with an error.

        Groups that were handed out refuse to send from here on. They may be held by graphs and frames that
        live on; a communicator would live, and its peers wait, as long as any of them.
        """
        comms, self._comms = self._comms, {ranks: _Closed(ranks) for ranks in self._comms}
        for group in self._known.values():
            if group is not None and group.comm is not None:
                object.__setattr__(group, "comm", self._comms[group.ranks])
        while comms:
            _, comm = comms.popitem()
            if isinstance(comm, _Closed):
                continue
            if comm.name() in ("nccl", "memory"):
                comm.abort()


class _Closed:
    """What a closed group has for a communicator."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> NoReturn:
        raise TransportError(
            "a group that was closed is not used again",
            where=format_ranks(self._ranks, 4),
            equation=f"{name}() after close()",
            hint="a step failed on some rank, whose error says why; connect() makes new groups",
        )


def connect(
    plan: GroupPlan, *, rank: int, store: Store, backend: str = "gloo", timeout_s: float = 60.0
) -> Groups:
    """Make the communicators of a rank. Every rank of the world calls it with the same plan.

    Only the members of a communicator take part in making it, one after the other in the plan's order.

    Args:
        plan: The plan.
        rank: The global rank.
        store: Any store of torch that all ranks reach.
        backend: ``gloo`` or ``nccl``.
        timeout_s: The longest that ranks wait for each other, here and in collectives.

    Raises:
        TransportError, TransportTimeoutError: Ranks did not find each other; none of the groups is left.
    """
    from torch._C._distributed_c10d import PrefixStore

    from shardweave.move import process_group

    comms: dict[Ranks, Any] = {}
    for number in plan.of_rank.get(rank, ()):
        ranks = plan.communicators[number]
        comms[ranks] = process_group(
            store=PrefixStore(f"groups/{number}", store),
            ranks=ranks,
            rank=rank,
            backend=backend,
            timeout_s=timeout_s,
        )
    return Groups(plan, rank, comms)
