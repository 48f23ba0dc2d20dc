"""One pass over a file, by Python's own rules of scopes: what is bound where, and what is used."""

# Methods are named after the nodes that they visit.
# ruff: noqa: D102

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardweave.lint.facts import Class
from shardweave.lint.reach import Binding, Block, Scope, may_carry
from shardweave.lint.shapes import (
    LOG,
    asks_for_name,
    class_of,
    fields_of,
    getattr_name,
    is_message,
    last_name,
    names_in,
    same_scope,
    tells_none,
    type_checking,
)

__all__ = ["Pending", "Reader"]

# A union would be made anew at each of a million places.
_NAMES = (ast.Name, ast.Attribute)
_ROWS = (ast.Tuple, ast.List)
_CHOICES = (ast.IfExp, ast.BoolOp)
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


class Reader:
    """The pass. State that nests is kept in attributes and put back."""

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
        self.handlers: dict[type, Any] = {
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

    # --- the walk ----------------------------------------------------------------------------------

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

    def under(self, node: ast.AST, *, fallback: bool) -> None:
        before, self.fallback = self.fallback, self.fallback or fallback
        self.visit(node)
        self.fallback = before

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

    # --- expressions -------------------------------------------------------------------------------

    def note(self, node: ast.expr, form: str, call: ast.Call | None = None, chain: str = "") -> None:
        self.order += 1
        self.pending.append(
            Pending(node, form, call, self.scope, self.order, self.block, self.fallback, self.guarded,
                     chain, self.logged)
        )  # fmt: skip

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
