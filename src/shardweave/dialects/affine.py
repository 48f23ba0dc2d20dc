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

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from shardweave.dialects.affine_views import Views, blocks_of_views
from shardweave.errors import DtypeError, FormatError, GeometryError, TransformError
from shardweave.layout import IDENTITY, BufferRule, Layout, Mesh, Tensor, Transform
from shardweave.layout.affine import AffineMap, Pieces
from shardweave.layout.affine_layout import layout_of, map_of
from shardweave.layout.region import cut

VERSION = 1
"""The encoding that is known. Another one may have fields that change what the known ones mean."""

MOST_PIECES = 1 << 20
"""The most blocks of a document. A model of 723 weights has 0.07 million at 8 ranks, 0.6 million at 64."""

POWERS: Mapping[str, int] = MappingProxyType({"fp32": 1, "master": 1, "exp_avg": -1, "exp_avg_sq": -2})
"""How a scale applies to what is stored of a weight. What is held s times as large has gradients that are s
times as small, so Adam's first moment has the inverse of s and its second moment the inverse square."""

_RANK = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_PIECE = {"shape", "source", "dest", "locations"}


def read(data: object, *, tp: int | None = None, patterns: bool = True) -> dict[str, AffineMap]:
    r"""The map of each weight, by its name, from what a checkpoint says.

    Args:
        data: The content of ``affine_map``. The specification's own example has the patterns beside
            ``version``, the code that writes it has them under ``params``: both are read.
        tp: The ranks that the checkpoint has, where known.
        patterns: Whether keys are patterns ``^escaped\.name$``. Those of experts
            (``ds_autoep_layers[i]["affine_maps"]``) are the names themselves, over expert-parallel ranks.

    Raises:
        FormatError: The data is not of the known form or version, or is too large.
        GeometryError: A map is of another number of ranks.
        BufferRuleError: A view is no block, as of a transposed shard.
        GapError, OverlapError, OutsideError, HolderError, TransformError: A map is wrong; see ``AffineMap``.
    """
    document = _mapping(data, "affine_map")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        _refuse("an affine map has a known version", "affine_map", f"version({version!r}) != {VERSION}")
    named = dict(document)
    del named["version"]
    if not named:
        _refuse("an affine map says of weights where they are", "affine_map", "no params, and no patterns")
    if "params" in named:
        if len(named) > 1:
            other = next(key for key in named if key != "params")
            _refuse("what an affine map says is known", "affine_map", f"unknown key({other!r}) beside params")
        named = dict(_mapping(named["params"], "affine_map, params"))
    names = {key: _name(key) if patterns else _word(key) for key in named}
    left = MOST_PIECES
    maps: dict[str, AffineMap] = {}
    for key, name in names.items():
        found, taken = _map(named[key], name, left)
        maps[name] = found
        left -= taken
        if tp is not None and found.num_ranks != tp:
            raise GeometryError(
                "a map is of the degree that the checkpoint was written at",
                where=f"map of {name!r}",
                equation=f"ranks of the map({found.num_ranks}) != tp({tp})",
                hint="maps and shards of two checkpoints were mixed, or a rank's file is missing",
            )
    return maps


def write(maps: Mapping[str, AffineMap], *, patterns: bool = True) -> dict[str, Any]:
    """What DeepSpeed reads as these maps: plain numbers, lists and dicts, as few blocks as can be.

    Its planner takes replicas only where all their ranks have them in the same blocks, and so they are
    written, though a map needs fewer.

    Laws:
        ``read(write(maps)) == maps``.
        ``write(read(data)) == data`` where DeepSpeed's blocks were as large as they can be.

    Raises:
        FormatError: A name is empty or has blanks.
    """
    params: dict[str, Any] = {}
    for name, found in maps.items():
        params[f"^{re.escape(_word(name))}$" if patterns else _word(name)] = {
            "logical_shape": list(found.shape),
            "ranks": {
                rank: {"shard_shape": list(shard), "pieces": pieces}
                for (rank, shard), pieces in zip(
                    enumerate(found.shards), _written(found, _alike(found)), strict=True
                )
            },
        }
    return {"version": VERSION, "params": params}


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


