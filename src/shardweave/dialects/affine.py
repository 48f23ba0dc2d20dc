r"""DeepSpeed's affine maps: layouts as data in a checkpoint, read once proved, written as it reads them.

A checkpoint of deepspeed 0.19.8 has under ``universal_checkpoint_info["affine_map"]`` for each weight, by a
pattern of its name, the shape of the whole, and for each tensor-parallel rank the shape of its shard and
blocks: each is a pair of strided views, one of the flat whole and one of the flat shard, with the ranks that
hold the same bytes and what they are multiplied by.

DeepSpeed takes such data as it is. A map that leaves rows to nobody is rebuilt with whatever lay in memory.
Here a map that was read is right, or was refused by name before any of it was used:

>>> data = {"version": 1, "params": {r"^w\.weight$": {"logical_shape": [6, 4], "ranks": {
...     0: {"shard_shape": [2, 4], "pieces": [
...         {"shape": [2, 4], "source": [8, [4, 1]], "dest": [0, [4, 1]], "locations": [0]}]},
...     1: {"shard_shape": [4, 4], "pieces": [
...         {"shape": [2, 4], "source": [0, [4, 1]], "dest": [0, [4, 1]], "locations": [1]},
...         {"shape": [2, 4], "source": [16, [4, 1]], "dest": [8, [4, 1]], "locations": [1]}]}}}}}
>>> maps = read(data)
>>> print(*layout(maps, dtype="float32").rules[0].dims[0].dims, sep=" | ")
[2:4] | [0:2] [4:6]
>>> write(maps) == data
True

Source: deepspeed 0.19.8, ``checkpoint/affine.py``, ``affine_transfer.py``, ``ds_to_universal.py``; the
specification ``affine_ir_spec.md`` beside them in its repository.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from shardweave.dialects.affine_text import MOST_PIECES, VERSION, read, write
from shardweave.errors import DtypeError, GeometryError, TransformError
from shardweave.layout import IDENTITY, BufferRule, Layout, Mesh, Tensor, Transform
from shardweave.layout.affine import AffineMap
from shardweave.layout.affine_layout import layout_of, map_of

POWERS: Mapping[str, int] = MappingProxyType({"fp32": 1, "master": 1, "exp_avg": -1, "exp_avg_sq": -2})
"""How a scale applies to what is stored of a weight. What is held s times as large has gradients that are s
times as small, so Adam's first moment has the inverse of s and its second moment the inverse square."""


def layout(
    maps: Mapping[str, AffineMap],
    *,
    dtype: str | Mapping[str, str],
    axis: str = "tp",
    state: str = "fp32",
) -> Layout:
    """All weights of a checkpoint over its ranks as one layout, or one state of them.

    A rank's shard of the weight ``name`` is the buffer ``name``.

    Args:
        maps: The maps, as read; all of one number of ranks.
        dtype: The dtype of what is stored, for all or by name.
        axis: The mesh axis of the ranks.
        state: What is stored: ``fp32`` for weights, or a state of the optimizer. It matters to scales alone.

    Raises:
        GeometryError: The maps are of different numbers of ranks.
        TransformError: A map is scaled, and what that means for the state is not known.
    """
    sizes = sorted({found.num_ranks for found in maps.values()}) or [1]
    if len(sizes) > 1:
        raise GeometryError(
            "the maps of a checkpoint are of one number of ranks",
            where="affine_map",
            equation=f"ranks({', '.join(map(str, sizes))})",
            hint="maps over expert-parallel ranks are a layout of their own",
        )
    mesh = Mesh(((axis, sizes[0]),))
    rules: list[BufferRule] = []
    for name, found in maps.items():
        stored = dtype if isinstance(dtype, str) else dtype[name]
        tensor = Tensor(name, found.shape, stored)
        rules += layout_of(found, tensor, mesh, axis=axis, transform=transform_of(found, name, state)).rules
    return Layout("deepspeed", mesh, tuple(rules))


