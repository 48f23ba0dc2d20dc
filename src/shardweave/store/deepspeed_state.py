"""What a DeepSpeed checkpoint is to say, from a list of arrays and records.

Both forms that DeepSpeed loads, its own files and universal ones, are written from the same description:
which weights there are, which are trained, in which groups, with which states. ``describe`` makes it of
array names and records, and refuses what DeepSpeed could not load.

Source: deepspeed 0.19.8 ``runtime/engine.py``, ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardweave.errors import DtypeError, FormatError, UnknownNameError
from shardweave.store.manifest import ITEMSIZE, TensorSpec
from shardweave.store.optimizer import OptimizerRecord

MASTER: Final = "master"
MODEL_STATES: Final = "model_states"
OPTIMIZER_STATES: Final = "optimizer_states"
INFO: Final = "universal_checkpoint_info"
RECORDS: Final = (
    "optimizer", "untrained", "buffers", "shared", "scalars", INFO, MODEL_STATES, OPTIMIZER_STATES,
)  # fmt: skip
"""Records that a writer takes, all of them optional.

- ``optimizer``: an `OptimizerRecord`.
- ``untrained``: names without state; of these ``buffers`` are no parameters.
- ``shared``: by a further name of a weight, the name that it is stored under.
- ``scalars``: for each group what its states have beside arrays and the count, as plain values.
- ``universal_checkpoint_info``: how weights are cut over tensor-parallel ranks, as DeepSpeed's converter
  takes it.
- ``model_states``: further entries of the files of model states, as plain values: ``lr_scheduler``,
  ``ds_config``, ``global_steps``, and all that a script keeps there (its client state).
- ``optimizer_states``: the same for the files of optimizer states: ``loss_scaler``, ``clip_grad``, ...
"""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight or buffer with its states, as one tensor-parallel rank holds them.

    Attributes:
        name: As the training module has it.
        spec: Its array; of rank k it is stored under ``{name}@k``.
        states: The arrays of its states, by the names of the states.
    """

    name: str
    spec: TensorSpec
    states: Mapping[str, TensorSpec]

    @property
    def numel(self) -> int:
        """Elements of the weight."""
        return math.prod(self.spec.shape)


