"""Conversions that are killed at any moment: resumed to the same bytes, and never taken for complete."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from shardweave.convert import Geometry, convert, open_checkpoint, prepare
from shardweave.convert.staging import FOLDER, Staging, require_finished, reserve, unfinished
from shardweave.errors import ExistsError, FormatError, JournalError, ShardweaveError, WriteError

DATA = Path(__file__).parents[1] / "data"
DRIVER = str(Path(__file__).with_name("convert_driver.py"))
CONFIG = str(DATA / "mc_gqa_truth_hf/config.json")
Files = dict[str, bytes]

# By name: the source, and what is made of it.
CASES: dict[str, dict[str, Any]] = {
    "hf": {"src": "mc_gqa_tp4/torch_dist", "to": "hf",
           "choices": {"config": CONFIG, "max_file_bytes": 90_000}},
    "megatron": {"src": "mc_moe_truth_hf", "to": "megatron",
                 "choices": {"geometry": {"tp": 2, "ep": 2, "etp": 1}, "max_file_bytes": 90_000}},
}  # fmt: skip
VISIBLE = (".metadata", "model.safetensors", "model.safetensors.index.json")
"""What loaders look for: torch and Megatron the first, transformers the others."""


class Driver:
    """Forks a conversion for each order."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._orders: IO[str] = self._process.stdin
        self._answers: IO[str] = self._process.stdout
        self._running = False

    def start(self, **order: Any) -> int:
        if self._running:  # a test that failed has left one behind: its answer is not ours
            self.end()
        self._running = True
        self._orders.write(json.dumps(order) + "\n")
        self._orders.flush()
        return int(self._answers.readline())

    def end(self) -> str:
        """How it ended: done, killed, or the error."""
        lines = [self._answers.readline().strip()]
        while lines[-1] not in ("done", "killed", "refused"):
            lines.append(self._answers.readline().strip())
            assert lines[-1], "the driver died"
        self._running = False
        return lines[-2] if lines[-1] == "refused" else lines[-1]

    def close(self) -> None:
        self._orders.close()
        assert self._process.wait(timeout=30) == 0


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    running = Driver()
    yield running
    running.close()


def files(folder: Path) -> Files:
    """What a folder holds beside the staging folder."""
    if not folder.exists():
        return {}
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and FOLDER not in path.relative_to(folder).parts
    }


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


class Case:
    """A source of its own in a folder of its own, and what an uninterrupted conversion makes of it."""

    def __init__(self, folder: Path, name: str) -> None:
        case = CASES[name]
        self.folder, self.src, self.dst = folder, folder / "src", folder / "dst"
        shutil.copytree(DATA / case["src"], self.src)
        self.order = {
            "src": str(self.src),
            "dst": str(self.dst),
            "to": case["to"],
            "choices": case["choices"],
        }
        choices = dict(case["choices"])
        if "geometry" in choices:
            choices["geometry"] = Geometry(**choices["geometry"])
        if "config" in choices:
            choices["config"] = Path(choices["config"])
        self.job = prepare(self.src, to=case["to"], **choices)
        convert(self.job, folder / "whole", fsync=False)
        self.expected = files(folder / "whole")
        assert len(self.expected) > 8
        shutil.rmtree(folder / "whole")
        self.source = snapshot(self.src)

    def guard(self, old: Files | None = None) -> bool:
        """Nothing but the target changed, and it is either not seen as a checkpoint, or a whole one.

        Returns:
            Whether shardweave sees a checkpoint.
        """
        assert snapshot(self.src) == self.source
        assert {path.name for path in self.folder.iterdir()} <= {"src", "dst"}
        found = files(self.dst)
        if set(found) & set(VISIBLE):
            assert found in (self.expected, old)
        try:
            require_finished(self.dst)
        except FormatError:
            with pytest.raises(FormatError, match="a conversion into it was not finished"):
                open_checkpoint(self.dst)
            with pytest.raises(FormatError, match="a conversion into it was not finished"):
                prepare(self.dst, to="hf")
            return False
        assert found in ({}, self.expected, old)
        return bool(found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_killed_at_random_and_resumed_to_the_same_bytes(driver: Driver, name: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    case = Case(tmp_path, name)
    kills = resumed = 0
    while kills < 30:
        pid = driver.start(**case.order, slow_s=0.003)
        # Every other time only where there is work to leave behind, however slow the machine is.
        while kills % 2 and alive(pid) and not begun(case.dst):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.25))
        # It may end between the question and the kill.
        with contextlib.suppress(ProcessLookupError):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        ended = driver.end()
        if ended == "killed":
            kills += 1
            if case.guard():
                assert files(case.dst) == case.expected
                shutil.rmtree(case.dst)
            else:
                resumed += begun(case.dst)
        else:
            assert ended == "done"
            assert files(case.dst) == case.expected and not (case.dst / FOLDER).exists()
            shutil.rmtree(case.dst)
    driver.start(**case.order)
    assert driver.end() == "done" and case.guard()
    assert files(case.dst) == case.expected
    print(f"{resumed} of {kills} kills left work behind")
    assert resumed > 3


