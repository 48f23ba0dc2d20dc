"""Degrees of parallelism, and the mesh and the groups that they come to.

Dense weights and tokens live on ``tp cp remat dp pp``, experts on ``etp ep eremat edp pp``: two ways to
factor the same ranks, which share the stages of the pipeline. Which groups there are follows from these.

Ranks that differ on ``cp``, ``remat`` or ``dp`` need the same dense weights. They each hold all of one, or a
share of it that is gathered when it is used: over ``weight_axes``, any of the three.

| ``weight_axes`` | others call it |
|---|---|
| ``remat`` (default) | GTP_remat; the ranks of ``dp`` hold replicas |
| ``remat``, ``cp`` | the same, with the context ranks folded in |
| ``dp``, or ``cp`` and ``dp`` | FSDP, ZeRO-3 |
| ``remat``, where there is ``dp`` too | HSDP, its state of the optimizer cut over the replicas as well |

Experts have axes of their own: they are cut over ``eremat``, over ``edp`` where dense ones are cut over
``dp``, and never over ``cp``, of which their grid knows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardweave.errors import GeometryError
from shardweave.layout import Mesh
from shardweave.train.grid import Over


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
        remat: Ranks with documents of their own, too, that share the weights.
        eremat: Ranks that share the weights of the same experts.
        weight_axes: The axes over which dense weights are cut beyond ``tp``, and gathered for use.

    Laws:
        ``tp * cp * remat * dp * pp == etp * ep * eremat * edp * pp``.
        Which documents a rank has does not depend on ``weight_axes``, nor does any value that is computed.

    >>> parallel = Parallel(tp=2, cp=3, ep=6)
    >>> parallel.edp, parallel.world_size
    (1, 6)
    >>> print(parallel.mesh)
    tp=2,cp=3,remat=1,dp=1,pp=1 | etp=1,ep=6,eremat=1,edp=1,pp=1
    """

    DATA_AXES: ClassVar[tuple[str, ...]] = ("cp", "remat", "dp")
    """The axes over which dense weights can be cut."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vp: int = 1
    offset: int = 0
    remat: int = 1
    eremat: int = 1
    weight_axes: tuple[str, ...] = ("remat",)

    def __post_init__(self) -> None:
        names = ("tp", "cp", "remat", "dp", "pp", "ep", "etp", "eremat", "vp")
        degrees = {name: getattr(self, name) for name in names}
        if min(degrees.values()) < 1 or self.offset < 0:
            raise GeometryError(
                "degrees of parallelism are positive",
                equation=", ".join(f"{name}({size})" for name, size in degrees.items() if size < 1)
                or f"offset({self.offset})",
                hint="leave out what is not cut; every degree is 1 by default",
            )
        ranks, experts = self.num_ranks_of_stage, self.ep * self.etp * self.eremat
        if ranks % experts:
            raise GeometryError(
                "experts are on the ranks of a stage, a whole number of times",
                equation=f"tp({self.tp}) * cp({self.cp}) * remat({self.remat}) * dp({self.dp}) = {ranks} "
                f"% (ep({self.ep}) * etp({self.etp}) * eremat({self.eremat})) = {experts} != 0",
                hint="choose ep, etp and eremat whose product divides tp * cp * remat * dp",
            )
        strange = [axis for axis in self.weight_axes if axis not in self.DATA_AXES]
        if strange or len(set(self.weight_axes)) != len(self.weight_axes):
            raise GeometryError(
                "weights are cut over axes whose ranks need the same ones",
                equation=f"({', '.join(self.weight_axes)}) is not some of ({', '.join(self.DATA_AXES)})",
                hint="choose weight_axes among them",
            )
        if self.vp > 1 and self.pp == 1:
            raise GeometryError(
                "layers are interleaved over stages",
                equation=f"vp({self.vp}) > 1 with pp({self.pp})",
                hint="use vp=1 without a pipeline",
            )

    @property
    def num_ranks_of_stage(self) -> int:
        """The ranks of a stage."""
        return self.tp * self.cp * self.remat * self.dp

    @property
    def edp(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.num_ranks_of_stage // (self.ep * self.etp * self.eremat)

    @property
    def num_data(self) -> int:
        """Ranks with documents of their own: those of ``remat`` and ``dp``, whatever weights are cut over."""
        return self.remat * self.dp

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.num_ranks_of_stage * self.pp

    @property
    def mesh(self) -> Mesh:
        """The ranks, dense axes first, with the factorisation of experts as a view."""
        dense = ("tp", "cp", "remat", "dp", "pp")
        experts = ("etp", "ep", "eremat", "edp", "pp")
        axes, view = (tuple((name, getattr(self, name)) for name in names) for names in (dense, experts))
        return Mesh(axes, (view,), self.offset)

    def data_rank(self, rank: int) -> int:
        """Which of ``num_data`` parts of a batch a rank works on.

        >>> [Parallel(cp=2, remat=2, dp=2).data_rank(rank) for rank in range(8)]
        [0, 0, 1, 1, 2, 2, 3, 3]
        """
        at = self.mesh.coordinate(rank)
        return at["remat"] + self.remat * at["dp"]

    @property
    def dense_axes(self) -> tuple[str, ...]:
        """``weight_axes`` in the order of the mesh, the first one fastest."""
        return tuple(axis for axis in self.DATA_AXES if axis in self.weight_axes)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes over which experts are cut beyond ``ep`` and ``etp``."""
        return ("eremat", "edp") if "dp" in self.weight_axes else ("eremat",)

    @property
    def num_shares(self) -> int:
        """Ranks that share a dense weight."""
        return math.prod(getattr(self, axis) for axis in self.weight_axes)

    @property
    def num_expert_shares(self) -> int:
        """Ranks that share a weight of experts."""
        return math.prod(getattr(self, axis) for axis in self.expert_axes)

    @property
    def groups(self) -> Mapping[str, Sequence[str] | Over]:
        """The groups of a model's grid by name, for ``plan_groups``."""
        rest = tuple(axis for axis in self.DATA_AXES if axis not in self.weight_axes)
        return {
            "tp": ("tp",),
            "cp": ("cp",),
            "dp": ("dp",),
            "pp": ("pp",),
            "ep": ("ep",),
            "etp": ("etp",),
            # Ranks that a document is on: what routing is balanced over.
            "document": ("tp", "cp"),
            # Ranks that hold the same elements, of what nothing cuts, and of what tp cuts.
            "replicas": ("tp", *self.DATA_AXES),
            "data": self.DATA_AXES,
            # Ranks that share a weight, and those that hold the same share, of what tp cuts and does not.
            "shares": self.dense_axes,
            "copies": rest,
            "tp_copies": ("tp", *rest),
            "expert_shares": self.expert_axes,
            "edp": ("eremat", "edp"),
            "expert_copies": tuple(axis for axis in ("eremat", "edp") if axis not in self.expert_axes),
            # The two stages that a tied embedding is on.
            "ends": Over(("pp",), (0, -1)),
            "all": ("tp", *self.DATA_AXES, "pp"),
        }
