"""The walk over a file: where it is, what is bound there, and what is noted for later."""

# Methods are named after the nodes that they visit.
# ruff: noqa: D102

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardweave.lint.facts import Class
from shardweave.lint.reach import Binding, Block, Scope, may_carry
from shardweave.lint.shapes import fields_of, same_scope, tells_none

__all__ = ["Pending", "Walk"]

_ROWS = (ast.Tuple, ast.List)
_ELSEWHERE = re.compile(rb"(?:^|[:;])[\s\\]*(?:global|nonlocal)\b", re.MULTILINE)


class Pending(NamedTuple):
    """A use whose name is looked up when all bindings are known."""

    node: ast.expr
    form: str
    call: ast.Call | None
    scope: Scope
    order: int
    block: Block
    fallback: bool
    guarded: bool
    chain: str
    logged: bool


class Walk:
    """State that nests is kept in attributes and put back. What is done with a node is said by `handlers`."""

    def __init__(self, package: str, module: str, text: bytes) -> None:
        self.package, self.module = package, module
        self.lines = None if text.isascii() else text.splitlines()
        self.order = 0
        self.block = Block(None, None, 0)
        self.scope = self.top = Scope("module", None, "", self.block)
        self.every = [self.top]
        self.has_elsewhere = _ELSEWHERE.search(text) is not None
        self.functions: dict[str, Scope] = {}
        self.classes: dict[str, Class] = {}
        self.attributes: dict[str, list[Binding]] = {}
        self.scopes: dict[str, Scope] = {}
        self.pending: list[Pending] = []
        self.imported: list[tuple[Pending, str]] = []
        self.owners: list[tuple[str, ast.expr, str, ast.expr, Scope, int, Block]] = []
        self.public: list[str] | None = None
        self.is_public_known = True
        self.fallback = self.guarded = self.logged = False
        self.deferred: list[tuple[Any, ...]] = []
        self.handlers: dict[type, Any] = {}

    def visit(self, node: ast.AST) -> None:
        handler = self.handlers.get(type(node))
        if handler is not None:
            handler(node)
        else:
            self.children(node)

    def children(self, node: ast.AST) -> None:
        for field in fields_of(node):
            value = getattr(node, field, None)
            for item in value if type(value) is list else (value,):
                if isinstance(item, ast.AST):
                    self.visit(item)

    def skip(self, node: ast.AST) -> None:
        pass

    def suite(self, body: Sequence[ast.stmt]) -> None:
        before = self.fallback
        for statement in body:
            self.visit(statement)
            # What follows "if x is not None: return" runs where x is None.
            if (
                isinstance(statement, ast.If)
                and not statement.orelse
                and isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
                and tells_none(statement.test) is False
            ):
                self.fallback = True
        self.fallback = before

    def arm(self, body: Sequence[ast.stmt], owner: ast.AST, arm: int, *, is_loop: bool = False) -> None:
        before = self.block
        self.block = Block(before, owner, arm, is_loop)
        self.suite(body)
        self.block = before

    def note(self, node: ast.expr, form: str, call: ast.Call | None = None, chain: str = "") -> None:
        self.order += 1
        self.pending.append(
            Pending(node, form, call, self.scope, self.order, self.block, self.fallback, self.guarded,
                     chain, self.logged)
        )  # fmt: skip

    # --- bindings ----------------------------------------------------------------------------------

    def bind(self, name: str, kind: str, what: Any = None, *, scope: Scope | None = None) -> None:
        scope = scope or self.scope
        foreign = False
        where = scope.elsewhere.get(name)
        if where == "global":
            scope, foreign = self.top, scope is not self.top
        elif where == "nonlocal":
            found: Scope | None = scope.parent
            while found is not None and not (found.kind == "function" and name in found.bindings):
                found = found.parent
            scope, foreign = found or self.top, True
        self.order += 1
        scope.bindings.setdefault(name, []).append(Binding(self.order, self.block, kind, what, foreign))

    def bind_expr(self, name: str, value: ast.expr) -> None:
        if isinstance(value, ast.Lambda):
            self.bind(name, "value", self.own(self.define(name, self.holder())))
        elif may_carry(value):
            self.bind(name, "expr", (value, self.scope, self.order, self.block))
        else:
            self.bind(name, "other", value)

    def target(self, node: ast.expr, value: ast.expr | None = None) -> None:
        if isinstance(node, ast.Name):
            if value is None:
                self.bind(node.id, "other")
            else:
                self.bind_expr(node.id, value)
        elif isinstance(node, _ROWS):
            values: list[ast.expr | None] = [None] * len(node.elts)
            if (
                isinstance(value, _ROWS)
                and len(value.elts) == len(node.elts)
                and not any(isinstance(item, ast.Starred) for item in (*value.elts, *node.elts))
            ):
                values = list(value.elts)
            for item, part in zip(node.elts, values, strict=True):
                self.target(item, part)
        elif isinstance(node, ast.Starred):
            self.target(node.value)
        elif isinstance(node, ast.Attribute):
            self.visit(node.value)
            self.owners.append(("set", node.value, node.attr, node, self.scope, self.order, self.block))
            holder = self.method_of(node.value)
            if holder is not None:
                kind, what = ("other", None)
                if value is not None and may_carry(value):
                    kind, what = "expr", (value, self.scope, self.order, self.block)
                key = f"{holder}.{node.attr}"
                self.attributes.setdefault(key, []).append(Binding(self.order, self.block, kind, what, True))
        else:
            self.children(node)

    def method_of(self, node: ast.expr) -> str | None:
        """The class whose ``self`` the name is."""
        scope: Scope | None = self.scope
        if not isinstance(node, ast.Name):
            return None
        while scope is not None and node.id not in scope.bindings:
            scope = scope.parent
        if scope is None or scope.kind != "function" or scope.parent is None or scope.parent.kind != "class":
            return None
        first = scope.bindings[node.id][0]
        return scope.parent.qualname if first.kind == "value" else None

    def own(self, qualname: str) -> str:
        return f"{self.module}:{qualname}"

    def holder(self) -> Scope:
        scope = self.scope
        while scope.kind in ("comprehension", "lambda") and scope.parent is not None:
            scope = scope.parent
        return scope

    def define(self, name: str, parent: Scope) -> str:
        return f"{parent.qualname}.{name}" if parent.qualname else name

    def made(self, kind: str, parent: Scope, qualname: str) -> Scope:
        scope = Scope(kind, parent, qualname, self.block)
        self.every.append(scope)
        return scope

    def declare(self, body: Sequence[ast.stmt]) -> None:
        """Take up the global and nonlocal statements of a scope, which hold for all of it."""
        for statement in body if self.has_elsewhere else ():
            for node in same_scope(statement):
                if isinstance(node, ast.Global | ast.Nonlocal):
                    word = "global" if isinstance(node, ast.Global) else "nonlocal"
                    for name in node.names:
                        self.scope.elsewhere[name] = word
