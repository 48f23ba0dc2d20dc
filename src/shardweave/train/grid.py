"""Process groups of meshes: planned for every rank without torch, then made for one.

``plan_groups`` is arithmetic: which lists of ranks need a communicator, and who is in which. It can be
printed and compared for any world, also one of 16,384 ranks, before a process exists. ``connect`` makes the
communicators of one rank from a store. No global group is read or made, so that several grids, an encoder's
beside a language model's, live in one world and cannot be mixed up: on the same ranks, on others, or on some
of the same. What computes a model is given ``groups.of("encoder")``, and knows of no other grid.

- Equal lists of ranks share a communicator, over all grids; a list of one rank needs none.
- All ranks make what they share in one order, that of the plan. So none waits for another in a ring: of the
  communicators that are not made yet, nothing keeps the members of the first from it.
- A rank that is not a member of a group is told so, and a group that nobody planned is an error: neither
  is ever rank 0 of 1 by default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from shardweave.errors import GeometryError, TransportError, UnknownNameError
from shardweave.layout import Mesh
from shardweave.layout.layout import format_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Ranks = tuple[int, ...]

GRID = "model"
"""The name of the grid of a model, in a plan of its own and in the groups ``of`` its grid of a larger one."""


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
        across: The ranks of each group over several grids, ascending, by name.

    Laws:
        Same input, same plan, on every rank.
        No two communicators have the same ranks, and none has one rank.
        The groups of one name of a grid are disjoint.
    """

    grids: Mapping[str, Mesh]
    names: Mapping[str, Mapping[str, Over]]
    communicators: tuple[Ranks, ...]
    across: Mapping[str, Ranks] = field(default_factory=dict)

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

    @property
    def most_calls(self) -> int:
        """How many communicators the busiest rank makes."""
        return max((len(numbers) for numbers in self.of_rank.values()), default=0)

    @property
    def mean_calls(self) -> float:
        """How many communicators a rank of a grid makes on average."""
        ranks = set[int]().union(*(mesh.ranks for mesh in self.grids.values()))
        return sum(map(len, self.communicators)) / len(ranks)

    @property
    def num_groups(self) -> int:
        """The groups of all names, equal ones and those of one rank too.

        It is how many communicators every rank makes where all ranks take part in making each of them, as
        ``torch.distributed.new_group`` wants it.
        """
        groups = (over.groups(self.grids[grid]) for grid, of in self.names.items() for over in of.values())
        return sum(1 for some in groups for _ in some) + len(self.across)

    def of(self, grid: str) -> GroupPlan:
        """The plan of one grid alone, under the name that a model knows its own by, ``GRID``.

        Raises:
            UnknownNameError: There is no such grid.
        """
        return plan_groups({GRID: self.mesh(grid)}, {GRID: self.names.get(grid, {})})

    def mesh(self, grid: str) -> Mesh:
        """The mesh of a grid.

        Raises:
            UnknownNameError: There is no such grid.
        """
        if grid not in self.grids:
            raise UnknownNameError(
                "a grid that is asked for was planned",
                equation=f"{grid} is not among {', '.join(self.grids)}",
                hint="give plan_groups() its mesh",
            )
        return self.grids[grid]

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
        lines = [
            f"{self.world_size} ranks, {len(self.communicators)} communicators, "
            f"a rank is in {self.most_calls} of them at most, in {self.mean_calls:.4g} on average"
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
        lines += [f"{name}: {format_ranks(ranks, 4)}" for name, ranks in self.across.items()]
        return "\n".join(lines)


def plan_groups(
    grids: Mapping[str, Mesh],
    groups: Mapping[str, Mapping[str, Sequence[str] | Over]],
    *,
    across: Mapping[str, Sequence[str]] | None = None,
) -> GroupPlan:
    """Which communicators the groups of some grids need.

    Args:
        grids: Meshes of one world by name, on the same ranks, on others, or on some of the same.
        groups: For each grid, the axes of each group by name.
        across: Groups over all ranks of several grids: the grids of each by name.

    Raises:
        MeshError: An axis is not of its mesh, or of no one factorisation with the others of its group.
        UnknownNameError: Groups are given of a grid that there is not.

    >>> mesh = Mesh((("tp", 2), ("dp", 2)))
    >>> plan = plan_groups({"llm": mesh}, {"llm": {"tp": ("tp",), "dp": ("dp",), "all": ("tp", "dp")}})
    >>> print(plan)
    4 ranks, 5 communicators, a rank is in 3 of them at most, in 3 on average
    llm: tp=2,dp=2
      tp: 2 of 2 ranks, the first ranks 0, 1
      dp: 2 of 2 ranks, the first ranks 0, 2
      all: 1 of 4 ranks, the first ranks 0, 1, 2, 3

    A second grid on two of these ranks and two others. Ranks 2 and 3 are a pair in both: one communicator.

    >>> vision = Mesh((("tp", 2), ("dp", 2)), offset=2)
    >>> print(plan_groups(
    ...     {"llm": mesh, "vision": vision},
    ...     {"llm": {"tp": ("tp",)}, "vision": {"tp": ("tp",)}},
    ...     across={"world": ("llm", "vision")},
    ... ))
    6 ranks, 4 communicators, a rank is in 2 of them at most, in 2 on average
    llm: tp=2,dp=2
      tp: 2 of 2 ranks, the first ranks 0, 1
    vision: tp=2,dp=2 @ 2
      tp: 2 of 2 ranks, the first ranks 2, 3
    world: ranks 0, 1, 2, 3, ... 6 in all
    """
    across = {} if across is None else across
    strange = sorted({*groups, *(grid for some in across.values() for grid in some)} - set(grids))
    if strange:
        raise UnknownNameError(
            "groups are those of a grid",
            equation=f"{', '.join(strange)} not among grids({', '.join(grids)})",
            hint="name each grid in both arguments",
        )
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
    over_all = {
        name: tuple(sorted(set[int]().union(*(grids[grid].ranks for grid in some))))
        for name, some in across.items()
    }
    wanted |= {ranks: None for ranks in over_all.values() if len(ranks) > 1}
    return GroupPlan(dict(grids), names, tuple(wanted), over_all)


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
    """The groups of one rank of one world, by grid and name.

    Attributes:
        plan: What was planned.
        rank: The global rank.
        grid: The grid of a larger plan that these are of, by its name there; empty for all of a plan.
    """

    def __init__(self, plan: GroupPlan, rank: int, comms: Mapping[Ranks, Any]) -> None:
        self.plan, self.rank, self.grid = plan, rank, ""
        self._comms = dict(comms)
        self._known: dict[tuple[str, str], Group | None] = {}
        self._across: dict[str, Group] = {}

    def of(self, grid: str) -> Groups:
        """The groups of one grid, as the model on it sees them: ``GRID`` is the name of this grid.

        They are the same groups, over the same communicators, and closed with these and not on their own.
        There are no others in it, so that no sum can go over ranks of another grid. Also a rank outside the
        grid has them, and is not a member of any.

        Raises:
            UnknownNameError: There is no such grid.

        >>> mesh, beside = Mesh((("tp", 2),)), Mesh((("tp", 4),))
        >>> both = {"llm": mesh, "vision": beside}
        >>> groups = Groups(plan_groups(both, {name: {"tp": ("tp",)} for name in both}), 1, {})
        >>> groups.of("vision").get(GRID, "tp") is groups.get("vision", "tp")
        True
        """
        return _OfGrid(self, grid)

    @property
    def whole(self) -> Groups:
        """The groups of all grids, which these are of."""
        return self

    def member(self, grid: str) -> bool:
        """Whether this rank is on a grid.

        Raises:
            UnknownNameError: There is no such grid.
        """
        return self.rank in self.plan.mesh(grid).ranks

    def across(self, name: str) -> Group:
        """A group over several grids.

        Raises:
            UnknownNameError: Nobody planned it.
            GeometryError: This rank is on none of these grids.
        """
        if name not in self.plan.across:
            raise UnknownNameError(
                "a group that is asked for was planned",
                where=f"rank {self.rank}",
                equation=f"{name} is not among across({', '.join(self.plan.across)})",
                hint="plan it with plan_groups(across=...); the groups of one grid have none",
            )
        if name not in self._across:
            ranks = self.plan.across[name]
            if self.rank not in ranks:
                raise _not_a_member(self.rank, name, format_ranks(ranks, 4))
            self._across[name] = Group(name, ranks, ranks.index(self.rank), self._comms.get(ranks))
        return self._across[name]

    def every(self) -> Iterator[Group]:
        """The groups that this rank is a member of, in the order of the plan."""
        for grid, names in self.plan.names.items():
            yield from (group for name in names if (group := self.find(grid, name)) is not None)
        yield from (self.across(name) for name, ranks in self.plan.across.items() if self.rank in ranks)

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
            raise _not_a_member(self.rank, f"{grid}.{name}", f"{self.plan.grids[grid]}")
        return found

    def close(self) -> None:
        """Let go of all communicators, each once. Whoever waits in one of them is freed, with an error.

        Groups that were handed out refuse to send from here on. They may be held by graphs and frames that
        live on; a communicator would live, and its peers wait, as long as any of them.
        """
        comms, self._comms = self._comms, {ranks: _Closed(ranks) for ranks in self._comms}
        for group in (*self._known.values(), *self._across.values()):
            if group is not None and group.ranks in self._comms:
                object.__setattr__(group, "comm", self._comms[group.ranks])
        while comms:
            _, comm = comms.popitem()
            if isinstance(comm, _Closed):
                continue
            if comm.name() in ("nccl", "memory"):
                comm.abort()


class _OfGrid(Groups):
    """The groups of one grid of a larger plan, under the name ``GRID``."""

    def __init__(self, whole: Groups, grid: str) -> None:
        super().__init__(whole.plan.of(grid), whole.rank, {})
        self._whole, self.grid = whole, grid

    def of(self, grid: str) -> Groups:
        """These, which are of one grid alone."""
        self.plan.mesh(grid)  # which says that there is no other
        return self

    @property
    def whole(self) -> Groups:
        """The groups of all grids, which these are of."""
        return self._whole

    def find(self, grid: str, name: str) -> Group | None:
        """As of all of them."""
        if grid != GRID:
            self.plan.mesh(grid)  # which says that there is none
        return self._whole.find(self.grid, name)

    def close(self) -> NoReturn:
        """Refuse: other grids use these communicators too.

        Raises:
            TransportError: Always.
        """
        raise TransportError(
            "the groups of all grids are closed at once",
            where=f"rank {self.rank}, grid {self.grid}",
            equation=f"close() of groups.of({self.grid!r})",
            hint="close what connect() gave: whoever waits on any grid is freed with it",
        )


def _not_a_member(rank: int, name: str, on: str) -> GeometryError:
    return GeometryError(
        "a rank uses groups that it is a member of",
        where=f"rank {rank}, group {name}",
        equation=f"rank({rank}) in no group of that name on {on}",
        hint="ask find(), which says None, or member() where not every rank is one",
    )


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
