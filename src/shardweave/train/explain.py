"""What a run would be, before any process of it: its ranks, its groups, what each rank holds and sends."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from shardweave.layout import Mesh
from shardweave.train.arrays import held_arrays
from shardweave.train.checks import hf_config_of, model_of, parallel_of
from shardweave.train.config import TrainConfig
from shardweave.train.gradients import reduce_plan
from shardweave.train.grid import GroupPlan
from shardweave.train.optimizer import state_bytes
from shardweave.train.runtime import group_plan, layout_of
from shardweave.train.schedule import plan_pipeline, stages_of
from shardweave.train.sequence import SequenceLayout
from shardweave.train.step import Objective
from shardweave.train.traffic import imbalance, traffic
from shardweave.train.worker import settings_of

_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the pipeline. All its ranks hold equally much.

    Attributes:
        number: From 0.
        first_rank: Its first rank.
        last_rank: Its last one.
        layers: The layers of each stretch.
        numel: Parameters of a rank, padding included.
        weight_bytes: Their bytes.
        optimizer_bytes: Bytes of masters and moments of its first rank.
        sent_bytes: What its first rank sends to others in a full step, about.
    """

    number: int
    first_rank: int
    last_rank: int
    layers: str
    numel: int
    weight_bytes: int
    optimizer_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Explained:
    """What a run would be.

    Attributes:
        family: Of the model.
        numel: Parameters of the model, tied ones once.
        mesh: The ranks.
        groups: The groups.
        microbatches: How a step is cut.
        stages: What ranks hold and send.
        bubble: The share of time in which a stage waits, in a full step: all documents of the whole length.
        imbalance: The work of attention of the busiest context rank over the mean, in a full step.
    """

    family: str
    numel: int
    mesh: Mesh
    groups: GroupPlan
    microbatches: str
    stages: tuple[Stage, ...]
    bubble: float
    imbalance: float

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
            "stages": [
                {
                    "stage": stage.number,
                    "ranks": [stage.first_rank, stage.last_rank],
                    "layers": stage.layers,
                    "parameters": stage.numel,
                    "weight_bytes": stage.weight_bytes,
                    "optimizer_bytes": stage.optimizer_bytes,
                    "sent_bytes": stage.sent_bytes,
                }
                for stage in self.stages
            ],
            "bubble": self.bubble,
            "imbalance": self.imbalance,
        }


def explain(config: TrainConfig) -> Explained:
    """What a run would be; no process, no group and no weight is made."""
    model, parallel = model_of(config).model, parallel_of(config)
    sizes = config.parallel.stages
    dtype, mtp = config.model.dtype, config.model.mtp
    layout = layout_of(hf_config_of(config), parallel, dtype=dtype, stage_sizes=sizes, mtp=mtp)
    stretches = stages_of(model.num_layers, stages=parallel.pp, virtual=parallel.vp, sizes=sizes)
    each, found = parallel.world_size // parallel.pp, []
    step, settings = full_step(config), settings_of(config)
    sent = traffic(
        hf_config_of(config),
        parallel,
        [step] * parallel.dp,
        Objective(balance=config.loss.balance, router_z=config.loss.router_z, mtp=config.loss.mtp),
        sharded=config.optimizer.sharded,
        dtype=dtype,
        mtp=mtp,
        stage_sizes=sizes,
        cp_method=config.parallel.attention,
        settings=settings,
        ranks=range(0, parallel.world_size, each),
    )
    for number, chunks in enumerate(stretches):
        held = held_arrays(layout, number * each)
        numel = sum(prod(one.shape) for one in held.values())
        reduced = reduce_plan(layout, number * each)
        states = state_bytes(reduced, settings, sharded=config.optimizer.sharded)
        layers = "; ".join(_stretch(chunk) for chunk in chunks)
        weights = numel * _BYTES[config.model.dtype]
        first, total = number * each, sent.total(number * each)
        found.append(Stage(number, first, first + each - 1, layers, numel, weights, states, total))
    kind = "interleaved" if parallel.vp > 1 else "1f1b"
    plan = plan_pipeline(kind, stages=parallel.pp, virtual=parallel.vp, microbatches=len(step))
    return Explained(
        family=model.family,
        numel=model.numel,
        mesh=parallel.mesh,
        groups=group_plan(parallel),
        microbatches=_microbatches(config),
        stages=tuple(found),
        bubble=plan.bubble,
        imbalance=imbalance(step),
    )


def full_step(config: TrainConfig) -> list[SequenceLayout]:
    """The microbatches of a data rank where all documents have the whole length."""
    batch, of, length = config.batch, config.parallel, config.batch.sequence_length

    def layout(count: int) -> SequenceLayout:
        return SequenceLayout((length,) * count, batch.form, of.cp, of.tp, of.order)

    most = batch.microbatch if batch.tokens is None else max(1, batch.tokens // layout(1).padded[0])
    left = batch.documents // (of.dp or 1)
    return [layout(min(most, left - begin)) for begin in range(0, left, most)]


def _microbatches(config: TrainConfig) -> str:
    batch, dp = config.batch, config.parallel.dp or 1
    if batch.tokens is not None:
        return f"in microbatches of at most {batch.tokens:,} slots on each of {dp} data ranks"
    count = batch.documents // (dp * batch.microbatch)
    return f"in {count} x {batch.microbatch} on each of {dp} data ranks"


def _stretch(layers: Any) -> str:
    listed = list(layers)
    return f"{listed[0]}-{listed[-1]}" if len(listed) > 1 else ", ".join(map(str, listed))
