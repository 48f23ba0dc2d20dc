"""Log-probabilities of labels where each rank has some columns of the vocabulary.

Forward, a rank takes the largest logit of its columns, the sum of exponentials below it, the label's logit
where it has it; these few numbers a slot are all that ranks exchange, once. Backward, it makes
``softmax - onehot`` of its columns from the logits themselves, into the gradient: the logits are kept as they
came, in no second copy, and unchanged, so that a graph can be run through again. Both go a few rows at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from shardweave.errors import PlanError
from shardweave.train.collectives import gather_parts
from shardweave.train.grid import Group
from shardweave.train.linear import vocabulary
from shardweave.train.sequence import IGNORE

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

_CPU_ELEMENTS, _DEVICE_ELEMENTS = 1 << 19, 1 << 26
"""Logits worked on at a time: what a core's cache holds, and what launches of kernels do not show in."""

_FAR = -1e4
"""No logit is taken to lie further below the largest: its exponential is 0 in any dtype, and 0 * inf is
not."""


@overload
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    tp: Group,
    vocab_size: int,
    temperature: float = ...,
    entropy: Literal[False] = ...,
) -> Tensor: ...
@overload
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    tp: Group,
    vocab_size: int,
    temperature: float = ...,
    entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    tp: Group,
    vocab_size: int,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of the label of each of this rank's own slots.

    Args:
        logits: ``(..., slots, columns)``, this rank's columns of the padded vocabulary (see ``vocabulary``);
            what padding has does not matter. fp64 is worked on in fp64, anything else in fp32.
        labels: ``(..., slots)`` int64, the same on all ranks of the group, or IGNORE.
        tp: The tensor-parallel group.
        vocab_size: Tokens that there are, without padding.
        temperature: What logits are divided by.
        entropy: Whether the entropy of each slot's distribution is wanted too.

    Returns:
        ``(..., slots / tp)``, or two of them with the entropies; 0 where the label is IGNORE. Each slot is on
        one rank of the group, so that sums over ranks count it once.

    Raises:
        PlanError: Shapes do not fit each other, the vocabulary or the group, a label is not of the
            vocabulary, or the temperature is not positive. No rank has communicated then.

    >>> alone = Group("tp", (0,), 0)
    >>> token_logprobs(torch.zeros(2, 4), torch.tensor([3, IGNORE]), tp=alone, vocab_size=4)
    tensor([-1.3863,  0.0000])
    """
    _check(logits, labels, tp, vocab_size, temperature)
    logprobs, entropies = _TokenLogprobs.apply(logits, labels, tp, vocab_size, temperature, entropy)
    return (logprobs, entropies) if entropy else logprobs


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        labels: Tensor,
        tp: Group,
        vocab_size: int,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        tokens, _ = vocabulary(vocab_size, tp=tp)
        flat, here = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1) - tokens.start
        # Rows: the largest, the sum below it, the label's logit, the entropy among these columns.
        mine = logits.new_zeros((4 if entropy else 3, len(flat)), dtype=_wide(logits))
        mine[0] = -torch.inf
        for rows, scratch in _chunks(flat, len(tokens)):
            z = _scaled(flat[rows, : len(tokens)], temperature, scratch[0])
            _look(z, here[rows], mine[:, rows], scratch[1:])
        parts = torch.stack(gather_parts(mine, group=tp))
        largest = parts[:, 0].amax(0)
        sums = (parts[:, 0] - largest).exp() * parts[:, 1]
        summed = sums.sum(0)
        shares = sums / summed
        ignored = labels.reshape(-1) == IGNORE
        found = (parts[:, 2].sum(0) - largest - summed.log()).masked_fill_(ignored, 0)
        kept, entropies = [shares[tp.rank].clone()], None
        if entropy:
            entropies = (shares * parts[:, 3] + torch.special.entr(shares)).sum(0).masked_fill_(ignored, 0)
            kept += [largest + summed.log(), entropies]
        ctx.save_for_backward(logits, labels, *kept)
        ctx.given = tp, vocab_size, temperature  # type: ignore[attr-defined]
        return _own(found, labels, tp), None if entropies is None else _own(entropies, labels, tp)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, share, *more = ctx.saved_tensors
        tp, vocab_size, temperature = ctx.given
        tokens, _ = vocabulary(vocab_size, tp=tp)
        flat, here = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1) - tokens.start
        ignored = labels.reshape(-1) == IGNORE
        own = torch.stack(grads if more else grads[:1])
        every = torch.cat(gather_parts(own, group=tp), -1).reshape(len(own), -1)
        # What slots without a label were given does not matter, even NaN.
        every = every.masked_fill_(ignored, 0) / temperature
        # Nor do their own logits, nor columns that are all -inf: 0 * NaN is not 0.
        nothing = ignored | (share == 0)

        found = torch.empty_like(flat)
        found[:, len(tokens) :] = 0
        for rows, scratch in _chunks(flat, len(tokens)):
            z = _scaled(flat[rows, : len(tokens)], temperature, scratch[0])
            into = found[rows, : len(tokens)] if found.dtype == z.dtype else scratch[1]
            torch.softmax(z, -1, out=into)
            scale = -share[rows] * every[:, rows]
            if more:
                # d(entropy)/dz = -p (log p + entropy)
                total, entropies = more
                slope = (
                    torch.sub(z, total[rows, None], out=scratch[2]).clamp_(min=_FAR).mul_(scale[1, :, None])
                )
                into.mul_(slope.add_((scale[0] + scale[1] * entropies[rows])[:, None]))
            else:
                into.mul_(scale[0, :, None])
            into.index_fill_(0, nothing[rows].nonzero()[:, 0], 0)
            at, inside = _inside(here[rows], len(tokens))
            into.scatter_add_(-1, at[:, None], every[0, rows, None].where(inside[:, None], 0))
            if found.dtype != z.dtype:
                found[rows, : len(tokens)] = into
        return found.reshape(logits.shape), None, None, None, None, None


def _look(z: Tensor, here: Tensor, into: Tensor, scratch: Tensor) -> None:
    """What a rank says of some rows, of the columns that it has."""
    into[0] = largest = z.amax(-1)
    # Columns may all be -inf here, and some elsewhere not.
    some = largest > -torch.inf
    probabilities = torch.softmax(z, -1, out=scratch[0])
    # The probability of the largest is one over the sum: torch's softmax is the fastest way to that sum.
    into[1] = summed = probabilities.amax(-1).reciprocal().where(some, 0)
    at, inside = _inside(here, z.shape[-1])
    into[2] = z.gather(-1, at[:, None])[:, 0].where(inside, 0)
    if len(into) == 4:
        below = torch.sub(z, largest[:, None], out=scratch[1]).clamp_(min=_FAR)
        into[3] = (summed.log() - below.mul_(probabilities).sum(-1)).where(some, 0)


def _inside(here: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """For labels counted from a rank's first column: a column that it has, and whether it is the label's."""
    inside = (here >= 0) & (here < columns)
    return here.where(inside, 0), inside


def _scaled(logits: Tensor, temperature: float, scratch: Tensor) -> Tensor:
    """Logits over the temperature in the dtype of the work; themselves where that is what they are."""
    if logits.dtype == scratch.dtype and temperature == 1:
        return logits
    # Copied first: a division into a wider tensor is rounded to the dtype of the logits before.
    wide = scratch.copy_(logits)
    return wide if temperature == 1 else wide.div_(temperature)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _own(values: Tensor, labels: Tensor, tp: Group) -> Tensor:
    """This rank's part of the slots. A tensor of its own: views of a longer one would keep that alive."""
    width = labels.shape[-1] // tp.size
    return values.reshape(labels.shape).narrow(-1, tp.rank * width, width).clone()


