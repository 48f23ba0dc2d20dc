"""Keeps the sharded state of large language models correct by construction.

One exact description says which element of which tensor lives where on which rank. Plans, conversions
and pictures are derived from it, and proved before the first byte moves: every element is held by one
owner or by declared replicas, and written exactly once. What is not understood is refused, not guessed.

This module imports nothing: the algebra in `shardweave.layout` stays free of torch, and so does the way
to it. Start there, or with `shardweave --help`.
"""

from __future__ import annotations

__version__ = "0.1.0"
