"""FSDP2 and DTensor: what the ranks of a device mesh hold.

A DTensor says on each dim of its mesh how that mesh dim cuts the tensor. Each cut is made of what the
cuts before it left, by the rule of ``torch.chunk``: the last ranks may hold less, or nothing. Ranks
that differ on a mesh dim without a cut are replicas; HSDP is no more than that.

Where data and tensor parallelism cut one dim, the order of the cuts is not the order of the axes.
Three rules are met; the last two agree where everything divides. 7 rows on ``dp=3, tp=2``, rank by rank:

===========  =====================================================  ===============================
nested       ``chunk(chunk(dim, dp), tp)``                          ``01 2  34 5  6 -``
fully_shard  ``chunk(chunk(dim, tp), dp)``                          ``01 4  23 5  - 6``
strided      ``chunk(strided_chunk(dim, dp, split_factor=tp), tp)`` ``01 4  23 5  6 -``
===========  =====================================================  ===============================

The first is ``distribute_tensor`` with ``Shard`` twice. The second is what ``fully_shard`` holds of a
tensor that is cut by tensor parallelism. The third is what the placements of the second say:
``_StridedShard`` first, then ``Shard``, read as torch reads them.

Source: torch 2.13, ``distributed/tensor`` and ``distributed/fsdp/_fully_shard``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardweave.dialects import hf
from shardweave.errors import GeometryError, MeshError, UnknownNameError
from shardweave.layout import BufferRule, Dim, Layout, Mesh, Part, Sharded, Tensor, along, chunk, concat
from shardweave.layout.buffer import table_of
from shardweave.models.spec import Model

# --- placements ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shard:
    """A mesh dim cuts a dim of the tensor; ``split_factor`` is that of torch's ``_StridedShard``."""

    dim: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class Replicate:
    """A mesh dim cuts nothing: its ranks hold the same."""


Placement = Shard | Replicate


@dataclass(frozen=True, slots=True)
class _Step:
    """One cut: the mesh axes that make it, the outermost first, and the dim of the stored array."""

    axes: tuple[str, ...]
    dim: int
    split_factor: int = 1


def strided_chunk(dim: Dim, parts: int, part: int, *, split_factor: int = 1) -> Dim:
    """Part number ``part`` of each of ``split_factor`` chunks of a dim, one after the other.

    Laws:
        ``strided_chunk(d, n, i) == chunk(d, n, i)``.
        The parts have every index once.

    >>> from shardweave.layout import whole
    >>> print(*(strided_chunk(whole(9), 4, i, split_factor=2) for i in range(4)), sep="; ")
    [0:2] [5:6]; [2:4] [6:7]; [4:5] [7:8]; [8:9]

    Source: ``_StridedShard._split_tensor``.
    """
    return concat(*(chunk(chunk(dim, split_factor, i), parts, part) for i in range(split_factor)))


def mesh(*, offset: int = 0, **dims: int) -> Mesh:
    """A device mesh by the sizes of its dims in torch's order, the last varying fastest.

    >>> mesh(dp=2, tp=3).groups("tp")
    ((0, 1, 2), (3, 4, 5))
    """
    return Mesh(tuple(reversed(dims.items())), offset=offset)


def placed(tensor: Tensor, mesh: Mesh, placements: Mapping[str, Any], *, name: str = "") -> BufferRule:
    """What each rank holds of a tensor with DTensor placements, exactly as torch reads them.

    Args:
        tensor: The tensor, or a family whose members all have these placements.
        mesh: The ranks.
        placements: The placement of each mesh axis, in the order of torch's mesh dims, which is the order
            of the cuts: ``Shard`` and ``Replicate`` of this module, or those of torch, and its
            ``_StridedShard``. Axes that are not named cut nothing.
        name: The name of the buffer; that of the tensor by default.

    Raises:
        GeometryError: A placement is partial or unknown, or cuts a dim that the tensor does not have.

    >>> tensor = Tensor("w", (4, 5), "float32")
    >>> rule = placed(tensor, mesh(dp=2, tp=2), {"dp": Shard(0, split_factor=2), "tp": Shard(0)})
    >>> print(*rule.dims[0].dims)
    [0:1] [2:3] [1:2] [3:4]
    """
    rule = BufferRule(name or tensor.name, (Part(tensor),), tensor.dims)
    return _cut(rule, mesh, _steps(rule.name, len(tensor.shape), mesh, placements))


