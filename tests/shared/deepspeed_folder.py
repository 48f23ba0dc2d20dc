"""Saves of DeepSpeed's engine at ZeRO-1, written file by file with its own classes, of any shards whatever.

Its engine would train for what a case asks: shards that contradict each other, weights that nobody describes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]
SETTINGS = {
    "lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False,
    "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
ADAM = ("exp_avg", "exp_avg_sq")


@dataclass
class Rank:
    """What one tensor-parallel rank holds.

    Attributes:
        trained: Masters in float32, in the order of the module; states are made of them by `state_of`.
        frozen: Weights without masters.
        buffers: Buffers of the module.
        dtype: What the module computes in.
        flat_dtype: The dtype of the flat masters and states.
    """

    trained: Tensors
    frozen: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    flat_dtype: torch.dtype = torch.float32


def state_of(master: torch.Tensor, state: str) -> torch.Tensor:
    """The state that a weight gets; another number for each, and never one of the master's."""
    return (
        master + {"exp_avg": 1000, "exp_avg_sq": 2000, "max_exp_avg_sq": 3000, "momentum_buffer": 4000}[state]
    )


def patterns(**maps: Any) -> dict[str, Any]:
    """``universal_checkpoint_info`` with affine maps by the names of weights."""
    return {
        "universal_checkpoint_version": 0.4,
        "affine_map": {"version": 1, "params": {f"^{name}$": one for name, one in maps.items()}},
    }


def rows_map(shape: Sequence[int], rows: Sequence[tuple[int, int, Sequence[int]]]) -> dict[str, Any]:
    """The map of a weight cut in dim 0: for each rank its first row, how many, and who has them."""
    inner = math.prod(shape[1:])
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return {
        "logical_shape": list(shape),
        "ranks": {
            rank: {
                "shard_shape": [count, *shape[1:]],
                "pieces": [
                    {
                        "shape": [count, *shape[1:]],
                        "source": [start * inner, strides],
                        "dest": [0, strides],
                        "locations": list(locations),
                    }
                ],
            }
            for rank, (start, count, locations) in enumerate(rows)
        },
    }


def save(
    folder: Path,
    ranks: Sequence[Rank],
    *,
    dp: int = 2,
    states: Sequence[str] = ADAM,
    info: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write the folder of a save of ``len(ranks)`` tensor-parallel and ``dp`` data-parallel ranks."""
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    folder.mkdir(parents=True)
    beside = {"ds_config": {"zero_optimization": {"stage": 1}}, "ds_version": "0.19.8"}
    for tp, rank in enumerate(ranks):
        shapes = {name: value.shape for name, value in rank.trained.items()}
        held = {name: value.to(rank.dtype) for name, value in {**rank.trained, **rank.frozen}.items()}
        torch.save(
            {
                "module": {**held, **rank.buffers},
                "buffer_names": list(rank.buffers),
                "optimizer": None,
                "param_shapes": [shapes],
                "frozen_param_shapes": {name: value.shape for name, value in rank.frozen.items()} or None,
                "shared_params": {},
                "frozen_param_fragments": {name: held[name] for name in rank.frozen} or None,
                **dict.fromkeys(("lr_scheduler", "data_sampler", "random_ltd")),
                **dict.fromkeys(("skipped_steps", "global_steps", "global_samples"), 0),
                "dp_world_size": dp,
                "mp_world_size": len(ranks),
                "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": len(ranks)},
                **({} if info is None else {"universal_checkpoint_info": dict(info)}),
                **beside,
            },
            folder / f"mp_rank_{tp:02d}_model_states.pt",
        )
        numel = sum(value.numel() for value in rank.trained.values())
        share = math.ceil(numel / (2 * dp)) * 2
        flats = {
            state: torch.cat(
                [value.reshape(-1) if state == "fp32" else state_of(value, state).reshape(-1)
                 for value in rank.trained.values()]
                + [torch.zeros(share * dp - numel)]
            ).to(rank.flat_dtype)
            for state in ("fp32", *states)
        }  # fmt: skip
        for d in range(dp):
            low, at, found = d * share, 0, {}
            for name, value in rank.trained.items():
                begin, end = max(at, low), min(at + value.numel(), low + share)
                if begin < end:
                    found[name] = fragment_address(numel=end - begin, start=begin - low)
                at += value.numel()
            real = min(max(numel - low, 0), share)
            mine = {state: flat[low : low + share].clone() for state, flat in flats.items()}
            step = {} if "momentum_buffer" in states else {"step": torch.tensor(7.0)}
            optimizer = {
                "loss_scaler": None,
                "dynamic_loss_scale": False,
                "overflow": False,
                "clip_grad": 1.0,
                "base_optimizer_state": {
                    "state": {0: step | {state: mine[state] for state in states}},
                    "param_groups": [{**SETTINGS, **(settings or {}), "params": [0]}],
                },
                "single_partition_of_fp32_groups": [mine["fp32"][:real].clone()],
                "zero_stage": ZeroStageEnum.optimizer_states,
                "group_paddings": [share - real],
                "param_alignment_paddings": [[0] * len(shapes)],
                "partition_count": [dp],
                "ds_version": "0.19.8",
                "param_slice_mappings": [found],
            }
            torch.save(
                {"optimizer_state_dict": optimizer, **beside},
                folder / f"bf16_zero_pp_rank_{d}_mp_rank_{tp:02d}_optim_states.pt",
            )
    return folder
