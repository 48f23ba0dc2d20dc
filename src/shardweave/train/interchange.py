"""What a run's optimizer is called by torch: its settings, for checkpoints that go to ``fully_shard``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shardweave.convert import Weight
from shardweave.errors import FormatError
from shardweave.store.native_manifest import About
from shardweave.train.config import TrainConfig
from shardweave.train.optimizer import is_matrix
from shardweave.train.settings import read
from shardweave.train.worker import schedule_of

_ADAM = frozenset({"exp_avg", "exp_avg_sq"})
_FIXED: Mapping[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""What ``torch.optim.AdamW`` keeps of each group beside the settings that a run has."""


def settings_of(about: About, count: int, weights: Collection[Weight]) -> dict[str, dict[str, Any]]:
    """The settings of the weights of a run, by name, as ``torch.optim.AdamW`` keeps them of a group.

    The learning rate is that of the next update, as it is in a torch optimizer between two steps.

    Args:
        about: What a checkpoint of the run says.
        count: How many updates were made.
        weights: The weights.

    Raises:
        FormatError: The checkpoint does not say the settings of a run, or AdamW does not update a weight.
    """
    config, wrong = read(TrainConfig, about.extras.get("settings", {}), where="settings of the checkpoint")
    other = next((weight for weight in weights if weight.states != _ADAM), None)
    if config is None or other is not None:
        raise FormatError(
            "the settings of an optimizer are those of a run with AdamW",
            where="" if other is None else f"weight {other.name!r}",
            equation=f"states({', '.join(sorted(other.states))}) != ({', '.join(sorted(_ADAM))})"
            if other is not None
            else wrong[0].equation,
            hint="convert the weights alone with --weights-only",
        )
    of = config.optimizer
    common = {"lr": schedule_of(config)(count + 1), "betas": (of.beta1, of.beta2), "eps": of.eps}
    return {
        weight.name: {
            **common,
            "weight_decay": of.weight_decay if is_matrix(weight.name, weight.shape) else 0.0,
            **_FIXED,
        }
        for weight in weights
    }
