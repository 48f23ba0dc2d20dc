"""Refits between real processes while ranks are killed, stalled, interrupted and lied to.

What has to hold, whatever happens to one rank, or to the store, at any point of a turn:

- every receiver that lives serves a whole version at every moment, as a reader sees that looks all the time;
- all ranks that live end within the stated bound, alike: all serve the next version, or none does, and then
  each raises an error with a name;
- the next turn, with the rank that was started again, succeeds, with nothing left over from the one before.

Faults are drawn from a fixed seed.
"""

from __future__ import annotations

import importlib.util
import random
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from crew import ERRORS, POINTS, PUBLISHERS, RANKS, RECEIVERS, Crew, Fault, Told, reference

import shardweave.errors

TIMEOUT_S = 0.5
"""Of turns in which something happens. What is stated: twice that, from when it happens."""
BOUND_S = 2 * TIMEOUT_S + 6
"""With the time that a busy machine takes for the rest."""
PATIENCE_S = 30.0
"""Of turns in which nothing happens."""

NUM_KILLS = {"gloo": 30, "shared": 30, "nixl": 4}
NUM_STALLS = {"gloo": 6, "shared": 6, "nixl": 2}
NUM_INTERRUPTS = {"gloo": 12, "shared": 12, "nixl": 4}
NUM_FAILURES = {"gloo": 99, "shared": 99, "nixl": 5}
"""At most."""

NIXL = pytest.param(
    "nixl",
    marks=pytest.mark.skipif(
        not any(map(importlib.util.find_spec, ("nixl", "nixl_cu12", "nixl_cu13"))),
        reason="nixl is not installed",
    ),
)
each_transport = pytest.mark.parametrize("transport", ["gloo", "shared", NIXL])
pytestmark = pytest.mark.timeout(240)


@contextmanager
def crew(transport: str, spill: Path, *, torn: bool = False) -> Iterator[Crew]:
    made = Crew(transport=transport, spill=str(spill), torn=torn)
    try:
        yield made
    finally:
        made.close()


def role(rank: int) -> str:
    return "publisher" if rank in PUBLISHERS else "receiver"


def clean(crew: Crew, version: int) -> float:
    """A turn in which nothing happens; how long it took."""
    crew.turn(version, timeout_s=PATIENCE_S)
    told = crew.hear(RANKS, 3 * PATIENCE_S)
    assert [each.error for each in told.values()] == [None] * len(RANKS), told
    for rank in RECEIVERS:
        assert told[rank].version == version
        assert told[rank].served == reference(rank, version)
    return max(each.seconds for each in told.values())


def check(
    told: Mapping[int, Told], before: int, version: int, *, but: Collection[int] = (), what: Any = ""
) -> bool:
    """All that live ended alike and in time, with a whole version throughout; whether it is the new one.

    Args:
        but: Ranks that something else than an error of this package happened to.
    """
    alike = {each.error is None for rank, each in told.items() if rank not in but}
    assert len(alike) <= 1, (what, told)
    for rank, each in told.items():
        assert each.seconds < BOUND_S, (what, each)
        if each.error is not None and rank not in but:
            assert hasattr(shardweave.errors, each.error[0]) and "hint:" in each.error[1], (what, each)
        if rank in RECEIVERS:
            whole = {reference(rank, before), reference(rank, version), reference(rank, None)}
            assert each.served in whole and each.seen <= whole, (what, each)
            if each.version != "?":
                assert each.served == reference(rank, each.version), (what, each)
    serving = {told[rank].version for rank in RECEIVERS if rank in told and rank not in but}
    assert len(serving) <= 1 and (not alike or serving <= {version if True in alike else before}), (
        what,
        told,
    )
    return True in alike


# --- killed -------------------------------------------------------------------------------------


