"""A world of ranks as threads of one process: what needs 24 ranks is tried in a second, without a network.

``run_world`` calls a function once for each rank, in a thread of its own, with the groups of a plan. Their
communicators have the methods of a process group of torch that this package calls, and pass tensors in
memory. What collectives compute over them has the same bits as over gloo: the same messages between pairs,
and sums in the order of ranks.

A message is received by the first receipt of the same sender, receiver and tag, in the order in which each
posts its own. As with gloo, ``wait`` of a send returns when the message was received; what is sent is left
alone until then, and so is what is received into. With ``strict`` all of that is checked.

Ranks share what threads share: module state, patches of mock, the default generator of torch. Modes of
autograd are each rank's own, and begin as they do in a new process.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from shardweave.errors import TransportError, TransportTimeoutError
from shardweave.testing.communicator import Communicator, Tag, Work, hand_over, what
from shardweave.train.grid import GroupPlan, Groups

T = TypeVar("T")

_GRACE_S = 2.0
"""How long ranks have to end after the time of their world is over."""
_MOST_LINKS = 4
"""Ranks that an error names, of those that wait for each other."""


def run_world(
    work: Callable[[Groups], T], *, plan: GroupPlan, timeout_s: float = 60.0, strict: bool = False
) -> list[T]:
    """What a function returns on each rank of a world, in the order of ranks.

    Args:
        work: Called once for each rank, in a thread of its own; ``groups.rank`` says which it is.
        plan: The groups, and by its grids the number of ranks.
        timeout_s: How long the world may take.
        strict: Whether to check what gloo leaves unsaid: that nobody changes what is sent, or received into,
            before ``wait`` returns; that what is received into is not read before either, for until then it
            holds no number; and that all that is sent is received. It costs a copy of each message.

    Raises:
        BaseException: The first error of any rank, as it was raised, with a note that says of which. All
            other ranks get a ``TransportError`` at their next message.
        TransportTimeoutError: Nobody can go on, as each rank waits for another or has ended, which is said at
            once, unless there are threads that ``work`` has started; or the time is over. It names who waits
            for whom.
        TransportError: A message is not what its receiver expects, or a rule of ``strict`` is broken.

    Laws:
        When it returns or raises, no thread is left. The one exception is a rank that stands in something
        else than a message when the time is over, which nothing can end: it is named, with its line.
        What is received does not depend on which thread runs when.

    Six ranks as ``cp=3, dp=2``. Each sums over those that it shares documents with:

    >>> from shardweave.layout import Mesh
    >>> from shardweave.train.collectives import sum_all
    >>> from shardweave.train.grid import plan_groups
    >>> mesh = Mesh((("cp", 3), ("dp", 2)))
    >>> plan = plan_groups({"model": mesh}, {"model": {"cp": ("cp",), "dp": ("dp",)}})
    >>> def work(groups):
    ...     own = torch.tensor([10**groups.rank])
    ...     return sum_all(own, group=groups.get("model", "cp")).item(), sent_bytes(groups)
    >>> for rank, (total, sent) in enumerate(run_world(work, plan=plan)):
    ...     print(rank, total, sent)
    0 111 {'model.cp': 16, 'model.dp': 0}
    1 111 {'model.cp': 16, 'model.dp': 0}
    2 111 {'model.cp': 16, 'model.dp': 0}
    3 111000 {'model.cp': 16, 'model.dp': 0}
    4 111000 {'model.cp': 16, 'model.dp': 0}
    5 111000 {'model.cp': 16, 'model.dp': 0}

    A rank that does not come is named as soon as nobody can go on:

    >>> try:
    ...     run_world(lambda groups: groups.rank == 5 or work(groups), plan=plan)
    ... except TimeoutError as error:
    ...     print(error.equation)
    rank 3 waits for rank 5 to take torch.int64(1,), rank 5 has ended; 2 of 6 ranks wait
    """
    world = World(plan, timeout_s=timeout_s, strict=strict)
    found: dict[int, T] = {}

    def live(rank: int) -> None:
        try:
            world.begin(rank)
            found[rank] = work(world.groups(rank))
        except BaseException as error:
            world.fail(rank, error)
        else:
            world.end(rank)

    threads = [
        threading.Thread(target=live, args=(rank,), name=f"rank {rank} of {world.size}", daemon=True)
        for rank in range(world.size)
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # for each rank: a thread takes over what holds when it first computes
    try:
        for thread in threads:
            thread.start()
        world.join(threads)
    except BaseException as error:  # this thread was interrupted, or one could not be started
        world.fail(None, error)
        world.join([thread for thread in threads if thread.ident is not None], within_s=_GRACE_S)
        raise
    finally:
        torch.set_num_threads(before)
    world.conclude(threads)
    return [found[rank] for rank in range(world.size)]


def sent_bytes(groups: Groups) -> dict[str, int]:
    """How many bytes this rank has sent so far, by the names of the groups that it shares with others.

    Only messages count, not what a rank keeps for itself. Two groups of the same ranks count apart.
    """
    return {group.name: int(group.comm.sent_bytes) for group in groups.every() if group.comm is not None}


# --- what ranks share ---------------------------------------------------------------------------


class World:
    """Messages that wait for their other end, and who waits; ``run_world`` makes one."""

    def __init__(self, plan: GroupPlan, *, timeout_s: float, strict: bool) -> None:
        self.size, self._plan = plan.world_size, plan
        self._strict, self._timeout_s = strict, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        # Ends of one kind only are in a queue: the other kind takes the first of them.
        self._queues: dict[tuple[int, tuple[int, int], Tag], deque[Work]] = {}
        self._waiting: dict[int, Work] = {}
        self._threads: dict[int, int] = {}
        self._before = {thread.ident for thread in threading.enumerate()}
        self._ended: set[int] = set()
        self._left: set[tuple[int, int]] = set()
        self._has_helpers = False
        self._first: tuple[str, BaseException] | None = None

    def groups(self, rank: int) -> Groups:
        """The groups of a rank. Each has an end of its own of their communicator, to count by name."""
        plan = self._plan
        numbers = {plan.communicators[number]: number for number in plan.of_rank.get(rank, ())}

        def end(ranks: tuple[int, ...]) -> Communicator:
            return Communicator(self, numbers[ranks], ranks, rank)

        groups = Groups(plan, rank, {ranks: end(ranks) for ranks in numbers})
        for group in groups.every():
            if group.comm is not None:
                object.__setattr__(group, "comm", end(group.ranks))
        return groups

    # --- messages -------------------------------------------------------------------------------

    def post(self, number: int, work: Work) -> None:
        """Bring one end of a message to its other, or keep it until that is there."""
        if self._strict:
            work.keep()
        with self._lock:
            self._look(work)
            gone = next((rank for rank in work.ends if (number, rank) in self._left), None)
            if gone is not None:
                raise _gone(work, gone)
            queue = self._queues.setdefault((number, work.ends, work.tag), deque())
            if not queue or queue[0].is_send == work.is_send:
                queue.append(work)
                return
            other = queue.popleft()
        send, receipt = (work, other) if work.is_send else (other, work)
        wrong = hand_over(send, receipt)
        with self._lock:
            self._finish(send, wrong)
            self._finish(receipt, wrong)

    def wait(self, work: Work) -> None:
        """Wait until a message is through, or never will be."""
        with self._lock:
            if work.done:
                return
            self._look(work)
            event = work.event = threading.Event()
            work.thread = threading.get_ident()
            self._waiting[work.thread] = work
            self._check_stuck()
        if event.wait(max(0.0, self._deadline - time.monotonic())):
            return
        with self._lock:
            if not work.done:
                self._finish(work, self._late(self._chain(work)))

    def leave(self, number: int, rank: int) -> None:
        """Let go of a communicator on one rank."""
        with self._lock:
            self._left.add((number, rank))
            for (of, ends, _), queue in self._queues.items():
                while of == number and rank in ends and queue:
                    work = queue.popleft()
                    self._finish(work, _gone(work, rank))

    def _finish(self, work: Work, error: TransportError | None) -> None:
        if error is not None:
            # Two threads may raise it, each with its own frames.
            work.error = type(error)(error.rule, where=error.where, equation=error.equation, hint=error.hint)
        work.done = True
        if work.event is not None:
            self._waiting.pop(work.thread, None)
            work.event.set()

    # --- ranks ----------------------------------------------------------------------------------

    def begin(self, rank: int) -> None:
        """Note the thread of a rank."""
        with self._lock:
            self._threads[rank] = threading.get_ident()

    def end(self, rank: int) -> None:
        """Note that a rank has ended as it should."""
        with self._lock:
            self._ended.add(rank)
            self._check_stuck()

    def fail(self, rank: int | None, error: BaseException) -> None:
        """End all ranks with the error of one, or of the caller, if it is the first."""
        with self._lock:
            if rank is not None:
                self._ended.add(rank)
            if self._first is None:
                self._first = "the caller" if rank is None else f"rank {rank} of {self.size}", error
            for work in list(self._waiting.values()):
                self._finish(work, self._closed(work))

    def join(self, threads: Sequence[threading.Thread], *, within_s: float | None = None) -> None:
        """Wait for the threads of ranks, but not for ever."""
        until = self._deadline + _GRACE_S if within_s is None else time.monotonic() + within_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def conclude(self, threads: Sequence[threading.Thread]) -> None:
        """Raise the first error, if there was one."""
        left = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        with self._lock:
            stand = ", ".join(self._state(rank) for rank in left[:_MOST_LINKS])
            if left and self._first is None:
                late = self._late(f"{stand}; {len(left)} of {self.size} ranks still run")
                self._first = f"rank {left[0]} of {self.size}", late
            first = self._first
            queued = next((work for queue in self._queues.values() for work in queue), None)
        if first is not None:
            who, error = first
            error.add_note(f"raised by {who} of a world in memory")
            if left:
                error.add_note(f"{len(left)} ranks could not be ended: {stand}")
            raise error
        if self._strict and queued is not None:
            happened = "sent and never received" if queued.is_send else "waited for and never sent"
            raise TransportError(
                "all that is sent is received, and the other way round",
                where=queued.way,
                equation=f"{what(queued.tensor)} was {happened}",
                hint="one of the two ranks posts a message more than the other",
            )

    # --- what is wrong --------------------------------------------------------------------------

    def _look(self, work: Work) -> None:
        """Refuse what is posted or waited for when it is too late."""
        self._has_helpers |= threading.get_ident() != self._threads.get(work.rank)
        if self._first is not None:
            raise self._closed(work)
        if time.monotonic() > self._deadline:
            raise self._late(f"rank {work.rank} is not done")

    def _check_stuck(self) -> None:
        """Free one rank with an error where all wait for each other, or for ranks that have ended."""
        alive = self.size - len(self._ended)
        if self._waiting and len(self._waiting) == alive and not self._may_be_helped():
            work = min(self._waiting.values(), key=lambda work: work.rank)
            self._finish(work, self._stuck(f"{self._chain(work)}; {alive} of {self.size} ranks wait"))

    def _may_be_helped(self) -> bool:
        """Whether a rank has threads of its own, which may post something at any time."""
        threads = {thread.ident for thread in threading.enumerate()}
        return self._has_helpers or not threads <= self._before | set(self._threads.values())

    def _chain(self, work: Work) -> str:
        """Who waits for whom, from one rank on."""
        waits = {other.rank: other for other in self._waiting.values()} | {work.rank: work}
        said: list[str] = []
        rank, seen = work.rank, set[int]()
        while rank in waits and rank not in seen and len(said) < _MOST_LINKS:
            seen.add(rank)
            one = waits[rank]
            act = "take" if one.is_send else "send"
            said.append(f"rank {rank} waits for rank {one.peer} to {act} {what(one.tensor)}")
            rank = one.peer
        if rank not in waits:
            said.append(self._state(rank))
        elif rank not in seen:
            said.append("and so on")
        return ", ".join(said)

    def _state(self, rank: int) -> str:
        """What a rank does that does not wait for a message."""
        if rank in self._ended:
            return f"rank {rank} has ended"
        frame = sys._current_frames().get(self._threads.get(rank, -1))
        if frame is None:
            return f"rank {rank} has not begun"
        code = frame.f_code
        return f"rank {rank} is at {Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"

    def _stuck(self, equation: str) -> TransportTimeoutError:
        return TransportTimeoutError(
            "every rank comes to what others wait for",
            where=f"{self.size} ranks in memory",
            equation=equation,
            hint="look at what the last of them did before: one rank took another way than its peers",
        )

    def _late(self, equation: str) -> TransportTimeoutError:
        return TransportTimeoutError(
            "a world ends within its time",
            where=f"{self.size} ranks in memory",
            equation=f"after timeout_s({self._timeout_s:g}): {equation}",
            hint="look at what the last of them does; raise timeout_s if it is only slow",
        )

    def _closed(self, work: Work) -> TransportError:
        assert self._first is not None
        who, error = self._first
        return TransportError(
            "a world goes on as long as all of its ranks do",
            where=f"rank {work.rank}",
            equation=f"{who} ended with {type(error).__name__}: {f'{error}':.200}",
            hint="look at that error, which run_world() raises",
        )


def _gone(work: Work, rank: int) -> TransportError:
    return TransportError(
        "the peers of a message are there",
        where=work.way,
        equation=f"rank {rank} has closed its groups",
        hint="a step failed on that rank, whose error says why",
    )
