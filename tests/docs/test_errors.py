"""Errors are product text: a page each, executed; messages that a log of a thousand ranks can hold."""

from __future__ import annotations

import ast
import contextlib
import copy
import doctest
import inspect
import io
import pickle
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardweave import errors
from shardweave.errors import ShardweaveError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "errors"
GOLDEN = ROOT / "tests" / "data" / "golden" / "errors.txt"
CLASSES: dict[str, type[ShardweaveError]] = {
    name: cls
    for name, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, ShardweaveError) and cls is not ShardweaveError
}
ROW = re.compile(r"^\| \[`(\w+)`\]\((\w+)\.md\) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
MOST = 600

each_class = pytest.mark.parametrize("name", CLASSES)


def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def builtins_of(cls: type) -> list[type]:
    """The builtins that a class also is, without those that follow from them."""
    found = [base for base in cls.__mro__ if base.__module__ == "builtins"]
    return [base for base in found if not any(b is not base and issubclass(b, base) for b in found)]


def named(builtins: list[type]) -> list[str]:
    return [f"`{builtin.__name__}`" for builtin in builtins]


def raisers(source: Path) -> dict[str, set[str]]:
    """For each class, the packages of a source tree that call it; names in texts and imports do not count."""
    found: dict[str, set[str]] = {name: set() for name in CLASSES}
    for file in source.rglob("*.py"):
        package = file.relative_to(source).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if name in found:
                    found[name].add(package)
    return found


@pytest.fixture
def provoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ShardweaveError]:
    """Runs the example of a page up to the error that it shows, in a folder of its own."""

    def run(name: str) -> ShardweaveError:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tests").symlink_to(ROOT / "tests")
        names: dict[str, Any] = {}
        with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
            patch.chdir(folder)
            for example in doctest.DocTestParser().get_examples(page(name)):
                try:
                    exec(compile(example.source, f"{name}.md", "single"), names)
                except ShardweaveError as error:
                    assert example.exc_msg is not None, f"{name}.md: {error}"
                    return error
        raise AssertionError(f"{name}.md raises nothing")

    return run


def faults(error: ShardweaveError) -> list[str]:
    """What is wrong with a message as a line of a log."""
    text = str(error)
    found = []
    if not (error.rule and error.hint):
        found.append("rule or hint is empty")
    if not (error.where or error.equation):
        found.append("it says neither where nor what")
    if not re.search(r"[A-Za-z]", error.equation):
        found.append("the equation has no names")
    if len(text.splitlines()) != 1 or not text.isprintable():
        found.append("it is not one line")
    if len(text) >= MOST:
        found.append(f"{len(text)} characters >= {MOST}")
    if any(part not in text for part in (error.rule, error.where, error.equation, error.hint)):
        found.append("a part is missing in the text")
    if re.search(r"\b(must|cannot|invalid|failed)\b", error.rule):
        found.append("the rule is a complaint, not what should hold")
    if error.hint.endswith(".") or error.rule.endswith("."):
        found.append("a part ends with a full stop")
    return found


# --- pages --------------------------------------------------------------------------------------


def test_every_class_has_a_page_and_every_page_a_class() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {*CLASSES, "README"}


@each_class
def test_the_page_begins_with_the_docstring_and_has_all_sections(name: str) -> None:
    title, docstring, rule, also = page(name).split("\n\n")[:4]
    assert title == f"# {name}"
    assert docstring == inspect.cleandoc(CLASSES[name].__doc__ or "") and len(docstring.splitlines()) == 1
    assert rule.startswith("**The rule:** ") and rule.endswith(".")
    assert also.startswith("It is also a")
    assert re.findall(r"`\w+`", also.partition(".")[0]) == named(builtins_of(CLASSES[name]))
    assert re.findall(r"^## (.+)$", page(name), re.MULTILINE) == ["What it usually is", "What to do"]


