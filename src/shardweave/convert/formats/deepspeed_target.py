"""What is written for a run of DeepSpeed: its own files, and universal ones.

Native files are cut for one number of ranks, and flat: the engine that loads them takes ranges by their place
and not by a name. So the order of weights has to be that of the module, which a source knows or transformers
says. A universal checkpoint has a folder for each weight, and needs no order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardweave.convert.checkpoint import Checkpoint, OptimizerState
from shardweave.convert.formats import ranks
from shardweave.convert.masters import ROUNDED
from shardweave.convert.module_order import in_order
from shardweave.convert.states import count_of, groups_of, keys_of, members
from shardweave.convert.target import (
    Facts,
    Target,
    Wanted,
    Zero,
    refuse_geometry,
    specs_of,
    state_rules,
    with_dtypes,
)
from shardweave.dialects import affine_text, deepspeed, hf
from shardweave.errors import DtypeError, GeometryError
from shardweave.layout import BufferRule, Layout, Mesh
from shardweave.layout.affine_layout import map_of
from shardweave.models import Model
from shardweave.models.plain import FAMILY as PLAIN
from shardweave.store import deepspeed_state, deepspeed_write, universal_write
from shardweave.store.deepspeed_state import INFO
from shardweave.store.deepspeed_state import MODEL_STATES as MODEL
from shardweave.store.manifest import Manifest, TensorSpec
from shardweave.store.optimizer import OptimizerRecord
from shardweave.store.strict_json import some

VERSION: Final = 0.4
"""Of what DeepSpeed 0.19.8 says about the weights of ranks."""


def native(source: Checkpoint, state: OptimizerState | None, wanted: Wanted) -> Target:
    """The files of every rank of a ZeRO run."""
    refuse_geometry("deepspeed", wanted)
    zero = wanted.zero or Zero()
    if (wanted.dtype if zero.stage == 3 else zero.dtype) is not None:
        raise GeometryError(
            "a dtype is that of stored weights, or at stage 3 what the run computes in",
            equation=f"to=deepspeed with dtype({wanted.dtype}), {zero}",
            hint="give Zero(stage=3, dtype=...) for masters alone, and dtype= at stages 1 and 2",
        )
    weights = _weights(source.model, zero, wanted, str(source.manifest.root))
    held = with_dtypes(_with_states(weights, state), source, wanted.dtype)
    if zero.stage == 3:
        held = _in_full(weights, held, state)
    described = _described(source, weights, state, tp=zero.tp, flat=True)
    if zero.stage == 3:
        _check_buffers(source, described)
    run = deepspeed_write.Zero(
        stage=zero.stage, dp=zero.dp, tp=zero.tp, dtype=_run_dtype(source, state, held, zero)
    )
    return _made("deepspeed", source, weights, held, state, wanted, described, deepspeed_write, zero=run)


def universal(source: Checkpoint, state: OptimizerState | None, wanted: Wanted) -> Target:
    """A universal checkpoint, for any number of ranks."""
    refuse_geometry("universal", wanted)
    zero = wanted.zero or Zero()
    if zero.tp > 1 or zero.dp > 1:
        raise GeometryError(
            "a universal checkpoint stores whole tensors",
            equation=f"to=universal with dp({zero.dp}), tp({zero.tp})",
            hint="leave out --dp and --tp: it is loaded at any number of ranks",
        )
    if wanted.dtype is not None:
        raise GeometryError(
            "a universal checkpoint stores masters, which are in float32",
            equation=f"to=universal with dtype({wanted.dtype})",
            hint="leave out --dtype: what the run computes in is said by its own configuration",
        )
    weights = _weights(source.model, Zero(), wanted, str(source.manifest.root))
    held = _in_full(weights, with_dtypes(_with_states(weights, state), source, None), state)
    described = _described(source, weights, state, tp=1, flat=False)
    return _made("universal", source, weights, held, state, wanted, described, universal_write)


def _weights(model: Model, zero: Zero, wanted: Wanted, where: str) -> Layout:
    """The weights as the modules of the ranks hold them; a tied one once."""
    if wanted.layout is not None:
        if wanted.layout.mesh.size != zero.tp:
            raise GeometryError(
                "a layout is of the tensor-parallel ranks that are written",
                where=where,
                equation=f"ranks of {wanted.layout.name}({wanted.layout.mesh.size}) != tp({zero.tp})",
                hint="probe the function with this number of ranks",
            )
        return ranks.of_model(wanted.layout, model, where)
    if zero.tp == 1:
        return hf.layout(model, stacked_experts=hf.stackable(model))
    return deepspeed.layout(model, Mesh((("tp", zero.tp),)), grain=zero.grain)


def _with_states(weights: Layout, state: OptimizerState | None) -> Layout:
    more = state_rules(weights, state) if state is not None else ()
    return replace(weights, rules=(*weights.rules, *more))


def _trained(weights: Layout, state: OptimizerState | None) -> set[str]:
    """The keys of arrays that are trained; all where nothing is known of an optimizer."""
    return {
        key
        for key, held in members(weights)
        if state is None or any(name in state.weights for name, _ in held)
    }


def _in_full(weights: Layout, held: Layout, state: OptimizerState | None) -> Layout:
    """What is trained is stored in full precision, whatever the run computes in."""
    trained = _trained(weights, state)
    wide = {rule.name for rule in weights.rules if trained & set(keys_of(weights, rule))}
    rules = (replace(rule, dtype="float32") if rule.name in wide else rule for rule in held.rules)
    return replace(held, rules=tuple(rules))


def _described(
    source: Checkpoint, weights: Layout, state: OptimizerState | None, *, tp: int, flat: bool
) -> dict[str, Any]:
    """What the files say beside the arrays; whether these are flat, so that their order counts."""
    where = str(source.manifest.root)
    found = deepspeed_state.of_source(source.manifest.records, tp=tp)
    found.pop("parts", None)  # how whole weights were put together is of the ranks that there were
    arrays = {key.partition("@")[0]: [name for name, _ in held] for key, held in members(weights)}
    found["shared"] = {
        alias: name for alias, name in source.model.aliases.items() if name in arrays
    } or found.get("shared", {})
    # Maps are of parameters that are tensors of the model; of others a layout says what they are.
    own = {*source.model.aliases, *(tensor.name for tensor in weights.tensors)}
    if tp > 1 and INFO not in found and all(len(r.parts) == 1 and r.name in own for r in weights.rules):
        maps = {
            name: found_map
            for tensor in weights.tensors
            for found_map in [map_of(weights, tensor)]
            for name in tensor.names()
        }
        found[INFO] = {"universal_checkpoint_version": VERSION, "affine_map": affine_text.write(maps)}
    # Without it, DeepSpeed's own converter does not look at a checkpoint.
    found.setdefault(INFO, {"universal_checkpoint_version": VERSION})
    if state is None:
        return {key: value for key, value in found.items() if key in ("shared", "buffers", MODEL, INFO)}
    trained = {key: held for key, held in arrays.items() if any(name in state.weights for name in held)}
    # Universal files are found by their names, and a part is of no module.
    ordered = (flat or state.ordered) and not source.only
    order = in_order(trained, state, source.config, where) if ordered else list(trained)
    counts = {key: count_of(state, trained[key], where) for key in order}
    found["optimizer"] = OptimizerRecord(
        {key: count for key, count in counts.items() if count is not None},
        tuple(groups_of(state, {key: trained[key] for key in order}, where)),
    )
    untrained = [key for key in arrays if key not in trained]
    found["untrained"] = frozenset(untrained)
    whole_numbers = {
        key.partition("@")[0] for key, (buffer, _) in weights.stored().items() if "int" in buffer.dtype
    }
    known = set(found.get("buffers", ()))
    found["buffers"] = tuple(key for key in untrained if key in known | whole_numbers)
    return found


def _check_buffers(source: Checkpoint, described: Mapping[str, Any]) -> None:
    """ZeRO-3 cuts frozen weights over its ranks and not buffers, so it has to be known which is which."""
    unknown = sorted(set(described.get("untrained", ())) - set(described.get("buffers", ())))
    if unknown and source.model.family == PLAIN and source.format not in ("deepspeed", "universal"):
        raise GeometryError(
            "ZeRO-3 stores frozen weights in parts, and buffers whole",
            where=str(source.manifest.root),
            equation=f"{len(unknown)} are not trained and may be either: {some(map(repr, unknown))}",
            hint="give the config of the model, or convert --to universal, or to ZeRO-1 or 2 with --zero",
        )


def _run_dtype(source: Checkpoint, state: OptimizerState | None, held: Layout, zero: Zero) -> str:
    """What the run computes in."""
    if zero.stage < 3:
        trained = _trained(replace(held, rules=tuple(r for r in held.rules if not _is_state(r))), state)
        found = {buffer.dtype for key, (buffer, _) in held.stored().items() if key in trained}
        if len(found) != 1:
            raise DtypeError(
                "all weights of a run have one dtype",
                where=str(source.manifest.root),
                equation=f"dtypes({', '.join(sorted(found))})",
                hint="give one with --dtype; masters keep what weights are rounded from",
            )
        return next(iter(found))
    rounded = {source.manifest.tensors[key].dtype for key, why in source.left_out.items() if why == ROUNDED}
    said = source.config.get("dtype") or source.config.get("torch_dtype")
    before = _config_dtype(source.manifest.records)
    dtype = zero.dtype or before or (next(iter(rounded)) if len(rounded) == 1 else None) or said
    if dtype is None:
        raise GeometryError(
            "files of ZeRO-3 are named after what the run computes in",
            where=str(source.manifest.root),
            equation="neither the source nor its config says it",
            hint="give it with --dtype bfloat16; what is stored stays as it is",
        )
    return str(dtype)


def _config_dtype(records: Mapping[str, Any]) -> str | None:
    """What the configuration of the DeepSpeed run says that saved the source."""
    own = records.get("deepspeed") or records.get("universal") or {}
    for said in (own.get(MODEL) or {}).values():
        config = said.get("ds_config") if isinstance(said, Mapping) else None
        if isinstance(config, Mapping):
            for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
                if isinstance(config.get(key), Mapping) and config[key].get("enabled"):
                    return dtype
            return "float32"
    return None


def _is_state(rule: BufferRule) -> bool:
    return rule.parts[0].tensor.name.startswith("optim/")


def _made(
    name: str,
    source: Checkpoint,
    weights: Layout,
    held: Layout,
    state: OptimizerState | None,
    wanted: Wanted,
    described: Mapping[str, Any],
    store: Any,
    **more: Any,
) -> Target:
    place = {key: i for i, key in enumerate(_flat_order(described))}
    specs = sorted(specs_of(held), key=partial(_place, place))
    return Target(
        name,
        held,
        tuple(specs),
        wanted.max_file_bytes,
        allocate=partial(store.allocate, tensors=specs, records=described, **more),
        finish=partial(_finish, store=store),
        fixed={"records": json.dumps([described, more], default=str, sort_keys=True).encode()},
        crc=True,
    )


def _flat_order(described: Mapping[str, Any]) -> list[str]:
    record: OptimizerRecord | None = described.get("optimizer")
    return [key for group in (record.groups if record else ()) for key in group["params"]]


def _place(place: Mapping[str, int], spec: TensorSpec) -> tuple[int, int]:
    """Weights and states in the order of groups, the ranks of one in theirs."""
    key, _, rank = spec.key.partition("@")
    name = key.removeprefix("optim/").rpartition("/")[0] if key.startswith("optim/") else key
    return place.get(name, len(place)), int(rank or 0)


def _finish(manifest: Manifest, facts: Facts, *, config: Mapping[str, Any], fsync: bool, store: Any) -> None:
    checksums = {extent: int(one["crc32"]) for extent, one in facts.items() if "crc32" in one}
    store.finish(manifest, checksums, fsync=fsync)
