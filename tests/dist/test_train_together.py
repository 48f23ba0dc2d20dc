"""Steps in which one rank fails: every rank raises that error, by class and text, and none waits for long."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import workers
from torch import Tensor
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from shardweave import errors
from shardweave.errors import CutError, PlanError, TransportError, TransportTimeoutError
from shardweave.layout import Mesh
from shardweave.train.collectives import all_reduce, gather, sum_all
from shardweave.train.grid import Groups, connect, plan_groups
from shardweave.train.pipeline import Boundary, Output, run
from shardweave.train.schedule import plan_pipeline
from shardweave.train.together import Together, agree, agreed

RANKS = 4
MESH = Mesh((("tp", 2), ("pp", 2)))
GROUPS = {"tp": ("tp",), "pp": ("pp",), "all": ("tp", "pp")}
SHAPE = (3, 5)
LONG_S = 25.0
"""How long ranks wait for each other; whoever ends far earlier was freed."""


def connected(rank: int, store: Store, timeout_s: float = LONG_S) -> Groups:
    plan = plan_groups({"model": MESH}, {"model": GROUPS})
    return connect(plan, rank=rank, store=store, timeout_s=timeout_s)


class Fails(torch.autograd.Function):
    """Nothing forward; an error on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ZeroDivisionError("on the way back")


def step(groups: Groups, fail: dict[str, Callable[[], None]], *, odd: bool = False) -> float:
    """A step with collectives over three groups, in which something may happen at some places."""
    tp, pp, every = (groups.get("model", name) for name in ("tp", "pp", "all"))
    weight = torch.ones(5, 5, requires_grad=True)
    total = 0.0

    def forward(microbatch: int, chunk: int, hidden: Tensor | None) -> Output:
        nonlocal total
        if microbatch == 2:
            fail.get("forward", lambda: None)()
        hidden = torch.ones(SHAPE) if hidden is None else hidden
        out = gather(hidden @ weight, -2, group=tp)[: SHAPE[0] - odd]
        if microbatch == 1 and "backward" in fail:
            out = Fails.apply(out)
        if pp.rank == 0:
            return Output(out)
        loss = all_reduce(out.sum(), group=tp)
        total += loss.item()
        return Output(loss=loss)

    plan = plan_pipeline("1f1b", stages=2, microbatches=4)
    run(plan, pp=pp, forward=forward, boundary=lambda _: Boundary(SHAPE, torch.float32))
    fail.get("between", lambda: None)()
    return float(sum_all(torch.tensor([total]), group=every))


def stop() -> None:
    raise KeyboardInterrupt


def break_off() -> None:
    raise CutError("a dim is cut evenly", equation="size(7) % ranks(2) != 0", hint="pad it")


def out_of_memory() -> None:
    raise MemoryError("no room for 7 bytes")


def own_class() -> None:
    class MineError(CutError):
        pass

    raise MineError("mine", where="here", hint="none")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    time.sleep(7)


def nothing() -> None:
    pass


Case = tuple[str, Callable[[], None], int]
"""Where something happens, what, and on which rank."""


def one_fails(
    rank: int, *, folder: Path, cases: list[Case], timeout_s: float
) -> list[tuple[str, str, float]]:
    """For each case, a step that goes well, and one that fails on one rank: class, text and seconds."""
    store, found = FileStore(str(folder / "store"), RANKS), []
    for number, (place, action, who) in enumerate(cases):
        mine = PrefixStore(f"{number}", store)
        groups = connected(rank, mine, timeout_s)
        # Held by somebody else, as graphs, caches and debuggers do.
        kept = [groups.get("model", name) for name in GROUPS]
        together = Together(mine, rank=rank, groups=groups)
        with together:
            step(groups, {})
        begin = time.monotonic()
        try:
            with together:
                step(groups, {place: action} if rank == who else {}, odd=place == "shape" and rank == who)
            found.append(("", "", time.monotonic() - begin))
        except BaseException as error:
            found.append((type(error).__name__, str(error), time.monotonic() - begin))
            for group in kept:
                with pytest.raises(TransportError, match="a group that was closed is not used again"):
                    group.comm.barrier()
    return found


EXPECTED: list[tuple[str, Callable[[], None], str, str]] = [
    ("forward", break_off, "CutError", "a dim is cut evenly: rank {who}: size(7) % ranks(2) != 0"),
    ("between", break_off, "CutError", "a dim is cut evenly: rank {who}: size(7) % ranks(2) != 0"),
    ("backward", nothing, "TransportError", "rank {who}: ZeroDivisionError: on the way back"),
    ("forward", out_of_memory, "TransportError", "rank {who}: MemoryError: no room for 7 bytes"),
    ("forward", own_class, "CutError", "mine: rank {who}, here"),
    ("shape", nothing, "PlanError", "shape(2, 5) torch.float32 != shape(3, 5)"),
    ("forward", stop, "TransportError", "rank {who}: KeyboardInterrupt"),
]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_all_ranks_raise_the_error_of_one(who: int, tmp_path: Path) -> None:
    # The last stage hands nothing on that could have a wrong shape.
    expected = [case for case in EXPECTED if case[0] != "shape" or who < 2]
    cases = [(place, action, who) for place, action, _, _ in expected]
    given = {"folder": tmp_path, "cases": cases, "timeout_s": LONG_S}
    ended = workers.values(workers.run(one_fails, range(RANKS), **given))
    for number, (place, action, name, says) in enumerate(expected):
        said = {ended[rank][number][:2] for rank in ended if action is not stop or rank != who}
        assert len(said) == 1, (place, said)
        ((found, text),) = said
        assert found == name and says.format(who=who) in text and "hint: " in text, place
        if action is stop:
            assert ended[who][number][0] == "KeyboardInterrupt"
        took = max(mine[number][2] for mine in ended.values())
        assert took < 10, f"{place}: ranks were not freed, but timed out"


