"""Runs conversions that can be killed: one fork for each line of stdin, so that nothing is imported twice.

A line is a JSON object: ``src dst to choices force``, and how the run is disturbed: ``slow_s`` before
each write, ``die_at`` the number of the step before which the process kills itself. A step is a call of
the operating system that changes what a folder holds. Answers are lines: the process id, then how
it ended: ``killed``, ``done`` or the error.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardweave.convert import Geometry, convert, prepare
from shardweave.errors import ShardweaveError

# Besides opening a file to write.
STEPS = ("replace", "rename", "unlink", "mkdir", "rmdir", "fsync")


def disturb(slow_s: float, die_at: int | None) -> None:
    if slow_s:
        write = os.pwrite

        def slowly(descriptor: int, data: memoryview, offset: int) -> int:
            # Half of what is asked, so that a kill finds extents half written.
            time.sleep(slow_s)
            return write(descriptor, data[: -(-len(data) // 2)], offset)

        os.pwrite = slowly  # type: ignore[assignment]
    if die_at is None:
        return
    count = itertools.count()

    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if next(count) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return step

    for name in STEPS:
        setattr(os, name, before(getattr(os, name)))
    read, write = io.open, before(io.open)

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return (write if set(mode) & set("wxa+") else read)(file, mode, *args, **kwargs)

    io.open = opened  # type: ignore[assignment]


def job(order: dict[str, Any]) -> None:
    choices = dict(order["choices"])
    if "geometry" in choices:
        choices["geometry"] = Geometry(**choices["geometry"])
    if "config" in choices:
        choices["config"] = Path(choices["config"])
    prepared = prepare(Path(order["src"]), to=order["to"], **choices)
    disturb(order.get("slow_s", 0), order.get("die_at"))
    convert(prepared, Path(order["dst"]), force=order.get("force", False), memory_bytes=1 << 18, workers=2)


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 0
            try:
                job(json.loads(line))
            except ShardweaveError as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                code = 1
            os._exit(code)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        ended = {0: "done", 1: "refused"}.get(os.waitstatus_to_exitcode(status), "killed")
        print(ended, flush=True)


if __name__ == "__main__":
    main()
