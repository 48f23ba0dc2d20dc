"""The guard of a module's groups, on ranks as threads: whatever communicates on another grid is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardweave.errors import GeometryError
from shardweave.layout import Mesh
from shardweave.testing import guard as guards
from shardweave.testing.communicator import Communicator
from shardweave.testing.guard import guard
from shardweave.testing.world import run_world, sent_bytes
from shardweave.train import collectives as c
from shardweave.train.grid import GRID, Group, Groups, plan_groups

# tp of the encoder and of the language model are other ranks; "all" are the same ranks, and so one
# communicator over gloo; cp of the language model is one rank alone.
GRIDS = {
    "vision": Mesh((("tp", 2), ("dp", 2))),
    "language": Mesh((("tp", 4), ("cp", 1))),
}
PLAN = plan_groups(
    GRIDS,
    {
        "vision": {"tp": ("tp",), "dp": ("dp",), "all": ("tp", "dp")},
        "language": {"tp": ("tp",), "cp": ("cp",), "all": ("tp", "cp")},
    },
    across={"world": ("vision", "language")},
)


def send_parts(group: Group) -> None:
    c.send_parts([torch.ones(2)] * group.size, [torch.ones(2) for _ in group.ranks], group=group)


def exchange(group: Group) -> None:
    c.exchange(torch.ones(group.size, 2), [1] * group.size, [1] * group.size, group=group)


COLLECTIVES: dict[str, Callable[[Group], Any]] = {
    "send_parts": send_parts,
    "gather_parts": lambda group: c.gather_parts(torch.ones(2), group=group),
    "sum_parts": lambda group: c.sum_parts([torch.ones(2)] * group.size, group=group),
    "sum_all": lambda group: c.sum_all(torch.ones(2), group=group),
    "begin_fetch": lambda group: c.begin_fetch(torch.ones(2), 0, [2] * group.size, group=group, tag=1).wait(),
    "begin_sum": lambda group: c.begin_sum(
        torch.ones(group.size),
        0,
        [1] * group.size,
        dtype=torch.float32,
        group=group,
        tag=1,
        ordered=True,
    ).wait(),
    "gather": lambda group: c.gather(torch.ones(2), 0, group=group),
    "reduce_scatter": lambda group: c.reduce_scatter(torch.ones(group.size), 0, group=group),
    "all_reduce": lambda group: c.all_reduce(torch.ones(2), group=group),
    "exchange": exchange,
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Outside of a guard, everything is what it was: so it costs nothing."""
    watched = [*guards._classes(), Group]
    before = [dict(vars(of)) for of in watched]
    default = distributed_c10d._get_default_group
    yield
    assert [dict(vars(of)) for of in watched] == before
    assert distributed_c10d._get_default_group is default
    assert not guards._OPEN and not guards._HERE.guards


def foreign(groups: Groups) -> list[tuple[Group, str]]:
    """Groups that an encoder has no business with, and how they are named."""
    language = "on grid language(tp=4,cp=1) is not of grid vision(tp=2,dp=2)"
    return [
        (groups.get("language", "tp"), f"group language.tp of ranks 0, 1, 2, 3 {language}"),
        (groups.get("language", "all"), f"group language.all of ranks 0, 1, 2, 3 {language}"),
        (groups.get("language", "cp"), f"group language.cp of rank {groups.rank} {language}"),
        (groups.across("world"), "group world of ranks 0, 1, 2, 3 is not of grid vision(tp=2,dp=2)"),
    ]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_go_over_groups_of_the_grid_alone(name: str) -> None:
    call = COLLECTIVES[name]

    def work(groups: Groups) -> None:
        with guard(groups.of("vision")):
            for own in ("tp", "dp", "all"):
                call(groups.get("vision", own))
                call(groups.of("vision").get(GRID, own))
            for group, said in foreign(groups):
                with pytest.raises(GeometryError) as caught:
                    call(group)
                assert caught.value.equation == said
                assert caught.value.where == f"rank {groups.rank}, a collective"
        for group, _ in foreign(groups):
            if group.comm is not None:
                call(group)

    run_world(work, plan=PLAN, strict=True)


def test_what_is_refused_sends_nothing() -> None:
    def work(groups: Groups) -> dict[str, int]:
        with guard(groups.of("vision")):
            for group, _ in foreign(groups):
                for call in COLLECTIVES.values():
                    with pytest.raises(GeometryError):
                        call(group)
        return sent_bytes(groups)

    assert all(not any(sent.values()) for sent in run_world(work, plan=PLAN))


