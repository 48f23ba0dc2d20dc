"""What a run would be, before any process of it: its ranks, its groups, what each rank holds and sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import Any

from shardweave.layout import BufferRule, Mesh
from shardweave.train.arrays import held_arrays
from shardweave.train.checks import hf_config_of, model_of, parallel_of
from shardweave.train.config import TrainConfig
from shardweave.train.grid import GroupPlan
from shardweave.train.memory import Memory, memory_of
from shardweave.train.parallel import Parallel
from shardweave.train.reads import Planned, planned
from shardweave.train.runtime import group_plan
from shardweave.train.schedule import plan_pipeline
from shardweave.train.schemes import Cost, compared, schemes
from shardweave.train.sequence import SequenceLayout
from shardweave.train.step import Objective
from shardweave.train.traffic import Traffic, imbalance, traffic_of
from shardweave.train.worker import settings_of


@dataclass(frozen=True, slots=True)
class Family:
    """A weight, or one of each layer, and where it is.

    Attributes:
        name: Its name, with ``*`` for the number of a layer.
        whole: The shape of all of it, experts stacked.
        shape: Of what a rank holds of it.
        cut: The axes that it is computed in parts over.
        shared: The axes that share it: it is gathered over them for use, and each gradient summed.
        copies: The axes over which gradients are summed once a step: those of ranks that hold the same.
        is_at_ends: Whether the first and the last stage have one, whose gradients are summed too.
        filled: Elements that all ranks together are filled up with.
        empty: How many of the ranks that share it hold nothing but padding.
        ranks: How many ranks share it.
    """

    name: str
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    cut: tuple[str, ...]
    shared: tuple[str, ...]
    copies: tuple[str, ...]
    is_at_ends: bool
    filled: int
    empty: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the pipeline, and what its first rank holds and sends; the others differ by rows at most.

    Attributes:
        number: From 0.
        first_rank: Its first rank.
        last_rank: Its last one.
        layers: The layers of each stretch.
        numel: Parameters of a rank, padding included.
        memory: Bytes of its first rank by kind.
        sent: Bytes that this rank sends to others in a full step, by part; of experts about.
    """

    number: int
    first_rank: int
    last_rank: int
    layers: str
    numel: int
    memory: Memory
    sent: Mapping[str, int]

    @property
    def sent_bytes(self) -> int:
        """All bytes of ``sent``."""
        return sum(self.sent.values())

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        of = self.memory
        return {
            "stage": self.number,
            "ranks": [self.first_rank, self.last_rank],
            "layers": self.layers,
            "parameters": self.numel,
            "weight_bytes": of.weights,
            "optimizer_bytes": of.masters + of.moments,
            "sent_bytes": self.sent_bytes,
            "memory": {**asdict(of), "kept": of.kept, "total": of.total},
            "sent": dict(self.sent),
        }


@dataclass(frozen=True, slots=True)
class Explained:
    """What a run would be.

    Attributes:
        family: Of the model.
        numel: Parameters of the model, tied ones once.
        mesh: The ranks.
        groups: The groups.
        shares: Who shares weights, in words.
        microbatches: How a step is cut.
        families: The weights.
        stages: What ranks hold and send.
        costs: What other ways to hold the weights would cost the first rank of the fullest stage.
        fullest: The number of that stage.
        bubble: The share of time in which a stage waits, in a full step: all documents of the whole length.
        imbalance: The work of attention of the busiest context rank over the mean, in a full step.
    """

    family: str
    numel: int
    mesh: Mesh
    groups: GroupPlan
    shares: str
    microbatches: str
    families: tuple[Family, ...]
    stages: tuple[Stage, ...]
    costs: tuple[Cost, ...]
    fullest: int
    bubble: float
    imbalance: float

    @property
    def warnings(self) -> tuple[str, ...]:
        """Weights of which some ranks hold nothing."""
        alike: dict[tuple[int, int], list[str]] = {}
        for each in self.families:
            if each.empty:
                alike.setdefault((each.empty, each.ranks), []).append(each.name)
        return tuple(
            f"{empty} of {ranks} ranks that share {', '.join(names)} hold nothing but padding"
            for (empty, ranks), names in alike.items()
        )

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {
            "family": self.family,
            "parameters": self.numel,
            "ranks": self.mesh.size,
            "mesh": str(self.mesh),
            "communicators": len(self.groups.communicators),
            "groups": {
                name: [list(ranks) for ranks in over.groups(self.mesh)]
                for name, over in next(iter(self.groups.names.values())).items()
            },
            "weights": [asdict(each) for each in self.families],
            "warnings": list(self.warnings),
            "stages": [stage.plain() for stage in self.stages],
            "schemes": [
                {
                    "name": cost.scheme.name,
                    "is_this": cost.scheme.is_this,
                    "weight_axes": list(cost.scheme.parallel.dense_axes),
                    "remat": cost.scheme.parallel.remat,
                    "dp": cost.scheme.parallel.dp,
                    "sharded": cost.scheme.sharded,
                    "memory": {**asdict(cost.memory), "kept": cost.memory.kept, "total": cost.memory.total},
                    "sent_bytes": cost.sent_bytes,
                }
                for cost in self.costs
            ],
            "bubble": self.bubble,
            "imbalance": self.imbalance,
        }