# --- reading ------------------------------------------------------------------------------------


def _map(entry: object, name: str, left: int) -> tuple[AffineMap, int]:
    """The map of one weight, and how many blocks were looked at for it."""
    where = f"map of {name!r}"
    found = _mapping(entry, where, {"logical_shape", "ranks"})
    shape = _ints(found["logical_shape"], f"{where}, logical_shape")
    ranks = _ranks(found["ranks"], where)
    shards, views, sets = [], Views(), dict[tuple[int, ...], int]()
    for rank, told in enumerate(ranks):
        here = f"{where}, rank {rank}"
        held = _mapping(told, here, {"shard_shape", "pieces"})
        shards.append(_ints(held["shard_shape"], f"{here}, shard_shape"))
        pieces = held["pieces"]
        if not isinstance(pieces, list | tuple):
            _refuse("the blocks of a rank are a list", here, f"pieces({type(pieces).__name__})")
        if len(views) + len(pieces) > left:
            _refuse(
                "a document has blocks that can be looked at",
                here,
                f"{len(views) + len(pieces)} blocks > {left} that are left of {MOST_PIECES}",
            )
        for number, piece in enumerate(pieces):
            _piece(views, rank, piece, sets, f"{here}, block {number}")
    index, at, count, row = blocks_of_views(views, shape, shards, most=left, name=repr(name))
    columns = Pieces(
        np.array(views.rank, dtype=np.int64)[row],
        index,
        at,
        count,
        np.array(views.holders, dtype=np.int64)[row],
        np.array(views.scale, dtype=np.float64)[row],
    )
    return AffineMap(shape, shards, columns, list(sets), name=repr(name)), max(len(views), len(row))


def _piece(views: Views, rank: int, piece: object, sets: dict[tuple[int, ...], int], where: str) -> None:
    if not isinstance(piece, dict) or not _PIECE <= piece.keys() <= _PIECE | {"scale"}:
        keys = ", ".join(map(repr, piece)) if isinstance(piece, dict) else type(piece).__name__
        _refuse("a block says shape, source, dest, locations and scale, and nothing else", where, f"({keys})")
    shape, source, dest = piece["shape"], piece["source"], piece["dest"]
    if not (len_of(source) == len_of(dest) == 2):
        _refuse("a view is an offset and strides", where, f"source({source!r:.60}), dest({dest!r:.60})")
    ranks = piece["locations"]
    if not isinstance(ranks, list | tuple) or not set(map(type, ranks)) <= {int}:
        _refuse("locations are ranks", where, f"locations({ranks!r:.60})")
    scale = piece.get("scale", 1.0)
    if type(scale) not in (int, float) or abs(scale) > 2.0**1023:
        scale = scale if type(scale) is float else repr(scale)[:60]
        raise TransformError(
            "a scale is a finite number, and a power of two",
            where=where,
            equation=f"scale({scale})",
            hint="store the values unscaled",
        )
    if not views.add(rank, shape, source, dest):
        _refuse(
            "the sizes, offsets and strides of a block are whole numbers, as many strides as sizes",
            where,
            f"shape({shape!r:.60}), source({source!r:.60}), dest({dest!r:.60})",
        )
    views.scale.append(float(scale))
    views.holders.append(sets.setdefault(tuple(ranks), len(sets)))


def len_of(value: object) -> int:
    """The length of a list or tuple, or -1."""
    return len(value) if isinstance(value, list | tuple) else -1


def _ranks(value: object, where: str) -> list[object]:
    """What is said of each rank, in order; JSON makes words of numbers."""
    entries = _mapping(value, f"{where}, ranks")
    found: dict[int, object] = {}
    for key, entry in entries.items():
        rank = key if type(key) is int else -1
        if isinstance(key, str) and _RANK.fullmatch(key):
            rank = int(key)
        if rank < 0 or rank in found:
            _refuse("the ranks of a map are whole numbers, each once", where, f"rank({key!r:.60})")
        found[rank] = entry
    missing = next((rank for rank in range(len(found)) if rank not in found), None)
    if missing is not None or not found:
        _refuse(
            "a map says of every rank what it holds, from rank 0 on",
            where,
            f"{len(found)} ranks, and rank {missing or 0} is missing",
        )
    return [found[rank] for rank in range(len(found))]


