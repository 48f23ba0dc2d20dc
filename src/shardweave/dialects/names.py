"""Recognising in which of several forms state is stored, by the names of its arrays and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardweave.errors import UnknownNameError
from shardweave.layout import Layout


def match(candidates: Iterable[Layout], names: Iterable[str]) -> Layout:
    """The first candidate whose arrays have exactly these names: no shape is looked at.

    Raises:
        UnknownNameError: No candidate has these names; the message compares with the nearest.
    """
    given = set(names)
    nearest: tuple[int, Layout, set[str], set[str]] | None = None
    for layout in candidates:
        own = {name for rank in layout.mesh.ranks for name in layout.arrays(rank)}
        missing, unexpected = own - given, given - own
        if not missing and not unexpected:
            return layout
        distance = len(missing) + len(unexpected)
        if nearest is None or distance < nearest[0]:
            nearest = distance, layout, missing, unexpected
    assert nearest is not None, "there is at least one form"
    _, layout, missing, unexpected = nearest
    raise UnknownNameError(
        "the stored names are those of the model, all of them and no others",
        where=f"compared with the nearest form of {layout.name}",
        equation=f"missing {few(missing)}; unexpected {few(unexpected)}",
        hint="take the config that belongs to the weights; save them without what is no weight of the model",
    )


def few(names: Iterable[str], most: int = 4) -> str:
    """How many names there are, and the first of them; for messages."""
    found: Sequence[str] = sorted(names)
    return f"{len(found)} ({', '.join(found[:most])}{', ...' if len(found) > most else ''})" if found else "0"
