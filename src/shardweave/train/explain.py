"""What a run would be, before any process of it: its ranks, its groups, and what each rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from shardweave.layout import Mesh
from shardweave.train.arrays import held_arrays
from shardweave.train.checks import hf_config_of, model_of, parallel_of
from shardweave.train.config import TrainConfig
from shardweave.train.grid import GroupPlan
from shardweave.train.runtime import group_plan, layout_of
from shardweave.train.schedule import stages_of

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
        optimizer_bytes: Bytes of masters and moments of a rank; where replicas share them, about.
    """

    number: int
    first_rank: int
    last_rank: int
    layers: str
    numel: int
    weight_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, slots=True)
class Explained:
    """What a run would be.

    Attributes:
        family: Of the model.
        numel: Parameters of the model, tied ones once.
        mesh: The ranks.
        groups: The groups.
        microbatches: How a step is cut.
        stages: What ranks hold.
    """

    family: str
    numel: int
    mesh: Mesh
    groups: GroupPlan
    microbatches: str
    stages: tuple[Stage, ...]

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
                }
                for stage in self.stages
            ],
        }


def explain(config: TrainConfig) -> Explained:
    """What a run would be; no process, no group and no weight is made."""
    model, parallel = model_of(config).model, parallel_of(config)
    sizes = config.parallel.stages
    layout = layout_of(hf_config_of(config), parallel, dtype=config.model.dtype, stage_sizes=sizes)
    stretches = stages_of(model.num_layers, stages=parallel.pp, virtual=parallel.vp, sizes=sizes)
    each, found = parallel.world_size // parallel.pp, []
    wide = max(_BYTES[config.model.dtype], 4)
    for number, chunks in enumerate(stretches):
        held = held_arrays(layout, number * each)
        numel = sum(prod(one.shape) for one in held.values())
        states = 0
        for one in held.values():
            replicas = parallel.edp if ".experts." in one.name else parallel.cp * parallel.dp
            states += prod(one.shape) // (replicas if config.optimizer.sharded else 1)
        per = wide * (2 if _BYTES[config.model.dtype] == wide else 3)
        layers = "; ".join(_stretch(chunk) for chunk in chunks)
        weights = numel * _BYTES[config.model.dtype]
        found.append(
            Stage(number, number * each, (number + 1) * each - 1, layers, numel, weights, states * per)
        )
    return Explained(
        model.family, model.numel, parallel.mesh, group_plan(parallel), _microbatches(config), tuple(found)
    )


def _microbatches(config: TrainConfig) -> str:
    batch, dp = config.batch, config.parallel.dp or 1
    if batch.tokens is not None:
        return f"in microbatches of at most {batch.tokens:,} slots on each of {dp} data ranks"
    count = batch.documents // (dp * batch.microbatch)
    return f"in {count} x {batch.microbatch} on each of {dp} data ranks"


def _stretch(layers: Any) -> str:
    listed = list(layers)
    return f"{listed[0]}-{listed[-1]}" if len(listed) > 1 else ", ".join(map(str, listed))
