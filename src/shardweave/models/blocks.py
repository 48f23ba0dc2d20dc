"""The blocks that families are built of, in the Hugging Face names and orientation.

A linear weight has the shape (out, in). A family says which blocks its layers have and reads
their sizes; what a block consists of is said here once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shardweave.layout import Dim, Run, Tensor, whole
from shardweave.models.config import Config
from shardweave.models.spec import Block

T = TypeVar("T", bound=Hashable)

HEAD = "lm_head.weight"
"""The output head, which is outside the prefix of the decoder."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What all blocks of a decoder share.

    Attributes:
        prefix: What its names start with ("model.").
        hidden_size: The width of its hidden state.
        dtype: The dtype of its weights.
        within: What its list of layers is called, behind the prefix.
    """

    prefix: str
    hidden_size: int
    dtype: str
    within: str = "layers"

    def once(self, name: str, *shape: int) -> Tensor:
        """A tensor outside the layers."""
        return Tensor(self.prefix + name, shape, self.dtype)

    def each(self, layers: Dim, name: str, *shape: int) -> Tensor:
        """A tensor of every one of the layers."""
        return Tensor(self._in_layer(name), shape, self.dtype, (("layer", layers),))

    def each_expert(self, layers: Dim, num_experts: int, name: str, *shape: int) -> Tensor:
        """A tensor of every expert of every one of the layers."""
        index = (("layer", layers), ("expert", whole(num_experts)))
        return Tensor(self._in_layer(name), shape, self.dtype, index)

    def _in_layer(self, name: str) -> str:
        return f"{self.prefix}{self.within}.{{layer}}.{name}"


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention: how many, how many share K and V, and their size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def heads(config: Config, hidden_size: int, *, kv_missing: bool = False, head_dim: int = 0) -> Heads:
    """The heads that a config describes.

    Args:
        config: With ``num_attention_heads``, ``num_key_value_heads`` and ``head_dim``.
        hidden_size: The width that a missing head dim is derived from.
        kv_missing: Whether an absent ``num_key_value_heads`` means as many as heads, as null does. Families
            whose own default is another number (8 in mistral) leave it False, and the key must be there.
        head_dim: The family's default where it is not the hidden size over the heads.
    """
    num_heads, size = query_heads(config, hidden_size, head_dim)
    num_kv_heads = config.size("num_key_value_heads", null=num_heads, missing=num_heads if kv_missing else 0)
    return grouped(config, Heads(num_heads, num_kv_heads, size))


def query_heads(config: Config, hidden_size: int, head_dim: int = 0) -> tuple[int, int]:
    """How many query heads there are, and their size."""
    num_heads = config.size("num_attention_heads")
    given = config.get("head_dim") is not None or ("head_dim" not in config.values and head_dim)
    if not given and hidden_size % num_heads:
        raise config.fail(
            "a head dim that is not given is the hidden size over the heads",
            f"hidden_size({hidden_size}) % num_attention_heads({num_heads}) = {hidden_size % num_heads} != 0",
            "give head_dim, or correct the sizes",
        )
    derived = hidden_size // num_heads
    return num_heads, config.size("head_dim", null=derived, missing=head_dim or derived)


def grouped(config: Config, found: Heads) -> Heads:
    """The heads, if they fall into equal groups, one for each K and V."""
    if found.num_heads % found.num_kv_heads:
        raise config.fail(
            "query heads fall into equal groups that share K and V",
            f"num_attention_heads({found.num_heads}) % num_key_value_heads({found.num_kv_heads}) "
            f"= {found.num_heads % found.num_kv_heads} != 0",
            "correct the one that is wrong, or take the config that belongs to the weights",
        )
    return found


def alike(values: Sequence[T]) -> Mapping[T, Dim]:
    """The layers of each value, in order of first appearance; ``values`` has one for each layer.

    >>> for value, layers in alike(["a", "b", "a", "b", "a"]).items():
    ...     print(value, layers)
    a [0:5:2]
    b [1:2] [3:4]
    """
    found: dict[T, list[int]] = {}
    for layer, value in enumerate(values):
        found.setdefault(value, []).append(layer)
    return {value: Dim(Run("", layer, 1) for layer in layers) for value, layers in found.items()}


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: Q, K and V of all heads are made of short vectors.

    Attributes:
        num_heads: Heads, each with its own K and V.
        q_rank: The size of the vector that queries are made of; 0 where they are made of the hidden state.
        kv_rank: The size of the vector that K and V are made of.
        nope_dim: The part of a head of Q and K without positions.
        rope_dim: The part with positions; of K there is one for all heads.
        v_head_dim: The size of a head of V.
    """

    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int


