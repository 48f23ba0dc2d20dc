"""Pickles written without importing anything, and stand-ins turned into plain values and back.

Laws:
    - ``load(dump(x))`` is ``x``, and so is what Python itself reads from ``dump(x)``.
    - ``to_plain(from_plain(x)) == x`` for all that `to_plain` returns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from shardweave.errors import PickleError
from shardweave.store.pickles import Global, Instance, Stored


def dump(value: Any) -> bytes:
    """A pickle of protocol 2, the one that ``torch.load(weights_only=True)`` reads.

    Takes what `load` returns. An `Instance` with arguments is written as a call of its class, one
    without as a new object that is given its state; both are what Python writes for such values.

    Raises:
        PickleError: A value that has no stand-in, or a nesting deeper than the interpreter's stack.
    """
    out, memo = bytearray(b"\x80\x02"), dict[Any, int]()
    try:
        _write(value, out, memo)
    except RecursionError:
        raise PickleError(
            "values for a pickle are a finite tree",
            where=f"a {type(value).__qualname__} to be pickled",
            equation="it is nested too deeply, or holds itself",
            hint="break the cycle, or flatten the values",
        ) from None
    return bytes(out + b".")


def _write(value: Any, out: bytearray, memo: dict[Any, int]) -> None:
    kind = type(value)
    if kind in (str, Global):
        if (index := memo.get((kind, value))) is not None:
            out += b"j" + struct.pack("<I", index)
            return
        if kind is str:
            text = value.encode("utf-8", "surrogatepass")
            out += b"X" + struct.pack("<I", len(text)) + text
        else:
            out += f"c{value.module}\n{value.name}\n".encode()
        out += b"r" + struct.pack("<I", len(memo))
        memo[kind, value] = len(memo)
    elif value is None or kind is bool:
        out += b"N" if value is None else b"\x88" if value else b"\x89"
    elif kind is int:
        _write_int(value, out)
    elif kind is float:
        out += b"G" + struct.pack(">d", value)
    elif kind is bytes:
        _write(Instance(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")), out, memo)
    elif kind in (set, frozenset, complex):
        args = (value.real, value.imag) if kind is complex else (sorted(value, key=repr),)
        _write(Instance(Global("__builtin__", kind.__name__), args), out, memo)
    elif kind is tuple:
        _write_many(value, out, memo, start=b"(", stop=b"t")
    elif kind is list:
        _write_many(value, out, memo, start=b"](", stop=b"e")
    elif kind is dict:
        _write_many([part for item in value.items() for part in item], out, memo, start=b"}(", stop=b"u")
    elif kind is Instance:
        for part in (value.cls, value.args):
            _write(part, out, memo)
        out += b"R" if value.args else b"\x81"
        if value.state is not None:
            _write(value.state, out, memo)
            out += b"b"
    elif kind is Stored:
        _write(value.id, out, memo)
        out += b"Q"
    else:
        raise PickleError(
            "only plain values and stand-ins are written as a pickle",
            equation=f"type({kind.__module__}.{kind.__qualname__})",
            hint="convert it to numbers, text, lists and dicts first",
        )


def _write_int(value: int, out: bytearray) -> None:
    if 0 <= value < 1 << 8:
        out += b"K" + bytes([value])
    elif -(1 << 31) <= value < 1 << 31:
        out += b"J" + struct.pack("<i", value)
    else:
        digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(digits) > 255:
            raise PickleError(
                "an integer in a pickle has at most 255 bytes",
                equation=f"bytes({len(digits)}) > 255",
                hint="store it as text",
            )
        out += b"\x8a" + bytes([len(digits)]) + digits


def _write_many(items: Any, out: bytearray, memo: dict[Any, int], *, start: bytes, stop: bytes) -> None:
    out += start
    for item in items:
        _write(item, out, memo)
    out += stop


# --- stand-ins as plain values -------------------------------------------------------------------

_MAX_NODES: Final = 10_000_000
_MAX_DEPTH: Final = 100


def to_plain(value: Any, *, leaf: Callable[[Any], Any] | None = None, where: str) -> Any:
    """The value with each stand-in as a plain dict, so that it can be printed, compared and stored.

    A `Global` becomes ``{"$global": "module:name"}``, an `Instance` ``{"$class": "module:name",
    "args": [...], "state": ...}`` without the empty parts. A ``$`` that a dict of the file itself has at
    the start of a key is doubled, so that no record can pose as a stand-in:
    ``from_plain(to_plain(value)) == value`` for every value.

    Args:
        value: What `load` returned.
        leaf: Called on anything else, for instance on tensors; gives a dict with a ``"$leaf"`` key.
        where: Where it was read, for messages.

    Raises:
        PickleError: A cycle, a nesting deeper than 100, or a value that is small in the file and
            has more than ten million parts when it is followed.

    >>> to_plain(Instance(Global("argparse", "Namespace"), (), {"lr": 0.1}), where="doc")
    {'$class': 'argparse:Namespace', 'state': {'lr': 0.1}}
    """
    done: dict[int, tuple[Any, int]] = {}

    def visit(node: Any, depth: int) -> tuple[Any, int]:
        if type(node) in (str, int, float, bool, bytes, complex, type(None)):
            return node, 1
        if id(node) in done:
            return done[id(node)]
        if depth > _MAX_DEPTH:
            raise _too_big(f"depth > {_MAX_DEPTH}, or a cycle", where)
        parts: list[tuple[Any, int]] = []

        def inner(child: Any) -> Any:
            parts.append(visit(child, depth + 1))
            return parts[-1][0]

        plain: Any
        if isinstance(node, Global):
            plain = {"$global": f"{node.module}:{node.name}"}
        elif isinstance(node, Instance):
            plain = {"$class": f"{node.cls.module}:{node.cls.name}"}
            plain |= {"args": [inner(arg) for arg in node.args]} if node.args else {}
            plain |= {"state": inner(node.state)} if node.state is not None else {}
        elif isinstance(node, dict):
            plain = {_escaped(_plain_key(key, where)): inner(child) for key, child in node.items()}
        elif isinstance(node, list | tuple):
            plain = type(node)([inner(child) for child in node])
        elif isinstance(node, set | frozenset):
            plain = type(node)(_plain_key(child, where) for child in node)
        elif leaf is not None:
            plain = leaf(node)
        else:
            raise _too_big(f"a {type(node).__name__} has no plain form", where)
        size = 1 + len(parts) + sum(part[1] for part in parts)
        if size > _MAX_NODES:
            raise _too_big(f"parts > {_MAX_NODES}", where)
        done[id(node)] = plain, size
        return plain, size

    return visit(value, 0)[0]


def _plain_key(key: Any, where: str) -> Any:
    if any(isinstance(part, Global | Instance) for part in (key if type(key) is tuple else (key,))):
        raise _too_big("an object is the key of a dict", where)
    return key


def _escaped(key: Any) -> Any:
    return f"${key}" if isinstance(key, str) and key.startswith("$") else key


def _unescaped(key: Any) -> Any:
    return key[1:] if isinstance(key, str) and key.startswith("$$") else key


def _too_big(equation: str, where: str) -> PickleError:
    return PickleError(
        "what a pickle records beside tensors is plain and small",
        where=where,
        equation=equation,
        hint="no training framework writes such a record; do not load the file before you know its origin",
    )


def from_plain(value: Any, *, leaf: Callable[[Any], Any] | None = None) -> Any:
    """The stand-ins again, from what `to_plain` made of them.

    Args:
        value: Plain values.
        leaf: Takes the place of the ``leaf`` of `to_plain`: called on each dict with a ``"$leaf"`` key.
    """
    if isinstance(value, dict):
        if "$leaf" in value and leaf is not None:
            return leaf(value)
        if "$global" in value:
            return Global(*value["$global"].split(":"))
        if "$class" in value:
            args = tuple(from_plain(arg, leaf=leaf) for arg in value.get("args", ()))
            state = from_plain(value.get("state"), leaf=leaf)
            return Instance(Global(*value["$class"].split(":")), args, state)
        return {_unescaped(key): from_plain(child, leaf=leaf) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([from_plain(child, leaf=leaf) for child in value])
    return value
