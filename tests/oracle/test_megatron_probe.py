"""The marker probe on megatron-core's own layers: who gets which rows, without a process group.

The layers are built with markers as their initial weights. A group is a rank and a size here; that
is all that initialisation on the CPU asks of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from shardweave.errors import ProbeError
from shardweave.layout import Dim, Run, concat, even, prove, relabel, select, split, whole
from shardweave.testing import Found, compare, expect, probe

pytestmark = pytest.mark.peer("megatron.core")


@dataclass(frozen=True)
class Group:
    number: int
    world: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.world


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    import torch
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import layers, utils

    # As long as torch.distributed has not been started these take any group for none.
    monkeypatch.setattr(layers, "get_pg_size", Group.size)
    monkeypatch.setattr(layers, "get_pg_rank", Group.rank)
    for module in (layers, utils):
        monkeypatch.setattr(module, "get_tensor_model_parallel_group_if_none", lambda group, **_: group)
    # The master weight is float32 whatever the parameters are.
    config = ModelParallelConfig(use_cpu_initialization=True, params_dtype=torch.float32)

    def column(x: Any, rank: int, world: int, *, stride: int = 1) -> Any:
        return layers.ColumnParallelLinear(
            x.shape[1],
            x.shape[0],
            config=config,
            init_method=lambda master: master.copy_(x),
            bias=False,
            stride=stride,
            tp_group=Group(rank, world),
        ).weight

    def row(x: Any, rank: int, world: int) -> Any:
        return layers.RowParallelLinear(
            x.shape[1],
            x.shape[0],
            config=config,
            init_method=lambda master: master.copy_(x),
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=Group(rank, world),
        ).weight

    def vocab(x: Any, rank: int, world: int) -> Any:
        return layers.VocabParallelEmbedding(
            x.shape[0],
            x.shape[1],
            config=config,
            init_method=lambda master: master.copy_(x),
            tp_group=Group(rank, world),
        ).weight

    return SimpleNamespace(
        column=column, row=row, vocab=vocab, utils=utils, initialize=layers._initialize_affine_weight_cpu
    )


def cut_of(found: Found, d: int) -> list[Dim]:
    return [held[d] for held in found.ranks if held is not None]


def run(partition: Any, shape: Any, ranks: int, **options: Any) -> Found:
    return probe(partition, shape, ranks=ranks, dtype="float32", arrays="torch", **options)


def test_columns_rows_and_vocabulary(megatron: SimpleNamespace) -> None:
    declared = [even(whole(12), 3, rank) for rank in range(3)]
    for partition, shape, d in (
        (megatron.column, (12, 5), 0),
        (megatron.row, (5, 12), 1),
        (megatron.vocab, (12, 5), 0),
    ):
        found = run(partition, shape, 3)
        expect(found, declared, dim=d)
        assert found.aliased == ()
        prove(found.layout("megatron"))


def test_what_does_not_divide_is_the_peers_refusal(megatron: SimpleNamespace) -> None:
    for partition, shape in ((megatron.column, (13, 5)), (megatron.row, (5, 13)), (megatron.vocab, (13, 5))):
        with pytest.raises(ProbeError, match=r"rank 0 of 3: AssertionError: 13 is not divisible by 3"):
            run(partition, shape, 3)


def test_gate_and_up_are_cut_apart(megatron: SimpleNamespace) -> None:
    """fc1 of a gated mlp has stride 2: every rank has its rows of the gate, then of up."""
    found = run(lambda x, r, n: megatron.column(x, r, n, stride=2), (24, 5), 3)
    gate_up = concat(whole(12, "gate"), whole(12, "up"))
    apart = [concat(even(whole(12, "gate"), 3, rank), even(whole(12, "up"), 3, rank)) for rank in range(3)]
    assert [select(gate_up, rows) for rows in cut_of(found, 0)] == apart
    # Without the stride the first rank would have no row of up.
    plain = run(megatron.column, (24, 5), 3)
    assert str(compare(plain, found)) == "rank 0, dim 0, position 4: expected [12], got [4]"


@pytest.mark.parametrize(("heads", "groups", "tp"), [(12, 6, 3), (8, 2, 4), (6, 3, 9)])
def test_fused_qkv_is_cut_through_its_groups(
    megatron: SimpleNamespace, heads: int, groups: int, tp: int
) -> None:
    """Rows are fused by KV group and then cut evenly, whatever falls on a cut."""
    head_dim, q_heads = 3, heads // groups
    fused = concat(
        *(
            concat(
                split(whole(heads * head_dim, "q"), [q_heads * head_dim] * groups, group),
                *(split(whole(groups * head_dim, label), [head_dim] * groups, group) for label in "kv"),
            )
            for group in range(groups)
        )
    )
    if len(fused) % tp:
        pytest.fail("sizes that do not divide ask nothing")
    found = run(megatron.column, (len(fused), 5), tp)
    rows = [select(fused, held) for held in cut_of(found, 0)]
    assert rows == [even(fused, tp, rank) for rank in range(tp)]
    assert sorted(index for dim in rows for index in dim) == sorted(fused)
    if groups < tp:
        assert any("k" not in dim.labels for dim in rows)


def test_the_three_tensors_by_name(megatron: SimpleNamespace) -> None:
    """The same, asked of three tensors: what a rank holds comes back with labels."""
    import torch

    def fuse(q: Any, k: Any, v: Any, rank: int, world: int) -> Any:
        rows = [x.reshape(2, -1, x.shape[1]) for x in (q, k, v)]
        return megatron.column(torch.cat(rows, dim=1).reshape(-1, q.shape[1]), rank, world)

    found = run(fuse, {"q": (24, 5), "k": (6, 5), "v": (6, 5)}, 4)
    assert [str(dim) for dim in cut_of(found, 0)] == [
        "q[0:9]",
        "q[9:12] k[0:3] v[0:3]",
        "q[12:21]",
        "q[21:24] k[3:6] v[3:6]",
    ]
    prove(found.layout("megatron qkv"))
    naive = [concat(*(relabel(even(whole(n), 4, r), label) for label, n in (("q", 24),))) for r in range(4)]
    assert str(compare(found, naive)) == "rank 0, dim 0, position 6: expected the end, got q[6]"


def test_the_helper_below_the_layers(megatron: SimpleNamespace) -> None:
    import torch

    def initialized(x: Any, rank: int, world: int) -> Any:
        weight = torch.empty(x.shape[0], x.shape[1] // world)
        megatron.initialize(
            weight,
            *x.shape,
            x.shape[1] // world,
            1,
            lambda m: m.copy_(x),
            stride=2,
            rank=rank,
            world_size=world,
        )
        return weight

    found = run(initialized, (3, 16), 4)
    assert [str(dim) for dim in cut_of(found, 1)] == [
        "[0:2] [8:10]",
        "[2:4] [10:12]",
        "[4:6] [12:14]",
        "[6:8] [14:16]",
    ]


def test_splitting_helpers(megatron: SimpleNamespace) -> None:
    utils = megatron.utils
    last = run(lambda x, r, n: utils.split_tensor_along_last_dim(x, n)[r], (2, 3, 8), 4)
    expect(last, [even(whole(8), 4, rank) for rank in range(4)], dim=2)
    assert last.aliased == (0, 1, 2, 3)
    copied = run(lambda x, r, n: utils.split_tensor_along_last_dim(x, n, True)[r], (2, 3, 8), 4)
    assert copied.aliased == ()

    def flat(x: Any, rank: int, world: int) -> Any:
        return utils.split_tensor_into_1d_equal_chunks(x, tp_group=Group(rank, world))

    found = run(flat, (3, 8), 4, flat=True)
    assert cut_of(found, 0) == [even(whole(24), 4, rank) for rank in range(4)]
    assert [str(box) for _, box in found.boxes(1)] == ["[0:1, 6:8]", "[1:2, 0:4]"]
    # 23 elements over 4 ranks: three are left to nobody, without a word.
    lost = run(flat, (23,), 4)
    assert cut_of(lost, 0)[-1] == Dim((Run("", 15, 5),))


def test_vocabulary_ranges(megatron: SimpleNamespace) -> None:
    def ranged(x: Any, rank: int, world: int) -> Any:
        first, last = megatron.utils.VocabUtility.vocab_range_from_global_vocab_size(len(x), rank, world)
        return x[first:last]

    expect(run(ranged, (12, 2), 4), [even(whole(12), 4, rank) for rank in range(4)])
