"""Help: it answers at once, docs/commands.md says what it says, and every flag that a text names exists."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import sys

import pytest
from cli_driver import ROOT, UPDATE, Run
from typer.main import get_command

import shardweave
from shardweave.cli import app
from shardweave.train.config import TrainConfig
from shardweave.train.settings import settings

COMMAND = get_command(app)
GROUPS = {
    name: command.commands for name, command in COMMAND.commands.items() if hasattr(command, "commands")
}
VERBS = [[verb] for verb in COMMAND.commands] + [
    [name, verb] for name, verbs in GROUPS.items() for verb in verbs
]
PAGE = ROOT / "docs" / "commands.md"

# What other programs are told in our texts.
FOREIGN = {
    "--ckpt-format": "Megatron-LM",
    "--dist-ckpt-optim-fully-reshardable": "Megatron-LM",
    "--apply-wd-to-qk-layernorm": "Megatron-LM",
    "--transformer-impl": "Megatron-LM",
    "--moe-grouped-gemm": "Megatron-LM",
    "--apply-layernorm-1p": "Megatron-LM",
    "--enable-expert-parallel": "vLLM",
    "--engine": "examples/rl_loop.py",
    "--shared": "examples/train_curves.py",
    "--junitxml": "pytest",
    "--report-log": "pytest",
    "--no-deps": "pip",
    "--show-toplevel": "git",
    "--show-prefix": "git",
    "--end-of-options": "git",
    "--full-tree": "git",
    "--batch": "git",
    "--class": "python -m shardweave.lint.record",
    "--out": "python -m shardweave.lint.record",
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?:\.[a-z_0-9]*[a-z0-9])?")
"""With a dot it is a setting of a run."""


def pinned(name: str) -> bool:
    """Whether the package is installed as constraints.txt says: the look of help is its own."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    return importlib.metadata.version(name) == pins[name]


def without_blanks(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


@pytest.mark.parametrize("arguments", [["--help"], *([*verb, "--help"] for verb in VERBS)])
def test_page_says_what_help_says(sw: Run, arguments: list[str]) -> None:
    if not (pinned("typer") and pinned("rich")):
        pytest.skip("help looks otherwise with another typer or rich than constraints.txt has")
    done = sw(*arguments)
    assert (done.code, done.err) == (0, "")
    shown = without_blanks(done.out)
    command = " ".join(["shardweave", *arguments])
    block = re.compile(rf"(```text\n\$ {re.escape(command)}\n)(.*?)(\n```)", re.DOTALL)
    page = PAGE.read_text(encoding="utf-8")
    found = block.search(page)
    assert found, f"{PAGE.name} has a block that begins with '$ {command}'"
    if os.environ.get(UPDATE):
        PAGE.write_text(block.sub(lambda m: m[1] + shown + m[3], page), encoding="utf-8")
        return
    assert found[2] == shown


@pytest.mark.parametrize(
    "program",
    [(sys.executable, "-m", "shardweave"), (sys.executable, "-c", "from shardweave.cli import main; main()")],
)
def test_version(process: Run, program: tuple[str, ...]) -> None:
    done = process("--version", program=program)
    assert done.out == f"shardweave {shardweave.__version__}\n"
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["convert", "--help"], ["probe", "--help"], ["refit", "--help"], ["nope"]]
)
def test_help_loads_neither_torch_nor_numpy(process: Run, arguments: list[str]) -> None:
    code = "import sys; from shardweave.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    done = process(*arguments, program=(sys.executable, "-c", code))
    loaded = done.out.split()
    assert "shardweave.cli.convert" in loaded
    assert not {"torch", "numpy", "shardweave.layout", "safetensors"} & set(loaded)


def test_no_arguments_is_help(sw: Run) -> None:
    done = sw()
    assert done.code == 2
    assert "Commands" in done.out
    assert done.err == ""


def options() -> set[str]:
    commands = [
        COMMAND,
        *COMMAND.commands.values(),
        *(verb for verbs in GROUPS.values() for verb in verbs.values()),
    ]
    return {flag for command in commands for param in command.params for flag in param.opts} | {"--help"}


def texts() -> dict[str, str]:
    """Every string of the sources and every page, by where it is."""
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found[f"{path.relative_to(ROOT)}:{node.lineno}"] = node.value
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if "torchrun" not in line:
                found[f"{path.relative_to(ROOT)}:{number}"] = line
    return found


def test_every_flag_that_a_text_names_exists() -> None:
    known = options() | set(FOREIGN) | {f"--{setting.key}" for setting in settings(TrainConfig)}
    # What a placeholder or a message begins with.
    known |= {"--section.key"}
    unknown = {
        f"{where}: {flag}"
        for where, text in texts().items()
        for flag in FLAG.findall(text)
        if flag not in known
    }
    assert not unknown
    # The search finds flags, and would find one that does not exist.
    assert any("--force" in FLAG.findall(text) for text in texts().values())
    assert FLAG.findall("start over with --farce") == ["--farce"]
    assert "--farce" not in known
