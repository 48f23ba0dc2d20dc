"""What a model has: its logical tensors, grouped into blocks of layers that are built alike.

Dialects read a ``Model`` and never a config: a block says which layers it stands for, the sizes
that partitioning needs (heads, experts), and its tensors by role.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardweave.layout import Dim, Tensor

SCALE = "_scale"
"""What the role of the block scales of a weight ends in, behind the role of the weight."""

_OWN_DTYPE = ("router_bias",)
"""Roles of tensors whose dtype is not that of the weights."""


@dataclass(frozen=True)
class Block:
    """Tensors that belong together, on the layers that have them in the same sizes.

    Kinds, with their sizes and roles (biases and norms only where the model has them):

    ``embedding``  sizes ``vocab_size, hidden_size``; ``embed``
    ``norms``      ``hidden_size``; ``input_norm``, ``post_attention_norm``
    ``attention``  ``num_heads, num_kv_heads, head_dim, hidden_size``; ``q k v o``, ``q_bias k_bias
                   v_bias o_bias``, ``q_norm k_norm``
    ``mla``        latent attention, ``num_heads, q_head_dim, kv_head_dim, v_head_dim, q_rank, kv_rank,
                   rope_dim, hidden_size``; ``q_a q_a_norm q_b`` or ``q``, ``kv_a kv_a_norm kv_b o``,
                   ``q_a_bias kv_a_bias o_bias``
    ``gated_attention``  as ``attention``; ``q`` has for each head the query's rows, then those of a gate
    ``delta``      a gated delta net, ``num_k_heads, num_v_heads, k_head_dim, v_head_dim, kernel_size,
                   hidden_size``; ``qkvz ba`` or ``qkv z b a``, ``conv a_log dt_bias norm out``
    ``mamba``      a Mamba2 mixer, ``num_heads, head_dim, num_groups, state_size, kernel_size, hidden_size``;
                   ``in conv a_log d dt_bias norm out``, ``in_bias out_bias``, ``conv_bias``
    ``mlp``        ``ffn_size, hidden_size``; ``gate up down``, ``gate_bias up_bias down_bias``
    ``plain_mlp``  ``ffn_size, hidden_size``; ``up down``, ``up_bias down_bias``
    ``fused_attention``  as ``attention``, and ``num_blocks``; one tensor for Q, K and V, whose role says in
                   which order each block of its rows has them: ``qkv`` or ``qvk``, with a ``..._bias``;
                   ``o``, ``o_bias``
    ``conv_attention``, ``conv_mlp``  a ``fused_attention`` and a ``plain_mlp`` whose weights are stored
                   (in, out), as transformers' Conv1D has them
    ``filtered_attention``, ``shared_qk_attention``  Yuan's, ``attention`` with ``q k v o`` and a filter,
                   ``conv1 conv1_bias conv2 conv2_bias filter_norm``; or with ``qk qk_scale qk_shift v o``
    ``gate_up_mlp``  an ``mlp`` with ``gate_up``, whose rows are the gate's and then up's, and ``down``
    ``layer_norms``  norms with biases, ``hidden_size``; ``input_norm post_attention_norm`` and others, each
                   with its ``..._bias``
    ``positions``  learned positions, ``num_positions, hidden_size``; ``positions``
    ``embedding_norm``  a norm of the embedding, ``hidden_size``; ``norm norm_bias``
    ``final_bias`` the bias of the norm after the last layer, ``hidden_size``; ``bias``
    ``head_bias``  the bias of an output head, tied or not, ``vocab_size``; ``bias``
    ``moe``        ``num_experts, ffn_size, hidden_size``; ``router``, ``router_bias`` (float32), and with
                   the index dims layer and expert ``gate up down``
    ``shared``     the shared expert of a moe layer, ``ffn_size, hidden_size``; ``gate up down``, ``router``
    ``mtp``        what a layer for a further token has beside a layer's blocks, ``hidden_size``;
                   ``embed_norm hidden_norm proj norm``
    ``final``      ``hidden_size``; ``norm``
    ``head``       ``vocab_size, hidden_size``; ``head``; absent where the embedding is tied
    ``patches``    of a vision tower, ``num_channels, patch_size, hidden_size``; ``patches`` (hidden size,
                   channels, height, width), ``patches_bias``
    ``projector``  from a vision tower to a language model, ``hidden_size, text_hidden_size``; ``linear_1
                   linear_2``, each with its ``..._bias``

    In a model that has a vision tower beside a decoder, the kinds of the tower's blocks start with
    ``vision_``; it has layers of its own.

    Weights in blocks of float8 have scales beside them, ``gate_scale`` beside ``gate``, and the sizes
    ``scale_rows, scale_columns`` of a block.

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
        num_layers: Number of decoder layers. Layers with this number and further ones predict further tokens;
            they have blocks of their own, and may be left out together.
        dtype: The dtype of its weights, by torch's name.
        blocks: Its tensors.
        aliases: Other names of tensors that are stored once: name to canonical name. A tied head is
            an alias of the embedding.
        copies: Names under which files hold a tensor once more: name to canonical name. In DeepSeek's files
            each layer for a further token has a copy of the embedding and of the head.
        buffers: Names under which files of old versions hold what is no weight, such as causal masks.
        prefixes: What names begin with, and what they begin with instead in files of old versions.
    """

    family: str
    num_layers: int
    dtype: str
    blocks: tuple[Block, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    prefixes: Mapping[str, str] = field(default_factory=dict)

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
    def decoder(self) -> Model:
        """The model without its layers for further tokens; the same one where it has none."""
        last = self.num_layers
        kept = [block for block in self.blocks if all(run.start < last for run in block.layers.runs)]
        return self if len(kept) == len(self.blocks) else replace(self, blocks=tuple(kept), copies={})

    @property
    def own_dtype(self) -> frozenset[Tensor]:
        """Tensors whose dtype is not that of the weights: correction biases, scales and what they scale."""
        return frozenset(
            tensor
            for block in self.blocks
            for role, tensor in block.tensors.items()
            if role in _OWN_DTYPE or role.endswith(SCALE) or role + SCALE in block.tensors
        )

    @property
    def scaled(self) -> bool:
        """Whether weights are stored in blocks with scales."""
        return any(role.endswith(SCALE) for block in self.blocks for role in block.tensors)

    @property
    def numel(self) -> int:
        """The number of parameters, tied ones once."""
        return sum(tensor.numel for tensor in self.tensors)