def explain(config: TrainConfig) -> Explained:
    """What a run would be; no process, no group and no weight is made."""
    parallel, step, sharded = parallel_of(config), full_step(config), config.optimizer.sharded
    model = _planned(config, parallel)
    each = parallel.world_size // parallel.pp
    ranks = range(0, parallel.world_size, each)
    sent, kept = _traffic(config, step, ranks, model, sharded), _memory(config, step, ranks, model, sharded)
    stages = []
    for number, (rank, chunks) in enumerate(zip(ranks, model.chunks, strict=True)):
        numel = sum(prod(one.shape) for one in held_arrays(model.layout, rank).values())
        layers = "; ".join(_stretch(chunk) for chunk in chunks)
        stages.append(Stage(number, rank, rank + each - 1, layers, numel, kept[rank], sent.by_part(rank)))
    fullest = max(stages, key=lambda stage: stage.memory.total)
    rank = fullest.first_rank
    kind = "interleaved" if parallel.vp > 1 else "1f1b"
    plan = plan_pipeline(kind, stages=parallel.pp, virtual=parallel.vp, microbatches=len(step))
    of = model_of(config).model
    return Explained(
        family=of.family,
        numel=of.numel,
        mesh=parallel.mesh,
        groups=group_plan(parallel),
        shares=_shares(parallel, has_experts=bool(list(of.of("moe")))),
        microbatches=_microbatches(config),
        families=tuple(_families(model, ranks)),
        stages=tuple(stages),
        costs=compared(
            schemes(parallel, sharded=sharded),
            lambda degrees: model if degrees == parallel else _planned(config, degrees),
            lambda planned, shards: _memory(config, step, [rank], planned, shards)[rank],
            partial(_traffic, config, step, [rank]),
            rank,
        ),
        fullest=fullest.number,
        bubble=plan.bubble,
        imbalance=imbalance(step),
    )


def _planned(config: TrainConfig, parallel: Parallel) -> Planned:
    return planned(
        hf_config_of(config),
        parallel,
        dtype=config.model.dtype,
        stage_sizes=config.parallel.stages,
        mtp=config.model.mtp,
        multiple=config.parallel.weight_multiple,
    )


def _traffic(
    config: TrainConfig, step: Sequence[SequenceLayout], ranks: Sequence[int], model: Planned, sharded: bool
) -> Traffic:
    loss = config.loss
    return traffic_of(
        model,
        [step] * model.parallel.num_data,
        Objective(balance=loss.balance, router_z=loss.router_z, mtp=loss.mtp),
        sharded=sharded,
        cp_method=config.parallel.attention,
        recompute=config.model.recompute,
        settings=settings_of(config),
        ranks=ranks,
    )


def _memory(
    config: TrainConfig, step: Sequence[SequenceLayout], ranks: Sequence[int], model: Planned, sharded: bool
) -> dict[int, Memory]:
    return memory_of(
        model,
        sharded=sharded,
        trains_mtp=bool(config.loss.mtp),
        recompute=config.model.recompute,
        ahead=config.parallel.prefetch,
        microbatches=len(step),
        settings=settings_of(config),
        ranks=ranks,
    )