def _steps(name: str, num_dims: int, mesh: Mesh, placements: Mapping[str, Any]) -> tuple[_Step, ...]:
    steps = []
    for axis, given in placements.items():
        mesh.axis_size(axis)
        where = f"tensor {name!r}, mesh axis {axis!r}"
        kind = type(given).__name__
        # The exact kinds only: a subclass may cut in another way, and a partial one holds no values.
        if kind not in ("Shard", "_StridedShard", "Replicate"):
            raise GeometryError(
                "a rank holds values of the tensor, as Shard, _StridedShard or Replicate say",
                where=where,
                equation=f"placement({given})",
                hint="the ranks of a partial tensor hold summands: redistribute it to Replicate() first",
            )
        if kind == "Replicate":
            continue
        dim, split_factor = int(given.dim), int(getattr(given, "split_factor", 1))
        if not -num_dims <= dim < num_dims or split_factor < 1:
            raise GeometryError(
                "a placement cuts a dim of its tensor",
                where=where,
                equation=f"dim({dim}) of {num_dims} dims, split_factor({split_factor})",
                hint="count dims from 0, index dims not included; a tensor without dims is replicated",
            )
        steps.append(_Step((axis,), dim % num_dims, split_factor))
    return tuple(steps)


def _cut(rule: BufferRule, mesh: Mesh, steps: Sequence[_Step]) -> BufferRule:
    """A rule with the dims of its stored array cut, step by step."""
    assert rule.stacked is not None
    dims = list(rule.dims)
    for stored in dict.fromkeys(step.dim for step in steps):
        whole = dims[rule.stacked[stored]]
        assert isinstance(whole, Dim)
        mine = [step for step in steps if step.dim == stored]
        dims[rule.stacked[stored]] = _sharded(whole, mesh, mine)
    return replace(rule, dims=tuple(dims))


def _sharded(whole: Dim, mesh: Mesh, steps: Sequence[_Step]) -> Sharded:
    # Axes in the order of the mesh, so that equal cuts are equal values whatever order they were made in.
    axes = tuple(sorted((axis for step in steps for axis in step.axes), key=[*mesh.sizes].index))

    def held(*coordinate: int) -> Dim:
        at, dim = dict(zip(axes, coordinate, strict=True)), whole
        for step in steps:
            parts, part = 1, 0
            for axis in step.axes:
                size = mesh.axis_size(axis)
                parts, part = parts * size, part * size + at[axis]
            dim = strided_chunk(dim, parts, part, split_factor=step.split_factor)
        return dim

    return along(mesh, axes, held)


# --- a model ------------------------------------------------------------------------------------

_ROWS = ("embed", "head", "q", "k", "v", "q_bias", "k_bias", "v_bias", "gate", "up", "gate_bias", "up_bias")
_COLUMNS = ("o", "down")


def tensor_parallel(model: Model) -> dict[str, int]:
    """The dim that tensor parallelism cuts of each weight, by name; weights that are whole are left out.

    Linear layers into heads and into the feed-forward are cut by rows (``ColwiseParallel``), those out of
    them by columns (``RowwiseParallel``), the vocabulary by rows; norms and routers are whole.

    Raises:
        GeometryError: The model has experts or latent attention, for which there is no one plan.

    Source: torch 2.13, ``distributed/tensor/parallel/style.py``.
    """
    unlike = [kind for kind in ("moe", "mla") if any(True for _ in model.of(kind))]
    if unlike:
        raise GeometryError(
            f"a plan says how tensor parallelism cuts {'experts' if 'moe' in unlike else 'latent attention'}",
            where=f"model of {model.family}",
            equation="plan(None)",
            hint="give plan={name: dim} as the training script shards them, or leave out tp",
        )
    plan = {
        tensor.name: 0 if role in _ROWS else 1
        for block in model.blocks
        for role, tensor in block.tensors.items()
        if role in (*_ROWS, *_COLUMNS)
    }
    return plan | {name: plan[of] for name, of in model.aliases.items()}