def begun(folder: Path) -> bool:
    """Whether a conversion into the folder has written down that an array is done."""
    try:
        return b"xxh3" in (folder / FOLDER / "journal.jsonl").read_bytes()
    except FileNotFoundError:
        return False


def alive(pid: int) -> bool:
    """Whether the forked conversion still runs; its parent has not been told to wait for another."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("over", ["nothing", "an old checkpoint"])
def test_killed_before_every_step(driver: Driver, name: str, over: str, tmp_path: Path) -> None:
    """Every call that makes, renames, removes or syncs something, in turn."""
    case = Case(tmp_path, name)
    order = {**case.order, "force": over != "nothing"}
    old = files(DATA / "mc_gqa_truth_hf") if order["force"] else None
    seen, died, step = set(), True, 0
    while died:
        shutil.rmtree(case.dst, ignore_errors=True)
        if old:
            shutil.copytree(DATA / "mc_gqa_truth_hf", case.dst)
        driver.start(**order, die_at=step)
        died = driver.end() == "killed"
        whole = case.guard(old)
        seen.add(("old" if files(case.dst) == old else "new") if whole else "refused")
        if files(case.dst) != case.expected or (case.dst / FOLDER / "ready.json").exists():
            if step % 3 == 0:  # the next run dies as well
                driver.start(**order, die_at=step % 7)
                driver.end()
                case.guard(old)
            driver.start(**order)
            assert driver.end() == "done" or files(case.dst) == case.expected
        assert case.guard(old) and files(case.dst) == case.expected
        step += 1
    assert step > 25
    assert seen == ({"old", "new", "refused"} if old else {"new", "refused"})


def test_a_half_published_target_gives_way_to_another_conversion(driver: Driver, tmp_path: Path) -> None:
    """Without --force it is refused; with it, a kill at any step leaves no mixture that looks whole."""
    case, moe = Case(tmp_path, "hf"), CASES["megatron"]
    second = {"src": str(DATA / moe["src"]), "dst": str(case.dst), "to": "megatron",
              "choices": {**moe["choices"], "max_file_bytes": 300_000}}  # fmt: skip
    step, half = 0, False
    while not half:
        shutil.rmtree(case.dst, ignore_errors=True)
        driver.start(**case.order, die_at=step)
        assert driver.end() == "killed"
        half = (case.dst / FOLDER / "ready.json").exists() and len(files(case.dst)) > 3
        step += 1
    assert not set(files(case.dst)) & set(VISIBLE)
    shutil.copytree(case.dst, tmp_path / "half")
    driver.start(**second)
    assert "JournalError: an unfinished conversion is continued with the same source" in driver.end()
    ended, die_at, finished = "killed", 0, 0
    while ended == "killed":
        shutil.rmtree(case.dst)
        shutil.copytree(tmp_path / "half", case.dst)
        driver.start(**second, force=True, die_at=die_at)
        ended = driver.end()
        found = files(case.dst)
        weights = {name.rsplit(".")[-1] for name in found} & {"safetensors", "distcp"}
        if not unfinished(case.dst):
            assert not weights or (weights == {"distcp"} and ".metadata" in found)
            finished += bool(weights)
        assert ".metadata" not in found or weights == {"distcp"}
        die_at += 1
    assert ended == "done" and die_at > 25 and finished > 0


# --- what lies in the staging folder --------------------------------------------------------------


class Full:
    """A disk with room for some writes."""

    def __init__(self, patch: pytest.MonkeyPatch, writes: int) -> None:
        self._write, self._left = os.pwrite, writes
        patch.setattr(os, "pwrite", self)

    def __call__(self, descriptor: int, data: Any, offset: int) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError(28, "No space left on device")
        return self._write(descriptor, data, offset)


def interrupted(case: Case, writes: int = 20) -> None:
    """A conversion that a full disk stopped."""
    with pytest.MonkeyPatch.context() as patch:
        Full(patch, writes)
        with pytest.raises(
            WriteError, match=r"at byte \d+: No space left on device\. hint: make room"
        ) as error:
            convert(case.job, case.dst, memory_bytes=1 << 18, workers=2)
    assert isinstance(error.value, OSError)
    assert not files(case.dst) and not case.guard()


@pytest.mark.parametrize("name", CASES)
def test_a_full_disk_is_said_and_nothing_is_published(name: str, tmp_path: Path) -> None:
    case = Case(tmp_path, name)
    for writes in (0, 1, 7):
        interrupted(case, writes)
    report = convert(case.job, case.dst)
    assert files(case.dst) == case.expected and report.resumed > 0


@pytest.mark.parametrize("name", CASES)
def test_a_disk_without_room_is_said_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own call is asked for all bytes of every file, and its refusal is what a user reads."""
    case = Case(tmp_path, name)
    asked: list[int] = []

    class NoRoom:
        def __init__(self, name: None, *, use_errno: bool) -> None:
            pass

        def fallocate(self, descriptor: int, mode: int, offset: Any, size: Any) -> int:
            assert mode == offset.value == 0 and size.value == os.fstat(descriptor).st_size
            asked.append(size.value)
            ctypes.set_errno(code)
            return -1

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", NoRoom)
        patch.setattr(os, "pwrite", lambda *args: pytest.fail("a byte is written"))
        code = errno.ENOSPC
        with pytest.raises(
            WriteError, match=r"(safetensors|distcp): No space left on device\. hint: make room"
        ):
            convert(case.job, case.dst)
    assert len(asked) == 1 and not case.guard()
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", NoRoom)
        code = errno.EOPNOTSUPP  # a file system that cannot: then writing tells
        convert(case.job, case.dst)
    assert files(case.dst) == case.expected
    (tmp_path / "laid out").mkdir()
    weights = case.job.target.allocate(tmp_path / "laid out").files.values()
    assert sorted(asked[1:]) == sorted(weights) and len(weights) > 1


