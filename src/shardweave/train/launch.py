"""Processes of a run: started here, or by somebody else; and the store through which their ranks meet.

``launch`` starts a process a rank on this machine and ends them together. A rank finds its place in the
variables that ``torchrun`` sets, and so does not know who started it. There is no default process group in
either case: ranks reach a store, and groups are made from it (``grid.py``).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shardweave.errors import GeometryError, TransportError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STOPPED = 130
"""The exit code of a run that was asked to stop."""

_PARENT = "SHARDWEAVE_PARENT_FD"
_REPORTED = "shardweave/run/reported"
_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is in its run.

    Attributes:
        rank: Of all.
        world_size: How many there are.
        local_rank: On this machine.
        local_size: How many are on this machine.
        host: Where the store is.
        port: Its port.
        has_server: Whether somebody else serves the store; else rank 0 does.
        attempt: How often the run was started again by who started it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    has_server: bool
    attempt: str = "0"


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that variables of the environment say, or ``None`` where they say nothing.

    Raises:
        GeometryError: They are there in part, or are no numbers.
    """
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if "RANK" not in environment:
        return None
    absent = [name for name in needed if name not in environment]
    try:
        rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        fits = 0 <= rank < size and 0 < port < 65536
    except (KeyError, ValueError):
        fits = False
    if not fits:
        said = ", ".join(f"{name}={environment.get(name)}" for name in needed)
        raise GeometryError(
            "a rank that is started by somebody else is told its place",
            where="environment",
            equation=said if not absent else f"{', '.join(absent)} is not set; {said}",
            hint="start with torchrun, or unset RANK and let --nproc start the ranks",
        )
    return Place(
        rank,
        size,
        local_rank,
        local_size,
        environment["MASTER_ADDR"],
        port,
        environment.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def open_store(place: Place, *, timeout_s: float) -> Store:
    """The store of a run.

    Raises:
        TransportError: It is not reached in time.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    serves = place.rank == 0 and not place.has_server
    try:
        store = TCPStore(
            place.host,
            place.port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise TransportError(
            "ranks reach the store of their run",
            where=f"rank {place.rank}, {place.host}:{place.port}",
            equation=f"{str(error).splitlines()[0][:200]}, within {timeout_s:g} s",
            hint="start all ranks together, and see that MASTER_ADDR and MASTER_PORT are those of rank 0",
        ) from error
    return PrefixStore(f"shardweave/{place.attempt}", store)


# --- starting -----------------------------------------------------------------------------------


def launch(
    command: Sequence[str],
    *,
    ranks: int,
    told: Callable[[str], None],
    grace_s: float = 15.0,
    stop_s: float = 120.0,
) -> int:
    """Start a process for each rank, wait for all, and leave none behind.

    Args:
        command: What each process runs.
        ranks: How many.
        told: Is told why a rank is gone that could not say so itself.
        grace_s: How long ranks may go on after the first one has failed.
        stop_s: How long ranks may take to stop when they are asked to.

    Returns:
        0 where all ended well, 2 where one says that it was used wrongly, 130 where it was stopped, else 1.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * ranks)) as listener:
        port = listener.getsockname()[1]
        alive, ours = os.pipe()
        processes: list[subprocess.Popen[bytes]] = []
        with _signals() as asked:
            try:
                for rank in range(ranks):
                    processes.append(_start(command, rank, ranks, port, alive))
                os.close(alive)
                alive = -1
                store = _serve(listener)
                return _wait(processes, asked, store, told, grace_s=grace_s, stop_s=stop_s)
            finally:
                _end(processes)
                for descriptor in (alive, ours):
                    if descriptor >= 0:
                        os.close(descriptor)


def _start(command: Sequence[str], rank: int, ranks: int, port: int, alive: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        _PARENT: str(alive),
    }
    environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
    # A session of its own: Ctrl-C comes to the launcher alone, which asks ranks to stop in turn.
    return subprocess.Popen(list(command), env=environment, pass_fds=(alive,), start_new_session=True)


def _serve(listener: socket.socket) -> Any:
    """The store, served here; ranks that are ready before it is wait in the socket."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()),
    )


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    asked: list[int],
    store: Any,
    told: Callable[[str], None],
    *,
    grace_s: float,
    stop_s: float,
) -> int:
    until, told_to_stop, killed = float("inf"), False, False
    while any(process.poll() is None for process in processes):
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if asked and not told_to_stop:
            told_to_stop, until = True, time.monotonic() + stop_s
            for process in processes:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
        if len(asked) > 1:
            break
        if failed and not told_to_stop and until == float("inf"):
            until = time.monotonic() + grace_s
            killed = _say_who_was_killed(codes, store, told)
        if time.monotonic() > until:
            break
        time.sleep(_EVERY_S)
    ended = [process.poll() for process in processes]
    if asked:
        return STOPPED
    if not killed:
        _say_who_was_killed(ended, store, told)
    if all(code == 0 for code in ended):
        return 0
    return next((code for code in (2, STOPPED) if code in ended), 1)


def _say_who_was_killed(codes: Sequence[int | None], store: Any, told: Callable[[str], None]) -> bool:
    dead = {rank: code for rank, code in enumerate(codes) if code is not None and code < 0}
    if not dead or not claim(_Prefixed(store)):
        return bool(dead)
    rank, code = next(iter(dead.items()))
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    told(f"rank {rank} was ended by {name}")
    return True


class _Prefixed:
    """The store of the launcher as ranks see it."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def add(self, key: str, by: int) -> int:
        return int(self._store.add(f"shardweave/0/{key}", by))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs, kindly first."""
    for sent, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        running = [process for process in processes if process.poll() is None]
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sent)
        end = time.monotonic() + wait_s
        while any(process.poll() is None for process in running) and time.monotonic() < end:
            time.sleep(_EVERY_S)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """What the process was asked to stop with, so far."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {
        number: signal.signal(number, lambda got, _: asked.append(got))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- in a rank ----------------------------------------------------------------------------------


def claim(store: Any) -> bool:
    """Whether this rank is the one that tells of an error: the first that asks, or any if nobody answers."""
    try:
        return int(store.add(_REPORTED, 1)) == 1
    except RuntimeError:
        return True


def end_with_parent() -> None:
    """Ask this process to stop when the launcher is gone, however it went. Nothing where there is none."""
    descriptor = os.environ.get(_PARENT)
    if descriptor is None:
        return

    def watch() -> None:
        with suppress(OSError):
            while os.read(int(descriptor), 1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60.0)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def command_of(verb: str, arguments: Sequence[str]) -> list[str]:
    """How a rank is started: this program once more."""
    return [sys.executable, "-m", "shardweave", verb, *arguments]
