"""Megatron's Mamba2 mixers, and feed-forwards without a gate.

A mixer stands in a layer of its own, whose input norm Transformer Engine fuses into ``in_proj``.

Source: megatron-core 0.16.1, ssm/mamba_mixer.py, ssm/mamba_block.py, models/mamba/mamba_layer_specs.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.dialects.megatron.gdn import check_spec
from shardweave.dialects.megatron.weight import Segments, Weight, segmented, weight_of
from shardweave.errors import GeometryError
from shardweave.models.mixers import mamba_segments
from shardweave.models.spec import Block


def mixer(block: Block, spec: str, *, stored: bool) -> Iterator[Weight]:
    """The rows of z, x, B, C and dt of a rank one after the other, and the channels of x, B and C."""
    check_spec(block, spec, stored=stored)
    if "in_bias" in block.tensors or "conv_bias" not in block.tensors:
        raise GeometryError(
            "Megatron has a place for every tensor of a mixer, and a tensor for every place",
            where=f"layers {block.layers}",
            equation=f"use_bias({'in_bias' in block.tensors}), use_conv_bias({'conv_bias' in block.tensors})",
            hint="Megatron's mixer has a bias of its convolution and none of its projections; convert to hf",
        )
    sizes = block.sizes
    heads = dict.fromkeys(("z", "x", "dt"), sizes["num_heads"]) | dict.fromkeys("BC", sizes["num_groups"])

    def cut(*, conv: bool) -> Segments:
        found = mamba_segments(block, conv=conv)
        lengths = tuple(len(dim) for dim in found.values())
        return Segments(tuple(found), lengths, tuple(heads[name] for name in found))

    for path, role, conv in (
        ("mixer.in_proj.weight", "in", False),
        ("mixer.conv1d.weight", "conv", True),
        ("mixer.conv1d.bias", "conv_bias", True),
    ):
        for weight in weight_of(block, path, role):
            yield from segmented(weight, cut(conv=conv), stored=stored)
    for role, name in (("a_log", "A_log"), ("d", "D"), ("dt_bias", "dt_bias"), ("norm", "norm.weight")):
        yield from weight_of(block, f"mixer.{name}", role, cut_dim=0)
    yield from weight_of(block, "mixer.out_proj.weight", "out", cut_dim=1)


def plain_mlp(block: Block) -> Iterator[Weight]:
    """A feed-forward without a gate."""
    yield from weight_of(block, "mlp.linear_fc1.weight", "up", cut_dim=0)
    yield from weight_of(block, "mlp.linear_fc1.bias", "up_bias", cut_dim=0)
    yield from weight_of(block, "mlp.linear_fc2.weight", "down", cut_dim=1)
    yield from weight_of(block, "mlp.linear_fc2.bias", "down_bias")
