"""Every Python block of the documentation runs, page by page, from top to bottom as one session."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    if BLOCK.search(page.read_text(encoding="utf-8"))
]


def run_page(text: str, *, name: str) -> int:
    """Runs the blocks of a page and gives their number; a block with prompts must print what it says."""
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = list(BLOCK.finditer(text))
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        if block[1].startswith(">>>"):
            # One dict for the whole page: the parser would copy it.
            example = doctest.DocTestParser().get_doctest(block[1], {}, name, name, line)
            example.globs = names
            runner = doctest.DebugRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            runner.run(example, clear_globs=False)
        else:
            exec(compile("\n" * line + block[1], name, "exec"), names)
    return len(blocks)


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_blocks_of_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A page may read the test data by its path in the tree, and may write beside it without a trace.
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    run_page(page.read_text(encoding="utf-8"), name=str(page))


def test_blocks_share_names_and_a_wrong_result_is_caught() -> None:
    page = "```python\nx = 6\n```\n\ntext\n\n```python\n>>> x * 7\n{}\n```\n"
    assert run_page(page.format(42), name="page") == 2
    with pytest.raises(doctest.DocTestFailure):
        run_page(page.format(41), name="page")