def layout(
    model: Model,
    mesh: Mesh,
    *,
    shard: tuple[str, ...] = ("dp",),
    replicate: tuple[str, ...] = (),
    tp: str | None = None,
    plan: Mapping[str, int] | None = None,
    outer: str = "tp",
    stacked_experts: bool = False,
    with_aliases: bool = False,
) -> Layout:
    """What each rank holds of a model under ``fully_shard``, under the Hugging Face names.

    Every parameter is cut along its first dim into chunks, the last ones short or empty. Layers for further
    tokens are left out, as transformers has none.

    Args:
        model: The model.
        mesh: The ranks, from ``mesh()``.
        shard: The axes that it is sharded over, flattened to one, the outermost first.
        replicate: The axes of replicas (HSDP).
        tp: The axis of tensor parallelism.
        plan: The dim of each weight that ``tp`` cuts, by name; ``tensor_parallel(model)`` by default.
        outer: What is cut first where both cut one dim: ``"tp"`` as ``fully_shard`` does on top of tensor
            parallelism, though its axis is the inner one; ``"dp"`` for ``Shard(0)`` twice in mesh order.
        stacked_experts: Whether the experts of a layer are stacked, as transformers 5 holds them in memory;
            ranks then share out whole experts.
        with_aliases: Whether tied tensors are listed under each of their names, as a state dict does.

    Law: ``prove(layout(model, mesh, ...))`` holds for every mesh, also of more ranks than rows.

    Raises:
        GeometryError: The axes are not those of the mesh, or the plan does not fit the model.

    Source: ``FSDPParam._init_sharded_param``.
    """
    used = (*shard, *replicate, *([tp] if tp else []))
    if sorted(used) != sorted(mesh.sizes) or not shard:
        raise GeometryError(
            "every axis of the mesh shards, replicates or is tensor parallel, and some axis shards",
            where=f"mesh {mesh}",
            equation=f"shard({', '.join(shard)}), replicate({', '.join(replicate)}), tp({tp}) != "
            f"axes({', '.join(mesh.sizes)})",
            hint="name each axis once; axes over which parameters are whole replicate",
        )
    if outer not in ("tp", "dp"):
        raise GeometryError(
            "one of two cuts is the outer one",
            equation=f"outer({outer!r}) is not 'tp' or 'dp'",
            hint="tp for fully_shard on top of tensor parallelism, dp for Shard(0) on both axes",
        )
    if tp is None and plan is not None:
        raise GeometryError(
            "a plan of tensor parallelism has an axis to cut along",
            where=f"mesh {mesh}",
            equation=f"plan({len(plan)} weights) without tp",
            hint="name the axis: tp='tp'",
        )
    rules = hf.layout(model.decoder, stacked_experts=stacked_experts, with_aliases=with_aliases).rules
    cuts: Mapping[str, int] = {}
    if tp is not None:
        cuts = tensor_parallel(model) if plan is None else plan
        _check_plan(cuts, {*(rule.name for rule in rules), *model.aliases})
    return Layout("fsdp", mesh, tuple(_fully_sharded(rule, mesh, shard, tp, cuts, outer) for rule in rules))


def _fully_sharded(
    rule: BufferRule, mesh: Mesh, shard: tuple[str, ...], tp: str | None, plan: Mapping[str, int], outer: str
) -> BufferRule:
    assert rule.stacked is not None
    steps: tuple[_Step, ...] = (_Step(shard, 0),)
    if tp is not None and rule.name in plan:
        own = _steps(rule.name, len(rule.stacked), mesh, {tp: Shard(plan[rule.name])})
        steps = own + steps if outer == "tp" else steps + own
    return _cut(rule, mesh, steps)