# --- weights ------------------------------------------------------------------------------------


def _families(model: Planned, ranks: Sequence[int]) -> Iterator[Family]:
    """The weights in the order of the layout, each as the first stage has it that has one."""
    held = {rank: held_arrays(model.layout, rank) for rank in ranks}
    rules: dict[str, list[BufferRule]] = {}
    for rule in model.layout.rules:
        rules.setdefault(rule.name, []).append(rule)
    for name, those in rules.items():
        for rank in ranks:
            buffer = next((made for rule in those if (made := rule.at(model.mesh, rank))), None)
            member = next(iter(buffer.members()), None) if buffer is not None else None
            if member is not None:
                shape = held[rank][member[0]].shape
                yield _family(model, name, those, rank, member[0], shape)
                break


def _family(
    model: Planned, name: str, rules: Sequence[BufferRule], rank: int, member: str, shape: tuple[int, ...]
) -> Family:
    of, mesh, tensor = model.parallel, model.mesh, rules[0].parts[0].tensor
    in_experts = "expert" in dict(tensor.index)
    whole = (*(len(dim) for index, dim in tensor.index if index != "layer"), *tensor.shape)
    reads = {axis for axis in rules[0].axes if axis != "pp"}
    sharing = of.expert_axes if in_experts else of.dense_axes
    axes = ("etp", "ep", "eremat", "edp") if in_experts else ("tp", *of.DATA_AXES)
    axes = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
    size = model.sizes(rank).get(member)
    return Family(
        name=name.replace("{layer}", "*"),
        whole=whole,
        shape=shape,
        cut=tuple(axis for axis in axes if axis in reads and axis not in sharing),
        shared=tuple(axis for axis in axes if axis in reads and axis in sharing),
        copies=tuple(axis for axis in axes if axis not in reads),
        is_at_ends=len(rules) > 1,
        filled=prod(shape) * prod(mesh.axis_size(axis) for axis in reads) - prod(whole),
        empty=size.empty if size else 0,
        ranks=size.ranks if size else 1,
    )


def _shares(of: Parallel, *, has_experts: bool) -> str:
    said = []
    kinds = [("dense weights", of.dense_axes, of.num_shares)]
    kinds += [("experts", of.expert_axes, of.num_expert_shares)] if has_experts else []
    for what, axes, ranks in kinds:
        some = [axis for axis in axes if of.mesh.axis_size(axis) > 1]
        said.append(f"{what} over {', '.join(some)}: {ranks} ranks" if some else f"{what} whole")
    return "; ".join(said) if of.num_shares * of.num_expert_shares > 1 else "none: weights are whole"


# --- a step -------------------------------------------------------------------------------------


def full_step(config: TrainConfig) -> list[SequenceLayout]:
    """The microbatches of a data rank where all documents have the whole length."""
    batch, of, length = config.batch, config.parallel, config.batch.sequence_length

    def layout(count: int) -> SequenceLayout:
        return SequenceLayout((length,) * count, batch.form, of.cp, of.tp, of.order)

    most = batch.microbatch if batch.tokens is None else max(1, batch.tokens // layout(1).padded[0])
    left = batch.documents // parallel_of(config).num_data
    return [layout(min(most, left - begin)) for begin in range(0, left, most)]


def _microbatches(config: TrainConfig) -> str:
    batch, data = config.batch, parallel_of(config).num_data
    again = "\nlayers are computed once more on the way back" if config.model.recompute else ""
    if batch.tokens is not None:
        return f"in microbatches of at most {batch.tokens:,} slots on each of {data} data ranks{again}"
    count = batch.documents // (data * batch.microbatch)
    return f"in {count} x {batch.microbatch} on each of {data} data ranks{again}"


def _stretch(layers: Any) -> str:
    listed = list(layers)
    return f"{listed[0]}-{listed[-1]}" if len(listed) > 1 else ", ".join(map(str, listed))
