"""Checkpoints at URLs: what is copied, what is not copied again, and what a message never says."""

from __future__ import annotations

import hashlib
import http.server
import os
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardweave.convert.carry_out import BESIDE
from shardweave.errors import (
    ExistsError,
    FormatError,
    MissingFileError,
    MissingPackageError,
    PathError,
    RemoteError,
    TruncatedError,
    WriteError,
)
from shardweave.store import remote, safetensors, torch_dist
from shardweave.store.remote import RECORD, fetch, is_url
from shardweave.store.remote_place import _is_wanted, without_secrets


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    """A store in this process, empty."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    fs = fsspec.filesystem("memory")
    assert isinstance(fs, MemoryFileSystem)
    return fs


def put(fs: MemoryFileSystem, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        fs.pipe_file(path, data)


def held(folder: Path) -> dict[str, str]:
    """The digests of the files of a folder, by name, without the record of the copy."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != RECORD
    }


HF = {
    "/run/config.json": b"{}",
    "/run/model.safetensors.index.json": b"{...}",
    "/run/model-00001-of-00002.safetensors": b"a" * 700,
    "/run/model-00002-of-00002.safetensors": b"b" * 901,
    "/run/tokenizer.model": b"t" * 33,
}


# --- URLs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["s3://b/x", "GS://b", "hf://user/repo@rev", "http://h:8/x", "zip://a::s3://b/z"]
)
def test_what_is_a_url(text: str) -> None:
    assert is_url(text)


@pytest.mark.parametrize(
    "text", ["", "x", "/a/b", "s3:/b", "C://models", r"C:\models", "a b://c", "./s3://b"]
)
def test_what_is_none(text: str) -> None:
    assert not is_url(text)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:secret@bucket/run", "s3://bucket/run"),
        ("https://me:p%40ss@host:8/m.safetensors?sig=secret#x", "https://host:8/m.safetensors"),
        ("ftp://me:p/a@ss@host/run", "ftp://host/run"),
        ("https://host/x#secret", "https://host/x"),
        ("hf://user/repo@rev/x", "hf://user/repo@rev/x"),
        ("http://host:80/repo@rev/x", "http://host:80/repo@rev/x"),
    ],
)
def test_secrets_are_no_part_of_a_url_that_is_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


@pytest.mark.parametrize("name", BESIDE)
def test_what_a_conversion_carries_is_copied(name: str) -> None:
    assert _is_wanted(name)


# --- folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "folder", ["hf_qwen3moe_tiny", "mc_gqa_tp2pp2/torch_dist", "mc_moe_tp1/torch_dist", "dcp_fsdp2_4/dcp"]
)
def test_a_copy_is_read_like_its_source(data_dir: Path, tmp_path: Path, folder: str) -> None:
    src = data_dir / folder
    copy = fetch(f"file://{src}", tmp_path / "copy")
    expected = held(src)
    for name in ("README.md",):
        expected.pop(name, None)
    assert held(copy) == expected
    read = safetensors.read if folder.startswith("hf") else torch_dist.read
    assert read(copy).tensors == read(src).tensors


def test_only_what_belongs_to_a_checkpoint(memory: MemoryFileSystem, tmp_path: Path) -> None:
    others = (
        "pytorch_model.bin",
        "optimizer.pt",
        ".git",
        ".env.json",
        "a.safetensors.part",
        "run.sh",
        RECORD,
    )
    put(memory, {**HF, **{f"/run/{name}": b"x" for name in others}, "/run/sub/m.safetensors": b"x"})
    copy = fetch("memory://run", tmp_path / "deep" / "copy")
    assert set(held(copy)) == {name.removeprefix("/run/") for name in HF}


def test_a_run_folder_brings_the_iteration_that_its_tracker_names(
    memory: MemoryFileSystem, data_dir: Path, tmp_path: Path
) -> None:
    src = data_dir / "mc_gqa_tp2pp2" / "torch_dist"
    put(memory, {f"/run/iter_0000030/{path.name}": path.read_bytes() for path in src.iterdir()})
    put(memory, {"/run/iter_0000020/.metadata": b"old", "/run/iter_0000020/__0_0.distcp": b"old"})
    put(memory, {"/run/latest_checkpointed_iteration.txt": b"30\n"})
    copy = fetch("memory://run/", tmp_path)
    assert not (copy / "iter_0000020").exists()
    assert torch_dist.read(copy).tensors == torch_dist.read(src).tensors


