"""Weights in blocks of FP8 with one scale each, made where the weight already is: on an engine's own shard.

The recipe of DeepSeek-V3 checkpoints: in each block of 128 x 128 elements, ``scale_inv = amax / 448`` in
float32, and the stored value is ``value / scale_inv`` in e4m3. A scale depends on all elements of its block,
so a shard can be quantised on its own exactly where no block of the whole weight is cut: where it is on the
grid. Elsewhere scales of shards are not shards of scales: 258 columns have 3 blocks, and halves of 129 would
have 2 each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from shardweave.errors import DtypeError, GeometryError, OutsideError, TransformError
from shardweave.layout import PAD, Dim, on_grid, whole

E4M3_MAX = 448.0
"""The largest value of float8_e4m3fn."""
BLOCK = (128, 128)
"""Rows and columns of a block."""

_AT_ONCE = 1 << 24
"""Elements that are worked on at once; as float32, 64 MiB, a few times over."""


def quantise(
    weight: torch.Tensor,
    *,
    rows: Dim | None = None,
    columns: Dim | None = None,
    shapes: Mapping[str, tuple[int, int]] | None = None,
    block: tuple[int, int] = BLOCK,
    unaligned: str = "refuse",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-quantise a weight, a shard of one, or a fused buffer of shards.

    Deterministic: a maximum, and one correctly rounded quotient for each element and each block.

    Laws:
        The result of a shard on the grid is the shard of the result; of a fused buffer, the results of its
        parts, fused.
        ``abs(weight - values * scale_inv) <= scale_inv * max(abs(values) / 16, 2**-10)``, which is half of
        e4m3's last place, but for the rounding of the quotient.

    Args:
        weight: ``(..., rows, columns)`` in bfloat16, float16 or float32; leading dims (experts) have blocks
            of their own.
        rows: Which rows of which whole weights the buffer holds; all of one by default.
        columns: Which columns.
        shapes: The rows and columns of each whole weight, by its label in ``rows``; those of ``weight`` by
            default.
        block: Rows and columns of a block.
        unaligned: What to do where the shard cuts a block: ``refuse``, or ``local``: blocks counted from the
            shard's own corner, for engines that quantise what they hold and never join shards again.

    Returns:
        The values in float8_e4m3fn, of the weight's shape, and ``scale_inv`` in float32, ``(..., blocks of
        rows, blocks of columns)``; the last blocks are short where the size leaves a remainder. A scale is at
        least the smallest normal float32, which is also that of a block of zeros.

    Raises:
        CutError: The shard cuts a block.
        GeometryError: The block or the policy is none.
        OutsideError: The shard is not inside the whole weight, or not of the shape of ``weight``.
        DtypeError: The weight is of another dtype.
        TransformError: A value is infinite or not a number, so that its block has no scale.

    >>> values, scale_inv = quantise(torch.tensor([[-2.0, 4.0, 0.5]]), block=(1, 2))
    >>> values.float(), scale_inv * 448
    (tensor([[-224.,  448.,  448.]]), tensor([[4.0000, 0.5000]]))
    """
    _check(weight, block, unaligned)
    given = shapes or {"": (weight.shape[-2], weight.shape[-1])}
    # Columns are those of any of the weights: what is fused along rows has them in common.
    across = {"": next(iter(given.values()))[1]}
    for what, dim, sizes, held, size in (
        ("rows", rows, {label: shape[0] for label, shape in given.items()}, weight.shape[-2], block[0]),
        ("columns", columns, across, weight.shape[-1], block[1]),
    ):
        _check_shard(what, whole(sizes.get("", 0)) if dim is None else dim, sizes, held)
        if dim is not None and unaligned == "refuse":
            on_grid(dim, size, sizes)
    height, width = block
    num_rows, num_columns = weight.shape[-2:]
    scales = (*weight.shape[:-2], -(-num_rows // height), -(-num_columns // width))
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale_inv = torch.empty(scales, dtype=torch.float32, device=weight.device)
    num = math.prod(weight.shape[:-2])
    flat = (array.reshape(num, num_rows, num_columns) for array in (weight.detach(), values))
    step = max(_AT_ONCE // max(height * num_columns, 1), 1)
    for old, new, scale in zip(*flat, scale_inv.view(num, *scales[-2:]), strict=True):
        for at in range(0, scales[-2], step):
            place = slice(at * height, (at + step) * height)
            _blocks(old[place], new[place], scale[at : at + step], block)
    return values, scale_inv


def _blocks(
    weight: torch.Tensor, values: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int]
) -> None:
    """Some rows of blocks of one weight."""
    amax = torch.zeros(scale_inv.shape, dtype=torch.float32, device=weight.device)
    padded = torch.nn.functional.pad(
        weight.abs(),
        (0, amax.shape[1] * block[1] - weight.shape[1], 0, amax.shape[0] * block[0] - weight.shape[0]),
    )
    amax = padded.view(amax.shape[0], block[0], amax.shape[1], block[1]).amax(dim=(1, 3)).float()
    if not bool(torch.isfinite(amax).all()):
        at = torch.nonzero(~torch.isfinite(weight))[0].tolist()
        raise TransformError(
            "values that are quantised are finite",
            where=f"a weight of {tuple(weight.shape)} at {at}",
            equation=f"value({weight[tuple(at)].item()})",
            hint="the trainer has diverged, or the bytes are not this weight's",
        )
    scale_inv.copy_((amax / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny))
    each = scale_inv.repeat_interleave(block[0], 0)[: weight.shape[0]]
    each = each.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    values.copy_((weight.float() / each).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn))


def _check(weight: torch.Tensor, block: tuple[int, int], unaligned: str) -> None:
    if unaligned not in ("refuse", "local") or min(block) < 1:
        raise GeometryError(
            "blocks have rows and columns, and the policy for cut ones is known",
            equation=f"block{block}, unaligned({unaligned!r})",
            hint="unaligned is refuse or local",
        )
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DtypeError(
            "what is quantised is of a dtype that float32 holds",
            equation=f"dtype({str(weight.dtype).removeprefix('torch.')})",
            hint="give the weight in bfloat16, float16 or float32",
        )
    if weight.ndim < 2:
        raise OutsideError(
            "a weight that is quantised in blocks has rows and columns",
            equation=f"shape{tuple(weight.shape)}",
            hint="vectors such as norms and biases stay as they are",
        )


def _check_shard(what: str, dim: Dim, sizes: Mapping[str, int], held: int) -> None:
    known = [run for run in dim.runs if run.label is not PAD]
    outside = any(run.start < 0 or run.last >= sizes.get(run.label or "", 0) for run in known)
    if len(dim) != held or outside:
        raise OutsideError(
            "a shard holds rows and columns of the whole weights",
            where=what,
            equation=f"{dim} of {', '.join(f'{label}({n})' for label, n in sizes.items())}, held {held}",
            hint="say which rows and columns of which weights the buffer has, and their whole shapes",
        )