def embedding_block(stack: Stack, vocab_size: int, *, name: str = "embed_tokens.weight") -> Block:
    """The token embedding."""
    sizes = {"vocab_size": vocab_size, "hidden_size": stack.hidden_size}
    return Block("embedding", Dim(), sizes, {"embed": stack.once(name, vocab_size, stack.hidden_size)})


def final_block(stack: Stack, *, name: str = "norm.weight") -> Block:
    """The norm after the last layer."""
    return Block(
        "final",
        Dim(),
        {"hidden_size": stack.hidden_size},
        {"norm": stack.once(name, stack.hidden_size)},
    )


def head_block(stack: Stack, vocab_size: int, *, name: str = HEAD) -> Block:
    """An output head that is not the embedding."""
    sizes = {"vocab_size": vocab_size, "hidden_size": stack.hidden_size}
    return Block("head", Dim(), sizes, {"head": Tensor(name, (vocab_size, stack.hidden_size), stack.dtype)})


def norms_block(stack: Stack, layers: Dim, *, attention: bool = True, ffn: bool = True) -> Block:
    """The norms before attention and before the feed-forward, where a layer has these."""
    tensors = {}
    if attention:
        tensors["input_norm"] = stack.each(layers, "input_layernorm.weight", stack.hidden_size)
    if ffn:
        tensors["post_attention_norm"] = stack.each(
            layers, "post_attention_layernorm.weight", stack.hidden_size
        )
    return Block("norms", layers, {"hidden_size": stack.hidden_size}, tensors)


def attention_block(
    stack: Stack,
    layers: Dim,
    found: Heads,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    o_name: str = "o_proj",
) -> Block:
    """Grouped-query attention, with biases and per-head norms of Q and K where asked for."""
    names = {**{role: f"{role}_proj" for role in "qkv"}, "o": o_name}
    q, kv = found.num_heads * found.head_dim, found.num_kv_heads * found.head_dim
    rows = {"q": q, "k": kv, "v": kv, "o": stack.hidden_size}
    tensors = {
        role: stack.each(
            layers, f"self_attn.{names[role]}.weight", n, q if role == "o" else stack.hidden_size
        )
        for role, n in rows.items()
    }
    for role, n in rows.items():
        if o_bias if role == "o" else qkv_bias:
            tensors[f"{role}_bias"] = stack.each(layers, f"self_attn.{names[role]}.bias", n)
    for role in ("q_norm", "k_norm") if qk_norm else ():
        tensors[role] = stack.each(layers, f"self_attn.{role}.weight", found.head_dim)
    sizes = {
        "num_heads": found.num_heads,
        "num_kv_heads": found.num_kv_heads,
        "head_dim": found.head_dim,
        "hidden_size": stack.hidden_size,
    }
    return Block("attention", layers, sizes, tensors)


