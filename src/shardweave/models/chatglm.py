"""ChatGLM2, ChatGLM3 and GLM-4 as first published: remote code, names like Megatron's, fused projections.

Q, K and V are one tensor: with ``multi_query_attention`` all queries, then all K and all V, of
``multi_query_group_num`` heads each; without it for each head its query, its K and its V. Gate and up are
one tensor. ``add_bias_linear`` gives every projection a bias, ``add_qkv_bias`` that of Q, K and V alone.

The head is never tied. Files also hold the frequencies of the rotary embedding, which are no weight.

Source: the models' own ``modeling_chatglm.py`` and ``configuration_chatglm.py`` (ChatGLMConfig,
SelfAttention, MLP, GLMBlock, GLMTransformer, ChatGLMModel), as published with chatglm2-6b and chatglm3-6b.
transformers has no class for them.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim
from shardweave.models.blocks import Heads, Stack, heads, norms_block
from shardweave.models.config import MATHS, RUNTIME, Config
from shardweave.models.family import Family
from shardweave.models.gate_up import gate_up_block
from shardweave.models.gpt_blocks import fused_attention_block
from shardweave.models.spec import Block

_MATHS = """
    apply_query_key_layer_scaling apply_residual_connection_post_layernorm attention_softmax_in_fp32
    bias_dropout_fusion fp32_residual_connection hidden_dropout layernorm_epsilon original_rope rope_ratio
    seq_length
"""
_IGNORED = {
    **dict.fromkeys(_MATHS.split(), MATHS),
    "auto_map": RUNTIME,
    "classifier_dropout": "belongs to heads of other tasks",
    "prefix_projection": "belongs to a prefix encoder, which is refused",
}


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    bias = config.flag("add_bias_linear", missing=False)
    found, num_blocks = _heads(config, stack.hidden_size)
    yield norms_block(stack, layers)
    yield fused_attention_block(
        stack,
        layers,
        found,
        qkv="self_attention.query_key_value",
        o="self_attention.dense",
        num_blocks=num_blocks,
        qkv_bias=bias or config.flag("add_qkv_bias", missing=False),
        o_bias=bias,
    )
    yield gate_up_block(
        stack,
        layers,
        config.size("intermediate_size"),
        gate_up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        bias=bias,
    )


def _heads(config: Config, hidden_size: int) -> tuple[Heads, int]:
    """The heads, and how many blocks of rows have Q, K and V each."""
    every = heads(config, hidden_size, kv_missing=True)
    if not config.flag("multi_query_attention", missing=False):
        return every, every.num_heads
    groups = config.size("multi_query_group_num")
    if every.num_heads % groups:
        raise config.fail(
            "query heads fall into equal groups that share K and V",
            f"num_attention_heads({every.num_heads}) % multi_query_group_num({groups}) "
            f"= {every.num_heads % groups} != 0",
            "correct the one that is wrong, or take the config that belongs to the weights",
        )
    return Heads(every.num_heads, groups, every.head_dim), 1


FAMILY = Family(
    "chatglm",
    "ChatGLMForConditionalGeneration",
    _layers,
    renamed=("ChatGLMModel",),
    shapes=frozenset({"add_bias_linear", "add_qkv_bias", "multi_query_attention", "multi_query_group_num"}),
    ignored=_IGNORED,
    neutral={
        "interleaved_qkv": (False,),
        "num_key_value_heads": (None,),
        "post_layer_norm": (True,),
        "pre_seq_len": (None,),
        "quantization_bit": (0, None),
        "rmsnorm": (True,),
        "tie_word_embeddings": (False,),
    },
    prefix="transformer.",
    embedding="embedding.word_embeddings.weight",
    within="encoder.layers",
    final="encoder.final_layernorm.weight",
    head="transformer.output_layer.weight",
    spelled={
        "ffn_hidden_size": "intermediate_size",
        "kv_channels": "head_dim",
        "num_layers": "num_hidden_layers",
        "padded_vocab_size": "vocab_size",
    },
    buffers_once=("rotary_pos_emb.inv_freq",),
)