def _check_plan(plan: Mapping[str, int], names: set[str]) -> None:
    unknown = sorted(set(plan) - names)
    if unknown:
        raise UnknownNameError(
            "a plan of tensor parallelism names weights of the model",
            where=unknown[0],
            equation=f"{len(unknown)} of {len(plan)} names are not stored",
            hint="names have placeholders, as in 'model.layers.{layer}.mlp.up_proj.weight'",
        )


# --- live tensors -------------------------------------------------------------------------------


def of_dtensor(name: str, dtensor: Any, *, within: Mesh | None = None, made_by: str | None = None) -> Layout:
    """The layout of one live DTensor, from its own mesh, placements, shape and dtype; nothing is sent.

    Args:
        name: Its name.
        dtensor: The tensor; anything with the attributes of torch's ``DTensor``.
        within: The mesh of the whole job, where that of the tensor is a part of it: under FSDP and tensor
            parallelism a norm lives on the ``dp`` ranks of one ``tp`` coordinate. Its axes have the names
            of the mesh dims; ranks that differ on further axes are taken as replicas.
        made_by: ``"fully_shard"`` or ``"distribute_tensor"``, for a ``_StridedShard`` of a dim that does
            not divide: its placements are the same, and ranks hold other rows.

    Raises:
        GeometryError: The placements do not say what ranks hold, or the local shape contradicts them.
        MeshError: The ranks of the mesh are not consecutive, or no part of ``within``.
    """
    tensor = Tensor(name, tuple(dtensor.shape), str(dtensor.dtype).removeprefix("torch."))
    rule = BufferRule(name, (Part(tensor),), tensor.dims)
    world = _world(name, dtensor, within)
    return Layout("dtensor", world, (_held(rule, name, dtensor, world, made_by),))


def held(
    rule: BufferRule, dtensor: Any, *, name: str = "", within: Mesh, made_by: str | None = None
) -> BufferRule:
    """What each rank holds of a buffer of whole arrays, one of which is a live DTensor; nothing is sent.

    Law: for the rule of one tensor, it is the rule of ``of_dtensor``.

    Args:
        rule: The buffer, whole: one tensor, a family, or several tensors fused.
        dtensor: One of its arrays.
        name: The name of that array; that of the rule by default.
        within: As for ``of_dtensor``.
        made_by: As for ``of_dtensor``.

    Raises:
        GeometryError, MeshError: As ``of_dtensor``; or the array has another shape.
    """
    name = name or rule.name
    assert rule.stacked is not None
    shape = tuple(sum(len(dim) for dim in table_of(rule.dims[d])) for d in rule.stacked)
    if tuple(dtensor.shape) != shape:
        raise GeometryError(
            "a DTensor has the shape of the array that it is",
            where=f"tensor {name!r}",
            equation=f"shape{tuple(dtensor.shape)} != shape{shape}",
            hint="take the config of the model that is trained",
        )
    return _held(rule, name, dtensor, _world(name, dtensor, within), made_by)


def _world(name: str, dtensor: Any, within: Mesh | None) -> Mesh:
    axes, ranks = _device_mesh(dtensor)
    return _own_mesh(name, axes, ranks) if within is None else _part_of(name, axes, ranks, within)


def _device_mesh(dtensor: Any) -> tuple[tuple[str, ...], np.ndarray]:
    device = dtensor.device_mesh
    ranks = np.asarray(device.mesh.tolist(), dtype=np.int64)
    return tuple(device.mesh_dim_names or (f"dim{i}" for i in range(ranks.ndim))), ranks


