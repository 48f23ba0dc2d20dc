"""Where the tokens of a microbatch are: one object, made once from real lengths, that all else is read from.

Tokens are cut along the sequence over two axes: context parallelism (``cp``) cuts each document into parts,
and sequence parallelism (``tp``) cuts what a context rank holds once more. Documents are padded, so that
both divide, and cut each on its own. Rows of a batch (``bshd``) are documents that are padded to one length;
a packed row (``thd``) is documents one after the other.

A *slot* is a place of the padded batch, a *token* one that is real. Real and padded boundaries are two
different things here and have two names (``lengths``, ``padded``); nothing divides one to get the other.

>>> batch = SequenceLayout((5, 9), form="thd", cp=2)
>>> batch.padded, batch.shape
((8, 12), (20,))
>>> print(batch.dim(0))
[0:2] [6:11] [17:20]
>>> batch.slots(1)
array([ 2,  3,  4,  5, 11, 12, 13, 14, 15, 16])
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import GeometryError, PlanError
from shardweave.layout import Dim, Run, concat, even, take
from shardweave.layout.table import Ints

IGNORE = -100
"""The label of a slot that no loss is taken of."""


@dataclass(frozen=True)
class SequenceLayout:
    """The layout of one microbatch on the sequence axes; the same on all ranks.

    Attributes:
        lengths: Real tokens of each document; of each row in ``bshd``.
        form: ``"bshd"``, rows of one padded length, or ``"thd"``, documents in one row.
        cp: Ranks that a document is cut over.
        tp: Ranks that each of these parts is cut over once more, as between the blocks of a layer.
        order: ``"zigzag"``, where a rank holds a part from the front and its mirror image from the back so
            that causal work is balanced, or ``"contiguous"``.
        causal: Whether a token sees none that comes later; without, it sees its whole document, which is for
            packed rows only: nothing else keeps tokens from the padding of theirs. There may be none then, as
            of images.

    Laws:
        The slots of all ranks are all slots, each once.
        ``join`` of what ``local`` gave every rank is what it was given.
        A batch of rows is the packed row of the same documents wherever all have one length.
    """

    lengths: tuple[int, ...]
    form: str = "bshd"
    cp: int = 1
    tp: int = 1
    order: str = "zigzag"
    causal: bool = True

    def __post_init__(self) -> None:
        least = -1 if self.causal else 0  # a rank may have no images, but a decoder has documents
        known = self.form in ("bshd", "thd") and self.order in ("zigzag", "contiguous")
        if not known or min(self.cp, self.tp) < 1 or min(self.lengths, default=least) < 0:
            raise GeometryError(
                "a sequence layout has documents, a known form and order, and positive degrees",
                where=f"lengths{self.lengths}",
                equation=f"form({self.form!r}), order({self.order!r}), cp({self.cp}), tp({self.tp})",
                hint="use form 'bshd' or 'thd', order 'zigzag' or 'contiguous', and one length a document",
            )
        if not self.causal and self.form != "thd":
            raise GeometryError(
                "documents of which every token sees all are packed",
                where=f"lengths{self.lengths}",
                equation=f"form({self.form!r}), causal({self.causal})",
                hint="use form 'thd': the padding of rows lies behind what a causal mask lets tokens see",
            )

    # --- sizes ---

    @property
    def multiple(self) -> int:
        """What each padded length is a multiple of: two parts a rank where the order is a zigzag."""
        return self.tp * self._parts

    @property
    def _parts(self) -> int:
        return 2 * self.cp if self.cp > 1 and self.order == "zigzag" else self.cp

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """Slots of each document; all alike in ``bshd``."""
        up = [-(-length // self.multiple) * self.multiple for length in self.lengths]
        return (max(up),) * len(up) if self.form == "bshd" else tuple(up)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole padded batch: (rows, slots), or (slots,) where it is packed."""
        return (len(self.padded), self.padded[0]) if self.form == "bshd" else (sum(self.padded),)

    def local_shape(self, *, split_tp: bool = False) -> tuple[int, ...]:
        """The shape of a rank's part: its last dim over ``cp``, and over ``tp`` too where that is said."""
        *rows, slots = self.shape
        return (*rows, slots // (self.cp * (self.tp if split_tp else 1)))

    @property
    def num_tokens(self) -> int:
        """Real tokens in all."""
        return sum(self.lengths)

    # --- who has what ---

    def dim(self, cp_rank: int, tp_rank: int | None = None) -> Dim:
        """The slots of a rank as a dim: of each row in ``bshd``, of the whole row in ``thd``.

        Args:
            cp_rank: The rank on the context axis.
            tp_rank: The rank on the sequence-parallel axis; ``None`` for what they hold together.
        """
        documents = self.padded[:1] if self.form == "bshd" else self.padded
        dims, start = [], 0
        for slots in documents:
            document = Dim((Run("", start, slots),)) if slots else Dim()
            dims.append(self._part(document, cp_rank))
            start += slots
        mine = concat(*dims)
        return mine if tp_rank is None else even(mine, self.tp, tp_rank)

    def _part(self, document: Dim, cp_rank: int) -> Dim:
        """One document's part on a context rank."""
        if not 0 <= cp_rank < self.cp:
            raise GeometryError(
                "a rank lies on its axis",
                equation=f"cp_rank({cp_rank}) is not in 0..{self.cp - 1}",
                hint="give the rank in the context group, not the global one",
            )
        if self._parts == self.cp or not len(document):
            return even(document, self.cp, cp_rank)
        return take(document, (cp_rank, self._parts - 1 - cp_rank), len(document) // self._parts)

    def slots(self, cp_rank: int, tp_rank: int | None = None) -> Ints:
        """The slots of a rank as numbers of the whole batch counted through, in the shape of its part."""
        row = np.array([slot for _, slot in self.dim(cp_rank, tp_rank)], dtype=np.int64)
        if self.form == "thd":
            return row
        return row + np.arange(len(self.padded), dtype=np.int64)[:, None] * self.padded[0]

    @cached_property
    def documents(self) -> Ints:
        """The document of each slot, in the shape of the batch."""
        return np.repeat(np.arange(len(self.padded), dtype=np.int64), self.padded).reshape(self.shape)

    @cached_property
    def positions(self) -> Ints:
        """The position of each slot in its document, padding counted on; what positional encodings use."""
        found = [np.arange(slots, dtype=np.int64) for slots in self.padded]
        return (np.concatenate(found) if found else np.zeros(0, dtype=np.int64)).reshape(self.shape)

    @cached_property
    def is_real(self) -> NDArray[np.bool_]:
        """Whether each slot is a token, in the shape of the batch."""
        return self.positions < np.array([*self.lengths, 0], dtype=np.int64)[self.documents]

    @cached_property
    def tokens(self) -> Ints:
        """The slot of each token, in order of the documents."""
        return np.flatnonzero(self.is_real.reshape(-1))

    # --- values of tokens ---

    def place(self, values: Any, *, fill: Any = 0) -> Any:
        """Values of the real tokens, ``(num_tokens, ...)``, in the shape of the padded batch.

        Args:
            values: A numpy array or a torch tensor.
            fill: What padding holds.
        """
        self._check(tuple(values.shape[:1]), (self.num_tokens,), "values of the real tokens")
        found = _full(values, (int(np.prod(self.shape)), *values.shape[1:]), fill)
        found[_index(values, self.tokens)] = values
        return found.reshape(*self.shape, *values.shape[1:])

    def real(self, batch: Any) -> Any:
        """The values of the real tokens of a padded batch. Law: ``real(place(v)) == v``."""
        dims = len(self.shape)
        self._check(tuple(batch.shape[:dims]), self.shape, "a padded batch")
        return batch.reshape(-1, *batch.shape[dims:])[_index(batch, self.tokens)]

    def local(self, batch: Any, cp_rank: int, tp_rank: int | None = None) -> Any:
        """A rank's part of a padded batch; further dims follow along."""
        dims = len(self.shape)
        self._check(tuple(batch.shape[:dims]), self.shape, "a padded batch")
        return batch.reshape(-1, *batch.shape[dims:])[_index(batch, self.slots(cp_rank, tp_rank))]

    def join(self, parts: Sequence[Any], *, split_tp: bool = False) -> Any:
        """A padded batch from the parts of all ranks.

        Args:
            parts: One for each context rank; with ``split_tp`` one for each of both axes, ``tp`` fastest.
            split_tp: Whether they are cut over ``tp`` too.
        """
        ranks = [(c, t) for c in range(self.cp) for t in (range(self.tp) if split_tp else (None,))]
        if len(parts) != len(ranks):
            raise GeometryError(
                "a batch is joined from the parts of all ranks",
                equation=f"parts({len(parts)}) != ranks({len(ranks)})",
                hint="gather over the context group, and over the tp group where sequences are cut over it",
            )
        dims, shape = len(self.shape), self.local_shape(split_tp=split_tp)
        found = _full(parts[0], (int(np.prod(self.shape)), *parts[0].shape[dims:]), 0)
        for part, (cp_rank, tp_rank) in zip(parts, ranks, strict=True):
            self._check(tuple(part.shape[:dims]), shape, f"the part of cp_rank {cp_rank}, tp_rank {tp_rank}")
            found[_index(part, self.slots(cp_rank, tp_rank))] = part
        return found.reshape(*self.shape, *parts[0].shape[dims:])

    def shifted(self, values: Any, by: int = 1, *, fill: Any = IGNORE) -> Any:
        """For each token what the token ``by`` further on in its document has; ``fill`` past its end.

        On the real tokens of the whole batch, so that no part of a rank and no document's end is crossed.
        With 1 these are the labels of the next token, with ``k + 1`` those of a head that looks ``k`` on.

        Args:
            values: ``(num_tokens, ...)``, a numpy array or a torch tensor.
            by: How many tokens further on.
            fill: What tokens have that are too near to the end.
        """
        self._check(tuple(values.shape[:1]), (self.num_tokens,), "values of the real tokens")
        found, start = _full(values, tuple(values.shape), fill), 0
        for length in self.lengths:
            if length > by:
                found[start : start + length - by] = values[start + by : start + length]
            start += length
        return found

    # --- attention ---

    def sees(self, queries: Ints, keys: Ints, *, window: int | None = None) -> NDArray[np.bool_]:
        """Whether slots see others: of their own document, real, and where causal not later than they are.

        Args:
            queries: Slots, ``(q,)``; a slot of padding sees itself only, so that no row is empty.
            keys: Slots, ``(k,)``.
            window: How many tokens back a token sees, itself included; all by default.

        Returns:
            A mask ``(q, k)``.
        """
        document, position, real = (a.reshape(-1) for a in (self.documents, self.positions, self.is_real))
        back = position[queries][:, None] - position[keys][None]
        mask = (document[queries][:, None] == document[keys][None]) & ((back >= 0) | (not self.causal))
        mask &= real[queries][:, None] & real[keys][None]
        if window is not None:
            mask &= back < window
        seen: NDArray[np.bool_] = mask | (queries[:, None] == keys[None])
        return seen

    def work(self, cp_rank: int) -> int:
        """Pairs of a token and one that it sees, of the tokens of a context rank."""
        slots = self.slots(cp_rank).reshape(-1)
        real = self.is_real.reshape(-1)[slots]
        if self.causal:
            return int((self.positions.reshape(-1)[slots] + 1)[real].sum())
        lengths = np.array([*self.lengths, 0], dtype=np.int64)
        return int(lengths[self.documents.reshape(-1)[slots]][real].sum())

    def to_order(self, order: str) -> tuple[SequenceLayout, Ints]:
        """The same batch in another order, and where its slots are in the parts of all ranks of this one.

        Law: with ``flat`` the parts of all context ranks one after the other, ``flat[moves]`` are those of
        the other layout, one after the other. Both need lengths that both can cut.
        """
        other = replace(self, order=order)
        if other.padded != self.padded:
            raise PlanError(
                "two orders of a batch have the same slots",
                where=f"from {self.order} to {order}",
                equation=f"padded{self.padded} != padded{other.padded}",
                hint="pad to the multiple of the zigzag, which the contiguous order can cut too",
            )
        mine, theirs = (
            np.concatenate([one.slots(rank).reshape(-1) for rank in range(self.cp)]) for one in (self, other)
        )
        at = np.empty(len(mine), dtype=np.int64)
        at[mine] = np.arange(len(mine))
        return other, at[theirs]

    # --- contracts ---

    @cached_property
    def digest(self) -> str:
        """What sender and receiver compare: two layouts are equal exactly where their digests are."""
        said = json.dumps([self.lengths, self.form, self.cp, self.tp, self.order, self.causal])
        return blake2b(said.encode(), digest_size=8).hexdigest()

    def check_local(self, tensor: Any, what: str, *, split_tp: bool = False) -> None:
        """Refuse a tensor that is not a rank's part of this batch, before anybody communicates about it.

        Raises:
            PlanError: Its leading dims are not those of a part.
        """
        shape = self.local_shape(split_tp=split_tp)
        self._check(tuple(tensor.shape[: len(shape)]), shape, what)

    def _check(self, got: tuple[int, ...], wanted: tuple[int, ...], what: str) -> None:
        if got != wanted:
            raise PlanError(
                "a tensor has the layout that its consumer expects",
                where=f"{what}, {self}",
                equation=f"shape{got} != shape{wanted}",
                hint="slice it with the SequenceLayout of its microbatch, once: local() of the whole batch",
            )

    def __str__(self) -> str:
        degrees = f"cp={self.cp} {self.order}" + (f" tp={self.tp}" if self.tp > 1 else "")
        degrees += "" if self.causal else ", not causal"
        return f"{self.form} of {len(self.lengths)} documents, {self.num_tokens} tokens, {degrees}"


def _full(like: Any, shape: tuple[int, ...], fill: Any) -> Any:
    """A new array of the kind, dtype and device of another."""
    return like.new_full(shape, fill) if hasattr(like, "new_full") else np.full(shape, fill, dtype=like.dtype)


def _index(like: Any, index: Ints) -> Any:
    """An index as the kind of array that another is, on its device."""
    if not hasattr(like, "new_full"):
        return index
    import torch

    return torch.from_numpy(index).to(like.device)
