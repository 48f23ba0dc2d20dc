"""Yuan 2: llama whose queries and keys are made of a filtered hidden state, or of one projection for both.

With the filter, what goes into Q and K is first convolved over two steps, twice, and normed. The rows of Q,
then those of K are read as heads of twice the size: query and key of head ``i`` are the stretches ``2i`` and
``2i + 1``, in units of a head. So the first half of the heads has its queries and keys in Q, the second half
in K, while V has all heads in order: a rank's rows of Q and K go with two stretches of heads of V and O.

With ``use_shareqk`` there is one projection without a filter, and Q and K are its output, each scaled by a
vector and shifted by one.

The half of the feed-forward that goes through the activation is ``up_proj``: here it has the role ``gate``.

Files of the first versions also hold the frequencies of the rotary embedding, which are no weight. The head
and the embedding are one tensor under two names, unless the config says otherwise.

Source: the model's own code as published by its authors in IEIT-Yuan/Yuan-2.0, ``megatron/model/
yuan_hf_model.py`` (LocalizedFiltering, LlamaAttention, LlamaMLP) and ``3rdparty/vllm/{yuan_hf_model,
configuration_yuan}.py`` (YuanConfig), ``tools/convert_hf.py`` for what files hold; transformers has no class
for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim, Tensor
from shardweave.models.blocks import Heads, Stack, norms_block
from shardweave.models.config import MATHS, RUNTIME, TOKENS, Config
from shardweave.models.family import Family
from shardweave.models.gpt_blocks import full_heads
from shardweave.models.spec import Block

_IGNORED = {
    **dict.fromkeys(("causal_mask", "dropout", "model_max_length"), MATHS),
    **dict.fromkeys(("reset_attention_mask", "reset_position_ids", "use_loss_mask"), MATHS),
    **dict.fromkeys(("auto_map", "tokenizer_class", "use_flash_attention"), RUNTIME),
    **dict.fromkeys(
        ("eod_token", "eod_token_id", "mask_token_id", "sep_token"),
        TOKENS,
    ),
}


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    found = full_heads(config, stack.hidden_size)
    yield norms_block(stack, layers)
    yield attention_block(stack, layers, found, shared=config.flag("use_shareqk", missing=False))
    yield _mlp_block(stack, layers, config.size("intermediate_size"))


def attention_block(stack: Stack, layers: Dim, found: Heads, *, shared: bool) -> Block:
    """Attention whose Q and K are of a filtered hidden state, or one projection with ``shared``."""
    hidden = stack.hidden_size

    def each(name: str, *shape: int) -> Tensor:
        return stack.each(layers, f"self_attn.{name}", *shape)

    tensors = {role: each(f"{role}_proj.weight", hidden, hidden) for role in ("v", "o")}
    if shared:
        tensors["qk"] = each("qk_proj.weight", hidden, hidden)
        tensors["qk_scale"] = each("qk_weight", 2, hidden)
        tensors["qk_shift"] = each("qk_bias", 2, hidden)
    else:
        tensors |= {role: each(f"{role}_proj.weight", hidden, hidden) for role in ("q", "k")}
        for role, rows, columns in ("conv1", hidden // 2, hidden), ("conv2", hidden, hidden // 2):
            tensors[role] = each(f"lf_gate.{role}.weight", rows, columns, 2, 1)
            tensors[f"{role}_bias"] = each(f"lf_gate.{role}.bias", rows)
        tensors["filter_norm"] = each("lf_gate.output_layernorm.weight", hidden)
    sizes = {
        "num_heads": found.num_heads,
        "num_kv_heads": found.num_kv_heads,
        "head_dim": found.head_dim,
        "hidden_size": hidden,
    }
    return Block("shared_qk_attention" if shared else "filtered_attention", layers, sizes, tensors)


def _mlp_block(stack: Stack, layers: Dim, ffn_size: int) -> Block:
    names = {"gate": "up_proj", "up": "gate_proj", "down": "down_proj"}
    hidden = stack.hidden_size
    tensors = {
        role: stack.each(
            layers, f"mlp.{name}.weight", *((hidden, ffn_size) if role == "down" else (ffn_size, hidden))
        )
        for role, name in names.items()
    }
    return Block("mlp", layers, {"ffn_size": ffn_size, "hidden_size": hidden}, tensors)


FAMILY = Family(
    "yuan",
    "YuanForCausalLM",
    _layers,
    shapes=frozenset({"use_shareqk"}),
    ignored=_IGNORED,
    neutral=dict.fromkeys(("head_dim", "num_key_value_heads"), (None,)),
    tied=True,
    buffers=("self_attn.rotary_emb.inv_freq",),
)
