"""Megatron's older folders of ranks, seen as the whole arrays that newer ones store.

The names and the order of a rank's arrays are recorded. They say which layer spec it was, and are held
against the order that the dialect states; every block of a rank then has its place in a whole array.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardweave.dialects import megatron
from shardweave.dialects.megatron.buckets import fill, sizes_of
from shardweave.dialects.megatron.parameters import Parameter, parameters
from shardweave.errors import FormatError, ShardweaveError, UnknownNameError
from shardweave.layout import Mesh
from shardweave.models import Model, from_config
from shardweave.store import megatron_buckets, megatron_groups, megatron_legacy, megatron_optimizer
from shardweave.store.manifest import Extent, Manifest, StoredTensor
from shardweave.store.megatron_buckets import Bucket, Held
from shardweave.store.megatron_legacy import Legacy, Rank
from shardweave.store.strict_json import some

UNREAD = "unread"
"""The record of why the state of an optimizer could not be read."""
_HINT = "convert the weights alone with --weights-only"
_BUCKET_SIZE = 40_000_000
"""What megatron-core takes for a bucket at least, where it overlaps sums of gradients and is told no size."""

_Chunks = tuple[tuple[Parameter, ...], ...]


def whole(manifest: Manifest, config: Mapping[str, Any] | None) -> Manifest:
    """The weights and states of a folder of ranks under the keys of a newer folder.

    Args:
        manifest: From ``megatron_legacy.read``.
        config: The config of the model.

    Raises:
        FormatError, UnknownNameError: Ranks do not have what the model has at such degrees.
        ReplicaError: Copies of a weight differ.
    """
    legacy: Legacy = manifest.records[megatron_legacy.RECORD]
    where = str(manifest.root)
    if config is None:
        raise FormatError(
            "shards of ranks are read by a model that is known",
            where=where,
            equation="config(none)",
            hint="give the config.json of the model",
        )
    model = from_config(config, dtype="float32")
    held, form = _held(manifest, legacy, model)
    for number, chunks in enumerate(held):
        _check_shapes(manifest, legacy, number, chunks)
    layout = megatron.checkpoint(model, **form)
    shapes = {key: buffer.shape for key, (buffer, _) in layout.stored().items()}
    blocks = [
        (_bucket(manifest, legacy.key(rank, one.name), ""), [_block(one)])
        for rank, chunks in enumerate(held)
        for one in itertools.chain(*chunks)
    ]
    weights = megatron_buckets.assembled(manifest, blocks, shapes=shapes)
    if missing := sorted(shapes.keys() - weights.keys()):
        raise FormatError(
            "all that a model has is a parameter of some rank",
            where=where,
            equation=f"{some(map(repr, missing), limit=2)} of {len(shapes)} are buffers of their modules",
            hint="load it in the version that saved it, and save it as torch_dist",
        )
    view = replace(
        manifest,
        tensors=weights,
        records={**manifest.records, megatron_optimizer.RECORD: megatron_optimizer.beside(manifest)},
    )
    try:
        return _with_states(manifest, view, legacy, held, shapes)
    except ShardweaveError as error:
        return replace(view, records={**view.records, UNREAD: error})


def _held(manifest: Manifest, legacy: Legacy, model: Model) -> tuple[list[_Chunks], dict[str, Any]]:
    """What each rank has, in its order, and in which form newer folders store it."""
    degrees = legacy.degrees
    tp, pp, ep = degrees["tp"], degrees["pp"], degrees["ep"]
    mesh = megatron.mesh(tp=tp, pp=pp, ep=ep, etp=tp)
    args = megatron_optimizer.arguments(manifest)
    pipeline = megatron.stages(
        model.num_layers,
        pp,
        vpp=len(legacy.ranks[0].names),
        first=args.get("decoder_first_pipeline_num_layers"),
        last=args.get("decoder_last_pipeline_num_layers"),
    )
    prefix = "model0." if len(legacy.ranks[0].names) > 1 else ""
    first = manifest.tensors.get(legacy.key(0, f"{prefix}embedding.word_embeddings.weight"))
    padded = first.shape[0] * tp if first is not None and first.shape else None
    layer_keys = "stacked" if megatron.layers_alike(model) else "per_layer"
    why: list[str] = []
    for spec, experts in itertools.product(megatron.specs(model), ("grouped", "sequential")):
        form = {"spec": spec, "layer_keys": layer_keys, "padded_vocab": padded}
        found = [
            parameters(model, mesh, _rank(mesh, one), experts=experts, pipeline=pipeline, **form)  # type: ignore[arg-type]
            for one in legacy.ranks
        ]
        wrong = next(_differences(legacy, found), None)
        if wrong is None:
            return [_prefixed(chunks) for chunks in found], form
        why.append(f"spec={spec} experts={experts}: {wrong}")
    raise UnknownNameError(
        "ranks have the weights of the model under the names of Megatron's modules, in their order",
        where=str(manifest.root),
        equation=some(why, limit=2),
        hint="take the config that belongs to the weights",
    )


def _rank(mesh: Mesh, one: Rank) -> int:
    at = one.at
    return int(mesh.where({"tp": at["tp"], "pp": at["pp"], "ep": at["ep"], "edp": 0})[0])


def _differences(legacy: Legacy, found: Sequence[_Chunks]) -> Iterator[str]:
    """Where recorded names are not those of the parameters, in order; buffers of modules are passed over."""
    for number, (rank, chunks) in enumerate(zip(legacy.ranks, found, strict=True)):
        if len(rank.names) != len(chunks):
            yield f"rank {number} has {len(rank.names)} chunks, of {len(chunks)}"
            continue
        for v, (names, chunk) in enumerate(zip(rank.names, chunks, strict=True)):
            wanted = [one.name for one in chunk]
            here = [name for name in names if not name.endswith((".expert_bias", ".local_tokens_per_expert"))]
            if here != wanted:
                odd = next(
                    (pair for pair in itertools.zip_longest(here, wanted) if pair[0] != pair[1]), ("", "")
                )
                yield f"rank {number}, chunk {v}: {odd[0]!r} != {odd[1]!r}"


def _prefixed(chunks: _Chunks) -> _Chunks:
    """Parameters under the names by which their arrays are stored."""
    if len(chunks) == 1:
        return chunks
    return tuple(
        tuple(replace(one, name=f"model{v}.{one.name}") for one in chunk) for v, chunk in enumerate(chunks)
    )


def _bucket(manifest: Manifest, key: str, state: str, *, others: Mapping[str, str] | None = None) -> Bucket:
    """Arrays of one rank as a bucket that holds nothing else."""
    keys = {state: key, **(others or {})}
    states = {name: _flattened(manifest.tensors[one]) for name, one in keys.items()}
    return Bucket(None, 0, 0, 0, next(iter(states.values())).dtype, states)


def _flattened(tensor: StoredTensor) -> StoredTensor:
    numel = math.prod(tensor.shape)
    extents = tuple(Extent((0,), (numel,), one.file, one.start) for one in tensor.extents)
    return StoredTensor(tensor.key, tensor.dtype, (numel,), extents)


def _block(one: Parameter, start: int = 0) -> Held:
    parts = [(part.array, part.box, part.at) for part in one.stretches]
    return Held(one.name, start, one.shape, parts, one.replica)


# --- states -------------------------------------------------------------------------------------


def _with_states(
    manifest: Manifest,
    view: Manifest,
    legacy: Legacy,
    held: Sequence[_Chunks],
    shapes: Mapping[str, tuple[int, ...]],
) -> Manifest:
    blocks: list[tuple[Bucket, list[Held]]] = []
    for number, (rank, chunks) in enumerate(zip(legacy.ranks, held, strict=True)):
        if rank.flat:
            blocks += _of_buffers(manifest, legacy, number, rank, chunks)
        elif rank.apart:
            blocks += _of_groups(manifest, legacy, number, rank, chunks)
        elif blocks or "optimizer" in manifest.records["common"]:
            raise FormatError(
                "every rank stored the states of its optimizer",
                where=f"{manifest.root}, rank {number}",
                equation=f"{megatron_legacy.STATES} is not there, nor states in {megatron_legacy.WEIGHTS}",
                hint=f"copy the folders of all ranks, or {_HINT}",
            )
    if not blocks:
        return view
    made = megatron_buckets.assembled(manifest, blocks, shapes=shapes, borders=False)
    arrays = {name.removeprefix("optim/").rpartition("/")[0] for name in made}
    trained = {name: one.shape for name, one in view.tensors.items() if name in arrays}
    chained = len(_optimizers(manifest)) > 1
    owner = {name: int(megatron_groups.is_expert(name)) if chained else None for name in trained}
    records = {
        **view.records,
        "optimizer": megatron_optimizer.record_of(manifest, trained, owner),
        "untrained": frozenset(view.tensors) - arrays,
    }
    return replace(view, tensors={**view.tensors, **made}, records=records)


def _optimizers(manifest: Manifest) -> list[Any]:
    said = manifest.records["common"].get("optimizer", {})
    return list(said.values()) if said and all(type(key) is int for key in said) else [said]


def _check_shapes(manifest: Manifest, legacy: Legacy, number: int, chunks: _Chunks) -> None:
    for one in itertools.chain(*chunks):
        found = manifest.tensors[legacy.key(number, one.name)].shape
        if found != one.shape:
            raise FormatError(
                "a rank has its part of every weight",
                where=f"{manifest.root}, rank {number}, {one.name!r}",
                equation=f"stored {found} != {one.shape}",
                hint="the config belongs to another model, or folders of two jobs were mixed",
            )


def _split(legacy: Legacy, chunks: _Chunks, chained: int) -> list[list[Parameter]]:
    """The parameters of an optimizer, chunk by chunk: experts have one of their own where they are spread."""
    spread = legacy.degrees["ep"] > 1
    return [[one for one in chunk if (one.expert and spread) is bool(chained)] for chunk in chunks]


def _of_buffers(
    manifest: Manifest, legacy: Legacy, number: int, rank: Rank, chunks: _Chunks
) -> Iterator[tuple[Bucket, list[Held]]]:
    """The states of the distributed optimizer of a rank."""
    size = _bucket_size(manifest, rank)
    for chained in sorted({flat.chained for flat in rank.flat}):
        buffers: list[tuple[int, str, list[Parameter]]] = []
        for v, chunk in enumerate(_split(legacy, chunks, chained)):
            by_dtype: dict[str, list[Parameter]] = {}
            for one in chunk:
                dtype = manifest.tensors[legacy.key(number, one.name)].dtype
                by_dtype.setdefault(dtype, []).append(one)
            buffers += ((v, dtype, few) for dtype, few in by_dtype.items())
        here = [flat for flat in rank.flat if flat.chained == chained]
        wanted = [(n, dtype) for n, (_, dtype, _) in enumerate(buffers)]
        if [(one.buffer, one.dtype) for one in here] != wanted:
            raise FormatError(
                "a rank has a buffer for each dtype of its parameters, chunk by chunk",
                where=f"{manifest.root}, rank {number}",
                equation=f"stored are {some(f'{one.buffer} of {one.dtype}' for one in here)}; it has "
                + some(dtype for _, dtype, _ in buffers),
                hint=f"the dtypes of the weights changed since the job began; {_HINT}",
            )
        for flat, (v, _, few) in zip(here, buffers, strict=True):
            # Only the first chunk of the first stage is cut into buckets.
            sizes = sizes_of(few, size if v == 0 and not rank.at["pp"] else None)
            if sum(sizes) != flat.size:
                raise FormatError(
                    "the parameters of a rank fill the buffer that it stored",
                    where=f"{manifest.root}, rank {number}, buffer {flat.buffer}",
                    equation=f"they take {sum(sizes)} in {len(sizes)} buckets; stored are {flat.size}",
                    hint="how it was cut into buckets is not stored; the arguments overlap_grad_reduce, "
                    f"ddp_bucket_size and data_parallel_size say it where they are recorded; {_HINT}",
                )
            placed, begin = list[Held](), 0
            for bucket, length in zip(fill(few, sizes), sizes, strict=True):
                placed += (_block(one.parameter, begin + one.start) for one in bucket)
                begin += length
            first, *others = flat.states.items()
            yield _bucket(manifest, first[1], first[0], others=dict(others)), placed


def _bucket_size(manifest: Manifest, rank: Rank) -> int | None:
    """How large the buckets of a job were, by its arguments."""
    args = megatron_optimizer.arguments(manifest)
    if not args.get("overlap_grad_reduce"):
        return None
    given, dp = args.get("ddp_bucket_size"), args.get("data_parallel_size")
    if type(given) is int:
        return given
    return max(_BUCKET_SIZE, 1_000_000 * dp) if type(dp) is int else None


def _of_groups(
    manifest: Manifest, legacy: Legacy, number: int, rank: Rank, chunks: _Chunks
) -> Iterator[tuple[Bucket, list[Held]]]:
    """The states of an optimizer that is not distributed: group by group, in the order of the modules."""
    groups = list(megatron_optimizer.groups_of(manifest))
    several = len(_optimizers(manifest)) > 1
    decays = megatron_optimizer.arguments(manifest).get("apply_wd_to_qk_layernorm") is True
    for apart in rank.apart:
        mine = [one for one in groups if not several or one.chained == apart.chained]
        members: list[list[Parameter]] = [[] for _ in mine]
        for one in itertools.chain(*_split(legacy, chunks, apart.chained)):
            at = megatron_groups.group_of(one.name, len(one.shape), mine, decays_norms=decays)
            members[at].append(one)
        for g, (few, states) in enumerate(zip(members, apart.groups, strict=False)):
            masters = list(apart.masters[g]) if g < len(apart.masters) else []
            rounded = [
                one for one in few if manifest.tensors[legacy.key(number, one.name)].dtype != "float32"
            ]
            if len(few) != len(states) or len(rounded) != len(masters):
                raise FormatError(
                    "the optimizer of a rank has states of each of its parameters",
                    where=f"{manifest.root}, rank {number}, group {g}",
                    equation=f"{len(states)} states and {len(masters)} masters of {len(few)} parameters, "
                    f"{len(rounded)} of them rounded",
                    hint=f"the job grouped its parameters by a rule of its own, or froze some; {_HINT}",
                )
            of = dict(zip((one.name for one in rounded), masters, strict=True))
            for one, keys in zip(few, states, strict=True):
                weight = legacy.key(number, one.name)
                all_of = {**keys, megatron_groups.MASTER: of.get(one.name, weight)}
                wrong = [key for key in all_of.values() if manifest.tensors[key].shape != one.shape]
                if wrong:
                    raise FormatError(
                        "a state has the shape of its parameter",
                        where=f"{manifest.root}, rank {number}, {one.name!r}",
                        equation=f"{wrong[0]!r} has {manifest.tensors[wrong[0]].shape} != {one.shape}",
                        hint=f"the job grouped its parameters by a rule of its own; {_HINT}",
                    )
                first, *others = all_of.items()
                yield _bucket(manifest, first[1], first[0], others=dict(others)), [_block(one)]
