"""What a model has: its logical tensors, grouped into blocks of layers that are built alike.

Dialects read a ``Model`` and never a config: a block says which layers it stands for, the sizes
that partitioning needs (heads, experts), and its tensors by role.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardweave.layout import Dim, Tensor


@dataclass(frozen=True)
class Block:
    """Tensors that belong together, on the layers that have them in the same sizes.

    Kinds, with their sizes and roles (biases and norms only where the model has them):

    ``embedding``  sizes ``vocab_size, hidden_size``; ``embed``
    ``norms``      ``hidden_size``; ``input_norm``, ``post_attention_norm``
    ``attention``  ``num_heads, num_kv_heads, head_dim, hidden_size``; ``q k v o``, ``q_bias k_bias
                   v_bias o_bias``, ``q_norm k_norm``
    ``mlp``        ``ffn_size, hidden_size``; ``gate up down``, ``gate_bias up_bias down_bias``
    ``moe``        ``num_experts, ffn_size, hidden_size``; ``router``, and with the index dims layer and
                   expert ``gate up down``
    ``shared``     the shared expert of a moe layer, ``ffn_size, hidden_size``; ``gate up down``, ``router``
    ``final``      ``hidden_size``; ``norm``
    ``head``       ``vocab_size, hidden_size``; ``head``; absent where the embedding is tied

    Attributes:
        kind: One of the above.
        layers: The layer numbers of the block; empty outside the layers.
        sizes: The sizes that partitioning needs.
        tensors: The tensors by role. Every tensor of a block with layers has the index dim ``layer``
            first, over exactly ``layers``.
    """

    kind: str
    layers: Dim
    sizes: Mapping[str, int]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Model:
    """The logical tensors of a model.

    Attributes:
        family: The family whose rules described it ("qwen3_moe").
        num_layers: Number of decoder layers.
        dtype: The dtype of its weights, by torch's name.
        blocks: Its tensors.
        aliases: Other names of tensors that are stored once: name to canonical name. A tied head is
            an alias of the embedding.
    """

    family: str
    num_layers: int
    dtype: str
    blocks: tuple[Block, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def of(self, kind: str) -> Iterator[Block]:
        """The blocks of one kind, in order of their layers."""
        return (block for block in self.blocks if block.kind == kind)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in order of the blocks."""
        return tuple(tensor for block in self.blocks for tensor in block.tensors.values())

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return not any(True for _ in self.of("head"))

    @property
    def numel(self) -> int:
        """The number of parameters, tied ones once."""
        return sum(tensor.numel for tensor in self.tensors)
