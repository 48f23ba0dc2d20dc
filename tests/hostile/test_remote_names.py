"""A listing from outside is hostile: no name leaves the folder, and no two names mean one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardweave.errors import FormatError, PathError
from shardweave.store.remote import fetch

GOOD = "/run/model.safetensors"


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the store says that its folder holds; whatever is opened there is four bytes."""
    infos = [{"name": GOOD, "size": 4, "type": "file", "etag": "1"}]
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    fsspec.filesystem("memory").pipe_file(GOOD, b"good")
    true = MemoryFileSystem.open

    monkeypatch.setattr(MemoryFileSystem, "info", lambda *_: {"name": "/run", "size": 0, "type": "directory"})
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *_, **__: [dict(info) for info in infos])
    monkeypatch.setattr(MemoryFileSystem, "open", lambda self, _, *a, **k: true(self, GOOD, *a, **k))
    return infos


def written(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name",
    [
        "/run/../evil.json",
        "/run/sub\\..\\evil.json",
        "/run/sub/../../evil.json",
        "/run//evil.json",
        "/run/./evil.json",
        "/run/sub/evil.json",
        "/run/C:evil.json",
        "/run/evil\n.json",
        "/run/evil\x00.json",
        "/run/\ud800.json",
        "/etc/evil.json",
        "/running/evil.json",
        "../evil.json",
        "evil.json",
        "C:\\evil.safetensors",
        "/elsewhere/.metadata",
    ],
)
def test_a_name_that_would_leave_its_folder(listing: list[dict[str, Any]], tmp_path: Path, name: str) -> None:
    listing.append({"name": name, "size": 4, "type": "file", "etag": "1"})
    with pytest.raises(PathError) as caught:
        fetch("memory://run", tmp_path / "copy")
    assert str(caught.value).isprintable()
    assert written(tmp_path) == set()
    listing.pop()
    fetch("memory://run", tmp_path / "copy")
    assert "copy/model.safetensors" in written(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ("Config.json", "config.json"),
        ("MODEL.safetensors",),
        ("caf\u00e9.json", "cafe\u0301.json"),
        ("stra\u00dfe.json", "STRASSE.json"),
        ("model.safetensors",),
    ],
)
def test_two_names_of_one_file(listing: list[dict[str, Any]], tmp_path: Path, names: tuple[str, ...]) -> None:
    listing += [{"name": f"/run/{name}", "size": 4, "type": "file", "etag": "1"} for name in names]
    with pytest.raises(FormatError, match="a name of its own"):
        fetch("memory://run", tmp_path / "copy")
    assert written(tmp_path) == set()


@pytest.mark.parametrize("size", [None, -1, True, "4", 4.0, float("nan")])
def test_a_size_that_is_none(listing: list[dict[str, Any]], tmp_path: Path, size: object) -> None:
    listing[0]["size"] = size
    with pytest.raises(FormatError, match="the size of a file is known"):
        fetch("memory://run", tmp_path / "copy")


def test_a_size_beyond_every_disk(listing: list[dict[str, Any]], tmp_path: Path) -> None:
    listing[0]["size"] = 1 << 62
    with pytest.raises(OSError, match="has room"):
        fetch("memory://run", tmp_path / "copy")


def test_a_file_without_end_is_cut_off(
    listing: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless:
        asked = 0

        def __enter__(self) -> Endless:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing to close."""

        def read(self, count: int) -> bytes:
            self.asked += 1
            return b"x" * count

    endless = Endless()
    monkeypatch.setattr(MemoryFileSystem, "open", lambda *_, **__: endless)
    with pytest.raises(FormatError, match=r"> stated\(4\)"):
        fetch("memory://run", tmp_path / "copy")
    assert endless.asked == 1
    assert not (tmp_path / "copy" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["directory", "other", "device"])
def test_what_is_no_file_is_not_copied(listing: list[dict[str, Any]], tmp_path: Path, kind: str) -> None:
    listing.append({"name": "/run/x.json", "size": 4, "type": kind, "etag": "1"})
    fetch("memory://run", tmp_path / "copy")
    assert "copy/x.json" not in written(tmp_path)


def test_a_link_in_the_folder_of_copies_is_not_followed_out(
    listing: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Somebody prepared the folder: a copy must not be written through a link."""
    copy = fetch("memory://run", tmp_path / "copy")
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(b"mine")
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").symlink_to(outside)
    with pytest.raises(PathError):
        fetch("memory://run", copy)
    assert outside.read_bytes() == b"mine"
