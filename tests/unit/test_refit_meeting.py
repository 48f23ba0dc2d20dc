"""How turns end: restarts, interrupts and lost stores at the worst moments; ranks are threads."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from refit_world import World, all_alike, bits, content, engine_layout, succeeded, trainer_layout
from torch.distributed import HashStore

from shardweave.errors import PlanError, TransportError
from shardweave.move.asking import Asker
from shardweave.refit import Publisher, Receiver
from shardweave.refit.meeting import ABORT, AGAIN, COMMIT, Meeting
from shardweave.refit.waiting import uninterrupted


def seats(store: HashStore, timeout_s: float = 5.0) -> Callable[[int, str], Meeting]:
    def seat(rank: int, instance: str) -> Meeting:
        return Meeting(store=store, ranks=(0, 1), rank=rank, instance=instance, timeout_s=timeout_s)

    return seat


# --- one process a rank -------------------------------------------------------------------------


def test_a_rank_started_again_ends_the_turn_that_it_was_in() -> None:
    seat = seats(HashStore())
    other, before, after = seat(1, "b"), seat(0, "a"), seat(0, "a again")
    assert (other.open(), before.open(), after.open()) == (0, 0, 1)
    ended = other.outcome()
    assert ended is not None and ended.kind == AGAIN
    assert "process(a again) comes where process(a) took part" in str(ended.error)
    assert other.open() == 1


def test_the_vote_of_a_process_that_died_commits_nothing_that_its_successor_would_serve() -> None:
    seat = seats(HashStore())
    other, before, after = seat(1, "b"), seat(0, "a"), seat(0, "a again")
    other.open(), before.open()
    before.say("vote/0", b"ready")
    assert after.open() == 1
    assert other.decide().kind == AGAIN


def test_a_turn_committed_before_the_restart_stays_committed() -> None:
    seat = seats(HashStore())
    other, before, after = seat(1, "b"), seat(0, "a"), seat(0, "a again")
    other.open(), before.open()
    before.say("vote/0", b"ready")
    assert other.decide().kind == COMMIT
    assert after.open() == 1
    assert before.outcome() == other.outcome()


def test_a_rank_that_left_a_turn_does_not_come_back_to_it() -> None:
    seat = seats(HashStore())
    one, other = seat(0, "a"), seat(1, "b")
    assert (one.open(), other.open(), one.open(kind=ABORT)) == (0, 0, 1)
    ended = other.outcome()
    assert ended is not None and ended.kind == ABORT


def test_two_processes_of_one_rank_end_with_an_error_that_says_so() -> None:
    world = World(trainer_layout(), (engine_layout(),), timeout_s=1.5, retries=1)
    twin = Publisher(world.session(1), world.members[1].source)
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(twin.publish(0))
        except TransportError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    ended = world.turn(0)
    thread.join(20)
    errors = [each for each in (*ended.values(), *found) if isinstance(each, Exception)]
    assert errors, "one of the two is refused, or all are"
    world_serves = {world.members[rank].version for rank in world.receivers}
    assert len(world_serves) == 1


def test_a_restart_in_the_middle_of_a_turn_frees_all_others_and_takes_part() -> None:
    """Rank 1 dies after it has said hello; nobody waits for the bound, and the same calls succeed."""
    world = World(trainer_layout(), (engine_layout(),), timeout_s=20.0)
    old = world.members.pop(1)
    dead = threading.Event()

    def die(*given: Any) -> Any:
        old.session._meeting._store = Gone()  # without a word to anybody
        dead.set()
        raise SystemExit

    old.session._seal = die
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=_quietly, args=(old.publish, 0)),
        threading.Thread(target=lambda: found.update(world.turn(0))),
    ]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    assert dead.wait(20)
    world.table.pop(1, None)
    Publisher(world.session(1), old.source).publish(0)
    for thread in threads:
        thread.join(30)
    assert time.monotonic() - begin < 15.0
    assert {each.tries for each in succeeded(found).values()} == {2}
    world.check_serves(0)


def _quietly(work: Callable[..., Any], *given: Any) -> None:
    try:
        work(*given)
    except BaseException:
        return


def test_a_number_that_another_publisher_offers_may_have_other_content_and_is_sent() -> None:
    """A trainer goes back to a checkpoint and comes to the step that it had published before."""
    world = World(trainer_layout(), (engine_layout(),))
    succeeded(world.turn(0))
    for rank in world.publishers:
        world.members[rank].close()
        world.join(rank)
    world.train(1)  # other weights, under the number that all serve
    assert all(each.changed for each in succeeded(world.turn(0)).values())
    for engine in world.engines:
        for rank, arrays in content(engine, 1).items():
            assert bits(world.served[rank]) == bits(arrays)
    assert not any(each.changed for each in succeeded(world.turn(0)).values())


# --- interrupts ---------------------------------------------------------------------------------


def test_an_interrupt_before_the_vote_ends_the_turn_for_all() -> None:
    world = World(trainer_layout(), (engine_layout(),))
    succeeded(world.turn(0))

    def interrupt() -> None:
        raise KeyboardInterrupt

    world.members[4].target.derive = interrupt
    world.train(1)
    found = world.turn(1)
    assert isinstance(found.pop(4), KeyboardInterrupt)
    all_alike(found, TransportError)
    assert "KeyboardInterrupt" in str(found[0])
    world.check_serves(0)
    del world.members[4].target.derive
    succeeded(world.turn(1))
    world.check_serves(1)


@pytest.mark.parametrize("others", ["have voted", "have not"])
def test_an_interrupt_after_the_vote_leaves_a_rank_that_knows_what_it_serves(others: str) -> None:
    world = World(trainer_layout(), (engine_layout(),))
    succeeded(world.turn(0))
    meeting, slow = world.members[4].session._meeting, world.members[5].target
    decide = meeting.decide

    def interrupted() -> Any:
        if others == "have voted":
            decide()
        else:
            meeting.has_voted = True
            meeting.say("vote/4", b"ready")
        raise KeyboardInterrupt

    meeting.decide = interrupted
    if others == "have not":
        slow.derive = lambda: time.sleep(0.5)
    world.train(1)
    found = world.turn(1)
    assert isinstance(found.pop(4), KeyboardInterrupt)
    if others == "have voted":
        succeeded(found)
        world.check_serves(1)
    else:
        all_alike(found, TransportError)
        world.check_serves(0)
    meeting.decide = decide
    slow.derive = lambda: None
    succeeded(world.turn(1))
    world.check_serves(1)


@pytest.mark.usefixtures("interrupts")
def test_a_signal_waits_until_what_must_be_whole_is_whole() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- what cannot be known -----------------------------------------------------------------------


class Gone:
    """A store whose process is no more."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


