"""Mamba2: a mixer in every layer, and nothing else.

Source: transformers, ``models/mamba2``: Mamba2Block, Mamba2Config.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim
from shardweave.models.blocks import Stack
from shardweave.models.config import MATHS, RUNTIME, Config
from shardweave.models.family import Family
from shardweave.models.mixers import Mamba, mamba_block
from shardweave.models.nemotron_h import grouped
from shardweave.models.spec import Block

_MATHS = """
    chunk_size layer_norm_epsilon time_step_floor time_step_limit time_step_max time_step_min time_step_rank
"""


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    found = Mamba(
        config.size("num_heads"),
        config.size("head_dim"),
        config.size("n_groups"),
        config.size("state_size"),
        config.size("conv_kernel"),
    )
    expand = config.size("expand", missing=2)
    if expand * stack.hidden_size != found.num_heads * found.head_dim:
        raise config.fail(
            "the heads together are the hidden size, expanded",
            f"expand({expand}) * hidden_size({stack.hidden_size}) "
            f"!= num_heads({found.num_heads}) * head_dim({found.head_dim})",
            "correct the one that is wrong, or take the config that belongs to the weights",
        )
    norm = {"input_norm": stack.each(layers, "norm.weight", stack.hidden_size)}
    yield Block("norms", layers, {"hidden_size": stack.hidden_size}, norm)
    yield mamba_block(
        stack,
        layers,
        grouped(config, found),
        bias=config.flag("use_bias"),
        conv_bias=config.flag("use_conv_bias", missing=True),
    )


FAMILY = Family(
    "mamba2",
    "Mamba2ForCausalLM",
    _layers,
    shapes=frozenset(
        {"conv_kernel", "expand", "n_groups", "num_heads", "state_size", "use_bias", "use_conv_bias"}
    ),
    ignored={
        **dict.fromkeys(_MATHS.split(), MATHS),
        **dict.fromkeys(("rescale_prenorm_residual", "residual_in_fp32"), RUNTIME),
    },
    prefix="backbone.",
    embedding="embeddings.weight",
    final="norm_f.weight",
)
