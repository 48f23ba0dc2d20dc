"""What jobs may have saved the flat buckets of a folder, and what each of them has where.

A job's degrees are those that its recorded arguments say; what they do not say is tried. What is not said by
buckets either, in which order ranks of a context group and ranks that share matrices are counted, and to how
many rows shares are filled up, is tried too.

Groups of ranks are numbered along tp, then along the ranks that share matrices, then pp; of experts along
etp, ep, the ranks that share experts, and pp.

Source: megatron-core 0.16.1; of shares Megatron-LM after it, as public: ``parallel_state.py``,
``distributed/param_and_grad_buffer.py``, ``optimizer/__init__.py``. Read, and not run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardweave.dialects import megatron
from shardweave.dialects.megatron.buckets import fill
from shardweave.dialects.megatron.parameters import Parameter, parameters
from shardweave.dialects.megatron.shares import Share, shared
from shardweave.dialects.megatron.weights import weights as weights_of
from shardweave.errors import FormatError, GeometryError
from shardweave.layout import Mesh
from shardweave.models import Model
from shardweave.store import megatron_optimizer
from shardweave.store.manifest import Manifest, StoredTensor
from shardweave.store.megatron_buckets import Bucket, Held, context_ranks
from shardweave.store.strict_json import some

_LAYER_KEYS: Final = ("stacked", "per_layer", "singleton")
_MULTIPLES: Final = (16, 32, 0, 8, 64, 128)
"""To how many rows shares are filled up: 16 by default, 32 with MXFP8, 0 where nothing is; others by hand."""
Known = dict[tuple[Any, ...], tuple[tuple[Parameter, ...], ...]]
"""What ranks have without shares, by what it depends on."""
_DEGREES: Final = {"tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model", "etp": "expert_tensor"}


@dataclass(frozen=True, slots=True)
class Job:
    """What a job that saved buckets may have been.

    Attributes:
        tp, pp, ep, etp, vpp: Its degrees.
        spec: Its layer spec.
        layer_keys: How it stores layers.
        experts: How its modules hold experts.
        ends: Layers of its first and last stage, where its arguments say that they differ.
        folded: Whether what a context group shares is in buffers of its own.
        cp: The ranks of a context group that share matrices; 1 where they do not.
        remat: Ranks that share matrices besides those.
        expert_remat: Ranks that share those of experts.
        apart: Whether experts have an optimizer of their own.
        multiple: To a multiple of how many rows shares are filled up.
        cp_first: Whether shares are counted along cp first.
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
    folded: bool = False
    cp: int = 1
    remat: int = 1
    expert_remat: int = 1
    apart: bool = False
    multiple: int = 16
    cp_first: bool = True

    def __str__(self) -> str:
        said = (
            f"tp={self.tp} pp={self.pp} ep={self.ep} etp={self.etp} vpp={self.vpp} spec={self.spec} "
            f"experts={self.experts}"
        )
        if not self.shares:
            return said
        order = "cp-remat" if self.cp_first else "remat-cp"
        said += f" cp={self.cp} remat={self.remat} expert_remat={self.expert_remat}"
        return f"{said} multiple={self.multiple} order={order}"

    @property
    def shares(self) -> bool:
        """Whether any ranks share matrices."""
        return max(self.cp, self.remat, self.expert_remat) > 1

    @property
    def mesh(self) -> Mesh:
        """Its ranks, without those that differ in their shares alone."""
        return megatron.mesh(tp=self.tp, pp=self.pp, ep=self.ep, etp=self.etp)

    def share(self, *, remat: int, cp: int) -> Share:
        """Which share of the matrices outside experts a rank has."""
        number = cp + self.cp * remat if self.cp_first else remat + self.remat * cp
        return Share(number, self.cp * self.remat, self.multiple)

    def share_of_experts(self, remat: int) -> Share:
        """Which share of the matrices of experts a rank has: one of the context group has no other rows."""
        return Share(remat, self.expert_remat, self.multiple)


# --- which there are ----------------------------------------------------------------------------


