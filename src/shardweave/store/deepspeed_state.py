"""What a DeepSpeed checkpoint is to say, from a list of arrays and records; and DeepSpeed's own words for it.

Both forms that DeepSpeed loads, its own files and universal ones, are written from the same description:
which weights there are, which are trained, in which groups, with which states. ``describe`` makes it of
array names and records, and refuses what DeepSpeed could not load.

Source: deepspeed 0.19.8 ``runtime/engine.py``, ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardweave.errors import DtypeError, FormatError, UnknownNameError
from shardweave.store.manifest import ITEMSIZE, TensorSpec
from shardweave.store.optimizer import OptimizerRecord
from shardweave.store.pickles import Global, Instance
from shardweave.store.pickles_write import from_plain
from shardweave.store.torch_archive import View, constant

VERSION: Final = "0.19.8"
"""The DeepSpeed whose form is written."""
MASTER: Final = "master"
MODEL_STATES: Final = "model_states"
OPTIMIZER_STATES: Final = "optimizer_states"
RECORDS: Final = ("optimizer", "untrained", "buffers", "shared_params", MODEL_STATES, OPTIMIZER_STATES)
"""Records that a writer takes, all of them optional.

- ``optimizer``: an `OptimizerRecord`.
- ``untrained``: names without state; of these ``buffers`` are no parameters.
- ``shared_params``: by a further name of a weight, the name that it is stored under.
- ``model_states``: further entries of the files of model states, as plain values: ``lr_scheduler``,
  ``ds_config``, ``global_steps``, ``universal_checkpoint_info``, and all that a script keeps there (its
  client state).
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
    """

    names: tuple[str, ...]
    settings: Mapping[str, Any]
    states: tuple[str, ...]
    count: int | None


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
    shared = records.get("shared_params", {})
    _check_names("records", [*sorted(untrained | buffers), *shared.values()], first)
    if both := sorted(set(shared) & set(first)):
        raise _wrong(both[0], "it is an array and a further name of another", "leave out one of the two")
    untrained |= buffers | {name for name, weight in first.items() if not weight.numel}
    for name, weight in first.items():
        if name in untrained and weight.states:
            raise _wrong(name, f"it is not trained, and has {sorted(weight.states)}", "leave them out")
    trained = [name for name in first if name not in untrained]
    record: OptimizerRecord = records.get("optimizer") or OptimizerRecord({})
    groups = tuple(
        _group(list(group["params"]), group, record.count, first)
        for group in record.groups or ({"params": trained},)
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
            raise _wrong(spec.key, "it is given twice", "tied weights are one array; name them shared_params")
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
    names: list[str], group: Mapping[str, Any], count: Mapping[str, int], weights: Mapping[str, Weight]
) -> Group:
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
    return Group(tuple(names), settings, states[0] if states else (), counts.pop() if counts else None)


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


# --- DeepSpeed's words ----------------------------------------------------------------------------


def size(shape: Sequence[int]) -> Instance:
    """A ``torch.Size``."""
    return Instance(Global("torch", "Size"), (list(shape),))


def stage(number: int) -> Instance:
    """A ZeRO stage."""
    return Instance(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (number,))


def fragment(numel: int, start: int) -> Instance:
    """Where a part of a weight lies in a flat partition, in elements."""
    made = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    return Instance(made, (), {"numel": numel, "start": start})


def loss_scaler(dtype: str) -> Instance:
    """What scales the loss at the start: 1, and for float16 what DeepSpeed has by default."""
    module, half = "deepspeed.runtime.fp16.loss_scaler", dtype == "float16"
    if not half:
        return Instance(Global(module, "LossScaler"), (), {"cur_scale": 1.0, "dynamic": False})
    state = {
        "cur_scale": 65536, "dynamic": True, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0,
        "scale_window": 1000, "min_scale": 1, "delayed_shift": 2, "cur_hysteresis": 2,
        "consecutive_hysteresis": False, "raise_error_at_min_scale": True,
        "dtype": Global("torch", "float16"),
    }  # fmt: skip
    return Instance(Global(module, "DynamicLossScaler"), (), state)


def step(count: int) -> View:
    """A number of updates as torch's optimizers keep it."""
    return constant(struct.pack("<f", count), "float32")


def carried(record: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of another checkpoint as they are written, small tensors included."""
    found: dict[str, Any] = from_plain(
        dict(record), leaf=lambda leaf: constant(leaf["data"], leaf["$leaf"], tuple(leaf["shape"]))
    )
    return found


def param_groups(groups: Sequence[Group], params: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """The settings of groups, and the numbers of the flat tensors that each has."""
    return [
        {**carried(group.settings), "params": list(numbers)}
        for group, numbers in zip(groups, params, strict=True)
    ]


def config(described: Description, *, stage: int, dtype: str) -> Any:
    """The configuration of the run that is said to have saved: that of the source, or the least."""
    given = described.records.get(MODEL_STATES, {}).get("ds_config")
    if given is not None:
        return carried({"ds_config": given})["ds_config"]
    found: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    if dtype != "float32":
        found["bf16" if dtype == "bfloat16" else "fp16"] = {"enabled": True}
    return found


def model_states(
    described: Description,
    *,
    module: Mapping[str, Any],
    param_shapes: list[dict[str, Any]],
    dp: int,
    tp: int,
    stage: int,
    dtype: str,
    frozen: tuple[dict[str, Any], dict[str, Any]] | None,
) -> dict[str, Any]:
    """A file of model states.

    Args:
        described: What is stored.
        module: The tensors of the module by name.
        param_shapes: The shapes of the trained weights, a dict a flat group.
        dp: Data-parallel ranks.
        tp: Tensor-parallel ranks.
        stage: Of ZeRO.
        dtype: Of the weights in training.
        frozen: Shapes and tensors of the frozen parameters, where the stage keeps them apart.
    """
    counts = [group.count for group in described.groups if group.count is not None]
    shapes, fragments = frozen or (None, None)
    values = {
        "lr_scheduler": None, "data_sampler": None, "random_ltd": None,
        "skipped_steps": 0, "global_steps": max(counts, default=0),
        **carried(described.records.get(MODEL_STATES, {})),
        "ds_config": config(described, stage=stage, dtype=dtype),
    }  # fmt: skip
    return {
        **values,
        "module": {**module, **_aliases(described, module)},
        "buffer_names": list(described.buffers),
        "optimizer": None,
        "param_shapes": param_shapes,
        "frozen_param_shapes": shapes,
        "shared_params": dict(described.records.get("shared_params", {})),
        "frozen_param_fragments": fragments,
        "dp_world_size": dp,
        "mp_world_size": tp,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": tp},
        "ds_version": VERSION,
    }


def _aliases(described: Description, module: Mapping[str, Any]) -> dict[str, Any]:
    """Further names of weights; they are the same tensors."""
    shared: Mapping[str, str] = described.records.get("shared_params", {})
    return {alias: module[name] for alias, name in shared.items() if name in module}
