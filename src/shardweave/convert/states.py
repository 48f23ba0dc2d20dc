"""The state of an optimizer in a checkpoint: tensors beside the weights, counts, and settings.

A state is one more tensor of the shape of its weight, ``optim/{name}/{state}``, so a layout of weights is one
of states with other names, and all that is done with weights is done with states. Beside them there are two
things that no layout has: how many updates were made, and with which settings. Both are read by the formats,
so that a state that cannot be continued is refused before a byte is written.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from shardweave.convert.arrays import as_stored
from shardweave.convert.checkpoint import Checkpoint, OptimizerState, Weight
from shardweave.errors import BufferRuleError, FormatError, UnknownNameError
from shardweave.layout import Buffer, BufferRule, Dim, Layout, Part, Run, Tensor, narrowed
from shardweave.store.manifest import StoredTensor
from shardweave.store.optimizer import OptimizerRecord
from shardweave.store.strict_json import some
from shardweave.store.torch_dcp import plain_setting

MASTER: Final = "master"
"""The state that is a weight in full precision, where the weight itself is stored rounded."""
STEP: Final = "step"
"""What formats call the number of updates of a weight."""
ADAM: Final = frozenset({"exp_avg", "exp_avg_sq"})
"""The states that weights have of AdamW."""
MUON: Final = frozenset({"momentum_buffer"})
"""The states that matrices have of Muon."""
HINT: Final = "convert the weights alone with --weights-only"


def stored_states(source: Checkpoint) -> dict[str, dict[str, StoredTensor]]:
    """The arrays that are states, by the stored key of their weight and by state."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in source.manifest.tensors.items():
        if key.startswith("optim/"):
            name, _, state = key.removeprefix("optim/").rpartition("/")
            state, at, rank = state.partition("@")
            found.setdefault(f"{name}{at}{rank}", {})[state] = tensor
    return found


def states_in(
    source: Checkpoint,
    stored: Mapping[str, Mapping[str, StoredTensor]],
    *,
    untrained: Collection[str] | None = None,
) -> tuple[Layout, dict[str, Weight]]:
    """The states that are stored as a layout, and the weights that have them.

    Args:
        source: The checkpoint.
        stored: From ``stored_states``.
        untrained: The names of arrays that rightly have no states; ``None`` where the format does not say.

    Raises:
        UnknownNameError: Weights of a family have different states, one has none, or a state is of no weight.
        OutsideError: A state has another shape than its weight.
        DtypeError: A state has another dtype than that of the other weights of a family.
    """
    where, rules, known = str(source.manifest.root), list[BufferRule](), set[str]()
    weights: dict[str, Weight] = {}
    for rule in owners(source.layout):
        arrays = list(_arrays(source.layout, rule))
        known |= {key for key, _, _ in arrays}
        has = {key: frozenset(stored.get(key, {})) - {STEP} for key, _, _ in arrays}
        of: dict[str, set[frozenset[str]]] = defaultdict(set)
        shapes: dict[str, tuple[int, ...]] = {}
        for key, buffer, positions in arrays:
            for name, shape in held_by(buffer, positions):
                of[name].add(has[key])
                shapes[name] = shape
        trained = {name: states for name, states in of.items() if states != {frozenset()}}
        found = {state for states in trained.values() for one in states for state in one}
        if missing := [f"optim/{key}/{state}" for key, one in has.items() if one for state in found - one]:
            raise UnknownNameError(
                "every weight of a family has the same states",
                where=where,
                equation=f"{len(missing)} missing: {some(map(repr, sorted(missing)))}",
                hint=f"the state was saved in part; save it again from all ranks, or {HINT}",
            )
        lost = [key for key, one in has.items() if not one and not _is_untrained(key, untrained)]
        if lost:
            raise UnknownNameError(
                "a weight that is trained has states",
                where=where,
                equation=f"{len(lost)} have none: {some(map(repr, lost))}",
                hint=f"the state was saved in part; save it again from all ranks, or {HINT}",
            )
        if not trained:
            continue
        kept = _narrowed(source.layout, rule, of, trained, where)
        rules += (state_rule(kept, state) for state in sorted(found))
        weights |= {name: Weight(name, shapes[name], frozenset(found - {MASTER})) for name in trained}
    stray = sorted(set(stored) - known)
    if stray:
        raise UnknownNameError(
            "states are of weights of the model",
            where=where,
            equation=f"{len(stray)} are of none: {some(map(repr, stray))}",
            hint=f"a tied weight has its state under the name that it is stored by; {HINT}",
        )
    layout = Layout("states", source.layout.mesh, tuple(rules))
    return as_stored(layout, source.manifest.tensors), weights


def _is_untrained(key: str, untrained: Collection[str] | None) -> bool:
    return untrained is None or key.partition("@")[0] in untrained


