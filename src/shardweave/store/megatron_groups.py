"""Groups of parameters as Megatron makes, records and looks them up.

A group has settings, of which four are its identity. Megatron records groups without the names of their
weights, and finds a group of a checkpoint by its identity; which weights are in it follows from the rule by
which groups are made, here stated once for both ways.

Source: megatron-core 0.16.1, ``optimizer/{__init__,optimizer,distrib_optimizer}.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardweave.errors import FormatError, UnknownNameError
from shardweave.store.optimizer import OptimizerRecord
from shardweave.store.strict_json import some

FULLY: Final = "fully_reshardable"
BUCKETS: Final = "dp_reshardable"
MASTER: Final = "master"
MASTERS: Final = ("param", "fp32_param")
"""What Megatron calls the fp32 copy of a weight, with and without the distributed optimizer."""
IDENTITY: Final = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""By these settings Megatron finds the group of a checkpoint that is one of its own."""

_STACKED_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d+\.)")
_STACKED_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d+\.)")
_HINT: Final = "convert the weights alone with --weights-only"

_ADAM: Final[Mapping[str, Any]] = {
    "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "maximize": False, "foreach": None,
    "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
    "bias_correction": True,
}  # fmt: skip
"""Settings that Adam of torch, Transformer Engine or Apex wants in a group, as they are by default."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group of parameters as Megatron records it: settings, without the names of its weights.

    Attributes:
        settings: What it records, ``IDENTITY`` included.
        chained: The number of the optimizer among those that are chained; ``None`` for the only one.
        count: How many updates were made; ``None`` where the group does not count them.
    """

    settings: Mapping[str, Any]
    chained: int | None = None
    count: int | None = None


def num_dims(name: str, shape: Sequence[int]) -> int:
    """The dims of one parameter of a stored tensor, without those over which layers or experts are stacked.

    >>> num_dims("decoder.layers.self_attention.linear_qkv.layer_norm_weight", (2, 48))
    1
    >>> num_dims("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", (8, 80, 48))
    2
    """
    return len(shape) - bool(_STACKED_LAYERS.search(name)) - bool(_STACKED_EXPERTS.search(name))


def is_expert(name: str) -> bool:
    """Whether a weight is of one of many experts."""
    return ".mlp.experts." in name


def group_of(
    name: str,
    dims: int,
    groups: Sequence[Group],
    *,
    chained: int | None = None,
    decays_norms: bool = False,
) -> int:
    """The number of the group that a weight is in, by the rule that Megatron makes groups by.

    Weights with one dim and biases have a ``wd_mult`` of their own, experts that are spread are apart, and so
    are embedding and output where they have a learning rate of their own.

    Args:
        name: The weight.
        dims: The dims of the parameter, see `num_dims`.
        groups: All groups.
        chained: The number of its optimizer, where keys say it.
        decays_norms: Whether the norms of queries and keys decay (``--apply-wd-to-qk-layernorm``).

    Raises:
        UnknownNameError: No group fits, or several that differ in their settings.
    """
    fits = [n for n, group in enumerate(groups) if chained is None or group.chained in (None, chained)]
    edge = name.endswith(("word_embeddings.weight", "output_layer.weight"))
    for word, wanted in ("is_expert_parallel", is_expert(name)), ("is_decoupled_lr", edge):
        if any(groups[n].settings.get(word) for n in fits):
            fits = [n for n in fits if bool(groups[n].settings.get(word)) is wanted]
    mults = sorted({_wd_mult(groups[n]) for n in fits})
    if len(mults) == 2:
        qk = "q_layernorm." in name or "k_layernorm." in name
        plain = (dims == 1 or name.endswith(".bias")) and not (decays_norms and qk)
        fits = [n for n in fits if _wd_mult(groups[n]) == mults[0 if plain else 1]]
    if not fits or any(groups[n].settings != groups[fits[0]].settings for n in fits):
        raise UnknownNameError(
            "every weight is in one group of parameters, by Megatron's rule",
            where=repr(name),
            equation=f"{len(fits)} of {len(groups)} groups fit: "
            + "; ".join(
                ", ".join(f"{word}({groups[n].settings.get(word)})" for word in IDENTITY)
                for n in fits or range(len(groups))
            ),
            hint="which weight is of which group is not recorded; a job with rules of its own is not "
            f"understood: {_HINT}",
        )
    return fits[0]


def _wd_mult(group: Group) -> float:
    found = group.settings.get("wd_mult", group.settings.get("pre_wd_mult", 1.0))
    return float(found) if isinstance(found, (int, float)) else 1.0


# --- writing ------------------------------------------------------------------------------------


