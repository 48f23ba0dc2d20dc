"""One pass over a file, by Python's own rules of scopes: what is bound where, and what is used."""

# Methods are named after the nodes that they visit.
# ruff: noqa: D102

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from shardweave.lint.expressions import Expressions
from shardweave.lint.reach import Block
from shardweave.lint.shapes import (
    asks_for_name,
    class_of,
    is_message,
    last_name,
    names_in,
    tells_none,
    type_checking,
)
from shardweave.lint.walk import Pending

__all__ = ["Pending", "Reader"]


class Reader(Expressions):
    """The pass: statements, and the scopes that they open."""

    def __init__(self, package: str, module: str, text: bytes) -> None:
        super().__init__(package, module, text)
        self.handlers |= {
            ast.Name: self.name, ast.Attribute: self.attribute, ast.Call: self.call, ast.Constant: self.skip,
            ast.Lambda: self.lambda_, ast.IfExp: self.ifexp, ast.BoolOp: self.boolop,
            ast.NamedExpr: self.walrus,
            ast.ListComp: self.comprehension, ast.SetComp: self.comprehension,
            ast.GeneratorExp: self.comprehension, ast.DictComp: self.comprehension,
            ast.FunctionDef: self.function, ast.AsyncFunctionDef: self.function, ast.ClassDef: self.class_,
            ast.Import: self.import_, ast.ImportFrom: self.import_from, ast.If: self.if_,
            ast.For: self.for_, ast.AsyncFor: self.for_, ast.While: self.while_, ast.Try: self.try_,
            ast.With: self.with_, ast.AsyncWith: self.with_, ast.Assign: self.assign,
            ast.AnnAssign: self.annassign, ast.AugAssign: self.augassign, ast.Delete: self.delete,
            ast.Global: self.skip, ast.Nonlocal: self.skip, ast.Return: self.return_, ast.Match: self.match,
            ast.Pass: self.skip, ast.Break: self.skip, ast.Continue: self.skip,
        }  # fmt: skip
        for kind, handler in (("TryStar", self.try_), ("TypeAlias", self.type_alias)):
            if hasattr(ast, kind):
                self.handlers[getattr(ast, kind)] = handler

    def forget(self) -> None:
        """Undo the circles among scopes and what is bound in them, so that memory is freed at once."""
        self.handlers.clear()
        for scope in self.every:
            scope.bindings.clear()

    def run(self, tree: ast.Module) -> None:
        self.suite(tree.body)
        while self.deferred:
            scope, body, block, args, function = self.deferred.pop(0)
            self.scope, self.block = scope, block
            self.fallback = self.guarded = self.logged = False
            self.parameters(args, function)
            if isinstance(body, list):
                self.declare(body)
                self.suite(body)
            else:
                scope.returns.append((body, self.order, block))
                self.visit(body)

    # --- scopes ------------------------------------------------------------------------------------

    def function(self, node: Any) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        self.defaults(node.args)
        parent = self.holder()
        qualname = self.define(node.name, parent)
        scope = self.made("function", self.scope, qualname)
        scope.line = node.lineno
        words = {last_name(decorator) for decorator in node.decorator_list}
        scope.is_property = bool(words & {"property", "cached_property"})
        scope.elsewhere = {}
        self.functions[qualname] = scope
        self.bind(node.name, "value", self.own(qualname))
        method = None
        if self.scope.kind == "class" and "staticmethod" not in words:
            method = self.own(self.scope.qualname)
        self.deferred.append((scope, node.body, Block(None, node, 0), node.args, method))

    def parameters(self, args: ast.arguments, method: str | None) -> None:
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        every += [arg for arg in (args.vararg, args.kwarg) if arg is not None]
        for index, arg in enumerate(every):
            if index == 0 and method is not None and (args.posonlyargs or args.args):
                self.bind(arg.arg, "value", method)
            elif arg.annotation is not None:
                self.bind(arg.arg, "type", arg.annotation)
            else:
                self.bind(arg.arg, "other")

    def class_(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        qualname = self.define(node.name, self.holder())
        outer, block = self.scope, self.block
        scope = self.made("class", outer, qualname)
        self.scope, self.block = scope, Block(None, node, 0)
        self.scopes[qualname] = scope
        self.declare(node.body)
        self.suite(node.body)
        self.scope, self.block = outer, block
        self.classes[qualname] = class_of(node)
        self.bind(node.name, "value", self.own(qualname))

    # --- statements --------------------------------------------------------------------------------

    def import_(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.asname:
                self.bind(alias.asname, "value", f"{alias.name}:")
            else:
                self.bind(alias.name.partition(".")[0], "value", f"{alias.name.partition('.')[0]}:")

    def import_from(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self.package.split(".") if self.package else []
            if node.level - 1 > len(parts):
                base = f"?.{base}"
            else:
                kept = parts[: len(parts) - node.level + 1]
                base = ".".join([*kept, *([base] if base else [])])
        for alias in node.names:
            if alias.name == "*":
                if self.scope is self.top:
                    self.bind("*", "star", base)
                continue
            value = f"{base}:{alias.name}"
            self.bind(alias.asname or alias.name, "value", value)
            self.order += 1
            here: Any = alias
            pending = Pending(
                here,
                "import",
                None,
                self.scope,
                self.order,
                self.block,
                self.fallback,
                self.guarded,
                "",
                False,
            )
            self.imported.append((pending, value))

    def if_(self, node: ast.If) -> None:
        checking = type_checking(node.test)
        start = len(self.pending)
        if checking is None:
            self.visit(node.test)
        end = len(self.pending)
        fell, guarded, logged = self.fallback, self.guarded, self.logged
        tells = tells_none(node.test)
        for arm, body in enumerate((node.body, node.orelse)):
            if checking is (arm == 0):
                continue
            self.fallback = fell or tells is (arm == 0)
            self.guarded = guarded or (arm == 0 and asks_for_name(node.test))
            self.arm(body, node, arm)
        self.fallback, self.guarded, self.logged = fell, guarded, logged
        if all(is_message(statement) for statement in (*node.body, *node.orelse)):
            for index in range(start, end):
                self.pending[index] = self.pending[index]._replace(logged=True)

    def for_(self, node: Any) -> None:
        self.visit(node.iter)
        outer = self.block
        self.block = Block(outer, node, 0, True)
        self.target(node.target)
        self.suite(node.body)
        self.block = outer
        self.arm(node.orelse, node, 1)

    def while_(self, node: ast.While) -> None:
        outer = self.block
        self.block = Block(outer, node, 0, True)
        self.visit(node.test)
        self.suite(node.body)
        self.block = outer
        self.arm(node.orelse, node, 1)

    def try_(self, node: Any) -> None:
        guarded = self.guarded
        names = {name for handler in node.handlers for name in names_in(handler.type)}
        bare = any(handler.type is None for handler in node.handlers)
        self.guarded = (
            guarded
            or bare
            or bool(
                names & {"AttributeError", "ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
            )
        )
        self.arm(node.body, node, 0)
        self.guarded = guarded
        for index, handler in enumerate(node.handlers):
            if handler.type is not None:
                self.visit(handler.type)
            outer = self.block
            self.block = Block(outer, node, index + 1)
            if handler.name:
                self.bind(handler.name, "other")
            self.suite(handler.body)
            if handler.name:
                self.bind(handler.name, "del")
            self.block = outer
        self.arm(node.orelse, node, -1)
        self.suite(node.finalbody)

    def with_(self, node: Any) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.target(item.optional_vars)
        self.suite(node.body)

    def match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        for arm, case in enumerate(node.cases):
            outer = self.block
            self.block = Block(outer, node, arm)
            self.pattern(case.pattern)
            if case.guard is not None:
                self.visit(case.guard)
            self.suite(case.body)
            self.block = outer

    def pattern(self, node: ast.AST) -> None:
        for part in ast.walk(node):
            name = getattr(part, "rest", None) if isinstance(part, ast.MatchMapping) else None
            if isinstance(part, ast.MatchAs | ast.MatchStar):
                name = part.name
            if name:
                self.bind(name, "other")
            if isinstance(part, ast.MatchValue):
                self.visit(part.value)
            elif isinstance(part, ast.MatchClass):
                self.visit(part.cls)

    def assign(self, node: ast.Assign) -> None:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        value = node.value
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for item in value.elts:
                self.value(item, ("_",) if not isinstance(item, ast.Lambda) else ())
        else:
            own = isinstance(target, ast.Attribute) and self.method_of(target.value) is not None
            self.value(value, names or (["self", "self"] if own else []))
        for target in node.targets:
            self.target(target, value)
        self.take_public(names, value, False)

    def annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.value(node.value, (node.target.id,) if isinstance(node.target, ast.Name) else ())
            self.target(node.target, node.value)
            if isinstance(node.target, ast.Name):
                self.take_public([node.target.id], node.value, False)
        elif isinstance(node.target, ast.Name):
            # It makes the name local, and gives it nothing.
            self.scope.bindings.setdefault(node.target.id, [])
        else:
            self.visit(node.target)

    def augassign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self.note(node.target, "ref")
            self.take_public([node.target.id], node.value, True)
        self.target(node.target)

    def take_public(self, names: Sequence[str], value: ast.expr, adds: bool) -> None:
        if self.scope is not self.top or "__all__" not in names:
            return
        if isinstance(value, ast.List | ast.Tuple) and all(
            isinstance(item, ast.Constant) for item in value.elts
        ):
            found = [str(item.value) for item in value.elts if isinstance(item, ast.Constant)]
            self.public = [*(self.public or []), *found] if adds else found
        else:
            self.is_public_known = False

    def delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(part, ast.Name):
                    self.bind(part.id, "del")
                else:
                    self.children(part)

    def return_(self, node: ast.Return) -> None:
        if node.value is not None:
            self.holder().returns.append((node.value, self.order, self.block))
            self.visit(node.value)

    def type_alias(self, node: Any) -> None:
        self.bind(node.name.id, "other")
