"""A gated feed-forward whose gate and up are one tensor, as Phi-3 and ChatGLM store it."""

from __future__ import annotations

from shardweave.layout import Dim
from shardweave.models.blocks import Stack
from shardweave.models.spec import Block


def gate_up_block(
    stack: Stack, layers: Dim, ffn_size: int, *, gate_up: str, down: str, bias: bool = False
) -> Block:
    """A gated feed-forward: the rows of ``gate_up`` are the gate's, then those of up.

    The gate is the half that goes through the activation.

    Args:
        stack: The decoder.
        layers: Its layers that have one.
        ffn_size: Rows of the gate, and of up.
        gate_up: The name of the fused projection in a layer ("mlp.gate_up_proj").
        down: The name of the projection back.
        bias: Whether both have a bias.
    """
    hidden = stack.hidden_size
    tensors = {
        "gate_up": stack.each(layers, f"{gate_up}.weight", 2 * ffn_size, hidden),
        "down": stack.each(layers, f"{down}.weight", hidden, ffn_size),
    }
    if bias:
        tensors["gate_up_bias"] = stack.each(layers, f"{gate_up}.bias", 2 * ffn_size)
        tensors["down_bias"] = stack.each(layers, f"{down}.bias", hidden)
    return Block("gate_up_mlp", layers, {"ffn_size": ffn_size, "hidden_size": hidden}, tensors)
