"""DeepSpeed: how AutoTP cuts a weight over tensor-parallel ranks (``autotp``), and a model (``model``)."""

from __future__ import annotations

from shardweave.dialects.deepspeed.autotp import (
    LAYOUTS,
    AutoTP,
    layout_named,
    layout_of,
    shard,
    shares,
    weight_layout,
    widths,
)
from shardweave.dialects.deepspeed.model import INFERENCE, TRAINING, layout

__all__ = [
    "INFERENCE",
    "LAYOUTS",
    "TRAINING",
    "AutoTP",
    "layout",
    "layout_named",
    "layout_of",
    "shard",
    "shares",
    "weight_layout",
    "widths",
]
