"""Values that vLLM changes while it loads: its own loaders beside the steps of a refit, bit for bit."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, Transform, along, even, pad, whole
from shardweave.refit.values import apply, landing

pytestmark = pytest.mark.peer("vllm")


def test_decay_is_what_its_composed_loader_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`A` of Mamba2: a shard of `A_log`, then -exp in float32, as its mixer composes them."""
    from vllm.model_executor.model_loader import weight_utils

    stored = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    stored = stored[torch.isfinite(stored)][: 3 * 21_000]
    tensor = Tensor("A_log", tuple(stored.shape), "bfloat16")
    mesh = Mesh((("tp", 3),))
    rows = along(mesh, "tp", lambda r: even(whole(len(stored)), 3, r))
    rule = BufferRule("A", (Part(tensor),), (rows,), dtype="float32", transform=Transform("neg_exp"))
    src = Layout("hf", Mesh(()), (BufferRule("A_log", (Part(tensor),), tensor.dims),))
    _, steps = landing(src, Layout("vllm", mesh, (rule,)))
    load = weight_utils.composed_weight_loader(
        weight_utils.sharded_weight_loader(0), lambda x: -torch.exp(x.float())
    )
    for rank in range(3):
        monkeypatch.setattr(weight_utils, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        theirs = torch.nn.Parameter(torch.full((21_000,), math.nan), requires_grad=False)
        load(theirs, stored)
        ours = {"A": torch.full((21_000,), math.nan)}
        apply(steps, rank, {"A": stored[rank * 21_000 : (rank + 1) * 21_000]}, ours)
        assert torch.equal(ours["A"].view(torch.int32), theirs.data.view(torch.int32))


def test_padded_rows_of_the_vocabulary_are_zero_as_its_loader_leaves_them() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding,
        VocabParallelEmbeddingShardIndices,
    )

    size, hidden, each = 150, 3, 96
    values = torch.arange(1.0, 1 + size * hidden).view(size, hidden)
    tensor = Tensor("embed", (size, hidden), "float32")
    mesh = Mesh((("tp", 2),))
    rows = along(mesh, "tp", lambda r: even(pad(whole(size), 64), 2, r))
    dst = Layout("vllm", mesh, (BufferRule("embed", (Part(tensor),), (rows, whole(hidden))),))
    src = Layout("hf", Mesh(()), (BufferRule("embed", (Part(tensor),), tensor.dims),))
    _, steps = landing(src, dst)
    for rank in range(2):
        start, end = each * rank, min(each * (rank + 1), size)
        indices = VocabParallelEmbeddingShardIndices(
            padded_org_vocab_start_index=each * rank,
            padded_org_vocab_end_index=each * (rank + 1),
            padded_added_vocab_start_index=2 * each,
            padded_added_vocab_end_index=2 * each,
            org_vocab_start_index=start,
            org_vocab_end_index=end,
            added_vocab_start_index=size,
            added_vocab_end_index=size,
        )
        theirs = torch.nn.Parameter(torch.full((each, hidden), math.nan), requires_grad=False)
        theirs.output_dim = 0  # type: ignore[attr-defined]
        layer = SimpleNamespace(org_vocab_size=size, shard_indices=indices, quant_config=None)
        VocabParallelEmbedding.weight_loader(layer, theirs, values)
        ours = {"embed": torch.full((each, hidden), math.nan)}
        ours["embed"][: end - start] = values[start:end]
        apply(steps, rank, ours, ours)
        assert torch.equal(ours["embed"], theirs.data)