@each_class
def test_the_example_is_executed_and_shows_the_whole_message(name: str) -> None:
    """test_code_blocks.py runs it; here: it is one of those, and shows no part of a message only."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)
    assert block.startswith(">>> ")
    shown = block.partition("Traceback (most recent call last):\n    ...\n")[2]
    assert shown.startswith(f"shardweave.errors.{name}: ") and ". hint: " in " ".join(shown.split())
    assert "..." not in shown.replace(", ...)", "")


def test_links_between_pages_lead_somewhere() -> None:
    for path in FOLDER.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert (FOLDER / target).is_file(), f"{path.name}: {target}"


def test_the_table_says_what_is_so() -> None:
    rows = ROW.findall(page("README"))
    assert [row[0] for row in rows] == [name for name in vars(errors) if name in CLASSES], "one row a class"
    raised = raisers(ROOT / "src" / "shardweave")
    for name, link, rule, builtin, by in rows:
        assert link == name and builtin == ", ".join(named(builtins_of(CLASSES[name])))
        assert f"**The rule:** {rule}." in " ".join(page(name).split())
        assert by == ", ".join(sorted(raised[name])), f"docs/errors/README.md, row {name}"


def test_every_class_is_raised_somewhere() -> None:
    assert [name for name, packages in raisers(ROOT / "src" / "shardweave").items() if not packages] == []


def test_a_class_that_is_only_named_counts_as_unused(tmp_path: Path) -> None:
    (tmp_path / "layout").mkdir()
    text = "from shardweave.errors import CutError, GapError\n'GapError()'\nraise CutError('r', hint='h')\n"
    (tmp_path / "layout" / "x.py").write_text(text)
    found = raisers(tmp_path)
    assert found["CutError"] == {"layout"} and found["GapError"] == set()


# --- messages -----------------------------------------------------------------------------------


@each_class
def test_a_provoked_error_is_a_line_of_a_log(name: str, provoke: Callable[[str], ShardweaveError]) -> None:
    error = provoke(name)
    assert type(error) is CLASSES[name]
    assert faults(error) == []
    assert all(isinstance(error, builtin) for builtin in (ShardweaveError, *builtins_of(type(error))))
    assert (ROOT / error.page).is_file() and Path(error.page).stem == name


@each_class
def test_parts_cross_processes(name: str, provoke: Callable[[str], ShardweaveError]) -> None:
    error = provoke(name)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error) and str(other) == str(error)
        for part in ("rule", "where", "equation", "hint", "page"):
            assert getattr(other, part) == getattr(error, part)


def test_messages_are_those_of_the_golden_file(provoke: Callable[[str], ShardweaveError]) -> None:
    """After a change that was meant: copy what the assertion shows, or delete the file and run once more."""
    text = "".join(f"{name}\n{textwrap.indent(str(provoke(name)), '  ')}\n\n" for name in CLASSES)
    if not GOLDEN.exists():
        GOLDEN.write_text(text, encoding="utf-8")
        pytest.fail(f"{GOLDEN.relative_to(ROOT)} was not there; it is written, read it")
    assert text == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        (("", "w", "a(1) != b(2)", "h"), "rule or hint is empty"),
        (("r", "w", "a(1) != b(2)", ""), "rule or hint is empty"),
        (("r", "", "", "h"), "it says neither where nor what"),
        (("r", "w", "1 != 2", "h"), "the equation has no names"),
        (("r", "w", "a" * MOST, "h"), f"{MOST + 15} characters >= {MOST}"),
        (("a dim must be even", "w", "a(1)", "h"), "the rule is a complaint, not what should hold"),
        (("r", "w", "a(1)", "h."), "a part ends with a full stop"),
    ],
)
def test_a_bad_message_is_caught(parts: tuple[str, str, str, str], fault: str) -> None:
    rule, where, equation, hint = parts
    assert fault in faults(ShardweaveError(rule, where=where, equation=equation, hint=hint))


@each_class
def test_what_is_quoted_forges_no_line(name: str) -> None:
    """A file name or another library's message may hold line breaks, escape sequences, half characters."""
    dirty = "a\nERROR: b\r\x1b[31m\u2028\udc80\x00é\\n"
    error = CLASSES[name](dirty, where=dirty, equation=dirty, hint=dirty)
    assert str(error).isprintable() and "é" in str(error)
    assert error.where == "a\\nERROR: b\\r\\x1b[31m\\u2028\\udc80\\x00é\\n"
    again = pickle.loads(pickle.dumps(error))
    assert (again.rule, again.hint, str(again)) == (error.rule, error.hint, str(error))


def rules_of(file: Path) -> list[tuple[int, str]]:
    """The literal rules of a source file: first arguments of calls that also have a hint."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and any(k.arg == "hint" for k in node.keywords) and node.args:
            texts = [n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)]
            found += [(node.lineno, text) for text in texts if isinstance(text, str)]
    return found


def test_rules_are_stated_as_what_should_hold() -> None:
    complaints = [
        f"{file.relative_to(ROOT)}:{line}: {rule}"
        for file in sorted((ROOT / "src").rglob("*.py"))
        for line, rule in rules_of(file)
        if re.search(r"\b(must|cannot|invalid|failed|unknown|missing)\b", rule)
    ]
    assert complaints == []
