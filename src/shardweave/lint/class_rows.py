"""What a file says of classes, as plain values that a cache can keep as JSON."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ClassRow", "Field", "Init", "Parameter", "Shape", "Site"]


class Shape(NamedTuple):
    """The arguments of a call, as far as binding asks."""

    positional: str
    """A letter each: ``v`` a value, ``n`` None, ``*`` some unpacked ones, ``a`` the own ``*args``."""
    keywords: dict[str, str]
    """``v`` or ``n`` for each; under ``**`` there is ``*`` for an unpacked mapping, ``k`` for the own one."""


class Parameter(NamedTuple):
    """A parameter of an ``__init__`` after ``self``."""

    name: str
    kind: str
    """``p`` positional only, ``b`` both, ``k`` keyword only, ``a`` for ``*args``, ``w`` for ``**kwargs``."""
    default: str
    """Empty without one, ``n`` for None, else ``v``."""


class Init(NamedTuple):
    """An ``__init__`` or ``__new__`` that is written out."""

    line: int
    parameters: list[Parameter]


class Field(NamedTuple):
    """An annotated name of a class body: a field, where the class is a dataclass."""

    name: str
    default: str
    is_init: bool
    is_keyword: bool
    is_marker: bool
    """``_: KW_ONLY``: the fields behind it are keyword only."""


class Site(NamedTuple):
    """One place where a class may be constructed or handed on."""

    form: str
    """``call``, ``cls`` (of the class itself, from within), ``super``, ``base`` (``Base.__init__(self)``),
    ``partial``, ``arg`` (given to a call) or ``escape``."""
    line: int
    column: int
    end_line: int
    end_column: int
    qualname: str
    values: list[str]
    """As in `shardweave.lint.facts`."""
    shape: Shape
    text: str
    """For ``arg`` the callee, for ``escape`` what happens, for ``cls`` the method."""
    callee: list[str]
    """For ``arg`` the values of the callee."""
    keyword: str
    """For ``arg`` the keyword, or the position as digits."""
    params: list[str]
    """For ``arg`` the keys of a dict that is written out beside it as ``params``."""


class ClassRow(NamedTuple):
    """A class as it is written."""

    qualname: str
    line: int
    bases: list[list[str]]
    """Values of each base; a text without a colon where it comes from outside all that is known."""
    dataclass: dict[str, bool] | None
    """The options of the decorator that are written out; None for no dataclass."""
    fields: list[Field]
    init: Init | None
    new: Init | None
    methods: list[str]
    chains: list[Site]
    """Calls of ``super().__init__`` and of ``Base.__init__`` in its methods."""