def _narrowed(
    layout: Layout,
    rule: BufferRule,
    of: Mapping[str, object],
    trained: Collection[str],
    where: str,
) -> BufferRule:
    """The rule without the members of families that are not trained."""
    if len(trained) == len(of):
        return rule
    wanted: dict[Tensor, Tensor] = {}
    for tensor in dict.fromkeys(part.tensor for part in rule.parts):
        axes = [axis for axis, _ in tensor.index]
        turns = [
            turn
            for turn in itertools.product(*([n for _, n in dim] for _, dim in tensor.index))
            if tensor.member(dict(zip(axes, turn, strict=True))) in trained
        ]
        numbers = [sorted({turn[d] for turn in turns}) for d in range(len(axes))]
        if len(turns) == math.prod(map(len, numbers)):
            index = zip(axes, (Dim(Run("", n, 1) for n in each) for each in numbers), strict=True)
            wanted[tensor] = replace(tensor, index=tuple(index))
    return part_of(layout, rule, wanted, where=where)


def part_of(layout: Layout, rule: BufferRule, wanted: Mapping[Tensor, Tensor], *, where: str) -> BufferRule:
    """The buffer of some members of the families of a buffer.

    Args:
        layout: What it is in.
        rule: The buffer.
        wanted: Its tensors, each with the members that are wanted.
        where: What a message says of the checkpoint.

    Raises:
        UnknownNameError: They are not arrays of their own.
    """
    if all(part.tensor == wanted.get(part.tensor) for part in rule.parts):
        return rule
    try:
        (kept,) = narrowed(replace(layout, rules=(rule,)), wanted, in_part=False).rules
    except (BufferRuleError, ValueError) as error:
        raise UnknownNameError(
            "weights that are stored as one are trained together",
            where=f"{where}, {rule.name!r}",
            equation="some of its weights have states, others have none",
            hint=HINT,
        ) from error
    return kept


def trained_part(layout: Layout, rule: BufferRule, state: OptimizerState) -> Iterator[tuple[BufferRule, str]]:
    """The part of a buffer of weights that is trained, with each state that it has.

    Raises:
        UnknownNameError: Weights that are stored as one have different states, or some have none.
    """
    states = {part.tensor: state.states_of(part.tensor) for part in rule.parts}
    has = {tensor: tuple(found) for tensor, found in states.items()}
    if len(set(has.values())) > 1:
        (one, first), (other, second) = list(has.items())[:2]
        raise UnknownNameError(
            "weights that are stored as one have the same states",
            where=f"{rule.name!r}",
            equation=f"{', '.join(first)} of {one.name!r} != {', '.join(second)} of {other.name!r}",
            hint=HINT,
        )
    found = has[rule.parts[0].tensor]
    if not found:
        return
    # Families may be trained in part: the lower layers of a model are frozen.
    trained = {tensor: replace(tensor, index=of[found[0]].index) for tensor, of in states.items()}
    kept = part_of(layout, rule, trained, where=layout.name)
    yield from ((kept, which) for which in found)


def owners(layout: Layout) -> Iterator[BufferRule]:
    """The rules of a layout, without those that hold again what another one owns."""
    owned = {part.tensor for rule in layout.rules for part in rule.parts if not part.replica}
    for rule in layout.rules:
        if not any(part.replica and part.tensor in owned for part in rule.parts):
            yield rule


def keys_of(layout: Layout, rule: BufferRule) -> list[str]:
    """The keys of the arrays of a rule of a layout, on all ranks, each once."""
    return list(dict.fromkeys(key for key, _, _ in _arrays(layout, rule)))


def _arrays(layout: Layout, rule: BufferRule) -> Iterator[tuple[str, Buffer, tuple[int, ...]]]:
    for rank in layout.mesh.ranks:
        buffer = rule.at(layout.mesh, rank)
        if buffer is not None:
            for name, positions in buffer.members():
                yield layout.key(rank, name), buffer, positions


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
    """For each array that owns what it holds, its key and the tensors in it by name and shape."""
    for rule in owners(layout):
        for key, buffer, positions in _arrays(layout, rule):
            yield key, tuple(held_by(buffer, positions))