def _chunks(flat: Tensor, columns: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows to work on at a time, with room for three tensors of their shape, the same for all of them."""
    if not columns or not len(flat):
        return
    most = _CPU_ELEMENTS if flat.device.type == "cpu" else _DEVICE_ELEMENTS
    rows = min(max(1, most // columns), len(flat))
    room = flat.new_empty((3, rows, columns), dtype=_wide(flat))
    for start in range(0, len(flat), rows):
        yield slice(start, start + rows), room[:, : len(flat) - start]


def _check(logits: Tensor, labels: Tensor, tp: Group, vocab_size: int, temperature: float) -> None:
    where = f"rank {tp.global_rank(tp.rank)}, group {tp.name} of {tp.size}"
    _, columns = vocabulary(vocab_size, tp=tp)
    if logits.dim() < 2 or logits.shape[:-1] != labels.shape:
        raise PlanError(
            "there is a label for each slot that has logits",
            where=f"token_logprobs, {where}",
            equation=f"logits{tuple(logits.shape)}[:-1] != labels{tuple(labels.shape)}",
            hint="slice labels with the SequenceLayout of the microbatch: local(cp_rank), not cut over tp",
        )
    if logits.shape[-1] != columns:
        raise PlanError(
            "a rank has logits of its even part of the padded vocabulary",
            where=f"token_logprobs, {where}",
            equation=f"columns({logits.shape[-1]}) != ceil(vocab({vocab_size}) / tp({tp.size})) = {columns}",
            hint="do not gather logits; pad the vocabulary to a multiple of tp and cut it evenly",
        )
    if labels.shape[-1] % tp.size:
        raise PlanError(
            "a context rank's slots are cut evenly over the tensor-parallel group",
            where=f"token_logprobs, {where}",
            equation=f"slots({labels.shape[-1]}) % tp({tp.size}) != 0",
            hint="slice with the SequenceLayout of the microbatch, which pads to a multiple",
        )
    if not temperature > 0:
        raise PlanError(
            "logits are divided by a positive temperature",
            where=f"token_logprobs, {where}",
            equation=f"temperature({temperature}) <= 0",
            hint="use 1 for the model's own distribution",
        )
    wrong = (labels != IGNORE) & ((labels < 0) | (labels >= vocab_size))
    if bool(wrong.any()):
        raise PlanError(
            "a label is of the vocabulary, or IGNORE",
            where=f"token_logprobs, {where}",
            equation=f"label({int(labels[wrong][0])}) not in 0..{vocab_size - 1}, not IGNORE({IGNORE})",
            hint="use the tokenizer of the model, and IGNORE where there is no target",
        )
