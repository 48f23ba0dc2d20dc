"""Pickles read without running anything.

A pickle is a program for a small stack machine; two of its instructions import and call whatever
the file names. This module is that machine with both taken out: a name becomes a `Global`, a call
becomes an `Instance`, and only names on an allow-list are taken at all. Containers, numbers and text are
built as usual, so what is read is plain values with inert stand-ins between them.

Laws:
    - ``load`` imports nothing and calls nothing but the builders of its allow-list.
    - ``load`` takes time and memory linear in the bytes, and raises `PickleError` and nothing else.
"""

from __future__ import annotations

import struct
import sys
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shardweave.errors import PickleError, ShardweaveError

Builder = Callable[..., Any]
"""Turns the arguments of an allowed call into a value; ``TypeError`` or ``ValueError`` refuses them."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle mentions: a class, a function or a constant of a module, never imported."""

    module: str
    name: str
    builder: Builder | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Instance:
    """What a pickle would have made by calling ``cls(*args)`` and then giving it ``state``."""

    cls: Global
    args: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A persistent id: bytes that lie beside the pickle; for torch, a storage of the archive."""

    id: Any


@dataclass(frozen=True, slots=True)
class Allow:
    """Which names a pickle may mention.

    Attributes:
        names: By ``(module, name)``: a builder for its calls, or ``None`` to keep it as a stand-in.
        others: Keep names of modules that are neither Python's own nor torch's nor numpy's as
            stand-ins. For files in which people store objects of their own configuration.
    """

    names: Mapping[tuple[str, str], Builder | None]
    others: bool = False

    def find(self, module: str, name: str, *, where: str) -> Global:
        """The stand-in for a name, or `PickleError`."""
        if (module, name) in self.names:
            return Global(module, name, self.names[module, name])
        known = module.partition(".")[0] in _KNOWN_ROOTS
        if self.others and not known and all(part.isidentifier() for part in f"{module}.{name}".split(".")):
            return Global(module, name)
        raise PickleError(
            "a pickle names only what is on the allow-list",
            where=where,
            equation=f"it names {module[:200]}.{name[:200]}",
            hint="nothing of it was executed; do not load this file with pickle or torch.load either "
            "unless you trust who wrote it",
        )


_KNOWN_ROOTS: Final = sys.stdlib_module_names | set(IMPORT_MAPPING) | {"torch", "numpy", "setuptools"}
"""Python's own modules, also under the names that they had in Python 2 and have in protocol 2."""


def _mapping(items: Any = ()) -> dict[Any, Any]:
    return {_key(key): value for key, value in items}


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise TypeError("only latin1 text stands for bytes")
    return text.encode("latin1")


def _items(make: Callable[[list[Any]], Any]) -> Builder:
    def build(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple):
            raise TypeError("the items must be a list or a tuple")
        return make([_key(item) for item in items])

    return build


_CONTAINERS: Final[Mapping[str, Builder | None]] = {
    "set": _items(set), "frozenset": _items(frozenset), "complex": complex, "bytes": _bytes,
    "bool": None, "int": None, "float": None, "str": None, "list": None, "dict": None, "tuple": None,
}  # fmt: skip

PLAIN: Final[Mapping[tuple[str, str], Builder | None]] = {
    ("collections", "OrderedDict"): _mapping,
    ("collections", "defaultdict"): lambda *factory: {},
    ("_codecs", "encode"): _bytes,
    **{(m, name): make for m in ("builtins", "__builtin__") for name, make in _CONTAINERS.items()},
}
"""Python's own containers, under their names in both generations of the format."""


_SCALARS: Final = (str, int, float, bool, bytes, type(None), Global, Instance, complex)


def _key(value: Any) -> Any:
    """``value``, if hashing it is sure to be cheap: a scalar, or a short tuple of scalars.

    Integers beyond 64 bits can be chosen to collide, and a deep tuple can exhaust the C stack.
    """
    parts = value if type(value) is tuple and len(value) <= 64 else (value,)
    for part in parts:
        if type(part) not in _SCALARS or (type(part) is int and part.bit_length() > 64):
            raise TypeError(f"a {type(part).__name__} cannot be, or be in, a key")
    return value


def brief(value: Any) -> str:
    """A value for a message. Never a whole ``repr``: what a pickle holds may be endless to print."""
    parts = value if type(value) is tuple and len(value) <= 8 else (value,)
    if all(type(part) in (int, str, float, bool, type(None)) for part in parts):
        return repr(value)[:200]
    return f"a {type(value).__name__}"


