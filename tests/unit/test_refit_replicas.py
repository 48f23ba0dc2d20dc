"""What publishers share: which elements, held by whom, and which of two ranks differ."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from refit_world import Tensors, content

from shardweave.dialects import megatron
from shardweave.errors import ReplicaError
from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Tensor,
    Transform,
    along,
    even,
    pad,
    split,
    take,
    whole,
)
from shardweave.models import Model, from_config
from shardweave.refit import replicas


def model() -> Model:
    return from_config(
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 2,
            "hidden_size": 20,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "intermediate_size": 24,
            "moe_intermediate_size": 8,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "vocab_size": 70,
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
        }
    )


def held_by_rank(layout: Layout) -> dict[tuple[str, tuple[int, ...]], set[int]]:
    """For each element the ranks that hold it, counted one by one."""
    found: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for rank in layout.mesh.ranks:
        for buffer in layout.buffers(rank):
            for piece in buffer.pieces():
                for index in itertools.product(*piece.box.dims):
                    found.setdefault((piece.tensor.name, index), set()).add(rank)
    return found


MIXED = Tensor("w", (12, 5), "float32")
FOUR = Mesh((("r", 4),))
OTHER = Part(MIXED, replica=True)


def rows(cut: Callable[[int], Dim]) -> tuple[Any, Dim]:
    """Both dims of a buffer of which each rank has some rows."""
    return along(FOUR, "r", cut), whole(5)


def whole_or_part(rank: int) -> Dim:
    return whole(12) if rank == 0 else split(whole(12), (5, 4, 3), rank - 1)


def every_other_block(rank: int) -> Dim:
    return take(whole(12), ((0, 2), (1, 3))[rank % 2], 3)


PADDED = BufferRule(
    "b", (OTHER,), (pad(even(whole(12), 2, 0), 8), whole(5)), stacked=(1, 0), where=(("r", (3,)),)
)
LAYOUTS = {
    "megatron": megatron.layout(model(), megatron.mesh(tp=2, pp=2, ep=2, etp=1, dp=2), vocab_divisor=3),
    "overlapping": Layout("", FOUR, (BufferRule("w", (OTHER,), rows(whole_or_part)),)),
    "blocks and padding": Layout(
        "", FOUR, (BufferRule("a", (Part(MIXED),), rows(every_other_block)), PADDED)
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_that_two_ranks_hold_is_compared_between_them(name: str) -> None:
    """Against a count of elements one by one: holders are joined by comparisons, all of them."""
    layout = LAYOUTS[name]
    joined: dict[tuple[str, tuple[int, ...]], list[set[int]]] = {}
    for one in replicas.shared(layout):
        for dims in itertools.product(*one.elements):
            for index in itertools.product(*dims):
                joined.setdefault((one.tensor.name, index), []).append(set(one.ranks))
    for element, ranks in held_by_rank(layout).items():
        groups = joined.get(element, [])
        reached, before = {min(ranks)}, set()
        while reached != before:
            before = set(reached)
            reached |= {rank for group in groups if group & reached for rank in group}
        assert reached == ranks, element


def word_of(layout: Layout, rank: int, arrays: Tensors, tensor: str, index: tuple[int, ...]) -> torch.Tensor:
    """Where a rank stores an element, as a view of its bits."""
    for buffer in layout.buffers(rank):
        for piece in buffer.pieces():
            if piece.tensor.name == tensor and index in piece.box:
                dims = zip(piece.at.dims, piece.box.dims, index, strict=True)
                place = [at[box.index(i)] for at, box, i in dims]
                array = arrays[buffer.member(tuple(place[d] for d in buffer.separate))]
                bits = array.view(torch.int16 if array.element_size() == 2 else torch.int32)
                return bits[tuple(slice(place[d], place[d] + 1) for d in buffer.stacked)]
    raise AssertionError("the rank does not hold it")


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_bit_of_any_replica_is_seen_and_named(name: str) -> None:
    layout = LAYOUTS[name]
    live, owners = content(layout, 0), held_by_rank(layout)
    shared = [element for element, ranks in owners.items() if len(ranks) > 1]
    taken = {rank: replicas.take([layout], rank, live[rank]) for rank in live}
    assert replicas.differing({rank: replicas.digests(each) for rank, each in taken.items()}) is None
    draw = np.random.default_rng(7)
    for i in draw.choice(len(shared), 12, replace=False):
        tensor, index = shared[i]
        rank = int(draw.choice(sorted(owners[tensor, index])))
        word = word_of(layout, rank, live[rank], tensor, index)
        word ^= 1
        try:
            now = {**taken, rank: replicas.take([layout], rank, live[rank])}
        except ReplicaError as error:  # the rank holds it twice itself
            assert f"rank {rank}, " in str(error)
        else:
            pair = replicas.differing({r: replicas.digests(each) for r, each in now.items()})
            assert pair is not None and rank in pair
            with pytest.raises(
                ReplicaError, match=f"rank {pair[0]} and rank {pair[1]}.*'{re.escape(tensor)}'"
            ):
                replicas.refuse([layout], *((r, replicas.encode(now[r])) for r in pair))
        word ^= 1


@pytest.mark.parametrize("stored", [{"dtype": "float64"}, {"transform": Transform("neg_exp")}], ids=str)
def test_what_is_not_comparable_is_not_compared(stored: dict[str, Any]) -> None:
    """A copy in another dtype, or of another function of the values, has other bits."""
    first = BufferRule("a", (Part(MIXED),), MIXED.dims, where=(("r", (0,)),))
    second = BufferRule("b", (OTHER,), MIXED.dims, where=(("r", (1,)),), **stored)
    assert replicas.shared(Layout("", FOUR, (first, second))) == ()
    assert len(replicas.shared(Layout("", FOUR, (first, replace(first, name="b", parts=(OTHER,)))))) == 1


def test_nothing_is_shared_where_each_element_is_held_once() -> None:
    dims = rows(lambda rank: even(whole(12), 4, rank))
    assert replicas.shared(Layout("", FOUR, (BufferRule("w", (Part(MIXED),), dims),))) == ()
