"""What was read is what was sealed: fingerprints of a move, one for each pair of ranks and each tensor.

Before the move each source *seals*: for every rank that reads from it and every tensor, the sum of the
fingerprints of all copies between the two. After the move each receiver takes the same sums of what it holds
now, and compares. The fingerprints of a pair depend on the elements of its copies and on nothing else, so
that both sides come to the same however the elements are stored; a few dozen bytes a tensor cross the wire.

What is caught: bytes that were lost, moved, corrupted or never written, and a source that was changed after
it sealed and before it was read, wholly or in part, which is a torn read. What cannot be: a change that was
complete before the seal, or began after the last read; the bytes are then those of one moment, and whether
it is the moment that was meant is what versions say. What a difference means is the caller's to say: repeat
the move, or refuse it.

On a mismatch ``pieces`` takes the fingerprint of each copy of one pair and tensor, on both sides, and
``locate`` names the first that differs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NoReturn

import msgspec
import torch

from shardweave.errors import DigestError, FormatError
from shardweave.layout.fingerprint import LANES, NOTHING, Fingerprint
from shardweave.move import Schedule
from shardweave.move.transport import Arrays, source_block, target_block, tensors
from shardweave.plan import Copy
from shardweave.refit.device import fingerprint_of

Side = Literal["src", "dst"]
"""Which end of a copy: what is read, or what was written."""
Sums = dict[tuple[int, str], Fingerprint]
"""By the rank at the other end, and the tensor."""

MOST_BYTES = 1 << 26
"""The most that encoded sums unpack to: half a million pairs of a rank and a tensor."""

_FINGERPRINT_BYTES = 8 * LANES


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
    found: Sums = {}
    held = tensors(arrays)
    for copy in _copies(steps, side):
        pair = _peer(copy, side), copy.family.tensor.name
        found[pair] = found.get(pair, NOTHING) + _fingerprint(steps, copy, held, side, key)
    return found


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
    held = tensors(arrays)
    return tuple(
        _fingerprint(steps, copy, held, side, key) for copy in _between(steps, side, peer=peer, tensor=tensor)
    )


def _fingerprint(steps: Schedule, copy: Copy, arrays: Arrays, side: Side, key: int) -> Fingerprint:
    if side == "src":
        dtype = getattr(torch, steps.plan.dst.rules[copy.family.dst_rule].dtype)
        block = source_block(copy, arrays).to(dtype)
    else:
        block = target_block(copy, arrays)
    order = sorted(range(len(copy.dst_dims)), key=copy.dst_dims.__getitem__)
    block = block.permute(order).reshape(copy.elements.shape)
    return fingerprint_of(block, copy.elements, key=key)


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
    return zlib.compress(msgspec.msgpack.encode(body), 1)


def decode(data: bytes) -> Sums:
    """The sums that ``encode`` wrote. What it allocates is bounded.

    Raises:
        FormatError: The bytes are none.
    """
    unpack = zlib.decompressobj()
    try:
        body = unpack.decompress(data, MOST_BYTES)
        if not unpack.eof or unpack.unused_data:
            _not_sums(f"bytes({len(data)}) unpack to more than {MOST_BYTES}, or to less than they say")
        names, ranks, numbers, each = msgspec.msgpack.decode(
            body, type=tuple[list[str], list[int], list[int], bytes]
        )
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
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
    steps = range(0, len(data), _FINGERPRINT_BYTES)
    return tuple(Fingerprint.decode(data[at : at + _FINGERPRINT_BYTES]) for at in steps)


def _not_sums(equation: str) -> NoReturn:
    raise FormatError(
        "sums of a move are readable",
        where="what a rank sealed",
        equation=equation,
        hint="ask the rank again; both sides need the same version of shardweave",
    ) from None
