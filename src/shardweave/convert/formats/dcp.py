"""Folders of torch.distributed.checkpoint, as a training script saves a model and its optimizer."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from shardweave.convert.checkpoint import Checkpoint, OptimizerState, Settings
from shardweave.convert.formats import hf as names
from shardweave.convert.formats.format import Format
from shardweave.convert.numbers import number
from shardweave.convert.states import (
    HINT,
    STEP,
    groups_of,
    members,
    plain_settings,
    settings_by_weight,
    states_in,
    stored_states,
)
from shardweave.convert.target import (
    Box,
    Facts,
    Target,
    Wanted,
    refuse_geometry,
    specs_of,
    state_rules,
    with_dtypes,
)
from shardweave.dialects import hf
from shardweave.errors import FormatError, UnknownNameError
from shardweave.layout import Buffer, Layout
from shardweave.layout.dtype import itemsize
from shardweave.models import from_config
from shardweave.store import torch_dcp, torch_dist, torch_dist_write, torch_save
from shardweave.store.manifest import Manifest, StoredTensor, TensorSpec
from shardweave.store.read import Reader
from shardweave.store.strict_json import some
from shardweave.store.torch_dcp import Keys, key_of

CHUNK_BYTES: Final = 64 << 20
"""torch reads a chunk whole where it needs a part of it."""
_MEGATRON: Final = ("decoder.", "embedding.")


def is_torch_dist(names: Collection[str]) -> bool:
    """Whether a folder is of torch.distributed.checkpoint, be it Megatron's or not."""
    return bool({torch_dist.INDEX, torch_dist.TRACKER} & set(names)) or any(
        name.endswith(".distcp") for name in names
    )


def is_megatron(names: Collection[str]) -> bool:
    """Whether a folder has what Megatron writes beside the files of torch."""
    return bool({torch_dist.CONFIG, torch_dist.COMMON, torch_dist.TRACKER} & set(names))


def _recognise(root: Path, names: Collection[str]) -> bool:
    return is_torch_dist(names) and not is_megatron(names)


def _read(root: Path) -> Manifest:
    found = torch_dist.read(root)
    # Megatron's tensors may have been saved by a script, without the files beside them.
    of_megatron = any(key.startswith(_MEGATRON) for key in found.tensors)
    return replace(found, format="megatron" if of_megatron else "dcp")


def _named(manifest: Manifest, config: Mapping[str, Any] | None) -> Manifest:
    if config is not None:
        return torch_dcp.named(manifest, hf.names(from_config(config, dtype="float32")))
    return torch_dcp.unnamed(manifest)


# --- the state of an optimizer ------------------------------------------------------------------


def _states(source: Checkpoint, settings: Settings | None) -> OptimizerState | None:
    stored = stored_states(source)
    if not stored:
        return None
    groups, keys, grouped = _groups(source)
    untrained = None
    if groups:
        trained = {name for params, _ in groups for name in params}
        untrained = {key for key in source.layout.stored() if key not in trained}
    layout, weights = states_in(source, stored, untrained=untrained)
    counts, more = _counts(source, stored)
    said = settings_by_weight(
        [(_weights_of(source, params), setting) for params, setting in groups],
        weights,
        str(source.manifest.root),
    )
    # Groups have their weights in the order of the module; where each weight has settings, none is known.
    return OptimizerState(
        layout, weights, counts, said, frozenset({*keys, *more}), grouped=grouped, ordered=grouped
    )


def _counts(
    source: Checkpoint, stored: Mapping[str, Mapping[str, StoredTensor]]
) -> tuple[dict[str, int], set[str]]:
    """The number that weights have beside their moments, and the keys that it was read from."""
    where, counts, keys = str(source.manifest.root), dict[str, int](), set[str]()
    missing = [name for name, states in stored.items() if "exp_avg" in states and STEP not in states]
    if missing:
        raise UnknownNameError(
            "a weight with moments has the number of its updates",
            where=where,
            equation=f"{len(missing)} missing: {some(repr(f'optim/{name}/{STEP}') for name in missing)}",
            hint=f"the state was saved in part; save it again, or {HINT}",
        )
    held = dict(members(source.layout))
    with Reader(source.manifest) as reader:
        for name, states in stored.items():
            if STEP not in states:
                continue
            key = f"optim/{name}/{STEP}"
            keys.add(key)
            count = number(reader, key, where)
            if not count.is_integer() or not 0 <= count < 1 << 53:
                raise FormatError(
                    "a number of updates is a whole number",
                    where=f"{where}, {key!r}",
                    equation=f"step({count})",
                    hint=f"save the state again, or {HINT}",
                )
            counts |= {weight: int(count) for weight, _ in held.get(name, ())}
    return counts, keys


def _groups(source: Checkpoint) -> tuple[list[tuple[list[str], Mapping[str, Any]]], set[str], bool]:
    """The arrays of each group with its settings, the keys of these, and whether they are of groups."""
    manifest, where = source.manifest, str(source.manifest.root)
    names = {key: name for name, key in manifest.records["keys"].items()}
    groups: dict[str, dict[str, Any]] = {}
    keys = set()
    with Reader(manifest) as reader:
        for key, group, setting in torch_dcp.settings(manifest):
            if key in names:
                value: Any = number(reader, names[key], where)
            else:
                value = torch_dist.read_object(manifest, key)
            groups.setdefault(group, {})[setting] = value
            keys.add(names.get(key, key))
    held = {array for array, _ in members(source.layout)}
    found: list[tuple[list[str], Mapping[str, Any]]] = []
    grouped = all("params" in said for said in groups.values())
    for group, said in sorted(groups.items(), key=lambda item: int(item[0])) if grouped else groups.items():
        params = said.get("params", [group])
        unknown = [name for name in params if name not in held]
        if unknown:
            raise UnknownNameError(
                "settings are of weights of the model",
                where=f"{where}, group {group!r}",
                equation=f"{len(unknown)} are of none: {some(map(repr, unknown))}",
                hint=f"save the optimizer of the model that is saved beside it, or {HINT}",
            )
        found.append((list(params), plain_settings(said, where)))
    return found, keys, grouped


