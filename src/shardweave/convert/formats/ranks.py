"""Folders with a file of shards for each rank, of somebody's own framework: a layout says what they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from shardweave.convert.checkpoint import Checkpoint, OptimizerState
from shardweave.convert.formats.format import Format
from shardweave.convert.target import Facts, Target, Wanted, refuse_geometry, specs_of, with_dtypes
from shardweave.errors import GeometryError, ModelError, UnknownNameError
from shardweave.layout import Layout, Tensor
from shardweave.models import Model
from shardweave.models.plain import FAMILY as PLAIN
from shardweave.store import shards
from shardweave.store.manifest import Manifest, StoredTensor
from shardweave.store.strict_json import some

_HINT = "find it with shardweave probe MODULE:FUNCTION --config CONFIG --tp N --out FILE, and give it with "


def _recognise(root: Path, names: Collection[str]) -> bool:
    return shards.is_of_ranks(names)


def _layout(
    stored: Mapping[str, StoredTensor], model: Model, manifest: Manifest, given: Layout | None
) -> Layout:
    where, ranks = str(manifest.root), manifest.records["ranks"]
    if given is None:
        raise GeometryError(
            "a layout says what the shards of ranks are",
            where=where,
            equation=f"ranks({ranks}), and no layout",
            hint=f"{_HINT}--layout FILE",
        )
    return of_stored(given, stored, model, ranks=ranks, where=where)


def of_stored(
    layout: Layout, stored: Mapping[str, StoredTensor], model: Model, *, ranks: int, where: str
) -> Layout:
    """A layout of somebody's as that of stored shards.

    Raises:
        GeometryError: It is of another number of ranks.
        ModelError: It is of other tensors than the model's.
        UnknownNameError: Its arrays are not those that are stored.
    """
    if layout.mesh.size != ranks:
        raise GeometryError(
            "a layout is of the ranks whose shards are stored",
            where=where,
            equation=f"ranks of {layout.name}({layout.mesh.size}) != stored({ranks})",
            hint="probe the function with this number of ranks, or bring the files of the other ranks",
        )
    held = of_model(layout, model, where)
    names = held.stored().keys()
    missing, unexpected = names - stored.keys(), stored.keys() - names
    if missing or unexpected:
        raise UnknownNameError(
            "the stored names are those of the layout, all of them and no others",
            where=where,
            equation=f"missing {len(missing)}{_few(missing)}; unexpected {len(unexpected)}{_few(unexpected)}",
            hint="give the layout of the framework that saved these files; a name ends with @ and the rank",
        )
    return held


def _few(names: Collection[str]) -> str:
    return f" ({some(sorted(names), limit=3)})" if names else ""


def of_model(layout: Layout, model: Model, where: str) -> Layout:
    """A layout of somebody's as one of the tensors of a model, with rank 0 as its first.

    Raises:
        ModelError: It is of other tensors than the model's.
    """
    if model.family == PLAIN:
        _refuse_plain(where)
    tensors = {tensor.name: tensor for tensor in model.tensors}

    def same(tensor: Tensor) -> Tensor:
        found = tensors.get(tensor.name)
        if found is None or (found.shape, found.index) != (tensor.shape, tensor.index):
            raise ModelError(
                "a layout is of the tensors of the model",
                where=f"layout {layout.name!r}, {where}",
                equation=f"{tensor} != {found or f'no tensor of {model.family}'}",
                hint="probe the function with the config that the checkpoint has",
            )
        return found

    rules = tuple(
        replace(rule, parts=tuple(replace(part, tensor=same(part.tensor)) for part in rule.parts))
        for rule in layout.rules
    )
    held = replace(layout, mesh=replace(layout.mesh, offset=0), rules=rules)
    lost = [tensor.name for tensor in model.decoder.tensors if tensor not in held.holders]
    if lost:
        raise ModelError(
            "a layout holds all tensors of the model",
            where=f"layout {layout.name!r}, {where}",
            equation=f"{len(lost)} are missing: {some(lost)}",
            hint="probe the function with the config that the checkpoint has",
        )
    return held


def _refuse_plain(where: str) -> NoReturn:
    raise ModelError(
        "a model says which tensors shards are of",
        where=where,
        equation="config(none)",
        hint="give its config with --config config.json",
    )


def _shapes(stored: Mapping[str, StoredTensor], manifest: Manifest) -> dict[str, tuple[int, ...]]:
    _refuse_plain(str(manifest.root))


def _target(source: Checkpoint, state: OptimizerState | None, wanted: Wanted) -> Target:
    refuse_geometry(shards.FORMAT, wanted)
    if wanted.layout is None:
        raise GeometryError(
            "a layout says what the shards of ranks are",
            equation=f"to={shards.FORMAT}, and no layout",
            hint=f"{_HINT}--to-layout FILE",
        )
    layout = of_model(wanted.layout, source.model, f"to={shards.FORMAT}")
    held = with_dtypes(layout, source, wanted.dtype)
    specs = tuple(specs_of(held))
    return Target(
        shards.FORMAT,
        held,
        specs,
        wanted.max_file_bytes,
        allocate=partial(shards.allocate, tensors=specs, ranks=held.mesh.size),
        finish=_finish,
    )


def _finish(manifest: Manifest, facts: Facts, *, config: Mapping[str, Any], fsync: bool) -> None:
    shards.finish(manifest, fsync=fsync)


FORMAT = Format(
    name=shards.FORMAT,
    holds="rank_0.safetensors and one for each further rank, and nothing else of safetensors",
    recognise=_recognise,
    read=shards.read,
    layout=_layout,
    target=_target,
    shapes=_shapes,
    takes_layout=True,
)