def latent_block(stack: Stack, layers: Dim, found: Latent, *, bias: bool = False) -> Block:
    """Latent attention: down to short vectors, a norm of each, up to heads; no bias on the way up.

    The rows of ``kv_a`` are the vector of K and V, then the part of K with positions. The rows of ``q_b``
    are for each head its part without positions, then that with; of ``kv_b`` for each head K, then V.
    """
    hidden, heads = stack.hidden_size, found.num_heads
    q_rows = heads * (found.nope_dim + found.rope_dim)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"q": ("q_proj", (q_rows, hidden))}
    if found.q_rank:
        shapes = {
            "q_a": ("q_a_proj", (found.q_rank, hidden)),
            "q_a_norm": ("q_a_layernorm", (found.q_rank,)),
            "q_b": ("q_b_proj", (q_rows, found.q_rank)),
        }
    shapes |= {
        "kv_a": ("kv_a_proj_with_mqa", (found.kv_rank + found.rope_dim, hidden)),
        "kv_a_norm": ("kv_a_layernorm", (found.kv_rank,)),
        "kv_b": ("kv_b_proj", (heads * (found.nope_dim + found.v_head_dim), found.kv_rank)),
        "o": ("o_proj", (hidden, heads * found.v_head_dim)),
    }
    tensors = {
        role: stack.each(layers, f"self_attn.{name}.weight", *shape) for role, (name, shape) in shapes.items()
    }
    for role in ("q_a", "kv_a", "o") if bias else ():
        if role in shapes:
            name, shape = shapes[role]
            tensors[f"{role}_bias"] = stack.each(layers, f"self_attn.{name}.bias", shape[0])
    sizes = {
        "num_heads": heads,
        "q_head_dim": found.nope_dim + found.rope_dim,
        "kv_head_dim": found.nope_dim + found.v_head_dim,
        "v_head_dim": found.v_head_dim,
        "q_rank": found.q_rank,
        "kv_rank": found.kv_rank,
        "rope_dim": found.rope_dim,
        "hidden_size": hidden,
    }
    return Block("mla", layers, sizes, tensors)


def mtp_block(stack: Stack, layers: Dim) -> Block:
    """What a layer that predicts a further token has beyond a layer of the decoder.

    The columns of ``eh_proj`` meet the normed embedding, then the normed hidden state.
    """
    hidden = stack.hidden_size
    tensors = {
        "embed_norm": stack.each(layers, "enorm.weight", hidden),
        "hidden_norm": stack.each(layers, "hnorm.weight", hidden),
        "proj": stack.each(layers, "eh_proj.weight", hidden, 2 * hidden),
        "norm": stack.each(layers, "shared_head.norm.weight", hidden),
    }
    return Block("mtp", layers, {"hidden_size": hidden}, tensors)


def mlp_block(stack: Stack, layers: Dim, ffn_size: int, *, bias: bool = False, module: str = "mlp") -> Block:
    """A gated feed-forward, with all three biases or none."""
    shapes = {
        "gate": (ffn_size, stack.hidden_size),
        "up": (ffn_size, stack.hidden_size),
        "down": (stack.hidden_size, ffn_size),
    }
    tensors = {
        role: stack.each(layers, f"{module}.{role}_proj.weight", *shape) for role, shape in shapes.items()
    }
    for role, shape in shapes.items() if bias else ():
        tensors[f"{role}_bias"] = stack.each(layers, f"{module}.{role}_proj.bias", shape[0])
    return Block("mlp", layers, {"ffn_size": ffn_size, "hidden_size": stack.hidden_size}, tensors)


def moe_block(
    stack: Stack,
    layers: Dim,
    *,
    num_experts: int,
    ffn_size: int,
    module: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    router_bias: bool = False,
) -> Block:
    """Routed gated experts.

    Args:
        stack: The decoder.
        layers: Its layers that have them.
        num_experts: How many there are.
        ffn_size: The feed-forward size of one.
        module: What they are called together.
        names: What gate, up and down are called within an expert.
        router_bias: Whether the router corrects its scores by a bias for each expert, a float32 buffer that
            no gradient reaches.
    """
    gate, up, down = (f"{module}.experts.{{expert}}.{name}.weight" for name in names)
    tensors = {
        "router": stack.each(layers, f"{module}.gate.weight", num_experts, stack.hidden_size),
        "gate": stack.each_expert(layers, num_experts, gate, ffn_size, stack.hidden_size),
        "up": stack.each_expert(layers, num_experts, up, ffn_size, stack.hidden_size),
        "down": stack.each_expert(layers, num_experts, down, stack.hidden_size, ffn_size),
    }
    if router_bias:
        bias = stack.each(layers, f"{module}.gate.e_score_correction_bias", num_experts)
        tensors["router_bias"] = replace(bias, dtype="float32")
    sizes = {"num_experts": num_experts, "ffn_size": ffn_size, "hidden_size": stack.hidden_size}
    return Block("moe", layers, sizes, tensors)


def shared_block(stack: Stack, layers: Dim, ffn_size: int, *, module: str) -> Block:
    """The shared experts of sparse layers, which are one gated feed-forward."""
    of = mlp_block(stack, layers, ffn_size, module=module)
    return replace(of, kind="shared")
