"""The facts of a file: what its names are, once all of it was walked over."""

from __future__ import annotations

import ast
import sys

from shardweave.lint.facts import Facts, Function, Member, Use
from shardweave.lint.reach import Block, Names, Scope, reaching
from shardweave.lint.scopes import Pending, Reader
from shardweave.lint.shapes import annotated, is_none, last_name

__all__ = ["read_facts"]

_STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"}
_OF_GROUP = frozenset(
    ("get_rank", "get_world_size", "get_global_rank", "get_process_group_ranks", "size", "rank")
)
"""Functions of a group that give what the group is."""


def read_facts(tree: ast.Module, *, package: str, module: str, text: bytes) -> Facts:
    """The facts of a parsed file.

    Args:
        tree: The file.
        package: Dotted name of the package that relative imports of the file begin at.
        module: Dotted name of the module itself.
        text: The file's bytes, in UTF-8, for columns in characters.
    """
    reader = Reader(package, module, text)
    reader.run(tree)
    facts = _Harvest(reader).facts()
    reader.forget()
    return facts


class _Harvest:
    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.top = reader.top
        self.names = Names(reader.top)
        self.index: dict[int, int] = {}

    def facts(self) -> Facts:
        uses = [self.use(pending, (value,)) for pending, value in self.reader.imported]
        # A name that is nothing but the results of calls, loops and parameters leads to no module.
        names = {
            name
            for scope in self.reader.every
            for name, bindings in scope.bindings.items()
            if any(binding.kind in ("value", "expr", "star") for binding in bindings)
        }
        has_stars = "*" in self.top.bindings
        for pending in self.reader.pending:
            head: ast.expr = pending.node
            while isinstance(head, ast.Attribute):
                head = head.value
            if isinstance(head, ast.Name) and head.id not in names and not has_stars:
                continue
            node = pending.node
            if pending.form == "dynamic" and isinstance(node, ast.Call):
                values = self.names.values(node.args[0], pending.scope, pending.order, pending.block)
            else:
                values = self.names.values(node, pending.scope, pending.order, pending.block)
            values = tuple(value for value in values if value and _is_of_interest(value))
            if values:
                self.index[id(pending.call or node)] = len(uses)
                uses.append(self.use(pending, values))
        return Facts(
            self.exports(), [b.what for b in self.top.bindings.get("*", ())],
            self.reader.public if self.reader.is_public_known else None, "__getattr__" in self.top.bindings,
            uses, self.members(), self.flows(), self.reader.classes,
        )  # fmt: skip

    def use(self, pending: Pending, values: tuple[str, ...]) -> Use:
        node, call = pending.node, pending.call
        positional, nones, keywords = 0, [], []
        if call is not None:
            positional = len(call.args)
            if any(isinstance(arg, ast.Starred) for arg in call.args):
                positional = -1
            nones = [str(index) for index, arg in enumerate(call.args) if is_none(arg)]
            for keyword in call.keywords:
                keywords.append(keyword.arg or "**")
                if keyword.arg and is_none(keyword.value):
                    nones.append(keyword.arg)
        qualname = pending.scope.qualname or "<module>"
        return Use(
            values, pending.form, node.lineno, self.column(node.lineno, node.col_offset),
            node.end_lineno or node.lineno, self.column(node.end_lineno or 0, node.end_col_offset or 0),
            qualname, pending.fallback, pending.guarded, pending.chain, pending.logged,
            positional, tuple(nones), tuple(keywords),
        )  # fmt: skip

    def column(self, line: int, offset: int) -> int:
        if self.reader.lines is None:
            return offset + 1
        return len(self.reader.lines[line - 1][:offset].decode(errors="replace")) + 1

    def exports(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for qualname, scope in (("", self.top), *self.reader.scopes.items()):
            for name, bindings in scope.bindings.items():
                if name != "*":
                    made, _ = reaching(bindings, None, scope.block)
                    values = self.names.of_bindings(made, name)
                    if values:
                        found[f"{qualname}.{name}" if qualname else name] = list(values)
        for key, bindings in self.reader.attributes.items():
            values = self.names.of_bindings(bindings, "")
            if any(values):
                found.setdefault(key, []).extend(value for value in values if value)
        return found

    def members(self) -> list[Member]:
        found = []
        for form, owner, attr, node, scope, order, block in self.reader.owners:
            if isinstance(owner, (ast.Name, ast.Attribute)):
                types = self.types(owner, scope, order, block) if isinstance(owner, ast.Name) else ()
                end = node.end_lineno or node.lineno
                found.append(
                    Member(form, last_name(owner), types, attr, node.lineno,
                           self.column(node.lineno, node.col_offset), end,
                           self.column(end, node.end_col_offset or 0), scope.qualname or "<module>")
                )  # fmt: skip
        return found

    def types(self, owner: ast.Name, scope: Scope, order: int, block: Block) -> tuple[str, ...]:
        here: Scope | None = scope
        while here is not None and owner.id not in here.bindings:
            here = here.parent
        found: list[str] = []
        for binding in here.bindings[owner.id] if here is not None else ():
            if binding.kind == "type":
                found += annotated(binding.what)
            elif binding.kind == "other" and isinstance(binding.what, ast.Call) and here is not None:
                func, place = binding.what.func, (here, binding.order, binding.block)
                found += [value for value in self.names.values(func, *place) if value]
        return tuple(found)

    def flows(self) -> dict[str, Function]:
        found = {}
        for qualname, scope in self.reader.functions.items():
            indices: dict[int, None] = {}
            for node, _, _ in scope.returns:
                self.flow(node, scope, indices, set())
            if indices:
                found[qualname] = Function(scope.line, tuple(indices), scope.is_property)
        return found

    def flow(self, node: ast.AST, scope: Scope, into: dict[int, None], seen: set[str]) -> None:
        if id(node) in self.index:
            into[self.index[id(node)]] = None
        if isinstance(node, ast.Name):
            if node.id not in seen:
                seen.add(node.id)
                for binding in scope.bindings.get(node.id, ()):
                    inner = binding.what[0] if binding.kind == "expr" else binding.what
                    if binding.kind in ("expr", "other") and isinstance(inner, ast.AST):
                        self.flow(inner, scope, into, seen)
        elif isinstance(node, ast.Call):
            self.flow(node.func, scope, into, seen)
            for keyword in node.keywords if last_name(node.func) in _OF_GROUP else ():
                self.flow(keyword.value, scope, into, seen)
            for item in node.args if last_name(node.func) in _OF_GROUP else ():
                self.flow(item, scope, into, seen)
        elif isinstance(node, ast.Attribute | ast.Subscript | ast.NamedExpr | ast.Starred):
            self.flow(node.value, scope, into, seen)
        elif isinstance(node, ast.IfExp):
            self.flow(node.body, scope, into, seen)
            self.flow(node.orelse, scope, into, seen)
        elif isinstance(node, ast.BoolOp | ast.Tuple | ast.List | ast.Dict):
            for part in node.elts if isinstance(node, ast.Tuple | ast.List) else node.values:
                self.flow(part, scope, into, seen)


def _is_of_interest(value: str) -> bool:
    module, _, attrs = value.lstrip("*").partition(":")
    root = module.partition(".")[0]
    if root == "torch":
        return "distributed" in module or attrs.startswith("distributed")
    return root not in _STANDARD
