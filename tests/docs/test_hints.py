"""What hints tell people to pass or to call exists: parameters of this package's functions, and functions."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "shardweave"

PARAMETER = re.compile(r"(?<![\w=\-{'])([a-z]\w*)=(?!=)")
CALL = re.compile(r"(?<![\w.])((?:\w+\.)*[A-Za-z]\w*)\(")

# What hints say of other programs, and whose it is.
FOREIGN = {
    "enforce_eager": "vLLM",
    "init_weight_transfer_engine": "vLLM",
    "tie_weights": "transformers",
    "reshard": "torch",
    "from_local": "torch",
    "detach": "torch",
    "no_grad": "torch",
    "q": "a tensor in an example",
    "k": "a tensor in an example",
    **dict.fromkeys(dir(builtins), "Python"),
}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCES.rglob("*.py")):
        yield str(path.relative_to(SOURCES)), ast.parse(path.read_text(encoding="utf-8"))


def hints(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The texts of hints; what is filled in is left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "hint":
                    parts = (part for part in ast.walk(keyword.value) if isinstance(part, ast.Constant))
                    for part in parts:
                        if isinstance(part.value, str):
                            yield part.lineno, part.value


def names() -> tuple[set[str], set[str]]:
    """Parameters and fields, and functions and classes, of the whole package."""
    parameters: set[str] = set()
    callables: set[str] = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                callables.add(node.name)
                every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                parameters |= {argument.arg for argument in every}
            elif isinstance(node, ast.ClassDef):
                callables.add(node.name)
                parameters |= {
                    field.target.id
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                }
    return parameters, callables


def unknown(where: str, tree: ast.Module, parameters: set[str], callables: set[str]) -> list[str]:
    """What the hints of a module name that is not there."""
    wrong = []
    for line, text in hints(tree):
        said = [(name, parameters) for name in PARAMETER.findall(text)]
        said += [(name.rpartition(".")[2], callables) for name in CALL.findall(text)]
        wrong += [
            f"{where}:{line}: {name}" for name, known in said if name not in known and name not in FOREIGN
        ]
    return wrong


def test_what_hints_name_exists() -> None:
    parameters, callables = names()
    assert [wrong for where, tree in trees() for wrong in unknown(where, tree, parameters, callables)] == []


def test_a_hint_that_names_what_is_not_there_is_seen() -> None:
    parameters, callables = names()
    told = "raise TransportError('r', hint='raise timeout_seconds=, or call publish_all(step)')"
    assert unknown("x.py", ast.parse(told), parameters, callables) == [
        "x.py:1: timeout_seconds",
        "x.py:1: publish_all",
    ]
    told = "raise TransportError('r', hint='raise timeout_s=, or call publish(step)')"
    assert unknown("x.py", ast.parse(told), parameters, callables) == []


def test_hints_are_found() -> None:
    found = [text for _, tree in trees() for _, text in hints(tree)]
    assert len(found) > 200
    assert sum(bool(PARAMETER.search(text) or CALL.search(text)) for text in found) > 30
