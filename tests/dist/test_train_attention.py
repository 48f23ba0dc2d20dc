"""Attention shared by context ranks, against one process that has the whole batch.

Ranks are in memory; three of them, and those that have a fault, are processes over gloo.

The reference below knows lengths and nothing else: no slots, no padding, no ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import GLOO, MEMORY, plan_of, ranks

from shardweave.train import attention as attention_module
from shardweave.train import collectives
from shardweave.train import ring as ring_module
from shardweave.train.attention import METHODS, Method, attention, wire_bytes
from shardweave.train.grid import Group, Groups
from shardweave.train.sequence import SequenceLayout

HEADS, DIM = 12, 5
GRADS = ("out", "dq", "dk", "dv")
Values = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One call, and what its tensors hold."""

    layout: SequenceLayout
    method: str
    kv_heads: int = 3
    window: int | None = None
    dtype: torch.dtype = torch.float64
    padding_seed: int = 1
    changed: int | None = None
    loud: float = 1.0
    mutation: str = ""

    def tokens(self) -> dict[str, Tensor]:
        """Queries, keys, values and the gradient of the output, of real tokens."""
        generator = torch.Generator().manual_seed(sum(self.layout.lengths) + self.kv_heads)
        heads = {"q": HEADS, "k": self.kv_heads, "v": self.kv_heads, "grad": HEADS}
        found = {
            name: torch.randn(
                self.layout.num_tokens, count, DIM, generator=generator, dtype=torch.float64
            ).to(self.dtype)
            for name, count in heads.items()
        }
        if self.changed is not None:
            found["k"][self.changed] += 1
            found["v"][self.changed] -= 1
        # The first half of the tokens is loud: where it is seen, scores are far apart from the others.
        found["k"][: len(found["k"]) // 2] *= self.loud
        return found


# --- the reference ------------------------------------------------------------------------------


def plain(cell: Cell) -> Values:
    """Outputs and gradients of the real tokens; how they are cut, and by whom, makes no difference."""
    layout = SequenceLayout(cell.layout.lengths, "thd", causal=cell.layout.causal)
    return _plain(dataclasses.replace(cell, layout=layout, method="", mutation=""))


@lru_cache
def _plain(cell: Cell) -> Values:
    """A document at a time, by the definition."""
    given = {name: value.to(torch.float64) for name, value in cell.tokens().items()}
    leaves = [given[name].requires_grad_() for name in ("q", "k", "v")]
    outs = []
    for q, k, v in zip(*(leaf.split(list(cell.layout.lengths)) for leaf in leaves), strict=True):
        k, v = (one.repeat_interleave(HEADS // cell.kv_heads, 1) for one in (k, v))
        back = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
        hidden = (cell.layout.causal & (back < 0)) | (back >= (cell.window or len(q) + 1))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    out = torch.cat(outs)
    grads = torch.autograd.grad(out, leaves, given["grad"])
    found = (out.detach(), *grads)
    return {name: one.to(torch.float64).numpy() for name, one in zip(GRADS, found, strict=True)}


# --- the ranks ----------------------------------------------------------------------------------


def share(groups: Groups, *, cells: Sequence[Cell]) -> list[Values]:
    """This rank's part of the outputs and gradients of each cell."""
    return [part(cell, groups.get("model", "cp")) for cell in cells]


def part(cell: Cell, group: Group) -> Values:
    """One cell on one rank."""
    layout, generator = cell.layout, torch.Generator().manual_seed(cell.padding_seed)
    given = {}
    for name, values in cell.tokens().items():
        noise = torch.randn(*layout.shape, *values.shape[1:], generator=generator, dtype=torch.float64)
        padded, real = layout.place(values), torch.from_numpy(layout.is_real)[..., None, None]
        given[name] = layout.local(torch.where(real, padded, noise.to(cell.dtype)), group.rank)
    leaves = [given[name].requires_grad_() for name in ("q", "k", "v")]
    with MUTATIONS[cell.mutation]():
        out = attention(*leaves, layout=layout, cp=group, method=cell.method, window=cell.window)
        grads = torch.autograd.grad(out, leaves, given["grad"])
    assert out.dtype == cell.dtype
    found = (out.detach(), *grads)
    return {name: one.to(torch.float64).numpy() for name, one in zip(GRADS, found, strict=True)}


def shared(cells: Sequence[Cell], *, over: str = MEMORY, strict: bool = True) -> list[Values]:
    """The same of the real tokens, joined from all ranks; padding is looked at and left out."""
    size = cells[0].layout.cp
    # A fault is patched in by each rank for itself.
    assert over == GLOO or not any(cell.mutation for cell in cells)
    ends = ranks(share, plan=plan_of(cp=size), over=over, within_s=55, cells=cells)
    found = []
    for number, cell in enumerate(cells):
        layout, values = cell.layout, {}
        for name in GRADS:
            whole = layout.join([ends[rank][number][name] for rank in range(size)])
            assert not (strict and whole[~layout.is_real].any()), f"{name} of padding, {cell}"
            values[name] = layout.real(whole)
        found.append(values)
    return found


def error(found: Values, wanted: Values, names: Sequence[str] = GRADS) -> float:
    """The largest difference, of all values of a kind at most one where they are at most one."""
    worst = 0.0
    for name in names:
        if wanted[name].size:
            assert np.isfinite(found[name]).all(), name
            worst = max(worst, np.abs(found[name] - wanted[name]).max() / max(np.abs(wanted[name]).max(), 1))
    return worst


# --- what is right ------------------------------------------------------------------------------

LENGTHS = [(7,), (1,), (0, 3), (5, 9, 1, 0, 16), tuple(range(1, 18))]


def matrix(size: int) -> Iterator[Cell]:
    """Every method on every form, order and set of lengths, windows where they are known; and not causal."""
    for lengths, form, order, method in itertools.product(
        LENGTHS, ("bshd", "thd"), ("zigzag", "contiguous"), METHODS
    ):
        layout = SequenceLayout(lengths, form, size, order=order)
        windows = (None, (1, 4, 300)[len(lengths) % 3]) if METHODS[method].window else (None,)
        for window in windows:
            yield Cell(layout, method, kv_heads=3 if len(lengths) % 2 else 2, window=window)
        if form == "thd":
            layout = dataclasses.replace(layout, causal=False)
            yield Cell(layout, method, kv_heads=3 if len(lengths) % 2 else 2)


@pytest.mark.parametrize(("size", "over"), [(1, MEMORY), (2, MEMORY), (3, GLOO), (4, MEMORY)])
def test_all_methods_equal_one_process(size: int, over: str) -> None:
    cells = list(matrix(size))
    for cell, found in zip(cells, shared(cells, over=over), strict=True):
        assert error(found, plain(cell)) < 1e-12, cell


def test_a_long_window_in_tiles() -> None:
    """Documents longer than a tile, and a tile that begins in the middle of what it sees."""
    cells = [
        Cell(SequenceLayout((600, 300), form, 2), method, window=window)
        for form in ("bshd", "thd")
        for method in ("gather", "all_to_all")
        for window in (100, 350)
    ]
    for cell, found in zip(cells, shared(cells), strict=True):
        assert error(found, plain(cell)) < 1e-12, cell


def test_key_heads() -> None:
    layout = SequenceLayout((5, 9), "thd", 4)
    cells = [Cell(layout, method, kv_heads) for method in METHODS for kv_heads in (1, 2, 4, 6, 12)]
    for cell, found in zip(cells, shared(cells), strict=True):
        assert error(found, plain(cell)) < 1e-12, cell


def test_the_ring_has_the_bits_of_gather() -> None:
    layout = SequenceLayout((5, 9, 16), "thd", 3)
    by_ring, by_gather = shared([Cell(layout, "ring"), Cell(layout, "gather")])
    assert (by_ring["out"] == by_gather["out"]).all() and (by_ring["dq"] == by_gather["dq"]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding(dtype: torch.dtype) -> None:
    """float32 within its rounding; bfloat16 no further from the truth than one process of that dtype is."""
    alone = Cell(SequenceLayout((33, 70), "thd"), "ring", dtype=dtype)
    cells = [
        Cell(SequenceLayout((33, 70), form, 4), method, dtype=dtype)
        for form in ("bshd", "thd")
        for method in METHODS
    ]
    whole = Group("cp", (0,), 0)
    one = {name: alone.layout.real(value) for name, value in part(alone, whole).items()}
    limit = 2e-6 if dtype == torch.float32 else 1.5 * error(one, plain(alone))
    for cell, found in zip(cells, shared(cells), strict=True):
        assert error(found, plain(cell)) < limit, cell


def test_scores_far_apart() -> None:
    """Where one part's sum is e^110 times the other's and more, in either order of arrival."""
    cells = [
        Cell(SequenceLayout((16,), "thd", 2), method, dtype=torch.float32, loud=80) for method in METHODS
    ]
    for cell, found in zip(cells, shared(cells), strict=True):
        assert error(found, plain(cell)) < 1e-4, cell


# --- what it costs ------------------------------------------------------------------------------


def sent(groups: Groups, *, cells: Sequence[Cell]) -> list[int]:
    """Bytes that this rank sends to others for each cell."""
    real, counted = collectives.send_parts, list[int]()

    def send_parts(parts: Sequence[Tensor], into: Sequence[Tensor], *, group: Group) -> None:
        counted[-1] += sum(one.nbytes for to, one in enumerate(parts) if to != group.rank)
        real(parts, into, group=group)

    with (
        patch.object(collectives, "send_parts", send_parts),
        patch.object(ring_module, "send_parts", send_parts),
    ):
        for cell in cells:
            counted.append(0)
            part(cell, groups.get("model", "cp"))
    return counted


def test_bytes_on_the_wire_are_those_of_the_formula() -> None:
    cells = [
        Cell(SequenceLayout((17, 30), form, 3), method, kv_heads, dtype=dtype)
        for form in ("bshd", "thd")
        for method in METHODS
        for kv_heads in (2, 3)
        for dtype in (torch.float64, torch.bfloat16)
    ]
    for counted in ranks(sent, plan=plan_of(cp=3), over=GLOO, cells=cells).values():
        for cell, found in zip(cells, counted, strict=True):
            sizes = {"heads": HEADS, "kv_heads": cell.kv_heads, "dim": DIM}
            assert found == sum(
                wire_bytes(cell.method, cell.layout, item_bytes=cell.dtype.itemsize, **sizes)
            ), cell


# --- what never matters -------------------------------------------------------------------------

NEVER = [
    Cell(SequenceLayout((6, 9), form, 2, order=order), method, window=window)
    for form in ("bshd", "thd")
    for order in ("zigzag", "contiguous")
    for method, window in (("ring", None), ("gather", None), ("all_to_all", None), ("gather", 4))
]
NEVER += [
    Cell(SequenceLayout((6, 9), "thd", 2, order=order, causal=False), method)
    for order in ("zigzag", "contiguous")
    for method in METHODS
]


def test_padding_never_matters() -> None:
    others = [dataclasses.replace(cell, padding_seed=2) for cell in NEVER]
    found = shared(NEVER + others)
    for cell, one, other in zip(NEVER, found, found[len(NEVER) :], strict=False):
        assert all((one[name] == other[name]).all() for name in GRADS), cell


def test_another_document_never_matters() -> None:
    """Fault 9: a token of the first document changes, and the second has the same bits."""
    others = [dataclasses.replace(cell, changed=2) for cell in NEVER]
    found = shared(NEVER + others)
    for cell, one, other in zip(NEVER, found, found[len(NEVER) :], strict=False):
        for name in GRADS:
            assert (one[name][6:] == other[name][6:]).all(), cell
        before = 2 if cell.layout.causal else 0
        assert (one["out"][:before] == other["out"][:before]).all(), cell
        assert (one["out"][before:6] != other["out"][before:6]).any(), cell


# --- faults, brought back -----------------------------------------------------------------------


def no_documents() -> AbstractContextManager[Any]:
    """The ring takes a packed row for one document."""

    def blocks(layout: SequenceLayout, rank: int, source: int) -> Any:
        return real(SequenceLayout((sum(layout.padded),), "thd", layout.cp), rank, source)

    real = ring_module.blocks
    return patch.object(ring_module, "blocks", blocks)


def no_window() -> AbstractContextManager[Any]:
    """A method says that it knows windows, and drops them."""
    return patch.dict(attention_module.METHODS, ring=Method(window=True))


def first_keys() -> AbstractContextManager[Any]:
    """Backward uses the keys of the first step at every step."""
    real, first = ring_module._backward, []

    def backward(*given: Any) -> None:
        *before, (seen, kv), scale, dq, dkv = given
        first.append(kv)
        real(*before, (seen, first[0]), scale, dq, dkv)

    return patch.object(ring_module, "_backward", backward)


def own_sums() -> AbstractContextManager[Any]:
    """Backward uses the output and sum of each block in place of the final ones."""
    real = ring_module.block_backward

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Any:
        causal, scale = given[2:]
        return real(grad, q, k, v, *ring_module.block_forward(q, k, v, causal, scale), causal, scale)

    return patch.object(ring_module, "block_backward", backward)


def no_way_home() -> AbstractContextManager[Any]:
    """Gradients of keys stay a step short of home."""
    real, calls = ring_module._pass_on, itertools.count()

    def pass_on(tensor: Tensor, group: Group) -> Tensor:
        # Forward passes on once a step; backward twice a step but for the last, which brings them home.
        last = next(calls) == (group.size - 1) + 2 * (group.size - 1)
        return tensor if last else real(tensor, group)

    return patch.object(ring_module, "_pass_on", pass_on)


def overflowing() -> AbstractContextManager[Any]:
    """Sums are merged by an exponential that may be positive."""

    def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        both = lse + torch.log(1 + torch.exp(more_lse - lse))
        out.mul_((lse - both).exp()[..., None]).add_(more * (more_lse - both).exp()[..., None])
        lse.copy_(both)

    return patch.object(ring_module, "merge", merge)


MUTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": ExitStack,
    "no_documents": no_documents,
    "no_window": no_window,
    "first_keys": first_keys,
    "own_sums": own_sums,
    "no_way_home": no_way_home,
    "overflowing": overflowing,
}

PACKED = SequenceLayout((16, 16), "thd", 2)
FAULTS: list[tuple[str, Cell, tuple[str, ...]]] = [
    ("no_documents", Cell(PACKED, "ring"), ()),
    ("no_documents", Cell(PACKED, "gather"), ()),
    ("no_window", Cell(PACKED, "ring", window=3), ()),
    ("first_keys", Cell(PACKED, "ring"), ("out",)),
    ("own_sums", Cell(PACKED, "ring"), ("out",)),
    ("own_sums", Cell(PACKED, "gather"), ("out",)),
    ("no_way_home", Cell(PACKED, "ring"), ("out", "dq")),
    ("overflowing", Cell(SequenceLayout((16,), "thd", 2), "ring", dtype=torch.float32, loud=80), ()),
]
"""Each fault, a call that it spoils, and what is right all the same: most spare the loss."""


def test_faults_are_seen() -> None:
    """Faults 9, 10 and 11: each comes back, and the comparison above sees it."""
    cells = [dataclasses.replace(cell, mutation=mutation) for mutation, cell, _ in FAULTS]
    each = shared(cells, over=GLOO, strict=False)
    for cell, found, (_, _, right) in zip(cells, each, FAULTS, strict=True):
        wanted = plain(cell)
        off = {name: np.abs(np.nan_to_num(found[name], nan=np.inf) - wanted[name]).max() for name in GRADS}
        assert {name for name in GRADS if off[name] < 1e-12} == set(right), (cell, off)


def test_many_blocks_are_merged_in_float32() -> None:
    """Fault 11: sixteen blocks of bfloat16 are as near to the truth as one is, unless merged in bfloat16."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 256, 4, 32, generator=generator).to(torch.bfloat16) for _ in range(3))
    scores = torch.einsum("rqhd,rkhd->rhqk", q.double(), k.double()) * 0.2
    wanted = torch.einsum("rhqk,rkhd->rqhd", scores.softmax(-1), v.double())

    def off(exact: torch.dtype, count: int) -> float:
        out, lse = torch.zeros(q.shape, dtype=exact), torch.full(q.shape[:-1], -1e9, dtype=exact)
        for keys, values in zip(k.chunk(count, 1), v.chunk(count, 1), strict=True):
            more, more_lse = ring_module.block_forward(q, keys, values, False, 0.2)
            ring_module.merge(out, lse, more.to(exact), more_lse.to(exact))
        return float((out - wanted).norm() / wanted.norm())

    assert off(torch.float32, 16) < 1.05 * off(torch.float32, 1) < 3e-3
    assert off(torch.bfloat16, 16) > 5 * off(torch.float32, 16)


@pytest.mark.parametrize("gap", [-300.0, -110.0, 0.0, 110.0, 300.0])
def test_sums_far_apart_are_merged(gap: float) -> None:
    out, more = torch.full((1, 1, 1, 2), 3.0), torch.full((1, 1, 1, 2), 5.0)
    lse = torch.full((1, 1, 1), 7.0)
    ring_module.merge(out, lse, more, lse + gap)
    share = 1 / (1 + math.exp(-gap))
    assert torch.allclose(out, torch.full_like(out, 3 + 2 * share))
    assert lse.item() == pytest.approx(7 + max(gap, 0) + math.log1p(math.exp(-abs(gap))))
