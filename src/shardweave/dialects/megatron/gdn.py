"""Megatron's gated delta nets, and attention with an output gate.

Megatron-Core builds delta nets of Transformer Engine's layers only, whose input norm is fused into
``in_proj``. Its resharding takes the fused projections for one block of rows, because they carry no sizes of
segments, and so moves wrong rows without a word; here each segment is cut on its own.

Source: megatron-core 0.16.1, ssm/gated_delta_net.py, ``SelfAttention.get_query_key_value_tensors``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardweave.dialects.megatron.weight import Segments, Weight, fused_of, rows, segmented, weight_of
from shardweave.errors import GeometryError
from shardweave.layout import Dim, Part, Run, Transform, concat, whole
from shardweave.models.mixers import conv_segments, delta_segments
from shardweave.models.spec import Block

_NAMES = {"q": "query", "k": "key", "v": "value", "z": "z", "b": "beta", "a": "alpha"}
_QKV = {"q": "q", "k": "k", "v": "v"}
_QKV_BIAS = {"q": "q_bias", "k": "k_bias", "v": "v_bias"}

TE_ONLY = ("delta", "mamba")
"""The kinds of blocks that Megatron builds of Transformer Engine's layers only."""

CENTRED = Transform("shift", -1.0)
"""What is stored of a delta net's norm. All other norms of these models are around 0 for everybody, for
which Megatron has ``layernorm_zero_centered_gamma``; with it this one is so too, in Megatron alone."""


def gated_qkv(num_heads: int, num_kv_heads: int, head_dim: int) -> Dim:
    """The rows of a fused QKV weight with an output gate: for each KV group its queries, their gates, K, V.

    ``q`` has the gate of each head behind its query.

    >>> print(gated_qkv(4, 2, 8))
    q[0:8] q[16:24] q[8:16] q[24:32] k[0:8] v[0:8] q[32:40] q[48:56] q[40:48] q[56:64] k[8:16] v[8:16]
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise GeometryError(
            "query heads fall into whole KV groups",
            equation=f"num_heads({num_heads}) % num_kv_heads({num_kv_heads}) != 0",
            hint="check num_attention_heads and num_key_value_heads of the config",
        )
    each, runs = num_heads // num_kv_heads, []
    for group in range(num_kv_heads):
        heads = range(group * each, (group + 1) * each)
        runs += [Run("q", (2 * head + half) * head_dim, head_dim) for half in (0, 1) for head in heads]
        runs += [Run(label, group * head_dim, head_dim) for label in "kv"]
    return Dim(runs)


def gated_attention(block: Block) -> Iterator[Weight]:
    """As attention; with more ranks than KV heads, 0.16.1 holds such a weight and cannot run it."""
    sizes, path = block.sizes, "self_attention."
    fused = gated_qkv(sizes["num_heads"], sizes["num_kv_heads"], sizes["head_dim"])
    yield from fused_of(block, f"{path}linear_qkv.weight", _QKV, fused, rows)
    yield from fused_of(block, f"{path}linear_qkv.bias", _QKV_BIAS, fused, rows)
    yield from weight_of(block, f"{path}linear_proj.weight", "o", cut_dim=1)
    yield from weight_of(block, f"{path}linear_proj.bias", "o_bias")
    yield from weight_of(block, f"{path}q_layernorm.weight", "q_norm")
    yield from weight_of(block, f"{path}k_layernorm.weight", "k_norm")


def delta(block: Block, spec: str, *, stored: bool) -> Iterator[Weight]:
    """A gated delta net: a rank has its rows of q, k, v, z, b and a in this order, and so the channels."""
    check_spec(block, spec, stored=stored)
    path, heads = "self_attention.", _heads(block)
    segments = delta_segments(block)
    labels = list(dict.fromkeys(label for dim in segments.values() for label in dim.labels))
    parts = tuple(Part(block.tensors[label], label) for label in labels)
    columns = whole(block.sizes["hidden_size"])
    projections = Weight(
        f"{path}in_proj.weight", parts, (concat(*segments.values()), columns), layers=block.layers
    )
    yield from segmented(projections, _cut(segments, heads), stored=stored)
    for conv in weight_of(block, f"{path}conv1d.weight", "conv"):
        yield from segmented(conv, _cut(conv_segments(block, ""), heads), stored=stored)
    yield from weight_of(block, f"{path}dt_bias", "dt_bias", cut_dim=0)
    yield from weight_of(block, f"{path}A_log", "a_log", cut_dim=0)
    for norm in weight_of(block, f"{path}out_norm.weight", "norm"):
        yield replace(norm, transform=CENTRED)
    yield from weight_of(block, f"{path}out_proj.weight", "out", cut_dim=1)


def _heads(block: Block) -> dict[str, int]:
    k, v = block.sizes["num_k_heads"], block.sizes["num_v_heads"]
    return {"q": k, "k": k, "v": v, "z": v, "b": v, "a": v}


def _cut(segments: dict[str, Dim], heads: dict[str, int]) -> Segments:
    return Segments(
        tuple(_NAMES[name] for name in segments),
        tuple(len(dim) for dim in segments.values()),
        tuple(heads[name] for name in segments),
    )


def check_spec(block: Block, spec: str, *, stored: bool) -> None:
    """Refuse layers that Megatron builds of Transformer Engine's parts only, where others are said to be."""
    if spec != "te" and not stored:
        raise GeometryError(
            "delta nets and mixers are built of Transformer Engine's layers",
            where=f"layers {block.layers}",
            equation=f"spec({spec!r}) != 'te', block kind({block.kind!r})",
            hint="leave spec out: Megatron has no local layers of this kind",
        )
