"""The blocks of pages that need a real Megatron or vLLM are no Python test; here: what they name is there."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    if BLOCK.search(page.read_text(encoding="utf-8"))
]


def session(text: str) -> ast.Module:
    """All blocks of a page as one program."""
    return ast.parse("".join(BLOCK.findall(text)))


def imported(tree: ast.Module) -> dict[str, Any]:
    """What a program imports from shardweave, by name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardweave":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name) and importlib.util.find_spec(
                    f"{node.module}.{alias.name}"
                ):
                    importlib.import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


def wrong_calls(tree: ast.Module) -> Iterator[str]:
    """Calls of what is imported whose arguments it does not take."""
    names = imported(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        head, *path = ast.unparse(node.func).split(".")
        if head not in names:
            continue
        called = names[head]
        for part in path:
            called = getattr(called, part)
        arguments = [None] * len(node.args), {k.arg: None for k in node.keywords if k.arg}
        try:
            inspect.signature(called).bind(*arguments[0], **arguments[1])
        except TypeError as error:
            yield f"{ast.unparse(node)}: {error}"


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_what_blocks_name_is_there_and_takes_what_they_give(page: Path) -> None:
    assert list(wrong_calls(session(page.read_text(encoding="utf-8")))) == []


def test_the_guide_says_what_it_imports() -> None:
    """A page that shows only calls is passed over; the guide is a program."""
    page = ROOT / "docs" / "guide-megatron-to-vllm.md"
    assert {"Publisher", "Session", "from_megatron", "refit"} <= set(imported(session(page.read_text())))


def test_init_info_is_that_of_the_engine() -> None:
    """Read, not imported: the module needs vllm."""
    engine = ast.parse((ROOT / "src/shardweave/refit/engines/vllm/engine.py").read_text(encoding="utf-8"))
    (info,) = (n for n in ast.walk(engine) if isinstance(n, ast.ClassDef) and n.name == "InitInfo")
    fields = {
        n.target.id for n in info.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    page = ROOT / "docs/guide-megatron-to-vllm.md"
    named = re.findall(r'"init_info": \{([^}]*)\}', page.read_text(encoding="utf-8"))
    assert named
    for text in named:
        assert set(re.findall(r'"(\w+)":', text)) <= fields
    assert {"receivers", "first_rank"} <= fields


def test_a_wrong_block_is_seen() -> None:
    text = "```py\nfrom shardweave.refit import {0}\n\n{0}(store=1, publisher=range(2))\n```\n"
    assert list(wrong_calls(session(text.format("Session"))))
    with pytest.raises(AttributeError):
        imported(session(text.format("Sessions")))
