"""Scopes, what is bound in them, and what a name is at a place.

Code runs in the order in which it is written, so that within one scope a name is what was last bound on the
way there (`reaching`). What is deferred, the body of a function, sees what the scopes around it hold at their
end.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardweave.lint.shapes import getattr_name, last_name

_CARRY = (ast.Name, ast.Attribute, ast.IfExp, ast.BoolOp, ast.NamedExpr)
_MOST_VALUES = 16
_DEEPEST = 40


def may_carry(node: ast.expr) -> bool:
    """Whether an expression may hand on what it is made of."""
    if isinstance(node, ast.Call):
        return last_name(node.func) == "import_module" or getattr_name(node) is not None
    return isinstance(node, _CARRY)


class Block:
    """A suite of statements: what it belongs to, and which arm of that."""

    __slots__ = ("arm", "is_loop", "owner", "parent")

    def __init__(self, parent: Block | None, owner: object, arm: int, is_loop: bool = False) -> None:
        self.parent, self.owner, self.arm, self.is_loop = parent, owner, arm, is_loop

    def chain(self) -> Iterator[Block]:
        """The block and those around it, within its scope."""
        block: Block | None = self
        while block is not None:
            yield block
            block = block.parent


class Binding(NamedTuple):
    """A place where a name gets what it is."""

    order: int
    block: Block
    kind: str
    """``value``, ``expr``, ``type`` (a parameter with these types), ``star``, ``other`` or ``del``."""
    what: Any
    is_foreign: bool
    """Made by another scope, with global or nonlocal: it may happen at any time."""


class Scope:
    """A module, class, function or comprehension, and what is bound in it."""

    __slots__ = (
        "bindings", "block", "calls", "elsewhere", "first", "is_property", "kind", "line", "parent",
        "qualname", "returns",
    )  # fmt: skip

    def __init__(self, kind: str, parent: Scope | None, qualname: str, block: Block) -> None:
        self.kind, self.parent, self.qualname, self.block = kind, parent, qualname, block
        self.bindings: dict[str, list[Binding]] = {}
        self.elsewhere: dict[str, str] = {}
        self.returns: list[tuple[ast.expr, int, Block]] = []
        self.line = 0
        self.is_property = False


class Names:
    """What names and expressions of one file may be."""

    def __init__(self, top: Scope) -> None:
        self.top = top
        self.looking: set[int] = set()
        self.known: dict[int, tuple[str, ...]] = {}

    def lookup(self, name: str, scope: Scope, order: int, block: Block) -> tuple[str, ...]:
        """What a name may be at a place."""
        here: Scope | None = scope
        now = True
        while here is not None:
            if name in here.elsewhere:
                if here.elsewhere[name] == "global":
                    here, now = self.top, False
                else:
                    here, now = here.parent, False
                    continue
            if here.kind != "class" or here is scope:
                bindings = here.bindings.get(name)
                stars = here.bindings.get("*", []) if here is self.top else []
                if stars:
                    bindings = sorted([*(bindings or ()), *stars])
                if bindings is not None:
                    found, is_sure = reaching(bindings, order if now else None, block)
                    values = self.of_bindings(found, name)
                    if here.kind == "class" and not is_sure:
                        # Names of a class body that are not bound yet are looked up as globals.
                        values = (*values, *self.lookup_global(name, here, order))
                    return values
            # Comprehensions and class bodies run where they stand, functions later.
            if here.kind == "function":
                now = False
            elif here.kind == "class":
                block = here.block
            here = here.parent
        return ()

    def lookup_global(self, name: str, scope: Scope, order: int) -> tuple[str, ...]:
        """What a name of a class body may be in the module, at that time if no function is between."""
        block, here = self.top.block, scope
        now: int | None = order
        while here.parent is not None:
            block = here.block
            now = None if here.kind == "function" else now
            here = here.parent
        bindings = [*self.top.bindings.get(name, ()), *self.top.bindings.get("*", ())]
        found, _ = reaching(sorted(bindings), now, block)
        return self.of_bindings(found, name)

    def of_bindings(self, bindings: Iterable[Binding], name: str) -> tuple[str, ...]:
        """What a name may be that has these bindings."""
        values: dict[str, None] = {}
        for binding in bindings:
            if binding.kind == "value":
                values[binding.what] = None
            elif binding.kind == "star":
                values[f"*{binding.what}:{name}"] = None
            elif binding.kind == "expr":
                values.update(dict.fromkeys(self.of_expr(binding.what)))
            elif binding.kind != "del":
                values[""] = None
        return tuple(values)[:_MOST_VALUES]

    def of_expr(self, what: tuple[ast.expr, Scope, int, Block]) -> tuple[str, ...]:
        """What an assigned expression may be; nothing more where it leads back to itself."""
        key = id(what)
        if key in self.known:
            return self.known[key]
        if key in self.looking or len(self.looking) > _DEEPEST:
            return ()
        is_first = not self.looking
        self.looking.add(key)
        found = self.values(*what)
        self.looking.discard(key)
        if is_first:  # within a circle it may not be all
            self.known[key] = found
        return found

    def values(self, node: ast.expr, scope: Scope, order: int, block: Block) -> tuple[str, ...]:
        """What an expression may be."""
        if isinstance(node, ast.Name):
            return self.lookup(node.id, scope, order, block)
        if isinstance(node, ast.Attribute):
            return _extend(self.values(node.value, scope, order, block), node.attr)
        if isinstance(node, ast.NamedExpr):
            return self.values(node.value, scope, order, block)
        if isinstance(node, ast.IfExp):
            return (
                *self.values(node.body, scope, order, block),
                *self.values(node.orelse, scope, order, block),
            )
        if isinstance(node, ast.BoolOp):
            return tuple(v for part in node.values for v in self.values(part, scope, order, block))
        if isinstance(node, ast.Call):
            attr = getattr_name(node)
            if attr is not None and not self.lookup("getattr", scope, order, block):
                return _extend(self.values(node.args[0], scope, order, block), attr)
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                callee = self.values(node.func, scope, order, block)
                if "importlib:import_module" in callee and not node.args[0].value.startswith("."):
                    return (f"{node.args[0].value}:",)
        return ("",)


def reaching(bindings: Sequence[Binding], order: int | None, block: Block) -> tuple[list[Binding], bool]:
    """The bindings that a name may have at a place, and whether one of them surely was made.

    Args:
        bindings: Of that name in that scope, in the order in which they are written.
        order: The place; None for the end of the scope.
        block: The suite of the place.
    """
    if not bindings:
        return [], False
    only = bindings[0]
    if len(bindings) == 1 and only.block.parent is None and not only.is_foreign and only.kind != "star":
        return ([only], only.kind != "del") if order is None or only.order <= order else ([], False)
    chain = list(block.chain())
    around = set(map(id, chain))
    loops = [found for found in chain if found.is_loop] if order is not None else []
    kept: list[Binding] = []
    foreign = [binding for binding in bindings if binding.is_foreign]
    is_sure, killer = False, None
    owners: dict[int, int] | None = None
    for binding in bindings:
        if binding.is_foreign or (order is not None and binding.order > order):
            continue
        sure = id(binding.block) in around if order is not None else binding.block.parent is None
        if sure and binding.kind != "star":
            kept, is_sure, killer = [], binding.kind != "del", binding
        elif order is not None and binding.block.parent is not None:
            if owners is None:
                owners = _arms(chain)
            if owners and _excludes(binding.block, owners):
                continue
        kept.append(binding)
    for loop in loops:
        if killer is not None and loop in killer.block.chain():
            break
        for binding in bindings:
            if order is not None and binding.order > order and loop in binding.block.chain():
                kept.append(binding)
    return [*kept, *foreign], is_sure


def _arms(chain: Sequence[Block]) -> dict[int, int]:
    """The arms that a place is in, by the ifs and matches that they belong to."""
    return {id(found.owner): found.arm for found in chain if isinstance(found.owner, ast.If | ast.Match)}


def _excludes(block: Block, arms: Mapping[int, int]) -> bool:
    """Whether the block is another arm of an if or match that the place is in."""
    return any(arms.get(id(found.owner), found.arm) != found.arm for found in block.chain())


def _extend(values: Iterable[str], attr: str) -> tuple[str, ...]:
    return tuple(
        "" if not value else f"{value}{attr}" if value.endswith(":") else f"{value}.{attr}"
        for value in values
    )
