"""Which logical tensors a model has, read from its Hugging Face config.

``from_config`` gives a ``Model``: blocks of layers that are built alike, their sizes, and their tensors by
role. One module for each family; a key of a config that is not known is refused.
"""

from __future__ import annotations

from shardweave.models.plain import plain
from shardweave.models.reader import FAMILIES, from_config
from shardweave.models.spec import Block, Model

__all__ = ["FAMILIES", "Block", "Model", "from_config", "plain"]