def test_room_is_reserved(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1 << 20):
        with path.open("wb") as file:
            file.truncate(size)
        reserve(path)
        assert path.read_bytes() == bytes(size)
    ready = path.stat().st_blocks * 512
    assert ready >= 1 << 20 or ready == 0, "a file system reserves all of a file, or cannot do it"


def test_a_disk_that_fills_up_outside_the_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, "hf")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(WriteError, match="No space left on device"):
            convert(case.job, case.dst)
    assert not case.guard()
    convert(case.job, case.dst)
    assert files(case.dst) == case.expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "damage",
    ["torn line", "garbage line", "garbage within", "no journal", "empty journal", "flipped bytes",
     "a lost file", "a short file", "a leftover"],
)  # fmt: skip
def test_what_is_damaged_is_done_again(name: str, damage: str, tmp_path: Path) -> None:
    case = Case(tmp_path, name)
    interrupted(case)
    journal, staged = case.dst / FOLDER / "journal.jsonl", case.dst / FOLDER / "new"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > 5
    kept = len(lines)
    if damage == "torn line":
        journal.write_bytes(b"".join(lines) + lines[0][:-9])
    elif damage == "garbage line":
        journal.write_bytes(b"".join(lines) + b"\x00\xff\n" + lines[0])
    elif damage == "garbage within":
        journal.write_bytes(b"".join([*lines[:2], b'{"key": 3}\n', *lines[2:]]))
        kept = 2
    elif damage == "no journal":
        journal.unlink()
        kept = 0
    elif damage == "empty journal":
        journal.write_bytes(b"")
        kept = 0
    elif damage == "a leftover":
        (case.dst / FOLDER / "layout").mkdir()
        (case.dst / FOLDER / "layout" / "model.safetensors").write_bytes(b"of a killed run")
    else:
        entry = json.loads(lines[3])
        place = manifest_of(case).tensors[entry["key"]].extents[entry["extent"]]
        if damage == "flipped bytes":
            with (staged / place.file).open("r+b") as file:
                file.seek(place.start + 5)
                byte = file.read(1)[0]
                file.seek(place.start + 5)
                file.write(bytes([byte ^ 1]))
            kept -= 1
        elif damage == "a lost file":
            (staged / place.file).unlink()
            kept = -1
        else:
            with (staged / place.file).open("r+b") as file:
                file.truncate(place.start + 1)
            kept = -1
    report = convert(case.job, case.dst)
    assert files(case.dst) == case.expected
    assert report.resumed == kept if kept >= 0 else 0 <= report.resumed < len(lines)