@dataclass(frozen=True, slots=True)
class Group:
    """A group of parameters of the optimizer.

    Attributes:
        names: Its weights, in order.
        settings: By torch's words; no ``params``.
        states: The states that each of its weights has, without the master copy.
        count: How often its weights were updated; ``None`` where nothing counts.
        scalars: What its states have beside arrays and the count.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Any]
    states: tuple[str, ...]
    count: int | None
    scalars: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Description:
    """What there is to store.

    Attributes:
        ranks: The weights and buffers of each tensor-parallel rank by name, in the module's order.
        groups: The groups of the optimizer; together they hold each trained weight once.
        frozen: Parameters that no group holds.
        buffers: What is no parameter.
        records: The given records.
    """

    ranks: tuple[Mapping[str, Weight], ...]
    groups: tuple[Group, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    records: Mapping[str, Any]


def describe(
    specs: Sequence[TensorSpec], records: Mapping[str, Any], *, tp: int = 1, known: Sequence[str] = RECORDS
) -> Description:
    """Read a list of arrays as weights with their states.

    Args:
        specs: Weights in the order of the module, and states; ``{name}@{k}`` of tensor-parallel rank k.
        records: As `RECORDS` says.
        tp: Tensor-parallel ranks.
        known: The records that are taken.

    Raises:
        FormatError: Arrays, groups or records that contradict each other or that DeepSpeed cannot load.
        UnknownNameError: A group or record names a weight that is not there.
        DtypeError: A state that is not float32, or a dtype without a width.
    """
    if unknown := sorted(set(records) - set(known)):
        raise FormatError(
            "records are among those that the format has",
            equation=f"unknown {unknown}",
            hint=f"known are {', '.join(known)}",
        )
    ranks = _ranks(specs, tp)
    first = ranks[0]
    untrained = frozenset(records.get("untrained", ()))
    buffers = frozenset(records.get("buffers", ()))
    shared = records.get("shared", {})
    _check_names("records", [*sorted(untrained | buffers), *shared.values()], first)
    if both := sorted(set(shared) & set(first)):
        raise _wrong(both[0], "it is an array and a further name of another", "leave out one of the two")
    untrained |= buffers | {name for name, weight in first.items() if not weight.numel}
    for name, weight in first.items():
        if name in untrained and weight.states:
            raise _wrong(name, f"it is not trained, and has {sorted(weight.states)}", "leave them out")
    trained = [name for name in first if name not in untrained]
    record: OptimizerRecord = records.get("optimizer") or OptimizerRecord({})
    given = record.groups or ({"params": trained},)
    scalars: Sequence[Mapping[str, Any]] = records.get("scalars") or ({},) * len(given)
    if len(scalars) != len(given):
        raise FormatError(
            "scalars are given for each group",
            equation=f"scalars({len(scalars)}) != groups({len(given)})",
            hint="give an empty mapping where a group has none",
        )
    groups = tuple(
        _group(group, record.count, beside, first) for group, beside in zip(given, scalars, strict=True)
    )
    held = [name for group in groups for name in group.names]
    _check_names("a group of parameters", held, first)
    if sorted(held) != sorted(trained):
        odd = sorted(set(held) ^ set(trained)) or sorted(name for name in set(held) if held.count(name) > 1)
        raise _wrong(
            odd[0],
            f"{'trained' if odd[0] in trained else 'not trained'}, in {held.count(odd[0])} groups",
            "each trained weight is in one group; name the others as untrained",
        )
    frozen = tuple(name for name in first if name in untrained and name not in buffers)
    return Description(ranks, groups, frozen, tuple(name for name in first if name in buffers), records)


def _ranks(specs: Sequence[TensorSpec], tp: int) -> tuple[Mapping[str, Weight], ...]:
    weights: list[dict[str, TensorSpec]] = [{} for _ in range(tp)]
    states: list[dict[str, dict[str, TensorSpec]]] = [{} for _ in range(tp)]
    seen = set[str]()
    for spec in specs:
        if spec.dtype not in ITEMSIZE:
            raise DtypeError(
                "a tensor to store has a dtype of known width",
                where=repr(spec.key),
                equation=f"dtype {spec.dtype} has no known width",
                hint=f"known are {', '.join(ITEMSIZE)}",
            )
        if spec.key in seen:
            raise _wrong(
                spec.key, "it is given twice", "tied weights are one array; record the second name as shared"
            )
        seen.add(spec.key)
        key, rank = _rank_of(spec.key, tp)
        if key.startswith("optim/"):
            name, _, state = key.removeprefix("optim/").rpartition("/")
            states[rank].setdefault(name, {})[state] = spec
        else:
            weights[rank][key] = spec
    for rank, of_rank in enumerate(weights):
        if list(of_rank) != list(weights[0]):
            odd = sorted(set(of_rank) ^ set(weights[0])) or list(of_rank)
            raise _wrong(odd[0], f"ranks 0 and {rank} of tp({tp}) differ in it, or in its place", "give all")
        for name, found in states[rank].items():
            _check_states(name, of_rank.get(name), found)
    return tuple(
        {name: Weight(name, spec, of_states.get(name, {})) for name, spec in of_rank.items()}
        for of_rank, of_states in zip(weights, states, strict=True)
    )


def _rank_of(key: str, tp: int) -> tuple[str, int]:
    if tp == 1:
        return key, 0
    name, _, rank = key.rpartition("@")
    if not rank.isdecimal() or int(rank) >= tp:
        raise _wrong(key, f"of no rank below tp({tp})", "arrays of ranks are named {name}@{rank}")
    return name, int(rank)


def _check_states(name: str, weight: TensorSpec | None, states: Mapping[str, TensorSpec]) -> None:
    for state, spec in states.items():
        if weight is None:
            raise _wrong(
                spec.key, f"there is no weight {name!r}", "give the weight too, or leave its states out"
            )
        if state in ("", "step", "fp32", "param") or not state.replace("_", "").isalnum():
            raise _wrong(spec.key, f"{state!r} cannot name a state", "the count of updates is a record")
        if spec.shape != weight.shape:
            raise _wrong(
                spec.key,
                f"shape{spec.shape} != shape{weight.shape} of its weight",
                "DeepSpeed keeps states that have an element for each of the weight, and no others",
            )
        if spec.dtype != "float32":
            raise DtypeError(
                "DeepSpeed keeps masters and states in float32",
                where=repr(spec.key),
                equation=f"dtype({spec.dtype}) != float32",
                hint="convert it; from a narrower dtype nothing is lost",
            )


def _group(
    group: Mapping[str, Any],
    count: Mapping[str, int],
    scalars: Mapping[str, Any],
    weights: Mapping[str, Weight],
) -> Group:
    names = list(group["params"])
    _check_names("a group of parameters", names, weights)
    states, counts = [], set()
    for name in names:
        own = tuple(sorted(set(weights[name].states) - {MASTER}))
        states.append(own)
        counts.add(count.get(name))
        if own != states[0] or len(counts) > 1:
            raise _wrong(
                name,
                f"states{own}, updates({count.get(name)}); {names[0]!r}: states{states[0]}, "
                f"updates({count.get(names[0])})",
                "DeepSpeed has one flat state and one count a group; give zeros, or cut the group",
            )
    settings = {key: value for key, value in group.items() if key != "params"}
    updates = counts.pop() if counts else None
    return Group(tuple(names), settings, states[0] if states else (), updates, dict(scalars))


def _check_names(what: str, names: Iterable[str], weights: Mapping[str, Weight]) -> None:
    for name in names:
        if name not in weights:
            raise UnknownNameError(
                f"what {what} names is there",
                where=repr(name),
                equation="there is no such weight",
                hint="names are those of the training module, without the prefix of a wrapper",
            )


def _wrong(name: str, equation: str, hint: str) -> FormatError:
    return FormatError(
        "arrays and records describe a state that DeepSpeed can load",
        where=repr(name),
        equation=equation,
        hint=hint,
    )


_OF_FILE: Final = frozenset(("ds_config", "ds_version"))
"""Entries that stand beside the state of the optimizer in its file."""


def of_source(records: Mapping[str, Any], *, tp: int) -> dict[str, Any]:
    """The records for a writer, from those that a reader of a DeepSpeed checkpoint returned.

    Of what files of ranks say differently, that of the first is taken: states of random generators are of a
    rank, and no other rank can take them up.

    Args:
        records: Of the manifest of `deepspeed.read` or `deepspeed_universal.read`.
        tp: Tensor-parallel ranks to write; how weights were cut over as many others is left out.
    """
    own: Mapping[str, Any] = records.get("deepspeed") or records.get("universal") or {}
    found = {key: records[key] for key in ("optimizer", "untrained", "shared") if key in records}
    found |= {key: own[key] for key in ("buffers", "scalars", "parts") if own.get(key)}
    models: Mapping[str, Any] = next(iter((own.get(MODEL_STATES) or {}).values()), {})
    states: Mapping[str, Any] = own.get("optimizer_state") or next(
        iter((own.get(OPTIMIZER_STATES) or {}).values()), {}
    )
    found |= {MODEL_STATES: models} if models else {}
    inner = {key: value for key, value in states.items() if key not in _OF_FILE}
    found |= {OPTIMIZER_STATES: inner} if inner else {}
    if INFO in records and own.get("tp") == tp > 1:
        found[INFO] = records[INFO]
    return found
