"""Blocks of the decoders before Llama: fused Q, K and V, norms with biases, learned positions.

What is fused in a tensor of Hugging Face stays fused here. It is what files, optimizers and ZeRO's
partitions name and hold, and the ways of cutting it are functions of its rows: GPTBigCode over
tensor-parallel ranks is ``concat(split(q, widths, r), kv)`` with ``q`` and ``kv`` stretches of one dim. Where
a dialect needs the rows of Q, K or V, ``qkv_segments`` says once which they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardweave.layout import Dim, Run, Tensor, concat
from shardweave.models.blocks import Heads, Stack
from shardweave.models.config import MATHS, TASK, Config
from shardweave.models.spec import Block

SPELLED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""How configs in the words of GPT-2 spell the keys of every family."""

IGNORED: Mapping[str, str] = {
    **dict.fromkeys(("activation_function", "layer_norm_epsilon"), MATHS),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), MATHS),
    **{
        f"summary_{key}": TASK
        for key in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")
    },
    "n_ctx": "is the number of positions once more, which nothing reads",
    "tokenizer_class": "says how text becomes tokens",
}
"""Keys of these configs that change no tensor, and why."""

ROTARY: Mapping[str, str] = dict.fromkeys(("rotary", "rotary_dim", "scale_attn_weights"), MATHS)
"""Further such keys of GPT-J and CodeGen."""

NEUTRAL: Mapping[str, tuple[object, ...]] = dict.fromkeys(
    ("head_dim", "intermediate_size", "num_key_value_heads"), (None,)
)
"""Keys of other families, which these do not read: a value means that somebody expects what is not so."""

NORMS = {"input_norm": "ln_1", "post_attention_norm": "ln_2"}
"""The names of GPT-2's norms by role."""


