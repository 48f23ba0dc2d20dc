"""The dense pieces of a layer on one rank of a tensor-parallel group: plain functions of tensors and a group.

Between blocks each rank has its own slots of the sequence, ``(..., slots / tp, H)``: dim -2 is cut. A column
linear gathers them and has some of the output features of all slots; a row linear takes those, sums over
ranks and leaves each its own slots again. With a group of one rank every function is the plain one of torch.

All backwards are exact adjoints (see ``collectives``), so that the gradient of an element of a weight is the
sum over the ranks that hold it: nothing to add for weights that are cut, a sum over ``tp`` for those that
each rank has whole (norms, the bias of a row linear), since each rank saw its own slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardweave.errors import PlanError
from shardweave.train.collectives import gather, reduce_scatter
from shardweave.train.grid import Group


def vocabulary(vocab_size: int, *, tp: Group) -> tuple[range, int]:
    """The tokens of a rank, and how many rows it has for them, padding included.

    The vocabulary is padded to a multiple of the ranks and cut evenly; padding comes last, and a rank may
    have nothing else.

    >>> vocabulary(5, tp=Group("tp", (0, 1, 2, 3), 2))
    (range(4, 5), 2)
    >>> vocabulary(5, tp=Group("tp", (0, 1, 2, 3), 3))
    (range(5, 5), 2)
    """
    rows = -(-vocab_size // tp.size)
    start = min(rows * tp.rank, vocab_size)
    return range(start, min(start + rows, vocab_size)), rows


def embed(ids: Tensor, weight: Tensor, *, tp: Group, vocab_size: int) -> Tensor:
    """The embeddings of tokens, cut over the sequence.

    Args:
        ids: ``(..., slots)``, the same on all ranks of the group; padding holds any token.
        weight: ``(rows, H)``, this rank's part of the padded vocabulary, see ``vocabulary``.
        tp: The tensor-parallel group.
        vocab_size: Tokens that there are, without padding.

    Returns:
        ``(..., slots / tp, H)``, this rank's slots. The bits do not depend on ``tp``.

    Raises:
        PlanError: A token is not of the vocabulary, the weight is no part of it, or the slots do not divide.
    """
    tokens, rows = vocabulary(vocab_size, tp=tp)
    where = _where(tp)
    if weight.dim() != 2 or weight.shape[0] != rows:
        raise PlanError(
            "a rank has its even part of the padded vocabulary",
            where=f"embedding, {where}",
            equation=f"shape{tuple(weight.shape)}[0] != ceil(vocab({vocab_size}) / tp({tp.size})) = {rows}",
            hint="pad the vocabulary to a multiple of tp and cut it evenly",
        )
    _check_divides(ids.shape[-1] if ids.dim() else 0, tp, "ids")
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        raise PlanError(
            "a token is of the vocabulary",
            where=f"ids, {where}",
            equation=f"ids {int(ids.min())}..{int(ids.max())} not in 0..{vocab_size - 1}",
            hint="use the tokenizer of the model; padding holds a real token, labels alone have IGNORE",
        )
    if tp.size == 1:
        return F.embedding(ids, weight)
    here = ids - tokens.start
    inside = (here >= 0) & (here < len(tokens))
    found = F.embedding(here.where(inside, 0), weight)
    return reduce_scatter(found.where(inside[..., None], 0), -2, group=tp)


def columns(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, *, tp: Group
) -> tuple[Tensor, ...]:
    """Several column linears of one input, for which the sequence is gathered once.

    Args:
        x: ``(..., slots / tp, H)``, this rank's slots.
        weights: ``(features, H)`` each, this rank's rows.
        biases: ``(features,)`` each, this rank's part, or ``None``.
        tp: The tensor-parallel group.

    Returns:
        ``(..., slots, features)`` for each weight.

    Raises:
        PlanError: A weight is not for features of this size, or there is not one bias for each.
    """
    for weight in weights:
        _check_features(x, weight, tp, "column linear")
    if biases is not None and len(biases) != len(weights):
        raise PlanError(
            "each weight has a bias or None",
            where=f"column linear, {_where(tp)}",
            equation=f"biases({len(biases)}) != weights({len(weights)})",
            hint="give one for each weight, or none at all",
        )
    whole = gather(x, -2, group=tp)
    return tuple(
        F.linear(whole, weight, bias)
        for weight, bias in zip(weights, biases or (None,) * len(weights), strict=True)
    )


def column(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tp: Group) -> Tensor:
    """A linear whose output features are cut: ``(..., slots / tp, H)`` to ``(..., slots, features)``.

    Raises:
        PlanError: The weight is not for features of this size.
    """
    return columns(x, (weight,), (bias,), tp=tp)[0]


def row(y: Tensor, weight: Tensor, bias: Tensor | None = None, *, tp: Group) -> Tensor:
    """A linear whose input features are cut, and its output over the sequence.

    Args:
        y: ``(..., slots, features)``, this rank's features of all slots.
        weight: ``(H, features)``, this rank's columns.
        bias: ``(H,)``, whole on each rank; added once, to the slots of each rank after the sum.
        tp: The tensor-parallel group.

    Returns:
        ``(..., slots / tp, H)``, this rank's slots.

    Raises:
        PlanError: The weight is not for features of this size, or the slots do not divide.
    """
    _check_features(y, weight, tp, "row linear")
    if tp.size == 1:
        return F.linear(y, weight, bias)
    _check_divides(y.shape[-2], tp, "row linear")
    found = reduce_scatter(F.linear(y, weight), -2, group=tp)
    return found if bias is None else found + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The root-mean-square norm over the last dim, to the bit as transformers has it.

    In fp32 for anything shorter; rounded back before the weight multiplies. fp64 stays.

    Args:
        x: ``(..., H)``.
        weight: ``(H,)``.
        eps: Added to the mean square.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return F.silu(gate) * up


# --- contracts ----------------------------------------------------------------------------------


def _where(tp: Group) -> str:
    return f"rank {tp.global_rank(tp.rank)}, group {tp.name} of {tp.size}"


def _check_features(x: Tensor, weight: Tensor, tp: Group, what: str) -> None:
    if x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise PlanError(
            "a weight is for as many features as its input has",
            where=f"{what}, {_where(tp)}",
            equation=f"input{tuple(x.shape)}[-1] != weight{tuple(weight.shape)}[1]",
            hint="give (..., slots, features) and (out, features), both of this rank",
        )


def _check_divides(slots: int, tp: Group, what: str) -> None:
    if slots % tp.size:
        raise PlanError(
            "a context rank's slots are cut evenly over the tensor-parallel group",
            where=f"{what}, {_where(tp)}",
            equation=f"slots({slots}) % tp({tp.size}) != 0",
            hint="slice with the SequenceLayout of the microbatch, which pads to a multiple",
        )
