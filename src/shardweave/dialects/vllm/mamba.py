"""vLLM's rules for Mamba2 mixers and for feed-forwards without a gate.

Source: vllm 0.32.0, layers/mamba/mamba_mixer2.py, models/{nemotron_h,mamba2}.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardweave.dialects.vllm.checks import check_shape
from shardweave.dialects.vllm.rules import check_divides
from shardweave.dialects.vllm.world import World, held_whole
from shardweave.errors import GeometryError
from shardweave.layout import IDENTITY, BufferRule, Dim, Part, Sharded, Transform, concat, even, whole
from shardweave.models import Block
from shardweave.models.mixers import mamba_segments

DECAY = Transform("neg_exp")
"""What vLLM stores for ``A_log``: its loader takes the rank's shard and computes ``-exp`` in float32."""


def mixer(block: Block, world: World) -> Iterator[BufferRule]:
    """Segments are cut by heads and groups, and fused after; one group of several ranks is on all of them."""
    sizes, tp, layers = block.sizes, world.tp, world.index(block)
    heads, groups, hidden = sizes["num_heads"], sizes["num_groups"], sizes["hidden_size"]
    check_divides("num_heads", heads, "tp", tp, "choose a tp that divides the heads of the mixers")
    repeated = groups % tp != 0
    if repeated:
        _check_repeated(block, tp)

    def rows(segments: Mapping[str, Dim]) -> Sharded:
        def held(r: int) -> Iterator[Dim]:
            for name, dim in segments.items():
                yield dim if repeated and name in "BC" else even(dim, tp, r)

        return world.over_tp(lambda r: concat(*held(r)))

    for role, bias, conv, rest in (
        ("in", "in_bias", False, (hidden,)),
        ("conv", "conv_bias", True, (1, sizes["kernel_size"])),
    ):
        segments = mamba_segments(block, conv=conv)
        for key, others in ((role, rest), (bias, ())):
            if key in block.tensors:
                tensor = block.tensors[key]
                check_shape(tensor, sum(map(len, segments.values())), *others)
                parts = [Part(tensor, replica=repeated)]
                yield world.rule(tensor.name, parts, layers, rows(segments), *(whole(n) for n in others))
    inner = heads * sizes["head_dim"]
    for role, size in (("a_log", heads), ("d", heads), ("dt_bias", heads), ("norm", inner)):
        tensor = block.tensors[role]
        check_shape(tensor, size)
        dtype, transform = ("float32", DECAY) if role == "a_log" else ("", IDENTITY)
        yield world.rule(
            tensor.name, [Part(tensor)], layers, world.share(size), dtype=dtype, transform=transform
        )
    out = block.tensors["out"]
    check_shape(out, hidden, inner)
    yield world.rule(out.name, [Part(out)], layers, whole(hidden), world.share(inner))
    if "out_bias" in block.tensors:
        yield held_whole(block, "out_bias", world)


def _check_repeated(block: Block, tp: int) -> None:
    groups = block.sizes["num_groups"]
    if groups != 1:
        raise GeometryError(
            "vLLM cuts the groups of a mixer evenly, or repeats the only one",
            where=f"layers {block.layers}",
            equation=f"num_groups({groups}) % tp({tp}) = {groups % tp} != 0, and num_groups != 1",
            hint="choose a tp that divides the groups",
        )
    if "in_bias" in block.tensors or "conv_bias" not in block.tensors:
        raise GeometryError(
            "a mixer whose only group is repeated has a bias of its convolution and none of its projection",
            where=f"layers {block.layers}",
            equation=f"tp({tp}) > num_groups(1), use_bias({'in_bias' in block.tensors}), "
            f"use_conv_bias({'conv_bias' in block.tensors})",
            hint="vLLM has no loader for it; use tp=1",
        )


def plain_mlp(block: Block, world: World) -> Iterator[BufferRule]:
    """Rows of up and columns of down."""
    ffn, hidden, layers = block.sizes["ffn_size"], block.sizes["hidden_size"], world.index(block)
    check_divides("ffn_size", ffn, "tp", world.tp, "choose a tp that divides it")
    held = world.share(ffn)
    up, down = block.tensors["up"], block.tensors["down"]
    check_shape(up, ffn, hidden)
    check_shape(down, hidden, ffn)
    yield world.rule(up.name, [Part(up)], layers, held, whole(hidden))
    yield world.rule(down.name, [Part(down)], layers, whole(hidden), held)
    if "up_bias" in block.tensors:
        yield world.rule(block.tensors["up_bias"].name, [Part(block.tensors["up_bias"])], layers, held)
        yield held_whole(block, "down_bias", world)
