"""What was read is what was sealed: fingerprints of a move, one for each pair of ranks and each tensor.

Before the move each source *seals*: for every rank that reads from it and every tensor, the sum of the
fingerprints of all copies between the two. After the move each receiver takes the same sums of what it holds
now, and compares. The fingerprints of a pair depend on the elements of its copies alone, in the order of the
destination's dims, so that both sides come to the same however the elements are stored; 24 bytes for each
cross the wire.

What is caught: bytes that were lost, moved, corrupted or never written, and a source that was changed after
it sealed and before it was read, wholly or in part, which is a torn read. What cannot be: a change that was
complete before the seal, or began after the last read; the bytes are then those of one moment, and whether
it is the moment that was meant is what versions say. What a difference means is the caller's to say: repeat
the move, or refuse it.

On a mismatch ``pieces`` takes the fingerprint of each copy of one pair and tensor, on both sides, and
``locate`` names the first that differs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NoReturn

import msgspec
import numpy as np
import torch

from shardweave.errors import DigestError, FormatError
from shardweave.layout import BufferRule
from shardweave.layout.dtype import itemsize
from shardweave.layout.fingerprint import NOTHING, NUM_BYTES, Fingerprint, total_of
from shardweave.layout.table import Ints
from shardweave.move import Schedule
from shardweave.move.transport import Arrays, tensors
from shardweave.move.views import slices
from shardweave.plan import Copy
from shardweave.refit.device import lanes_of

Side = Literal["src", "dst"]
"""Which end of a copy: what is read, or what was written."""
Sums = dict[tuple[int, str], Fingerprint]
"""By the rank at the other end, and the tensor."""

_MAGIC = b"shardweave.sums/2\n"
_Body = tuple[list[str], list[int], list[int], bytes]
"""Names of tensors; then for each pair the rank, which name, and the fingerprint."""
_SMALL_BYTES, _STACK_BYTES = 1 << 18, 1 << 24
"""Blocks of so many bytes are copied into stacks of so many: less than what each costs by itself."""


# --- taking them --------------------------------------------------------------------------------


def sums(steps: Schedule, arrays: Mapping[str, Any], *, side: Side, key: int = 0) -> Sums:
    """The fingerprint of all that a rank gives to, or got from, each other rank of each tensor.

    Copies within the rank count too, under its own number. Where dtypes differ the source's values are cast
    as the move casts them, so that both sides speak of what the destination shall hold.

    Law: after the move, what the receivers' sums say of a source is what its own say of them.

    Args:
        steps: The rank's schedule.
        arrays: What it has in the layout of that side, by name: tensors or numpy arrays.
        side: ``"src"`` for what others read here, ``"dst"`` for what was written here.
        key: Which family of weights; the same on both sides. A new one for each move leaves no difference
            that is overlooked twice.

    Raises:
        DtypeError: Words of another size than 1, 2, 4 or 8 bytes.
    """
    found: dict[tuple[int, str], list[Fingerprint]] = {}
    for copies, lanes in _taken(steps, _copies(steps, side), tensors(arrays), side, key):
        peers = np.array([_peer(copy, side) for copy in copies])
        for peer in np.unique(peers).tolist():
            pair = peer, copies[0].family.tensor.name
            found.setdefault(pair, []).append(total_of(lanes[peers == peer]))
    return {pair: sum(each, NOTHING) for pair, each in found.items()}


def pieces(
    steps: Schedule, arrays: Mapping[str, Any], *, side: Side, peer: int, tensor: str, key: int = 0
) -> tuple[Fingerprint, ...]:
    """The fingerprints of the copies between a rank and one other of one tensor, in the schedule's order.

    Law: they add up to what ``sums`` has for the two.

    Args:
        steps: The rank's schedule.
        arrays: As for ``sums``.
        side: As for ``sums``.
        peer: The rank at the other end.
        tensor: The name of the tensor.
        key: As for ``sums``.
    """
    copies = list(_between(steps, side, peer=peer, tensor=tensor))
    found: dict[int, Fingerprint] = {}
    for some, lanes in _taken(steps, copies, tensors(arrays), side, key):
        prints = [Fingerprint(tuple(row)) for row in lanes.tolist()]
        found |= {id(copy): each for copy, each in zip(some, prints, strict=True)}
    return tuple(found[id(copy)] for copy in copies)


def _taken(
    steps: Schedule, copies: Iterable[Copy], arrays: Arrays, side: Side, key: int
) -> Iterator[tuple[list[Copy], Ints]]:
    """The fingerprints of copies, ``(copies, LANES)``, of those at once that are alike and small.

    Alike are copies of one family between arrays of the same dims, whose blocks have one shape and lie in the
    same columns. All of them together, stacked, cost little more than one by itself.
    """
    alike: dict[Hashable, list[Copy]] = {}
    for copy in copies:
        shape = tuple([len(dim) for dim in (copy.src_box if side == "src" else copy.dst_box).dims])
        columns = copy.elements.dims[copy.dst_dims[-1]] if copy.dst_dims else None
        alike.setdefault((id(copy.family), copy.src_dims, copy.dst_dims, shape, columns), []).append(copy)
    for some in alike.values():
        num_bytes = some[0].elements.numel * itemsize(_rule(steps, some[0], side).dtype)
        step = max(_STACK_BYTES // num_bytes, 1) if num_bytes <= _SMALL_BYTES else 1
        for at in range(0, len(some), step):
            yield some[at : at + step], _lanes(steps, some[at : at + step], arrays, side, key)


@torch.no_grad()
def _lanes(steps: Schedule, copies: Sequence[Copy], arrays: Arrays, side: Side, key: int) -> Ints:
    """The fingerprints of copies that are alike, each in the dims of the destination's array.

    That is the order in which one side at least has its elements side by side.
    """
    first = copies[0]
    if side == "src":
        blocks = [arrays[copy.src_name][slices(copy.src_box)] for copy in copies]
    else:
        blocks = [arrays[copy.dst_name][slices(copy.dst_box)] for copy in copies]
    stacked = torch.stack(blocks) if len(blocks) > 1 else blocks[0][None]
    dims = first.dst_dims
    if side == "src":  # dims that only one of the two arrays has are of length 1
        order = [first.src_dims.index(d) for d in dims if d in first.src_dims]
        order += [i for i in range(len(first.src_dims)) if i not in order]
        stacked = stacked.permute(0, *(1 + i for i in order)).to(_torch_dtype(_rule(steps, first, "dst")))
    outside = [d for d in range(len(first.elements.dims)) if d not in dims]
    *outer, columns = [[copy.elements.dims[d] for copy in copies] for d in (*outside, *dims)] or [[range(1)]]
    shape = [len(each[0]) for each in (*outer, columns)]
    return lanes_of(stacked.reshape(len(copies), *shape), list(map(_indices, outer)), columns[0], key=key)


def _indices(ranges: list[range]) -> Ints:
    """The indices of a dim, one row for each copy, or for all where they are the same."""
    first = ranges[0]
    if any(r.step != first.step for r in ranges):
        return np.stack([np.arange(r.start, r.stop, r.step) for r in ranges])
    starts = np.array([r.start for r in ranges], dtype=np.int64)[:, None]
    found: Ints = np.arange(0, len(first) * first.step, first.step, dtype=np.int64) + starts
    return found if (starts != starts[0]).any() else found[:1]


def _rule(steps: Schedule, copy: Copy, side: Side) -> BufferRule:
    plan, family = steps.plan, copy.family
    return plan.src.rules[family.src_rule] if side == "src" else plan.dst.rules[family.dst_rule]


def _torch_dtype(rule: BufferRule) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, rule.dtype)
    return dtype


def _copies(steps: Schedule, side: Side) -> Iterator[Copy]:
    rank = steps.rank
    for copy in chain(steps.local, *steps.rounds):
        if rank == (copy.src_rank if side == "src" else copy.dst_rank):
            yield copy


def _peer(copy: Copy, side: Side) -> int:
    return copy.dst_rank if side == "src" else copy.src_rank


def _between(steps: Schedule, side: Side, *, peer: int, tensor: str) -> Iterator[Copy]:
    for copy in _copies(steps, side):
        if _peer(copy, side) == peer and copy.family.tensor.name == tensor:
            yield copy


# --- comparing them -----------------------------------------------------------------------------


def compare(rank: int, got: Sums, sealed: Mapping[int, Sums]) -> list[tuple[int, str]]:
    """Which sources and tensors differ from what was sealed, in order.

    Args:
        rank: The receiver.
        got: Its ``sums`` of side ``"dst"``.
        sealed: For each source its ``sums`` of side ``"src"``; those for other receivers are passed over.
    """
    wanted = {
        (source, tensor): found
        for source, said in sealed.items()
        for (reader, tensor), found in said.items()
        if reader == rank
    }
    return sorted(pair for pair in {*wanted, *got} if wanted.get(pair) != got.get(pair))


def check(rank: int, got: Sums, sealed: Mapping[int, Sums]) -> None:
    """As ``compare``, but refuse a difference.

    Raises:
        DigestError: What the receiver holds is not what a source sealed; the first is named.
    """
    wrong = compare(rank, got, sealed)
    if wrong:
        source, tensor = wrong[0]
        _refuse(
            f"tensor {tensor!r}, rank {source} to rank {rank}",
            sealed.get(source, {}).get((rank, tensor)),
            got.get((source, tensor)),
            more=len(wrong) - 1,
        )


def locate(
    steps: Schedule,
    got: Sequence[Fingerprint],
    sealed: Sequence[Fingerprint],
    *,
    peer: int,
    tensor: str,
) -> Copy | None:
    """The first copy of a receiver that differs from its source's, or none.

    Args:
        steps: The receiver's schedule.
        got: Its ``pieces`` of side ``"dst"``.
        sealed: Those of the source, of side ``"src"``.
        peer: The source.
        tensor: The name of the tensor.

    Raises:
        DigestError: The two speak of other numbers of copies, which have other plans.
    """
    copies = list(_between(steps, "dst", peer=peer, tensor=tensor))
    if not len(copies) == len(got) == len(sealed):
        raise DigestError(
            "both ends of a move take the fingerprints of the same copies",
            where=f"tensor {tensor!r}, rank {peer} to rank {steps.rank}",
            equation=f"copies({len(copies)}), got({len(got)}), sealed({len(sealed)})",
            hint="plan on each rank from the same two layouts, and take pieces of this pair on both",
        )
    return next((copy for copy, a, b in zip(copies, got, sealed, strict=True) if a != b), None)


def refuse(copy: Copy, got: Fingerprint, sealed: Fingerprint) -> NoReturn:
    """Say which copy differs.

    Raises:
        DigestError: Always.
    """
    _refuse(
        f"tensor {copy.family.tensor.name!r} {copy.elements}, rank {copy.src_rank}, {copy.src_name!r} "
        f"{copy.src_box} to rank {copy.dst_rank}, {copy.dst_name!r} {copy.dst_box}",
        sealed,
        got,
    )


def _refuse(where: str, sealed: Fingerprint | None, got: Fingerprint | None, *, more: int = 0) -> NoReturn:
    also = f", and {more} more" if more else ""
    raise DigestError(
        "what a receiver holds is what its source sealed",
        where=where,
        equation=f"sealed({sealed or 'nothing'}) != received({got or 'nothing'}){also}",
        hint="the transport lost or changed bytes, or the source changed after it sealed; do not serve "
        "what was received, and move it again from a source that stands still",
    )


# --- bytes --------------------------------------------------------------------------------------


def encode(found: Sums) -> bytes:
    """Sums as bytes: names once, a fingerprint a pair. The same sums give the same bytes.

    Law: ``decode(encode(s)) == s``.
    """
    names = sorted({name for _, name in found})
    numbers = {name: i for i, name in enumerate(names)}
    pairs = sorted(found)
    body = (
        names,
        [rank for rank, _ in pairs],
        [numbers[name] for _, name in pairs],
        encode_pieces(found[pair] for pair in pairs),
    )
    return _MAGIC + msgspec.msgpack.encode(body)


def decode(data: bytes) -> Sums:
    """The sums that ``encode`` wrote. What it allocates is a few times the bytes that it is given.

    Raises:
        FormatError: The bytes are none.
    """
    if data[: len(_MAGIC)] != _MAGIC:
        _not_sums(f"version {bytes(data[: len(_MAGIC)])!r} != {_MAGIC!r}")
    try:
        names, ranks, numbers, each = msgspec.msgpack.decode(data[len(_MAGIC) :], type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _not_sums(f"{len(data)} bytes: {error}")
    prints = decode_pieces(each)
    if not len(ranks) == len(numbers) == len(prints):
        _not_sums(f"ranks({len(ranks)}), names({len(numbers)}), fingerprints({len(prints)})")
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(names):
        _not_sums(f"name({max(numbers)}) of names({len(names)})")
    pairs = [(rank, names[i]) for rank, i in zip(ranks, numbers, strict=True)]
    if pairs != sorted(set(pairs)):
        _not_sums("pairs are not in order")
    return dict(zip(pairs, prints, strict=True))


def encode_pieces(found: Iterable[Fingerprint]) -> bytes:
    """Fingerprints one after the other."""
    return b"".join(map(bytes, found))


def decode_pieces(data: bytes) -> tuple[Fingerprint, ...]:
    """The fingerprints that ``encode_pieces`` wrote.

    Raises:
        FormatError: The bytes are none.
    """
    steps = range(0, len(data), NUM_BYTES)
    return tuple(Fingerprint.decode(data[at : at + NUM_BYTES]) for at in steps)


def _not_sums(equation: str) -> NoReturn:
    raise FormatError(
        "sums of a move are readable",
        where="what a rank sealed",
        equation=equation,
        hint="ask the rank again; both sides need the same version of shardweave",
    ) from None
