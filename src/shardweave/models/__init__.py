"""Which logical tensors a model has, read from its Hugging Face config."""

from __future__ import annotations

from shardweave.models.reader import FAMILIES, from_config
from shardweave.models.spec import Block, Model

__all__ = ["FAMILIES", "Block", "Model", "from_config"]
