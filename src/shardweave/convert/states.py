"""The state of an optimizer in a checkpoint: tensors beside the weights, a count, and settings.

A state is one more tensor of the shape of its weight, ``optim/{name}/{state}``, so a layout of weights is one
of states with other names, and all that is done with weights is done with states. Beside them there are two
things that no layout has: how many updates were made, and with which settings. Both are read here, so that
a state that cannot be continued is refused before a byte is written.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardweave.convert.source import Checkpoint, as_stored
from shardweave.errors import FormatError, ReplicaError, UnknownNameError
from shardweave.layout import BufferRule, Layout, Part
from shardweave.store import torch_dcp, torch_dist
from shardweave.store.manifest import StoredTensor
from shardweave.store.native_manifest import About
from shardweave.store.read import Reader
from shardweave.store.strict_json import some

MASTER, STEP = "master", "step"
COUNT = "optim/all/step"
"""The key of the number of updates in a native checkpoint."""
ADAM, MUON = frozenset({"exp_avg", "exp_avg_sq"}), frozenset({"momentum_buffer"})
"""The states that weights have of AdamW, and of Muon."""
GROUPS = "param_groups"
"""What a native checkpoint calls the settings of an optimizer that it was converted with."""

_NUMBERS = ("float32", "float64", "int32", "int64")
_HINT = "convert the weights alone with --weights-only"


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight that an optimizer updates.

    Attributes:
        name: Its name in files of Hugging Face, each expert on its own.
        shape: Its shape.
        states: Which states it has.
    """

    name: str
    shape: tuple[int, ...]
    states: frozenset[str]


Settings = Callable[[About, int, Collection[Weight]], Mapping[str, Mapping[str, Any]]]
"""The settings of weights by name, in torch's words, from what a run recorded and the updates it made."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an optimizer in a checkpoint.

    Attributes:
        layout: Which stored array has which state of which weight.
        weights: The weights that it is of, by name.
        count: How many updates were made; ``None`` where no state counts them.
        settings: The settings of each weight by its name, by the words of torch; empty where none are known.
        read: Stored keys of the count and the settings.
    """

    layout: Layout
    weights: Mapping[str, Weight]
    count: int | None
    settings: Mapping[str, Mapping[str, Any]]
    read: frozenset[str]

    def states_of(self, name: str) -> tuple[str, ...]:
        """The states of a weight or a family of them, by the name of its tensor."""
        prefix, found = f"optim/{name}/", (tensor.name for tensor in self.layout.tensors)
        return tuple(one.removeprefix(prefix) for one in found if one.startswith(prefix))


def states(source: Checkpoint, *, settings: Settings | None = None) -> OptimizerState | None:
    """What a checkpoint holds of an optimizer; ``None`` where it has weights only.

    Args:
        source: The checkpoint.
        settings: What reads the settings off a native checkpoint that a run saved.

    Raises:
        UnknownNameError: A weight has no state or lacks one, or a state is of no weight, or not known.
        OutsideError: A state has another shape than its weight.
        DtypeError: A state has another dtype than that of the other weights of a family.
        ReplicaError: Weights were updated unequally often.
        FormatError: A count or a setting is no plain value, or weights have settings twice or not at all.
    """
    if source.format not in ("native", torch_dcp.FORMAT):
        return None
    stored: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in source.manifest.tensors.items():
        if key.startswith("optim/") and key != COUNT:
            name, _, state = key.removeprefix("optim/").rpartition("/")
            stored.setdefault(name, {})[state] = tensor
    if not stored:
        return None
    layout = _layout(source, stored)
    weights = _weights(source.layout, stored)
    if source.format == "native":
        made = _count_native(source)
        found = _settings_native(source, weights, made, settings)
        return OptimizerState(layout, weights, made, found, frozenset({COUNT}))
    count, keys = _count_dcp(source, stored)
    found, more = _settings_dcp(source, weights)
    return OptimizerState(layout, weights, count, found, frozenset({*keys, *more}))


# --- tensors ------------------------------------------------------------------------------------


