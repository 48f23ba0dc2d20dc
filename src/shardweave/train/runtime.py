"""A model on the ranks of a grid: built, and begun.

``build`` is local arithmetic: it makes this rank's weights and says how it computes. Whatever does not fit is
refused there, before ranks communicate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardweave.errors import GeometryError
from shardweave.layout import Layout
from shardweave.train.arrays import Held, held_arrays
from shardweave.train.decoder import Decoder
from shardweave.train.grid import GroupPlan, Groups, plan_groups
from shardweave.train.layout import train_layout
from shardweave.train.maths import maths
from shardweave.train.mtp import with_heads
from shardweave.train.parallel import GROUPS, Parallel
from shardweave.train.random import Normal, init
from shardweave.train.schedule import stages_of

GRID = "model"
"""The name of the grid of a model in a plan of groups."""


@dataclass(frozen=True)
class Runtime:
    """A model on one rank.

    Attributes:
        config: The Hugging Face config.
        parallel: The degrees.
        rank: The global rank.
        groups: Its groups.
        decoder: How it computes.
        layout: What every rank holds.
        stages: The layers of each stretch of each stage.
        weights: What this rank holds, by name.
    """

    config: Mapping[str, Any]
    parallel: Parallel
    rank: int
    groups: Groups
    decoder: Decoder
    layout: Layout
    stages: tuple[tuple[tuple[int, ...], ...], ...]
    weights: dict[str, Tensor]

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each stretch that this rank's stage has."""
        return self.stages[self.parallel.mesh.coordinate(self.rank)["pp"]]

    @cached_property
    def held(self) -> dict[str, Held]:
        """What the layout says of each weight."""
        return held_arrays(self.layout, self.rank)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(iter(self.weights.values())).dtype


def group_plan(parallel: Parallel) -> GroupPlan:
    """The groups of a model alone in its world."""
    return plan_groups({GRID: parallel.mesh}, {GRID: GROUPS})


def layout_of(
    config: Mapping[str, Any],
    parallel: Parallel,
    *,
    dtype: str = "",
    stage_sizes: Sequence[int] | None = None,
    mtp: int = 0,
) -> Layout:
    """What every rank holds of a model; needs no process and no group."""
    found = with_heads(maths(config, dtype=dtype), mtp)
    chunks = stages_of(found.num_layers, stages=parallel.pp, virtual=parallel.vp, sizes=stage_sizes)
    stages = [[layer for chunk in stage for layer in chunk] for stage in chunks]
    return train_layout(found.model, parallel.mesh, stages=stages)


def build(
    config: Mapping[str, Any],
    *,
    parallel: Parallel,
    groups: Groups,
    dtype: str = "",
    device: str = "cpu",
    seed: int | None = 0,
    stage_sizes: Sequence[int] | None = None,
    cp_method: str = "ring",
    dropout: float = 0.0,
    mtp: int = 0,
) -> Runtime:
    """A model on this rank.

    Weights are begun as transformers begins them: normal with ``initializer_range``, norms 1, biases 0.
    They are functions of the seed, the name and the place of an element, so that every layout begins with
    the same bits.

    Args:
        config: The Hugging Face config.
        parallel: The degrees.
        groups: This rank's groups, of ``group_plan(parallel)`` or of a larger plan.
        dtype: The dtype of the weights; that of the config by default.
        device: Where they are.
        seed: Of the weights and of the dropout; ``None`` leaves weights NaN, for a checkpoint to fill.
        stage_sizes: Layers of each stretch, in order of the model, where they are not even.
        cp_method: How attention goes over context ranks: ``ring``, ``gather``, ``all_to_all``.
        dropout: The share of what each block adds that is dropped in training.
        mtp: How many heads for further tokens the model has, which no config of its families says.

    Raises:
        ModelError: The model is not computed here.
        GeometryError: It does not fit on these degrees.
    """
    found = with_heads(maths(config, dtype=dtype), mtp)
    _check_heads(found.num_heads, found.num_kv_heads * found.head_dim, parallel.tp)
    if not 0 <= dropout < 1:
        raise GeometryError(
            "a share is dropped, not all",
            equation=f"dropout({dropout}) is not in 0..1, 1 excluded",
            hint="use 0 for none",
        )
    chunks = stages_of(found.num_layers, stages=parallel.pp, virtual=parallel.vp, sizes=stage_sizes)
    layout = layout_of(config, parallel, dtype=dtype, stage_sizes=stage_sizes, mtp=mtp)
    weights = begun(layout, groups.rank, config=config, seed=seed, device=device)
    tp, cp, ep, etp, document = (groups.get(GRID, name) for name in ("tp", "cp", "ep", "etp", "document"))
    decoder = Decoder(
        maths=found,
        tp=tp,
        cp=cp,
        ep=ep,
        etp=etp,
        document=document,
        cp_method=cp_method,
        dropout=dropout,
        seed=seed or 0,
    )
    stages = tuple(tuple(map(tuple, stage)) for stage in chunks)
    return Runtime(config, parallel, groups.rank, groups, decoder, layout, stages, weights)


def begun(
    layout: Layout, rank: int, *, config: Mapping[str, Any], seed: int | None, device: str = "cpu"
) -> dict[str, Tensor]:
    """The weights of a rank at the begin of a training, as leaves that gradients are taken of."""
    spread = Normal(float(config.get("initializer_range", 0.02)))
    found = {}
    for name, held in held_arrays(layout, rank).items():
        dtype = getattr(torch, held.buffer.dtype)
        array = torch.full(held.shape, math.nan, dtype=dtype, device=device)
        if seed is not None and name.endswith(".bias"):
            array.zero_()
        elif seed is not None and len(held.shape) == 1:
            array.fill_(1.0)
        elif seed is not None:
            init(array, held, seed=seed, quantile=spread)
        found[name] = array.requires_grad_()
    return found


def evaluated(runtime: Runtime) -> Runtime:
    """The same model as it is evaluated: nothing is dropped."""
    return replace(runtime, decoder=replace(runtime.decoder, dropout=0.0))


def _check_heads(num_heads: int, kv_rows: int, tp: int) -> None:
    for what, size in (("num_heads", num_heads), ("num_kv_heads * head_dim", kv_rows)):
        if size % tp:
            raise GeometryError(
                "every rank has an equal number of query heads, and of rows of K and V",
                equation=f"{what}({size}) % tp({tp}) = {size % tp} != 0",
                hint="choose a tp that divides both; KV heads themselves need not divide",
            )
