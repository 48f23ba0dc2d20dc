"""Layouts from files that lie: each is refused by name, in bounded time and memory, or read as it says."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.errors import FormatError, MissingFileError, NotationError, ShardweaveError
from shardweave.layout import Layout, format_layout, parse_layout
from shardweave.store.layout_file import MOST_BYTES, read_layout

GOOD = """\
layout mine
mesh tp=2
tensor 0 layers.{layer[0:3]}.w (6, 4) float32
tensor 1 norm (5) float32
buffer h.{layer}.w float32
  holds 0
  dim [0:3]
  dim tp: [0:4] | [4:6]
  dim [0:4]
  stacked 1,2
buffer norm float32
  holds 1
  dim [0:5]
  stacked 0
"""


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """No text may take more than 2 GiB beyond what this process has, or half a minute."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), hard))
    began = time.monotonic()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.monotonic() - began < 30


@pytest.fixture
def read(tmp_path: Path) -> object:
    def of(text: str | bytes) -> Layout:
        path = tmp_path / "hostile.layout"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_layout(path)

    return of


def test_what_is_changed_below_is_a_layout(read) -> None:
    assert read(GOOD) == parse_layout(GOOD)
    assert format_layout(read(GOOD)) == GOOD


def swap(*pairs: str) -> str:
    text = GOOD
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    return text


MANY = ",".join(f"a{i}=1" for i in range(40))
LINES = "".join(f"buffer b{i} float32\n  holds 1\n  dim [0:5]\n  stacked 0\n" for i in range(5000))
HUGE = "9" * 5000
DOTS = " ".join(f"[{i * i + i}:{i * i + i + 1}]" for i in range(5000))


@pytest.mark.parametrize(
    ("text", "error", "equation"),
    [
        (b"\xff" + GOOD.encode(), FormatError, "byte 0"),
        (b"", NotationError, "no line 'layout name'"),
        (b"\0" * 64, NotationError, "starts no statement"),
        (b" " * (MOST_BYTES + 1), FormatError, r"bytes\(4194305 or more\) > 4194304"),
        (GOOD[: len(GOOD) // 2], ShardweaveError, "."),
        (swap("mesh tp=2", "mesh tp=1000000"), FormatError, r"ranks\(1000000\) > 16384"),
        (swap("mesh tp=2", f"mesh tp={HUGE}"), FormatError, r"ranks\(16385\) > 16384"),
        (swap("mesh tp=2", f"mesh tp=2,{MANY}"), FormatError, r"axes\(41\) > 16"),
        (swap("mesh tp=2", "mesh tp=2 | a=128,b=256"), FormatError, r"ranks\(32768\) > 16384"),
        (swap("mesh tp=2", "mesh tp=2 | a=3"), NotationError, "same number of ranks"),
        (swap("mesh tp=2", "mesh tp=-2"), NotationError, "not axis=size"),
        (swap("mesh tp=2", "mesh tp=2 @ 99999999999999"), NotationError, "can be listed"),
        (swap("[0:3]", "[0:3000000]"), FormatError, r"numbers of 'layers.*\(2999999\) > 2097152"),
        (swap("[0:3]", "[0:1999999]"), FormatError, r"arrays\(40000"),
        (
            swap("(6, 4)", "(6, 4000000000000000)", "[0:4]\n", "[0:4000000000000000]\n"),
            FormatError,
            "elements",
        ),
        (swap("dim [0:5]", f"dim [0:{HUGE}]"), NotationError, "."),
        (swap("dim [0:5]", "dim pad[1152921504606846976] [0:5]"), FormatError, "indices of 'norm'"),
        (swap("(5)", "(25000000)", "dim [0:5]", f"dim {DOTS}"), FormatError, r"blocks of 'norm'"),
        (GOOD + LINES, FormatError, r"buffers\(5002\) > 4096"),
        (GOOD + "  where tp 0" + ",1" * 20000, FormatError, r"coordinates\(20001\) > 16384"),
        (swap("tp: [0:4] | [4:6]", "tp: [0:4] | [3:6]"), ShardweaveError, "one coordinate"),
        (swap("tp: [0:4] | [4:6]", "tp: [0:4] | [5:6]"), ShardweaveError, "missing 12 of 72"),
        (swap("tp: [0:4] | [4:6]", "tp: [0:4] | [4:7]"), ShardweaveError, "6"),
        (swap("tp: [0:4] | [4:6]", "dp: [0:4] | [4:6]"), NotationError, "dp"),
        (swap("holds 1", "holds 7"), NotationError, "declared tensor"),
        (swap("buffer norm", "buffer ../../norm\nbuffer norm"), NotationError, "holds a tensor"),
        (GOOD.replace("dim", "dimm"), NotationError, "starts no statement"),
    ],
)
def test_refused_by_name(read, text: str | bytes, error: type[Exception], equation: str) -> None:
    with pytest.raises(error, match=equation) as caught:
        read(text)
    assert caught.value.hint and caught.value.rule  # type: ignore[attr-defined]


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"gone\.layout"):
        read_layout(tmp_path / "gone.layout")
    with pytest.raises(FormatError, match="folder"):
        read_layout(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="pipe"):
        read_layout(tmp_path / "pipe")


@settings(deadline=None)
@given(data=st.data())
def test_a_layout_of_which_some_bytes_are_others_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path = tmp_path_factory.mktemp("changed") / "changed.layout"
    path.write_bytes(bytes(text))
    try:
        layout = read_layout(path)
    except ShardweaveError as error:
        assert error.hint
    else:
        assert parse_layout(format_layout(layout)) == layout