def full_heads(config: Config, hidden_size: int) -> Heads:
    """Heads with a K and V each, which share the hidden size."""
    num_heads = config.size("num_attention_heads")
    if hidden_size % num_heads:
        raise config.fail(
            "heads share the hidden size equally",
            f"hidden_size({hidden_size}) % num_attention_heads({num_heads}) = {hidden_size % num_heads} != 0",
            "correct the one that is wrong, or take the config that belongs to the weights",
        )
    return Heads(num_heads, num_heads, hidden_size // num_heads)


def ffn_size(config: Config, hidden_size: int) -> int:
    """The feed-forward size, four times the hidden size where ``n_inner`` is null or not given."""
    return config.size("n_inner", missing=4 * hidden_size, null=4 * hidden_size)


def around_gpt(config: Config, stack: Stack) -> Iterator[Block]:
    """What GPT-2 has outside its layers: learned positions, and a bias of its last norm."""
    yield positions_block(stack, config.size("max_position_embeddings"), "wpe.weight")
    yield final_bias_block(stack, "ln_f.bias")


def around_with_head_bias(config: Config, stack: Stack) -> Iterator[Block]:
    """What GPT-J has outside its layers: biases of its last norm and of its head."""
    yield final_bias_block(stack, "ln_f.bias")
    yield head_bias_block(stack, config.size("vocab_size"))


def fused_attention_block(
    stack: Stack,
    layers: Dim,
    found: Heads,
    *,
    qkv: str,
    o: str,
    num_blocks: int = 1,
    order: str = "qkv",
    qkv_bias: bool,
    o_bias: bool,
    conv: bool = False,
) -> Block:
    """Attention with Q, K and V in one tensor.

    Args:
        stack: The decoder.
        layers: Its layers that have one.
        found: Its heads.
        qkv: The name of the fused projection in a layer ("attn.c_attn").
        o: The name of the output projection in a layer.
        num_blocks: Blocks of equally many rows that the fused tensor is made of, each with its part of Q, of
            K and of V: 1 where Q, K and V lie one after the other, the number of KV heads where each has its
            queries, its K and its V together.
        order: What lies in a block in which order, ``qkv`` or ``qvk``; it is the role of the tensor.
        qkv_bias: Whether the fused projection has a bias.
        o_bias: Whether the output projection has one.
        conv: Whether weights are stored (in, out).
    """
    q, kv = found.num_heads * found.head_dim, found.num_kv_heads * found.head_dim
    tensors = {
        order: _linear(stack, layers, qkv, q + 2 * kv, stack.hidden_size, conv),
        "o": _linear(stack, layers, o, stack.hidden_size, q, conv),
    }
    if qkv_bias:
        tensors[f"{order}_bias"] = stack.each(layers, f"{qkv}.bias", q + 2 * kv)
    if o_bias:
        tensors["o_bias"] = stack.each(layers, f"{o}.bias", stack.hidden_size)
    sizes = {
        "num_heads": found.num_heads,
        "num_kv_heads": found.num_kv_heads,
        "head_dim": found.head_dim,
        "num_blocks": num_blocks,
        "hidden_size": stack.hidden_size,
    }
    return Block("conv_attention" if conv else "fused_attention", layers, sizes, tensors)


def qkv_segments(block: Block) -> dict[str, Dim]:
    """The rows of Q, K and V in the fused tensor of an attention, in order of heads, labelled by its role.

    >>> from shardweave.layout import whole
    >>> def rows(heads, **how):
    ...     how |= {"qkv": "a", "o": "b", "qkv_bias": False, "o_bias": False}
    ...     found = qkv_segments(fused_attention_block(Stack("", 10, "bfloat16"), whole(1), heads, **how))
    ...     print(*(f"{name}: {dim}" for name, dim in found.items()), sep=", ")
    >>> rows(Heads(4, 1, 3))
    q: qkv[0:12], k: qkv[12:15], v: qkv[15:18]
    >>> rows(Heads(4, 2, 3), num_blocks=2)
    q: qkv[0:6] qkv[12:18], k: qkv[6:9] qkv[18:21], v: qkv[9:12] qkv[21:24]
    >>> rows(Heads(4, 4, 3), num_blocks=2, order="qvk")
    q: qvk[0:6] qvk[18:24], k: qvk[12:18] qvk[30:36], v: qvk[6:12] qvk[24:30]
    """
    order = fused_role(block)
    blocks, kv = block.sizes["num_blocks"], block.sizes["num_kv_heads"] * block.sizes["head_dim"]
    rows = {"q": block.sizes["num_heads"] * block.sizes["head_dim"] // blocks}
    rows |= {"k": kv // blocks, "v": kv // blocks}
    found, at, step = {}, 0, sum(rows.values())
    for name in order:
        found[name] = concat(*(Dim([Run(order, at + i * step, rows[name])]) for i in range(blocks)))
        at += rows[name]
    return {name: found[name] for name in "qkv"}


def fused_role(block: Block) -> str:
    """The role of the fused tensor of an attention, which says in which order it has Q, K and V."""
    return next(role for role in ("qkv", "qvk") if role in block.tensors)


def ffn_block(
    stack: Stack, layers: Dim, ffn_size: int, *, up: str, down: str, bias: bool, conv: bool = False
) -> Block:
    """A feed-forward without a gate, with both biases or none, under the names that its family gives it."""
    tensors = {
        "up": _linear(stack, layers, up, ffn_size, stack.hidden_size, conv),
        "down": _linear(stack, layers, down, stack.hidden_size, ffn_size, conv),
    }
    if bias:
        tensors["up_bias"] = stack.each(layers, f"{up}.bias", ffn_size)
        tensors["down_bias"] = stack.each(layers, f"{down}.bias", stack.hidden_size)
    sizes = {"ffn_size": ffn_size, "hidden_size": stack.hidden_size}
    return Block("conv_mlp" if conv else "plain_mlp", layers, sizes, tensors)


def _linear(stack: Stack, layers: Dim, name: str, rows: int, columns: int, conv: bool) -> Tensor:
    shape = (columns, rows) if conv else (rows, columns)
    return stack.each(layers, f"{name}.weight", *shape)


def layer_norms_block(stack: Stack, layers: Dim, names: Mapping[str, str]) -> Block:
    """The norms of a layer, with biases: their names by role, ``{"input_norm": "ln_1"}``."""
    tensors = {}
    for role, name in names.items():
        tensors[role] = stack.each(layers, f"{name}.weight", stack.hidden_size)
        tensors[f"{role}_bias"] = stack.each(layers, f"{name}.bias", stack.hidden_size)
    return Block("layer_norms", layers, {"hidden_size": stack.hidden_size}, tensors)


def final_bias_block(stack: Stack, name: str) -> Block:
    """The bias of the norm after the last layer, under its whole name behind the prefix ("ln_f.bias")."""
    bias = stack.once(name, stack.hidden_size)
    return Block("final_bias", Dim(), {"hidden_size": stack.hidden_size}, {"bias": bias})


def positions_block(stack: Stack, num_positions: int, name: str) -> Block:
    """Learned positions."""
    sizes = {"num_positions": num_positions, "hidden_size": stack.hidden_size}
    return Block("positions", Dim(), sizes, {"positions": stack.once(name, num_positions, stack.hidden_size)})


def embedding_norm_block(stack: Stack, name: str) -> Block:
    """A norm of the embedding, with its bias."""
    tensors = {
        "norm": stack.once(f"{name}.weight", stack.hidden_size),
        "norm_bias": stack.once(f"{name}.bias", stack.hidden_size),
    }
    return Block("embedding_norm", Dim(), {"hidden_size": stack.hidden_size}, tensors)


def head_bias_block(stack: Stack, vocab_size: int) -> Block:
    """The bias of the output head, which is there whether the head is tied or not."""
    bias = Tensor("lm_head.bias", (vocab_size,), stack.dtype)
    return Block("head_bias", Dim(), {"vocab_size": vocab_size}, {"bias": bias})