def jobs(
    manifest: Manifest,
    model: Model,
    stored: Sequence[Bucket],
    weights: Mapping[str, StoredTensor],
    padded: int | None,
) -> Iterator[Job]:
    """The jobs that have as many groups of ranks, and are what the arguments say.

    Args:
        manifest: The folder.
        model: The model.
        stored: Its buckets.
        weights: The stored weights.
        padded: Rows of the stored vocabulary.

    Raises:
        FormatError: Arguments say that ranks of a context group have rows of their own, and keys do not, or
            those of another number of ranks.
    """
    args = megatron_optimizer.arguments(manifest)
    cp = _context(manifest, args, stored)
    folded = any(one.cp_rank is not None for one in stored)
    said = {
        name: args[f"{word}_parallel_size"]
        for name, word in _DEGREES.items()
        if type(args.get(f"{word}_parallel_size")) is int
    }
    remat = _remat(args, "gtp_weight_remat_size", "tensor_parallel_num_weight_shards", said.get("tp"))
    of_experts = _remat(
        args, "expert_gtp_weight_remat_size", "expert_tensor_parallel_num_weight_shards", said.get("etp")
    )
    has_experts = any(True for _ in model.of("moe"))
    dense = len({bucket.group for bucket in stored if bucket.chained in (None, 0)})
    spread = len({bucket.group for bucket in stored if bucket.chained == 1})
    impl = {"transformer_engine": "te", "local": "local"}.get(str(args.get("transformer_impl")))
    forms = [form for form in _forms(weights, model, padded) if impl in (None, form[0])]
    kinds = {True: ["grouped"], False: ["sequential"]}.get(
        args.get("moe_grouped_gemm", None), ["sequential", "grouped"]
    )
    vpp = args.get("virtual_pipeline_model_parallel_size") or _chunks(stored)
    ends = args.get("decoder_first_pipeline_num_layers"), args.get("decoder_last_pipeline_num_layers")
    shares = cp > 1 or (remat or 1) > 1 or (of_experts or 1) > 1
    for tp, here in itertools.product(_divisors(dense), _divisors(dense) if shares else (1,)):
        if dense % (tp * here) or remat not in (None, here):
            continue
        pp = dense // tp // here
        for ep, etp, more in _spread(spread, pp, tp, here, shares=shares, has_experts=has_experts):
            degrees = {"tp": tp, "pp": pp, "ep": ep, "etp": etp}
            if any(degrees[name] != value for name, value in said.items()):
                continue
            if has_experts and of_experts not in (None, more):
                continue
            orders = (True, False) if min(cp, here) > 1 else (True,)
            for (spec, layer_keys), kind, cp_first in itertools.product(
                forms, kinds if has_experts else ["grouped"], orders
            ):
                for multiple in _multiples(model, spec, padded, ((tp, cp * here), (etp, more))):
                    yield Job(
                        **degrees, vpp=vpp, spec=spec, layer_keys=layer_keys, experts=kind, ends=ends,
                        folded=folded, cp=cp, remat=here, expert_remat=more, apart=spread > 0,
                        multiple=multiple, cp_first=cp_first,
                    )  # fmt: skip


def _context(manifest: Manifest, args: Mapping[str, Any], stored: Sequence[Bucket]) -> int:
    """The ranks of a context group that have rows of their own, as keys and arguments say."""
    cp, said = context_ranks(stored), args.get("context_parallel_size")
    folded = args.get("gtp_remat_fold_cp")
    if type(said) is not int or (cp == said if cp > 1 else not folded or said == 1):
        return cp
    raise FormatError(
        "ranks of a context group that share matrices store their rows under keys of their own",
        where=f"{manifest.root}, keys with cp_rank",
        equation=f"those of {cp if cp > 1 else 'no'} ranks != context_parallel_size({said}), "
        f"gtp_remat_fold_cp({folded})",
        hint="copy the whole folder; a version that gave these ranks one key kept the state of one of them",
    )


