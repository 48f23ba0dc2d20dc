"""One process a rank: forked from a server that has imported torch once, and never left running."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any
from unittest.mock import patch

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}
PRELOADED = ["scenes", "crew"]
"""What the server imports before it forks ranks."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: what it returned or raised, or neither where it was killed."""

    value: Any = None
    error: Exception | None = None
    exit_code: int | None = None
    seconds: float = 0.0


def run(
    work: Callable[..., Any],
    ranks: Iterable[int],
    *,
    within_s: float = 40.0,
    done: Iterable[int] = (),
    **given: Any,
) -> dict[int, Ended]:
    """Calls `work(rank, **given)` in a process for each rank.

    `done` are the ranks to wait for, all by default; the others are killed when these have ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks, found = list(ranks), {}
    processes, pipes = {}, {}
    begin = time.monotonic()
    try:
        # The main module of a test run is of no use to a rank, and takes long to import.
        bare = patch.dict(sys.modules, {"__main__": ModuleType("__main__")})
        # The server looks for what it imports beforehand along this path only.
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with patch.dict(os.environ, {**ENVIRONMENT, **path}), bare:
            for rank in ranks:
                pipes[rank], child = context.Pipe(duplex=False)
                processes[rank] = context.Process(target=_enter, args=(child, work, rank, given), daemon=True)
                processes[rank].start()
                child.close()
        waiting = {pipes[rank]: rank for rank in list(done) or ranks}
        while waiting:
            left = within_s - (time.monotonic() - begin)
            assert left > 0, f"ranks {sorted(waiting.values())} still run after {within_s} s"
            for pipe in wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                found[rank] = _end(pipe, processes[rank], time.monotonic() - begin)
    finally:
        for rank, process in processes.items():
            if rank not in found and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(5)
            assert not process.is_alive()
            process.close()
            pipes[rank].close()
    return found


def values(ended: dict[int, Ended]) -> dict[int, Any]:
    """What the ranks returned; the error of the first that had one is raised."""
    for rank, end in ended.items():
        if end.error is not None:
            raise AssertionError(f"rank {rank}") from end.error
        assert end.exit_code in (None, 0), f"rank {rank} ended with {end.exit_code}"
    return {rank: end.value for rank, end in ended.items()}


def _end(pipe: Connection, process: Any, seconds: float) -> Ended:
    try:
        is_error, value = pipe.recv()
    except EOFError:
        process.join(5)
        return Ended(exit_code=process.exitcode, seconds=seconds)
    return Ended(error=value, seconds=seconds) if is_error else Ended(value, seconds=seconds)


def _enter(pipe: Connection, work: Callable[..., Any], rank: int, given: dict[str, Any]) -> None:
    try:
        answer = (False, work(rank, **given))
    except Exception as error:
        answer = (True, error)
    pipe.send(answer)
    # What other libraries do when they end is not what is tested.
    pipe.close()
    os._exit(0)
