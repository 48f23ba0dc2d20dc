"""The document of affine maps as DeepSpeed has it in a checkpoint: read strictly, written as it reads it.

Nothing is taken for what it resembles: another version, a key that is not known, a pattern that matches more
than one name, a number that is a truth or a float. Sizes are looked at before anything is made of them, so
that a document costs what its length says and no more.

Source: deepspeed 0.19.8, ``checkpoint/affine.py``, ``module_inject/layers.py``; ``affine_ir_spec.md``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from shardweave.dialects.affine_views import Views, blocks_of_views
from shardweave.errors import FormatError, GeometryError, TransformError
from shardweave.layout.affine import AffineMap, Pieces
from shardweave.layout.affine_proof import Proof
from shardweave.layout.region import cut

VERSION = 1
"""The encoding that is known. Another one may have fields that change what the known ones mean."""

MOST_PIECES = 1 << 20
"""The most blocks of a document. A model of 723 weights has 0.07 million at 8 ranks, 0.6 million at 64."""

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
    known: dict[object, tuple[AffineMap, int]] = {}
    maps: dict[str, AffineMap] = {}
    for key, name in names.items():
        found, taken = _map(named[key], name, left, known)
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


# --- reading ------------------------------------------------------------------------------------


def _map(
    entry: object, name: str, left: int, known: dict[object, tuple[AffineMap, int]]
) -> tuple[AffineMap, int]:
    """The map of one weight, and how many blocks were looked at for it. Layers have the same ones."""
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
    key = shape, tuple(shards), views.key(), tuple(sets)
    if key in known:
        return known[key]
    Proof(shape, tuple(shards), repr(name)).check_shapes()
    index, at, count, row = blocks_of_views(views, shape, shards, most=left, name=repr(name))
    columns = Pieces(
        np.array(views.rank, dtype=np.int64)[row],
        index,
        at,
        count,
        np.array(views.holders, dtype=np.int64)[row],
        np.array(views.scale, dtype=np.float64)[row],
    )
    made = AffineMap(shape, shards, columns, list(sets), name=repr(name))
    known[key] = made, max(len(views), len(row))
    return known[key]


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
    views.holders.append(sets.setdefault(tuple(sorted(set(ranks))), len(sets)))


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
