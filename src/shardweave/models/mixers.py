"""Blocks of hybrid decoders: attention with an output gate, gated delta nets, Mamba2 mixers.

What is fused in a tensor of Hugging Face stays fused here. Its segments are said once, as dims of it, and
every dialect takes its rows from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardweave.layout import Dim, Run, concat, whole
from shardweave.models.blocks import Heads, Stack, attention_block
from shardweave.models.spec import Block


def gated_attention_block(stack: Stack, layers: Dim, found: Heads, *, bias: bool = False) -> Block:
    """Attention with a gated output: ``q`` has for each head the query's rows, then the gate's."""
    of = attention_block(stack, layers, found, qkv_bias=bias, o_bias=bias, qk_norm=True)
    twice = {
        role: replace(tensor, shape=(2 * tensor.shape[0], *tensor.shape[1:]))
        for role, tensor in of.tensors.items()
        if role in ("q", "q_bias")
    }
    return replace(of, kind="gated_attention", tensors={**of.tensors, **twice})


@dataclass(frozen=True, slots=True)
class Delta:
    """The sizes of a gated delta net: each key head serves ``num_v_heads / num_k_heads`` value heads.

    Attributes:
        num_k_heads: Heads of Q and of K.
        num_v_heads: Heads of V, each with its gate ``z``, its ``b`` and its ``a``.
        k_head_dim: The size of a head of Q or K.
        v_head_dim: The size of a head of V or z.
        kernel_size: Steps of the convolution over Q, K and V.
    """

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    kernel_size: int

    @property
    def k_size(self) -> int:
        """Rows of Q, and of K."""
        return self.num_k_heads * self.k_head_dim

    @property
    def v_size(self) -> int:
        """Rows of V, and of z."""
        return self.num_v_heads * self.v_head_dim


def delta_block(stack: Stack, layers: Dim, found: Delta, *, fused: bool) -> Block:
    """A gated delta net.

    Args:
        stack: The decoder.
        layers: Its layers that have one.
        found: The sizes.
        fused: Whether Q, K, V and z are one tensor, and b and a another, by key head, as in Qwen3-Next; else
            Q, K and V are one after the other, and z, b and a have tensors of their own, as in Qwen3.5.
    """
    hidden, heads = stack.hidden_size, found.num_v_heads
    rows = {"qkvz": 2 * found.k_size + 2 * found.v_size, "ba": 2 * heads}
    if not fused:
        rows = {"qkv": 2 * found.k_size + found.v_size, "z": found.v_size, "b": heads, "a": heads}
    tensors = {
        role: stack.each(layers, f"linear_attn.in_proj_{role}.weight", n, hidden) for role, n in rows.items()
    }
    conv = (2 * found.k_size + found.v_size, 1, found.kernel_size)
    tensors |= {
        "conv": stack.each(layers, "linear_attn.conv1d.weight", *conv),
        "a_log": stack.each(layers, "linear_attn.A_log", heads),
        "dt_bias": stack.each(layers, "linear_attn.dt_bias", heads),
        "norm": stack.each(layers, "linear_attn.norm.weight", found.v_head_dim),
        "out": stack.each(layers, "linear_attn.out_proj.weight", hidden, found.v_size),
    }
    sizes = {
        "num_k_heads": found.num_k_heads,
        "num_v_heads": heads,
        "k_head_dim": found.k_head_dim,
        "v_head_dim": found.v_head_dim,
        "kernel_size": found.kernel_size,
        "hidden_size": hidden,
    }
    return Block("delta", layers, sizes, tensors)


def delta_segments(block: Block) -> dict[str, Dim]:
    """The rows of Q, K, V, z, b and a of a gated delta net, in order of their heads, labelled by role.

    Source: transformers, ``Qwen3NextGatedDeltaNet.fix_query_key_value_ordering``, ``Qwen3_5GatedDeltaNet``.

    >>> stack, sizes = Stack("model.", 10, "bfloat16"), Delta(2, 4, 3, 5, 4)
    >>> for name, rows in delta_segments(delta_block(stack, whole(1), sizes, fused=True)).items():
    ...     print(name, rows)
    q qkvz[0:3] qkvz[26:29]
    k qkvz[3:6] qkvz[29:32]
    v qkvz[6:16] qkvz[32:42]
    z qkvz[16:26] qkvz[42:52]
    b ba[0:2] ba[4:6]
    a ba[2:4] ba[6:8]
    """
    k_heads, v_heads = block.sizes["num_k_heads"], block.sizes["num_v_heads"]
    each = v_heads // k_heads
    k_rows, v_rows = block.sizes["k_head_dim"], each * block.sizes["v_head_dim"]
    if "qkvz" in block.tensors:
        widths = {"qkvz": {"q": k_rows, "k": k_rows, "v": v_rows, "z": v_rows}, "ba": {"b": each, "a": each}}
        return {
            name: dim for role, of in widths.items() for name, dim in _by_group(role, of, k_heads).items()
        }
    found = conv_segments(block, "qkv")
    return found | {role: whole(block.tensors[role].shape[0], role) for role in "zba"}


def _by_group(label: str, widths: dict[str, int], groups: int) -> dict[str, Dim]:
    """The rows of each segment, where every group has its part of each one after the other."""
    found, at, step = {}, 0, sum(widths.values())
    for name, width in widths.items():
        found[name] = concat(*(Dim([Run(label, at + group * step, width)]) for group in range(groups)))
        at += width
    return found


def conv_segments(block: Block, label: str) -> dict[str, Dim]:
    """The channels of Q, K and V in the convolution of a gated delta net, one after the other."""
    k_size = block.sizes["num_k_heads"] * block.sizes["k_head_dim"]
    v_size = block.sizes["num_v_heads"] * block.sizes["v_head_dim"]
    return _in_order(label, {"q": k_size, "k": k_size, "v": v_size})


def _in_order(label: str, sizes: dict[str, int]) -> dict[str, Dim]:
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = Dim([Run(label, at, size)])
        at += size
    return found


@dataclass(frozen=True, slots=True)
class Mamba:
    """The sizes of a Mamba2 mixer: groups of heads share B and C.

    Attributes:
        num_heads: Heads, each with its ``A``, ``D`` and ``dt``.
        head_dim: The size of a head of x, and of its gate z.
        num_groups: Groups, each with its B and C.
        state_size: The size of B, and of C, of a group.
        kernel_size: Steps of the convolution over x, B and C.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int