def common_of(
    record: OptimizerRecord,
    weights: Mapping[str, Sequence[int]],
    *,
    expert_parallel: bool = False,
    layer_keys: str = "stacked",
    kept: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What all ranks share, as the real distributed optimizer wants it beside tensors of whole states.

    Megatron looks a group up by its ``IDENTITY``. Settings that have these words keep them; others get them
    by Megatron's own rule, and are refused where a job with that rule would go on with other settings.

    Args:
        record: Count and settings; names are those of ``weights``.
        weights: The stored shape of every weight that has a state.
        expert_parallel: Whether the job that loads it spreads experts (ep > 1), which then have an optimizer
            of their own.
        layer_keys: How the layers are stored, as in the dialect.
        kept: What `carried` gave.

    Returns:
        For ``records["common"]`` of ``torch_dist_write.allocate``. Its ``content_metadata`` has Megatron-LM
        ask for keys without ``chained_``, whatever the number of optimizers.

    Raises:
        UnknownNameError: A weight is in no group or has no count.
        FormatError: Weights were updated unequally often, or settings cannot be said in Megatron's groups.
    """
    made = _one_count(record, weights)
    of = {name: group for group in record.groups for name in group["params"]}
    missing = [name for name in weights if name not in of]
    if missing:
        raise UnknownNameError(
            "every weight with a state is in a group of parameters",
            equation=f"{len(missing)} in none: {some(map(repr, missing))}",
            hint=f"give the whole record, or {_HINT}",
        )
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, shape in weights.items():
        said = _settings(name, num_dims(name, shape), of[name], expert_parallel) | {"step": made}
        other = groups.setdefault(tuple(said[word] for word in IDENTITY), said)
        if other != said:
            differ = sorted(key for key in {*other, *said} if other.get(key) != said.get(key))
            raise FormatError(
                "weights that Megatron has in one group have the same settings",
                where=repr(name),
                equation=", ".join(f"{key}({said.get(key)!r}) != {other.get(key)!r}" for key in differ[:4]),
                hint=f"Megatron tells apart weights with one dim, biases and experts, no others; {_HINT}",
            )
    ordered = [groups[key] for key in sorted(groups, key=lambda key: -float(key[0]))]
    dense = [group for group in ordered if not group["is_expert_parallel"]]
    spread = [group for group in ordered if group["is_expert_parallel"]]
    scaler = (kept or {}).get("grad_scaler")
    made_of = [
        {"optimizer": {"param_groups": some_of}, "param_state_sharding_type": FULLY}
        | ({"grad_scaler": scaler} if scaler is not None else {})
        for some_of in (dense, spread)
        if some_of
    ]
    return {
        **(kept or {}).get("common", {}),
        "optimizer": made_of[0] if len(made_of) == 1 else dict(enumerate(made_of)),
        "content_metadata": {
            "distrib_optim_sharding_type": FULLY,
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": layer_keys == "singleton",
            **({"non_homogeneous_layers": True} if layer_keys != "stacked" else {}),
        },
    }


def _one_count(record: OptimizerRecord, weights: Mapping[str, Sequence[int]]) -> int:
    missing = [name for name in weights if name not in record.count]
    counts = {record.count[name] for name in weights if name in record.count}
    if missing or len(counts) != 1:
        raise FormatError(
            "Megatron counts the updates of all weights together",
            equation=f"{len(missing)} without a count: {some(map(repr, missing), limit=3)}"
            if missing
            else f"counts {some(map(str, sorted(counts)))}",
            hint=f"train all weights from the same step on, or {_HINT}",
        )
    return counts.pop()


def _settings(name: str, dims: int, group: Mapping[str, Any], expert_parallel: bool) -> dict[str, Any]:
    """The settings of a weight in the words of torch, Transformer Engine and Megatron."""
    said = {key: value for key, value in group.items() if key not in ("params", "step")}
    if "lr" not in said:
        raise FormatError(
            "a group of parameters has a learning rate",
            where=repr(name),
            equation=f"settings are {some(map(repr, said))}",
            hint=f"convert a checkpoint that records its settings, or {_HINT}",
        )
    spread = expert_parallel and is_expert(name)
    if "wd_mult" in said or "pre_wd_mult" in said:
        mult = said.get("wd_mult", said.get("pre_wd_mult"))
        more = {
            "wd_mult": mult,
            "lr_mult": said.get("lr_mult", said.get("pre_lr_mult", 1.0)),
            "is_decoupled_lr": said.get("is_decoupled_lr", False),
        }
        return {"default_config": True, **_ADAM, "weight_decay": 0.0, **said, **more} | {
            "is_expert_parallel": spread
        }
    decay = said.setdefault("weight_decay", 0.0)
    plain = dims == 1 or name.endswith(".bias")
    odd = {key: said[key] for key in ("amsgrad", "maximize") if said.get(key)}
    if decay and said.get("decoupled_weight_decay") is False:
        odd["decoupled_weight_decay"] = False
    if plain and decay:
        odd["weight_decay"] = decay
    if odd:
        raise FormatError(
            "Megatron goes on with AdamW, and does not decay weights with one dim or biases",
            where=f"settings of {name!r}, {dims} dims",
            equation=", ".join(f"{key}({value})" for key, value in odd.items()),
            hint=f"train it with such settings, or {_HINT}",
        )
    return {
        "default_config": True,
        **_ADAM,
        **said,
        "wd_mult": 0.0 if plain else 1.0,
        "lr_mult": 1.0,
        "is_expert_parallel": spread,
        "is_decoupled_lr": False,
    }
