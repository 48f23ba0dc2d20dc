"""Keeps the sharded state of large language models correct by construction.

One exact description of which element of which tensor lives where on which rank drives initialising,
training, checkpointing, converting, and handing weights to an inference engine. From it the library
proves, before the first byte moves, that every element is covered exactly once, that replicas agree,
and that nothing is guessed.

This module imports nothing: the algebra in `shardweave.layout` stays free of torch, and so does the way
to it. Start there, or with `shardweave --help`.
"""

from __future__ import annotations

__version__ = "0.1.0"
