"""Scopes against two references: Python's own symbol tables, and the program run with a module that records.

Programs are made of the statements that bind, and of reads ``NAME.get_x_group(n)`` with a number of their
own. Run with a module in the place of the state, a program says which reads reached it; the checker says it
from the text.
Functions are called once the module has ended, so that what they see is what names hold at the end.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import textwrap
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.lint.reach import Scope
from shardweave.lint.read import read_facts
from shardweave.lint.scopes import Reader

NAMES = ("p", "q", "r")
VALUE = "state:"

names = st.sampled_from(NAMES)


def indented(body: list[str]) -> str:
    return textwrap.indent("\n".join(body), "    ")


START = "import state as p\nq = Other()\nimport state as r"
"""So that most programs come to their end."""
READ = "{0}.get_x_group(0)"

binds = st.one_of(
    st.builds("import state as {0}".format, names),
    st.builds("{0} = Other()".format, names),
    st.builds("{0} = {1}".format, names, names),
    st.builds("{0}, {1} = {1}, Other()".format, names, names),
    st.builds("({0} := Other())".format, names),
    st.builds("with Other() as {0}: pass".format, names),
    st.builds("del {0}".format, names),
)
loops = st.builds("for {0} in [Other()]: pass".format, names)
reads = st.one_of(
    st.builds(READ.format, names),
    st.builds("[{0}.get_x_group(0) for i in [1]]".format, names),
    st.builds("[{1}.get_x_group(0) for {0} in [Other()]]".format, names, names),
    st.builds("[{1}.get_x_group(0) for i in [1] for {0} in [{1}]]".format, names, names),
    st.builds("{{{0}: [{1}.get_x_group(0) for {0} in [1, 2]] for {0} in [3]}}".format, names, names),
    st.builds("(lambda {0}=Other(): {1}.get_x_group(0))".format, names, names),
    st.builds("{1}.get_x_group(0) if {0} is None else {1}.get_x_group(0)".format, names, names),
)


def nested(children: st.SearchStrategy[list[str]]) -> st.SearchStrategy[str]:
    def function(name: int, words: list[str], params: list[str], body: list[str]) -> str:
        # A name cannot be a parameter and global at once.
        heads = [f"{word} {n}" for word, n in zip(words, NAMES, strict=False) if word and n not in params]
        return f"def f{name}({', '.join(params)}):\n{indented([*heads, *body])}"

    words = st.lists(st.sampled_from(["", "", "global"]), min_size=3, max_size=3)
    params = st.lists(names, unique=True, max_size=1)
    return st.one_of(
        st.builds(function, st.integers(0, 3), words, params, children),
        st.builds(lambda n, body: f"class C{n}:\n{indented(body)}", st.integers(0, 3), children),
        st.builds(lambda a, b: f"if yes():\n{indented(a)}\nelse:\n{indented(b)}", children, children),
        st.builds(
            lambda a, b: f"try:\n{indented(a)}\nexcept Exception as q:\n{indented(b)}", children, children
        ),
    )


suites = st.recursive(
    st.lists(st.one_of(binds, loops, reads), min_size=1, max_size=5),
    lambda inner: st.lists(st.one_of(binds, reads, loops, nested(inner)), min_size=1, max_size=5),
    max_leaves=12,
)


class Guard(ast.NodeTransformer):
    """Numbers the reads."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get_x_group":
            self.count += 1
            node.args = [ast.Constant(self.count)]
        return node


def programs() -> st.SearchStrategy[str]:
    def made(body: list[str]) -> str:
        tree = Guard().visit(ast.parse("\n".join([START, *body])))
        return ast.unparse(ast.fix_missing_locations(tree))

    def compiles(text: str) -> bool:
        with suppress(SyntaxError):
            compile(text, "made", "exec")
            return True
        return False

    return suites.map(made).filter(compiles)


class Recorder(types.ModuleType):
    """The state's module: it records the numbers of reads."""

    def __init__(self) -> None:
        super().__init__("state")
        self.reads: set[int] = set()

    def get_x_group(self, number: int) -> None:
        self.reads.add(number)


class Other:
    """Anything else; it takes every call."""

    def get_x_group(self, number: int) -> None:
        pass

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def functions_of(namespace: dict[str, Any]) -> Iterator[types.FunctionType]:
    for value in list(namespace.values()):
        if isinstance(value, types.FunctionType):
            yield value
        elif isinstance(value, type) and value.__module__ == "made":
            yield from functions_of(dict(vars(value)))


