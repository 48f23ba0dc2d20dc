"""Which buffers a word selects, and which dim of a buffer is drawn."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import NoReturn

from shardweave.errors import UnknownNameError
from shardweave.layout import BufferRule, Layout
from shardweave.layout.buffer import table_of
from shardweave.show.words import dim_names, role


def matching(layout: Layout, select: str | None) -> tuple[int, ...]:
    """The numbers of the rules that a word selects; all of them where there is no word.

    A word is a label or role (``q``), a name of a buffer or tensor, or a part of one; the first kind
    that fits decides.
    """
    if select is None:
        return tuple(range(len(layout.rules)))
    for fits in (_is, _has_word, _contains):
        found = tuple(
            i for i, rule in enumerate(layout.rules) if any(fits(name, select) for name in _names(rule))
        )
        if found:
            return found
    return ()


def _names(rule: BufferRule) -> Iterator[str]:
    yield rule.name
    for part in rule.parts:
        yield from (part.tensor.name, role(part.tensor), part.label)


def _is(name: str, select: str) -> bool:
    return name == select


def _has_word(name: str, select: str) -> bool:
    return f".{select}." in f".{name}."


def _contains(name: str, select: str) -> bool:
    return select in name


def refuse_name(select: str, *layouts: Layout) -> NoReturn:
    """Refuse a word that selects nothing, with the names that are near."""
    names = {name for layout in layouts for rule in layout.rules for name in _names(rule) if name}
    words = names | {word for name in names for word in name.split(".")}
    near = difflib.get_close_matches(select, sorted(words), n=4, cutoff=0.4) or sorted(names)[:4]
    raise UnknownNameError(
        "a picture is of a buffer or tensor that exists",
        where=" and ".join(f"layout {layout.name!r}" for layout in layouts),
        equation=f"{select!r} is in none of {len(names)} names; near are {', '.join(near)}",
        hint="select by a label (q), a name, or a part of one (linear_qkv)",
    )


def drawn_dim(rule: BufferRule, dim: str | None = None) -> int:
    """The dim of a buffer that is drawn: the fused one, else the last one that is cut, shape before index.

    Args:
        rule: The buffer.
        dim: The dim by name (``experts``), where not by this rule.
    """
    tensor = rule.parts[0].tensor
    names = dim_names(tensor)
    if dim is not None:
        if dim not in names:
            raise UnknownNameError(
                "a picture is of a dim that the buffer has",
                where=f"buffer {rule.name!r}",
                equation=f"{dim!r} is not among {', '.join(names)}",
                hint="name one of them",
            )
        return names.index(dim)
    if rule.fused:
        return rule.fused[0]
    inside: list[int] = [*range(len(tensor.index), tensor.num_dims), *range(len(tensor.index))]
    cut = [d for d in inside if len(set(table_of(rule.dims[d]))) > 1]
    shape = [d for d in cut if d >= len(tensor.index)]
    return (shape[-1:] or cut[:1] or inside[:1] or [0])[0]
