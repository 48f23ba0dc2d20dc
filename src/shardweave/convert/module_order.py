"""The order in which the module of a model has its weights.

Flat files give a range of bytes to a weight by its place among the others. Files of tensors do not know that
order, and names do not tell it; the class of the model does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardweave.convert.checkpoint import OptimizerState
from shardweave.errors import GeometryError, ShardweaveError

_HINT = "convert --to universal, whose files are found by name, or from a checkpoint that knows the order"


def in_order(
    names: Mapping[str, Sequence[str]], state: OptimizerState | None, config: Mapping[str, Any], where: str
) -> list[str]:
    """Arrays of a target in the order in which the module has their weights.

    Args:
        names: The arrays, each with the weights in it.
        state: The state that goes along; settings of many formats are in that order.
        config: The Hugging Face config of the model.
        where: What a message says of the source.

    Raises:
        GeometryError: Neither the state nor transformers knows it.
    """
    if state is not None and state.ordered:
        place = {name: i for i, name in enumerate(state.settings)}
        # What is not trained is in no flat range.
        return sorted(names, key=lambda array: place.get(names[array][0], len(place)))
    if state is None:  # nothing is flat
        return list(names)
    order = {name: i for i, name in enumerate(_of_module(config, where))}
    missing = [name for name in names if name not in order]
    if missing:
        raise _unknown(where, f"{missing[0]!r} is not a parameter of the class in transformers")
    return sorted(names, key=order.__getitem__)


def _of_module(config: Mapping[str, Any], where: str) -> list[str]:
    """The parameters of the class that transformers has for a config, without memory for their values."""
    if not config:
        raise _unknown(where, "no config says which class it is")
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise _unknown(where, "transformers, which has the class, is not installed") from error
    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values))
    except Exception as error:  # whatever a class makes of a config
        raise _unknown(where, f"transformers: {error}".splitlines()[0]) from error
    return [name for name, _ in module.named_parameters()]


def _unknown(where: str, equation: str) -> ShardweaveError:
    return GeometryError(
        "flat files have the weights in the order of their module",
        where=where,
        equation=equation,
        hint=_HINT,
    )
