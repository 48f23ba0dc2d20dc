"""Errors: two lines, no traceback, and an exit code that says whose fault it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_driver import ROOT, Run

from shardweave import errors
from shardweave.cli import common
from shardweave.cli.common import FINDING, USAGE, exit_code

CLASSES = sorted(
    (value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)),
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", CLASSES)
def test_exit_code_of_a_class_is_documented(cls: type[errors.ShardweaveError]) -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("| 2 |"))
    documented = set(re.findall(r"`(\w+Error)`", line))
    code = exit_code(cls("rule", hint="hint"))
    assert code == (USAGE if cls.__name__ in documented else FINDING)


def test_usage_errors(sw: Run, golden, checkpoint, data_dir: Path, tmp_path: Path) -> None:
    src, config = checkpoint("mc_gqa_tp2pp2")
    moe, moe_config = checkpoint("mc_moe_ep2")
    out, hf = tmp_path / "out", data_dir / "mc_gqa_truth_hf"
    good = ("convert", src, out, "--config", config)
    commands = [
        ("nope",),
        ("convert",),
        ("convert", src, out),
        ("convert", data_dir / "nowhere", out, "--to", "hf"),
        (*good, "--to", "gguf"),
        (*good, "--to", "hf", "--tp", "2", "--layer-keys", "stacked"),
        (*good, "--to", "megatron", "--stacked-experts"),
        (*good, "--to", "megatron", "--tp", "3"),
        (*good, "--to", "megatron", "--tp", "0"),
        (*good, "--to", "megatron", "--pp", "3"),
        (*good, "--to", "megatron", "--pp", "2", "--stages", "3,2"),
        (*good, "--to", "megatron", "--pp", "2", "--stages", "3;1"),
        (*good, "--to", "megatron", "--spec", "apex"),
        (*good, "--to", "megatron", "--layer-keys", "flat"),
        (*good, "--to", "hf", "--memory", "5G"),
        (*good, "--to", "hf", "--max-file-size", "0"),
        (*good, "--to", "hf", "--dtype", "fp16"),
        (*good, "--to", "hf", "--workers", "none"),
        (*good, "--to", "hf", "--foo"),
        ("convert", moe, out, "--config", moe_config, "--to", "megatron", "--tp", "2", "--ep", "2"),
        ("plan", "--to", "hf"),
        ("plan", src, "--model", config, "--to", "hf"),
        ("plan", "--model", config, "--to", "hf"),
        ("plan", src),
        ("plan", src, "--from", "hf", "--to", "hf"),
        ("plan", "--model", config, "--from", "hf", "--to", "vllm:tp=2", "--tp", "2"),
        ("plan", "--model", config, "--dtype", "bfloat16", "--from", "ddp:n=4", "--to", "hf"),
        ("plan", "--model", config, "--dtype", "bfloat16", "--from", "fsdp:n=4", "--to", "hf"),
        ("plan", "--model", config, "--dtype", "bfloat16", "--from", "megatron:tq=4", "--to", "hf"),
        ("plan", "--model", config, "--dtype", "bfloat16", "--from", "megatron:tp=0", "--to", "hf"),
        ("plan", "--model", config, "--dtype", "bfloat16", "--from", "megatron:tp=2,tp=4", "--to", "hf"),
        ("convert", hf, out, "--to", "hf:tp=2"),
        ("convert", hf, out, "--to", "dcp:optimizer=o"),
        ("convert", hf, out, "--to", "dcp:flat=perhaps"),
        ("plan", "--model", config, "--dtype", "bfloat16", "--from", "megatron @ x", "--to", "hf"),
        ("plan", "--model", config, "--dtype", "bfloat16", "--from", "hf", "--to", "vllm:tp=3"),
        ("probe", "os:getcwd", "--shape", "x", "--tp", "2"),
        ("probe", "os:getcwd", "--shape", "8", "--shape", "8", "--tp", "2"),
        ("probe", "os:getcwd", "--shape", "8", "--tp", "2", "--expect", "megatron:qvk"),
        ("probe", "os:getcwd", "--shape", "8", "--tp", "2", "--expect", "0:4"),
        ("show", config),
    ]
    shown = []
    for command in commands:
        done = sw(*command)
        assert done.code == USAGE, command
        assert done.out == "", command
        assert re.fullmatch(r"error: .+\nhint: .+\n", done.err), command
        shown.append("$ shardweave " + " ".join(map(str, command)) + "\n" + done.err)
    assert not out.exists()
    assert hf.exists()
    golden("usage_errors", "\n".join(shown), tmp=tmp_path, data=data_dir)


def test_debug_shows_where(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    command = ("convert", data_dir / "hf_llama_tied_tiny", tmp_path / "out", "--to", "hf", "--tp", "2")
    assert "Traceback" not in sw(*command).err
    assert "Traceback" in sw(*command, "--debug").err
    assert sw(*command, "--debug").code == USAGE


def test_ctrl_c(sw: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardweave.convert.convert", stop)
    done = sw("convert", data_dir / "hf_llama_tied_tiny", tmp_path / "out", "--to", "hf")
    assert (done.code, done.out) == (130, "")
    assert done.err == "error: stopped\nhint: run the same command to go on\n"


def test_error_of_the_system(
    sw: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "out/model.safetensors")

    monkeypatch.setattr("shardweave.convert.convert", full)
    done = sw("convert", data_dir / "hf_llama_tied_tiny", tmp_path / "out", "--to", "hf")
    assert (done.code, done.out) == (FINDING, "")
    assert done.err.startswith("error: No space left on device: out/model.safetensors\nhint: ")


def test_colours_and_links_of_an_error_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_error("dims [0:4] of [bold]k[/bold]", hint="see [link=x]")
    assert capsys.readouterr().err == "error: dims [0:4] of [bold]k[/bold]\nhint: see [link=x]\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("17B", 17), ("2kb", 2000), ("2KiB", 2048), ("1.5MiB", 1572864), ("3 GB", 3 * 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert common.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5G", "-1KB", "1e3", "KB", "0", "0.0001B", "1 2", "٣KB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(Exception, match=r"size|nothing"):
        common.parse_size(text)