def _weights_of(source: Checkpoint, arrays: Collection[str]) -> list[str]:
    held = dict(members(source.layout))
    return [name for array in arrays for name, _ in held[array]]


# --- writing ------------------------------------------------------------------------------------


def _target(source: Checkpoint, state: OptimizerState | None, wanted: Wanted) -> Target:
    refuse_geometry("dcp", wanted)
    keys = wanted.keys or Keys()
    # As modules hold them: stacked, and a tied weight under each of its names.
    weights = hf.layout(
        source.model,
        stacked_experts=hf.stackable(source.model),
        with_aliases=not source.model.scaled,
    )
    rules = [replace(rule, name=key_of(keys.weight(rule.name))) for rule in weights.rules]
    if state is not None:
        rules += state_rules(weights, state, lambda name, one: key_of(keys.state(name, one)))
    held = with_dtypes(replace(weights, rules=tuple(rules)), source, wanted.dtype)
    ways = {key_of(way): way for name in weights.arrays(0) for way in [keys.weight(name)]}
    constants, objects = dict[str, bytes](), dict[str, bytes]()
    if state is not None:
        constants, objects, more = _beside(weights, state, keys, where=str(source.manifest.root))
        ways |= more
    specs = [*specs_of(held, _rows), *(TensorSpec(key, "float32", ()) for key in constants)]
    records = {"objects": objects, "metadata": None, "planner_data": ways}
    return Target(
        "dcp",
        held,
        tuple(specs),
        wanted.max_file_bytes,
        allocate=partial(
            torch_dist_write.allocate, tensors=specs, records=records, max_file_bytes=wanted.max_file_bytes
        ),
        finish=finish,
        constants=constants,
        fixed=objects,
        crc=True,
    )


def _rows(key: str, buffer: Buffer) -> Iterator[Box]:
    """A tensor in chunks of whole rows."""
    shape = buffer.shape
    if not shape or not math.prod(shape):
        return
    step = max(1, CHUNK_BYTES // (math.prod(shape[1:]) * itemsize(buffer.dtype)))
    for low in range(0, shape[0], step):
        yield (low, *(0 for _ in shape[1:])), (min(step, shape[0] - low), *shape[1:])


def _beside(
    weights: Layout, state: OptimizerState, keys: Keys, *, where: str
) -> tuple[dict[str, bytes], dict[str, bytes], dict[str, torch_dcp.Path]]:
    """The number of updates of each weight, the settings, and the way to each key."""
    constants, objects, ways = dict[str, bytes](), dict[str, bytes](), dict[str, torch_dcp.Path]()
    arrays = {
        array: [name for name, _ in few]
        for array, few in members(weights)
        if any(name in state.weights for name, _ in few)
    }
    for array, held in arrays.items():
        weight = state.weights[held[0]]
        for one in sorted(weight.states):
            ways |= {key_of(way): way for way in [keys.state(array, one)]}
        if any(name in state.counts for name in held):
            way = keys.state(array, STEP)
            ways[key_of(way)] = way
            constants[key_of(way)] = _step(state, held, where)
        elif "exp_avg" in weight.states:
            _refuse_step(None, where)
    groups = groups_of(state, arrays, where)
    for i, group in enumerate(groups):
        for of in group["params"] if keys.flat else [i]:
            for setting, value in group.items():
                if setting != "params" or not keys.flat:
                    way = keys.setting(of, setting)
                    ways[key_of(way)], objects[key_of(way)] = way, torch_save.stream(value)
    return constants, objects, ways


def _step(state: OptimizerState, held: Collection[str], where: str) -> bytes:
    counts = {state.counts.get(name) for name in held}
    count = next(iter(counts))
    if len(counts) > 1 or count is None or count > 1 << 24:
        _refuse_step(count, where)
    return struct.pack("<f", count)


def _refuse_step(count: int | None, where: str) -> None:
    raise FormatError(
        "torch counts updates in float32",
        where=where,
        equation=f"count({count})" + ("" if count is None else f" > {1 << 24}"),
        hint=HINT,
    )


def finish(manifest: Manifest, facts: Facts, *, config: Mapping[str, Any], fsync: bool) -> None:
    """Seal the streams with their checksums, and write the index."""
    checksums = {extent: int(one["crc32"]) for extent, one in facts.items() if "crc32" in one}
    torch_dist_write.finish(manifest, checksums, fsync=fsync)


FORMAT = Format(
    name="dcp",
    holds=".metadata and *.distcp alone",
    recognise=_recognise,
    read=_read,
    layout=names.layout,
    target=_target,
    beside=("optim/", torch_dcp.OTHER),
    named=_named,
    as_stored=torch_dcp.as_stored,
    states=_states,
    takes_states=True,
    takes_part=True,
)
