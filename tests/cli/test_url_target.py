"""Targets at URLs: the files of a local target, complete or not seen, and nothing left behind here."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from cli_driver import Run
from fsspec.implementations.memory import MemoryFileSystem

CASES = {
    "hf": ("mc_gqa_tp2pp2/torch_dist", ("--config", "mc_gqa_truth_hf/config.json")),
    "megatron": ("hf_llama_tied_tiny/model.safetensors", ("--tp", "2")),
    "dcp": ("hf_llama_tied_tiny/model.safetensors", ()),
    "native": ("hf_llama_tied_tiny/model.safetensors", ()),
}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary folders; nothing may stay in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    found = fsspec.filesystem("memory")
    assert isinstance(found, MemoryFileSystem)
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def far(memory: MemoryFileSystem, path: str) -> dict[str, bytes]:
    return {name.removeprefix(f"{path}/"): memory.cat_file(name) for name in memory.find(path)}


@pytest.fixture
def words(data_dir: Path) -> Callable[[str, object], list[object]]:
    def made(to: str, dst: object) -> list[object]:
        src, more = CASES[to]
        options = [data_dir / word if word.startswith("mc_") else word for word in more]
        return ["convert", data_dir / src, dst, "--to", to, *options]

    return made


@pytest.mark.parametrize("to", CASES)
def test_the_files_of_a_local_target_and_they_can_be_read(
    sw: Run, words: Callable[[str, object], list[object]], memory: MemoryFileSystem, tmp_path: Path,
    temporary: Path, to: str,
) -> None:  # fmt: skip
    assert sw(*words(to, tmp_path / "here")).code == 0
    url = "memory://bucket/there"
    done = sw(*words(to, url), "--json")
    assert (done.code, done.err) == (0, "")
    assert far(memory, "/bucket/there") == files(tmp_path / "here")
    assert json.loads(done.out)["target"]["path"] == url
    assert list(temporary.iterdir()) == []
    diff = sw("diff", url, tmp_path / "here")
    assert diff.code == 0, diff.err


def test_a_folder_by_its_url(
    sw: Run, words: Callable[[str, object], list[object]], tmp_path: Path
) -> None:  # fmt: skip
    assert sw(*words("hf", tmp_path / "here")).code == 0
    done = sw(*words("hf", f"file://{tmp_path}/there"))
    assert done.code == 0 and f"file://{tmp_path}/there (hf)" in done.out
    assert "are staged in" in done.err and f"and then copied to file://{tmp_path}/there" in done.err
    assert files(tmp_path / "there") == files(tmp_path / "here")


def test_what_is_there_is_kept_unless_force_is_given(
    sw: Run, words: Callable[[str, object], list[object]], memory: MemoryFileSystem, tmp_path: Path
) -> None:
    memory.pipe_file("/bucket/there/mine", b"kept")
    memory.pipe_file("/me:secret@bucket/there/mine", b"kept")
    done = sw(*words("hf", "memory://me:secret@bucket/there"))
    assert done.code == 2 and "a target is empty: memory://bucket/there: it holds mine" in done.err
    assert "secret" not in done.err and far(memory, "/bucket/there") == {"mine": b"kept"}
    dry = sw(*words("hf", "memory://bucket/there"), "--dry-run")
    assert dry.code == 0 and "memory://bucket/there holds 1 file; --force would replace them." in dry.out
    assert sw(*words("hf", "memory://bucket/there"), "--force").code == 0
    assert "mine" not in far(memory, "/bucket/there") and "model.safetensors" in far(memory, "/bucket/there")


def test_an_upload_that_was_stopped_goes_on(
    sw: Run, words: Callable[[str, object], list[object]], memory: MemoryFileSystem, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With --cache nothing is converted again; without, nothing that is there is sent again."""
    assert sw(*words("hf", tmp_path / "here")).code == 0
    put, sent = MemoryFileSystem.put_file, list[str]()

    def broken(self: MemoryFileSystem, lpath: str, rpath: str, **given: object) -> None:
        sent.append(Path(rpath).name)
        if rpath.endswith("model.safetensors") and len(sent) < 4:
            raise OSError("connection lost")
        put(self, lpath, rpath, **given)

    monkeypatch.setattr(MemoryFileSystem, "put_file", broken)
    url, cache = "memory://bucket/there", tmp_path / "cache"
    for more in ([], ["--cache", cache]):
        memory.store.clear()
        sent.clear()
        done = sw(*words("hf", url), *more)
        assert (
            done.code == 1 and "a place at a URL can be written" in done.err and "connection lost" in done.err
        )
        assert sw("check", url).code == 1
        first = sent.copy()
        assert first[-1] == "model.safetensors" and len(first) == 3
        done = sw(*words("hf", url), *more)
        assert done.code == 0, done.err
        assert sent == [*first, "model.safetensors"]
        assert ("resumed" in done.out) == bool(more)
        assert far(memory, "/bucket/there") == files(tmp_path / "here")
    assert list(cache.iterdir()) == []


def test_a_staged_target_has_to_fit(
    sw: Run, words: Callable[[str, object], list[object]], memory: MemoryFileSystem,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 7))
    done = sw(*words("hf", "memory://bucket/there"))
    assert done.code == 1 and "> free(7) bytes" in done.err and "--cache" in done.err
    assert memory.find("/bucket") == []
