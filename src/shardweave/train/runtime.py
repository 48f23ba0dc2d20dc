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
from shardweave.train.gathered import Gathered, shared_weights
from shardweave.train.grid import GRID as GRID
from shardweave.train.grid import GroupPlan, Groups, plan_groups
from shardweave.train.layout import train_layout
from shardweave.train.maths import Maths, maths
from shardweave.train.mtp import with_heads
from shardweave.train.parallel import Parallel
from shardweave.train.random import Normal, init
from shardweave.train.schedule import stages_of


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
        ordered: Whether sums of the gradients of shared weights are taken in the order of ranks on any
            backend.
        ahead: Whether a shared weight is fetched while the one before it is used.
        multiple: What the rows of a share are a multiple of.
    """

    config: Mapping[str, Any]
    parallel: Parallel
    rank: int
    groups: Groups
    decoder: Decoder
    layout: Layout
    stages: tuple[tuple[tuple[int, ...], ...], ...]
    weights: dict[str, Tensor]
    ordered: bool = True
    ahead: bool = True
    multiple: int = 1

    @cached_property
    def reading(self) -> Gathered:
        """The weights as they are computed with: whole where this rank holds a share."""
        of = self.parallel
        groups = {
            axes: self.groups.get(GRID, name)
            for axes, name in ((of.dense_axes, "shares"), (of.expert_axes, "expert_shares"))
        }
        whole = layout_at(self.decoder.maths, of, self.stages, shared=False)
        shared = shared_weights(self.layout, whole, self.rank, groups)
        return Gathered(self.weights, shared, ahead=self.ahead, ordered=self.ordered)

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
    return plan_groups({GRID: parallel.mesh}, {GRID: parallel.groups})


def layout_of(
    config: Mapping[str, Any],
    parallel: Parallel,
    *,
    dtype: str = "",
    stage_sizes: Sequence[int] | None = None,
    mtp: int = 0,
    multiple: int = 1,
) -> Layout:
    """What every rank holds of a model; needs no process and no group.

    Args:
        config: The Hugging Face config.
        parallel: The degrees.
        dtype: The dtype of the weights; that of the config by default.
        stage_sizes: As ``build`` takes it.
        mtp: As ``build`` takes it.
        multiple: As ``build`` takes it.
    """
    found = with_heads(maths(config, dtype=dtype), mtp)
    chunks = stages_of(found.num_layers, stages=parallel.pp, virtual=parallel.vp, sizes=stage_sizes)
    return layout_at(found, parallel, chunks, multiple=multiple)


def layout_at(
    found: Maths,
    parallel: Parallel,
    chunks: Sequence[Sequence[Sequence[int]]],
    *,
    shared: bool = True,
    multiple: int = 1,
) -> Layout:
    """What every rank holds of what is computed.

    Args:
        found: What is computed.
        parallel: The degrees.
        chunks: The layers of each stretch of each stage.
        shared: Whether weights lie in shares; without, it is what ranks compute with.
        multiple: As ``build`` takes it.
    """
    return train_layout(
        found.model,
        parallel.mesh,
        stages=[[layer for chunk in stage for layer in chunk] for stage in chunks],
        share=parallel.dense_axes if shared else (),
        share_experts=parallel.expert_axes if shared else (),
        multiple=multiple,
    )


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
    multiple: int = 1,
    recompute: bool = False,
    ordered: bool = True,
    ahead: bool = True,
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
        multiple: The rows of a share of a weight are a multiple of it, filled up where they have to be; with
            0 they have to divide evenly.
        recompute: Whether the way back computes each layer once more and keeps only what went into it.
        ordered: Whether sums of the gradients of shared weights are taken in the order of ranks on any
            backend.
        ahead: Whether a shared weight is fetched while the one before it is used.

    Raises:
        ModelError: The model is not computed here.
        GeometryError: It does not fit on these degrees.
    """
    found = with_heads(maths(config, dtype=dtype), mtp)
    check_heads(found, parallel.tp)
    if not 0 <= dropout < 1:
        raise GeometryError(
            "a share is dropped, not all",
            equation=f"dropout({dropout}) is not in 0..1, 1 excluded",
            hint="use 0 for none",
        )
    chunks = stages_of(found.num_layers, stages=parallel.pp, virtual=parallel.vp, sizes=stage_sizes)
    layout = layout_at(found, parallel, chunks, multiple=multiple)
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
        recompute=recompute,
    )
    stages = tuple(tuple(map(tuple, stage)) for stage in chunks)
    return Runtime(
        config,
        parallel,
        groups.rank,
        groups,
        decoder,
        layout,
        stages,
        weights,
        ordered=ordered,
        ahead=ahead,
        multiple=multiple,
    )


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


def check_heads(found: Maths, tp: int) -> None:
    """Refuse a ``tp`` that cuts a query head, or rows of K and V unevenly.

    Raises:
        GeometryError: With the size that does not divide.
    """
    kv_rows = found.num_kv_heads * found.head_dim
    for what, size in (("num_heads", found.num_heads), ("num_kv_heads * head_dim", kv_rows)):
        if size % tp:
            raise GeometryError(
                "every rank has an equal number of query heads, and of rows of K and V",
                equation=f"{what}({size}) % tp({tp}) = {size % tp} != 0",
                hint="choose a tp that divides both; KV heads themselves need not divide",
            )
