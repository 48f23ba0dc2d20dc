"""The classes of a file, and every place of it that constructs one or hands one on.

What a name stands for is the matter of `shardweave.lint.scopes`; this pass looks at what is done with it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from shardweave.lint.class_rows import ClassRow, Field, Init, Shape, Site
from shardweave.lint.class_syntax import (
    all_of,
    as_written,
    is_false,
    is_true,
    keys_of,
    letter,
    parameters_of,
)
from shardweave.lint.facts import Facts
from shardweave.lint.shapes import fields_of, last_name

__all__ = ["read_classes"]

_NAMES = (ast.Name, ast.Attribute)  # a union would be made anew at each of a million places
_NO_SHAPE = Shape("", {})
_OBSERVERS = frozenset((
    "isinstance", "issubclass", "type", "hasattr", "getattr", "id", "repr", "str", "print",
    "callable", "super", "len", "hash", "vars", "dir", "cast",
))  # fmt: skip
"""Calls that construct nothing of what they are given."""


def read_classes(tree: ast.Module, facts: Facts, *, text: bytes) -> tuple[list[ClassRow], list[Site]]:
    """The classes of a parsed file and the places that use one.

    Args:
        tree: The file.
        facts: What its names are.
        text: Its bytes, for columns in characters.
    """
    reader = _Reader(facts, text)
    for statement in tree.body:
        reader.statement(statement)
    reader.values_of.clear()  # circles of memory, which would stay
    reader.statements_of.clear()
    return reader.classes, reader.sites


class _Reader:
    def __init__(self, facts: Facts, text: bytes) -> None:
        self.lines = None if text.isascii() else text.splitlines()
        self.exports = facts.exports
        self.values = {
            (use.line, use.column, use.end_line, use.end_column): [value for value in use.values if value]
            for use in facts.uses
            if use.form != "import"
        }
        self.names: list[str] = []
        self.holders: list[ClassRow] = []
        """The classes around the place, a function between them or not."""
        self.instances: frozenset[str] = frozenset()
        self.own: frozenset[str] = frozenset()
        """Names that are the class around the place."""
        self.method = ""
        self.varargs = self.kwargs = ""
        self.classes: list[ClassRow] = []
        self.sites: list[Site] = []
        self.values_of: dict[type, Callable[[Any, str], None]] = {
            ast.Constant: self.constant, ast.Name: self.reference, ast.Attribute: self.reference,
            ast.Call: self.call, ast.IfExp: self.choice, ast.BoolOp: self.either, ast.Tuple: self.items,
            ast.List: self.items, ast.Set: self.items, ast.Dict: self.mapping, ast.NamedExpr: self.walrus,
            ast.Lambda: self.lambda_, ast.Yield: self.yielded, ast.YieldFrom: self.yielded,
            ast.ListComp: self.comprehension, ast.SetComp: self.comprehension,
            ast.GeneratorExp: self.comprehension, ast.DictComp: self.dict_comprehension,
            ast.Starred: self.starred, ast.Subscript: self.item,
        }  # fmt: skip
        self.statements_of: dict[type, Callable[[Any], None]] = {
            ast.FunctionDef: self.function, ast.AsyncFunctionDef: self.function, ast.ClassDef: self.class_,
            ast.Assign: self.assign, ast.AnnAssign: self.annassign, ast.Return: self.return_,
            ast.If: self.if_, ast.Import: self.skip, ast.ImportFrom: self.skip, ast.Global: self.skip,
            ast.Nonlocal: self.skip, ast.Pass: self.skip,
        }  # fmt: skip

    # --- what a node is -------------------------------------------------------------------------

    def column(self, line: int, offset: int) -> int:
        if self.lines is None:
            return offset + 1
        return len(self.lines[line - 1][:offset].decode(errors="replace")) + 1

    def place(self, node: Any) -> tuple[int, int, int, int]:
        if self.lines is None:
            return node.lineno, node.col_offset + 1, node.end_lineno, node.end_col_offset + 1
        return (
            node.lineno,
            self.column(node.lineno, node.col_offset),
            node.end_lineno,
            self.column(node.end_lineno, node.end_col_offset),
        )

    def known(self, node: ast.expr) -> list[str]:
        """What a name or a chain of attributes may be; what this file says of imports from outside too."""
        while isinstance(node, ast.Subscript):
            node = node.value
        found = self.values.get(self.place(node))
        if found:
            return found
        attrs: list[str] = []
        while isinstance(node, ast.Attribute):
            attrs.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return []
        heads = self.exports.get(node.id, ())
        joined = [
            ".".join([head, *attrs]).replace(":.", ":") for head in heads if head and not head.startswith("*")
        ]
        return joined or [".".join([node.id, *attrs])]

    def add(self, form: str, node: ast.AST, values: Sequence[str], **more: Any) -> Site:
        given: dict[str, Any] = {"shape": _NO_SHAPE, "text": "", "callee": [], "keyword": "", "params": []}
        given.update(more)
        qualname = ".".join(self.names) or "<module>"
        site = Site(form, *self.place(node), qualname, list(values), **given)
        if form in ("super", "base"):
            if self.holders:
                self.holders[-1].chains.append(site)
        else:
            self.sites.append(site)
        return site

    def shape(self, call: ast.Call, skip: int = 0) -> Shape:
        letters = ""
        for arg in call.args[skip:]:
            if not isinstance(arg, ast.Starred):
                letters += letter(arg)
            elif isinstance(arg.value, ast.Tuple | ast.List):
                for item in arg.value.elts:
                    letters += "*" if isinstance(item, ast.Starred) else letter(item)
            else:
                letters += "a" if isinstance(arg.value, ast.Name) and arg.value.id == self.varargs else "*"
        keywords: dict[str, str] = {}
        for part in call.keywords:
            if part.arg is not None:
                keywords[part.arg] = letter(part.value)
                continue
            known, whole = keys_of(part.value)
            keywords.update(known)
            if not whole:
                is_own = isinstance(part.value, ast.Name) and part.value.id == self.kwargs
                keywords["**"] = "k" if is_own and keywords.get("**") != "*" else "*"
        return Shape(letters, keywords)

    # --- statements -----------------------------------------------------------------------------

    def statement(self, node: ast.AST) -> None:
        handler = self.statements_of.get(type(node))
        if handler is not None:
            handler(node)
        else:
            self.children(node)

    def skip(self, node: ast.stmt) -> None:
        pass

    def assign(self, node: ast.Assign) -> None:
        self.value(node.value, f"assigned to {as_written(node.targets[0])}")
        self.aliases(node.targets, node.value)
        for target in node.targets:
            self.value(target, "")

    def annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.value(node.value, f"assigned to {as_written(node.target)}")

    def return_(self, node: ast.Return) -> None:
        if node.value is not None:
            self.value(node.value, "returned")

    def if_(self, node: ast.If) -> None:
        test, body, orelse = node.test, node.body, node.orelse
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if last_name(test.operand if negated else test) == "TYPE_CHECKING":  # type: ignore[attr-defined]
            body, orelse = (body, []) if negated else ([], orelse)
        self.value(test, "")
        for statement in (*body, *orelse):
            self.statement(statement)

    def children(self, node: ast.AST) -> None:
        for field in fields_of(node):
            value = getattr(node, field, None)
            for part in value if type(value) is list else (value,):
                if isinstance(part, ast.expr):
                    self.value(part, "")
                elif isinstance(part, ast.AST):
                    self.statement(part)

    def aliases(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        """Follow ``me = self`` and ``kind = type(self)``."""
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if not names or not self.holders:
            return
        if isinstance(value, ast.Name) and value.id in self.instances:
            self.instances |= names
        elif self.is_own_class(value):
            self.own |= names
        else:
            self.instances -= names
            self.own -= names

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call):
                self.value(decorator, "")
            elif isinstance(decorator, _NAMES):
                self.used(decorator, "call", decorator, shape=Shape("v", {}))
        self.defaults(node.args)
        before = self.instances, self.own, self.method, self.varargs, self.kwargs
        every = {arg.arg for arg in all_of(node.args)}
        self.instances, self.own = self.instances - every, self.own - every
        if self.holders and self.names and self.names[-1] == self.holders[-1].qualname.rpartition(".")[2]:
            self.method = node.name
            row = self.holders[-1]
            words = {last_name(decorator) for decorator in node.decorator_list}
            first = (*node.args.posonlyargs, *node.args.args)[:1]
            if "staticmethod" not in words or node.name == "__new__":
                names = frozenset(arg.arg for arg in first)
                if "classmethod" in words or node.name in (
                    "__new__",
                    "__init_subclass__",
                    "__class_getitem__",
                ):
                    self.instances, self.own = self.instances - names, names
                else:
                    self.instances, self.own = names, self.own - names
            row.methods.append(node.name)
            if node.name in ("__init__", "__new__"):
                init = Init(node.lineno, parameters_of(node.args)[1:] if first else parameters_of(node.args))
                self.holders[-1] = (
                    row._replace(init=init) if node.name == "__init__" else row._replace(new=init)
                )
            self.varargs = node.args.vararg.arg if node.args.vararg else ""
            self.kwargs = node.args.kwarg.arg if node.args.kwarg else ""
        self.names.append(node.name)
        for statement in node.body:
            self.statement(statement)
        self.names.pop()
        self.instances, self.own, self.method, self.varargs, self.kwargs = before

    def defaults(self, args: ast.arguments) -> None:
        plain = [*args.posonlyargs, *args.args]
        for arg, value in (
            *zip(plain[len(plain) - len(args.defaults) :], args.defaults, strict=True),
            *zip(args.kwonlyargs, args.kw_defaults, strict=True),
        ):
            if value is not None:
                self.value(value, f"the default of {arg.arg}")

    def class_(self, node: ast.ClassDef) -> None:
        options: dict[str, bool] | None = None
        for decorator in node.decorator_list:
            inner = decorator.func if isinstance(decorator, ast.Call) else decorator
            if _is(self.known(inner), inner, "dataclasses:dataclass"):
                options = {}
                for part in decorator.keywords if isinstance(decorator, ast.Call) else ():
                    if part.arg and isinstance(part.value, ast.Constant):
                        options[part.arg] = bool(part.value.value)
            else:
                self.value(decorator, "")
        bases = [self.known(base) for base in node.bases if not isinstance(base, ast.Starred)]
        for part in node.keywords:
            self.value(part.value, "")
        for base in node.bases:
            if isinstance(base, ast.Call):
                self.value(base, "")
        outer = self.instances, self.own, self.method, self.varargs, self.kwargs
        self.names.append(node.name)
        qualname = ".".join(self.names)
        row = ClassRow(qualname, node.lineno, bases, options, self.fields(node), None, None, [], [])
        self.holders.append(row)
        self.method = self.varargs = self.kwargs = ""
        for statement in node.body:
            self.statement(statement)
        self.classes.append(self.holders.pop())
        self.names.pop()
        self.instances, self.own, self.method, self.varargs, self.kwargs = outer

    def fields(self, node: ast.ClassDef) -> list[Field]:
        found = []
        for part in node.body:
            if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
                continue
            said = ast.unparse(part.annotation)
            if "ClassVar" in said:
                continue
            default, is_init, is_keyword = "", True, False
            if part.value is not None:
                default = letter(part.value)
                if isinstance(part.value, ast.Call) and last_name(part.value.func) == "field":
                    said_of = {word.arg: word.value for word in part.value.keywords if word.arg}
                    default = "v" if {"default", "default_factory"} & set(said_of) else ""
                    if "default" in said_of:
                        default = letter(said_of["default"])
                    is_init = not is_false(said_of.get("init"))
                    is_keyword = is_true(said_of.get("kw_only"))
            marker = said.rpartition(".")[2] == "KW_ONLY"
            found.append(Field(part.target.id, default, is_init, is_keyword, marker))
        return found

    # --- expressions ----------------------------------------------------------------------------

    def value(self, node: ast.AST, role: str) -> None:
        """Visit an expression whose value goes somewhere; the role says where, empty for nowhere."""
        handler = self.values_of.get(type(node))
        if handler is not None:
            handler(node, role)
        else:
            self.children(node)

    def constant(self, node: ast.Constant, role: str) -> None:
        pass

    def choice(self, node: ast.IfExp, role: str) -> None:
        self.value(node.test, "")
        self.value(node.body, role)
        self.value(node.orelse, role)

    def either(self, node: ast.BoolOp, role: str) -> None:
        for part in node.values:
            self.value(part, role)

    def items(self, node: ast.Tuple | ast.List | ast.Set, role: str) -> None:
        if role and not (role.startswith("assigned") and type(node) is ast.Tuple):
            role = f"{role}, in a list"
        for part in node.elts:
            self.value(part, role)

    def mapping(self, node: ast.Dict, role: str) -> None:
        for part in (*node.keys, *node.values):
            if part is not None:
                self.value(part, "put in a dict")

    def walrus(self, node: ast.NamedExpr, role: str) -> None:
        self.value(node.value, f"assigned to {node.target.id}")

    def lambda_(self, node: ast.Lambda, role: str) -> None:
        self.defaults(node.args)
        self.value(node.body, "returned")

    def yielded(self, node: ast.Yield | ast.YieldFrom, role: str) -> None:
        if node.value is not None:
            self.value(node.value, "yielded")

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, role: str) -> None:
        self.value(node.elt, "put in a list")
        self.generators(node.generators)

    def dict_comprehension(self, node: ast.DictComp, role: str) -> None:
        self.value(node.key, "put in a dict")
        self.value(node.value, "put in a dict")
        self.generators(node.generators)

    def starred(self, node: ast.Starred, role: str) -> None:
        self.value(node.value, role)

    def item(self, node: ast.Subscript, role: str) -> None:
        self.value(node.value, "")
        self.value(node.slice, "")

    def generators(self, parts: Sequence[ast.comprehension]) -> None:
        for part in parts:
            self.value(part.iter, "looped over")
            for test in part.ifs:
                self.value(test, "")

    def reference(self, node: ast.Name | ast.Attribute, role: str) -> None:
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        if not isinstance(inner, ast.Name):
            self.value(inner, "")
        elif role and not (inner is node and inner.id in self.instances):
            self.used(node, "escape", node, text=role)

    def used(self, node: ast.expr, form: str, whole: ast.AST, **more: Any) -> None:
        values = self.values.get(self.place(node))
        if values:
            self.add(form, whole, values, **more)

    def is_own_class(self, node: ast.expr) -> bool:
        """``type(self)``, ``self.__class__`` and, in a class method, ``cls``."""
        if isinstance(node, ast.Name):
            return node.id in self.own
        if isinstance(node, ast.Attribute):
            return (
                node.attr == "__class__"
                and isinstance(node.value, ast.Name)
                and node.value.id in self.instances
            )
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "type"
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id in self.instances
        )

    def call(self, node: ast.Call, role: str) -> None:
        func = node.func
        plain: ast.expr = func
        while isinstance(plain, ast.Subscript):
            plain = plain.value
        passed = list(node.args)
        if self.holders and self.is_own_class(func):
            self.add("cls", node, [self.holders[-1].qualname], shape=self.shape(node), text=self.method)
        elif isinstance(func, ast.Attribute) and func.attr == "__init__":
            self.chain(node, func)
        elif isinstance(func, ast.Name) and func.id in self.instances:
            pass
        elif _is(self.known(func), func, "functools:partial", "functools:partialmethod") and node.args:
            first = passed.pop(0)
            if isinstance(first, _NAMES) and self.values.get(self.place(first)):
                self.used(first, "partial", node, shape=self.shape(node, 1))
            else:
                self.value(first, f"passed to {last_name(func)}")
        elif isinstance(plain, _NAMES):
            self.used(plain, "call", node, shape=self.shape(node))
            if isinstance(plain, ast.Attribute):
                self.reference(plain, "")
        else:
            if isinstance(func, ast.Call):
                # getattr(module, "Name")(...)
                self.used(func, "call", node, shape=self.shape(node))
            self.value(func, "")
        said = as_written(func)
        observes = said.rpartition(".")[2] in _OBSERVERS
        skip = len(node.args) - len(passed)
        params = [key for part in node.keywords if part.arg == "params" for key in keys_of(part.value)[0]]
        callee = [] if observes else self.values.get(self.place(func), []) if hasattr(func, "lineno") else []
        for index, arg in enumerate(passed, skip):
            self.argument(arg, str(index), said, observes, callee, params)
        for part in node.keywords:
            self.argument(part.value, part.arg or "**", said, observes, callee, params)

    def argument(
        self, arg: ast.expr, where: str, said: str, observes: bool, callee: list[str], params: list[str]
    ) -> None:
        if observes:
            self.value(arg, "")
            return
        if isinstance(arg, ast.IfExp):
            self.value(arg.test, "")
            for part in (arg.body, arg.orelse):
                self.argument(part, where, said, observes, callee, params)
        elif isinstance(arg, _NAMES):
            inner: ast.expr = arg
            while isinstance(inner, ast.Attribute):
                inner = inner.value
            if not isinstance(inner, ast.Name):
                self.value(inner, "")
            elif not (inner is arg and inner.id in self.instances):
                self.used(arg, "arg", arg, text=said, callee=callee, keyword=where, params=params)
        else:
            self.value(arg, f"passed to {said}")

    def chain(self, node: ast.Call, func: ast.Attribute) -> None:
        owner = func.value
        if isinstance(owner, ast.Call) and last_name(owner.func) == "super":
            self.add("super", node, [], shape=self.shape(node), text=self.method)
        elif isinstance(owner, _NAMES):
            values = [value.removesuffix(".__init__") for value in self.values.get(self.place(func), [])]
            if values and node.args:
                self.add("base", node, values, shape=self.shape(node, 1), text=self.method)
        else:
            self.value(owner, "")


def _is(values: Sequence[str], node: ast.AST, *wanted: str) -> bool:
    """Whether a callee is one of some functions of the standard library.

    Imports in a function say nothing here of what comes from outside; then the last name decides.
    """
    if any(":" in value for value in values):
        return any(value in wanted or value.replace(":", ".") in wanted for value in values)
    return last_name(node) in {name.partition(":")[2] for name in wanted}
