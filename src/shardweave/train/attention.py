"""Attention inside each document, causal or not as the layout says, on a batch that context ranks share.

A rank has the queries, keys and values of its own slots. There are three ways to attend to those of others,
which give one result:

| method | what travels | a rank holds | masks | heads |
|---|---|---|---|---|
| ``ring`` | keys and values, from rank to rank | two parts of them | causal, none | any |
| ``gather`` | keys and values, to all at once | all of them | causal, none, window | any |
| ``all_to_all`` | slots against heads, and back | all slots of some heads | causal, none, window | divide |

Either order of a batch is right in each; the zigzag gives ``ring`` and ``gather`` equal work on all ranks if
attention is causal, as windows are. Padding gets zeros and gives nothing: neither its values nor its gradient
reach a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shardweave.errors import GeometryError, PlanError
from shardweave.train.blocks import Span, blocks, tiles
from shardweave.train.collectives import exchange, gather
from shardweave.train.grid import Group
from shardweave.train.ring import attend_parts, ring
from shardweave.train.sequence import SequenceLayout


@dataclass(frozen=True, slots=True)
class Method:
    """What a way of sharing attention can do.

    Attributes:
        orders: The orders of a batch that it knows.
        window: Whether a token may see only some tokens back.
        cuts_heads: Whether ranks share heads, so that these have to divide.
        drops: Whether probabilities may be dropped. None can: a mask that is a function of (seed, query, key,
            head) does not reach into the kernels.
    """

    orders: tuple[str, ...] = ("zigzag", "contiguous")
    window: bool = False
    cuts_heads: bool = False
    drops: bool = False


METHODS = {
    "ring": Method(),
    "gather": Method(window=True),
    "all_to_all": Method(window=True, cuts_heads=True),
}
"""The ways of sharing attention over context ranks, and what each can do."""


def check_method(
    method: str,
    *,
    cp: int,
    heads: int,
    kv_heads: int,
    window: int | None = None,
    order: str = "zigzag",
    dropout: float = 0.0,
) -> None:
    """Refuse what a method cannot do. Needs no process, so that a config can be checked by it.

    Args:
        method: One of ``METHODS``.
        cp: Context ranks.
        heads: Query heads of a rank.
        kv_heads: Key and value heads of a rank.
        window: Tokens back that a token sees.
        order: The order of the batch.
        dropout: The share of probabilities that is dropped.

    Raises:
        GeometryError: The method is unknown, or cannot do one of these.
    """
    where, can = f"attention by {method!r} over {cp} context ranks", METHODS.get(method)
    if can is None:
        raise GeometryError(
            "attention is shared in a known way",
            where=where,
            equation=f"method({method!r}) is not among {', '.join(METHODS)}",
            hint="choose one of these; without context ranks all are the same",
        )
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise GeometryError(
            "query heads share key heads evenly",
            where=where,
            equation=f"heads({heads}) % kv_heads({kv_heads}) != 0",
            hint="give the heads that this rank holds, after they are cut over tp",
        )
    if window is not None and (window < 1 or (cp > 1 and not can.window)):
        able = ", ".join(name for name, other in METHODS.items() if other.window)
        raise GeometryError(
            "a window is at least the token itself, and the method knows windows",
            where=where,
            equation=f"window({window})",
            hint=f"use one of {able}: another mask never stands in for the one that is asked for",
        )
    if cp > 1 and can.cuts_heads and heads % cp:
        raise GeometryError(
            "ranks that exchange slots for heads have equally many heads",
            where=where,
            equation=f"heads({heads}) % cp({cp}) != 0",
            hint="use 'ring' or 'gather', which leave heads whole, or fewer tp or cp ranks",
        )
    if (dropout and not can.drops) or order not in can.orders:
        raise GeometryError(
            "a method is used for what it can do",
            where=where,
            equation=f"order({order!r}), dropout({dropout})",
            hint="probabilities of attention are not dropped here: set attention_dropout to 0",
        )


def wire_bytes(
    method: str, layout: SequenceLayout, *, heads: int, kv_heads: int, dim: int, item_bytes: int
) -> tuple[int, int]:
    """What a rank sends for one attention, forward and backward.

    Args:
        method: One of ``METHODS``.
        layout: The batch.
        heads: Query heads of a rank.
        kv_heads: Key and value heads of a rank.
        dim: The size of a head.
        item_bytes: Bytes of an element.

    >>> batch = SequenceLayout((8192,), cp=4)
    >>> for method in METHODS:
    ...     print(method, wire_bytes(method, batch, heads=32, kv_heads=4, dim=128, item_bytes=2))
    ring (12582912, 46137344)
    gather (12582912, 12582912)
    all_to_all (28311552, 28311552)
    """
    ranks, a_head = layout.cp, math.prod(layout.local_shape()) * dim * item_bytes
    if ranks == 1:
        return 0, 0
    if method == "all_to_all":
        both = 2 * (heads + math.lcm(kv_heads, ranks)) * a_head * (ranks - 1) // ranks
        return both, both
    keys = 2 * kv_heads * a_head
    summed = keys * max(4, item_bytes) // item_bytes  # gradients that go round are sums, in float32 at least
    return (ranks - 1) * keys, (ranks - 1) * keys + (ranks * summed if method == "ring" else 0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: SequenceLayout,
    cp: Group,
    method: str = "ring",
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of a rank's slots to those of their documents, wherever they are.

    Heads may be fewer in ``k`` and ``v``; each then serves ``heads / kv heads`` query heads that follow each
    other. All of it is checked before anybody communicates.

    Args:
        q: Queries after their rotary encoding: ``(rows, slots, heads, dim)``, or ``(slots, heads, dim)``
            where the row is packed; rows and slots as in ``layout.local_shape()``.
        k: Keys, with fewer heads or as many.
        v: Values, as keys.
        layout: The microbatch.
        cp: The context group.
        method: One of ``METHODS``; without context ranks it makes no difference.
        window: How many tokens back a token sees, itself included; all by default.
        scale: What scores are multiplied by; ``dim ** -0.5`` by default.

    Returns:
        As ``q``; zeros for padding.

    Laws:
        Each token's output, and every gradient, is that of one process with the whole batch.
        Tokens of one document have the same bits whatever another document or padding holds.

    Raises:
        GeometryError: The method cannot do what is asked, or the group is not the one of the layout.
        PlanError: A tensor is not this rank's part of the batch, or they do not fit each other.
    """
    _check(q, k, v, layout=layout, cp=cp)
    check_method(
        method, cp=cp.size, heads=q.shape[-2], kv_heads=k.shape[-2], window=window, order=layout.order
    )
    if window is not None and not layout.causal:
        raise GeometryError(
            "a window is one of causal attention",
            where=str(layout),
            equation=f"window({window}), causal({layout.causal})",
            hint="let tokens see their whole document: windows to both sides are not computed here",
        )
    if not q.numel():
        return q + (k.sum() + v.sum())  # nothing, and yet a function of all three
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    packed = layout.form == "thd"
    if packed:
        q, k, v = q[None], k[None], v[None]
    if cp.size == 1:
        out = _whole(q, k, v, layout=layout, window=window, scale=scale)
    elif method == "all_to_all":
        out = _all_to_all(q, k, v, layout=layout, cp=cp, window=window, scale=scale)
    elif method == "ring":
        out = ring(q, torch.stack((k, v)), layout=layout, group=cp, scale=scale)
    else:
        kv = gather(torch.stack((k, v)), 2, group=cp)
        if window is None:
            out = attend_parts(q, kv, layout=layout, group=cp, scale=scale)
        else:
            out = _windowed(q, *kv.unbind(), layout=layout, rank=cp.rank, window=window, scale=scale)
    if packed:
        return out[0]
    padding = _padding(layout, cp.rank)
    return out if padding is None else out.masked_fill(padding.to(out.device)[..., None, None], 0)