def manifest_of(case: Case) -> Any:
    scratch = case.folder / "scratch"
    scratch.mkdir()
    manifest = case.job.target.allocate(scratch)
    shutil.rmtree(scratch)
    return manifest


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"max_file_bytes": 80_000}, "target arrays"),
        ({"dtype": "bfloat16"}, "target layout"),
        ({"to": "megatron"}, "format"),
        ({"config": {**json.loads(Path(CONFIG).read_text()), "rope_theta": 5.0}}, "config"),
        ({"touched": True}, "source files"),
        ({"src": DATA / "mc_gqa_tp2pp2/torch_dist"}, "source"),
    ],
    ids=["file size", "dtype", "format", "config", "source changed", "source"],
)
def test_the_journal_of_another_conversion_is_refused(
    other: dict[str, Any], named: str, tmp_path: Path
) -> None:
    case = Case(tmp_path, "hf")
    interrupted(case)
    staged = snapshot(case.dst)
    other = dict(other)
    src = other.pop("src", case.src)
    if other.pop("touched", False):
        os.utime(case.src / "__0_0.distcp", ns=(1, 1))
    job = prepare(src, **{"to": "hf", "config": Path(CONFIG), "max_file_bytes": 90_000, **other})
    with pytest.raises(JournalError, match=rf"same source and options.*{named}: .* then, .* now"):
        convert(job, case.dst)
    assert snapshot(case.dst) == staged
    convert(job, case.dst, force=True)
    require_finished(case.dst)
    assert files(case.dst) != {} and not (case.dst / FOLDER).exists()


def test_a_published_half_of_another_conversion_is_not_taken_for_this_one(
    driver: Driver, tmp_path: Path
) -> None:
    """A ready target of other options must not be finished under this one's name."""
    case = Case(tmp_path, "hf")
    step = 0
    while not (case.dst / FOLDER / "ready.json").exists():
        shutil.rmtree(case.dst, ignore_errors=True)
        driver.start(**case.order, die_at=step)
        assert driver.end() == "killed"
        step += 1
    job = prepare(case.src, to="hf", config=Path(CONFIG), dtype="bfloat16")
    with pytest.raises(JournalError, match="target layout"):
        convert(job, case.dst)
    assert not case.guard()
    convert(case.job, case.dst)
    assert files(case.dst) == case.expected


def test_two_at_once(driver: Driver, tmp_path: Path) -> None:
    case = Case(tmp_path, "hf")
    driver.start(**case.order, slow_s=0.02)
    while not (case.dst / FOLDER / "journal.jsonl").exists():
        time.sleep(0.005)
    for force in (False, True):
        with pytest.raises(ExistsError, match=r"one conversion at a time.*another process holds it"):
            convert(case.job, case.dst, force=force)
    assert driver.end() == "done"
    assert files(case.dst) == case.expected
    with pytest.raises(ExistsError, match=r"a target is empty.*it holds config\.json"):
        convert(case.job, case.dst)
    assert case.guard()


def test_a_lock_that_went_with_a_finished_conversion_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the lock's file and locking it, the other conversion finishes and removes it."""
    dst = tmp_path / "dst"
    lock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        shutil.rmtree(dst / FOLDER)
        (dst / "model.safetensors").write_bytes(b"complete")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ExistsError, match="one conversion at a time"):
        Staging(dst, force=False)
    assert files(dst) == {"model.safetensors": b"complete"}


def test_a_source_that_may_not_be_written(tmp_path: Path) -> None:
    case = Case(tmp_path, "megatron")
    paths = [*case.src.iterdir(), case.src]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    opened: list[tuple[str, int]] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and watching and isinstance(args[0], str | Path):
            opened.append((str(args[0]), args[2]))

    watching = True
    sys.addaudithook(watch)
    try:
        convert(case.job, case.dst)
    finally:
        watching = False
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert files(case.dst) == case.expected and case.guard()
    ours = [flags for name, flags in opened if name.startswith(str(case.src))]
    assert ours and not any(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) for flags in ours)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("workers", "memory_bytes", "write_bytes"),
    [(1, 1 << 16, 1 << 19), (1, 1 << 27, 1001), (5, 1 << 20, 4096)],
)
def test_the_bytes_do_not_depend_on_workers_memory_and_calls(
    name: str,
    workers: int,
    memory_bytes: int,
    write_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, write, sizes = Case(tmp_path, name), os.pwrite, set[int]()

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        sizes.add(len(data))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr("shardweave.convert.execute._WRITE_BYTES", write_bytes)
    told: list[tuple[int, int]] = []
    report = convert(
        case.job,
        case.dst,
        workers=workers,
        memory_bytes=memory_bytes,
        progress=lambda a, b: told.append((a, b)),
    )
    assert files(case.dst) == case.expected
    done = [a for a, _ in told]
    assert done == sorted(done) and done[-1] == report.written_bytes == told[-1][1]
    assert max(sizes) <= write_bytes and (max(sizes) == write_bytes or write_bytes > 4096)


def test_an_error_leaves_an_existing_folder_as_it_was(tmp_path: Path) -> None:
    case = Case(tmp_path, "hf")
    case.dst.mkdir()
    (case.dst / "notes.txt").write_text("mine")
    with pytest.raises(ShardweaveError, match=r"a target is empty.*notes\.txt"):
        convert(case.job, case.dst)
    assert files(case.dst) == {"notes.txt": b"mine"} and not (case.dst / FOLDER).exists()
