"""Optimizer state in a Megatron ``torch_dist`` folder, under the names of the weights that it is of.

What Megatron calls ``fully_reshardable``, and what it stores without the distributed optimizer, are tensors
of the shape of the weights:

    ``optimizer.state.{state}.{weight}``   with a state ``exp_avg``, ``exp_avg_sq``, and ``param`` for the
                                           fp32 copy (``fp32_param`` without the distributed optimizer)
    ``chained_{n}.optimizer.state. ...``   the same where optimizers are chained, one for the experts

Here they become ``optim/{weight}/{state}`` beside the weights, with ``master`` for the fp32 copy. What else
Megatron keeps of an optimizer is in what all ranks share (``common.pt``): groups of parameters with their
settings and the number of updates. Which weight is of which group is *not* recorded; it follows from the rule
by which Megatron makes the groups, and is refused where that leaves a choice.

Source: megatron-core 0.16.1, ``optimizer/{__init__,optimizer,distrib_optimizer}.py``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from shardweave.errors import FormatError, OutsideError, UnknownNameError
from shardweave.store import torch_dist
from shardweave.store.manifest import Manifest
from shardweave.store.megatron_groups import BUCKETS, FULLY, MASTER, MASTERS, Group, group_of, num_dims
from shardweave.store.optimizer import OptimizerRecord
from shardweave.store.strict_json import some

RECORD: Final = "megatron"
"""The record with what a Megatron folder holds beside weights and states, to be carried."""

_STATE = re.compile(r"(?:chained_(\d+)\.)?optimizer\.state\.([A-Za-z0-9_]+)\.(.+)", re.DOTALL)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_EXTRA = "._extra_state/"
_HINT: Final = "convert the weights alone with --weights-only"


def sharding(manifest: Manifest) -> str | None:
    """How a folder holds an optimizer's state: ``"fully_reshardable"``, ``"dp_reshardable"`` or not at all.

    Raises:
        FormatError: In two ways, or in one that cannot be read.
    """
    keys = [*manifest.tensors, *manifest.records.get("objects", {})]
    found = [key for key in keys if _OPTIMIZER.match(key)]
    whole = any(_STATE.fullmatch(key) for key in found)
    flat = any(".gbuf_idx_" in key for key in found)
    if whole and flat:
        raise _unread(manifest, "it is there as whole tensors and as flat buckets too")
    if found and not whole and not flat:
        objects = [key for key in found if key in manifest.records.get("objects", {})]
        raise _unread(manifest, f"{some(map(repr, found), limit=2)}, {len(objects)} of them opaque objects")
    return FULLY if whole else BUCKETS if flat else None


def _unread(manifest: Manifest, equation: str) -> FormatError:
    said = manifest.records.get("common", {}).get("content_metadata")
    kind = said.get("distrib_optim_sharding_type") if isinstance(said, Mapping) else None
    return FormatError(
        f"an optimizer's state in a Megatron folder is {FULLY} or {BUCKETS}",
        where=str(manifest.root),
        equation=f"distrib_optim_sharding_type({kind!r:.60}): {equation}",
        hint=f"save it again with --dist-ckpt-optim-fully-reshardable, or {_HINT}",
    )


# --- reading ------------------------------------------------------------------------------------


def named(manifest: Manifest) -> Manifest:
    """The same folder with states as ``optim/{weight}/{state}`` beside the weights.

    Args:
        manifest: From ``torch_dist.read``, of a folder that ``sharding`` calls fully reshardable, or
            without a state.

    Returns:
        The manifest. Its ``records`` get ``keys`` (the stored key by name), ``"optimizer"``: an
        `OptimizerRecord`, ``"untrained"``: the weights without a state, and ``"megatron"``: what is carried.

    Raises:
        FormatError: The state is stored in another way, twice, or its groups contradict each other.
        UnknownNameError: A state is of no weight, or no group has a weight.
        OutsideError: A state has another shape than its weight.
    """
    kind = sharding(manifest)
    if kind == BUCKETS:
        raise _unread(manifest, "flat buckets are read by their geometry, not by names")
    names: dict[str, str] = {}
    owner: dict[str, int | None] = {}
    for key in manifest.tensors:
        match = _STATE.fullmatch(key)
        if match is None and _OPTIMIZER.match(key):
            raise _unread(manifest, f"{key!r:.200} is a state of no kind that is known")
        if match is None:
            name = key
        else:
            chained, state, weight = match.groups()
            name = f"optim/{weight}/{MASTER if state in MASTERS else state}"
            owner[weight] = None if chained is None else int(chained)
            _check_state(manifest, key, weight)
        if name in names:
            raise FormatError(
                "a state of a weight is stored once",
                where=str(manifest.root),
                equation=f"{key!r} and {names[name]!r} are both {name!r}",
                hint=f"the folder was merged by hand; save it again, or {_HINT}",
            )
        names[name] = key
    tensors = {name: replace(manifest.tensors[key], key=name) for name, key in names.items()}
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("optim/")}
    records = {**manifest.records, "keys": names, RECORD: beside(manifest)}
    if kind is not None:
        trained = {name: tensor.shape for name, tensor in weights.items() if name in owner}
        records["optimizer"] = record_of(manifest, trained, owner)
        records["untrained"] = frozenset(weights) - frozenset(owner)
    return replace(manifest, tensors=tensors, records=records)


def _check_state(manifest: Manifest, key: str, weight: str) -> None:
    state, found = manifest.tensors[key], manifest.tensors.get(weight)
    if found is None:
        raise UnknownNameError(
            "states are of weights of the model",
            where=f"{manifest.root}, {key!r}",
            equation=f"{weight!r} is not there",
            hint=f"copy the whole folder; weights and states are saved together; {_HINT}",
        )
    if found.shape != state.shape:
        raise OutsideError(
            "a state has the shape of its weight",
            where=f"{manifest.root}, {key!r}",
            equation=f"stored {state.shape} != {found.shape} of {weight!r}",
            hint=f"flattened states of megatron-core up to 0.14 are not read: load and save them with the "
            f"version that wrote them and --dist-ckpt-optim-fully-reshardable, or {_HINT}",
        )


def groups_of(manifest: Manifest) -> Iterator[Group]:
    """The groups of parameters that a folder records, in their order.

    Of flat buckets every group of ranks records its own; they must all say the same.

    Raises:
        FormatError: There are none, they are no groups, or ranks contradict each other.
    """
    where = str(manifest.root)
    for chained, said in _optimizers(manifest):
        inner = said.get("optimizer", said)
        state = inner.get("state") if isinstance(inner, Mapping) else None
        common = state.get("common_step") if isinstance(state, Mapping) else None
        groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
        if not isinstance(groups, Sequence) or not all(isinstance(group, Mapping) for group in groups):
            raise FormatError(
                "the state of an optimizer has groups of parameters",
                where=f"{where}, 'optimizer'",
                equation=f"param_groups is a {type(groups).__name__}",
                hint=f"the common state of another folder lies in this one; copy it again, or {_HINT}",
            )
        found = []
        for group in groups:
            settings = {key: value for key, value in group.items() if key not in ("params", "step")}
            step = group.get("step", common)
            found.append(Group(settings, chained, None if step is None else _count(step, where)))
        if len(counts := sorted({str(group.count) for group in found})) > 1:
            raise FormatError(
                "the groups of an optimizer were updated equally often",
                where=f"{where}, 'optimizer'",
                equation=f"step {some(counts)}",
                hint=f"Megatron would not load it either; save the state again, or {_HINT}",
            )
        yield from found


def _optimizers(manifest: Manifest) -> Iterator[tuple[int | None, Mapping[str, Any]]]:
    """The optimizers by their numbers among those that are chained."""
    where = str(manifest.root)
    said = manifest.records.get("common", {}).get("optimizer")
    if isinstance(said, Sequence) and not isinstance(said, (str, bytes)):
        said = dict(enumerate(said))
    if not isinstance(said, Mapping):
        raise FormatError(
            "a Megatron folder with an optimizer's state says its settings in what all ranks share",
            where=where,
            equation=f"'optimizer' in {torch_dist.COMMON} is a {type(said).__name__}",
            hint=f"copy {torch_dist.COMMON} from the folder too, or {_HINT}",
        )
    apart: dict[int | None, dict[str, Any]] = {}
    for key in manifest.records.get("objects", {}):
        match = re.fullmatch(
            r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_0_1", key
        )
        if match is None:
            continue
        (value,) = torch_dist.read_object(manifest, key)
        number = None if match[1] is None else int(match[1])
        if apart.setdefault(number, {"optimizer": value}) != {"optimizer": value}:
            raise FormatError(
                "all ranks have the same groups of parameters",
                where=f"{where}, {key!r}",
                equation="it says something else than the one of another group of ranks",
                hint=f"the folder was merged from two saves; copy one of them, or {_HINT}",
            )
    if apart:
        yield from sorted(apart.items(), key=lambda item: -1 if item[0] is None else item[0])
    elif said and all(type(key) is int for key in said):
        for number in sorted(said):
            yield number, said[number] if isinstance(said[number], Mapping) else {}
    else:
        yield None, said


def _count(step: Any, where: str) -> int:
    if isinstance(step, Mapping) and step.get("$leaf") in ("float32", "int64") and step.get("shape") == ():
        (step,) = struct.unpack({"float32": "<f", "int64": "<q"}[step["$leaf"]], step["data"])
    if type(step) not in (int, float) or step != step // 1 or not 0 <= step < 1 << 53:
        raise FormatError(
            "a number of updates is a whole number",
            where=f"{where}, 'step' of a group",
            equation=f"step({step!r:.60})",
            hint=f"save the state again, or {_HINT}",
        )
    return int(step)


def record_of(
    manifest: Manifest, weights: Mapping[str, Sequence[int]], owner: Mapping[str, int | None]
) -> OptimizerRecord:
    """The updates and settings of weights, each in the group that Megatron puts it in.

    Args:
        manifest: The folder.
        weights: The stored shape of every weight that has a state.
        owner: The number of its optimizer among those that are chained.

    Raises:
        As ``groups_of`` and ``group_of``.
    """
    groups = list(groups_of(manifest))
    decays_norms = arguments(manifest).get("apply_wd_to_qk_layernorm") is True
    members: dict[int, list[str]] = {number: [] for number in range(len(groups))}
    count: dict[str, int] = {}
    for name, shape in weights.items():
        number = group_of(name, num_dims(name, shape), groups, chained=owner[name], decays_norms=decays_norms)
        members[number].append(name)
        if (made := groups[number].count) is not None:
            count[name] = made
    of = tuple({**group.settings, "params": members[number]} for number, group in enumerate(groups))
    return OptimizerRecord(count, of)


# --- what is carried ----------------------------------------------------------------------------


def arguments(manifest: Manifest) -> Mapping[str, Any]:
    """The recorded arguments of the job by name; empty where there are none."""
    args = manifest.records.get("common", {}).get("args")
    state = args.get("state") if isinstance(args, Mapping) else None
    return state if isinstance(state, Mapping) else {}


def beside(manifest: Manifest) -> dict[str, Any]:
    """What is neither weight nor state: plain values that all ranks share, and the keys of objects."""
    common = {
        key: value
        for key, value in manifest.records.get("common", {}).items()
        if key not in ("optimizer", "content_metadata")
    }
    objects = [
        key
        for key in manifest.records.get("objects", {})
        if _EXTRA not in key and not _OPTIMIZER.match(key) and key != torch_dist.COMMON_OBJECT
    ]
    optimizers = _optimizers(manifest) if "optimizer" in manifest.records.get("common", {}) else ()
    scaler = next((said["grad_scaler"] for _, said in optimizers if "grad_scaler" in said), None)
    return {"common": common, "objects": objects, "grad_scaler": scaler}


def carried(manifest: Manifest) -> dict[str, Any]:
    """What goes to a target untouched: ``common`` as plain values, ``objects`` as streams, ``grad_scaler``.

    These are arguments, iteration and scheduler, and the states of random numbers and of the machine that
    runs steps again. A job at another geometry asks for other states of random numbers; Megatron-LM compares
    the degrees in ``args`` with its own and leaves them out where they differ.

    Args:
        manifest: From `named`.
    """
    found = manifest.records.get(RECORD, {})
    return {
        "common": dict(found.get("common", {})),
        "objects": {key: torch_dist.object_bytes(manifest, key) for key in found.get("objects", ())},
        "grad_scaler": found.get("grad_scaler"),
    }


# --- writing ------------------------------------------------------------------------------------


def key_of(weight: str, state: str, *, chained: int | None = None) -> str:
    """The key that the distributed optimizer asks for.

    >>> key_of("decoder.final_layernorm.weight", "master")
    'optimizer.state.param.decoder.final_layernorm.weight'
    >>> key_of("output_layer.weight", "exp_avg", chained=0)
    'chained_0.optimizer.state.exp_avg.output_layer.weight'

    Raises:
        UnknownNameError: It has no such state.
    """
    if state not in (MASTER, "exp_avg", "exp_avg_sq"):
        raise UnknownNameError(
            "Megatron's distributed optimizer has the states of Adam",
            where=f"optim/{weight}/{state}",
            equation=f"state({state!r}) is not {MASTER}, exp_avg or exp_avg_sq",
            hint=_HINT,
        )
    prefix = "" if chained is None else f"chained_{chained}."
    return f"{prefix}optimizer.state.{'param' if state == MASTER else state}.{weight}"


def weight_of(key: str) -> str | None:
    """The weight that a stored state is of; ``None`` where a key is of none.

    >>> weight_of("optimizer.state.param.decoder.final_layernorm.weight")
    'decoder.final_layernorm.weight'
    """
    match = _STATE.fullmatch(key)
    return None if match is None else match[3]