def test_a_rank_that_is_killed_is_named_by_all_others(tmp_path: Path) -> None:
    given = {"folder": tmp_path, "cases": [("forward", kill, 2)], "timeout_s": LONG_S}
    ended = workers.run(one_fails, range(RANKS), **given)
    assert ended[2].exit_code == -signal.SIGKILL
    others = [ended[rank].value[0] for rank in (0, 1, 3)]
    assert {(name, text) for name, text, _ in others} == {others[0][:2]}
    assert others[0][0] == "TransportError" and "the peers of a round are there" in others[0][1]
    assert max(took for _, _, took in others) < 10


def test_a_rank_that_stands_still_is_named_by_all_and_by_itself(tmp_path: Path) -> None:
    given = {"folder": tmp_path, "cases": [("forward", stall, 1)], "timeout_s": 2}
    ended = workers.values(workers.run(one_fails, range(RANKS), **given))
    assert len({(name, text) for ((name, text, _),) in ended.values()}) == 1
    ((name, text, _),) = ended[0]
    assert name == "TransportTimeoutError" and "every rank does its part of a round in time" in text
    assert max(ended[rank][0][2] for rank in (0, 2, 3)) < 6


def store_is_gone(rank: int, *, port: int) -> tuple[str, str, float]:
    store = TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0, wait_for_workers=False)
    groups = connected(rank, store)
    begin = time.monotonic()
    try:
        with Together(store, rank=rank, groups=groups, timeout_s=2):
            step(groups, {"forward": kill} if rank == 0 else {})
    except TransportError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


def test_the_store_may_die_with_a_rank(tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended = workers.run(store_is_gone, range(RANKS), port=port)
    for rank in range(1, RANKS):
        name, text, took = ended[rank].value
        assert name == "TransportError" and f"rank {rank}" in text and took < 10


# --- agreement before the first message ---------------------------------------------------------


def checks(rank: int, *, folder: Path) -> list[str]:
    groups = connected(rank, FileStore(str(folder / "store"), RANKS))
    every = groups.get("model", "all")
    found = []
    for wrong in ([], [2], [1, 3], [0, 1, 2, 3]):
        try:
            with agreed(every):
                if rank in wrong:
                    raise PlanError("a rule", equation=f"rank({rank})" + "é" * rank, hint="none")
            found.append("")
        except PlanError as error:
            found.append(str(error))
    # The groups are as they were.
    assert step(groups, {}) == step(groups, {})
    return found


def test_checks_of_one_rank_are_raised_on_all_and_close_nothing(tmp_path: Path) -> None:
    found = workers.values(workers.run(checks, range(RANKS), folder=tmp_path))
    for mine in found.values():
        assert mine == [
            "",
            "a rule: rank 2: rank(2)éé. hint: none",
            "a rule: rank 1: rank(1)é. hint: none",
            "a rule: rank 0: rank(0). hint: none",
        ]


def alone() -> Groups:
    return connect(plan_groups({"m": Mesh((("tp", 1),))}, {"m": {"tp": ("tp",)}}), rank=0, store=HashStore())


def test_one_rank_agrees_with_itself() -> None:
    group = alone().get("m", "tp")
    agree(None, group=group)
    with pytest.raises(TransportError, match="rank 0: ValueError: 7"):
        agree(ValueError("7"), group=group)


# --- what is found in a store is not trusted ----------------------------------------------------

REPORT = '{"rank":0,"name":"%s","rule":"r","where":"w","equation":"e","hint":"h"}'


@pytest.mark.parametrize(
    "said",
    [
        "no json",
        "[]",
        '{"rank": 0}',
        REPORT % "SystemExit",
        REPORT % "annotations",
        REPORT % "_rebuild",
        REPORT % "__builtins__",
        REPORT.replace('"rank":0', '"rank":-1') % "PlanError",
        REPORT % "PlanError" + " " * 100_000,
        REPORT.replace('"r"', f'"{"r" * 5000}"') % "PlanError",
    ],
)
def test_what_others_wrote_into_the_store_is_an_error_of_this_package(said: str) -> None:
    store = HashStore()
    store.set("together/first error", said)
    found = pytest.raises(TransportError, match="in the form of this version")
    with found as caught, Together(store, rank=0, groups=alone()):
        raise PlanError("mine", hint="none")
    assert len(str(caught.value)) < 1000 and isinstance(caught.value.__cause__, PlanError)


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(errors).values() if isinstance(kind, type)], ids=lambda kind: kind.__name__
)
def test_every_class_of_this_package_comes_over(kind: type[errors.ShardweaveError]) -> None:
    store = HashStore()
    with pytest.raises(kind) as first, Together(store, rank=0, groups=alone()):
        raise kind("rule\nof two lines", where="where", equation="1 != 2", hint="h")
    with pytest.raises(kind) as second, Together(store, rank=1, groups=alone()):
        raise TransportTimeoutError("another", hint="none")
    assert type(first.value) is type(second.value) is kind
    assert str(first.value) == str(second.value) == "rule\\nof two lines: rank 0, where: 1 != 2. hint: h"