def _check(q: Tensor, k: Tensor, v: Tensor, *, layout: SequenceLayout, cp: Group) -> None:
    if cp.size != layout.cp:
        raise GeometryError(
            "a batch is cut over the group that shares its attention",
            where=f"group {cp.name}, {layout}",
            equation=f"ranks({cp.size}) != cp({layout.cp})",
            hint="make the SequenceLayout with the degrees of the mesh",
        )
    for tensor, what in ((q, "queries"), (k, "keys"), (v, "values")):
        layout.check_local(tensor, what)
    dims = len(layout.shape) + 2
    same = k.shape == v.shape and q.shape[-1:] == k.shape[-1:] and q.dtype == k.dtype == v.dtype
    if not same or {q.ndim, k.ndim} != {dims}:
        raise PlanError(
            "queries, keys and values are of one kind, with a dim of heads and one within a head",
            where=str(layout),
            equation=f"q{tuple(q.shape)} {q.dtype}, k{tuple(k.shape)} {k.dtype}, v{tuple(v.shape)} {v.dtype}",
            hint=f"give tensors of {dims} dims, of one dtype and one size of heads",
        )


@lru_cache(maxsize=256)
def _padding(layout: SequenceLayout, rank: int) -> Tensor | None:
    """Which slots of a rank's rows are padding; ``None`` where none of the batch is."""
    if bool(layout.is_real.all()):
        return None
    return torch.from_numpy(~layout.local(layout.is_real, rank))


