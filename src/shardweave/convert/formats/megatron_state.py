"""The state of an optimizer in folders of Megatron-Core: read, and written for its distributed optimizer.

States of whole weights are found by their names. Flat buckets are read by geometry: that of the job which
saved them, as far as its arguments say it, and otherwise every one that has as many groups of ranks. Each is
held against what is stored; one has to be left.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from shardweave.convert.checkpoint import Checkpoint, OptimizerState, Settings
from shardweave.convert.formats.megatron_jobs import Job, Known, held, jobs
from shardweave.convert.formats.megatron_legacy import UNREAD, whole
from shardweave.convert.states import (
    HINT,
    MASTER,
    count_of,
    groups_of,
    members,
    recorded,
)
from shardweave.convert.target import state_rules
from shardweave.errors import DtypeError, FormatError, ShardweaveError
from shardweave.layout import BufferRule, Layout
from shardweave.models import from_config
from shardweave.store import megatron_buckets, megatron_groups, megatron_legacy, megatron_optimizer
from shardweave.store.manifest import Manifest, StoredTensor
from shardweave.store.optimizer import OptimizerRecord
from shardweave.store.strict_json import some

KEYS: Final = ("optimizer.", "chained_", "optim/")
"""What begins the names of states, as they are stored and as they are called here."""
ORIGINAL: Final = "stored"
"""The record with the arrays under their stored keys."""
_MAX_CANDIDATES: Final = 1024


def named(manifest: Manifest, config: Mapping[str, Any] | None) -> Manifest:
    """The folder with states under the names of their weights; folders of ranks become whole weights first.

    A state that cannot be read does not keep anybody from the weights: why it cannot is kept, and raised by
    ``states``.
    """
    records = {**manifest.records, ORIGINAL: manifest.tensors}
    if megatron_legacy.RECORD in records:
        found = whole(manifest, config)
        return replace(found, records={**found.records, ORIGINAL: manifest.tensors})
    try:
        if megatron_optimizer.sharding(manifest) == megatron_groups.BUCKETS:
            found = _unflattened(manifest, config)
        else:
            found = megatron_optimizer.named(manifest)
    except ShardweaveError as error:
        return replace(manifest, records={**records, UNREAD: error})
    return replace(found, records={**found.records, ORIGINAL: manifest.tensors})


def as_stored(manifest: Manifest) -> Manifest:
    """What ``named`` was made from."""
    return replace(manifest, tensors=manifest.records[ORIGINAL])


def states(source: Checkpoint, settings: Settings | None) -> OptimizerState | None:
    """The state in a folder, its masters held against the weights."""
    error = source.manifest.records.get(UNREAD)
    if error is not None:
        raise error
    if "optimizer" not in source.manifest.records:
        return None
    megatron_buckets.prove_masters(source.manifest)
    return recorded(source)


# --- flat buckets -------------------------------------------------------------------------------


def _unflattened(manifest: Manifest, config: Mapping[str, Any] | None) -> Manifest:
    where = str(manifest.root)
    if config is None:
        raise FormatError(
            "flat buckets are read by the geometry of a model that is known",
            where=where,
            equation="config(none)",
            hint=f"give the config.json of the model, or {HINT}",
        )
    weights = {key: one for key, one in manifest.tensors.items() if not key.startswith(KEYS)}
    model = from_config(config, dtype="float32")
    embedding = weights.get("embedding.word_embeddings.weight")
    padded = embedding.shape[0] if embedding is not None else None
    shapes = {key: one.shape for key, one in weights.items()}
    stored = megatron_buckets.buckets(manifest)
    fits: dict[tuple[tuple[str, StoredTensor], ...], tuple[Job, dict[str, StoredTensor]]] = {}
    why: list[str] = []
    known: Known = {}
    tried = list(itertools.islice(jobs(manifest, model, stored, weights, padded), _MAX_CANDIDATES + 1))
    for job in tried[:_MAX_CANDIDATES]:
        try:
            blocks = list(held(model, job, stored, weights, padded, known=known))
            made = megatron_buckets.assembled(manifest, blocks, shapes=shapes)
            view = replace(manifest, tensors={**weights, **made})
            megatron_buckets.prove_masters(view)
        except ShardweaveError as error:
            why.append(f"{job}: {str(error).partition('. hint:')[0]}")
            continue
        fits.setdefault(tuple(sorted(made.items(), key=lambda item: item[0])), (job, made))
    if len(fits) != 1 or len(tried) > _MAX_CANDIDATES:
        found = [str(job) for job, _ in fits.values()]
        raise FormatError(
            "one geometry of the job that saved flat buckets agrees with what it stored",
            where=where,
            equation=f"{len(fits)} of {len(tried)} agree"
            + (f": {some(found, limit=4)}" if found else f"; {some(why, limit=3)}"),
            # Megatron refuses to save whole states of what a context group shares.
            hint=HINT
            if megatron_buckets.context_ranks(stored) > 1
            else f"save the optimizer with --dist-ckpt-optim-fully-reshardable, or {HINT}",
        )
    ((_, made),) = fits.values()
    chained = any(bucket.chained is not None for bucket in stored)
    arrays = {name.removeprefix("optim/").rpartition("/")[0] for name in made}
    trained = {name: one.shape for name, one in weights.items() if name in arrays}
    owner = {name: int(megatron_groups.is_expert(name)) if chained else None for name in trained}
    records = {
        **manifest.records,
        megatron_optimizer.RECORD: megatron_optimizer.beside(manifest),
        "optimizer": megatron_optimizer.record_of(manifest, trained, owner),
        "untrained": frozenset(weights) - arrays,
    }
    return replace(manifest, tensors={**weights, **made}, records=records)


# --- writing ------------------------------------------------------------------------------------


def rules_of(source: Checkpoint, weights: Layout, state: OptimizerState) -> Iterator[BufferRule]:
    """The buffers of the states of a target, a master of every trained weight among them.

    Raises:
        UnknownNameError: A state that Megatron's optimizer has no place for.
        DtypeError: A weight is rounded and has no master.
    """
    for rule in state.layout.rules:
        name = rule.parts[0].tensor.name
        if name.endswith(f"/{MASTER}") and rule.dtype != "float32":
            raise DtypeError(
                "Megatron's distributed optimizer has a master of every weight in float32",
                where=f"{source.manifest.root}, {name!r}",
                equation=f"it is stored in {rule.dtype}",
                hint=f"convert a checkpoint with masters, or {HINT}",
            )
    yield from state_rules(weights, state, megatron_optimizer.key_of)


def common_of(
    source: Checkpoint, weights: Layout, state: OptimizerState, *, expert_parallel: bool, layer_keys: str
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What all ranks of a target share, and the objects that are carried to it."""
    where = str(source.manifest.root)
    arrays = {
        array: [name for name, _ in few]
        for array, few in members(weights)
        if any(name in state.weights for name, _ in few)
    }
    count = count_of(state, state.weights, where)
    counted = {} if count is None else dict.fromkeys(arrays, count)
    record = OptimizerRecord(counted, tuple(groups_of(state, arrays, where)))
    kept = megatron_optimizer.carried(source.manifest)
    if count is not None:
        kept["common"] = {"iteration": count, "checkpoint_version": 3.0, **kept["common"]}
    shapes = {array: buffer.shape for array, (buffer, _) in weights.stored().items() if array in arrays}
    common = megatron_groups.common_of(
        record, shapes, expert_parallel=expert_parallel, layer_keys=layer_keys, kept=kept
    )
    return common, kept["objects"]
