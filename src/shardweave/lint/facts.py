"""What one file says about names, as plain values that a cache can keep.

A value is a text ``module:attributes``: ``import a.b as c`` makes ``c`` the value ``a.b:``, and then
``c.d.e`` is ``a.b:d.e``. The part before the colon is surely a module; whether the part behind it is one too
is the matter of `shardweave.lint.names`. A leading ``*`` says "if that module has such a name", as after a
star import. An empty text is anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Class", "Facts", "Function", "Member", "Use", "facts_from"]


class Use(NamedTuple):
    """One place where a name is used that comes from a module."""

    values: tuple[str, ...]
    form: str
    """``call``, ``ref``, ``alias`` (given another name), ``import``, ``dynamic`` (a computed name of it)."""
    line: int
    column: int
    end_line: int
    end_column: int
    qualname: str
    fallback: bool
    """Only where something is None or false."""
    guarded: bool
    """Where hasattr or a caught AttributeError or ImportError makes a missing name no error."""
    chain: str
    """The attribute that is read of the result."""
    logged: bool
    """Only a message depends on it."""
    positional: int
    """Positional arguments of a call; -1 where ``*args`` hides them."""
    nones: tuple[str, ...]
    """Arguments that are None: their keywords, and positions as digits."""
    keywords: tuple[str, ...]
    """Keywords of a call; ``**`` for an unpacked mapping."""


class Member(NamedTuple):
    """A hasattr of an object, or an assignment to an attribute of one."""

    form: str
    """``has`` or ``set``."""
    owner: str
    """The last name of the object, such as ``pg_collection`` of ``self.pg_collection``."""
    types: tuple[str, ...]
    """Values of the classes that the object may be of, where they can be seen."""
    name: str
    line: int
    column: int
    end_line: int
    end_column: int
    qualname: str


class Function(NamedTuple):
    """A function, and the uses that its result is made of."""

    line: int
    flows: tuple[int, ...]
    is_property: bool


class Class(NamedTuple):
    """The fields that a class declares, and what its ``__getattr__`` does."""

    fields: tuple[str, ...]
    getattr: str
    """Empty without one; ``all`` where it never raises, ``some`` where it may."""


class Facts(NamedTuple):
    """All that a file says about names, as plain values."""

    exports: dict[str, list[str]]
    """What each name of the module, and each ``Class.name``, may be at the end of the module."""
    stars: list[str]
    """Modules of star imports, in order."""
    public: list[str] | None
    """``__all__`` where it is written out."""
    is_dynamic: bool
    """Whether the module has a ``__getattr__``."""
    uses: list[Use]
    members: list[Member]
    functions: dict[str, Function]
    classes: dict[str, Class]


def facts_from(stored: Sequence[Any]) -> Facts:
    """The facts of a list that JSON made of them."""
    exports, stars, public, is_dynamic, uses, members, functions, classes = stored
    return Facts(
        exports,
        stars,
        public,
        is_dynamic,
        [Use(*map(_tuple, use)) for use in uses],
        [Member(*map(_tuple, member)) for member in members],
        {name: Function(*map(_tuple, value)) for name, value in functions.items()},
        {name: Class(*map(_tuple, value)) for name, value in classes.items()},
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
