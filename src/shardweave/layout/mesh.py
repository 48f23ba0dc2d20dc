"""Meshes: named axes over ranks, without devices or processes.

The first axis of a mesh varies fastest: ranks that differ by one in it are neighbours. This is
the order in which Megatron writes it (``tp-cp-ep-dp-pp``: tensor-parallel neighbours are
adjacent ranks); a row-major reading lists the same axes the other way round.

One set of ranks may be factorised more than once: dense weights over ``tp cp dp pp``, experts
over ``etp ep edp pp``. Axes of one name in two factorisations must mean the same thing on every
rank, which is checked. A mesh may start at any rank, so that several live side by side in one
world.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardweave.errors import MeshError
from shardweave.layout.run import LABEL

Axes = tuple[tuple[str, int], ...]

MOST_RANKS = 1 << 20
"""The most ranks of a mesh. Descriptions come from files too, and a column of every rank is made of them."""


@dataclass(frozen=True)
class Mesh:
    """Ranks ``offset`` to ``offset + size`` as a grid of named axes, the first varying fastest.

    Attributes:
        axes: Name and size of each axis.
        views: Other factorisations of the same ranks.
        offset: The first global rank.

    Laws:
        ``mesh.rank(mesh.coordinate(r)) == r`` for every rank of the mesh.
        The groups over any set of axes partition the ranks.

    >>> mesh = Mesh((("tp", 2), ("dp", 2), ("pp", 2)))
    >>> mesh.groups("dp")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> print(mesh)
    tp=2,dp=2,pp=2
    """

    axes: Axes
    views: tuple[Axes, ...] = ()
    offset: int = 0

    def __post_init__(self) -> None:
        size = math.prod(n for _, n in self.axes)
        for view in (self.axes, *self.views):
            names = [name for name, _ in view]
            if len(set(names)) != len(names) or not all(n > 0 and LABEL.fullmatch(name) for name, n in view):
                raise MeshError(
                    "the axes of a mesh are words, each once, with positive sizes",
                    where=f"mesh of {len(view)} axes",
                    equation=f"axes({_format_axes(view)})",
                    hint="name each axis once; leave out axes that do not exist",
                )
            other = math.prod(n for _, n in view)
            if other != size:
                raise MeshError(
                    "every factorisation of a mesh has the same number of ranks",
                    where=f"mesh {_format_axes(self.axes)}",
                    equation=f"{_product(self.axes)} = {size} != {_product(view)} = {other}",
                    hint="the expert axes etp*ep*edp*pp must multiply to the dense ones tp*cp*dp*pp",
                )
        if size > MOST_RANKS or self.offset > MOST_RANKS << 10:
            raise MeshError(
                "a mesh is of a size that can be listed",
                where=f"mesh {_format_axes(self.axes)}",
                equation=f"ranks({size}) > {MOST_RANKS} or offset({self.offset}) > {MOST_RANKS << 10}",
                hint="check the sizes of the axes; a damaged or hostile text can say anything",
            )
        if self.offset < 0:
            raise MeshError(
                "ranks start at 0",
                where=f"mesh {_format_axes(self.axes)}",
                equation=f"offset({self.offset}) < 0",
                hint="use a rank >= 0",
            )
        table = _columns(self.axes)
        for view in self.views:
            for name, column in _columns(view).items():
                known = table.setdefault(name, column)
                if not np.array_equal(known, column):
                    first = int(np.argmax(known != column))
                    raise MeshError(
                        "an axis that two factorisations share has the same groups in both",
                        where=f"axis {name!r}, rank {self.offset + first}",
                        equation=(
                            f"coordinate {known[first]} in {_format_axes(self.axes)} != "
                            f"{column[first]} in {_format_axes(view)}"
                        ),
                        hint="put the shared axis last in the order of both, as in tp-cp-ep-dp-pp",
                    )

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size of every axis of every factorisation."""
        return {name: n for view in (self.axes, *self.views) for name, n in view}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(n for _, n in self.axes)

    @property
    def ranks(self) -> range:
        """The global ranks of this mesh."""
        return range(self.offset, self.offset + self.size)

    @cached_property
    def columns(self) -> Mapping[str, np.ndarray]:
        """The coordinate of every rank on every axis, as one column of ``size`` integers an axis."""
        columns: dict[str, np.ndarray] = {}
        for view in (self.axes, *self.views):
            columns.update(_columns(view))
        return columns

    def coordinate(self, rank: int) -> dict[str, int]:
        """The coordinate of a global rank on every axis of every factorisation. Undone by ``rank``."""
        if rank not in self.ranks:
            raise MeshError(
                "a rank belongs to its mesh",
                where=f"mesh {self}",
                equation=f"rank({rank}) is not in {self.offset}..{self.offset + self.size - 1}",
                hint="ranks of a mesh are global ranks; add the offset",
            )
        return {name: int(column[rank - self.offset]) for name, column in self.columns.items()}

    def where(self, coordinate: Mapping[str, int]) -> np.ndarray:
        """The global ranks at the given coordinates, ascending; axes that are not named are free."""
        mask = np.ones(self.size, dtype=bool)
        for name, value in coordinate.items():
            if not 0 <= value < self.axis_size(name):
                raise MeshError(
                    "a coordinate lies on its axis",
                    where=f"axis {name!r} of mesh {self}",
                    equation=f"coordinate({value}) is not in 0..{self.sizes[name] - 1}",
                    hint="coordinates are counted from 0",
                )
            mask &= self.columns[name] == value
        return np.flatnonzero(mask) + self.offset

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The global rank at a coordinate that names enough axes to leave just one."""
        ranks = self.where(coordinate)
        if len(ranks) != 1:
            raise MeshError(
                "a full coordinate names one rank",
                where=f"mesh {self}",
                equation=f"{dict(coordinate)} names {len(ranks)} ranks",
                hint="give every axis of one factorisation",
            )
        return int(ranks[0])

    def axis_size(self, name: str) -> int:
        """The size of an axis of any factorisation."""
        if name not in self.sizes:
            raise MeshError(
                "an axis belongs to its mesh",
                where=f"mesh {self}",
                equation=f"axis {name!r} is not among {', '.join(self.sizes)}",
                hint="name an axis of the mesh, or build the mesh with it",
            )
        return self.sizes[name]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ on ``axes`` only.

        The members of a group ascend by global rank, and so does the list of groups by first
        member; a rank in a group is therefore the same on every rank and in every process.

        Law: the groups partition the ranks, and each has one member a coordinate on ``axes``.
        """
        key = np.zeros(self.size, dtype=np.int64)
        for name in self._others(axes):
            key = key * self.sizes[name] + self.columns[name]
        # A stable sort keeps the members of a group ascending.
        members = np.argsort(key, kind="stable") + self.offset
        width = math.prod(self.sizes[name] for name in set(axes))
        return tuple(sorted(tuple(group) for group in members.reshape(-1, width).tolist()))

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group over ``axes`` that a global rank belongs to. Law: it is one of ``groups(*axes)``."""
        coordinate = self.coordinate(rank)
        return tuple(self.where({name: coordinate[name] for name in self._others(axes)}).tolist())

    def _others(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes beside ``axes`` in the first factorisation that has them all."""
        for name in axes:
            self.axis_size(name)
        for view in (self.axes, *self.views):
            names = tuple(name for name, _ in view)
            if set(axes) <= set(names):
                return tuple(name for name in names if name not in axes)
        raise MeshError(
            "the axes of a group belong to one factorisation",
            where=f"mesh {self}",
            equation=f"no factorisation has all of {', '.join(axes)}",
            hint="take the groups of each factorisation on their own",
        )

    def __str__(self) -> str:
        from shardweave.layout.notation import format_mesh

        return format_mesh(self)