def lose_the_store_after_the_vote(receiver: Receiver) -> Callable[[], None]:
    meeting = receiver.session._meeting
    decide, store = meeting.decide, meeting._store

    def lost() -> Any:
        meeting.has_voted = True
        meeting.say(f"vote/{meeting.rank}", b"ready")
        meeting._store = Gone()
        return meeting.outcome()

    def found_again() -> None:
        meeting.decide, meeting._store = decide, store

    meeting.decide = lost
    return found_again


def test_a_store_lost_between_vote_and_outcome_leaves_a_version_that_nobody_claims() -> None:
    world = World(trainer_layout(), (engine_layout(),))
    succeeded(world.turn(0))
    receiver = world.members[4]
    found_again = lose_the_store_after_the_vote(receiver)
    world.train(1)
    found = world.turn(1)
    assert isinstance(found.pop(4), TransportError)
    succeeded(found)  # all had voted
    with pytest.raises(PlanError, match=r"version\(0\) or the next"):
        _ = receiver.version
    found_again()
    succeeded(world.turn(1))
    world.check_serves(1)


def test_a_rank_in_doubt_does_not_go_on_in_the_turn_that_it_voted_in() -> None:
    """It comes back while the turn is open: others must not commit it with a vote that it is past."""
    world = World(trainer_layout(), (engine_layout(),))
    succeeded(world.turn(0))
    receiver, slow = world.members[4], world.members[5].target
    found_again = lose_the_store_after_the_vote(receiver)
    back = threading.Event()
    slow.derive = lambda: back.wait(5)
    world.train(1)
    found: dict[int, Any] = {}
    thread = threading.Thread(target=lambda: found.update(world.turn(1, without=(4,))))
    thread.start()
    with pytest.raises(TransportError, match="Connection reset"):
        receiver.receive()
    found_again()
    again = threading.Thread(target=receiver.receive)
    again.start()
    time.sleep(0.2)
    back.set()
    thread.join(30), again.join(30)
    assert {each.tries for each in succeeded(found).values()} == {2}
    world.check_serves(1)


def test_a_target_that_fails_to_serve_what_was_committed_says_so_until_it_does() -> None:
    world = World(trainer_layout(), (engine_layout(),))
    succeeded(world.turn(0))
    receiver = world.members[5]

    def fail() -> None:
        raise OSError("no such device")

    receiver.target.commit = fail
    world.train(1)
    found = world.turn(1)
    assert "no such device" in str(found.pop(5))
    succeeded(found)
    with pytest.raises(PlanError, match="a receiver knows which version it serves"):
        _ = receiver.version
    del receiver.target.commit
    succeeded(world.turn(1))
    world.check_serves(1)


def test_a_question_that_is_never_answered_costs_its_bound_once() -> None:
    asker, never = Asker(), threading.Event()
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        asker.ask(never.wait, within_s=0.3)
    with pytest.raises(TimeoutError, match="never answered"):
        asker.ask(lambda: 1, within_s=30)
    assert time.monotonic() - begin < 5
    never.set()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:  # and once it was answered after all, others are
        try:
            assert asker.ask(lambda: 1, within_s=5) == 1
            break
        except TimeoutError:
            time.sleep(0.01)
    else:
        pytest.fail("it never answers again")