# --- a whole batch on one rank ------------------------------------------------------------------


def _whole(
    q: Tensor, k: Tensor, v: Tensor, *, layout: SequenceLayout, window: int | None, scale: float
) -> Tensor:
    """Attention where the slots of all ranks are at hand, in order."""
    if window is not None and window < max(layout.lengths):
        return _windowed(q, k, v, layout=layout, rank=None, window=window, scale=scale)
    spans = [block.queries for block in blocks(layout, None, None)]
    sizes, real = _sizes(spans, q.shape[1])
    pieces = zip(q.split(sizes, 1), k.split(sizes, 1), v.split(sizes, 1), real, strict=True)
    return _join(
        [
            _sdpa(a, b, c, None, scale, causal=layout.causal) if is_real else torch.zeros_like(a)
            for a, b, c, is_real in pieces
        ]
    )


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, *, layout: SequenceLayout, rank: int | None, window: int, scale: float
) -> Tensor:
    """Attention through a window where the keys of all ranks are at hand, a tile of queries at a time."""
    found = tiles(layout, rank, window)
    if not found:
        # A rank of padding alone: its part in the collectives of backward is kept, as a function of nothing.
        return torch.zeros_like(q) + sum(one[:, :0].sum() for one in (q, k, v))
    sizes, real = _sizes([tile.queries for tile in found], q.shape[1])
    outs, following = [], iter(found)
    for piece, is_real in zip(q.split(sizes, 1), real, strict=True):
        if not is_real:
            outs.append(torch.zeros_like(piece))
            continue
        tile = next(following)
        keys, values = (_join([one[:, start:stop] for (start, stop), _ in tile.keys]) for one in (k, v))
        mask = torch.from_numpy(tile.mask(window)).to(q.device)
        outs.append(_sdpa(piece, keys, values, mask, scale))
    return _join(outs)


def _sizes(spans: Sequence[Span], slots: int) -> tuple[list[int], list[bool]]:
    """Sizes that cut a row into spans and what lies between them, and which are spans."""
    sizes, real, at = [], [], 0
    for start, stop in (*spans, (slots, slots)):
        for size, is_real in ((start - at, False), (stop - start, True)):
            if size:
                sizes.append(size)
                real.append(is_real)
        at = stop
    return sizes, real


def _join(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool = True
) -> Tensor:
    """Attention ``(rows, slots, heads, dim)``; a mask stands in for the causal one."""
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


# --- slots against heads ------------------------------------------------------------------------


def _all_to_all(
    q: Tensor, k: Tensor, v: Tensor, *, layout: SequenceLayout, cp: Group, window: int | None, scale: float
) -> Tensor:
    """Attention of a share of the heads on all slots.

    Where key heads do not divide, each is repeated to the least count that does.
    """
    again = math.lcm(k.shape[2], cp.size) // k.shape[2]
    if again > 1:
        k, v = k.repeat_interleave(again, 2), v.repeat_interleave(again, 2)
    rows, slots, heads, dim = q.shape
    shares = [one.unflatten(2, (cp.size, -1)) for one in (q, k, v)]
    counts = [one.shape[3] for one in shares]
    once = [1] * cp.size
    mine = exchange(torch.cat(shares, 3).movedim(2, 0), once, once, group=cp)
    order, back = _orders(layout)
    whole = _Permuted.apply(mine.flatten(0, 2), back, order).view(rows, cp.size * slots, -1, dim)
    q, k, v = whole.split(counts, 2)
    out = _whole(q, k, v, layout=layout, window=window, scale=scale)
    parts = _Permuted.apply(out.reshape(rows * cp.size * slots, -1, dim), order, back)
    parts = exchange(parts.view(cp.size, rows, slots, -1, dim), once, once, group=cp)
    return parts.movedim(0, 2).reshape(rows, slots, heads, dim)


@lru_cache(maxsize=256)
def _orders(layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """The slots of all ranks, one rank's after the other, and where each slot is among them."""
    slots = np.concatenate([layout.slots(rank).reshape(-1) for rank in range(layout.cp)])
    return torch.from_numpy(slots), torch.from_numpy(np.argsort(slots))


class _Permuted(torch.autograd.Function):
    """Rows in another order; backward they are put back, which is quicker than to add them up."""

    @staticmethod
    def forward(ctx: object, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back  # type: ignore[attr-defined]
        return rows.index_select(0, order.to(rows.device))

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back: Tensor = ctx.back  # type: ignore[attr-defined]
        return grads[0].index_select(0, back.to(grads[0].device)), None, None