def kills(number: int, *, seed: str) -> Iterator[tuple[int, Fault | None, float]]:
    """Whom, and where: all points in turn, and every third time a moment that nothing chooses."""
    draw = random.Random(seed)
    points = [(rank, point) for rank in RANKS for point in POINTS[role(rank)]]
    draw.shuffle(points)
    for i in range(number):
        rank, point = points[i % len(points)]
        if i % 3 == 2:
            yield rank, None, draw.random()
        else:
            yield rank, Fault("kill", point, draw.randrange(3)), 0.0


@each_transport
def test_a_rank_that_is_killed_anywhere_leaves_whole_versions_and_free_peers(
    transport: str, tmp_path: Path
) -> None:
    """Half of the ranks are back before others notice, in the turn that they died in; half after it."""
    with crew(transport, tmp_path) as ranks:
        took = max(clean(ranks, 0), clean(ranks, 1))
        for i, (rank, fault, moment) in enumerate(kills(NUM_KILLS[transport], seed=f"kill {transport}")):
            version, others = i + 2, [other for other in RANKS if other != rank]
            ranks.turn(version, timeout_s=TIMEOUT_S, faults={rank: fault})
            if fault is None:
                time.sleep(min(took, 0.5) * moment)
                ranks.signal(rank, signal.SIGKILL)
            ranks.end(rank)
            if i % 2:
                ranks.start(rank)
                ranks.turn(version, timeout_s=TIMEOUT_S, only=[rank])
                others = [*others, rank]
            told = ranks.hear(others, 2 * BOUND_S)
            check(told, version - 1, version, but=[rank], what=(rank, fault, moment))
            if not i % 2:
                ranks.start(rank)
            took = clean(ranks, version)


# --- stalled, and gone on with ------------------------------------------------------------------


@each_transport
def test_a_rank_that_stalls_anywhere_frees_its_peers_and_follows_them_when_it_goes_on(
    transport: str, tmp_path: Path
) -> None:
    draw = random.Random(f"stall {transport}")
    points = [(rank, point) for rank in RANKS for point in POINTS[role(rank)]]
    draw.shuffle(points)
    with crew(transport, tmp_path) as ranks:
        clean(ranks, 0)
        for version, (rank, point) in enumerate(points[: NUM_STALLS[transport]], start=1):
            others = [other for other in RANKS if other != rank]
            ranks.turn(version, timeout_s=TIMEOUT_S, faults={rank: Fault("stop", point, version % 3)})
            told = ranks.hear(others, 2 * BOUND_S)
            ranks.signal(rank, signal.SIGCONT)
            late = ranks.hear([rank], 2 * BOUND_S)
            late[rank].seconds = 0.0
            check({**told, **late}, version - 1, version, what=(rank, point))
            clean(ranks, version)


@each_transport
def test_the_turn_after_an_abort_does_not_wait_for_one_that_is_still_in_the_turn_before(
    transport: str, tmp_path: Path
) -> None:
    """Two turns at once: three ranks are in the next one when the fourth wakes up in the one before."""
    with crew(transport, tmp_path) as ranks:
        clean(ranks, 0)
        for version, point in ((1, "stage"), (2, "vote")):
            ranks.turn(version, timeout_s=TIMEOUT_S, faults={3: Fault("stop", point)})
            told = ranks.hear((0, 1, 2), 2 * BOUND_S)
            assert not check(told, version - 1, version, what=point)
            ranks.turn(version, timeout_s=PATIENCE_S, only=(0, 1, 2))
            time.sleep(0.1)
            ranks.signal(3, signal.SIGCONT)
            late = ranks.hear([3], PATIENCE_S)[3]
            assert late.error is not None and late.version == version - 1
            ranks.turn(version, timeout_s=PATIENCE_S, only=[3])
            told = ranks.hear(RANKS, 2 * PATIENCE_S)
            assert [each.error for each in told.values()] == [None] * 4
            assert all(told[rank].served == reference(rank, version) for rank in RECEIVERS)


# --- interrupted --------------------------------------------------------------------------------