def test_progress_ends_at_the_whole_and_never_goes_back(memory: MemoryFileSystem, tmp_path: Path) -> None:
    put(memory, HF)
    told: list[tuple[int, int]] = []
    fetch("memory://run", tmp_path, progress=lambda done, total: told.append((done, total)))
    size = sum(map(len, HF.values()))
    assert told[0] == (0, size) and told[-1] == (size, size)
    assert told == sorted(told) and {total for _, total in told} == {size}


def test_memory_is_bounded(memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_CHUNK_BYTES", 64)
    put(memory, HF)
    steps: list[int] = []
    fetch("memory://run", tmp_path, progress=lambda done, _: steps.append(done))
    assert max(b - a for a, b in pairwise(steps)) == 64
    assert (tmp_path / "model-00002-of-00002.safetensors").read_bytes() == b"b" * 901


# --- what is not copied again ---------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read from the store, in order."""
    names: list[str] = []
    true = MemoryFileSystem.open

    def spy(self: MemoryFileSystem, path: str, mode: str, *args: Any, **kwargs: Any) -> Any:
        if mode == "rb":
            names.append(path.rpartition("/")[2])
        return true(self, path, mode, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "open", spy)
    return names


def test_an_unchanged_file_is_not_copied_again(
    memory: MemoryFileSystem, tmp_path: Path, opened: list[str]
) -> None:
    put(memory, HF)
    fetch("memory://run", tmp_path)
    assert sorted(opened) == sorted(name.removeprefix("/run/") for name in HF)
    assert opened[-1] == "model.safetensors.index.json"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    opened.clear()
    fetch("memory://run", tmp_path)
    assert opened == []
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_a_changed_file_is_copied_again_and_one_that_went_is_removed(
    memory: MemoryFileSystem, tmp_path: Path, opened: list[str]
) -> None:
    put(memory, HF)
    fetch("memory://run", tmp_path)
    opened.clear()
    memory.pipe_file("/run/model-00001-of-00002.safetensors", b"c" * 700)  # the same size
    memory.rm_file("/run/tokenizer.model")
    fetch("memory://run", tmp_path)
    assert opened == ["model-00001-of-00002.safetensors"]
    assert (tmp_path / "model-00001-of-00002.safetensors").read_bytes() == b"c" * 700
    assert not (tmp_path / "tokenizer.model").exists()


def test_a_damaged_size_is_mended(memory: MemoryFileSystem, tmp_path: Path) -> None:
    put(memory, HF)
    fetch("memory://run", tmp_path)
    (tmp_path / "config.json").write_bytes(b"{")
    fetch("memory://run", tmp_path)
    assert (tmp_path / "config.json").read_bytes() == b"{}"


def test_a_file_without_a_state_is_copied_again(
    memory: MemoryFileSystem, tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, HF)
    true = MemoryFileSystem.ls
    monkeypatch.setattr(
        MemoryFileSystem,
        "ls",
        lambda *a, **k: [{key: i[key] for key in ("name", "size", "type")} for i in true(*a, **k)],
    )
    fetch("memory://run", tmp_path)
    fetch("memory://run", tmp_path)
    assert len(opened) == 2 * len(HF)


def test_a_stopped_copy_goes_on_and_shows_no_partial_file(
    memory: MemoryFileSystem, tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(remote, "_WORKERS", 1)
    put(memory, HF)

    def stop(done: int, total: int) -> None:
        if done > 1000:  # in the second of the two large files
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("memory://run", tmp_path, progress=stop)
    assert set(held(tmp_path)) == {"config.json", "model-00001-of-00002.safetensors"}
    opened.clear()
    (tmp_path / RECORD).write_bytes(
        (tmp_path / RECORD).read_bytes() + b'["model.saf'
    )  # killed while it wrote
    fetch("memory://run", tmp_path)
    assert opened == ["model-00002-of-00002.safetensors", "tokenizer.model", "model.safetensors.index.json"]
    assert set(held(tmp_path)) == {name.removeprefix("/run/") for name in HF}
    opened.clear()
    fetch("memory://run", tmp_path)
    assert opened == []


def test_a_folder_of_something_else_is_left_alone(memory: MemoryFileSystem, tmp_path: Path) -> None:
    put(memory, HF)
    put(memory, {path.replace("run", "other"): data for path, data in HF.items()})
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ExistsError, match="it holds other files"):
        fetch("memory://run", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    fetch("memory://run", tmp_path / "copy")
    with pytest.raises(ExistsError, match=r'it holds a copy of "memory://run"; wanted memory://other'):
        fetch("memory://other", tmp_path / "copy")


def test_one_process_at_a_time_copies_into_a_folder(memory: MemoryFileSystem, tmp_path: Path) -> None:
    put(memory, HF)
    told: list[BaseException] = []

    def again(done: int, total: int) -> None:
        if not told:
            with pytest.raises(ExistsError, match="another process") as caught:
                fetch("memory://run", tmp_path)
            told.append(caught.value)

    fetch("memory://run", tmp_path, progress=again)
    assert len(told) == 1 and set(held(tmp_path)) == {name.removeprefix("/run/") for name in HF}


# --- what is refused ----------------------------------------------------------------------------


def test_no_room_is_said_before_the_first_byte(
    memory: MemoryFileSystem, tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, HF)
    size = sum(map(len, HF.values()))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=size - 1))
    with pytest.raises(WriteError, match=rf"missing\({size}\) > free\({size - 1}\)"):
        fetch("memory://run", tmp_path)
    assert opened == []
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=size))
    fetch("memory://run", tmp_path)


