"""Every transport passes the same tests: real processes, targets full of NaN, compared bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from scenes import PLANS, bits, expected, move, ranks_of
from workers import run, values

from shardweave.errors import TransportError, TransportTimeoutError

NIXL = pytest.param(
    "nixl",
    marks=pytest.mark.skipif(
        not any(map(importlib.util.find_spec, ("nixl", "nixl_cu12", "nixl_cu13"))),
        reason="nixl is not installed",
    ),
)
each_transport = pytest.mark.parametrize("kind", ["collective", "shared", NIXL])


@each_transport
@pytest.mark.parametrize("pair", PLANS)
def test_a_move_is_the_simulated_plan(pair: str, kind: str, tmp_path: Path) -> None:
    moves = PLANS[pair]
    bound = max(64, moves.num_bytes // 16)
    ended = values(
        run(move, ranks_of(moves), pair=pair, kind=kind, folder=tmp_path, memory_bytes=bound, turns=2)
    )
    wanted = expected(moves)
    for rank, tensors in wanted.items():
        assert ended[rank][0] == bits(tensors), f"rank {rank}"
    reports = {rank: report for rank, (_, report) in ended.items()}
    assert len({report.num_rounds for report in reports.values()}) == 1
    # Bytes over bytes needed, with the needed ones counted in the reference: whatever is not NaN.
    needed = sum(
        int(tensor.isfinite().sum()) * getattr(torch, moves.src.rules[0].dtype).itemsize
        for tensors in wanted.values()
        for tensor in tensors.values()
    )
    assert sum(report.bytes_received + report.bytes_local for report in reports.values()) == needed
    received = sum(report.bytes_received for report in reports.values())
    assert received > 0 and next(iter(reports.values())).num_rounds > 1
    assert sum(report.bytes_sent for report in reports.values()) == (received if kind == "collective" else 0)


@each_transport
@pytest.mark.parametrize("how", ["dies", "stalls"])
@pytest.mark.parametrize("bad", [1, 2], ids=["source", "destination"])
def test_a_rank_that_dies_or_stalls_frees_all_others(bad: int, how: str, kind: str, tmp_path: Path) -> None:
    """Rank 1 only sends, rank 2 only receives; ranks that need neither of them are freed too."""
    pair, timeout_s = "transposed", 1.5
    ranks = ranks_of(PLANS[pair])
    others = [rank for rank in ranks if rank != bad]
    ended = run(
        move,
        ranks,
        pair=pair,
        kind=kind,
        folder=tmp_path,
        timeout_s=timeout_s,
        ends={bad: how},
        done=others,
    )
    for rank in others:
        error = ended[rank].error
        assert isinstance(error, TransportError), f"rank {rank}: {error!r}"
        assert "rank" in error.where and str(error).count("a move is done") <= 1, (
            "the first failure is quoted"
        )
        # What is stated: the bound for the only round and for one more; the processes start in that time too.
        assert ended[rank].seconds < 2 * timeout_s + 6
    if how == "stalls":
        assert any(isinstance(end.error, TransportTimeoutError) for end in ended.values())