@each_transport
def test_a_rank_that_is_interrupted_anywhere_takes_part_in_the_next_turn_as_it_is(
    transport: str, tmp_path: Path
) -> None:
    """At moments that nothing chooses, and at the worst: between two arrays of a commit."""
    draw = random.Random(f"interrupt {transport}")
    with crew(transport, tmp_path) as ranks:
        took = max(clean(ranks, 0), clean(ranks, 1))
        for i in range(NUM_INTERRUPTS[transport]):
            version, rank = i + 2, draw.choice(RECEIVERS if i % 4 == 3 else RANKS)
            worst = Fault("interrupt", draw.choice(("voted", "commit", "half"))) if i % 4 == 3 else None
            ranks.turn(version, timeout_s=TIMEOUT_S, faults={rank: worst})
            if worst is None:
                time.sleep(min(took, 0.5) * draw.random())
                ranks.signal(rank, signal.SIGINT)
            told = ranks.hear(RANKS, 2 * BOUND_S)
            if worst is not None and worst.point == "half":
                assert told[rank].error is not None and told[rank].error[0] == "KeyboardInterrupt"
                assert told[rank].version == version
            check(told, version - 1, version, but=[rank], what=(rank, worst))
            took = clean(ranks, version)


# --- failed -------------------------------------------------------------------------------------


def failures(transport: str) -> Iterator[tuple[int, Fault]]:
    """Exceptions at every point before the vote, on either side; and what a rank's machine may do.

    One at ``hello`` ends a turn that others may not have come to: see the test of late ranks.
    """
    draw = random.Random(f"fail {transport}")
    for rank in (draw.choice(PUBLISHERS), draw.choice(RECEIVERS)):
        for point in POINTS[role(rank)]:
            if point not in ("hello", "vote", "voted", "commit", "half", "done"):
                for error in draw.sample(sorted(ERRORS), 3):
                    yield rank, Fault(error, point, draw.randrange(3))
    for rank in RECEIVERS:
        for number in range(2):
            yield rank, Fault("flip", "stage", number)
        yield rank, Fault("disk")
        yield rank, Fault("memory")
        if transport != "gloo":  # where both ends take part it is a stall
            yield rank, Fault("lie", "stage", 0)


