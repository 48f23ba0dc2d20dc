"""Degrees of parallelism, and the mesh and the groups that they come to.

Dense weights and tokens live on ``tp cp dp pp``, experts on ``etp ep edp pp``: two factorisations of the same
ranks that share the stages of the pipeline. Which groups there are follows from the degrees alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardweave.errors import GeometryError
from shardweave.layout import Mesh
from shardweave.train.grid import Over

GROUPS: Mapping[str, Sequence[str] | Over] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "ep": ("ep",),
    "etp": ("etp",),
    # Ranks that a document is on: what routing is balanced over.
    "document": ("tp", "cp"),
    # Ranks that hold the same elements, of what tp does not cut, of what it cuts, and of experts.
    "replicas": ("tp", "cp", "dp"),
    "data": ("cp", "dp"),
    "edp": ("edp",),
    # The two stages that a tied embedding is on.
    "ends": Over(("pp",), (0, -1)),
    "all": ("tp", "cp", "dp", "pp"),
}
"""The groups of a model's grid by name, for ``plan_groups``."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """How many ranks share what.

    Attributes:
        tp: Ranks that cut heads and rows and, between the blocks of a layer, the sequence.
        cp: Ranks that cut each document.
        dp: Ranks with documents of their own.
        pp: Stages.
        ep: Ranks that share the experts of a layer.
        etp: Ranks that cut each expert.
        vp: Stretches of layers that a stage has; more than one where the schedule is interleaved.
        offset: The first rank.

    Laws:
        ``tp * cp * dp * pp == etp * ep * edp * pp``.

    >>> parallel = Parallel(tp=2, cp=3, ep=6)
    >>> parallel.edp, parallel.world_size
    (1, 6)
    >>> print(parallel.mesh)
    tp=2,cp=3,dp=1,pp=1 | etp=1,ep=6,edp=1,pp=1
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vp: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        degrees = {name: getattr(self, name) for name in ("tp", "cp", "dp", "pp", "ep", "etp", "vp")}
        if min(degrees.values()) < 1 or self.offset < 0:
            raise GeometryError(
                "degrees of parallelism are positive",
                equation=", ".join(f"{name}({size})" for name, size in degrees.items() if size < 1)
                or f"offset({self.offset})",
                hint="leave out what is not cut; every degree is 1 by default",
            )
        if self.tp * self.cp * self.dp % (self.ep * self.etp):
            raise GeometryError(
                "experts are on the ranks of a stage, a whole number of times",
                equation=f"tp({self.tp}) * cp({self.cp}) * dp({self.dp}) = {self.tp * self.cp * self.dp} "
                f"% (ep({self.ep}) * etp({self.etp})) = {self.ep * self.etp} != 0",
                hint="choose ep and etp whose product divides tp * cp * dp",
            )
        if self.vp > 1 and self.pp == 1:
            raise GeometryError(
                "layers are interleaved over stages",
                equation=f"vp({self.vp}) > 1 with pp({self.pp})",
                hint="use vp=1 without a pipeline",
            )

    @property
    def edp(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def mesh(self) -> Mesh:
        """The ranks, dense axes first, with the factorisation of experts as a view."""
        dense = (("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp))
        experts = (("etp", self.etp), ("ep", self.ep), ("edp", self.edp), ("pp", self.pp))
        return Mesh(dense, (experts,), self.offset)