def _name(pattern: object) -> str:
    """The one name that a pattern matches."""
    if isinstance(pattern, str):
        name = re.sub(r"\\(.)", r"\1", pattern[1:-1], flags=re.DOTALL)
        if pattern == f"^{re.escape(name)}$":
            return _word(name)
    _refuse(
        "a pattern of an affine map is the escaped name of one weight between ^ and $",
        "affine_map",
        f"pattern({pattern!r:.120})",
    )


def _word(name: object) -> str:
    if not isinstance(name, str) or not name or any(c.isspace() or not c.isprintable() for c in name):
        _refuse("the name of a weight is a word", "affine_map", f"name({name!r:.120})")
    return name


def _mapping(value: object, where: str, keys: set[str] | None = None) -> Mapping[Any, Any]:
    if isinstance(value, Mapping) and (keys is None or value.keys() == keys):
        return value
    found = type(value).__name__
    if isinstance(value, Mapping):
        found = ", ".join(f"{key!r:.40}" for key in itertools.islice(value, 8))
    wanted = f" of {', '.join(sorted(keys))}" if keys else ""
    _refuse("what an affine map says is known", where, f"({found}) is not a mapping{wanted}")


def _ints(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(type(one) is not int for one in value) or len(value) > 64:
        _refuse("a shape is a list of whole numbers", where, f"({value!r:.120})")
    return tuple(value)


def _refuse(rule: str, where: str, equation: str) -> NoReturn:
    raise FormatError(
        rule,
        where=where,
        equation=equation,
        hint="what is not understood is not guessed: it is of another version of DeepSpeed, or damaged",
    )


# --- writing ------------------------------------------------------------------------------------


def _alike(found: AffineMap) -> Pieces:
    """The blocks of a map, cut so that ranks that share a region have it in the same blocks."""
    pieces = found.pieces
    shared = np.array([len(ranks) > 1 for ranks in found.sets], dtype=np.bool_)[pieces.holders]
    rows = np.flatnonzero(shared)
    if not len(rows):
        return pieces
    row, low, high, _ = cut(pieces.holders[rows], pieces.index[rows], pieces.index[rows] + pieces.count[rows])
    if len(row) == len(rows):
        return pieces
    # Only what is staggered: blocks that are alike everywhere would be cut at the edges of others.
    row = rows[row]
    parts = Pieces(
        pieces.rank[row],
        low,
        pieces.at[row] + low - pieces.index[row],
        high - low,
        pieces.holders[row],
        pieces.scale[row],
    )
    own = pieces[~shared]
    joined = Pieces(
        *(np.concatenate([getattr(own, name), getattr(parts, name)]) for name in Pieces.__slots__)
    )
    return joined[np.lexsort((*joined.at.T[::-1], joined.rank))]


def _written(found: AffineMap, pieces: Pieces) -> Iterator[list[dict[str, Any]]]:
    """The blocks of each rank as DeepSpeed writes them."""
    source = _strides(found.shape)
    bounds = np.searchsorted(pieces.rank, np.arange(found.num_ranks + 1)).tolist()
    offsets = (pieces.index @ np.array(source, dtype=np.int64)).tolist() if source else [0] * len(pieces)
    shapes, ats = pieces.count.tolist(), pieces.at.tolist()
    holders, scales = pieces.holders.tolist(), pieces.scale.tolist()
    for rank, shard in enumerate(found.shards):
        dest = _strides(shard)
        written = []
        for i in range(bounds[rank], bounds[rank + 1]):
            entry: dict[str, Any] = {
                "shape": shapes[i],
                "source": [offsets[i], list(source)],
                "dest": [sum(a * s for a, s in zip(ats[i], dest, strict=True)), list(dest)],
                "locations": list(found.sets[holders[i]]),
            }
            if scales[i] != 1.0:
                entry["scale"] = scales[i]
            written.append(entry)
        yield written


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


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