def _layout(source: Checkpoint, stored: Mapping[str, Mapping[str, StoredTensor]]) -> Layout:
    """The states as a layout, every one there, of the shape of its weight."""
    where, rules, known = str(source.manifest.root), list[BufferRule](), set[str]()
    for rule in source.layout.rules:
        if any(part.replica for part in rule.parts):
            continue
        buffer = rule.at(source.layout.mesh, 0)
        assert buffer is not None, "a stored layout has one rank"
        members = [name for name, _ in buffer.members()]
        known |= set(members)
        found = {state for name in members for state in stored.get(name, {})} - {STEP}
        if found - {MASTER} not in (ADAM, MUON):
            raise UnknownNameError(
                "a weight has the states of AdamW or of Muon",
                where=f"{where}, {rule.name!r}",
                equation=f"states({', '.join(sorted(found)) or 'none'}) != ({', '.join(sorted(ADAM))}) or "
                f"({', '.join(MUON)})",
                hint=f"a weight that is not trained has none, and another optimizer has others; {_HINT}",
            )
        missing = [
            f"optim/{name}/{state}"
            for name in members
            for state in sorted(found)
            if state not in stored.get(name, {})
        ]
        if missing:
            raise UnknownNameError(
                "every weight of a family has the same states",
                where=where,
                equation=f"{len(missing)} missing: {some(map(repr, missing))}",
                hint=f"the state was saved in part; save it again from all ranks, or {_HINT}",
            )
        rules += (state_rule(rule, state) for state in sorted(found))
    stray = sorted(set(stored) - known)
    if stray:
        raise UnknownNameError(
            "states are of weights of the model",
            where=where,
            equation=f"{len(stray)} are of none: {some(map(repr, stray))}",
            hint=f"a tied weight has its state under the name that it is stored by; {_HINT}",
        )
    flat = {f"optim/{name}/{state}": one for name, few in stored.items() for state, one in few.items()}
    return as_stored(Layout("states", source.layout.mesh, tuple(rules)), flat)


def state_rule(rule: BufferRule, state: str, *, name: str = "", dtype: str = "") -> BufferRule:
    """The buffer of a state of the weights of a buffer, cut as it is.

    Args:
        rule: The buffer of weights.
        state: The state.
        name: The name of the buffer; ``optim/{name}/{state}`` by default.
        dtype: Its dtype; that of the weights by default.
    """
    parts = tuple(
        Part(replace(part.tensor, name=f"optim/{part.tensor.name}/{state}"), part.label, part.replica)
        for part in rule.parts
    )
    return replace(rule, name=name or f"optim/{rule.name}/{state}", parts=parts, dtype=dtype or rule.dtype)


def members(layout: Layout) -> Iterator[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]]:
    """For each array that owns what it holds, its name and the tensors in it by name and shape."""
    for name, (buffer, positions) in layout.arrays(0).items():
        if any(part.replica for part in buffer.parts):
            continue
        at, found = dict(zip(buffer.separate, positions, strict=True)), []
        for part in buffer.parts:
            axes = [axis for axis, _ in part.tensor.index]
            numbers = [
                [n for _, n in buffer.dims[d]] if d not in at else [buffer.dims[d][at[d]][1]]
                for d in range(len(axes))
            ]
            for turn in itertools.product(*numbers):
                member = part.tensor.member(dict(zip(axes, turn, strict=True)))
                found.append((member, part.tensor.shape))
        yield name, tuple(found)


def _weights(layout: Layout, stored: Mapping[str, Mapping[str, StoredTensor]]) -> dict[str, Weight]:
    found: dict[str, Weight] = {}
    for array, held in members(layout):
        has = frozenset(stored[array]) - {STEP, MASTER}
        found |= {name: Weight(name, shape, has) for name, shape in held}
    return found


# --- how many updates ---------------------------------------------------------------------------


def _count_native(source: Checkpoint) -> int:
    if COUNT not in source.manifest.tensors:
        raise UnknownNameError(
            "a state has the number of its updates",
            where=str(source.manifest.root),
            equation=f"{COUNT!r} is not there",
            hint=f"save it with the optimizer's count, as a run does, or {_HINT}",
        )
    with Reader(source.manifest) as reader:
        return int(_number(reader, COUNT, str(source.manifest.root)))


def _number(reader: Reader, key: str, where: str) -> float:
    """The value of a tensor that is one number."""
    tensor = reader.manifest.tensors[key]
    if tensor.shape or tensor.dtype not in _NUMBERS:
        raise FormatError(
            "a count and a setting are numbers",
            where=f"{where}, {key!r}",
            equation=f"{tensor.dtype} {tensor.shape} is none of {', '.join(_NUMBERS)} without dims",
            hint=f"save the state again, or {_HINT}",
        )
    return float(reader.load(key))


