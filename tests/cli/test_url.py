"""Sources at URLs: the same answers as for the folder itself, a cache that is kept, nothing left behind."""

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

Checkpoint = Callable[[str], tuple[Path, Path]]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary folders; nothing may stay in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> str:
    """The URL of a checkpoint in the memory of this process."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    fs = fsspec.filesystem("memory")
    for path in (data_dir / "hf_llama_tied_tiny").iterdir():
        if path.name != "expected.safetensors":
            fs.pipe_file(f"/bucket/llama/{path.name}", path.read_bytes())
    return "memory://bucket/llama"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_convert_from_memory(sw: Run, memory: str, data_dir: Path, tmp_path: Path, temporary: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(
        data_dir / "hf_llama_tied_tiny", plain, ignore=shutil.ignore_patterns("expected*", "README*")
    )
    here = sw("convert", plain, tmp_path / "a", "--to", "megatron", "--tp", "2", "--json")
    there = sw("convert", memory, tmp_path / "b", "--to", "megatron", "--tp", "2", "--json")
    assert (here.code, there.code, there.err) == (0, 0, "")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    said = json.loads(there.out)
    assert said["source"] == {"path": memory, "format": "hf"}
    assert said["account"] == json.loads(here.out)["account"]
    assert list(temporary.iterdir()) == []


def test_a_megatron_run_as_a_process(
    process: Run, checkpoint: Checkpoint, data_dir: Path, tmp_path: Path
) -> None:
    src, config = checkpoint("mc_gqa_tp2pp2")
    done = process("convert", f"file://{src}", tmp_path / "out", "--to", "hf", "--config", config)
    assert (done.code, done.err) == (0, "")
    assert f"file://{src} (megatron)" in done.out
    same = process("diff", f"file://{tmp_path / 'out'}", f"file://{data_dir / 'mc_gqa_truth_hf'}")
    assert (same.code, same.err) == (0, "")
    assert f"file://{data_dir / 'mc_gqa_truth_hf'}" in same.out and "47 tensors" in same.out


def test_every_verb_that_reads(sw: Run, memory: str, temporary: Path) -> None:
    commands = [
        ("check", memory),
        ("check", f"{memory}/model.safetensors"),
        ("diff", memory, f"{memory}/model.safetensors"),
        ("plan", memory, "--to", "megatron", "--tp", "2"),
        ("show", memory, "--as", "megatron:tp=2", "--select", "qkv"),
        ("show", f"{memory}/config.json", "--as", "megatron:tp=2", "--select", "qkv"),
    ]
    for command in commands:
        done = sw(*command)
        assert (done.code, done.err) == (0, ""), command
        assert str(temporary) not in done.out, command
        assert list(temporary.iterdir()) == []
        if command[0] != "show":
            assert memory in done.out, command


def test_a_cache_is_kept_and_a_second_run_reads_nothing(
    sw: Run, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    assert sw("check", memory, "--cache", cache).code == 0
    (kept,) = cache.iterdir()
    assert kept.name.startswith("llama-") and (kept / "model.safetensors").is_file()
    monkeypatch.setattr(MemoryFileSystem, "open", None)
    assert sw("check", f"{memory}/", "--cache", cache).code == 0
    assert list(cache.iterdir()) == [kept]


def test_a_stopped_conversion_goes_on_with_a_cache(
    sw: Run, memory: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    command = ("convert", memory, tmp_path / "out", "--to", "hf")
    with monkeypatch.context() as patch:
        patch.setattr("shardweave.convert.convert", stop)
        alone = sw(*command)
        kept = sw(*command, "--cache", tmp_path / "cache")
    assert (alone.code, kept.code) == (130, 130)
    assert "--cache DIR" in alone.err and kept.err.endswith("hint: run the same command to go on\n")
    assert list(temporary.iterdir()) == []
    assert sw(*command, "--cache", tmp_path / "cache").code == 0


def test_ctrl_c_in_the_copy_leaves_nothing(
    sw: Run, memory: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        assert len(list(temporary.iterdir())) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr("shardweave.store.remote._copy", stop)
    done = sw("convert", memory, tmp_path / "out", "--to", "hf")
    assert (done.code, done.out) == (130, "")
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "out").exists()


def test_errors_name_the_url_without_its_secrets(sw: Run, memory: str, tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/bucket/llama/model.safetensors", fs.cat_file("/bucket/llama/model.safetensors")[:-100])
    done = sw("convert", memory, tmp_path / "out", "--to", "hf")
    assert done.code == 1
    assert done.err.startswith("error: a file holds all bytes")
    assert f"{memory}/model.safetensors" in done.err and str(tmp_path) not in done.err
    secret = sw("check", "nope://key:secret@bucket/x?sig=secret")
    assert secret.code == 2 and "nope://bucket/x" in secret.err and "secret" not in secret.err


@pytest.mark.parametrize(
    ("url", "code", "text"),
    [
        ("nope://key:secret@bucket/out", 2, "an optional package is installed where something that needs it"),
        ("http://key:secret@host/out?sig=secret", 1, "http only reads"),
    ],
)
def test_a_target_that_cannot_be_written(
    sw: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, code: int, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = sw("convert", data_dir / "hf_llama_tied_tiny" / "model.safetensors", url, "--to", "hf")
    assert (done.code, done.out) == (code, "")
    assert text in done.err and "secret" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]
