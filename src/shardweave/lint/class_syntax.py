"""Expressions and signatures as they are written, in the words of `shardweave.lint.class_rows`."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from shardweave.lint.class_rows import Parameter

__all__ = ["all_of", "as_written", "is_false", "is_true", "keys_of", "letter", "parameters_of"]


def letter(node: ast.AST) -> str:
    """``n`` for None, else ``v``."""
    return "n" if isinstance(node, ast.Constant) and node.value is None else "v"


def keys_of(node: ast.expr) -> tuple[Mapping[str, str], bool]:
    """Keys of a mapping that is written out, and whether these are all."""
    found: dict[str, str] = {}
    whole = True
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                found[key.value] = letter(value)
            else:
                whole = False
        return found, whole
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        for part in node.keywords:
            if part.arg is None:
                whole = False
            else:
                found[part.arg] = letter(part.value)
        return found, whole and not node.args
    return {}, False


def all_of(args: ast.arguments) -> list[ast.arg]:
    """The parameters of a signature, of every kind."""
    found = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return found + [arg for arg in (args.vararg, args.kwarg) if arg is not None]


def parameters_of(args: ast.arguments) -> list[Parameter]:
    """The parameters of a signature in order, as rows."""
    plain = [*((arg, "p") for arg in args.posonlyargs), *((arg, "b") for arg in args.args)]
    defaults = ["" for _ in range(len(plain) - len(args.defaults))] + [letter(part) for part in args.defaults]
    found = [Parameter(arg.arg, kind, default) for (arg, kind), default in zip(plain, defaults, strict=True)]
    if args.vararg:
        found.append(Parameter(args.vararg.arg, "a", ""))
    for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(Parameter(arg.arg, "k", "" if value is None else letter(value)))
    if args.kwarg:
        found.append(Parameter(args.kwarg.arg, "w", ""))
    return found


def as_written(node: ast.AST) -> str:
    """A name or a chain of attributes as it is written."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{as_written(node.value)}.{node.attr}"
    return f"{as_written(node.func)}()" if isinstance(node, ast.Call) else "an item"


def is_true(node: ast.AST | None) -> bool:
    """Whether it is the constant True."""
    return isinstance(node, ast.Constant) and node.value is True


def is_false(node: ast.AST | None) -> bool:
    """Whether it is the constant False."""
    return isinstance(node, ast.Constant) and node.value is False