# --- reading ------------------------------------------------------------------------------------


def load(data: bytes | memoryview, *, allow: Allow, where: str, stored: Callable[[Any], Any] = Stored) -> Any:
    r"""The value of a pickle of protocol 2 to 5.

    Args:
        data: The pickle. Bytes after its end are an error.
        allow: The names that it may mention.
        where: Where it lies, for messages.
        stored: What to make of a persistent id.

    Returns:
        Plain values, `Instance` and `Global` stand-ins, and what ``stored`` and the builders made.

    Raises:
        PickleError: A name outside ``allow``, or bytes that are not a pickle of this kind.

    >>> load(b"\x80\x02}X\x01\x00\x00\x00aK\x01s.", allow=Allow({}), where="doc")
    {'a': 1}
    >>> load(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", allow=Allow({}), where="doc")
    Traceback (most recent call last):
    ...
    shardweave.errors.PickleError: a pickle names only what is on the allow-list: doc: it names os.system. ...
    """
    machine = _Machine(bytes(data), allow, where, stored)
    try:
        return machine.run()
    except ShardweaveError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PickleError(
            "a pickle is well formed",
            where=f"{where}, byte {machine.at} of the pickle",
            equation=f"{type(error).__name__}: {str(error)[:200]}",
            hint="fetch the file again; if it stays so, neither torch nor Python wrote it",
        ) from error


