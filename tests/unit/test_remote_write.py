"""Checkpoints to URLs: the order of files, what is kept and what is sent again, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardweave.errors import (
    ExistsError,
    FormatError,
    JournalError,
    MissingPackageError,
    PathError,
    RemoteError,
    ShardweaveError,
)
from shardweave.store import remote_write
from shardweave.store.remote import fetch
from shardweave.store.remote_write import look, upload

LAST = ("index.json", "latest")
FILES = {
    "a.safetensors": b"a" * 700,
    "config.json": b"{}",
    "index.json": b"{...}",
    "sub/deep/b.safetensors": b"b" * 901,
    "empty": b"",
}
URL, PATH = "memory://bucket/run", "/bucket/run"
MARK = f"{PATH}/.shardweave/upload.json"


class Recorded(MemoryFileSystem):
    """A store that notes what is done to it, and may fail, lie or know checksums."""

    protocol = "memory"
    calls: ClassVar[list[tuple[str, str]]] = []
    fail_at: str = ""
    lie: Callable[[dict[str, Any]], dict[str, Any]] = staticmethod(lambda info: info)

    def put_file(self, lpath: str, rpath: str, **given: Any) -> None:
        self.calls.append(("put", rpath.removeprefix(f"{PATH}/")))
        if self.fail_at and rpath.endswith(self.fail_at):
            raise PermissionError("key=TOPSECRET may not write s3://me:TOPSECRET@bucket/x?sig=TOPSECRET")
        super().put_file(lpath, rpath, **given)

    def rm_file(self, path: str) -> None:
        self.calls.append(("rm", path.removeprefix(f"{PATH}/")))
        super().rm_file(path)

    def info(self, path: str, **given: Any) -> dict[str, Any]:
        return type(self).lie(dict(super().info(path, **given)))


@pytest.fixture(autouse=True)
def fs(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(Recorded, "calls", [])
    found = Recorded(skip_instance_cache=True)
    monkeypatch.setattr(
        fsspec.core,
        "url_to_fs",
        lambda url: (found, found._strip_protocol(f"memory://{url.partition('://')[2]}")),
    )
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "out"


def held(fs: MemoryFileSystem) -> dict[str, bytes]:
    return {path.removeprefix(f"{PATH}/"): fs.cat_file(path) for path in fs.find(PATH)}


def put(fs: Recorded) -> list[str]:
    return [name for call, name in fs.calls if call == "put"]


def test_all_files_and_what_makes_a_reader_see_them_last(fs: Recorded, folder: Path) -> None:
    told: list[tuple[int, int]] = []
    assert look(URL, identity="x") == []
    kept = upload(folder, URL, identity="x", last=LAST, progress=lambda *now: told.append(now))
    assert kept == 0 and held(fs) == FILES
    assert put(fs)[-1] == "index.json" and sorted(put(fs)) == sorted(FILES)
    total = sum(map(len, FILES.values()))
    assert told == sorted(told) and told[0] == (0, total) and told[-1] == (total, total)
    assert not fs.exists(f"{PATH}/.shardweave")


def test_to_a_file_system(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    upload(folder, f"file://{tmp_path}/far/away", identity="x", last=LAST)
    far = tmp_path / "far" / "away"
    found = {p.relative_to(far).as_posix(): p.read_bytes() for p in far.rglob("*") if p.is_file()}
    assert found == FILES and not (far / ".shardweave").exists()


@pytest.mark.parametrize("at", sorted(FILES))
def test_stopped_at_any_file_it_goes_on_and_no_reader_sees_it(
    fs: Recorded, folder: Path, tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_write, "_WORKERS", 1)
    fs.fail_at = at
    with pytest.raises(RemoteError, match="a place at a URL can be written"):
        upload(folder, URL, identity="x", last=LAST)
    before = held(fs)
    assert at not in before and "index.json" not in before
    with pytest.raises(FormatError, match="a conversion into it was not finished"):
        fetch(URL, tmp_path / "copy")
    fs.fail_at, fs.calls[:] = "", []
    assert upload(folder, URL, identity="x", last=LAST) == len(before) - 1
    assert held(fs) == FILES
    assert sorted(put(fs)) == sorted(FILES.keys() - before.keys())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda fs: fs.pipe_file(f"{PATH}/a.safetensors", b"a" * 699),  # another size
        lambda fs: fs.rm_file(f"{PATH}/a.safetensors"),
        lambda fs: fs.pipe_file(
            MARK, b'{"identity": "x", "files": {"a.safetensors": [700, "other digest"]}}'
        ),
        lambda fs: fs.pipe_file(MARK, b'{"identity": "x", "files": {}}'),
        lambda fs: fs.pipe_file(MARK, b'{"identity": "x", "files": {"../../up": [1, "d"]}}'),
    ],
)
def test_what_is_not_as_the_mark_says_is_sent_again(
    fs: Recorded, folder: Path, spoil: Callable[[Recorded], None]
) -> None:
    fs.fail_at = "index.json"
    with pytest.raises(RemoteError):
        upload(folder, URL, identity="x", last=LAST)
    spoil(fs)
    fs.fail_at, fs.calls[:] = "", []
    upload(folder, URL, identity="x", last=LAST)
    assert "a.safetensors" in put(fs) and held(fs) == FILES


def test_files_that_changed_here_are_sent_again(fs: Recorded, folder: Path) -> None:
    fs.fail_at = "index.json"
    with pytest.raises(RemoteError):
        upload(folder, URL, identity="x", last=LAST)
    (folder / "a.safetensors").write_bytes(b"c" * 700)
    fs.fail_at = ""
    upload(folder, URL, identity="x", last=LAST)
    assert held(fs) == {**FILES, "a.safetensors": b"c" * 700}


def test_what_is_there_is_kept_without_force(fs: Recorded, folder: Path) -> None:
    fs.pipe_file(f"{PATH}/mine", b"kept")
    for call in (look, lambda *a, **k: upload(folder, *a, last=LAST, **k)):
        with pytest.raises(ExistsError, match="a target is empty: memory://bucket/run: it holds mine"):
            call(URL, identity="x")
    assert held(fs) == {"mine": b"kept"}


def test_with_force_the_old_index_goes_first_and_nothing_old_stays(fs: Recorded, folder: Path) -> None:
    old = {"index.json": b"old", "z/old": b"old", "a.safetensors": b"old", "latest": b"old"}
    for name, data in old.items():
        fs.pipe_file(f"{PATH}/{name}", data)
    fs.pipe_file("/bucket/run2/other", b"not ours")
    assert look(URL, identity="x", force=True) == sorted(old)
    upload(folder, URL, identity="x", last=LAST, force=True)
    assert held(fs) == FILES and fs.cat_file("/bucket/run2/other") == b"not ours"
    removed = [name for call, name in fs.calls if call == "rm"]
    assert removed[:2] == ["index.json", "latest"]
    assert fs.calls.index(("rm", "latest")) < fs.calls.index(("put", "a.safetensors"))


def test_another_unfinished_upload_is_not_mixed_with_this_one(fs: Recorded, folder: Path) -> None:
    fs.fail_at = "index.json"
    with pytest.raises(RemoteError):
        upload(folder, URL, identity="other", last=LAST)
    fs.fail_at = ""
    with pytest.raises(JournalError, match="an unfinished upload is continued"):
        look(URL, identity="x")
    (folder / "config.json").unlink()
    upload(folder, URL, identity="x", last=LAST, force=True)
    assert held(fs) == {name: data for name, data in FILES.items() if name != "config.json"}


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b'{"identity": "x"}', b'{"identity": "x", "files": {"a": 1}}']
)
def test_a_mark_that_cannot_be_read_is_of_something_else(fs: Recorded, folder: Path, text: bytes) -> None:
    fs.pipe_file(MARK, text)
    with pytest.raises(JournalError):
        look(URL, identity="x")
    upload(folder, URL, identity="x", last=LAST, force=True)
    assert held(fs) == FILES


def test_a_file_of_another_size_there_is_seen(fs: Recorded, folder: Path) -> None:
    def lie(info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "size": 699} if info["name"].endswith("a.safetensors") else info

    Recorded.lie = staticmethod(lie)
    try:
        with pytest.raises(RemoteError, match=r"size\(699\) there, size\(700\) here"):
            upload(folder, URL, identity="x", last=LAST)
    finally:
        Recorded.lie = staticmethod(lambda info: info)
    assert "index.json" not in held(fs)


@pytest.mark.parametrize("key", ["md5Hash", "content_md5"])
@pytest.mark.parametrize("right", [True, False])
def test_a_checksum_there_is_compared(fs: Recorded, folder: Path, key: str, right: bool) -> None:
    def know(info: dict[str, Any]) -> dict[str, Any]:
        if info["type"] != "file" or ".shardweave" in info["name"]:
            return info
        digest = hashlib.md5(fs.cat_file(info["name"]) + (b"" if right else b"!")).digest()
        return {**info, key: base64.b64encode(digest).decode() if key == "md5Hash" else bytearray(digest)}

    Recorded.lie = staticmethod(know)
    try:
        if right:
            upload(folder, URL, identity="x", last=LAST)
        else:
            with pytest.raises(RemoteError, match=r"has the bytes that were written to it: .*md5"):
                upload(folder, URL, identity="x", last=LAST)
    finally:
        Recorded.lie = staticmethod(lambda info: info)


def test_somebody_else_who_writes_there_is_seen(fs: Recorded, folder: Path) -> None:
    def other(done: int, total: int) -> None:
        fs.pipe_file(f"{PATH}/theirs", b"!")

    with pytest.raises(RemoteError, match="nothing else"):
        upload(folder, URL, identity="x", last=LAST, progress=other)
    assert json.loads(fs.cat_file(MARK))["identity"] == "x"


def test_a_message_has_no_secrets(fs: Recorded, folder: Path) -> None:
    fs.fail_at = "a.safetensors"
    with pytest.raises(RemoteError) as found:
        upload(folder, "memory://me:TOPSECRET@bucket/run?sig=TOPSECRET", identity="x", last=LAST)
    assert "TOPSECRET" not in str(found.value)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("http://host/run", RemoteError),
        ("https://host/run", RemoteError),
        ("nowhere://x/run", MissingPackageError),
    ],
)
def test_places_that_take_nothing(
    url: str, kind: type[ShardweaveError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with pytest.raises(kind):
        look(url, identity="x")


def test_a_whole_bucket_is_not_replaced(fs: Recorded, folder: Path) -> None:
    fs.pipe_file("/bucket/a", b"1")
    fs.pipe_file("/key:TOPSECRET@bucket/a", b"1")
    with pytest.raises(PathError, match="a target that is replaced is a folder of its own"):
        look("s3://bucket", identity="x", force=True)
    with pytest.raises(PathError):
        look("memory://", identity="x", force=True)
    assert look("memory://bucket", identity="x", force=True) == ["a"]
    with pytest.raises(PathError) as found:
        look("s3://key:TOPSECRET@bucket", identity="x", force=True)
    assert "TOPSECRET" not in str(found.value)


def test_a_file_is_no_folder(fs: Recorded) -> None:
    fs.pipe_file(PATH, b"1")
    with pytest.raises(ExistsError, match="a target is a folder"):
        look(URL, identity="x", force=True)
