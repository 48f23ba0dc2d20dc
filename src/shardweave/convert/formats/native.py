"""What a run of shardweave saves."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from shardweave import __version__
from shardweave.convert.checkpoint import Checkpoint, OptimizerState, Settings, Weight
from shardweave.convert.formats import hf as names
from shardweave.convert.formats.format import Format
from shardweave.convert.numbers import number
from shardweave.convert.states import (
    HINT,
    MUON,
    count_of,
    groups_of,
    plain_settings,
    settings_by_weight,
    states_in,
    stored_states,
)
from shardweave.convert.target import (
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
from shardweave.store import deepspeed, native, native_files
from shardweave.store.manifest import Manifest, TensorSpec
from shardweave.store.native_manifest import About
from shardweave.store.read import Reader

COUNT: Final = "optim/all/step"
"""The key of the number of updates."""
GROUPS: Final = "param_groups"
"""What the settings of an optimizer are called that a checkpoint was converted with."""
_ORDERED: Final = "param_groups_ordered"
"""Whether the weights of a group are in the order in which their module has them."""


def _recognise(root: Path, names: Collection[str]) -> bool:
    # A run of DeepSpeed has a file ``latest`` too.
    return native.is_native(root) and not deepspeed.is_deepspeed(root)


def is_part(name: str) -> bool:
    """Whether a file of a native checkpoint has this name."""
    return re.fullmatch(r"rank_\d+\.safetensors", name) is not None


def _read(root: Path) -> Manifest:
    return native.named(native.read(root))


def _config(manifest: Manifest) -> Mapping[str, Any] | None:
    return dict(manifest.records["about"].config) or None


# --- the state of an optimizer ------------------------------------------------------------------


def _states(source: Checkpoint, settings: Settings | None) -> OptimizerState | None:
    stored = stored_states(source)
    stored.pop("all", None)
    if not stored:
        return None
    layout, weights = states_in(source, stored)
    count = _count(source)
    said = _settings(source, weights, count or 0, settings)
    extras = source.manifest.records["about"].extras
    # A run counts once; torch counts for weights with moments.
    counted = [name for name, weight in weights.items() if weight.states != MUON]
    return OptimizerState(
        layout,
        weights,
        {name: count for name in counted if count is not None},
        said,
        frozenset({COUNT} if count is not None else ()),
        grouped=GROUPS in extras,
        ordered=extras.get(_ORDERED) is True,
    )


def _count(source: Checkpoint) -> int | None:
    """How many updates were made; ``None`` where no state needs it, as with momentum alone."""
    tensors = source.manifest.tensors
    if COUNT not in tensors and not any(key.endswith("/exp_avg") for key in tensors):
        return None
    if COUNT not in tensors:
        raise UnknownNameError(
            "a state has the number of its updates",
            where=str(source.manifest.root),
            equation=f"{COUNT!r} is not there",
            hint=f"save it with the optimizer's count, as a run does, or {HINT}",
        )
    with Reader(source.manifest) as reader:
        return int(number(reader, COUNT, str(source.manifest.root)))


def _settings(
    source: Checkpoint, weights: Mapping[str, Weight], count: int, settings: Settings | None
) -> dict[str, Mapping[str, Any]]:
    about: About = source.manifest.records["about"]
    where = str(source.manifest.root)
    if GROUPS in about.extras:
        groups = about.extras[GROUPS]
        if not isinstance(groups, Sequence) or not all(
            isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in groups
        ):
            raise FormatError(
                "settings of weights are groups with the names of their weights",
                where=f"{where}, extras[{GROUPS!r}]",
                equation=f"found {type(groups).__name__}",
                hint=f"convert it again from where it came, or {HINT}",
            )
        found = [(group["params"], plain_settings(group, where)) for group in groups]
        return settings_by_weight(found, weights, where)
    if settings is None or not about.extras:
        return {}
    return dict(settings(about, count, weights.values()))


# --- writing ------------------------------------------------------------------------------------


def _target(source: Checkpoint, state: OptimizerState | None, wanted: Wanted) -> Target:
    refuse_geometry("native", wanted)
    weights = hf.layout(source.model)
    rules = [*weights.rules, *(state_rules(weights, state) if state is not None else ())]
    held = with_dtypes(replace(weights, rules=tuple(rules)), source, wanted.dtype)
    specs = specs_of(held)
    constants: dict[str, bytes] = {}
    about = About()
    if state is not None:
        about, count = _about(source, state)
        if count is not None:
            specs.append(TensorSpec(COUNT, "int64", ()))
            constants[COUNT] = struct.pack("<q", count)
    return Target(
        "native",
        held,
        tuple(specs),
        wanted.max_file_bytes,
        allocate=partial(native_files.allocate, tensors=specs, max_file_bytes=wanted.max_file_bytes),
        finish=partial(_finish, about=about),
        constants=constants,
        fixed={"about": msgspec.json.encode([about.step, about.data, about.extras])},
        own_digests=True,
    )


def _about(source: Checkpoint, state: OptimizerState) -> tuple[About, int | None]:
    """What the target says beside its tensors, and the number of updates, where states count them."""
    where = str(source.manifest.root)
    before: About | None = source.manifest.records.get("about")
    if before is not None and not (source.only and GROUPS in before.extras):
        return before, _count(source)
    count = count_of(state, state.weights, where)
    groups = groups_of(state, {name: [name] for name in state.settings}, where)
    said = {GROUPS: groups, _ORDERED: state.ordered}
    if before is not None:  # the groups of a part
        return replace(before, extras={**before.extras, **said}), count
    return About(step=count or 0, extras=said), count


def _finish(
    manifest: Manifest, facts: Facts, *, config: Mapping[str, Any], fsync: bool, about: About
) -> None:
    digests = {extent: bytes.fromhex(one["xxh3_128"]) for extent, one in facts.items()}
    said = replace(about, config=config, software=f"shardweave {__version__}")
    native_files.finish(manifest, digests, said, fsync=fsync)


FORMAT = Format(
    name="native",
    holds=f"{native.MANIFEST}, or step-* with it",
    recognise=_recognise,
    read=_read,
    layout=names.layout,
    target=_target,
    beside=("optim/",),
    config=_config,
    states=_states,
    masters=lambda wanted: "beside",
    takes_states=True,
    takes_part=True,
)
