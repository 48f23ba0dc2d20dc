"""Boxes that lie side by side are cut from one read, whatever is asked for in between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardweave.store.boxes import Boxes
from shardweave.store.manifest import Extent, Manifest, StoredTensor
from shardweave.store.read import Reader

SHAPE, PARTS = (37, 24), 4


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Manifest, dict[str, np.ndarray]]:
    """Two arrays behind one another in one file, and a third in a file of its own."""
    rng = np.random.default_rng(4)
    arrays = {key: rng.integers(0, 1 << 16, SHAPE, np.uint16) for key in "abc"}
    (tmp_path / "ab").write_bytes(b"head." + arrays["a"].tobytes() + arrays["b"].tobytes())
    (tmp_path / "c").write_bytes(arrays["c"].tobytes())
    places = {"a": ("ab", 5), "b": ("ab", 5 + arrays["a"].nbytes), "c": ("c", 0)}
    tensors = {
        key: StoredTensor(key, "uint16", SHAPE, (Extent((0, 0), SHAPE, file, start),))
        for key, (file, start) in places.items()
    }
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    return Manifest(tmp_path, "hf", tensors, sizes), arrays


def asked(rng: np.random.Generator) -> tuple[slice, slice]:
    low = [int(rng.integers(0, n)) for n in SHAPE]
    return slice(low[0], int(rng.integers(low[0], SHAPE[0])) + 1), slice(
        low[1], int(rng.integers(low[1], SHAPE[1])) + 1
    )


@pytest.mark.parametrize("buffer", [1 << 22, 500])
def test_any_boxes_in_any_order(
    stored: tuple[Manifest, dict[str, np.ndarray]], buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardweave.store.read._BUFFER_BYTES", buffer)
    manifest, arrays = stored
    rng = np.random.default_rng(6)
    with Reader(manifest) as reader, reader.sharing():
        for _ in range(300):
            key, box = str(rng.choice(list("abc"))), asked(rng)
            expected = arrays[key][box]
            out = np.full(expected.shape, 0xDEAD, np.uint16)
            reader.fill(key, [part.start for part in box], out)
            assert np.array_equal(out, expected)


def test_columns_of_the_same_rows_cost_one_read(
    stored: tuple[Manifest, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, arrays = stored
    read, preadv = [], os.preadv

    def counting(descriptor: int, buffers: Any, offset: int) -> int:
        read.append(preadv(descriptor, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)
    width = SHAPE[1] // PARTS

    def columns() -> None:
        for part in range(PARTS):
            out = np.full((10, width), 0xDEAD, np.uint16)
            reader.fill("b", (20, part * width), out)
            assert np.array_equal(out, arrays["b"][20:30, part * width : (part + 1) * width])

    with Reader(manifest) as reader:
        with reader.sharing():
            columns()
        assert read == [10 * SHAPE[1] * 2]
        read.clear()
        columns()
        assert len(read) == PARTS
    # What was kept does not outlive the block: a file that changed is read again.
    with Reader(manifest) as reader:
        for fill in (1, 2):
            (manifest.root / "c").write_bytes(np.full(SHAPE, fill, np.uint16).tobytes())
            with reader.sharing():
                out = np.zeros((5, 3), np.uint16)
                reader.fill("c", (2, 4), out)
            assert np.all(out == fill)


@pytest.mark.parametrize("dims", [0, 1, 3])
def test_boxes_that_touch_are_those_that_a_walk_finds(dims: int) -> None:
    rng = np.random.default_rng(8)
    for _ in range(60):
        count = int(rng.integers(0, 12))
        offsets = rng.integers(0, 9, (count, dims))
        shapes = rng.integers(0, 4, (count, dims))
        low = rng.integers(0, 9, dims)
        high = low + rng.integers(1, 4, dims)
        walked = [
            i
            for i in range(count)
            if all(
                set(range(o, o + n)) & set(range(a, b))
                for o, n, a, b in zip(offsets[i], shapes[i], low, high, strict=True)
            )
        ]
        assert Boxes(offsets.tolist(), shapes.tolist()).touching(low.tolist(), high.tolist()) == walked
