"""Preparing a conversion holds the garbage collector back, and leaves it as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardweave.convert import prepare
from shardweave.errors import ModelError

SRC = Path(__file__).parents[1] / "data/mc_gqa_truth_hf"


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that were collected, with thresholds so low that any work leads to a collection."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        seen.append(info["generation"])

    thresholds, was_enabled = gc.get_threshold(), gc.isenabled()
    gc.callbacks.append(note)
    gc.set_threshold(1, 1, 1)
    yield seen
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)
    (gc.enable if was_enabled else gc.disable)()


def test_nothing_is_collected_meanwhile(collections: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    gc.enable()
    within: list[int] = []
    opened = prepare.__wrapped__.__globals__["open_checkpoint"]

    def open_checkpoint(*args: Any, **choices: Any) -> Any:
        collections.clear()
        checkpoint = opened(*args, **choices)
        within.extend(collections)
        assert not gc.isenabled()
        return checkpoint

    monkeypatch.setitem(prepare.__wrapped__.__globals__, "open_checkpoint", open_checkpoint)
    prepare(SRC, to="hf")
    assert not within and gc.isenabled()
    collections.clear()
    opened(SRC)
    assert collections, "the same work outside is interrupted"


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_left_as_it_was(collections: list[int], enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    prepare(SRC, to="hf")
    assert gc.isenabled() == enabled
    with pytest.raises(ModelError):
        prepare(SRC, to="hf", config={})
    assert gc.isenabled() == enabled
