"""Megatron-Core: what its ranks hold, and what its ``torch_dist`` checkpoints store.

Both follow from one table of weights. A weight is stored whole in a checkpoint; a rank holds a
cut of it, and a cut is a function from ``Dim`` to ``Dim``:

==============  =============================================================================
column          ``even(dim, tp, r)``: raw rows, whatever they mean
row             the same on the input dim
gate and up     ``concat(even(gate, tp, r), even(up, tp, r))``: each half on its own
fused QKV       stored by KV group, ``q .. q k v`` for each; then cut as raw rows, so that a rank
                may end inside a head and own no K or V
vocabulary      ``even(pad(vocab, divisor * tp), tp, r)``
latent          the way up by heads, ``even(heads, tp, r)``; the way down whole (Transformer
                Engine) or cut as raw rows (local spec), which may end inside its two parts
==============  =============================================================================

Source: megatron-core 0.16.1, checked against the parameters and checkpoints of real models.
"""

from __future__ import annotations

from shardweave.dialects.megatron.args import config_of
from shardweave.dialects.megatron.checkpoint import (
    Shard,
    checkpoint,
    extra_states,
    layers_alike,
    shards,
    variant,
)
from shardweave.dialects.megatron.live import layout
from shardweave.dialects.megatron.mla import MTP_LAYERS
from shardweave.dialects.megatron.ranks import Stages, mesh, padded_vocab_size, stages
from shardweave.dialects.megatron.weight import Weight
from shardweave.dialects.megatron.weights import fused_qkv, specs, weights

__all__ = [
    "MTP_LAYERS",
    "Shard",
    "Stages",
    "Weight",
    "checkpoint",
    "config_of",
    "extra_states",
    "fused_qkv",
    "layers_alike",
    "layout",
    "mesh",
    "padded_vocab_size",
    "shards",
    "specs",
    "stages",
    "variant",
    "weights",
]
