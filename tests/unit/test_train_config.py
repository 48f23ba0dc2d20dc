"""Settings: one source of files, command lines and the page; all that is wrong at once, as equations."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardweave.errors import ConfigError, FormatError, MissingFileError
from shardweave.train.checks import find_wrong, read_config
from shardweave.train.config import TrainConfig
from shardweave.train.settings import load, plain, read, reference, settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "train-config.md"
TINY = str(ROOT / "tests/data/hf_qwen3moe_tiny")
"""4 heads, 2 KV heads of 16, 2 layers, 8 experts of 40."""
LLAMA = str(ROOT / "tests/data/hf_llama_tied_tiny")


def base(**sections: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"model": {"path": TINY}, "data": {"train": "README.md"}}
    for name, values in sections.items():
        found[name] = {**found.get(name, {}), **values}
    return found


def equations(
    said: Mapping[str, Any], *overrides: tuple[str, str], world_size: int | None = None
) -> list[str]:
    _, wrong = find_wrong(said, overrides, world_size=world_size)
    assert all(error.rule and error.hint for error in wrong)
    return [error.equation for error in wrong]


# --- one source ---------------------------------------------------------------------------------


def test_the_page_is_made_from_the_classes() -> None:
    head = (
        "# Settings of a run\n\nMade of `src/shardweave/train/config.py`; [Training](train.md) is the guide. "
        "A file has\na section for each heading below, a command line `--section.key value`.\n\n"
    )
    text = head + reference(TrainConfig)
    if os.environ.get("SHARDWEAVE_UPDATE_GOLDEN"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text, "SHARDWEAVE_UPDATE_GOLDEN=1 accepts the new text"


def test_every_setting_has_a_meaning_and_every_meaning_a_setting() -> None:
    for setting in settings(TrainConfig):
        assert setting.meaning.endswith("."), setting.key
        assert setting.type
    for section in typing.get_type_hints(TrainConfig).values():
        names = {field.name for field in dataclasses.fields(section)}
        said = {line.split(":")[0].strip() for line in (section.__doc__ or "").splitlines() if ": " in line}
        assert names <= said


def test_defaults_are_of_their_types() -> None:
    """A default that a file could not say would be a setting that cannot be set back."""
    config, wrong = find_wrong(base())
    assert config is not None and not wrong
    again, wrong = find_wrong(plain(config))
    assert again == config and not wrong


def test_what_is_read_from_yaml_json_and_a_command_line_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        f"model: {{path: {TINY}}}\ndata:\n  train: README.md\nparallel: {{tp: 2, stages: [1, 1], pp: 2}}\n"
        "optimizer: {lr: 3e-4, clip: null, sharded: true}\nbatch:\n"
    )
    said = base(
        parallel={"tp": 2, "stages": [1, 1], "pp": 2}, optimizer={"lr": 3e-4, "clip": None, "sharded": True}
    )
    (tmp_path / "a.json").write_text(json.dumps(said))
    line = [
        ("parallel.tp", "2"), ("parallel.stages", "1,1"), ("parallel.pp", "2"),
        ("optimizer.lr", "3e-4"), ("optimizer.clip", "null"), ("optimizer.sharded", "true"),
    ]  # fmt: skip
    found = {read_config(tmp_path / "a.yaml"), read_config(tmp_path / "a.json"), read_config(base(), line)}
    assert len(found) == 1
    assert next(iter(found)).optimizer.lr == 3e-4
    assert next(iter(found)).parallel.stages == (1, 1)


def test_a_command_line_wins() -> None:
    said = base(parallel={"tp": 4})
    assert read_config(said, [("parallel.tp", "2"), ("parallel.tp", "1")]).parallel.tp == 1


# --- what is wrong ------------------------------------------------------------------------------


def test_unknown_keys_name_the_nearest_and_all_are_said_at_once() -> None:
    said = {**base(model={"pth": "x"}), "optimiser": {"lr": 1}, "batch": {"documnts": 3}, 3: {"a": 1}}
    _, wrong = find_wrong(said, [("parallel.tpp", "2"), ("run.zzz", "1")])
    assert [(error.equation.split()[0], error.hint) for error in wrong] == [
        ("model.pth", "did you mean model.path?"),
        ("optimiser", "did you mean optimizer?"),
        ("batch.documnts", "did you mean batch.documents?"),
        ("3", "shardweave train --keys lists all"),
        ("parallel.tpp", "did you mean parallel.tp?"),
        ("run.zzz", "shardweave train --keys lists all"),
    ]
    assert [error.where for error in wrong] == ["settings"] * 4 + ["the command line"] * 2
    with pytest.raises(ConfigError, match=r"\(1\) model.pth .*\(6\) run.zzz"):
        read_config(said, [("parallel.tpp", "2"), ("run.zzz", "1")])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.tp", 0), ("parallel.tp", -2), ("parallel.tp", 2.0), ("parallel.tp", True),
        ("parallel.tp", "2"), ("parallel.tp", None), ("parallel.stages", []), ("parallel.stages", [1, 0]),
        ("parallel.stages", "1,1"), ("parallel.attention", "Ring"), ("optimizer.lr", 0),
        ("optimizer.lr", float("nan")), ("optimizer.lr", float("inf")), ("optimizer.lr", "fast"),
        ("optimizer.beta1", 1.5), ("optimizer.sharded", "yes"), ("optimizer.sharded", 1),
        ("model.path", ""), ("model.path", 3), ("run.seed", -1), ("batch.sequence_length", 1),
        ("data.train", None), ("data.train", {"a": 1}), ("model.dropout", 1.0),
    ],
)  # fmt: skip
def test_values_of_another_type(key: str, value: object) -> None:
    section, _, name = key.partition(".")
    config, wrong = read(TrainConfig, base(**{section: {name: value}}))
    assert config is None and len(wrong) == 1
    assert wrong[0].equation.startswith(f"{key}=")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("parallel.tp", "1.5"), ("parallel.tp", "two"), ("parallel.tp", ""), ("parallel.tp", "٣"),
        ("optimizer.sharded", "1"), ("optimizer.lr", "1e"), ("optimizer.lr", "nan"),
        ("parallel.stages", "1;1"), ("run.seed", "9" * 30), ("model.dtype", "fp32"),
    ],
)  # fmt: skip
def test_texts_of_another_type(key: str, text: str) -> None:
    assert equations(base(), (key, text)) == [f"{key}={text!r}, wanted: {setting_type(key)}"]


def setting_type(key: str) -> str:
    return next(setting.type for setting in settings(TrainConfig) if setting.key == key)


def test_what_has_no_default_is_asked_for() -> None:
    assert equations({}) == ["model.path is not there", "data.train is not there"]


@pytest.mark.parametrize(
    ("sections", "world_size", "equation"),
    [
        ({"parallel": {"tp": 3}}, 7, "world_size(7) % (tp(3) * cp(1) * pp(1) = 3) = 1 != 0"),
        ({"parallel": {"tp": 2, "dp": 3}}, 8, "tp(2) * cp(1) * pp(1) = 2 * dp(3) = 6 != world_size(8)"),
        ({"parallel": {"tp": 3}}, 3, "num_attention_heads(4) % tp(3) = 1 != 0"),
        ({"parallel": {"tp": 3}}, 3, "kv_heads(2) * head_dim(16) = 32 % tp(3) = 2 != 0"),
        ({"parallel": {"cp": 3, "ep": 3}}, 3, "num_experts(8) % ep(3) = 2 != 0"),
        ({"parallel": {"cp": 3, "etp": 3}}, 3, "moe_intermediate_size(40) % etp(3) = 1 != 0"),
        ({"parallel": {"tp": 2, "ep": 4}}, 2, "tp(2) * cp(1) * dp(1) = 2 % (ep(4) * etp(1)) = 2 != 0"),
        ({"parallel": {"pp": 3}}, 3, "num_hidden_layers(2) < pp(3) * vp(1) = 3"),
        ({"parallel": {"vp": 2}}, 1, "vp(2) > 1 with pp(1)"),
        ({"parallel": {"pp": 2, "stages": [2]}}, 2, "stages(1) != pp(2) * vp(1) = 2"),
        ({"parallel": {"pp": 2, "stages": [1, 2]}}, 2, "sum(stages) = 3 != num_hidden_layers(2)"),
        (
            {"parallel": {"tp": 2, "cp": 3, "attention": "all_to_all"}},
            6,
            "heads(2) % cp(3) = 2 != 0",
        ),
        ({"batch": {"documents": 9}}, 4, "batch.documents(9) % dp(4) = 1 != 0"),
        (
            {"batch": {"documents": 12, "microbatch": 2}},
            4,
            "batch.documents(12) % (dp(4) * batch.microbatch(2)) = 4 != 0",
        ),
        ({"batch": {"tokens": 4096, "form": "bshd"}}, 1, "batch.tokens(4096) with batch.form(bshd)"),
        (
            {"batch": {"tokens": 101, "sequence_length": 101}, "parallel": {"tp": 2, "cp": 3}},
            6,
            "batch.tokens(101) < 108, which is batch.sequence_length(101) up to a multiple of 12",
        ),
        ({"optimizer": {"lr": 1e-4, "min_lr": 1e-3}}, 1, "optimizer.min_lr(0.001) > optimizer.lr(0.0001)"),
        ({"optimizer": {"warmup_steps": 101}}, 1, "optimizer.warmup_steps(101) > 100"),
        ({"optimizer": {"beta2": 1.0}}, 1, "optimizer.beta2(1) >= 1"),
        ({"checkpoint": {"every": 5}}, 1, "checkpoint.every(5) with checkpoint.folder(null)"),
        ({"evaluation": {"every": 5}}, 1, "evaluation.every(5) with evaluation.data(null)"),
        (
            {"model": {"path": LLAMA}, "parallel": {"cp": 2, "ep": 2}},
            2,
            "ep(2) * etp(1) > 1 with family 'llama', which has none",
        ),
        (
            {"model": {"path": LLAMA}, "loss": {"balance": 0.1}},
            1,
            "loss.balance(0.1), loss.router_z(0) with family 'llama', which has none",
        ),
    ],
)
def test_what_does_not_fit_is_an_equation(
    sections: dict[str, dict[str, Any]], world_size: int, equation: str
) -> None:
    assert equation in equations(base(**sections), world_size=world_size)


@pytest.mark.parametrize(("world_size", "dp"), [(None, 1), (4, 1), (12, 3)])
def test_dp_is_what_the_world_leaves(world_size: int | None, dp: int) -> None:
    said = base(parallel={"tp": 2, "cp": 2}, batch={"documents": 6})
    config = read_config(said, world_size=world_size)
    assert config.parallel.dp == dp


def test_a_model_that_is_not_understood_is_said_with_the_rest(tmp_path: Path) -> None:
    config = json.loads(Path(TINY, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_output_gate": True}))
    found = equations(base(model={"path": str(tmp_path)}, batch={"documents": 9}), world_size=4)
    assert found[0] == "attention_output_gate=True"
    assert found[1].startswith("batch.documents(9) % dp(4)")


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("a.yaml", "run: {steps: 1, steps: 2}", "'steps' is given twice"),
        ("a.json", '{"run": {}, "run": {}}', "'run' is given twice"),
        ("a.yaml", "run: [", "expected"),
        ("a.yaml", "- 1", "got a list"),
        ("a.json", "3", "got a int"),
        ("a.yaml", "run: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a.yaml", "run: {? [a] : 1}", "unhashable"),
        ("a.yaml", "\x00", "special characters"),
        ("a.yaml", "[" * 20000, "recursion"),
        ("a.yaml", "#" * (1 << 21), "bytes(2097152) > 1048576"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, text: str, what: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=r".") as caught:
        load(tmp_path / name)
    assert what in caught.value.equation
    assert len(str(caught.value)) < 800


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "no.yaml", tmp_path):
        with pytest.raises(MissingFileError):
            load(path)


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert load(tmp_path / "a.yaml") == {}


def test_the_classes_load_no_torch() -> None:
    """The command line reads keys from them at once."""
    code = "import sys, shardweave.train.config; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "numpy"} & set(done.stdout.split())
