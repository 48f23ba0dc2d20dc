"""Nemotron-H: every layer is one thing, behind one norm: a Mamba2 mixer, attention, or a feed-forward.

Source: transformers, ``models/nemotron_h``: NemotronHBlock, NemotronHConfig; ``conversion_mapping`` for the
names in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardweave.layout import Dim
from shardweave.models.blocks import Stack, alike, attention_block, heads
from shardweave.models.config import MATHS, RUNTIME, Config
from shardweave.models.family import Family
from shardweave.models.mixers import Mamba, mamba_block, plain_mlp_block
from shardweave.models.spec import Block

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
_OLD_WORDS = {"mamba": "linear_attention", "attention": "full_attention"}
_RUNTIME = """
    mamba_ssm_cache_dtype moe_shared_expert_overlap num_logits_to_keep rescale_prenorm_residual
    residual_in_fp32 use_mamba_kernels
"""
_MATHS = """
    chunk_size expand hidden_dropout layer_norm_epsilon mamba_hidden_act mlp_hidden_act n_group
    norm_eps norm_topk_prob num_experts_per_tok routed_scaling_factor sliding_window time_step_floor
    time_step_limit time_step_max time_step_min topk_group
"""
# Sizes of experts and of layers for further tokens, which every config has; their layers are refused where
# there are some.
_UNUSED = """
    moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size mtp_hybrid_override_pattern
    mtp_layers_block_type n_routed_experts n_shared_experts
"""


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    for kind, held in alike(_kinds(config)).items():
        # A norm before what mixes tokens, or before what does not.
        role = "post_attention_norm" if kind == "mlp" else "input_norm"
        norm = {role: stack.each(held, "norm.weight", stack.hidden_size)}
        yield Block("norms", held, {"hidden_size": stack.hidden_size}, norm)
        if kind == "linear_attention":
            yield mamba_block(
                stack,
                held,
                _mamba(config),
                bias=config.flag("use_bias"),
                conv_bias=config.flag("use_conv_bias", missing=True),
            )
        elif kind == "full_attention":
            yield _named_mixer(attention_block(stack, held, heads(config, stack.hidden_size, head_dim=128)))
        else:
            size, bias = config.size("intermediate_size"), config.flag("mlp_bias")
            yield plain_mlp_block(stack, held, size, bias=bias, module="mixer")


def _named_mixer(block: Block) -> Block:
    """The same block under the one name that all layers give to what they do."""
    renamed = {
        role: replace(tensor, name=tensor.name.replace(".self_attn.", ".mixer."))
        for role, tensor in block.tensors.items()
    }
    return replace(block, tensors=renamed)


def _kinds(config: Config) -> Sequence[str]:
    """What each layer is, from a pattern of letters or a list of words."""
    pattern, words = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    kinds: list[str] = []
    if isinstance(words, Sequence):
        kinds = [_OLD_WORDS.get(str(word), str(word)) for word in words]
    if isinstance(pattern, str):
        spelled = [_LETTERS.get(letter, letter) for letter in pattern]
        if kinds and spelled != kinds:
            raise config.fail(
                "two spellings of one thing agree",
                f"hybrid_override_pattern={pattern!r:.60} != layers_block_type={words!r:.60}",
                "keep the one that is right",
            )
        kinds = spelled
    unknown = sorted(set(kinds) - set(_LETTERS.values()))
    if unknown or not kinds or config.get("num_hidden_layers") not in (None, len(kinds)):
        raise config.fail(
            f"every layer is {', '.join(f'{letter} ({word})' for letter, word in _LETTERS.items())}",
            f"{len(kinds)} layers with unknown({', '.join(map(repr, unknown))}), "
            f"num_hidden_layers({config.get('num_hidden_layers')})",
            "give hybrid_override_pattern, one letter a layer; layers of experts are not described here",
        )
    return kinds


def _mamba(config: Config) -> Mamba:
    found = Mamba(
        config.size("mamba_num_heads"),
        config.size("mamba_head_dim"),
        config.size(config.spelled("n_groups", "mamba_n_groups")),
        config.size("ssm_state_size"),
        config.size(config.spelled("conv_kernel", "mamba_d_conv")),
    )
    return grouped(config, found)


def grouped(config: Config, found: Mamba) -> Mamba:
    """The sizes of a mixer, if its heads fall into equal groups, one for each B and C."""
    if found.num_heads % found.num_groups:
        raise config.fail(
            "heads fall into equal groups that share B and C",
            f"heads({found.num_heads}) % groups({found.num_groups}) "
            f"= {found.num_heads % found.num_groups} != 0",
            "correct the one that is wrong, or take the config that belongs to the weights",
        )
    return found


_REASONS: Mapping[str, str] = {
    key: reason
    for keys, reason in (
        (_RUNTIME, RUNTIME),
        (_MATHS, MATHS),
        (_UNUSED, "belongs to layers that are refused"),
    )
    for key in keys.split()
}

FAMILY = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    _layers,
    shapes=frozenset(
        {
            "conv_kernel",
            "hybrid_override_pattern",
            "layers_block_type",
            "mamba_d_conv",
            "mamba_head_dim",
            "mamba_n_groups",
            "mamba_num_heads",
            "mlp_bias",
            "n_groups",
            "ssm_state_size",
            "use_bias",
            "use_conv_bias",
        }
    ),
    ignored={**_REASONS, "auto_map": RUNTIME},
    # transformers takes these keys, and builds neither biases nor a tied head.
    neutral={"attention_bias": (False,), "mamba_proj_bias": (False,), "tie_word_embeddings": (False,)},
    num_layers=lambda config: len(_kinds(config)),
    prefix="backbone.",
    embedding="embeddings.weight",
    final="norm_f.weight",
)
