"""Files are read on all cores where this process may be copied, and nothing is lost where a copy dies."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardweave.lint import cache as cache_module
from shardweave.lint import class_cache, many
from shardweave.lint.cache import Cache

SIZES = [1_000_000, 10, 500_000, 900_000, 20, 700_000]


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two processes, whatever this machine and this process are."""
    monkeypatch.setattr(many, "cores", lambda sizes: 2)
    yield
    with pytest.raises(ChildProcessError):
        many.os.waitpid(-1, many.os.WNOHANG)  # nobody is left


def here(item: int) -> bytes:
    return f"{item} {many.os.getpid()}".encode()


def test_shares_are_even_and_answers_in_order() -> None:
    said = [part.split() for part in many.each(here, range(6), sizes=SIZES)]
    assert [int(number) for number, _ in said] == list(range(6))
    loads: dict[bytes, int] = {}
    for (_, process), size in zip(said, SIZES, strict=True):
        loads[process] = loads.get(process, 0) + size
    assert sorted(loads.values()) == [1_500_030, 1_600_000]


def test_long_answers_do_not_stop_up_the_pipe() -> None:
    assert many.each(lambda item: bytes([item]) * 3_000_000, range(6), sizes=SIZES)[5] == b"\5" * 3_000_000


def test_what_a_process_leaves_is_done_here() -> None:
    parent = many.os.getpid()

    def killed(item: int) -> bytes:
        if many.os.getpid() != parent:
            many.os.kill(many.os.getpid(), many.signal.SIGKILL)
        return here(item)

    assert {part.split()[1] for part in many.each(killed, range(6), sizes=SIZES)} == {str(parent).encode()}


def test_an_error_is_raised_here() -> None:
    def fails(item: int) -> bytes:
        raise ValueError(item)

    with pytest.raises(ValueError):
        many.each(fails, range(6), sizes=SIZES)


def test_no_further_process_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError

    monkeypatch.setattr(many.os, "fork", fork)
    assert len(many.each(here, range(6), sizes=SIZES)) == 6


def test_a_process_with_threads_is_never_copied() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import threading; from shardweave.lint.many import cores; one = cores([10**9]);"
            "stop = threading.Event(); threading.Thread(target=stop.wait).start();"
            "print(one >= 1, cores([10**9]), cores([1000])); stop.set()",
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "True 1 1\n"


def test_a_damaged_cache_is_none(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.keep("x", {"a": b"[1]", "b": b'["\\u00e4 "]'})
    assert cache.rows("x") == {"a": b"[1]", "b": b'["\\u00e4 "]'}
    (place,) = tmp_path.glob("*.rows")
    data = place.read_bytes()
    for damaged in (data[:-2], data.replace(b"[1]", b"[2]"), b"", b"\xff\n", data + b"c [2]\n"):
        place.write_bytes(damaged)
        assert cache.rows("x") == {}
    assert cache.rows("y") == {} and Cache(None).rows("x") == {}


@pytest.mark.parametrize(
    ("begin", "parts"), [("search", cache_module._PARTS), ("class_cache", class_cache._PARTS)]
)
def test_a_cache_forgets_when_any_code_that_it_rests_on_changes(begin: str, parts: tuple[str, ...]) -> None:
    folder = Path(many.__file__).parent
    seen, waiting = {begin}, [begin]
    while waiting:
        text = (folder / f"{waiting.pop()}.py").read_text(encoding="utf-8")
        for name in re.findall(r"^ *from shardweave\.lint\.(\w+) import", text, re.M):
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    assert seen <= set(parts), seen - set(parts)