def transform_of(found: AffineMap, name: str, state: str = "fp32") -> Transform:
    """What a rank stores of a state of a weight, as a function of the whole's values.

    Adam's step also has ``lr`` and ``eps``, which a group keeps for all its weights: for one that is held s
    times as large they would be ``lr * s`` and ``eps / s``. Values are exact, and who writes them for another
    scale has to say these as well, or refuse.

    Raises:
        TransformError: The blocks have several scales, the power of the state is not known, or the scale
            raised to it is not a number that can be undone.
    """
    scales = np.unique(found.pieces.scale).tolist()
    if scales in ([], [1.0]):
        return IDENTITY
    if len(scales) > 1 or state not in POWERS:
        several = len(scales) > 1
        raise TransformError(
            "a shard has one scale" if several else "the power of a scale is known for a state",
            where=f"map of {name!r}, state {state!r}",
            equation=(
                f"scales({', '.join(map(str, scales))})"
                if several
                else f"{state} is not among {', '.join(POWERS)}"
            ),
            hint="store the weight unscaled, and its states with it",
        )
    mantissa, exponent = np.frexp(scales[0])
    power = POWERS[state]
    value = float(np.ldexp(np.sign(mantissa) ** power, (int(exponent) - 1) * power))
    if not np.isfinite(value) or abs(value) < np.finfo(np.float64).tiny:
        raise TransformError(
            "a scale raised to the power of a state is a number that can be undone",
            where=f"map of {name!r}, state {state!r}",
            equation=f"scale({scales[0]}) ** {power} = {value}",
            hint="store the weight unscaled, and its states with it",
        )
    return Transform("scale", value)


def exactly(transform: Transform, values: Any, *, undo: bool = False, name: str = "values") -> Any:
    """Values as they are stored, or with ``undo`` as they are, where every bit of them can be had back.

    A power of two moves the exponent alone, until a value becomes too small or too large for its dtype.

    Args:
        transform: What is stored of a value.
        values: An array of floats.
        undo: Whether ``values`` are stored ones.
        name: What they are, for messages.

    Raises:
        TransformError: A value would lose bits, with the first such.

    >>> exactly(Transform("scale", 0.25), np.float32([8, -3])).tolist()
    [2.0, -0.75]
    """
    there, back = (transform.undo, transform.apply) if undo else (transform.apply, transform.undo)
    given = np.ascontiguousarray(values)
    with np.errstate(all="ignore"):
        result = np.asarray(there(given))
        returned = np.ascontiguousarray(back(result))
    bits = f"u{given.dtype.itemsize}"
    lost = (returned.view(bits) != given.view(bits)) | (np.isfinite(given) != np.isfinite(result))
    if lost.any():
        first = tuple(int(i) for i in np.argwhere(lost)[0])
        raise TransformError(
            "a scaled value gives every bit back",
            where=f"{name}, element {first}",
            equation=f"{given[first]!s} becomes {result[first]!s}, and back {returned[first]!s}",
            hint="the dtype is too narrow for this scale; store the values unscaled or in a wider dtype",
        )
    return result


def check_shards(
    found: AffineMap, shards: Sequence[tuple[Sequence[int], str]], *, name: str, shape: Sequence[int] = ()
) -> None:
    """Check a map against what a checkpoint has: the shape and dtype of each rank's shard, in order of ranks.

    Args:
        found: The map.
        shards: Shape and dtype of the shard of each rank.
        name: The weight, for messages.
        shape: The shape that the whole shall have, where known.

    Raises:
        GeometryError: Another number of ranks, or another shape.
        DtypeError: The shards are not all of one dtype.
    """
    if len(shards) != found.num_ranks:
        raise GeometryError(
            "a map says of every rank's shard what it holds, and of no other",
            where=f"map of {name!r}",
            equation=f"ranks of the map({found.num_ranks}) != shards({len(shards)})",
            hint="maps and shards of two checkpoints were mixed, or a rank's file is missing",
        )
    told = [("the whole", found.shape, tuple(shape) or found.shape)]
    told += [(f"rank {r}", found.shards[r], tuple(each)) for r, (each, _) in enumerate(shards)]
    for what, said, stored in told:
        if said != stored:
            raise GeometryError(
                "a map and what is stored have one shape, and not only one size",
                where=f"map of {name!r}, {what}",
                equation=f"shape of the map{said} != shape stored{stored}",
                hint="flattened shards are given their shape first; a transposed weight is another one",
            )
    dtypes = [dtype for _, dtype in shards]
    if len(set(dtypes)) > 1:
        other = next(rank for rank, dtype in enumerate(dtypes) if dtype != dtypes[0])
        raise DtypeError(
            "the shards of a weight have one dtype",
            where=f"map of {name!r}",
            equation=f"rank 0 has {dtypes[0]}, rank {other} has {dtypes[other]}",
            hint="the files are not of one checkpoint; a cast is asked for, never made by the way",
        )


__all__ = [
    "MOST_PIECES",
    "POWERS",
    "VERSION",
    "AffineMap",
    "check_shards",
    "exactly",
    "layout",
    "layout_of",
    "map_of",
    "read",
    "transform_of",
    "write",
]
