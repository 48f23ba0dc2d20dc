"""What ModelExpress 0.7.0 accepts without a word, where manifests and fingerprints decide.

One test a row, named after it. The rows that they do not decide are about loaders and their buffers: what
a plan decides of them is in test_plan_cases.py, and the rest is a matter of the receiver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from shardweave.errors import (
    DtypeError,
    GapError,
    OverlapError,
    PlanError,
    ReplicaError,
    UnknownNameError,
)
from shardweave.layout import Box, BufferRule, Layout, Mesh, Part, Tensor, along, concat, cut, even, whole
from shardweave.layout.fingerprint import NOTHING, Fingerprint, fingerprint
from shardweave.plan import plan
from shardweave.refit import Manifest, decode, encode, fingerprints_of, merge, part_of

W = Tensor("model.layers.0.mlp.down_proj.weight", (8, 4), "float32")
Words = NDArray[np.int32]


def shard(rank: int, start: int, stop: int, *, dtype: str = "", endpoint: bytes = b"") -> Manifest:
    """The manifest of a rank that holds some rows of W, as it comes from the wire."""
    rule = BufferRule("down_proj", (Part(W),), (cut(W.dims[0], start, stop), W.dims[1]), dtype=dtype)
    return decode(encode(Manifest(Layout("", Mesh((), offset=rank), (rule,)), {rank: endpoint}, 5)))


def stamped(manifest: Manifest, rows: NDArray[np.float32]) -> Manifest:
    (rank,) = manifest.ranks
    prints = fingerprints_of(manifest.layout, rank, {"down_proj": rows})
    return replace(manifest, fingerprints={rank: prints})


def test_two_whole_shards_are_a_source() -> None:
    layout = merge([shard(0, 0, 4), shard(1, 4, 8)], tensors=[W])
    assert [len(list(layout.buffers(rank))) for rank in layout.mesh.ranks] == [1, 1]


def test_one_of_two_row_shards_missing() -> None:
    with pytest.raises(GapError, match=r"box \[4:8, 0:4\].*missing 16 of 32 elements"):
        merge([shard(0, 0, 4)])


def test_overlapping_shards_that_are_not_identical() -> None:
    with pytest.raises(OverlapError, match=r"indices \[3:5\]|box \[3:5, 0:4\]"):
        merge([shard(0, 0, 5), shard(1, 3, 8)])


def test_identical_shards_are_replicas_and_both_can_serve() -> None:
    layout = merge([shard(0, 0, 8), shard(1, 0, 8)])
    target = Layout("", Mesh((), offset=9), (BufferRule("w", (Part(W),), W.dims),))
    (family,) = plan(layout, target).families
    assert set(family.src.tolist()) == {0, 1}


def test_replicas_with_different_digests() -> None:
    rows = np.random.default_rng(0).random((8, 4), dtype=np.float32)
    good = [stamped(shard(rank, 0, 8), rows) for rank in (0, 1, 2)]
    merge(good)
    drifted = rows.copy()
    drifted[6, 1] = np.nextafter(drifted[6, 1], np.float32(2))
    with pytest.raises(ReplicaError, match=r"of rank 0 != .* of rank 2"):
        merge([*good[:2], stamped(shard(2, 0, 8), drifted)])


def test_element_sizes_disagree() -> None:
    """A manifest has no size beside its dtype that could disagree with it; two stored dtypes do."""
    with pytest.raises(DtypeError, match=r"dtype\(float32\) != dtype\(bfloat16\)"):
        merge([shard(0, 0, 4), shard(1, 4, 8, dtype="bfloat16")])
    other = replace(W, dtype="bfloat16")
    rule = BufferRule("down_proj", (Part(other),), (cut(W.dims[0], 4, 8), W.dims[1]))
    with pytest.raises(DtypeError, match="rank 0 and rank 1"):
        merge([shard(0, 0, 4), Manifest(Layout("", Mesh((), offset=1), (rule,)), {1: b""}, 5)])
    with pytest.raises(DtypeError, match="bfloat17"):
        shard(0, 0, 8, dtype="bfloat17")


def test_up_proj_never_published_for_a_gate_up_parameter() -> None:
    gate, up = (
        Tensor(f"model.layers.0.mlp.{role}_proj.weight", (6, 4), "float32") for role in ("gate", "up")
    )
    source = Layout("trainer", Mesh(()), (BufferRule("gate", (Part(gate),), gate.dims),))
    rows = concat(whole(6, "gate"), whole(6, "up"))
    fused = BufferRule("gate_up_proj", (Part(gate, "gate"), Part(up, "up")), (rows, whole(4)))
    target = Layout("engine", Mesh((), offset=1), (fused,))
    published = [Manifest(source, {0: b""}, 5)]
    with pytest.raises(UnknownNameError, match="up_proj"):
        merge(published, tensors=target.tensors)
    with pytest.raises(PlanError, match="up_proj"):
        plan(merge(published), target)


# --- digests: the three changes that the peer's does not see -------------------------------------


def peer_digest(words: Words) -> tuple[int, int]:
    """Sums of 1024-word rows, then their sum and their sum weighted by row, modulo 2**64."""
    rows = words.reshape(-1, 1024).astype(np.uint64).sum(axis=1, dtype=np.uint64)
    weighted = (rows * np.arange(1, len(rows) + 1, dtype=np.uint64)).sum(dtype=np.uint64)
    return int(rows.sum(dtype=np.uint64)), int(weighted)


def swap_lines(words: Words) -> Words:
    """Two rows of 256 bytes inside one of 4096 change places."""
    lines = words.reshape(-1, 64).copy()
    lines[[3, 7]] = lines[[7, 3]]
    return lines.reshape(-1)


def move_a_word(words: Words) -> Words:
    """One word goes to the end of its row of 4096 bytes; those between move up."""
    moved = words.copy()
    moved[5:1024] = np.roll(moved[5:1024], -1)
    return moved


def exchange_pairs(words: Words) -> Words:
    """Rows 0 and 3 hold what rows 1 and 2 held, so that sums of numbers of rows stay what they were."""
    rows = words.reshape(-1, 1024).copy()
    rows[[0, 1]], rows[[3, 2]] = rows[[1, 0]], rows[[2, 3]]
    return rows.reshape(-1)


def pairs() -> Words:
    """Four rows of which 0 equals 3 in sum and 1 equals 2, for the third change."""
    rows = np.random.default_rng(2).integers(0, 1 << 20, (4, 1024), dtype=np.int32)
    rows[3, 0] += rows[0].sum() - rows[3].sum()
    rows[2, 0] += rows[1].sum() - rows[2].sum()
    return rows.reshape(-1)


@pytest.mark.parametrize("change", [swap_lines, move_a_word, exchange_pairs])
@pytest.mark.parametrize("shape", [(4096,), (4, 1024), (64, 64), (2, 32, 64)], ids=str)
def test_digest_sees_moved_words_swapped_rows_and_exchanged_pairs(
    change: Callable[[Words], Words], shape: tuple[int, ...]
) -> None:
    words = pairs()
    changed = change(words)
    assert not np.array_equal(words, changed)
    assert peer_digest(words) == peer_digest(changed), "a change that the peer's digest would see"
    assert fingerprint(words.reshape(shape)) != fingerprint(changed.reshape(shape))


@pytest.mark.peer("modelexpress", "torch")
@pytest.mark.parametrize("change", [swap_lines, move_a_word, exchange_pairs])
def test_the_peer_s_own_digest_does_not_see_them(change: Callable[[Words], Words]) -> None:
    import torch
    from modelexpress.refit.reshard.verify import tensor_digest

    before, after = (torch.from_numpy(words.copy()) for words in (pairs(), change(pairs())))
    assert tensor_digest(before) == tensor_digest(after)


def test_a_partial_read_is_checked_against_what_was_published() -> None:
    """What the peer calls impossible: what a trainer published at TP4 adds up to an engine's half at TP2."""
    words = np.random.default_rng(4).integers(0, 1 << 31, (8, 12), dtype=np.int32)
    published = {
        rank: fingerprint(words[:, c : c + 3], Box.of((0, c), (8, 3))) for rank, c in enumerate((0, 3, 6, 9))
    }
    read, at = words[:, 6:].copy(), Box.of((0, 6), (8, 6))
    assert fingerprint(read, at) == published[2] + published[3]
    whole_one: Fingerprint = sum(published.values(), NOTHING)
    assert fingerprint(words[:, :6], Box.of((0, 0), (8, 6))) == whole_one - fingerprint(read, at)
    read[3, 4] ^= 1
    assert fingerprint(read, at) != published[2] + published[3]