def mamba_block(
    stack: Stack,
    layers: Dim,
    found: Mamba,
    *,
    bias: bool = False,
    conv_bias: bool = True,
    module: str = "mixer",
) -> Block:
    """A Mamba2 mixer: ``in`` has the rows of z, x, B, C and dt in this order, ``conv`` those of x, B, C."""
    hidden, inner = stack.hidden_size, found.num_heads * found.head_dim
    groups = found.num_groups * found.state_size
    rows, channels = 2 * inner + 2 * groups + found.num_heads, inner + 2 * groups
    tensors = {
        "in": stack.each(layers, f"{module}.in_proj.weight", rows, hidden),
        "conv": stack.each(layers, f"{module}.conv1d.weight", channels, 1, found.kernel_size),
        "a_log": stack.each(layers, f"{module}.A_log", found.num_heads),
        "d": stack.each(layers, f"{module}.D", found.num_heads),
        "dt_bias": stack.each(layers, f"{module}.dt_bias", found.num_heads),
        "norm": stack.each(layers, f"{module}.norm.weight", inner),
        "out": stack.each(layers, f"{module}.out_proj.weight", hidden, inner),
    }
    if bias:
        tensors["in_bias"] = stack.each(layers, f"{module}.in_proj.bias", rows)
        tensors["out_bias"] = stack.each(layers, f"{module}.out_proj.bias", hidden)
    if conv_bias:
        tensors["conv_bias"] = stack.each(layers, f"{module}.conv1d.bias", channels)
    sizes = {
        "num_heads": found.num_heads,
        "head_dim": found.head_dim,
        "num_groups": found.num_groups,
        "state_size": found.state_size,
        "kernel_size": found.kernel_size,
        "hidden_size": hidden,
    }
    return Block("mamba", layers, sizes, tensors)


def mamba_segments(block: Block, *, conv: bool = False) -> dict[str, Dim]:
    """The rows of z, x, B, C and dt in the ``in`` of a Mamba2 mixer, or those of x, B and C in its ``conv``.

    Source: transformers, ``Mamba2Mixer``.

    >>> block = mamba_block(Stack("", 10, "bfloat16"), whole(1), Mamba(4, 3, 2, 5, 4))
    >>> print(*(f"{name}{rows}" for name, rows in mamba_segments(block).items()))
    z[0:12] x[12:24] B[24:34] C[34:44] dt[44:48]
    >>> print(*(f"{name}{rows}" for name, rows in mamba_segments(block, conv=True).items()))
    x[0:12] B[12:22] C[22:32]
    """
    sizes = block.sizes
    inner, groups = sizes["num_heads"] * sizes["head_dim"], sizes["num_groups"] * sizes["state_size"]
    convolved = {"x": inner, "B": groups, "C": groups}
    return _in_order("", convolved if conv else {"z": inner, **convolved, "dt": sizes["num_heads"]})


def plain_mlp_block(stack: Stack, layers: Dim, ffn_size: int, *, bias: bool = False, module: str) -> Block:
    """A feed-forward without a gate, with both biases or none."""
    shapes = {"up": (ffn_size, stack.hidden_size), "down": (stack.hidden_size, ffn_size)}
    tensors = {
        role: stack.each(layers, f"{module}.{role}_proj.weight", *shape) for role, shape in shapes.items()
    }
    for role, shape in shapes.items() if bias else ():
        tensors[f"{role}_bias"] = stack.each(layers, f"{module}.{role}_proj.bias", shape[0])
    return Block("plain_mlp", layers, {"ffn_size": ffn_size, "hidden_size": stack.hidden_size}, tensors)
