"""One command in several processes, as torchrun starts them: who they are, and which of them speaks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from shardweave.errors import GeometryError, ShardweaveError

if TYPE_CHECKING:
    from shardweave.convert.together import Company

_LAST_WORDS_S = 1.0
"""Who started the processes ends all with the first; one that is silent stays until another has spoken."""


def are_several() -> bool:
    """Whether this process is one of several; torch is not imported to find out."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def is_silent() -> bool:
    """Whether another process prints what this one would: all but process 0."""
    return are_several() and os.environ["RANK"] != "0"


def default_workers() -> int | None:
    """Threads of each of several processes on a machine; ``None`` where there is one process."""
    if not are_several():
        return None
    from shardweave.train.launch import find_place

    place = find_place()
    cores = os.cpu_count() or 1
    return 1 if place is None else max(1, min(8, cores // max(1, place.local_size)))


@contextmanager
def company(*, timeout_s: float) -> Iterator[Company]:
    """The processes of this command. Of an error that all have, the one that had it speaks.

    Raises:
        GeometryError: The variables of torchrun are there in part.
        TransportError: The store is not reached in time.
    """
    from shardweave.convert.together import ALONE, Company

    if not are_several():
        yield ALONE
        return
    from shardweave.train.launch import find_place, open_store

    place = find_place()
    if place is None:
        yield ALONE
        return
    together = Company(
        open_store(place, timeout_s=timeout_s),
        rank=place.rank,
        size=place.world_size,
        timeout_s=timeout_s,
        serves=place.rank == 0 and not place.has_server,
    )
    try:
        with together:
            try:
                yield together
            except typer.BadParameter as error:
                raise GeometryError(
                    "a command is used as its help says", equation=error.message, hint="see --help"
                ) from error
    except ShardweaveError as error:
        if together.speaks:
            raise
        from shardweave.cli.common import exit_code

        time.sleep(_LAST_WORDS_S)
        raise typer.Exit(exit_code(error)) from None
