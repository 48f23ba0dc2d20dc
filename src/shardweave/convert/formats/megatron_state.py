"""The state of an optimizer in folders of Megatron-Core: read, and written for its distributed optimizer.

States of whole weights are found by their names. Flat buckets are read by geometry: that of the job which
saved them, as far as its arguments say it, and otherwise every one that has as many groups of ranks. Each is
held against what is stored; one has to be left.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from shardweave.convert.checkpoint import Checkpoint, OptimizerState, Settings
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
from shardweave.dialects import megatron
from shardweave.dialects.megatron.buckets import fill
from shardweave.dialects.megatron.parameters import Parameter, parameters
from shardweave.errors import DtypeError, FormatError, ShardweaveError
from shardweave.layout import BufferRule, Layout, Mesh
from shardweave.models import Model, from_config
from shardweave.store import megatron_buckets, megatron_groups, megatron_legacy, megatron_optimizer
from shardweave.store.manifest import Manifest, StoredTensor
from shardweave.store.megatron_buckets import Bucket, Held
from shardweave.store.optimizer import OptimizerRecord
from shardweave.store.strict_json import some

KEYS: Final = ("optimizer.", "chained_", "optim/")
"""What begins the names of states, as they are stored and as they are called here."""
ORIGINAL: Final = "stored"
"""The record with the arrays under their stored keys."""
_LAYER_KEYS: Final = ("stacked", "per_layer", "singleton")
_MAX_CANDIDATES: Final = 256


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


@dataclass(frozen=True, slots=True)
class Job:
    """What a job that saved buckets may have been.

    Attributes:
        tp, pp, ep, etp, vpp: Its degrees.
        spec: Its layer spec.
        layer_keys: How it stores layers.
        experts: How its modules hold experts.
        ends: Layers of its first and last stage, where its arguments say that they differ.
    """

    tp: int
    pp: int
    ep: int
    etp: int
    vpp: int
    spec: str
    layer_keys: str
    experts: str
    ends: tuple[int | None, int | None] = (None, None)

    def __str__(self) -> str:
        return (
            f"tp={self.tp} pp={self.pp} ep={self.ep} etp={self.etp} vpp={self.vpp} spec={self.spec} "
            f"experts={self.experts}"
        )

    @property
    def mesh(self) -> Mesh:
        """Its ranks."""
        return megatron.mesh(tp=self.tp, pp=self.pp, ep=self.ep, etp=self.etp)


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
    stored = megatron_buckets.buckets(manifest)
    fits: dict[tuple[tuple[str, StoredTensor], ...], tuple[Job, dict[str, StoredTensor]]] = {}
    why: list[str] = []
    forms = list(_forms(weights, model, padded))
    jobs = list(itertools.islice(_jobs(manifest, model, stored, forms), _MAX_CANDIDATES + 1))
    for job in jobs[:_MAX_CANDIDATES]:
        try:
            held = list(_held(model, job, stored, weights, padded))
            made = megatron_buckets.assembled(manifest, held, shapes={k: w.shape for k, w in weights.items()})
            view = replace(manifest, tensors={**weights, **made})
            megatron_buckets.prove_masters(view)
        except ShardweaveError as error:
            why.append(f"{job}: {str(error).partition('. hint:')[0]}")
            continue
        fits.setdefault(tuple(sorted(made.items(), key=lambda item: item[0])), (job, made))
    if len(fits) != 1 or len(jobs) > _MAX_CANDIDATES:
        found = [str(job) for job, _ in fits.values()]
        raise FormatError(
            "one geometry of the job that saved flat buckets agrees with what it stored",
            where=where,
            equation=f"{len(fits)} of {len(jobs)} agree"
            + (f": {some(found, limit=4)}" if found else f"; {some(why, limit=3)}"),
            hint=f"save the optimizer with --dist-ckpt-optim-fully-reshardable, or {HINT}",
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


def _forms(
    weights: Mapping[str, StoredTensor], model: Model, padded: int | None
) -> Iterator[tuple[str, str]]:
    """The layer specs and ways of storing layers that give the keys that are stored."""
    for spec, layer_keys in itertools.product(megatron.specs(model), _LAYER_KEYS):
        if layer_keys != "stacked" or megatron.layers_alike(model):
            form = megatron.checkpoint(model, spec=spec, layer_keys=layer_keys, padded_vocab=padded)
            if set(form.stored()) == set(weights):
                yield spec, layer_keys


def _jobs(
    manifest: Manifest, model: Model, stored: Sequence[Bucket], forms: Sequence[tuple[str, str]]
) -> Iterator[Job]:
    """The jobs that have as many groups of ranks, and are what the arguments say."""
    args = megatron_optimizer.arguments(manifest)
    dense = {bucket.group for bucket in stored if bucket.chained in (None, 0)}
    spread = {bucket.group for bucket in stored if bucket.chained == 1}
    impl = {"transformer_engine": "te", "local": "local"}.get(str(args.get("transformer_impl")))
    forms = [form for form in forms if impl in (None, form[0])]
    kinds = {True: ["grouped"], False: ["sequential"]}.get(
        args.get("moe_grouped_gemm", None), ["sequential", "grouped"]
    )
    if not any(True for _ in model.of("moe")):
        kinds = ["grouped"]
    vpp = args.get("virtual_pipeline_model_parallel_size") or 1
    ends = args.get("decoder_first_pipeline_num_layers"), args.get("decoder_last_pipeline_num_layers")
    said = {
        name: args[f"{word}_parallel_size"]
        for name, word in (("tp", "tensor_model"), ("pp", "pipeline_model"), ("ep", "expert_model"),
                           ("etp", "expert_tensor"))
        if type(args.get(f"{word}_parallel_size")) is int
    }  # fmt: skip
    for tp in _divisors(len(dense)):
        pp = len(dense) // tp
        for ep, etp in _spread(len(spread), pp, tp):
            job = {"tp": tp, "pp": pp, "ep": ep, "etp": etp}
            if any(job[name] != value for name, value in said.items()):
                continue
            for (spec, layer_keys), kind in itertools.product(forms, kinds):
                yield Job(**job, vpp=vpp, spec=spec, layer_keys=layer_keys, experts=kind, ends=ends)


def _spread(groups: int, pp: int, tp: int) -> Iterator[tuple[int, int]]:
    """The expert degrees that make so many groups of ranks: ep, then etp."""
    if not groups:
        yield 1, tp  # experts that are not spread are among the dense weights
        return
    for ep in _divisors(groups):
        if ep > 1 and groups // ep % pp == 0:
            yield ep, groups // ep // pp


def _divisors(count: int) -> Iterator[int]:
    yield from (n for n in range(1, count + 1) if count % n == 0)


def _held(
    model: Model,
    job: Job,
    stored: Sequence[Bucket],
    weights: Mapping[str, StoredTensor],
    padded: int | None,
) -> Iterator[tuple[Bucket, list[Held]]]:
    """Every bucket with what a job has in it."""
    first, last = job.ends
    pipeline = megatron.stages(model.num_layers, job.pp, vpp=job.vpp, first=first, last=last)
    form: dict[str, Any] = {
        "spec": job.spec, "experts": job.experts, "layer_keys": job.layer_keys, "pipeline": pipeline,
        "padded_vocab": padded,
    }  # fmt: skip
    groups: dict[tuple[int, int], list[Bucket]] = {}
    for bucket in stored:
        groups.setdefault((bucket.chained or 0, bucket.group), []).append(bucket)
    mesh = job.mesh
    wanted = [(0, group) for group in range(job.tp * job.pp)]
    if job.ep > 1:
        wanted += [(1, group) for group in range(job.etp * job.ep * job.pp)]
    if sorted(groups) != wanted:
        raise FormatError(
            "every group of ranks has stored its buckets",
            equation=f"stored are those of {some(map(str, sorted(groups)))} != {some(map(str, wanted))}",
            hint="copy the whole folder; every rank of the save wrote files of its own",
        )
    for (chained, group), few in groups.items():
        rank = _rank(mesh, job, chained, group)
        buffers: dict[tuple[int, str], list[Parameter]] = {}
        for v, chunk in enumerate(parameters(model, mesh, rank, **form)):
            for one in chunk:
                if (one.expert and job.ep > 1) is bool(chained):
                    dtype = weights[one.stretches[0].array].dtype
                    buffers.setdefault((v, dtype), []).append(one)
        found = [(bucket.buffer, bucket.dtype) for bucket in few if not bucket.number]
        if found != [(n, dtype) for n, (_, dtype) in enumerate(buffers)]:
            raise FormatError(
                "a rank has a buffer for each dtype of its parameters, chunk by chunk",
                where=f"group {group}",
                equation=f"stored are {some(map(str, found))}; it has {some(map(str, buffers))}",
                hint="the dtypes of the weights changed since the job began",
            )
        for n, held in enumerate(buffers.values()):
            here = [bucket for bucket in few if bucket.buffer == n]
            for bucket, placed in zip(here, fill(held, [one.size for one in here]), strict=True):
                yield (
                    bucket,
                    [
                        Held(
                            at.parameter.name,
                            at.start,
                            at.parameter.shape,
                            [(part.array, part.box, part.at) for part in at.parameter.stretches],
                            at.parameter.replica,
                        )
                        for at in placed
                    ],
                )


def _rank(mesh: Mesh, job: Job, chained: int, group: int) -> int:
    """A rank of a group: groups are numbered along tp, then pp; of experts along etp, ep, pp."""
    if not chained:
        return int(mesh.where({"tp": group % job.tp, "pp": group // job.tp, "dp": 0, "cp": 0})[0])
    rest, etp = divmod(group, job.etp)
    return int(mesh.where({"etp": etp, "ep": rest % job.ep, "pp": rest // job.ep, "edp": 0})[0])


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
