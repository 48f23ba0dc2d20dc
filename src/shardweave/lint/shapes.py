"""What small pieces of code are: tests, messages, names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardweave.lint.facts import Class

LOG = frozenset(
    {"print", "log", "info", "debug", "warning", "warn", "error", "exception", "critical", "write"}
    | {"log_single_rank", "print_rank_0"}
)
"""Last names of functions that say something."""
_INERT = frozenset({"ctx", "op", "ops", "kind", "type_comment", "conversion", "is_async", "lineno"})
_fields: dict[type, tuple[str, ...]] = {}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def fields_of(node: ast.AST) -> tuple[str, ...]:
    """Where a node has parts that are code: without operators and contexts, a third of all nodes."""
    found = _fields.get(type(node))
    if found is None:
        found = _fields[type(node)] = tuple(field for field in node._fields if field not in _INERT)
    return found


def getattr_name(node: ast.AST) -> str | None:
    """The name in ``getattr(x, "name")``."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and len(node.args) >= 2
        and isinstance(node.args[1], ast.Constant)
        and isinstance(node.args[1].value, str)
    ):
        return node.args[1].value
    return None


def tells_none(test: ast.expr) -> bool | None:
    """True where the test holds for what is None or false, False where it holds for what is there."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and is_none(test.comparators[0]):
        if isinstance(test.ops[0], ast.Is | ast.Eq):
            return True
        if isinstance(test.ops[0], ast.IsNot | ast.NotEq):
            return False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = test.operand
        if isinstance(inner, ast.Name | ast.Attribute) or asks_for_name(inner):
            return True
        found = tells_none(inner)
        return None if found is None else not found
    if isinstance(test, ast.BoolOp):
        parts = [tells_none(part) for part in test.values]
        wanted = isinstance(test.op, ast.And)
        # "x is None and more" is under x is None; "x is not None or more" is not under anything.
        if wanted and True in parts:
            return True
        if not wanted and all(part is True for part in parts):
            return True
    return None


def asks_for_name(test: ast.expr) -> bool:
    """Whether the test holds only where hasattr of something does."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(asks_for_name(part) for part in test.values)
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "hasattr"


def type_checking(test: ast.expr) -> bool | None:
    """True for a body that only type checkers read, False for one that they alone pass over."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        found = type_checking(test.operand)
        return None if found is None else not found
    return True if last_name(test) == "TYPE_CHECKING" else None


def is_none(node: ast.AST) -> bool:
    """Whether it is the constant None."""
    return isinstance(node, ast.Constant) and node.value is None


def last_name(node: ast.AST) -> str:
    """The last name of a chain of attributes, or of a call of one."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_message(node: ast.stmt) -> bool:
    """Whether the statement only says something."""
    return isinstance(node, ast.Pass) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and last_name(node.value.func) in LOG
    )


def names_in(node: ast.AST | None) -> set[str]:
    """Last names in an expression."""
    return {last_name(part) for part in ast.walk(node)} if node is not None else set()


def same_scope(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a scope, those of nested scopes left out."""
    yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        if not isinstance(node, _SCOPES):
            for part in getattr(node, field, None) or ():
                if isinstance(part, ast.AST) and not isinstance(part, ast.expr):
                    yield from same_scope(part)


def annotated(annotation: ast.expr) -> list[str]:
    """Last names of the classes that an annotation names, as values without a module."""
    found = []
    for part in ast.walk(annotation):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            found += re.findall(r"[A-Za-z_]\w*", part.value)
        elif isinstance(part, ast.Name | ast.Attribute):
            found.append(last_name(part))
    return found


def class_of(node: ast.ClassDef) -> Class:
    """What a class declares."""
    fields = [
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]
    fails = ""
    for part in node.body:
        for target in part.targets if isinstance(part, ast.Assign) else ():
            fields += [target.id] if isinstance(target, ast.Name) else []
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            fields.append(part.name)
            if part.name == "__getattr__":
                raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(part))
                returns = any(isinstance(inner, ast.Return) for inner in ast.walk(part))
                fails = ("some" if returns else "") if raises else "all"
    return Class(tuple(fields), fails)