def held_by(buffer: Buffer, positions: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The members of families that one array of a buffer holds, by name and shape."""
    at = dict(zip(buffer.separate, positions, strict=True))
    for part in buffer.parts:
        axes = [axis for axis, _ in part.tensor.index]
        numbers = [
            [n for _, n in buffer.dims[d]] if d not in at else [buffer.dims[d][at[d]][1]]
            for d in range(len(axes))
        ]
        for turn in itertools.product(*numbers):
            yield part.tensor.member(dict(zip(axes, turn, strict=True))), part.tensor.shape


# --- what is recorded beside them ---------------------------------------------------------------


def recorded(source: Checkpoint, *, ordered: bool = False) -> OptimizerState | None:
    """The state of a format that records counts and settings in one place; ``None`` where it has no states.

    Args:
        source: The checkpoint.
        ordered: Whether its groups have the weights in the order of their module.

    Raises:
        As ``states_in``, and FormatError where a weight has settings twice or not at all.
    """
    stored = stored_states(source)
    if not stored:
        return None
    record: OptimizerRecord = source.manifest.records["optimizer"]
    layout, weights = states_in(source, stored, untrained=source.manifest.records.get("untrained"))
    where = str(source.manifest.root)
    names = {key: [name for name, _ in few] for key, few in members(source.layout)}
    names |= {key.partition("@")[0]: held for key, held in names.items()}  # every rank has the same ones
    counts = {name: count for array, count in record.count.items() for name in names.get(array, ())}
    groups = [
        ([name for array in group["params"] for name in names.get(array, ())], plain_settings(group, where))
        for group in record.groups
    ]
    settings = settings_by_weight(groups, weights, where) if groups else {}
    counts = {name: count for name, count in counts.items() if name in weights}
    return OptimizerState(layout, weights, counts, settings, grouped=True, ordered=ordered)


def plain_settings(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a group without the names of its weights; pairs are tuples, as torch has them."""
    odd = [
        key for key, value in group.items() if key != "params" and ("." in key or not plain_setting(value))
    ]
    if odd:
        raise FormatError(
            "a setting of an optimizer is a number, a text, a truth value, or a few of them",
            where=f"{where}, {odd[0]!r}",
            equation=f"found {type(group[odd[0]]).__name__}" + (" in a dict" if "." in odd[0] else ""),
            hint=f"take it out of the groups of the optimizer before they are saved, or {HINT}",
        )
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in group.items()
        if key != "params"
    }


def settings_by_weight(
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]], weights: Mapping[str, Weight], where: str
) -> dict[str, Mapping[str, Any]]:
    """The settings of each weight; each is in one group, whose weights have the same states."""
    found: dict[str, Mapping[str, Any]] = {}
    listed = Counter(name for names, _ in groups for name in names)
    for names, said in groups:
        found |= dict.fromkeys(names, said)
        _check_alike([weights[name] for name in names if name in weights], where)
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
                hint=f"save the whole optimizer, or {HINT}",
            )
    return found


def _check_alike(group: Sequence[Weight], where: str) -> None:
    for weight in group[1:]:
        if weight.states != group[0].states:
            one, other = (f"{', '.join(sorted(w.states))} of {w.name!r}" for w in (group[0], weight))
            raise UnknownNameError(
                "weights of one group of settings have the same states",
                where=where,
                equation=f"{one} != {other}",
                hint=f"the state was saved in part; save it again from all ranks, or {HINT}",
            )


def groups_of(state: OptimizerState, names: Mapping[str, Sequence[str]], where: str) -> list[dict[str, Any]]:
    """Groups of arrays with equal settings, ``params`` first to last, as an optimizer has them.

    Args:
        state: The state, with settings.
        names: For each array of a target that has states, the weights in it.
        where: What a message says of the checkpoint.

    Raises:
        FormatError: Settings are not known, or weights that are stored as one have different ones.
    """
    found: list[tuple[Mapping[str, Any], list[str]]] = []
    for array, few in names.items():
        said = [state.settings.get(name) for name in few]
        if said[0] is None or any(one != said[0] for one in said):
            raise FormatError(
                "the settings of an optimizer are known, one for each weight",
                where=f"{where}, {array!r}",
                equation="none are recorded" if None in said else "its parts have different ones",
                hint="convert a checkpoint that a run saved, or the weights alone with --weights-only",
            )
        alike = operator.is_ if state.grouped else operator.eq
        same = next((params for other, params in found if alike(other, said[0])), None)
        if same is None:
            found.append((said[0], [array]))
        else:
            same.append(array)
    return [{**said, "params": params} for said, params in found]


def count_of(state: OptimizerState, names: Collection[str], where: str) -> int | None:
    """The number of updates that some weights have in common; ``None`` where none is counted.

    Raises:
        FormatError: They were updated unequally often.
    """
    said = {state.counts[name]: name for name in names if name in state.counts}
    if len(said) > 1:
        (one, first), (other, second) = list(said.items())[:2]
        raise FormatError(
            "weights with one count of updates were updated equally often",
            where=where,
            equation=f"step({one}) of {first!r} != step({other}) of {second!r}",
            hint=f"go on to a format that counts for each weight, such as dcp, or {HINT}",
        )
    return next(iter(said), None)
