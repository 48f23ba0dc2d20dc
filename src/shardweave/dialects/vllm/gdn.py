"""vLLM's rules for attention with an output gate and for gated delta nets.

Source: vllm 0.32.0, models/{qwen3_next,qwen3_5}.py, layers/mamba/gdn/qwen_gdn_linear_attn.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardweave.dialects.vllm.checks import check_shape
from shardweave.dialects.vllm.rules import check_divides, kv_heads, query_heads
from shardweave.dialects.vllm.world import World, held_whole
from shardweave.layout import BufferRule, Dim, Part, Sharded, concat, even, whole
from shardweave.models import Block
from shardweave.models.mixers import conv_segments, delta_segments


def gated_attention(block: Block, world: World) -> Iterator[BufferRule]:
    """As attention, where a query head has twice the rows: its query, then its gate."""
    sizes, tp, layers = block.sizes, world.tp, world.index(block)
    heads, kv, head_dim, hidden = (
        sizes[key] for key in ("num_heads", "num_kv_heads", "head_dim", "hidden_size")
    )
    q, k, v, o = (block.tensors[role] for role in "qkvo")
    check_shape(q, 2 * heads * head_dim, hidden)
    check_shape(k, kv * head_dim, hidden)
    check_shape(v, kv * head_dim, hidden)
    check_shape(o, hidden, heads * head_dim)

    def fused(r: int) -> Dim:
        queries = query_heads(whole(2 * heads * head_dim, "q"), heads, tp, r)
        return concat(queries, *(kv_heads(whole(kv * head_dim, label), kv, tp, r) for label in "kv"))

    parts = [Part(q, "q"), Part(k, "k", replica=tp > kv), Part(v, "v", replica=tp > kv)]
    name = q.name.replace(".q_proj.", ".qkv_proj.")
    yield world.rule(name, parts, layers, world.over_tp(fused), whole(hidden))
    yield world.rule(o.name, [Part(o)], layers, whole(hidden), world.share(heads * head_dim))
    for role in "q_norm", "k_norm":
        check_shape(block.tensors[role], head_dim)
        yield held_whole(block, role, world)


def delta(block: Block, world: World) -> Iterator[BufferRule]:
    """Projections fused by key head are cut as they are; plain ones are cut by segment and fused after."""
    tp, layers, hidden = world.tp, world.index(block), block.sizes["hidden_size"]
    k_heads, v_heads = block.sizes["num_k_heads"], block.sizes["num_v_heads"]
    # vLLM divides and drops the remainder; with fewer key heads than ranks it would load other rows.
    check_divides(
        "num_k_heads", k_heads, "tp", tp, "choose a tp that divides the key heads of the delta nets"
    )
    yield from _projections(block, world)
    conv, channels = block.tensors["conv"], conv_segments(block, "")
    check_shape(conv, sum(map(len, channels.values())), 1, block.sizes["kernel_size"])
    yield world.rule(conv.name, [Part(conv)], layers, cut_apart(channels.values(), world), *conv.dims[2:])
    for role, dtype in (("a_log", "float32"), ("dt_bias", "")):
        tensor = block.tensors[role]
        check_shape(tensor, v_heads)
        yield world.rule(tensor.name, [Part(tensor)], layers, world.share(v_heads), dtype=dtype)
    check_shape(block.tensors["norm"], block.sizes["v_head_dim"])
    yield held_whole(block, "norm", world)
    out, inner = block.tensors["out"], v_heads * block.sizes["v_head_dim"]
    check_shape(out, hidden, inner)
    yield world.rule(out.name, [Part(out)], layers, whole(hidden), world.share(inner))


def _projections(block: Block, world: World) -> Iterator[BufferRule]:
    layers, hidden, segments = world.index(block), block.sizes["hidden_size"], delta_segments(block)
    for names in ("qkvz", "ba"):
        labels = list(dict.fromkeys(label for name in names for label in segments[name].labels))
        parts = [Part(block.tensors[label], label) for label in labels]
        for part in parts:
            check_shape(part.tensor, sum(len(segments[name].only(part.label)) for name in names), hidden)
        first = parts[0].tensor
        if labels == [names]:
            rows = world.share(first.shape[0])
            yield world.rule(first.name, [Part(first)], layers, rows, whole(hidden))
        else:
            name = first.name.replace(f".in_proj_{labels[0]}.", f".in_proj_{names}.")
            rows = cut_apart([segments[one] for one in names], world)
            yield world.rule(name, parts, layers, rows, whole(hidden))


def cut_apart(segments: Iterable[Dim], world: World) -> Sharded:
    """Segments each cut on its own, the shares of a rank one after the other."""
    held = list(segments)
    return world.over_tp(lambda r: concat(*(even(dim, world.tp, r) for dim in held)))
