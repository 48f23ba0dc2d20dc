"""Ranks that are forked from a process which has imported what they need, and end with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from shardweave.train.launch import end_with_parent


def fork(work: Callable[..., None], ranks: int, *given: Any) -> None:
    """Call ``work(rank, *given)`` in a process for each rank; ends with an error where one of them does."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_enter, args=(work, rank, given), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise SystemExit(f"exit codes {codes}")


def _enter(work: Callable[..., None], rank: int, given: tuple[Any, ...]) -> None:
    end_with_parent()
    work(rank, *given)
