"""Every code has its example on the page, with a finding, and its mend, without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardweave.lint.constructors import inventory
from shardweave.lint.finding import CODES, CONSTRUCTIONS
from shardweave.lint.groups import Options, check
from shardweave.lint.marks import level

GROUPS, CONSTRUCTORS = (
    sorted(code for code in CODES if code.startswith(CONSTRUCTIONS) == of) for of in (False, True)
)
PAGE = (Path(__file__).parents[2] / "docs" / "lint-codes.md").read_text(encoding="utf-8")
HEADER = "from megatron.core import parallel_state\nimport torch\n\n"
# The example of a file that is no Python is marked as text.
SECTIONS = {
    match[1]: re.findall(r"^```(?:py|text)\n(.*?)^```$", match[2], re.MULTILINE | re.DOTALL)
    for match in re.finditer(r"^### (SW\d{3})\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
FILE = re.compile(r"^# ([\w/]+\.py)\n", re.MULTILINE)


def put(folder: Path, block: str) -> None:
    """The files of an example."""
    _, *parts = FILE.split(block)
    files = dict(zip(parts[::2], parts[1::2], strict=True)) or {"example.py": HEADER + block}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for package in path.relative_to(folder).parents:
            if package != Path():
                (folder / package / "__init__.py").touch()


def found(folder: Path, block: str) -> set[str]:
    put(folder, block)
    return {finding.code for finding in check([folder], root=folder, options=Options(ignore=())).findings}


def test_the_page_has_every_code_in_order() -> None:
    assert list(SECTIONS) == sorted(CODES)


@pytest.mark.parametrize("code", GROUPS)
def test_the_example_has_it_and_the_mend_has_not(code: str, tmp_path: Path) -> None:
    example, mend = SECTIONS[code]
    assert code in found(tmp_path / "example", example)
    after = found(tmp_path / "mend", mend)
    assert not after, "the mend is clean of all codes"


LAYER = "class Layer:\n    def __init__(self, size, group=None):\n        self.group = group\n\n"


def constructed(folder: Path, block: str) -> set[str]:
    folder.mkdir()
    (folder / "example.py").write_text(LAYER + block)
    made = inventory("Layer", "group", [folder], root=folder)
    return {finding.code for finding in made.findings}


@pytest.mark.parametrize("code", CONSTRUCTORS)
def test_the_example_of_a_construction_has_it_and_its_mend_has_nothing_to_do(
    code: str, tmp_path: Path
) -> None:
    example, *mend = SECTIONS[code]
    assert code in constructed(tmp_path / "example", example)
    for block in mend:
        assert constructed(tmp_path / "mend", block) <= {"SW300", "SW310"}


def test_the_page_says_how_bad_a_code_is() -> None:
    text = PAGE[: PAGE.index("\n## ")]
    for word in ("error", "note"):
        codes = {code for code in CODES if level(code) == word}
        said = re.search(rf"\*{word}\*.*?\(([^)]*)\)", text, re.DOTALL)
        assert said is not None
        assert codes == set(re.findall(r"SW\d{3}", said[1]))
