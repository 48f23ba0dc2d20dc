"""The groups that megatron-core itself makes, counted and compared with those that are planned here."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from shardweave.train.grid import GroupPlan
from shardweave.train.parallel import Parallel

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "groups.py"))

Made = list[tuple[str, tuple[int, ...], str | None]]
"""Each call of ``new_group``: the description, the ranks, the backend."""


@contextmanager
def recorded(world_size: int) -> Iterator[Made]:
    """Calls of rank 0 in a world that there is not."""
    import torch.distributed as dist

    made: Made = []

    def new_group(ranks: list[int], *args: Any, **given: Any) -> object:
        made.append((given["group_desc"], tuple(ranks), given.get("backend")))
        return object()

    with ExitStack() as patches:
        for name, value in (
            ("is_initialized", lambda: True),
            ("get_world_size", lambda *args: world_size),
            ("get_rank", lambda *args: 0),
            ("get_backend", lambda *args: "nccl"),
            ("new_group", new_group),
        ):
            patches.enter_context(patch.object(dist, name, value))
        yield made


def upstream_calls(parallel: Parallel, *, gloo: bool = False) -> Made:
    from megatron.core import parallel_state

    with recorded(parallel.world_size) as made:
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tp,
                context_parallel_size=parallel.cp,
                pipeline_model_parallel_size=parallel.pp,
                expert_model_parallel_size=parallel.ep,
                expert_tensor_parallel_size=parallel.etp,
                create_gloo_process_groups=gloo,
            )
        finally:
            parallel_state.destroy_model_parallel()
    return made


ONE_MORE = "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
"""A group of one list of all ranks, in the optimizer's one instance."""


@pytest.mark.peer("megatron.core")
@pytest.mark.parametrize(
    ("parallel", "calls", "with_gloo"),
    [
        (Parallel(tp=8, cp=2, pp=8, dp=8, ep=8), 2680, 2936),
        (Parallel(tp=8, cp=2, pp=16, dp=64, ep=64), 32832, 34240),
    ],
    ids=["1,024 ranks", "16,384 ranks"],
)
def test_a_rank_of_megatron_makes_as_many_calls_as_are_counted(
    parallel: Parallel, calls: int, with_gloo: int
) -> None:
    assert BENCHMARK["upstream_plan"]({"model": parallel}).num_groups == calls
    assert len(upstream_calls(parallel)) == calls + 1
    assert len(upstream_calls(parallel, gloo=True)) == with_gloo + 1


@pytest.mark.peer("megatron.core")
@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(tp=2, cp=3, dp=5, pp=4, ep=6),
        Parallel(tp=4, cp=1, dp=3, pp=2, ep=3, etp=2),
        Parallel(tp=8, cp=2, pp=8, dp=8, ep=8),
    ],
    ids=lambda of: f"{of.mesh}".partition(" | ")[0],
)
def test_each_kind_of_megatron_is_the_lists_that_are_planned(parallel: Parallel) -> None:
    """Every list, with its ranks in order; embedding groups of one stage have one rank once."""
    plan: GroupPlan = BENCHMARK["upstream_plan"]({"model": parallel})
    made: dict[str, list[tuple[int, ...]]] = {}
    for name, ranks, _ in upstream_calls(parallel):
        made.setdefault(name, []).append(ranks)
    ((*everybody,),) = made.pop(ONE_MORE)  # in an order of its own
    assert sorted(everybody) == list(range(parallel.world_size))
    assert made.keys() == BENCHMARK["UPSTREAM"].keys()
    for name, over in plan.names["model"].items():
        assert sorted(made[name]) == sorted(over.groups(parallel.mesh)), name
