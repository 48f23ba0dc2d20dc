"""What DeepSpeed's files say beside arrays, in its own words: stand-ins for its classes, model states.

Nothing of DeepSpeed is imported; its classes are named in pickles, and are made when it loads them.

Source: deepspeed 0.19.8 ``runtime/engine.py`` (``_common_checkpoint_state``),
``runtime/fp16/loss_scaler.py``, ``utils/tensor_fragment.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardweave.store.deepspeed_state import INFO, MODEL_STATES, OPTIMIZER_STATES, Description, Group
from shardweave.store.pickles import Global, Instance
from shardweave.store.pickles_write import from_plain
from shardweave.store.torch_archive import View, constant

VERSION: Final = "0.19.8"
"""The DeepSpeed whose form is written."""


def size(shape: Sequence[int]) -> Instance:
    """A ``torch.Size``."""
    return Instance(Global("torch", "Size"), (list(shape),))


def stage(number: int) -> Instance:
    """A ZeRO stage."""
    return Instance(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (number,))


def fragment(numel: int, start: int) -> Instance:
    """Where a part of a weight lies in a flat partition, in elements."""
    made = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    return Instance(made, (), {"numel": numel, "start": start})


def loss_scaler(dtype: str) -> Instance:
    """What scales the loss at the start: 1, and for float16 what DeepSpeed has by default."""
    module, half = "deepspeed.runtime.fp16.loss_scaler", dtype == "float16"
    if not half:
        return Instance(Global(module, "LossScaler"), (), {"cur_scale": 1.0, "dynamic": False})
    state = {
        "cur_scale": 65536, "dynamic": True, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0,
        "scale_window": 1000, "min_scale": 1, "delayed_shift": 2, "cur_hysteresis": 2,
        "consecutive_hysteresis": False, "raise_error_at_min_scale": True,
        "dtype": Global("torch", "float16"),
    }  # fmt: skip
    return Instance(Global(module, "DynamicLossScaler"), (), state)


def step(count: int) -> View:
    """A number of updates as torch's optimizers keep it."""
    return constant(struct.pack("<f", count), "float32")


def optimizer_states(described: Description, dtype: str) -> dict[str, Any]:
    """Further entries of a file of optimizer states; a scale of the loss goes on in float16 alone."""
    found = carried(described.records.get(OPTIMIZER_STATES, {}))
    scaler = found.get("loss_scaler")
    scales = (
        isinstance(scaler, Instance) and type(scaler.state) is dict and scaler.state.get("cur_scale") != 1
    )
    if dtype and scales != (dtype == "float16"):
        found.pop("loss_scaler", None)
        found.pop("dynamic_loss_scale", None)
    return found


def carried(record: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of another checkpoint as they are written, small tensors included."""
    found: dict[str, Any] = from_plain(
        dict(record), leaf=lambda leaf: constant(leaf["data"], leaf["$leaf"], tuple(leaf["shape"]))
    )
    return found


def param_groups(groups: Sequence[Group], params: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """The settings of groups, and the numbers of the flat tensors that each has."""
    return [
        {**carried(group.settings), "params": list(numbers)}
        for group, numbers in zip(groups, params, strict=True)
    ]


def config(described: Description, *, dtype: str, zero: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the run that is said to have saved: that of the source, or the least.

    Args:
        described: What is stored.
        dtype: Of the weights in training; empty where the checkpoint is of none.
        zero: What ``zero_optimization`` has to say of how weights lie in the files.
    """
    found = carried({"ds_config": described.records.get(MODEL_STATES, {}).get("ds_config")})["ds_config"]
    if type(found) is not dict:
        words = {"bfloat16": "bf16", "float16": "fp16"}
        found = {words[dtype]: {"enabled": True}} if dtype in words else {}
    before = found.get("zero_optimization")
    return {**found, "zero_optimization": {**(before if type(before) is dict else {}), **zero}}


def model_states(
    described: Description,
    *,
    module: Mapping[str, Any],
    param_shapes: list[dict[str, Any]],
    dp: int,
    tp: int,
    config: Mapping[str, Any],
    frozen: tuple[dict[str, Any], dict[str, Any]] | None,
) -> dict[str, Any]:
    """A file of model states.

    Args:
        described: What is stored.
        module: The tensors of the module by name.
        param_shapes: The shapes of the trained weights, a dict a flat group.
        dp: Data-parallel ranks.
        tp: Tensor-parallel ranks.
        config: Of the run that is said to have saved.
        frozen: Shapes and tensors of the frozen parameters, where the stage keeps them apart.
    """
    counts = [group.count for group in described.groups if group.count is not None]
    shapes, fragments = frozen or (None, None)
    values = {
        "lr_scheduler": None, "data_sampler": None, "random_ltd": None,
        "skipped_steps": 0, "global_steps": max(counts, default=0),
        **carried(described.records.get(MODEL_STATES, {})),
        "ds_config": dict(config),
    }  # fmt: skip
    return {
        **values,
        "module": {**module, **_aliases(described, module)},
        "buffer_names": list(described.buffers),
        "optimizer": None,
        "param_shapes": param_shapes,
        "frozen_param_shapes": shapes,
        "shared_params": dict(described.records.get("shared", {})),
        "frozen_param_fragments": fragments,
        "dp_world_size": dp,
        "mp_world_size": tp,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": tp},
        "ds_version": VERSION,
        **info(described),
    }


def info(described: Description) -> dict[str, Any]:
    """How weights are cut over tensor-parallel ranks, where it is recorded."""
    found = described.records.get(INFO)
    return {} if found is None else carried({INFO: found})


def _aliases(described: Description, module: Mapping[str, Any]) -> dict[str, Any]:
    """Further names of weights; they are the same tensors."""
    shared: Mapping[str, str] = described.records.get("shared", {})
    return {alias: module[name] for alias, name in shared.items() if name in module}
