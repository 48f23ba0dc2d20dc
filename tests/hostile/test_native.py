"""Native checkpoints that are damaged, that lie, and saves that are killed at every step of them."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import native_ranks
import numpy as np
import pytest
from native_ranks import Meeting, each

from shardweave.errors import (
    DigestError,
    DtypeError,
    FormatError,
    GapError,
    IndexMismatchError,
    MissingFileError,
    OutsideError,
    OverlapError,
    PathError,
    ShardweaveError,
    TruncatedError,
)
from shardweave.plan import empty, materialise
from shardweave.store import native, native_manifest
from shardweave.store.native import Wanted
from shardweave.store.native_held import held_of
from shardweave.store.native_manifest import About
from shardweave.store.native_write import Saver

MAGIC = b"shardweave.checkpoint/1\n"
LAYOUT = native_ranks.layout(tp=2)


def save(run: Path, seed: int, *, step: int = 1, keep: int | None = None) -> None:
    """Two ranks, each a thread."""
    meeting = Meeting(2)

    def one(rank: int) -> None:
        held = list(held_of(LAYOUT, rank, materialise(LAYOUT, native_ranks.values(seed))[rank]))
        Saver(run, rank=rank, exchange=meeting.of(rank), keep=keep, fsync=False).save(
            held, About(step=step, extras={"seed": seed})
        )

    for error in each(2, one):
        if error is not None:
            raise error


def load_all(root: Path, *, headers: bool = True) -> tuple[int, dict[str, np.ndarray]]:
    """All of a checkpoint, as one rank reads it, and the seed that it says."""
    layout = native_ranks.layout()
    arrays = empty(layout, np.float32, fill=np.nan)[0]
    manifest = native.read(root, headers=headers)
    native.fill(
        manifest,
        [Wanted(b.key, b.shape, b.box, b.values.view("<u4")) for b in held_of(layout, 0, arrays)],
    )
    return manifest.records["about"].extras["seed"], arrays


def is_right(seed: int, arrays: dict[str, np.ndarray]) -> bool:
    truth = materialise(native_ranks.layout(), native_ranks.values(seed), fill=np.nan)[0]
    return all(arrays[name].tobytes() == truth[name].tobytes() for name in truth)


# --- killed -------------------------------------------------------------------------------------

POINTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "write"}


def killed_at(point: int, work: Callable[[], None]) -> bool:
    """Does the work in a process of its own that is killed at its n-th change of files, or ends before."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return True
        assert os.WEXITSTATUS(status) == 0, "the work failed by itself"
        return False
    try:  # in the child
        left = [point]

        def watch(event: str, args: tuple[Any, ...]) -> None:
            if event not in POINTS or (event == "open" and not _writes(args)):
                return
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        real = native.digest_of

        def digest_of(values: Any, write: Callable[[memoryview], None] | None = None) -> bytes:
            def half(data: memoryview) -> None:
                assert write is not None
                write(data[: len(data) // 2])
                sys.audit("write")
                write(data[len(data) // 2 :])

            return real(values, half if write is not None else None)

        native.digest_of = digest_of
        sys.addaudithook(watch)
        work()
        os._exit(0)
    finally:
        os._exit(1)


def _writes(args: tuple[Any, ...]) -> bool:
    return isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


@pytest.mark.parametrize(
    ("step", "keep"), [(2, None), (2, 1), (1, None)], ids=["next", "keep 1", "same step"]
)
def test_a_save_killed_at_any_point_leaves_a_checkpoint(step: int, keep: int | None, tmp_path: Path) -> None:
    before, run = tmp_path / "before", tmp_path / "run"
    save(before, 1)
    seeds = []
    for point in range(10_000):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(before, run)
        killed = killed_at(point, lambda: save(run, 2, step=step, keep=keep))
        seed, arrays = load_all(run)
        assert is_right(seed, arrays), point
        native.verify(native.read(run))
        seeds.append(seed)
        if not killed:
            break
        if point % 7 == 0:  # and the next save is as if nothing had been
            save(run, 3, step=step + 1, keep=keep)
            assert is_right(*load_all(run)) and load_all(run)[0] == 3
            assert not [p.name for p in run.iterdir() if p.name.startswith((".saving", ".replaced"))]
    # Many points, the old one first and the new one from some point on.
    assert len(seeds) > 30
    assert seeds == sorted(seeds) and {1, 2} == set(seeds)


# --- damaged ------------------------------------------------------------------------------------


def damage(folder: Path, rng: random.Random) -> str:
    """One random thing that disks, copies and people do to a folder; what it was."""
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    kind = rng.choice(
        ["flip", "zeros", "truncate", "append", "remove", "swap", "shift", "empty", "other step"]
    )
    at = rng.randrange(len(data))
    match kind:
        case "flip":
            data[at] ^= 1 << rng.randrange(8)
        case "zeros":
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        case "truncate":
            del data[at:]
        case "append":
            data += rng.randbytes(8)
        case "shift":
            data = data[:at] + b"\0" + data[at:-1]
        case "empty":
            data = bytearray()
        case "remove":
            path.unlink()
            return f"{kind} {path.name}"
        case "swap":
            other = rng.choice(sorted(p for p in folder.iterdir() if p != path))
            mine, theirs = path.read_bytes(), other.read_bytes()
            path.write_bytes(theirs)
            other.write_bytes(mine)
            return f"{kind} {path.name} {other.name}"
        case "other":
            shutil.copyfile(folder.parent.parent / "other" / "step-00000001" / path.name, path)
            return f"{kind} {path.name}"
    path.write_bytes(data)
    return f"{kind} {path.name} {at}"


def test_random_damage_is_seen_or_harmless(tmp_path: Path) -> None:
    save(tmp_path / "good", 1)
    save(tmp_path / "other", 2)
    seen = 0
    for number in range(90):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(tmp_path / "good", run)
        what = damage(run / "step-00000001", random.Random(number))
        found = []
        for headers in (True, False):
            try:
                seed, arrays = load_all(run, headers=headers)
            except ShardweaveError:
                found.append("refused")
            else:
                assert seed == 1 and is_right(1, arrays), what
                found.append("right")
        seen += found[0] == "refused"
        # What ranks read without looking at headers may only be more: a header that says nothing to them.
        assert found[0] == "refused" or found[1] == "right", (what, found)
    assert seen >= 60, seen


# --- lies ---------------------------------------------------------------------------------------


def resigned(folder: Path, change: Callable[[list[Any]], None]) -> None:
    """The manifest as somebody writes it who knows its digest; decoded and encoded as plain lists."""
    path = folder / native.MANIFEST
    body = msgspec.msgpack.decode(path.read_bytes()[len(MAGIC) + 16 :])
    change(body)
    data = msgspec.msgpack.encode(body)
    path.write_bytes(MAGIC + hashlib.blake2b(data, digest_size=16).digest() + data)


# The fields of a manifest, of a tensor and of a box, by number.
DATA, EXTRAS, FILES, TENSORS = 3, 4, 5, 6
KEY, DTYPE, SHAPE, EXTENTS = range(4)
OFFSET, SIZE, FILE, START, DIGEST = range(5)


def first(body: list[Any]) -> list[Any]:
    return next(t for t in body[TENSORS] if len(t[SHAPE]) == 2)  # type: ignore[no-any-return]


def put(place: Callable[[list[Any]], list[Any]], at: int, value: Any) -> Callable[[list[Any]], None]:
    def change(body: list[Any]) -> None:
        place(body)[at] = value

    return change


def box(body: list[Any]) -> list[Any]:
    return first(body)[EXTENTS][0]  # type: ignore[no-any-return]


def deep(body: list[Any]) -> None:
    value: Any = 1
    for _ in range(600):
        value = [value]
    body[EXTRAS]["x"] = value


LIES: dict[
    str, tuple[Callable[[list[Any]], None], type[ShardweaveError] | tuple[type[ShardweaveError], ...]]
] = {
    "a path out": (put(lambda b: b[FILES][0], 0, "../../secret"), PathError),
    "an absolute path": (put(lambda b: b[FILES][0], 0, "/etc/passwd"), PathError),
    "a file twice": (put(lambda b: b[FILES][0], 0, "rank_00001.safetensors"), FormatError),
    "another size": (put(lambda b: b[FILES][0], 1, 10), FormatError),
    "a larger size": (put(lambda b: b[FILES][0], 1, 10**9), TruncatedError),
    "a box in no file": (put(box, FILE, 99), FormatError),
    "a box past its file": (put(box, START, 1 << 50), OutsideError),
    "a box at other bytes": (put(box, START, 0), (OverlapError, IndexMismatchError)),
    "a box of another file": (put(box, FILE, 1), (OverlapError, IndexMismatchError, OutsideError)),
    "a negative number": (put(box, START, -8), FormatError),
    "a number of many digits": (put(box, START, 1 << 62), FormatError),
    "a box elsewhere": (put(box, OFFSET, [1, 0]), (OverlapError, OutsideError)),
    "a box of other dims": (put(box, SIZE, [1, 1, 1]), OutsideError),
    "a smaller box": (put(box, SIZE, [1, 1]), GapError),
    "no box": (put(first, EXTENTS, []), GapError),
    "a larger tensor": (put(first, SHAPE, [1 << 40, 1 << 40]), GapError),
    "many dims": (put(first, SHAPE, [1] * 100), FormatError),
    "a dtype that is none": (put(first, DTYPE, "float7"), DtypeError),
    "another dtype": (put(first, DTYPE, "float64"), (OverlapError, IndexMismatchError, OutsideError)),
    "a key that is none": (put(first, KEY, "model/a/b"), FormatError),
    "a key of a state": (put(first, KEY, "optim/a/b"), IndexMismatchError),
    "a short digest": (put(box, DIGEST, b"short"), FormatError),
    "another digest": (put(box, DIGEST, bytes(16)), DigestError),
    "a number for text": (put(first, KEY, 7), FormatError),
    "a field more": (lambda b: b.append(1), FormatError),
    "a field less": (lambda b: b.pop(), FormatError),
    "a tensor twice": (lambda b: b[TENSORS].append(b[TENSORS][0]), FormatError),
    "a tensor less": (lambda b: b[TENSORS].pop(), IndexMismatchError),
    "bytes beside tensors": (lambda b: b[EXTRAS].update(x=b"abc"), FormatError),
    "an extension type": (lambda b: b[DATA].update(x=msgspec.msgpack.Ext(5, b"abc")), FormatError),
    "values without end": (deep, FormatError),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    (tmp_path / "secret").write_bytes(b"s" * 4096)
    change, kind = LIES[lie]
    resigned(tmp_path / "run" / "step-00000001", change)
    with pytest.raises(kind):
        load_all(tmp_path / "run")


def test_a_lie_that_nobody_tells_is_read(tmp_path: Path) -> None:
    """Decoded and encoded again without a change it is read: what is refused above is the lie."""
    save(tmp_path / "run", 1)
    resigned(tmp_path / "run" / "step-00000001", lambda body: None)
    assert is_right(*load_all(tmp_path / "run"))


def test_other_versions_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-00000001" / native.MANIFEST
    data = path.read_bytes()
    path.write_bytes(data.replace(b"checkpoint/1", b"checkpoint/2", 1))
    with pytest.raises(FormatError, match="shardweave that wrote it"):
        native.read(tmp_path)
    path.write_bytes(b"PK" + data)
    with pytest.raises(FormatError, match="not what its name says"):
        native.read(tmp_path)
    path.write_bytes(data)
    monkeypatch.setattr(native, "MOST_BYTES", 100)
    with pytest.raises(FormatError, match="small beside"):
        native.read(tmp_path)
    monkeypatch.setattr(native_manifest, "MOST_BYTES", 100)
    with pytest.raises(ShardweaveError, match="small beside"):
        save(tmp_path, 2)


def test_links_and_pipes(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    folder = tmp_path / "run" / "step-00000001"
    path = folder / "rank_00001.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PathError, match="elsewhere"):
        load_all(tmp_path / "run")
    path.unlink()
    with pytest.raises(MissingFileError, match="rank_00001"):
        load_all(tmp_path / "run")
    os.mkfifo(path)
    with pytest.raises(FormatError, match="regular file"):
        load_all(tmp_path / "run")
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    assert is_right(*load_all(tmp_path / "run"))
    (folder / native.MANIFEST).unlink()
    os.mkfifo(folder / native.MANIFEST)
    with pytest.raises(ShardweaveError):
        load_all(tmp_path / "run")
