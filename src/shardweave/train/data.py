"""Which documents a rank works on in a step: a function of the seed and the step, and of nothing else.

Documents are cut into *parts* of at most one sequence. Each pass over them has an order of its own, computed
and not stored, so that a run of any size begins at any step at once. A step takes the next ones; they are cut
in order over the data ranks, and there into microbatches. So the same documents make up a step at every
layout, and a run goes on at another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import FormatError, GeometryError
from shardweave.train.text import Tokenizer, read_documents, tokenizer
from shardweave.train.tokens import Document, Tokens, joined, parts_of, read_megatron, read_packed, read_raw

if TYPE_CHECKING:
    from shardweave.train.batch import Microbatch
    from shardweave.train.config import TrainConfig

Ints = NDArray[np.int64]


def open_tokens(path: Path, *, tokenizer_name: str = "bytes", dtype: str = "uint16") -> Tokens:
    """The documents at a path, whatever form they are in.

    Args:
        path: A folder of packed tokens, a ``.bin`` with or without ``.idx``, ``.jsonl``, or plain text.
        tokenizer_name: Of text.
        dtype: Of a ``.bin`` without ``.idx``.

    Raises:
        MissingFileError, FormatError, TruncatedError: There is nothing, or it is not whole.
    """
    if path.is_dir():
        return read_packed(path)
    if path.suffix in (".bin", ".idx") or path.with_name(path.name + ".idx").is_file():
        base = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        is_raw = path.suffix == ".bin" and not base.with_name(base.name + ".idx").is_file()
        return read_raw(path, dtype) if is_raw else read_megatron(base)
    made: Tokenizer = tokenizer(tokenizer_name)
    return joined(read_documents(path, made), str(path))


def open_documents(path: Path, *, tokenizer_name: str = "bytes") -> tuple[Iterator[Document], int]:
    """Documents one by one, of text or of files of tokens, and one more than the largest id there may be.

    Raises:
        MissingFileError, FormatError: As ``open_tokens``.
    """
    if not path.is_dir() and path.suffix not in (".bin", ".idx"):
        made = tokenizer(tokenizer_name)
        return read_documents(path, made), made.vocab_size
    tokens = open_tokens(path)
    lengths = tokens.lengths.tolist()
    most = int(tokens.ids.max()) + 1 if len(tokens.ids) else 1
    return (tokens.part(number, 0, length) for number, length in enumerate(lengths)), most


# --- order --------------------------------------------------------------------------------------


def shuffled(positions: Ints, size: int, key: str) -> Ints:
    """Where positions of an order go in another: a permutation of ``range(size)``, one for each key.

    A network of eight rounds on the bits of a number; what falls outside the range goes through it again.
    Nothing of the size of the range is made.

    >>> sorted(shuffled(np.arange(7), 7, "seed 0, pass 0").tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """
    half = max((max(size - 1, 1).bit_length() + 1) // 2, 1)
    mask = np.uint64((1 << half) - 1)
    keys = np.frombuffer(blake2b(key.encode(), digest_size=64).digest(), dtype="<u8")
    found = positions.astype(np.uint64)
    out = np.ones(len(found), dtype=np.bool_)
    while out.any():
        left, right = found[out] >> np.uint64(half), found[out] & mask
        for each in keys:
            left, right = right, left ^ (_mixed(right + each) & mask)
        found[out] = left << np.uint64(half) | right
        out = found >= size
    return found.astype(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits in which each bit depends on all."""
    with np.errstate(over="ignore"):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            values = (values ^ values >> np.uint64(shift)) * np.uint64(factor)
    return values ^ values >> np.uint64(31)


@dataclass(frozen=True)
class Parts:
    """The parts of documents, numbered through.

    Attributes:
        tokens: The documents.
        sequence_length: Most tokens of a part.
        vocab_size: What tokens are compared with.
        targets: ``all``, or ``responses`` where only those count that the file says.
    """

    tokens: Tokens
    sequence_length: int
    vocab_size: int | None = None
    targets: str = "all"

    @cached_property
    def _stops(self) -> Ints:
        return np.cumsum(parts_of(self.tokens.lengths, self.sequence_length), dtype=np.int64)

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def lengths(self, numbers: Ints) -> Ints:
        """The tokens of parts."""
        document, start = self._places(numbers)
        found: Ints = np.minimum(self.tokens.lengths[document] - start, self.sequence_length)
        return found

    def get(self, number: int) -> Document:
        """The tokens of a part."""
        (document,), (start,) = self._places(np.array([number], dtype=np.int64))
        found = self.tokens.part(
            int(document), int(start), int(start) + self.sequence_length, vocab_size=self.vocab_size
        )
        return found if self.targets == "responses" else Document(found.ids, np.ones_like(found.mask))

    def _places(self, numbers: Ints) -> tuple[Ints, Ints]:
        document = np.searchsorted(self._stops, numbers, side="right")
        first = np.where(document > 0, self._stops[document - 1], 0)
        return document, (numbers - first) * (self.sequence_length - 1)


# --- steps --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loader:
    """The microbatches of each step of one data rank.

    Attributes:
        parts: What there is.
        documents: Parts of a step, over all data ranks.
        microbatch: Parts of a microbatch.
        slots: Most slots of a microbatch, in place of ``microbatch``.
        seed: Of the order; ``None`` keeps that of the files.
        dp: Data ranks.
        dp_rank: This one.
        form: See ``SequenceLayout``, as are ``cp``, ``tp`` and ``order``.
        cp: Context ranks.
        tp: Tensor ranks.
        order: Order of the parts of context ranks.
        most: How many parts of the files are used; all where ``None``.

    Laws:
        The documents of a step, in the order of ranks and microbatches, do not depend on ``dp``,
        ``microbatch``, ``slots``, ``cp``, ``tp`` or ``form``.
        Every pass has every part once.
        All data ranks have equally many microbatches in a step.
    """

    parts: Parts
    documents: int
    microbatch: int = 1
    slots: int | None = None
    seed: int | None = None
    dp: int = 1
    dp_rank: int = 0
    form: str = "thd"
    cp: int = 1
    tp: int = 1
    order: str = "zigzag"
    most: int | None = None

    def __post_init__(self) -> None:
        if not len(self.parts):
            raise FormatError(
                "there is a document with something to predict",
                where=self.parts.tokens.where,
                equation=f"documents({len(self.parts.tokens.ends)}), none of two tokens or more",
                hint="give data with text in it",
            )
        if self.documents % self.dp:
            raise GeometryError(
                "data ranks have equally many documents",
                equation=f"documents({self.documents}) % dp({self.dp}) != 0",
                hint="choose documents as a multiple of dp",
            )

    @property
    def size(self) -> int:
        """The parts of a pass."""
        return len(self.parts) if self.most is None else min(self.most, len(self.parts))

    @property
    def steps_of_a_pass(self) -> int:
        """The steps that see every part at least once."""
        return -(-self.size // self.documents)

    def numbers(self, step: int) -> Ints:
        """The parts of a step, of all ranks, in order."""
        return self._at(np.arange(step * self.documents, (step + 1) * self.documents, dtype=np.int64))

    def _at(self, positions: Ints) -> Ints:
        if self.seed is None:
            return positions % self.size
        found = np.empty_like(positions)
        for each in np.unique(positions // self.size):
            mine = positions // self.size == each
            key = f"seed {self.seed}, pass {each}"
            found[mine] = shuffled(positions[mine] % self.size, self.size, key)
        return found

    def num_tokens(self, step: int) -> int:
        """Real tokens of a step, of all ranks."""
        return int(self.parts.lengths(self.numbers(step)).sum())

    def step(self, number: int) -> list[Microbatch]:
        """The microbatches of this rank in a step, counted from 0."""
        begin = number * self.documents
        return self._made(np.arange(begin, begin + self.documents, dtype=np.int64))

    def once(self) -> Iterator[list[Microbatch]]:
        """Each part once, in the order of the files: what is evaluated on. The last step has what is left."""
        for begin in range(0, self.size, self.documents):
            yield self._made(np.arange(begin, min(begin + self.documents, self.size), dtype=np.int64))

    def _made(self, positions: Ints) -> list[Microbatch]:
        numbers = self._at(positions)
        lengths = self.parts.lengths(numbers)
        share = -(-len(positions) // self.dp)
        cuts = [self._cuts(lengths[rank * share : (rank + 1) * share].tolist()) for rank in range(self.dp)]
        count = max(map(len, cuts))
        at, made = self.dp_rank * share, []
        for size in [*cuts[self.dp_rank], *([0] * count)][:count]:
            made.append(self._microbatch(numbers[at : at + size], positions[at : at + size]))
            at += size
        return made

    def _cuts(self, lengths: Sequence[int]) -> list[int]:
        """How many parts each microbatch of a rank has."""
        if self.slots is None:
            return [min(self.microbatch, len(lengths) - at) for at in range(0, len(lengths), self.microbatch)]
        found: list[int] = []
        room = 0
        for length in lengths:
            slots = -(-length // self._multiple) * self._multiple
            if not found or slots > room:
                found.append(0)
                room = self.slots
            found[-1] += 1
            room -= slots
        return found

    @property
    def _multiple(self) -> int:
        return self.tp * self.cp * (2 if self.cp > 1 and self.order == "zigzag" else 1)

    def _microbatch(self, numbers: Ints, positions: Ints) -> Microbatch:
        import torch

        from shardweave.train.batch import microbatch

        # A microbatch without documents is one of a document without tokens, so that it has a shape.
        none = Document(np.zeros(0, np.int64), np.zeros(0, np.bool_))
        found = [self.parts.get(int(number)) for number in numbers] or [none]
        return microbatch(
            [torch.from_numpy(each.ids) for each in found],
            [torch.from_numpy(each.mask) for each in found],
            form=self.form,
            cp=self.cp,
            tp=self.tp,
            order=self.order,
            numbers=[int(each) for each in positions] or [0],
        )


def train_loader(config: TrainConfig, *, dp_rank: int, vocab_size: int) -> Loader:
    """What a run trains on."""
    seed = config.run.seed if config.data.shuffle else None
    return _loader(config, config.data.train, dp_rank=dp_rank, vocab_size=vocab_size, seed=seed, most=None)


def evaluation_loader(config: TrainConfig, *, dp_rank: int, vocab_size: int) -> Loader | None:
    """What a run is measured on, if anything."""
    of = config.evaluation
    if of.data is None:
        return None
    most = of.documents or None
    return _loader(config, of.data, dp_rank=dp_rank, vocab_size=vocab_size, seed=None, most=most)


def _loader(
    config: TrainConfig, path: str, *, dp_rank: int, vocab_size: int, seed: int | None, most: int | None
) -> Loader:
    data, batch, of = config.data, config.batch, config.parallel
    tokens = open_tokens(Path(path), tokenizer_name=data.tokenizer, dtype=data.dtype)
    return Loader(
        Parts(tokens, batch.sequence_length, vocab_size, data.targets),
        documents=batch.documents,
        microbatch=batch.microbatch,
        slots=batch.tokens,
        seed=seed,
        dp=of.remat * (of.dp or 1),
        dp_rank=dp_rank,
        form=batch.form,
        cp=of.cp,
        tp=of.tp,
        order=of.order,
        most=most,
    )
