"""One function over many files, on every core where that is safe.

Python reads code on one core at a time, and files have nothing to do with each other: copies of this process
share the work. They are made by fork, and only of a process that has one thread, so that no lock is copied as
held.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

__all__ = ["cores", "each"]

T = TypeVar("T")

_MOST = 8
_WORTH = 400_000
"""Bytes of code for which another process is worth its start."""


def each(function: Callable[[T], bytes], items: Sequence[T], *, sizes: Sequence[int]) -> list[bytes]:
    """What a function says of each item, in their order.

    What a process leaves undone that dies is done here.

    Args:
        function: It says something in bytes, and changes nothing that others see.
        items: What it is asked of.
        sizes: How long each takes, in bytes of code.

    >>> each(lambda item: item * 2, [b"a", b"b"], sizes=[1, 1])
    [b'aa', b'bb']
    """
    found: dict[int, bytes] = {}
    shares = _shares(sizes, cores(sizes))
    others: list[tuple[int, int]] = []
    try:
        with suppress(OSError):
            for share in shares[1:]:
                others.append(_begin(function, items, share))
        for index in shares[0] if others else ():
            found[index] = function(items[index])
        for (_, pipe), share in zip(others, shares[1:], strict=False):
            found.update(zip(share, _heard(pipe), strict=False))
    finally:
        for process, pipe in others:
            os.close(pipe)
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
            with suppress(OSError):
                os.waitpid(process, 0)
    return [found[index] if index in found else function(item) for index, item in enumerate(items)]


def cores(sizes: Sequence[int]) -> int:
    """How many processes will work; one where there is little to do, or this one cannot be copied safely."""
    worth = min(sum(sizes) // _WORTH, _MOST)
    if worth < 2 or not sys.platform.startswith("linux"):
        return 1
    try:
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - those that Python does not know of too
    except OSError:
        return 1
    return min(len(os.sched_getaffinity(0)), worth) if threads == 1 else 1


def _shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Indices in parts of about the same size, the largest items first."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * len(shares)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += sizes[index]
    return shares


def _begin(function: Callable[[T], bytes], items: Sequence[T], share: Sequence[int]) -> tuple[int, int]:
    """A process that works on a share, and the pipe on which it is heard."""
    here, there = os.pipe()
    try:
        process = os.fork()
    except OSError:
        os.close(here)
        os.close(there)
        raise
    if process:
        os.close(there)
        return process, here
    try:
        # Said at the end: the pipe is short, and the other side busy until then.
        said = [function(items[index]) for index in share]
        with open(there, "wb") as pipe:  # noqa: PTH123 - a pipe has no path
            for part in said:
                pipe.write(len(part).to_bytes(8, "little"))
                pipe.write(part)
    finally:
        os._exit(0)  # nothing of the parent's is flushed or closed twice


def _heard(pipe: int) -> list[bytes]:
    """What a process said, up to where it broke off."""
    parts = []
    while part := os.read(pipe, 1 << 20):
        parts.append(part)
    data = b"".join(parts)
    found, at = [], 0
    while at + 8 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 8], "little")
        if end > len(data):
            break
        found.append(data[at + 8 : end])
        at = end
    return found