@each_transport
def test_a_rank_that_fails_anywhere_ends_the_turn_for_all_by_its_own_error(
    transport: str, tmp_path: Path
) -> None:
    expected = {"flip": "DigestError", "lie": "DigestError", "disk": "WriteError"}
    with crew(transport, tmp_path) as ranks:
        clean(ranks, 0)
        drawn = list(failures(transport))
        for version, (rank, fault) in enumerate(drawn[:: -(-len(drawn) // NUM_FAILURES[transport])], start=1):
            ranks.turn(version, timeout_s=5.0, faults={rank: fault})
            told = ranks.hear(RANKS, PATIENCE_S)
            left = fault.how in ("KeyboardInterrupt", "SystemExit")
            assert not check(told, version - 1, version, but=[rank] if left else (), what=(rank, fault))
            for other, each in told.items():
                kind, text = each.error or ("", "")
                wanted = expected.get(fault.how, "TransportError")
                assert kind == (fault.how if left and other == rank else wanted), (fault, each)
                if fault.how in ERRORS and kind != fault.how:
                    assert fault.how in text and f"rank {rank}" in text, (fault, each)
            clean(ranks, version)


# --- the store ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "transport"), [("kill the store", "shared"), ("stop the store", "gloo")])
def test_a_store_that_dies_or_stalls_anywhere_frees_everybody(
    how: str, transport: str, tmp_path: Path
) -> None:
    """Who voted and cannot know the outcome says that it does not know; everybody serves a whole version."""
    draw = random.Random(how)
    points = [(rank, point) for rank in (1, 2) for point in POINTS[role(rank)]]
    draw.shuffle(points)
    doubts = 0
    with crew(transport, tmp_path) as ranks:
        clean(ranks, 0)
        for version, (rank, point) in enumerate(points[:12], start=1):
            host = ranks.processes[-1].pid
            ranks.turn(version, timeout_s=TIMEOUT_S, faults={rank: Fault(how, point, host)})
            told = ranks.hear(RANKS, 2 * BOUND_S)
            for other, each in told.items():
                assert each.seconds < BOUND_S, (point, each)
                assert each.error is None or hasattr(shardweave.errors, each.error[0]), (point, each)
                if other in RECEIVERS:
                    whole = {reference(other, version - 1), reference(other, version), reference(other, None)}
                    assert each.served in whole and each.seen <= whole, (point, each)
                    assert each.version == "?" or each.served == reference(other, each.version)
                    doubts += each.version == "?"
            ranks.new_store()
            ranks.join(RANKS)
            clean(ranks, version)
    assert doubts > 0, "the worst moment was not among them"


# --- late, absent -------------------------------------------------------------------------------


@each_transport
def test_one_that_comes_late_is_waited_for_and_one_that_never_comes_is_named(
    transport: str, tmp_path: Path
) -> None:
    with crew(transport, tmp_path) as ranks:
        for version, rank in enumerate((0, 2)):
            others = [other for other in RANKS if other != rank]
            ranks.turn(version, timeout_s=PATIENCE_S, only=others)
            time.sleep(0.3)
            ranks.turn(version, timeout_s=PATIENCE_S, only=[rank])
            assert [each.error for each in ranks.hear(RANKS, 2 * PATIENCE_S).values()] == [None] * 4
        for rank in (1, 3):
            others = [other for other in RANKS if other != rank]
            ranks.turn(2, timeout_s=1.5, only=others)
            told = ranks.hear(others, 2 * BOUND_S)
            assert not check(told, 1, 2)
            for each in told.values():
                assert each.error is not None and each.error[0] == "TransportTimeoutError"
                assert f"waits for rank {rank}, phase 'hello'" in each.error[1]
        clean(ranks, 2)


def test_a_failure_before_others_have_come_is_over_when_they_do(tmp_path: Path) -> None:
    """The turn that it ended is no longer theirs: they wait in the next one, and are met there."""
    with crew("shared", tmp_path) as ranks:
        clean(ranks, 0)
        ranks.turn(1, timeout_s=PATIENCE_S, only=[1], faults={1: Fault("OSError", "hello")})
        assert "OSError" in ranks.hear([1], PATIENCE_S)[1].error[1]
        ranks.turn(1, timeout_s=PATIENCE_S, only=[0, 2, 3])
        time.sleep(0.2)
        ranks.turn(1, timeout_s=PATIENCE_S, only=[1])
        assert [each.error for each in ranks.hear(RANKS, 2 * PATIENCE_S).values()] == [None] * 4


@pytest.mark.parametrize("fault", [Fault("OSError", "staged"), Fault("kill", "verify")], ids=str)
def test_a_receiver_that_stages_in_what_it_serves_would_be_seen(fault: Fault, tmp_path: Path) -> None:
    with crew("shared", tmp_path, torn=True) as ranks:
        ranks.turn(0, timeout_s=PATIENCE_S)
        ranks.hear(RANKS, PATIENCE_S)
        ranks.turn(1, timeout_s=TIMEOUT_S, faults={2: fault})
        told = ranks.hear([rank for rank in RANKS if fault.how != "kill" or rank != 2], 2 * BOUND_S)
        with pytest.raises(AssertionError):
            check(told, 0, 1)


def test_the_faults_of_this_file_are_as_many_as_it_says() -> None:
    """Over gloo and shared memory alone; NIXL's come on top."""
    both = ("gloo", "shared")
    kills = sum(NUM_KILLS[transport] for transport in both)
    others = sum(NUM_STALLS[t] + NUM_INTERRUPTS[t] + 2 + len(list(failures(t))) + 4 for t in both) + 2 * 12
    assert kills >= 60 and kills + others >= 200
