"""The algebra: runs, dims, boxes, meshes, tensors, buffers, layouts, and the proof of a layout.

Standard library and numpy only. Everything above is written in these words.
"""

from __future__ import annotations

from shardweave.layout.box import Box, contiguous_runs, flat_boxes, flat_interval, intersect, subtract
from shardweave.layout.buffer import Buffer, BufferRule, Part, Piece, Sharded, along, replicated
from shardweave.layout.grid import on_grid
from shardweave.layout.layout import Layout
from shardweave.layout.mesh import Mesh, ordered
from shardweave.layout.notation import (
    format_box,
    format_dim,
    format_layout,
    format_mesh,
    format_tensor,
    parse_box,
    parse_dim,
    parse_layout,
    parse_mesh,
    parse_tensor,
)
from shardweave.layout.proof import prove
from shardweave.layout.run import (
    PAD,
    Dim,
    Run,
    balanced,
    chunk,
    concat,
    cut,
    even,
    interleave,
    pad,
    relabel,
    repeat,
    select,
    split,
    take,
    whole,
)
from shardweave.layout.subset import narrowed, subset
from shardweave.layout.tensor import Tensor
from shardweave.layout.transform import IDENTITY, Transform

__all__ = [
    "IDENTITY",
    "PAD",
    "Box",
    "Buffer",
    "BufferRule",
    "Dim",
    "Layout",
    "Mesh",
    "Part",
    "Piece",
    "Run",
    "Sharded",
    "Tensor",
    "Transform",
    "along",
    "balanced",
    "chunk",
    "concat",
    "contiguous_runs",
    "cut",
    "even",
    "flat_boxes",
    "flat_interval",
    "format_box",
    "format_dim",
    "format_layout",
    "format_mesh",
    "format_tensor",
    "interleave",
    "intersect",
    "narrowed",
    "on_grid",
    "ordered",
    "pad",
    "parse_box",
    "parse_dim",
    "parse_layout",
    "parse_mesh",
    "parse_tensor",
    "prove",
    "relabel",
    "repeat",
    "replicated",
    "select",
    "split",
    "subset",
    "subtract",
    "take",
    "whole",
]