def test_a_full_disk_is_a_write_error(
    memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    put(memory, HF)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match=r"\.part: No space left on device"):
        fetch("memory://run", tmp_path)


@pytest.mark.parametrize(("lie", "kind"), [(-1, FormatError), (1, TruncatedError)])
def test_a_size_that_is_not_true(
    memory: MemoryFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lie: int,
    kind: type[FormatError],
) -> None:
    put(memory, HF)
    true = MemoryFileSystem.ls

    def ls(*args: Any, **kwargs: Any) -> Any:
        infos = true(*args, **kwargs)
        return [{**i, "size": i["size"] + lie * i["name"].endswith("2-of-00002.safetensors")} for i in infos]

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    with pytest.raises(FormatError, match=rf"bytes\(\d+\) .* stated\({901 + lie}\)") as caught:
        fetch("memory://run", tmp_path)
    assert type(caught.value) is kind
    assert not list(tmp_path.glob("*2-of-00002*"))
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_what_changes_while_it_is_copied(memory: MemoryFileSystem, tmp_path: Path) -> None:
    put(memory, HF)

    def trainer(done: int, total: int) -> None:
        if done == total:
            memory.pipe_file("/run/model-00001-of-00002.safetensors", b"n" * 700)

    with pytest.raises(FormatError, match="stays as it is while it is copied"):
        fetch("memory://run", tmp_path, progress=trainer)
    fetch("memory://run", tmp_path)
    assert (tmp_path / "model-00001-of-00002.safetensors").read_bytes() == b"n" * 700


@pytest.mark.parametrize(
    ("files", "kind", "text"),
    [
        ({}, MissingFileError, "nothing is found"),
        ({"/run/pytorch_model.bin": b"x"}, FormatError, "it holds 'pytorch_model.bin'"),
        ({"/run/config.json": b"{}"}, FormatError, "it holds 'config.json'"),
        ({"/run/__0_0.distcp": b"x"}, MissingFileError, r"\.metadata is not there"),
        ({**HF, "/run/.shardweave/identity.json": b"{}"}, FormatError, "was not finished"),
        ({"/run/latest_checkpointed_iteration.txt": b"../../etc"}, FormatError, "got '../../etc'"),
        ({"/run/latest_checkpointed_iteration.txt": b"7"}, MissingFileError, "run/iter_0000007"),
        ({"/run": b"x"}, FormatError, "its name is 'run'"),
    ],
)
def test_what_is_no_checkpoint(
    memory: MemoryFileSystem, tmp_path: Path, files: dict[str, bytes], kind: type[Exception], text: str
) -> None:
    put(memory, files)
    with pytest.raises(kind, match=text):
        fetch("memory://run", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_finished_conversion_may_leave_its_lock(memory: MemoryFileSystem, tmp_path: Path) -> None:
    put(memory, {**HF, "/run/.shardweave/lock": b""})
    assert "config.json" in held(fetch("memory://run", tmp_path))


def test_links_of_a_local_disk_are_guarded_as_in_any_folder(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("secret")
    src = tmp_path / "src"
    src.mkdir()
    (src / "model.safetensors").write_bytes(b"abc")
    (src / "a.json").symlink_to("model.safetensors")
    assert (fetch(f"file://{src}", tmp_path / "copy") / "a.json").read_bytes() == b"abc"
    (src / "b.json").symlink_to("../secret.json")
    with pytest.raises(PathError, match="leads to"):
        fetch(f"file://{src}", tmp_path / "copy")


# --- protocols and messages -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "text"), [("s3://b/x", "s3fs"), ("nope://b/x", "no installed package knows nope://")]
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, text: str
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingPackageError, match=text) as caught:
        fetch(url, tmp_path)
    assert "pip install 'shardweave[remote]'" in caught.value.hint


def test_a_chain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="names one place"):
        fetch("simplecache::s3://b/x", tmp_path)