def ordered(order: str, sizes: Mapping[str, int], *, offset: int = 0) -> Mesh:
    """A mesh from an order string, the leftmost token varying fastest.

    A token without a size has size 1. A size without a token is refused unless it is 1: a rank
    order that leaves out a real axis says nothing about where its ranks are.

    Law: a rank is the offset plus, for each token, its coordinate times the sizes to the left.

    >>> ordered("tp-pp-dp", {"tp": 2, "pp": 2, "dp": 2}).groups("dp")
    ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    tokens = [token for token in order.split("-") if token]
    for name, n in sizes.items():
        if name not in tokens:
            if n != 1:
                raise MeshError(
                    "an order names every axis that is larger than 1",
                    where=f"order {order!r}",
                    equation=f"{name}({n}) is not in the order",
                    hint=f"add {name!r} to the order",
                )
            tokens.append(name)
    return Mesh(tuple((token, sizes.get(token, 1)) for token in tokens), offset=offset)


def _columns(axes: Axes) -> dict[str, np.ndarray]:
    ranks = np.arange(math.prod(n for _, n in axes))
    columns: dict[str, np.ndarray] = {}
    for name, n in axes:
        columns[name], ranks = ranks % n, ranks // n
    return columns


def _format_axes(axes: Sequence[tuple[str, int]]) -> str:
    return ",".join(f"{name}={n}" for name, n in axes)


def _product(axes: Axes) -> str:
    return "*".join(f"{name}({n})" for name, n in axes) or "1"