METHODS: dict[str, Callable[[Any], Any]] = {
    "send": lambda comm: comm.send([torch.ones(2)], 1 - comm.rank(), 0),
    "recv": lambda comm: comm.recv([torch.ones(2)], 1 - comm.rank(), 0),
    "alltoall": lambda comm: comm.alltoall([torch.ones(2)] * comm.size(), [torch.ones(2)] * comm.size()),
    "allreduce": lambda comm: comm.allreduce([torch.ones(2)]),
    "barrier": lambda comm: comm.barrier(),
    "_allgather_base": lambda comm: comm._allgather_base(torch.ones(comm.size()), torch.ones(1)),
    "_reduce_scatter_base": lambda comm: comm._reduce_scatter_base(torch.ones(1), torch.ones(comm.size())),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_communicators_are_refused(name: str) -> None:
    """Also where the communicator was taken from its group before, and the method from it."""

    def work(groups: Groups) -> None:
        comm = groups.get("language", "tp").comm
        method = getattr(comm, name)
        with guard(groups.of("vision")):
            assert (comm.name(), comm.rank(), comm.size()) == ("memory", groups.rank, 4)
            with pytest.raises(GeometryError, match=r"language\.tp .* is not of grid vision") as caught:
                METHODS[name](comm)
            assert caught.value.where == f"rank {groups.rank}, Communicator.{name}"

            class Bound:
                rank, size = staticmethod(comm.rank), staticmethod(comm.size)

            setattr(Bound, name, staticmethod(method))
            with pytest.raises(GeometryError, match=r"language\.tp .* is not of grid vision"):
                METHODS[name](Bound)

    run_world(work, plan=PLAN)


def test_methods_that_communicate_are_all_known_here() -> None:
    """What a new torch adds counts as communicating until somebody has looked at it."""
    assert set(METHODS) <= set(vars(Communicator)), "the names are those of the class"
    names = {
        name for of in guards._classes() for name, m in vars(of).items() if guards._communicates(name, m)
    }
    for name in ("broadcast", "allgather", "all_gather_single", "reduce_scatter", "recv_anysource"):
        assert name in names
    assert not names & guards._LOCAL


def test_the_backward_of_what_was_computed_outside() -> None:
    def work(groups: Groups) -> None:
        own = torch.ones(2, requires_grad=True)
        whole = c.gather(own, 0, group=groups.get("language", "tp"))
        with (
            guard(groups.of("vision")),
            pytest.raises(GeometryError, match=r"language\.tp .* is not of grid vision"),
        ):
            whole.sum().backward()
        right = c.gather(own, 0, group=groups.get("vision", "tp"))
        with guard(groups.of("vision")):
            right.sum().backward()
        assert own.grad is not None and own.grad.tolist() == [2.0, 2.0]

    run_world(work, plan=PLAN)


def test_of_guards_in_each_other_the_inner_one_holds() -> None:
    def work(groups: Groups) -> None:
        vision, language = groups.get("vision", "tp"), groups.get("language", "tp")
        with guard(groups):
            for group in (vision, language, groups.across("world")):
                c.sum_all(torch.ones(1), group=group)
            with guard(groups.of("vision")):
                c.sum_all(torch.ones(1), group=vision)
                with guard(groups.of("language")):
                    c.sum_all(torch.ones(1), group=language)
                    with pytest.raises(GeometryError, match=r"vision\.tp .* is not of grid language"):
                        c.sum_all(torch.ones(1), group=vision)
                with pytest.raises(GeometryError, match=r"language\.tp .* is not of grid vision"):
                    c.sum_all(torch.ones(1), group=language)
            c.sum_all(torch.ones(1), group=language)

    run_world(work, plan=PLAN)


def test_each_rank_has_its_own_and_one_without_is_free() -> None:
    """Ranks 0 and 1 are guarded on one grid, 2 and 3 on none: threads of one process."""

    def work(groups: Groups) -> bool:
        c.sum_all(torch.ones(1), group=groups.across("world"))
        if groups.rank >= 2:
            for _ in range(20):
                c.sum_all(torch.ones(1), group=groups.get("vision", "tp"))
                foreign(groups)[0][0].comm.rank()
            return True
        with guard(groups.of("vision")):
            for _ in range(20):
                c.sum_all(torch.ones(1), group=groups.get("vision", "tp"))
            with pytest.raises(GeometryError):
                c.sum_all(torch.ones(1), group=groups.get("language", "tp"))
        return True

    assert all(run_world(work, plan=PLAN))


def test_a_thread_that_is_started_within_is_held_to_it() -> None:
    found: dict[int, list[BaseException]] = {}

    def work(groups: Groups) -> None:
        foreign_group = groups.get("language", "tp")
        comm = foreign_group.comm
        mine = found.setdefault(groups.rank, [])

        def help_out() -> None:
            for call in (
                lambda: c.sum_all(torch.ones(1), group=foreign_group),
                lambda: comm.allreduce([torch.ones(1)]),
            ):
                try:
                    call()
                except GeometryError as error:
                    mine.append(error)

        with guard(groups.of("vision")):
            thread = threading.Thread(target=help_out)
            thread.start()
            thread.join()

    run_world(work, plan=PLAN)
    assert [len(errors) for errors in found.values()] == [2] * 4
    assert all("language.tp" in f"{error}" for errors in found.values() for error in errors)


def test_an_error_within_closes_it() -> None:
    groups = Groups(PLAN, 0, {})
    with pytest.raises(ZeroDivisionError), guard(groups.of("vision")):
        raise ZeroDivisionError
    assert groups.get("language", "tp").comm is None  # what is read outside is not judged


def test_the_default_group_is_refused_also_where_there_is_none() -> None:
    """Code that falls back on the default group does not get as far as to find that there is none."""
    assert not dist.is_initialized()
    groups = Groups(PLAN, 2, {})
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
        "broadcast": lambda: dist.broadcast(torch.ones(1), src=0),
        "get_rank": dist.get_rank,
        "barrier": dist.barrier,
    }
    for name, call in calls.items():
        with guard(groups.of("vision")), pytest.raises(GeometryError) as caught:
            call()
        assert caught.value.equation == "the default group of torch is not of grid vision(tp=2,dp=2)"
        assert caught.value.where == f"rank 2, torch.distributed.{name}", name
        with pytest.raises(ValueError, match="has not been initialized"):
            call()
