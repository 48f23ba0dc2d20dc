"""What the arguments of a call are to the parameters of a function.

>>> from shardweave.lint.class_rows import Parameter, Shape
>>> init = [Parameter("config", "b", ""), Parameter("group", "b", "n")]
>>> bind(Shape("vv", {}), init, "group").kind
'positional'
>>> bind(Shape("v", {"group": "n"}), init, "group").kind
'none'
>>> bind(Shape("vv", {"group": "v"}), init, "group").kind
'twice'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardweave.lint.class_rows import Parameter, Shape

__all__ = ["GIVEN", "Bound", "bind", "leftover"]

GIVEN = frozenset({"keyword", "positional"})


class Bound(NamedTuple):
    """What happens to one argument of one call."""

    kind: str
    """``keyword``, ``positional``, ``none``, ``args`` and ``kwargs`` (may be in an unpacked one), ``twice``,
    ``missing``, ``not-accepted``, ``supplied`` (a subclass passes it on by itself)."""
    position: int = 0
    """From 1, where the argument can be given by position; else 0."""
    is_keyword: bool = True
    """Whether it can be given by keyword."""
    is_hidden: bool = False
    """For ``none``: given by position."""


def bind(shape: Shape, parameters: Sequence[Parameter], name: str) -> Bound | None:
    """How a call gives one argument to a signature.

    Args:
        shape: The call.
        parameters: Those of the function, without ``self``.
        name: The argument.

    Returns:
        None where the signature has no parameter of that name.
    """
    plain = [parameter.name for parameter in parameters if parameter.kind in "pb"]
    kinds = {parameter.name: parameter.kind for parameter in parameters if parameter.kind not in "aw"}
    if name not in kinds:
        return None
    by_keyword = kinds[name] != "p"
    keyword = shape.keywords.get(name, "") if by_keyword else ""
    position = plain.index(name) + 1 if name in plain else 0
    letters = shape.positional
    unpacked = min((letters.index(star) for star in "*a" if star in letters), default=len(letters))

    def bound(kind: str, is_hidden: bool = False) -> Bound:
        return Bound(kind, position, by_keyword, is_hidden)

    if 0 < position <= unpacked:
        if keyword:
            return bound("twice")
        is_none = letters[position - 1] == "n"
        return bound("none", is_hidden=True) if is_none else bound("positional")
    if keyword:
        return bound("none" if keyword == "n" else "keyword")
    if position and unpacked < len(letters):
        return bound("args")
    return bound("kwargs" if "**" in shape.keywords and by_keyword else "missing")


def leftover(shape: Shape, parameters: Sequence[Parameter]) -> Shape:
    """What ``*args`` and ``**kwargs`` of a function hold after a call of it."""
    plain = [parameter for parameter in parameters if parameter.kind in "pb"]
    named = {parameter.name for parameter in parameters if parameter.kind in "bk"}
    letters = shape.positional
    unpacked = min((letters.index(star) for star in "*a" if star in letters), default=len(letters))
    rest = letters[len(plain) :] if unpacked >= len(plain) else letters[unpacked:]
    keywords = {key: letter for key, letter in shape.keywords.items() if key not in named}
    return Shape(
        rest if any(parameter.kind == "a" for parameter in parameters) else "",
        keywords if any(parameter.kind == "w" for parameter in parameters) else {},
    )
