"""The expressions of a file: which names they use, and under which conditions."""

# Methods are named after the nodes that they visit.
# ruff: noqa: D102

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from shardweave.lint.reach import Block
from shardweave.lint.shapes import LOG, asks_for_name, getattr_name, last_name, tells_none
from shardweave.lint.walk import Walk

__all__ = ["Expressions"]

# A union would be made anew at each of a million places.
_NAMES = (ast.Name, ast.Attribute)
_CHOICES = (ast.IfExp, ast.BoolOp)


class Expressions(Walk):
    """The part of the walk that visits expressions."""

    def value(self, node: ast.expr, names: Sequence[str] = ()) -> None:
        """Visit what is assigned: a plain name of a thing is another name of it, not a use."""
        if names and isinstance(node, _NAMES):
            self.note(node, "alias")
        elif len(names) == 1 and isinstance(node, ast.Lambda):
            self.lambda_(node, names[0])
        elif names and getattr_name(node) is not None and isinstance(node, ast.Call):
            for arg in node.args:
                if not isinstance(arg, _NAMES):
                    self.visit(arg)
            self.note(node, "alias")
        elif names and isinstance(node, _CHOICES):
            self.choice(node, names)
        else:
            self.visit(node)

    def name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.note(node, "ref")

    def attribute(self, node: ast.Attribute) -> None:
        inner: ast.expr = node
        chain = node.attr
        while isinstance(inner, ast.Attribute):
            chain, inner = inner.attr, inner.value
        if isinstance(inner, ast.Name):
            self.note(node, "ref")
        elif isinstance(inner, ast.Call):
            self.call(inner, chain)
        else:
            self.visit(inner)

    def call(self, node: ast.Call, chain: str = "") -> None:
        func = node.func
        if isinstance(func, ast.Name) and func.id in ("getattr", "hasattr") and len(node.args) >= 2:
            self.by_name(node, func.id)
            return
        inner = func
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        if isinstance(inner, ast.Name):
            self.note(func, "call", node, chain)
        elif isinstance(func, ast.NamedExpr):
            self.walrus(func)
            self.note(func, "call", node, chain)
        elif isinstance(func, ast.Call) and getattr_name(func) is not None:
            self.by_name(func, "getattr", called=node, chain=chain)
        else:
            self.visit(func)
        before = self.logged
        self.logged = before or last_name(func) in LOG
        for part in (*node.args, *node.keywords):
            self.visit(part)
        self.logged = before

    def by_name(self, node: ast.Call, word: str, called: ast.Call | None = None, chain: str = "") -> None:
        subject, attr, *rest = node.args
        if not isinstance(subject, _NAMES):
            self.visit(subject)
        for part in (*rest, *(called.args if called else ()), *(called.keywords if called else ())):
            self.visit(part)
        if isinstance(attr, ast.Constant) and isinstance(attr.value, str):
            if word == "hasattr":
                self.owners.append(("has", subject, attr.value, node, self.scope, self.order, self.block))
            else:
                before, self.guarded = self.guarded, self.guarded or bool(rest)
                self.note(node, "call" if called else "ref", called, chain)
                self.guarded = before
        else:
            self.visit(attr)
            if word == "getattr":
                self.note(node, "dynamic")

    def ifexp(self, node: ast.IfExp) -> None:
        self.choice(node, ())

    def boolop(self, node: ast.BoolOp) -> None:
        self.choice(node, ())

    def choice(self, node: ast.IfExp | ast.BoolOp, names: Sequence[str]) -> None:
        fell, guarded, block = self.fallback, self.guarded, self.block
        if isinstance(node, ast.IfExp):
            tells = tells_none(node.test)
            self.visit(node.test)
            for arm, part in enumerate((node.body, node.orelse)):
                self.fallback = fell or tells is (arm == 0)
                self.guarded = guarded or (arm == 0 and asks_for_name(node.test))
                self.block = Block(block, node, arm)
                self.value(part, names and ("_", "_"))
        else:
            is_or = isinstance(node.op, ast.Or)
            for index, part in enumerate(node.values):
                if index:
                    self.block = Block(block, node, 0)
                    first = node.values[index - 1]
                    tells = tells_none(first)
                    if is_or:
                        # "x or f()" falls back; "x is not None or f()" too.
                        self.fallback = self.fallback or (
                            tells is False or (tells is None and not isinstance(first, ast.Compare))
                        )
                    else:
                        self.fallback = self.fallback or tells is True
                        self.guarded = self.guarded or asks_for_name(first)
                self.value(part, names and ("_", "_"))
        self.fallback, self.guarded, self.block = fell, guarded, block

    # --- scopes of their own -----------------------------------------------------------------------

    def lambda_(self, node: ast.Lambda, name: str = "") -> None:
        self.defaults(node.args)
        qualname = self.define(name, self.holder()) if name else self.scope.qualname
        scope = self.made("function", self.scope, qualname)
        scope.line = node.lineno
        if name:
            self.functions[qualname] = scope
        self.deferred.append((scope, node.body, Block(None, node, 0), node.args, None))

    def defaults(self, args: ast.arguments) -> None:
        for value in (*args.defaults, *args.kw_defaults):
            if value is not None:
                self.visit(value)

    def comprehension(self, node: Any) -> None:
        first = node.generators[0]
        self.visit(first.iter)
        outer = self.scope
        self.scope = self.made("comprehension", outer, outer.qualname)
        # Targets are bound before anything of it runs: they hide outer names in all of it.
        for index, part in enumerate(node.generators):
            if index:
                self.visit(part.iter)
            self.target(part.target)
            for test in part.ifs:
                self.visit(test)
        for field in ("key", "value", "elt"):
            inner = getattr(node, field, None)
            if inner is not None:
                self.visit(inner)
        self.scope = outer

    def walrus(self, node: ast.NamedExpr) -> None:
        self.value(node.value, names=(node.target.id,))
        scope = self.scope
        while scope.kind == "comprehension" and scope.parent is not None:
            scope = scope.parent
        inner, self.scope = self.scope, scope
        self.bind_expr(node.target.id, node.value)
        self.scope = inner