def test_no_message_holds_what_grants_access(
    memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "memory://key:p%2Fss@bucket/run?X-Amz-Signature=5f2c9&token=t0ken"

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(
            f"403 for {url}, user key:p/ss, signature 5f2c9, see https://a:b@host/q?token=t0ken and t0ken"
        )

    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
    with pytest.raises(RemoteError) as caught:
        fetch(url, tmp_path)
    assert "memory://bucket/run" in str(caught.value) and "https://host/q" in str(caught.value)
    for secret in ("p%2Fss", "p/ss", "5f2c9", "t0ken", "a:b@"):
        assert secret not in str(caught.value)
    assert caught.value.__suppress_context__


# --- http ---------------------------------------------------------------------------------------


class _Handler(http.server.BaseHTTPRequestHandler):
    files: dict[str, bytes]
    seen: list[str]
    stated = True
    short = 0

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        self.answer(None)

    def answer(self, body: bytes | None) -> None:
        path = self.path.partition("?")[0]
        self.seen.append(f"{self.command} {path}")
        if path not in self.files:
            self.send_error(404)
            return
        data = self.files[path]
        self.send_response(200)
        if self.stated:
            self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", hashlib.md5(data).hexdigest())
        self.end_headers()
        self.wfile.write(data[: len(data) - self.short] if body is None else body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[tuple[str, type[_Handler]]]:
    handler = type("Handler", (_Handler,), {"files": {}, "seen": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", handler
        httpd.shutdown()
        thread.join()


@pytest.mark.peer("aiohttp")
def test_one_file_over_http_with_the_config_beside_it(
    server: tuple[str, type[_Handler]], data_dir: Path, tmp_path: Path
) -> None:
    url, handler = server
    src = data_dir / "hf_llama_tied_tiny"
    handler.files = {f"/m/{name}": (src / name).read_bytes() for name in ("model.safetensors", "config.json")}
    got = fetch(f"{url}/m/model.safetensors?token=t0ken", tmp_path)
    assert got == tmp_path / "model.safetensors"
    assert held(tmp_path) == {name: held(src)[name] for name in ("model.safetensors", "config.json")}
    assert "t0ken" not in (tmp_path / RECORD).read_text()
    handler.seen.clear()
    assert fetch(f"{url}/m/model.safetensors?token=renewed", tmp_path) == got
    assert not [line for line in handler.seen if line.startswith("GET")]
    del handler.files["/m/config.json"]
    assert fetch(f"{url}/m/model.safetensors", tmp_path) == got
    assert not (tmp_path / "config.json").exists()


@pytest.mark.peer("aiohttp")
def test_http_refusals(server: tuple[str, type[_Handler]], tmp_path: Path) -> None:
    url, handler = server
    handler.files = {"/m/": b"<a href='model.safetensors'>", "/m/model.safetensors": b"x" * 90_000}
    with pytest.raises(FormatError, match="http cannot list folders"):
        fetch(f"{url}/m/", tmp_path)
    with pytest.raises(MissingFileError):
        fetch(f"{url}/nowhere.safetensors", tmp_path)
    handler.short = 7
    with pytest.raises((TruncatedError, RemoteError)):
        fetch(f"{url}/m/model.safetensors", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    handler.short, handler.stated = 0, False
    with pytest.raises(FormatError, match="size is None"):
        fetch(f"{url}/m/model.safetensors", tmp_path)
