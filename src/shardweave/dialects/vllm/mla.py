"""vLLM's rules for latent attention: the way down whole and fused, the way up by heads; and of its drafter.

Source: vllm 0.32.0, models/deepseek_v2.py: ``DeepseekV2MLAAttention``; models/deepseek_mtp.py:
``DeepSeekMTP``. What it derives from ``kv_b_proj`` after loading (the absorbed weights of decoding) is its
own, and follows when vLLM processes loaded weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardweave.dialects.vllm.checks import check_shape
from shardweave.dialects.vllm.rules import query_heads
from shardweave.dialects.vllm.world import World, held_whole, renamed
from shardweave.layout import BufferRule, Part, Sharded, concat, whole
from shardweave.models import Block, Model

_DOWN = (".q_a_proj.", ".fused_qkv_a_proj.")


def latent(block: Block, world: World) -> Iterator[BufferRule]:
    """``[q_a; kv_a]`` on every rank, fused if queries are compressed; ``q_b``, ``kv_b``, ``o`` by heads."""
    sizes, layers, tensors = block.sizes, world.index(block), block.tensors
    heads, hidden, q_rank, kv_rank = (sizes[key] for key in ("num_heads", "hidden_size", "q_rank", "kv_rank"))
    kv_rows = kv_rank + sizes["rope_dim"]
    check_shape(tensors["kv_a"], kv_rows, hidden)
    if q_rank:
        check_shape(tensors["q_a"], q_rank, hidden)
        fused = concat(whole(q_rank, "q_a"), whole(kv_rows, "kv_a"))
        parts = [Part(tensors[role], role) for role in ("q_a", "kv_a")]
        yield world.rule(renamed(tensors["q_a"], _DOWN), parts, layers, fused, whole(hidden))
        yield held_whole(block, "q_a_norm", world)
    else:
        yield held_whole(block, "kv_a", world)
    yield held_whole(block, "kv_a_norm", world)
    up = {"q_b": q_rank} if q_rank else {"q": hidden}
    for role, width, head_dim in (
        *((role, width, sizes["q_head_dim"]) for role, width in up.items()),
        ("kv_b", kv_rank, sizes["kv_head_dim"]),
    ):
        tensor, size = tensors[role], heads * head_dim
        check_shape(tensor, size, width)
        yield world.rule(tensor.name, [Part(tensor)], layers, _by_heads(size, heads, world), whole(width))
    o, size = tensors["o"], heads * sizes["v_head_dim"]
    check_shape(o, hidden, size)
    yield world.rule(o.name, [Part(o)], layers, whole(hidden), _by_heads(size, heads, world))


def _by_heads(size: int, heads: int, world: World) -> Sharded:
    return world.over_tp(lambda r: query_heads(whole(size), heads, world.tp, r))


def further(model: Model) -> tuple[range, ...]:
    """The layers of a drafter, on its one stage."""
    numbers = [n for block in model.of("mtp") for _, n in block.layers]
    return (range(min(numbers), max(numbers) + 1),)


def draft_blocks(model: Model) -> Iterator[Block]:
    """The blocks of a drafter: the embedding, and the layers for further tokens."""
    (layers,) = further(model)
    for block in model.blocks:
        if block.kind == "embedding" or (block.layers and all(n in layers for _, n in block.layers)):
            yield block


def within(world: World) -> World:
    """The names of a drafter, whose layers have the decoder layer inside."""
    inner = (".layers.{layer}.", ".layers.{layer}.mtp_block.")
    return replace(world, names=(*world.names, inner))