# --- what changes between versions --------------------------------------------------------------


def test_cached_plan_after_the_trainer_restarted() -> None:
    """A plan belongs to a structure and has no addresses; those are read from the manifest at hand."""
    before, after = shard(0, 0, 8, endpoint=b"0xdead"), shard(0, 0, 8, endpoint=b"0xbeef")
    assert before.structure == after.structure and before.endpoints != after.endpoints
    restarted_otherwise = shard(0, 0, 7)
    assert restarted_otherwise.structure != before.structure


def test_trainer_takes_a_step_while_it_is_read() -> None:
    """Ranks stamped with two steps are no source, and content of two steps is not what was published."""
    first, second = shard(0, 0, 4), shard(1, 4, 8)
    with pytest.raises(PlanError, match=r"version\(5\) != version\(6\)"):
        merge([first, replace(second, version=6)])
    rows = np.random.default_rng(0).random((4, 4), dtype=np.float32)
    published = stamped(first, rows)
    torn = np.concatenate([rows[:2], rows[2:] * np.float32(1.5)])
    assert stamped(first, torn).fingerprints != published.fingerprints


def test_kv_heads_below_tp_are_published_by_global_rows() -> None:
    """64 query heads and 2 KV heads at TP8: some ranks hold queries only, and some heads are cut."""
    q, k, v = (Tensor(role, (heads * 4, 6), "bfloat16") for role, heads in (("q", 64), ("k", 2), ("v", 2)))
    groups = [
        concat(
            cut(whole(256, "q"), g * 128, (g + 1) * 128),
            cut(whole(8, "k"), g * 4, (g + 1) * 4),
            cut(whole(8, "v"), g * 4, (g + 1) * 4),
        )
        for g in range(2)
    ]
    mesh = Mesh((("tp", 8),))
    rows = along(mesh, "tp", lambda r: even(concat(*groups), 8, r))
    parts = tuple(Part(tensor, tensor.name) for tensor in (q, k, v))
    trainer = Layout("", mesh, (BufferRule("linear_qkv", parts, (rows, whole(6))),))
    manifests = [decode(encode(Manifest(part_of(trainer, rank), {rank: b""}, 1))) for rank in mesh.ranks]
    assert [tuple(t.name for t in m.layout.tensors) for m in manifests[2:4]] == [("q",), ("q", "k", "v")]
    assert set(merge(manifests, tensors=(q, k, v)).tensors) == {q, k, v}
    with pytest.raises(GapError):
        merge([*manifests[:3], *manifests[4:]])
