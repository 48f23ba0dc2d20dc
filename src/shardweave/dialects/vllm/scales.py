"""Block scales of a vLLM rank: they are cut as their weights are, or the cut is refused.

Source: vllm 0.32.0, layers/quantization/fp8.py and utils/fp8_utils.py: ``weight_scale_inv`` beside
``weight``, ``w13_weight_scale_inv`` beside ``w13_weight``; other shares than whole blocks are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardweave.errors import CutError, GeometryError
from shardweave.layout import BufferRule, Dim, Part, Sharded, Tensor, on_grid
from shardweave.models import Block
from shardweave.models.spec import SCALE

Scales = Mapping[Tensor, Tensor]
"""The scales of each weight that has them."""


def apart(block: Block) -> tuple[Block, Scales]:
    """A block without its scales, and these by weight."""
    weights = {role: tensor for role, tensor in block.tensors.items() if not role.endswith(SCALE)}
    scales = {
        tensor: block.tensors[role + SCALE]
        for role, tensor in weights.items()
        if role + SCALE in block.tensors
    }
    return (replace(block, tensors=weights), scales) if scales else (block, scales)


def follow(rule: BufferRule, scales: Scales, block: Block) -> tuple[BufferRule, ...]:
    """The buffer of weights with scales, and that of their scales; alone where there are none.

    Raises:
        GeometryError: The weights are not cut along blocks.
    """
    if rule.parts[0].tensor not in scales:
        return (rule,)
    first = len(rule.index)
    dims = list(rule.dims[:first])
    for d, key in enumerate(("scale_rows", "scale_columns")):
        sizes = {part.label: part.tensor.shape[d] for part in rule.parts}
        sizes[""] = rule.parts[0].tensor.shape[d]
        dims.append(_blocks(rule, rule.dims[first + d], block.sizes[key], sizes))
    parts = tuple(Part(scales[part.tensor], part.label, part.replica) for part in rule.parts)
    return (
        replace(rule, dtype=rule.parts[0].tensor.dtype),
        replace(
            rule, name=rule.name + "_scale_inv", parts=parts, dims=tuple(dims), dtype=parts[0].tensor.dtype
        ),
    )


def _blocks(rule: BufferRule, dim: Dim | Sharded, block: int, sizes: Mapping[str, int]) -> Dim | Sharded:
    try:
        if isinstance(dim, Dim):
            return on_grid(dim, block, sizes)
        return Sharded(dim.axes, tuple(on_grid(one, block, sizes) for one in dim.dims))
    except CutError as error:
        raise GeometryError(
            error.rule,
            where=f"buffer {rule.name!r}, {error.where}",
            equation=error.equation,
            hint="choose degrees whose shares are multiples of the block, or whole experts, as vLLM asks",
        ) from error