class _Machine:
    __slots__ = (
        "_allow",
        "_budget",
        "_data",
        "_found",
        "_marks",
        "_memo",
        "_stack",
        "_stored",
        "_where",
        "at",
    )

    def __init__(self, data: bytes, allow: Allow, where: str, stored: Callable[[Any], Any]) -> None:
        self._data, self._allow, self._where, self._stored = data, allow, where, stored
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._found: dict[tuple[str, str], Global] = {}
        # A list from the memo can be passed to many calls; what the builders walk is bounded all the same.
        self._budget = 16 * len(data) + 4096
        self.at = 0

    def run(self) -> Any:
        data, steps = self._data, _STEPS
        if data[:1] != b"\x80":
            raise ValueError("a pickle starts with its protocol")
        while (op := data[self.at]) != 0x2E:
            self.at += 1
            steps[op](self)
        if self.at + 1 != len(data) or len(self._stack) != 1 or self._marks:
            raise ValueError("the pickle stops before its end, or with more than one value")
        return self._stack.pop()

    # Operands. A slice of bytes cannot be longer than the bytes are, so no length allocates anything.

    def _take(self, count: int) -> bytes:
        piece = self._data[self.at : self.at + count]
        if len(piece) != count:
            raise ValueError(f"{count} bytes wanted, {len(piece)} left")
        self.at += count
        return piece

    def _uint(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _line(self) -> str:
        end = self._data.index(b"\n", self.at)
        text, self.at = self._data[self.at : end].decode(), end + 1
        return text

    # Numbers, text, constants.

    def protocol(self) -> None:
        if not 2 <= self._uint(1) <= 5:
            raise ValueError("protocols 2 to 5 are read")

    def frame(self) -> None:
        if self._uint(8) > len(self._data) - self.at:
            raise ValueError("a frame reaches past the end")

    def uint1(self) -> None:
        self._stack.append(self._data[self.at])
        self.at += 1

    def uint2(self) -> None:
        self._stack.append(self._uint(2))

    def int4(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def long1(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._uint(1)), "little", signed=True))

    def float8(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _text(self, width: int) -> None:
        self._stack.append(self._take(self._uint(width)).decode("utf-8", "surrogatepass"))

    def _raw(self, width: int) -> None:
        self._stack.append(self._take(self._uint(width)))

    def push(self, value: Any) -> None:
        self._stack.append(value)

    # The memo is a dict: an index of four billion costs what an index of four costs.

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put1(self) -> None:
        self._memo[self._uint(1)] = self._stack[-1]

    def put4(self) -> None:
        self._memo[self._uint(4)] = self._stack[-1]

    def get1(self) -> None:
        self._stack.append(self._memo[self._data[self.at]])
        self.at += 1

    def get4(self) -> None:
        self._stack.append(self._memo[self._uint(4)])

    # Containers. Only exact builtin containers are filled: nothing else has methods to call.

    def mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._since_mark()

    def pop_mark(self) -> None:
        self._since_mark()

    def empty_list(self) -> None:
        self._stack.append([])

    def empty_dict(self) -> None:
        self._stack.append({})

    def empty_set(self) -> None:
        self._stack.append(set())

    def tuple_marked(self) -> None:
        items = self._since_mark()
        self._stack.append(tuple(items))

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError("the stack holds too few values")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def frozen_set(self) -> None:
        items = self._since_mark()
        self._stack.append(frozenset(_key(item) for item in items))

    def _target(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise TypeError(f"a {type(self._stack[-1]).__name__} is filled as a {kind.__name__}")
        return self._stack[-1]

    def append(self) -> None:
        item = self._stack.pop()
        self._target(list).append(item)

    def appends(self) -> None:
        items = self._since_mark()
        self._target(list).extend(items)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._target(dict)[_key(key)] = value

    def set_items(self) -> None:
        items = self._since_mark()
        if len(items) % 2:
            raise ValueError("a key without a value")
        target = self._target(dict)
        for i in range(0, len(items), 2):
            target[_key(items[i])] = items[i + 1]

    def add_items(self) -> None:
        items = self._since_mark()
        self._target(set).update(_key(item) for item in items)

    # Names, calls, state: the three that execute code elsewhere.

    def _find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError("a module and a name are text")
        found = self._found.get((module, name))
        if found is None:
            found = self._found[module, name] = self._allow.find(module, name, where=self._where)
        self._stack.append(found)

    def name_line(self) -> None:
        module = self._line()
        self._find(module, self._line())

    def name_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._find(module, name)

    def call(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        if type(function) is not Global or type(args) is not tuple:
            raise TypeError(f"a {type(function).__name__} is called")
        if function.builder is None:
            self._stack.append(Instance(function, args))
            return
        self._budget -= sum(len(arg) for arg in args if isinstance(arg, str | bytes | list | tuple | dict))
        if self._budget < 0:
            raise ValueError("the arguments of all calls are far longer than the pickle")
        self._stack.append(function.builder(*args))

    def build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is Instance and target.state is None:
            target.state = state
        elif type(target) is not dict or type(state) is not dict or state.keys() - {"_metadata"}:
            # torch hangs the versions of its modules on a state dict as an attribute: not data.
            raise TypeError(f"a {type(target).__name__} is given a state")

    def persistent(self) -> None:
        self._stack.append(self._stored(self._stack.pop()))

    def refuse(self) -> None:
        raise ValueError(f"instruction {self._data[self.at - 1 : self.at]!r} is not read")


_STEPS: Final[list[Callable[[_Machine], None]]] = [_Machine.refuse] * 256
for _op, _step in {
    b"\x80": _Machine.protocol, b"\x95": _Machine.frame,
    b"K": _Machine.uint1, b"M": _Machine.uint2, b"J": _Machine.int4, b"\x8a": _Machine.long1,
    b"G": _Machine.float8,
    b"X": lambda m: m._text(4), b"\x8c": lambda m: m._text(1), b"\x8d": lambda m: m._text(8),
    b"B": lambda m: m._raw(4), b"C": lambda m: m._raw(1), b"\x8e": lambda m: m._raw(8),
    b"N": lambda m: m.push(None), b"\x88": lambda m: m.push(True), b"\x89": lambda m: m.push(False),
    b"\x94": _Machine.memoize, b"q": _Machine.put1, b"r": _Machine.put4,
    b"h": _Machine.get1, b"j": _Machine.get4,
    b"(": _Machine.mark, b"0": _Machine.pop, b"1": _Machine.pop_mark,
    b"]": _Machine.empty_list, b"}": _Machine.empty_dict, b"\x8f": _Machine.empty_set,
    b")": lambda m: m.push(()), b"t": _Machine.tuple_marked, b"\x85": lambda m: m._tuple(1),
    b"\x86": lambda m: m._tuple(2), b"\x87": lambda m: m._tuple(3), b"\x91": _Machine.frozen_set,
    b"a": _Machine.append, b"e": _Machine.appends, b"s": _Machine.set_item, b"u": _Machine.set_items,
    b"\x90": _Machine.add_items,
    b"c": _Machine.name_line, b"\x93": _Machine.name_stack,
    b"R": _Machine.call, b"\x81": _Machine.call, b"b": _Machine.build, b"Q": _Machine.persistent,
}.items():  # fmt: skip
    _STEPS[_op[0]] = _step
