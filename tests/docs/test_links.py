"""Every relative link of every page leads somewhere, and every picture is in some page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")])

FENCE = re.compile(r"^(```|~~~).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r'\]\(([^)\s]+)(?:\s+[^)]*)?\)|^\[[^\]]+\]:\s*(\S+)|(?:src|href)="([^"]+)"', re.MULTILINE)
MODULE = re.compile(r"`((?:\w+/)+\w+\.py)`")
HEADING = re.compile(r"^#{1,6} (.+?)#*$", re.MULTILINE)


def links(text: str) -> Iterator[str]:
    """The targets of links and pictures; what stands in code is none."""
    for found in LINK.finditer(CODE.sub("``", FENCE.sub("", text))):
        yield found[1] or found[2] or found[3]


def anchors(text: str) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", title).strip() for title in HEADING.findall(FENCE.sub("", text)))
    return {title.lower().replace(" ", "-") for title in plain}


def leads_nowhere(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead to no file of the project, or to no heading of it."""
    wrong = []
    for link in links(text):
        url = urlsplit(link)
        if url.scheme or url.netloc:
            continue
        to = (page.parent / unquote(url.path)).resolve() if url.path else page
        there = to.is_relative_to(ROOT) and to.exists()
        if not there or (
            url.fragment and url.fragment not in anchors(text if to == page else to.read_text())
        ):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_links_of_page_lead_somewhere(page: Path) -> None:
    assert leads_nowhere(page, page.read_text(encoding="utf-8")) == []


def test_every_picture_is_in_a_page() -> None:
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in links(page.read_text(encoding="utf-8"))
        if link.endswith(".svg")
    }
    pictures = set(PICTURES.glob("*.svg"))
    assert pictures
    assert pictures <= shown, sorted(picture.name for picture in pictures - shown)


def test_every_page_of_docs_is_linked() -> None:
    linked = {
        (page.parent / urlsplit(link).path).resolve()
        for page in PAGES
        for link in links(page.read_text(encoding="utf-8"))
    }
    pages = set(ROOT.glob("docs/**/*.md"))
    assert pages <= linked, sorted(str(page.relative_to(ROOT)) for page in pages - linked)


def test_every_module_that_a_page_names_is_there() -> None:
    places = (ROOT, ROOT / "src" / "shardweave")
    named = {
        f"{page.relative_to(ROOT)}: {path}": path
        for page in PAGES
        if not page.is_relative_to(ROOT / "tests" / "data")
        for path in MODULE.findall(page.read_text(encoding="utf-8"))
    }
    assert named
    assert [
        where for where, path in named.items() if not any((place / path).exists() for place in places)
    ] == []


def test_a_wrong_link_is_seen() -> None:
    page = ROOT / "docs" / "cheatsheet.md"
    text = """# A `dim`, or two
        [a](commands.md) [b](nowhere.md) ![c](pictures/nothing.svg "title") [d](#a-dim-or-two) [e](#three)
        [f](commands.md#convert) [g](commands.md#invert) [h](https://example.org/x) [j](../../out.md)
        `[i](no.md)`
        <img src="pictures/none.svg">\n\n[k]: gone.md\n\n```text\n[l](code.md)\n```
    """
    wrong = ["nowhere.md", "pictures/nothing.svg", "#three", "commands.md#invert", "../../out.md"]
    assert leads_nowhere(page, text) == [*wrong, "pictures/none.svg", "gone.md"]
