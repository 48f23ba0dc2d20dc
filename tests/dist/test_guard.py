"""The guard of a module's groups, on processes over gloo: no way through torch leads around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
import workers
from torch.distributed import FileStore

from shardweave.errors import GeometryError
from shardweave.layout import Mesh
from shardweave.testing.guard import guard
from shardweave.train.collectives import sum_all
from shardweave.train.grid import connect, plan_groups

# tp of both grids are the same pairs: one communicator.
GRIDS = {"vision": Mesh((("tp", 2), ("dp", 2))), "language": Mesh((("tp", 2), ("pp", 2)))}
PLAN = plan_groups(
    GRIDS,
    {
        "vision": {"tp": ("tp",), "dp": ("dp",)},
        "language": {"tp": ("tp",), "all": ("tp", "pp")},
    },
)


def one() -> torch.Tensor:
    return torch.ones(1)


def of_torch(group: Any) -> dict[str, Callable[[], Any]]:
    """Ways to communicate in a group of `torch.distributed`, of four ranks, `None` for the default one."""
    rank = dist.get_rank()
    after, before = (rank + 1) % 4, (rank - 1) % 4
    four, said = [one() for _ in range(4)], [None] * 4
    return {
        "all_reduce": lambda: dist.all_reduce(one(), group=group),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([one()], group=group),
        "broadcast": lambda: dist.broadcast(one(), src=0, group=group),
        "reduce": lambda: dist.reduce(one(), dst=0, group=group),
        "all_gather": lambda: dist.all_gather(four, one(), group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(4), one(), group=group),
        "gather": lambda: dist.gather(one(), four if rank == 0 else None, dst=0, group=group),
        "scatter": lambda: dist.scatter(one(), four if rank == 0 else None, src=0, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one(), torch.ones(4), group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), group=group),
        "barrier": lambda: dist.barrier(group=group),
        "monitored_barrier": lambda: dist.monitored_barrier(group=group),
        "send": lambda: dist.send(one(), dst=after, group=group),
        "recv": lambda: dist.recv(one(), src=before, group=group),
        "isend": lambda: dist.isend(one(), dst=after, group=group),
        "irecv": lambda: dist.irecv(one(), src=before, group=group),
        "batch_isend_irecv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, one(), after, group)]),
        "all_gather_object": lambda: dist.all_gather_object(said, rank, group=group),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank], src=0, group=group),
        "nn.all_reduce": lambda: differentiable.all_reduce(one(), group=group or dist.group.WORLD),
    }


def only_of_groups(group: Any) -> dict[str, Callable[[], Any]]:
    """Ways that have to be given a group, and what a group can do itself."""
    backend, bound = group._get_backend(torch.device("cpu")), group.allreduce
    after = (dist.get_rank() + 1) % 4
    return {
        "functional": lambda: functional.all_reduce(one(), "sum", group),
        "functional, gathered": lambda: functional.all_gather_tensor(one(), 0, group),
        "operator": lambda: torch.ops._c10d_functional.all_reduce(one(), "sum", group.group_name),
        "operator of c10d": lambda: torch.ops.c10d.barrier(one(), group.boxed(), [], False, -1),
        "method": lambda: group.allreduce([one()]),
        "bound before": lambda: bound([one()]),
        "backend": lambda: backend.allreduce([one()]),
        "backend's messages": lambda: backend.send([one()], after, 0),
    }


def refusals(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """What each is refused with; what is not refused is told so."""
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "went through"
        except GeometryError as error:
            found[name] = error.equation
        except Exception as error:
            found[name] = repr(error)
    return found


def tried(rank: int, *, folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo", store=FileStore(str(folder / "default"), 4), rank=rank, world_size=4)
    other = dist.new_group([0, 1, 2, 3])
    groups = connect(PLAN, rank=rank, store=FileStore(str(folder / "store"), 4), timeout_s=20)
    vision, language = groups.get("vision", "tp"), groups.get("language", "tp")
    assert vision.comm is language.comm
    everybody = groups.get("language", "all").comm
    found: dict[str, Any] = {}
    # What is tried is made outside: some of it asks for the rank.
    ways = {
        "default": of_torch(None),
        "WORLD": of_torch(dist.group.WORLD) | only_of_groups(dist.group.WORLD),
        "other": of_torch(other) | only_of_groups(other),
        "of gloo": {
            "allreduce": lambda: everybody.allreduce([one()]),
            "send": lambda: everybody.send([one()], (rank + 1) % 4, 0),
            "barrier": lambda: everybody.barrier(),
        },
        "of language": {
            "all": lambda: sum_all(one(), group=groups.get("language", "all")),
            "tp": lambda: sum_all(one(), group=language),
        },
        "reads": {
            "get_rank": dist.get_rank,
            "get_rank of WORLD": lambda: dist.get_rank(dist.group.WORLD),
            "get_world_size": dist.get_world_size,
            "new_group": lambda: dist.new_group([0, 1]),
        },
    }
    with guard(groups.of("vision")):
        for kind, calls in ways.items():
            found[kind] = refusals(calls)
        # Its own groups go through, and what only looks at another is no call.
        assert sum_all(one(), group=vision).item() == 2
        assert sum_all(one(), group=groups.get("vision", "dp")).item() == 2
        assert dist.get_rank(other) == rank and dist.get_world_size(other) == 4
        assert dist.is_initialized()
    with guard(groups):  # all grids: the default group and what nobody planned
        assert sum_all(one(), group=groups.get("language", "all")).item() == 4
        found["all grids"] = refusals({"default": lambda: dist.all_reduce(one())})
    # Nothing was sent, and all of it goes on: the groups are not out of step.
    total = one()
    dist.all_reduce(total)
    dist.all_reduce(total, group=other)
    assert total.item() == 16 and sum_all(one(), group=language).item() == 2
    assert functional.all_reduce(one(), "sum", other).item() == 4
    dist.barrier()
    groups.close()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("guard")
    return workers.values(workers.run(tried, range(4), folder=folder))


HERE = "is not of grid vision(tp=2,dp=2)"
SAID = {
    "default": f"the default group of torch {HERE}",
    "WORLD": f"the default group of torch {HERE}",
    "other": f"a group of ranks 0, 1, 2, 3, of no grid, {HERE}",
    "of gloo": f"group language.all of ranks 0, 1, 2, 3 on grid language(tp=2,pp=2) {HERE}",
    "all grids": "the default group of torch is not of grids vision(tp=2,dp=2), language(tp=2,pp=2)",
    "reads": f"the default group of torch {HERE}",
}


@pytest.mark.parametrize("kind", SAID)
def test_every_way_is_refused_with_both_names(kind: str, found: dict[int, dict[str, dict[str, str]]]) -> None:
    for rank, of in found.items():
        assert of[kind] and of[kind] == dict.fromkeys(of[kind], SAID[kind]), rank


def test_groups_of_the_same_ranks_are_told_apart(found: dict[int, dict[str, dict[str, str]]]) -> None:
    """One communicator, and two groups: the other grid's is refused all the same."""
    for rank, of in found.items():
        pair = "0, 1" if rank < 2 else "2, 3"
        assert of["of language"] == {
            "all": SAID["of gloo"],
            "tp": f"group language.tp of ranks {pair} on grid language(tp=2,pp=2) {HERE}",
        }