def _remat(args: Mapping[str, Any], name: str, shards: str, tp: int | None) -> int | None:
    """How many ranks share matrices, as far as the arguments say it."""
    if type(found := args.get(name)) is int:
        return found
    total = args.get(shards)
    return total // tp if type(total) is int and tp is not None and tp > 0 else None


def _forms(
    weights: Mapping[str, StoredTensor], model: Model, padded: int | None
) -> Iterator[tuple[str, str]]:
    """The layer specs and ways of storing layers that give the keys that are stored."""
    for spec, layer_keys in itertools.product(megatron.specs(model), _LAYER_KEYS):
        if layer_keys != "stacked" or megatron.layers_alike(model):
            form = megatron.checkpoint(model, spec=spec, layer_keys=layer_keys, padded_vocab=padded)
            if set(form.stored()) == set(weights):
                yield spec, layer_keys


def _chunks(stored: Sequence[Bucket]) -> int:
    """Virtual chunks of a stage: each has one buffer of a kind."""
    kinds = Counter(
        (one.chained, one.group, one.dtype, one.cp_rank is None)
        for one in stored
        if not one.number and not one.cp_rank
    )
    return max(kinds.values(), default=1)


def _spread(
    groups: int, pp: int, tp: int, remat: int, *, shares: bool, has_experts: bool
) -> Iterator[tuple[int, int, int]]:
    """The expert degrees that make so many groups of ranks: ep, etp, and how many share matrices."""
    if not groups:
        # Experts that are not spread are among the dense weights. They may be whole where those are cut.
        for etp in _divisors(tp) if has_experts and not shares else (tp,):
            yield 1, etp, remat
        return
    for ep, more in itertools.product(_divisors(groups), _divisors(groups) if shares else (1,)):
        if groups % (ep * more * pp):
            continue
        etp = groups // ep // more // pp
        # Before there were shares, experts were apart where they are spread, and nowhere else.
        if ep > 1 or (shares and (etp, more) != (tp, remat)):
            yield ep, etp, more


def _divisors(count: int) -> Iterator[int]:
    yield from (n for n in range(1, count + 1) if count % n == 0)


def _multiples(
    model: Model, spec: str, padded: int | None, degrees: tuple[tuple[int, int], tuple[int, int]]
) -> Iterator[int]:
    """Multiples of rows by which shares differ; of those that make the same shares, the first.

    ``degrees`` are tensor-parallel ranks and shares, of dense weights and of experts.
    """
    seen = set[tuple[int, ...]]()
    for multiple in _MULTIPLES:
        sizes = []
        try:
            for weight in weights_of(model, spec=spec, stored=False, padded_vocab=padded):
                tp, count = degrees[weight.expert]
                if weight.cut_dim is not None and len(weight.dims) == 2:
                    rows = len(weight.dims[0]) // (1 if weight.cut_dim else tp)
                    sizes.append(len(Share(0, count, multiple).rows(rows)))
        except GeometryError:
            continue
        if tuple(sizes) not in seen:
            seen.add(tuple(sizes))
            yield multiple


# --- what is where ------------------------------------------------------------------------------


