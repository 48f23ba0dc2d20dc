"""Ranks of the runtime for tests: a small model with known weights on any layout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import FileStore
from train_cells import Cell

from shardweave.train.arrays import held_arrays
from shardweave.train.batch import Microbatch, microbatch
from shardweave.train.grid import Groups, connect
from shardweave.train.maths import maths
from shardweave.train.mtp import with_heads
from shardweave.train.parallel import Parallel
from shardweave.train.runtime import Runtime, build, group_plan

torch.set_num_threads(1)

Held = tuple[str, Any, np.ndarray]
"""A part of a whole tensor: name, slices, values. Arrays of numpy, which go through a pipe as they are."""

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 28,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    # Layer 2 is dense among sparse ones.
    "mlp_only_layers": [2],
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    "tie_word_embeddings": False,
    "dtype": "float64",
}


def full_weights(config: Mapping[str, Any], dtype: torch.dtype, *, mtp: int = 0) -> dict[str, Tensor]:
    """Whole weights by name, large enough that every part of the model matters."""
    found = {}
    for tensor in with_heads(maths(config), mtp).model.tensors:
        for name in tensor.names():
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
            values = torch.randn(
                tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
            )
            spread = 0.2 if len(tensor.shape) == 1 else 0.25
            found[name] = (values * spread + (len(tensor.shape) == 1)).to(dtype)
    return found


def fill(runtime: Runtime, full: Mapping[str, Tensor]) -> None:
    """Give a rank its parts of whole weights; padding is 0."""
    with torch.no_grad():
        for name, held in held_arrays(runtime.layout, runtime.rank).items():
            runtime.weights[name].zero_()
            for part in held.parts:
                at = tuple(slice(r.start, r.stop, r.step) for r in part.box.dims)
                part.view(runtime.weights[name]).copy_(full[part.name][at])


def parts_of(runtime: Runtime, arrays: Mapping[str, Tensor]) -> list[Held]:
    """What a rank holds as parts of whole tensors: name, slices, values."""
    found = []
    for name, held in held_arrays(runtime.layout, runtime.rank).items():
        for part in held.parts:
            at = tuple((r.start, r.stop, r.step) for r in part.box.dims)
            found.append((part.name, at, as_numpy(part.view(arrays[name].detach()))))
    return found


def as_numpy(values: Tensor) -> np.ndarray:
    """A copy; numpy has no bfloat16, whose values are floats too."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy().copy()


def assembled(ranks: Mapping[int, Sequence[Held]]) -> dict[str, Tensor]:
    """Whole tensors from the parts of all ranks; replicas must have the same bits."""
    whole: dict[str, Tensor] = {}
    sizes: dict[str, list[int]] = {}
    for parts in ranks.values():
        for name, at, _ in parts:
            stops = [stop for _, stop, _ in at]
            sizes[name] = [max(pair) for pair in zip(sizes.get(name, stops), stops, strict=True)]
    for rank, parts in ranks.items():
        for name, at, held in parts:
            values = torch.from_numpy(held)
            into = whole.setdefault(name, torch.full(sizes[name], torch.nan, dtype=values.dtype))
            view = into[tuple(slice(*each) for each in at)]
            same = torch.equal(view, values) or bool(view.isnan().all())
            assert same, f"rank {rank}: replicas of {name} differ by {(view - values).abs().max()}"
            view.copy_(values)
    for name, values in whole.items():
        assert not values.isnan().any(), f"{name} has elements that no rank holds, or NaN"
    return whole


def documents_of(cell: Cell) -> tuple[list[list[list[Tensor]]], list[list[list[Tensor]]]]:
    """Documents and masks of each data rank and microbatch."""
    chance = torch.Generator().manual_seed(5)
    lengths = {
        "even": [[[16, 16], [16, 16], [16, 16]]] * 8,
        "ragged": [
            [[3, 17], [5, 1], [0, 22]],
            [[9, 2, 4], [13], [6, 7]],
            [[21], [1, 1, 8], [5]],
            [[2, 2], [11, 6], [4, 9]],
            [[7], [3], [19, 2]],
            [[12, 5], [8], [1]],
            [[6], [17, 3], [2, 2]],
            [[1, 10], [4], [14]],
        ],
    }[cell.lengths][: cell.num_data]
    documents, masks = [], []
    for data, batches in enumerate(lengths):
        documents.append([])
        masks.append([])
        for number, sizes in enumerate(batches):
            if cell.mask == "empty_microbatch" and number == 1:
                sizes = [0]
            ids = [torch.randint(0, CONFIG["vocab_size"], (size,), generator=chance) for size in sizes]
            kept = [torch.ones(size, dtype=torch.bool) for size in sizes]
            for i, size in enumerate(sizes):
                if cell.mask == "prompt":
                    kept[i][: size // 2 + i] = False
                elif cell.mask == "one" or (cell.mask == "empty_rank" and data == 1):
                    kept[i][:] = False
                    if cell.mask == "one" and (data, number, i) == (0, 0, 1):
                        kept[i][size // 2] = True
            documents[-1].append(ids)
            masks[-1].append(kept)
    return documents, masks


def parallel_of(cell: Cell) -> Parallel:
    names = ("tp", "cp", "dp", "pp", "ep", "etp", "vp", "remat", "eremat", "weight_axes")
    return Parallel(**{name: getattr(cell, name) for name in names})


def stage_sizes(cell: Cell, num_layers: int) -> list[int] | None:
    """Uneven stages where there are layers for it."""
    count = cell.pp * cell.vp
    if count == 1 or count > num_layers:
        return None
    sizes = [1] * count
    sizes[-1] += num_layers - count
    return sizes


def batches_of(cell: Cell, data: int) -> list[Microbatch]:
    documents, masks = documents_of(cell)
    return [
        microbatch(ids, kept, form=cell.form, cp=cell.cp, tp=cell.tp)
        for ids, kept in zip(documents[data], masks[data], strict=True)
    ]


def runtime_of(
    cell: Cell, rank: int, store: Path, config: Mapping[str, Any], dtype: str = "float64", *, mtp: int = 0
) -> Runtime:
    parallel = parallel_of(cell)
    groups = connect(
        group_plan(parallel), rank=rank, store=FileStore(str(store), parallel.world_size), timeout_s=30
    )
    return built(cell, groups, config, dtype, mtp=mtp)


def built(
    cell: Cell, groups: Groups, config: Mapping[str, Any], dtype: str = "float64", **more: Any
) -> Runtime:
    """The runtime of a cell on groups of any kind, its weights not yet filled."""
    return build(
        config,
        parallel=parallel_of(cell),
        groups=groups,
        dtype=dtype,
        seed=None,
        stage_sizes=stage_sizes(cell, config["num_hidden_layers"]),
        cp_method=cell.method,
        recompute=cell.recompute,
        **more,
    )
