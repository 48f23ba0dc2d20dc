"""Microbatches: the tokens of some documents, and each rank's part of them.

What comes in is whole and unshifted. Labels are shifted here, once, on the documents as they are; what a rank
gets is then cut by the ``SequenceLayout``, ids, labels, masks and positions alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardweave.errors import PlanError
from shardweave.train.sequence import IGNORE, SequenceLayout


@dataclass(frozen=True)
class Microbatch:
    """Some documents, the same on all ranks that work on them.

    Attributes:
        layout: Where their tokens are.
        ids: Token ids of the real tokens, (num_tokens,), one document after the other.
        mask: Whether each token counts as a target, (num_tokens,); the first of a document never does.
        numbers: The number of each document in the run. Randomness is taken by it, so that it is the same
            wherever the document is computed.
        extras: Further values of each token by name, (num_tokens,): advantages, old log-probabilities. They
            belong to the token as a target, as the mask does.
    """

    layout: SequenceLayout
    ids: Tensor
    mask: Tensor
    numbers: tuple[int, ...] = ()
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = (self.layout.num_tokens,)
        values = {"ids": self.ids, "mask": self.mask, **self.extras}
        wrong = {name: tuple(value.shape) for name, value in values.items() if tuple(value.shape) != wanted}
        if wrong or len(self.numbers) not in (0, len(self.layout.lengths)):
            raise PlanError(
                "a microbatch has one value for each real token, and one number for each document",
                where=f"microbatch, {self.layout}",
                equation=", ".join(f"{name}{shape} != {wanted}" for name, shape in wrong.items())
                or f"numbers({len(self.numbers)}) != documents({len(self.layout.lengths)})",
                hint="leave padding out: the layout adds what its degrees ask for",
            )
        if not self.numbers:
            object.__setattr__(self, "numbers", tuple(range(len(self.layout.lengths))))

    @property
    def count(self) -> int:
        """The targets that count: what a loss of tokens is divided by, over all microbatches and ranks."""
        return int(self.layout.shifted(self.mask, fill=False).sum())


@dataclass(frozen=True)
class Local:
    """A rank's part of a microbatch; every value has the shape of the part.

    Attributes:
        layout: The layout of the whole.
        cp_rank: The rank on the context axis.
        ids: Token ids, 0 on padding; of a look ahead those of the token that is looked at, 0 past the end.
        labels: The next token of the document, ``IGNORE`` at its end and on padding.
        mask: Whether the label counts.
        positions: The position in the document.
        is_real: Whether the slot is a token; of a look ahead, one that has a label.
        slots: The number of the slot in the whole batch.
        documents: The place of the slot's document in the microbatch.
        extras: Further values of the label.
    """

    layout: SequenceLayout
    cp_rank: int
    ids: Tensor
    labels: Tensor
    mask: Tensor
    positions: Tensor
    is_real: Tensor
    slots: Tensor
    documents: Tensor
    extras: Mapping[str, Tensor]


def local(batch: Microbatch, cp_rank: int, tp_rank: int | None = None, *, ahead: int = 0) -> Local:
    """A rank's part of a microbatch.

    Args:
        batch: The whole.
        cp_rank: The rank on the context axis.
        tp_rank: The rank on the axis of sequence parallelism; ``None`` for what they hold together.
        ahead: How many tokens further on slots look, for heads that predict further tokens: ids are those so
            far on, labels and what belongs to them one further.
    """
    layout = batch.layout

    def part(tokens: Tensor, fill: float, by: int) -> Tensor:
        values = layout.shifted(tokens, by, fill=fill) if by else tokens
        found: Tensor = layout.local(layout.place(values, fill=fill), cp_rank, tp_rank)
        return found

    def slots(values: object) -> Tensor:
        found = layout.local(values, cp_rank, tp_rank)
        return torch.from_numpy(found).to(batch.ids.device)

    labels = part(batch.ids, IGNORE, ahead + 1)
    return Local(
        layout=layout,
        cp_rank=cp_rank,
        ids=part(batch.ids, 0, ahead),
        labels=labels,
        mask=part(batch.mask, False, ahead + 1),
        positions=slots(layout.positions),
        is_real=labels != IGNORE if ahead else slots(layout.is_real),
        slots=torch.from_numpy(layout.slots(cp_rank, tp_rank)).to(batch.ids.device),
        documents=slots(layout.documents),
        extras={name: part(value, 0, ahead + 1) for name, value in batch.extras.items()},
    )


def microbatch(
    documents: Sequence[Tensor],
    masks: Sequence[Tensor] | None = None,
    *,
    form: str = "thd",
    cp: int = 1,
    tp: int = 1,
    order: str = "zigzag",
    numbers: Sequence[int] = (),
    extras: Mapping[str, Sequence[Tensor]] | None = None,
) -> Microbatch:
    """A microbatch of documents.

    Args:
        documents: The token ids of each, (length,), int64.
        masks: Which tokens of each count as targets; all by default.
        form: See ``SequenceLayout``, as are ``cp``, ``tp`` and ``order``.
        cp: Context ranks.
        tp: Tensor ranks.
        order: Order of the parts.
        numbers: The number of each document in the run.
        extras: Further values by name, as lists like ``documents``.

    >>> batch = microbatch([torch.arange(5), torch.arange(9)], cp=2)
    >>> batch.count, local(batch, 0).labels.tolist()
    (12, [1, 2, -100, -100, 1, 2, 3, -100, -100, -100])
    """
    layout = SequenceLayout(tuple(len(ids) for ids in documents), form, cp, tp, order)
    kept = [torch.ones(len(ids), dtype=torch.bool) for ids in documents] if masks is None else masks

    def joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.cat(list(parts)) if len(parts) else torch.zeros(0, dtype=dtype)

    return Microbatch(
        layout,
        joined(documents, torch.int64),
        joined(kept, torch.bool),
        tuple(numbers),
        {name: joined(parts, torch.float32) for name, parts in (extras or {}).items()},
    )
