"""What a model computes: the values of its config that change results and not tensors, read strictly.

``shardweave.models`` says which tensors a config means, and refuses keys that nobody has heard of. Here are
the keys that it passes over because they change no tensor. Each is used, or it is refused at values that
are not.

Source: transformers 5, ``LlamaConfig``, ``Qwen3Config``, ``Qwen3MoeConfig`` for what a missing key means, and
``LlamaAttention``, ``Qwen3Attention``, ``Qwen3MoeSparseMoeBlock`` for what is done with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardweave.errors import ModelError
from shardweave.models import Model, from_config
from shardweave.train.rotary import Rotary, read_rotary

FAMILIES = ("llama", "qwen3", "qwen3_moe")
"""The families that the runtime computes."""

_LONGEST = {"llama": 2048, "qwen3": 32768, "qwen3_moe": 32768}
"""What a missing ``max_position_embeddings`` means."""


@dataclass(frozen=True)
class Maths:
    """What a decoder computes with its weights.

    Attributes:
        model: Its tensors.
        hidden_size: The width of the hidden state.
        vocab_size: Rows of the embedding that are tokens.
        num_heads: Query heads.
        num_kv_heads: Heads of K and V.
        head_dim: The size of a head.
        qk_norm: Whether each head of Q and K is normed, before positions are put in.
        eps: What is added to the mean square in a norm.
        rotary: The positional encoding.
        windows: For each layer how many tokens back a token sees, itself included; ``None`` for all. Layers
            of heads for further tokens come last.
        num_experts: Experts of a sparse layer; 0 without.
        top_k: Experts that a token goes to.
        norm_topk: Whether the weights of a token's experts sum to 1.
    """

    model: Model
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool
    eps: float
    rotary: Rotary
    windows: tuple[int | None, ...]
    num_experts: int = 0
    top_k: int = 0
    norm_topk: bool = False

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.model.num_layers

    @property
    def depth(self) -> int:
        """How many heads there are for further tokens; see ``mtp``."""
        return sum(len(block.layers) for block in self.model.of("mtp"))


def maths(config: Mapping[str, Any], *, dtype: str = "") -> Maths:
    """The maths of a model.

    Args:
        config: The Hugging Face config.
        dtype: The dtype of the weights, where it is not that of the config.

    Raises:
        ModelError: The family is not computed here, or a value of the config is not.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(
            "the runtime computes the models of its families",
            where=f"config of {family}",
            equation=f"model_type={family!r} is not one of {', '.join(FAMILIES)}",
            hint="other families can be converted and refitted, not trained",
        )
    model = from_config(config, dtype=dtype)
    only(config, "hidden_act", "silu")
    only(config, "attention_dropout", 0.0, None)
    only(config, "partial_rotary_factor", 1.0, None)
    blocks = {block.kind: block for block in model.blocks}
    heads = blocks["attention"].sizes
    sparse = blocks.get("moe")
    num_experts = sparse.sizes["num_experts"] if sparse else 0
    top_k = config.get("num_experts_per_tok", 8) if sparse else 0
    if sparse and not (type(top_k) is int and 1 <= top_k <= num_experts):
        raise wrong(config, "num_experts_per_tok", top_k, f"is not in 1..num_experts({num_experts})")
    return Maths(
        model=model,
        hidden_size=blocks["embedding"].sizes["hidden_size"],
        vocab_size=blocks["embedding"].sizes["vocab_size"],
        num_heads=heads["num_heads"],
        num_kv_heads=heads["num_kv_heads"],
        head_dim=heads["head_dim"],
        qk_norm="q_norm" in blocks["attention"].tensors,
        eps=positive(config, "rms_norm_eps", 1e-6),
        rotary=_rotary(config, heads["head_dim"]),
        windows=_windows(config, model.num_layers),
        num_experts=num_experts,
        top_k=top_k,
        norm_topk=_flag(config, "norm_topk_prob") if sparse else False,
    )


def _rotary(config: Mapping[str, Any], head_dim: int) -> Rotary:
    """The positional encoding, from either spelling of its parameters."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, Mapping):
            raise wrong(config, key, value, "is not a mapping")
    if new and old and new != old:
        raise wrong(config, "rope_scaling", old, f"!= rope_parameters({new})")
    given, theta = new or old, config.get("rope_theta")
    if theta is not None and given.get("rope_theta", theta) != theta:
        raise wrong(config, "rope_theta", theta, f"!= rope_parameters.rope_theta({given['rope_theta']})")
    longest = config.get("max_position_embeddings", _LONGEST[str(config["model_type"])])
    return read_rotary(
        given, head_dim=head_dim, theta=10000.0 if theta is None else theta, max_positions=longest
    )


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer; llama has no keys for one."""
    window = config.get("sliding_window", 4096) if _flag(config, "use_sliding_window") else None
    types = config.get("layer_types")
    if window is None:
        if types is not None and "sliding_attention" in types:
            raise wrong(config, "layer_types", "sliding_attention", "without a sliding_window that is used")
        return (None,) * num_layers
    if type(window) is not int or window < 1:
        raise wrong(config, "sliding_window", window, "is not a number of tokens")
    if config.get("model_type") == "qwen3_moe":
        # Its attention knows no types of layers: a window is one of all.
        return (window,) * num_layers
    if types is None:
        first = config.get("max_window_layers", 28)
        if type(first) is not int:
            raise wrong(config, "max_window_layers", first, "is not a number of layers")
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def only(config: Mapping[str, Any], key: str, *alike: object) -> None:
    """Refuse all values but those that mean what is computed, which a missing key means too."""
    if key in config and config[key] not in alike:
        raise wrong(config, key, config[key], f"is not {alike[0]!r}")


def _flag(config: Mapping[str, Any], key: str) -> bool:
    """True or false, as a missing key says."""
    value = config.get(key, False)
    if type(value) is not bool:
        raise wrong(config, key, value, "is not true or false")
    return value


def positive(config: Mapping[str, Any], key: str, missing: float) -> float:
    """A positive number, as a missing key says."""
    value = config.get(key, missing)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise wrong(config, key, value, "is not a positive number")
    return float(value)


def wrong(config: Mapping[str, Any], key: str, value: object, what: str) -> ModelError:
    """An error about a value that is understood and not computed."""
    return ModelError(
        "what a config says about the computation is computed",
        where=f"config of {config.get('model_type', 'a part')}",
        equation=f"{key}({value!r}) {what}",
        hint="use a model without it, or correct the config: another model than it says would be trained",
    )
