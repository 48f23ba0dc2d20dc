"""DeepSeek-V3 and what is built like it: latent attention, routed experts beside a shared one, MTP layers.

The layers after the last one predict further tokens. They are layers like any other, with a projection
before them and a norm behind; files hold the embedding and the head once more in each.

Source: transformers, ``models/deepseek_v3``: DeepseekV3Config, DeepseekV3Attention, DeepseekV3MoE; the
released weights of DeepSeek-V3 for the names of MTP layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim, Run
from shardweave.models.blocks import (
    Latent,
    Stack,
    alike,
    latent_block,
    mlp_block,
    moe_block,
    mtp_block,
    norms_block,
    shared_block,
)
from shardweave.models.config import MATHS, RUNTIME, Config
from shardweave.models.family import Family
from shardweave.models.spec import Block

_ROUTING = (
    "aux_loss_alpha",
    "n_group",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "seq_aux",
    "topk_group",
)


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    extra = _number(config, config.spelled("num_nextn_predict_layers", "num_mtp_layers"))
    yield from layers_of(config, stack, layers, extra=extra, router_bias=True)


def layers_of(
    config: Config, stack: Stack, layers: Dim, *, extra: int = 0, router_bias: bool = False
) -> Iterator[Block]:
    """The layers of a DeepSeek model, and ``extra`` ones behind them for further tokens."""
    every = Dim([Run("", 0, len(layers) + extra)])
    first_sparse = config.size("first_k_dense_replace", least=0)
    found, bias = latent(config), config.flag("attention_bias")
    # What is behind the last layer can be left out as a whole, and so has blocks of its own.
    for is_extra, held in alike([n >= len(layers) for _, n in every]).items():
        yield norms_block(stack, held)
        yield latent_block(stack, held, found, bias=bias)
        if is_extra:
            yield mtp_block(stack, held)
    kinds = [(n >= first_sparse, n >= len(layers)) for _, n in every]
    for (is_sparse, _), held in alike(kinds).items():
        if not is_sparse:
            yield mlp_block(stack, held, config.size("intermediate_size"))
            continue
        ffn_size = config.size("moe_intermediate_size")
        experts = config.size(config.spelled("n_routed_experts", "num_local_experts"))
        yield moe_block(stack, held, num_experts=experts, ffn_size=ffn_size, router_bias=router_bias)
        if num_shared := _number(config, "n_shared_experts"):
            yield shared_block(stack, held, num_shared * ffn_size, module="mlp.shared_experts")


def _number(config: Config, key: str) -> int:
    """How many there are; none where the key is missing or null."""
    return 0 if config.get(key) is None else config.size(key, least=0)


def latent(config: Config) -> Latent:
    """The sizes of latent attention, all of whose heads have their own K and V."""
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", null=num_heads, missing=num_heads)
    rope, nope = config.size("qk_rope_head_dim"), config.size("qk_nope_head_dim")
    if num_kv_heads != num_heads:
        raise config.fail(
            "every head of latent attention has its own K and V",
            f"num_key_value_heads({num_kv_heads}) != num_attention_heads({num_heads})",
            "correct the one that is wrong, or take the config that belongs to the weights",
        )
    if config.get("qk_head_dim") not in (None, nope + rope):
        raise config.fail(
            "a query head has a part with positions and one without",
            f"qk_head_dim({config.get('qk_head_dim')}) != qk_nope_head_dim({nope}) "
            f"+ qk_rope_head_dim({rope})",
            "correct the one that is wrong, or take the config that belongs to the weights",
        )
    if config.get("head_dim") not in (None, rope, nope + rope):
        raise config.fail(
            "a head dim is that of the rotation, or of a query head",
            f"head_dim({config.get('head_dim')}) != qk_rope_head_dim({rope}), and != {nope} + {rope}",
            "leave it out: latent attention has three head dims of its own",
        )
    if "q_lora_rank" not in config.values:
        raise config.fail(
            "a config says whether queries are compressed",
            "q_lora_rank is not given",
            "give the rank, or null where the model has a plain q_proj",
        )
    q_rank = 0 if config.get("q_lora_rank") is None else config.size("q_lora_rank")
    return Latent(num_heads, q_rank, config.size("kv_lora_rank"), nope, rope, config.size("v_head_dim"))


SIZES = frozenset(
    {
        "attention_bias",
        "first_k_dense_replace",
        "kv_lora_rank",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_local_experts",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "quantization_config",
        "v_head_dim",
    }
)
"""Keys that decide the tensors of every DeepSeek model."""

IGNORED = {**dict.fromkeys(_ROUTING, MATHS), "auto_map": RUNTIME, "ep_size": RUNTIME}
"""Keys that decide no tensor of any."""

FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _layers,
    shapes=SIZES | {"num_mtp_layers", "num_nextn_predict_layers"},
    ignored=IGNORED,
    neutral={
        # Other routers have no correction bias. Other rotations want the rows of q_b and kv_a in another
        # order, and the engines that read these weights do not ask.
        "moe_layer_freq": (1,),
        "rope_interleave": (True, None),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    copies={"embed_tokens.weight": "embedding", "shared_head.head.weight": "head"},
)
