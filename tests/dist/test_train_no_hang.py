"""Mistakes of one rank: all ranks raise the same named error, soon, and nothing computes a wrong number.

The list, with what all ranks say, is `docs/train-errors.md`; SHARDWEAVE_UPDATE_GOLDEN=1 writes it anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import train_mistakes
import workers
from train_mistakes import ALL, GONE, LAYOUTS, MISTAKES, Mistake

from shardweave import errors

PAGE = Path(__file__).parents[2] / "docs/train-errors.md"
WITHIN_S = 30.0
TIMEOUT_S = 8.0
"""How long ranks wait for each other."""

UPDATES = bool(os.environ.get("SHARDWEAVE_UPDATE_GOLDEN"))


def said(layout: str, numbers: list[int], folder: Path) -> dict[int, list[train_mistakes.Said]]:
    gone = [ALL[number].rank for number in numbers if number >= 0 and ALL[number] in GONE]
    ranks = range(LAYOUTS[layout].world_size)
    ended = workers.run(
        train_mistakes.play,
        ranks,
        within_s=170,
        done=[rank for rank in ranks if rank not in gone],
        layout=layout,
        numbers=numbers,
        folder=folder,
        timeout_s=TIMEOUT_S if not gone else 3.0,
    )
    return workers.values({rank: end for rank, end in ended.items() if rank not in gone})


def judged(wrong: Mistake, ranks: dict[int, train_mistakes.Said]) -> str:
    """The one text of all ranks, after it was seen that it is one, of the class that is due, and in time."""
    slowest = max(took for _, _, took in ranks.values())
    print(f"{wrong.layout:18} {wrong.name:52} {slowest:5.1f} s")
    assert slowest < WITHIN_S, wrong.name
    found = {(name, text) for name, text, _ in ranks.values()}
    assert len(found) == 1, f"{wrong.name}: ranks say different things: {found}"
    ((name, text),) = found
    assert name == wrong.error, (wrong.name, name, text)
    assert issubclass(getattr(errors, name), errors.ShardweaveError)
    return text.partition("hint: ")[0].strip()


def kept(texts: dict[Mistake, str]) -> None:
    """Compare with the page, or write it anew."""
    page = PAGE.read_text(encoding="utf-8")
    for wrong, text in texts.items():
        rows = f"| {wrong.name} | {wrong.layout}, rank {wrong.rank} | "
        line = f"{rows}{wrong.error} | {plain(text)} |"
        if UPDATES and rows in page:
            page = re.sub(re.escape(rows) + ".*", lambda _, line=line: line, page)
        elif UPDATES:
            page = f"{page.rstrip()}\n{line}\n"
        assert line in page, "SHARDWEAVE_UPDATE_GOLDEN=1 accepts the new text"
    if UPDATES:
        PAGE.write_text(page, encoding="utf-8", newline="\n")


def plain(text: str) -> str:
    """Without ports, and in the cells of a table."""
    # Whoever is first says what all ranks found.
    text = re.sub(r": rank \d, (?=step \d|term )", ": ", text)
    return re.sub(r"\[?127\.0\.0\.1\]?:\d+", "HOST", text).replace("|", "\\|").replace("<", "&lt;")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mistake_of_one_rank_is_the_same_named_error_on_all(layout: str, tmp_path: Path) -> None:
    numbers = [number for number, wrong in enumerate(MISTAKES) if wrong.layout == layout]
    ranks = said(layout, [-1, *numbers], tmp_path)
    assert {mine[0][:2] for mine in ranks.values()} == {("", "")}, "a step without a mistake goes through"
    kept(
        {
            MISTAKES[number]: judged(MISTAKES[number], {rank: mine[at] for rank, mine in ranks.items()})
            for at, number in enumerate(numbers, start=1)
        }
    )


@pytest.mark.parametrize("wrong", GONE, ids=lambda wrong: wrong.name.replace(" ", "_"))
def test_a_rank_that_is_gone_is_named_by_all_others(wrong: Mistake, tmp_path: Path) -> None:
    ranks = said(wrong.layout, [ALL.index(wrong)], tmp_path)
    text = judged(wrong, {rank: mine[0] for rank, mine in ranks.items()})
    assert wrong.rank not in ranks
    # Of ranks that wait for each other, whose turn it is first may wait for one that waits itself.
    named = r"\d" if wrong.error == "TransportTimeoutError" else rf"(\d(, | and ))*{wrong.rank}\b"
    assert re.search(rf"\branks? {named}", text), text


def test_there_are_more_than_twenty_kinds_and_all_groups_are_met() -> None:
    assert len({wrong.name for wrong in ALL}) >= 20
    assert len({wrong.name for wrong in ALL}) == len(ALL)
    for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "vp"):
        assert any(getattr(LAYOUTS[wrong.layout], axis) > 1 for wrong in ALL)