def held(
    model: Model,
    job: Job,
    stored: Sequence[Bucket],
    weights: Mapping[str, StoredTensor],
    padded: int | None,
    *,
    known: Known | None = None,
) -> Iterator[tuple[Bucket, list[Held]]]:
    """Every bucket with what a job has in it.

    Args:
        model: The model.
        job: The job.
        stored: The buckets.
        weights: The stored weights.
        padded: Rows of the stored vocabulary.
        known: What was found for other jobs with the same arguments, and will be for this one.

    Raises:
        GeometryError: Degrees by which the model cannot be cut, or parameters that do not fill the buckets.
        FormatError: A group of ranks is not there, or has other buffers.
    """
    first, last = job.ends
    pipeline = megatron.stages(model.num_layers, job.pp, vpp=job.vpp, first=first, last=last)
    form: dict[str, Any] = {
        "spec": job.spec, "experts": job.experts, "layer_keys": job.layer_keys, "pipeline": pipeline,
        "padded_vocab": padded,
    }  # fmt: skip
    groups: dict[tuple[int, int], list[Bucket]] = {}
    for bucket in stored:
        groups.setdefault((bucket.chained or 0, bucket.group), []).append(bucket)
    mesh, known = job.mesh, {} if known is None else known
    wanted = [(0, group) for group in range(job.tp * job.remat * job.pp)]
    if job.apart:
        wanted += [(1, group) for group in range(job.etp * job.ep * job.expert_remat * job.pp)]
    if sorted(groups) != wanted:
        raise FormatError(
            "every group of ranks has stored its buckets",
            equation=f"stored are those of {some(map(str, sorted(groups)))} != {some(map(str, wanted))}",
            hint="copy the whole folder; every rank of the save wrote files of its own",
        )
    for (chained, group), few in groups.items():
        rank, remat = _rank(mesh, job, chained, group)
        chunks: list[dict[tuple[str, bool], list[Parameter]]] = []
        at = (job.tp, job.pp, job.ep, job.etp, job.vpp, job.spec, job.layer_keys, job.experts, rank)
        if at not in known:
            known[at] = parameters(model, mesh, rank, **form)
        for chunk in known[at]:
            buffers: dict[tuple[str, bool], list[Parameter]] = {}
            for one in chunk:
                if (one.expert and job.apart) is bool(chained):
                    folded = job.folded and one.gathered and not one.expert
                    dtype = weights[one.stretches[0].array].dtype
                    buffers.setdefault((dtype, folded), []).append(one)
            chunks.append(buffers)
        for number, kept in _numbered(chunks, few, where=f"group {group}"):
            here = [bucket for bucket in few if bucket.buffer == number]
            for cp in sorted({bucket.cp_rank or 0 for bucket in here}):
                mine = [bucket for bucket in here if (bucket.cp_rank or 0) == cp]
                yield from _filled(
                    mine,
                    [
                        shared(
                            one,
                            job.share_of_experts(remat) if one.expert else job.share(remat=remat, cp=cp),
                        )
                        for one in kept
                    ],
                )


def _numbered(
    chunks: Sequence[Mapping[tuple[str, bool], list[Parameter]]], few: Sequence[Bucket], *, where: str
) -> Iterator[tuple[int, list[Parameter]]]:
    """The buffers of a rank by number: of a chunk one for each dtype and way of sharing, in any order."""
    found = {one.buffer: (one.dtype, one.cp_rank is not None) for one in few}
    numbers = sorted(found)
    at = 0
    for buffers in chunks:
        here = numbers[at : at + len(buffers)]
        if sorted(found[n] for n in here) != sorted(buffers) or here != [*range(at, at + len(here))]:
            break
        yield from ((n, buffers[found[n]]) for n in here)
        at += len(here)
    else:
        if at == len(numbers):
            return
    raise FormatError(
        "a rank has a buffer for each dtype of its parameters, chunk by chunk, and for those that a context "
        "group shares",
        where=where,
        equation=f"stored are {some(f'{n}: {kind}' for n, kind in sorted(found.items()))}; it has "
        + some(str(key) for buffers in chunks for key in buffers),
        hint="the dtypes of the weights changed since the job began, or its degrees are others",
    )


def _filled(few: Sequence[Bucket], kept: Sequence[Parameter]) -> Iterator[tuple[Bucket, list[Held]]]:
    """The buckets of a buffer with the parameters in them."""
    for bucket, placed in zip(few, fill(kept, [one.size for one in few]), strict=True):
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


def _rank(mesh: Mesh, job: Job, chained: int, group: int) -> tuple[int, int]:
    """A rank of a group, and which of those that share matrices it is."""
    if not chained:
        rest, tp = divmod(group, job.tp)
        pp, remat = divmod(rest, job.remat)
        return int(mesh.where({"tp": tp, "pp": pp, "dp": 0, "cp": 0})[0]), remat
    rest, etp = divmod(group, job.etp)
    rest, ep = divmod(rest, job.ep)
    pp, remat = divmod(rest, job.expert_remat)
    return int(mesh.where({"etp": etp, "ep": ep, "pp": pp, "edp": 0})[0]), remat