def _held(rule: BufferRule, name: str, dtensor: Any, world: Mesh, made_by: str | None) -> BufferRule:
    if made_by not in (None, "fully_shard", "distribute_tensor"):
        raise GeometryError(
            "a DTensor is made by fully_shard or by distribute_tensor",
            where=f"tensor {name!r}",
            equation=f"made_by({made_by!r})",
            hint="leave it out where every dim divides",
        )
    assert rule.stacked is not None
    axes, ranks = _device_mesh(dtensor)
    placements = dict(zip(axes, dtensor.placements, strict=True))
    steps = _steps(name, len(rule.stacked), world, placements)
    read, made = _cut(rule, world, steps), _cut(rule, world, _as_sharded(world, steps))
    if made_by is None and read != made:
        raise GeometryError(
            "the placements of a tensor say what its ranks hold",
            where=f"tensor {name!r}, mesh {world}",
            equation=f"shape{tuple(dtensor.shape)} with "
            f"placements({', '.join(map(str, dtensor.placements))}): "
            "fully_shard and distribute_tensor give ranks other rows",
            hint="say which made it: made_by='fully_shard' or made_by='distribute_tensor'",
        )
    rule = made if made_by == "fully_shard" else read
    _check_local(rule, name, world, ranks, dtensor)
    return rule


def _as_sharded(mesh: Mesh, steps: Sequence[_Step]) -> tuple[_Step, ...]:
    """The cuts in the order in which ``fully_shard`` made them: a strided one last, of what is left.

    The split factor of a strided cut is the number of parts that the cuts after it make; where it is
    another number, nobody but ``distribute_tensor`` made it, and the steps are as they are.
    """
    found: list[_Step] = []
    for step in reversed(steps):
        later = [one for one in found if one.dim == step.dim]
        if step.split_factor == 1:
            found.insert(0, step)
        elif step.split_factor == math.prod(mesh.axis_size(axis) for one in later for axis in one.axes):
            found.append(replace(step, split_factor=1))
        else:
            return tuple(steps)
    return tuple(found)


def _own_mesh(name: str, axes: tuple[str, ...], ranks: np.ndarray) -> Mesh:
    offset = int(ranks.min())
    if not np.array_equal(ranks.ravel(), np.arange(offset, offset + ranks.size)):
        raise MeshError(
            "the ranks of a device mesh are consecutive, its last dim varying fastest",
            where=f"tensor {name!r}, mesh dims {', '.join(axes)}",
            equation=f"ranks({', '.join(map(str, ranks.ravel().tolist()))})",
            hint="give the mesh of the whole job, of which this is a part: within=mesh(dp=4, tp=2)",
        )
    return mesh(offset=offset, **dict(zip(axes, ranks.shape, strict=True)))


def _part_of(name: str, axes: tuple[str, ...], ranks: np.ndarray, within: Mesh) -> Mesh:
    coordinates = np.indices(ranks.shape).reshape(ranks.ndim, -1)
    inside = ranks.ravel() - within.offset
    fits = bool(((inside >= 0) & (inside < within.size)).all()) and set(axes) <= set(within.sizes)
    fits = fits and all(
        np.array_equal(within.columns[axis][inside], column)
        for axis, column in zip(axes, coordinates, strict=True)
    )
    if not fits or sorted(ranks.ravel().tolist()) != list(within.group(int(ranks.ravel()[0]), *axes)):
        raise MeshError(
            "the mesh of a tensor is a part of the mesh of its job",
            where=f"tensor {name!r}, mesh dims {', '.join(axes)}",
            equation=f"ranks({', '.join(map(str, ranks.ravel().tolist()))}) in {within}",
            hint="give the axes the names and sizes of the mesh dims, in torch's order: mesh(dp=4, tp=2)",
        )
    return within


def _check_local(rule: BufferRule, name: str, world: Mesh, ranks: np.ndarray, dtensor: Any) -> None:
    coordinate = dtensor.device_mesh.get_coordinate()
    if coordinate is None:  # this process is none of the mesh's ranks
        return
    rank = int(ranks[tuple(coordinate)])
    buffer = rule.at(world, rank)
    assert buffer is not None
    local = tuple(dtensor.to_local().shape)
    if local != buffer.shape:
        raise GeometryError(
            "a rank holds what the placements of its tensor say",
            where=f"tensor {name!r}, rank {rank}",
            equation=f"local shape{local} != {buffer.shape} of shape{tuple(dtensor.shape)} with "
            f"placements({', '.join(map(str, dtensor.placements))})",
            hint="give from_local() the global shape; a guess from one rank's shape is wrong for uneven cuts",
        )