def _count_dcp(
    source: Checkpoint, stored: Mapping[str, Mapping[str, StoredTensor]]
) -> tuple[int | None, set[str]]:
    """The number that every weight has beside its moments, and the keys that it was read from."""
    where, said, keys = str(source.manifest.root), dict[float, str](), set[str]()
    missing = [name for name, states in stored.items() if "exp_avg" in states and STEP not in states]
    if missing:
        raise UnknownNameError(
            "a weight with moments has the number of its updates",
            where=where,
            equation=f"{len(missing)} missing: {some(repr(f'optim/{name}/{STEP}') for name in missing)}",
            hint=f"the state was saved in part; save it again, or {_HINT}",
        )
    with Reader(source.manifest) as reader:
        for name, states in stored.items():
            if STEP not in states:
                continue
            key = f"optim/{name}/{STEP}"
            keys.add(key)
            number = _number(reader, key, where)
            said.setdefault(number, name)
            if not number.is_integer() or not 0 <= number < 1 << 53:
                raise FormatError(
                    "a number of updates is a whole number",
                    where=f"{where}, {key!r}",
                    equation=f"step({number})",
                    hint=f"save the state again, or {_HINT}",
                )
    if len(said) > 1:
        (one, first), (other, second) = list(said.items())[:2]
        raise ReplicaError(
            "all weights were updated equally often",
            where=where,
            equation=f"step({one:g}) of {first!r} != step({other:g}) of {second!r}",
            hint=f"a run has one count of updates; train all weights from the same step on, or {_HINT}",
        )
    return (int(next(iter(said))) if said else None), keys


# --- settings -----------------------------------------------------------------------------------


def _settings_native(
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
                hint=f"convert it again from where it came, or {_HINT}",
            )
        return _by_weight([(group["params"], _plain(group, where)) for group in groups], weights, where)
    if settings is None or not about.extras:
        return {}
    return dict(settings(about, count, weights.values()))


def _plain(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a group without the names of its weights; pairs are tuples, as torch has them."""
    odd = [
        key
        for key, value in group.items()
        if key != "params" and ("." in key or not torch_dcp.plain_setting(value))
    ]
    if odd:
        raise FormatError(
            "a setting of an optimizer is a number, a text, a truth value, or a few of them",
            where=f"{where}, {odd[0]!r}",
            equation=f"found {type(group[odd[0]]).__name__}" + (" in a dict" if "." in odd[0] else ""),
            hint=f"take it out of the groups of the optimizer before they are saved, or {_HINT}",
        )
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in group.items()
        if key != "params"
    }


def _settings_dcp(
    source: Checkpoint, weights: Mapping[str, Weight]
) -> tuple[dict[str, Mapping[str, Any]], set[str]]:
    """The settings of every weight, and the keys that they were read from."""
    manifest, where = source.manifest, str(source.manifest.root)
    names = {key: name for name, key in manifest.records["keys"].items()}
    groups: dict[str, dict[str, Any]] = {}
    keys = set()
    with Reader(manifest) as reader:
        for key, group, setting in torch_dcp.settings(manifest):
            if key in names:
                value: Any = _number(reader, names[key], where)
            else:
                value = torch_dist.read_object(manifest, key)
            groups.setdefault(group, {})[setting] = value
            keys.add(names.get(key, key))
    held = {array: [name for name, _ in few] for array, few in members(source.layout)}
    found: list[tuple[list[str], Mapping[str, Any]]] = []
    for group, said in groups.items():
        params = said.get("params", [group])
        unknown = [name for name in params if name not in held]
        if unknown:
            raise UnknownNameError(
                "settings are of weights of the model",
                where=f"{where}, group {group!r}",
                equation=f"{len(unknown)} are of none: {some(map(repr, unknown))}",
                hint=f"save the optimizer of the model that is saved beside it, or {_HINT}",
            )
        found.append(([name for array in params for name in held[array]], _plain(said, where)))
    return _by_weight(found, weights, where), keys


def _by_weight(
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]], weights: Collection[str], where: str
) -> dict[str, Mapping[str, Any]]:
    """The settings of each weight; each is in one group."""
    found: dict[str, Mapping[str, Any]] = {}
    listed = Counter(name for names, _ in groups for name in names)
    for names, said in groups:
        found |= dict.fromkeys(names, said)
    wrong = {
        "in no group": set(weights) - set(found),
        "of a group and without a state": set(found) - set(weights),
        "in several groups": {name for name, count in listed.items() if count > 1},
    }
    for what, some_of in wrong.items():
        if some_of:
            raise FormatError(
                "every weight is in one group of settings",
                where=where,
                equation=f"{len(some_of)} {what}: {some(map(repr, sorted(some_of)), limit=3)}",
                hint=f"save the whole optimizer, or {_HINT}",
            )
    return found