def executed(text: str, decisions: int) -> set[int]:
    """The numbers of the reads that reach the module, with each ``if`` decided by a bit."""
    state = Recorder()
    taken = [0]

    def yes() -> bool:
        taken[0] += 1
        return bool(decisions >> (taken[0] % 16) & 1)

    def imported(name: str, *_: Any) -> Any:
        assert name == "state"
        return state

    inner = {**vars(builtins), "__import__": imported}
    space = {"__builtins__": inner, "__name__": "made", "Other": Other, "yes": yes}
    with suppress(NameError, AttributeError, TypeError):
        exec(compile(text, "made", "exec"), space)
        for function in [*functions_of(space)]:
            with suppress(NameError, AttributeError, TypeError):
                function(*[Other()] * function.__code__.co_argcount)
    return state.reads


def stated(text: str) -> set[int]:
    """The numbers of the reads that may reach the module, by the checker."""
    tree = ast.parse(text)
    facts = read_facts(tree, package="", module="made", text=text.encode())
    numbers = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            constant = node.args[0]
            assert isinstance(constant, ast.Constant)
            numbers[(node.func.lineno, node.func.col_offset + 1)] = constant.value
    return {
        numbers[use.line, use.column]
        for use in facts.uses
        if use.form == "call" and "state:get_x_group" in use.values
    }


@given(programs(), st.integers(0, 2**16 - 1))
def test_every_read_that_happens_is_found(text: str, decisions: int) -> None:
    assert executed(text, decisions) <= stated(text)


@given(st.lists(st.one_of(binds, reads), min_size=1, max_size=8).map(lambda b: "\n".join([START, *b])))
def test_in_code_without_branches_a_read_is_found_exactly_where_it_happens(text: str) -> None:
    tree = ast.unparse(ast.fix_missing_locations(Guard().visit(ast.parse(text))))
    happened = executed(tree, 0)
    # What stands after a failure does not run, and lambdas are not called.
    whole = ast.parse(tree)
    ended = _runs_to_the_end(tree)
    lambdas = {
        call.args[0].value
        for node in ast.walk(whole)
        if isinstance(node, ast.Lambda)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant)
    }
    arms = {
        call.args[0].value
        for node in ast.walk(whole)
        if isinstance(node, ast.IfExp)
        for call in ast.walk(node.body)
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant)
    }
    if ended:
        assert stated(tree) - lambdas - arms == happened


def _runs_to_the_end(text: str) -> bool:
    state = Recorder()
    inner = {**vars(builtins), "__import__": lambda *_: state}
    try:
        exec(text, {"__builtins__": inner, "Other": Other})
    except (NameError, AttributeError, TypeError):
        return False
    return True


@given(programs())
def test_names_belong_to_the_scopes_that_pythons_symbol_tables_say(text: str) -> None:
    reader = Reader("", "made", text.encode())
    reader.run(ast.parse(text))
    ours = sorted(_ours(reader.every), key=repr)
    theirs = sorted(_theirs(symtable.symtable(text, "made", "exec")), key=repr)
    assert ours == theirs


def _ours(scopes: list[Scope]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for scope in scopes:
        bound = {name for name in scope.bindings if name in NAMES and name not in scope.elsewhere}
        if scope.kind == "module":
            # What other scopes bind here with global is theirs to say.
            bound = {n for n in bound if any(not b.is_foreign for b in scope.bindings[n])}
        yield scope.kind, tuple(sorted(bound))


def _theirs(table: symtable.SymbolTable) -> Iterator[tuple[str, tuple[str, ...]]]:
    kind = str(getattr(table.get_type(), "value", table.get_type()))
    if table.get_name() in ("listcomp", "setcomp", "dictcomp", "genexpr"):
        kind = "comprehension"
    bound = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.get_name() in NAMES
        and (symbol.is_assigned() or symbol.is_parameter() or symbol.is_imported())
        and (kind == "module" or not symbol.is_declared_global())
    }
    yield kind, tuple(sorted(bound))
    for child in table.get_children():
        yield from _theirs(child)


@pytest.mark.parametrize(
    ("text", "happens"),
    [
        ("import state as p\np.get_x_group(1)", {1}),
        ("import state as p\ndef f(p):\n    p.get_x_group(1)", set()),
        ("import state as p\nclass C:\n    p = Other()\n    def m(self):\n        p.get_x_group(1)", {1}),
        ("import state as p\nclass C:\n    p = p\n    p.get_x_group(1)", {1}),
        ("import state as p\n[p.get_x_group(1) for p in [Other()]]", set()),
    ],
)
def test_the_reference_itself(text: str, happens: set[int]) -> None:
    assert executed(text, 0) == happens == stated(text)
