"""DeepSpeed and universal targets, models that nobody describes, and what is said of an optimizer's state.

The source is what DeepSpeed itself saved; the truth is what its ``safe_get_full_*`` gave in the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_driver import Run
from safetensors.torch import load_file

from shardweave.convert import open_checkpoint, states
from shardweave.store.read import Reader

NONE = ("--config", "none")
NUM_WEIGHTS = 12


@pytest.fixture
def saved(data_dir: Path) -> Path:
    return data_dir / "ds_zero2" / "step2"


@pytest.fixture
def truth(data_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(data_dir / "ds_zero2" / "truth.safetensors")


def held(folder: Path) -> dict[str, torch.Tensor]:
    """Masters and moments in a checkpoint, under the names of the truth."""
    source = open_checkpoint(folder, config=Path("none"))
    state = states(source)
    assert state is not None
    has_masters = any(key.endswith("/master") for key in state.layout.stored())
    found = {}
    with Reader(source.manifest) as reader:
        for key in state.layout.stored():
            name, _, kind = key.removeprefix("optim/").rpartition("/")
            found[f"{'fp32' if kind == 'master' else kind}.{name}"] = torch.from_numpy(
                reader.load(key).copy()
            )
        for key in source.layout.stored() if not has_masters else ():
            found[f"fp32.{key}"] = torch.from_numpy(reader.load(key).copy())
    return found


def assert_true(folder: Path, truth: dict[str, torch.Tensor]) -> None:
    found = held(folder)
    assert found.keys() == truth.keys()
    for name, values in truth.items():
        assert torch.equal(found[name].view(torch.int32), values.view(torch.int32)), name


@pytest.mark.parametrize(
    ("flags", "masters", "files"),
    [
        (("--to", "deepspeed"), "beside bfloat16", {"bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"}),
        (
            ("--to", "deepspeed", "--zero", "2", "--dp", "3"),
            "beside bfloat16",
            {f"bf16_zero_pp_rank_{dp}_mp_rank_00_optim_states.pt" for dp in range(3)},
        ),
        (
            ("--to", "deepspeed", "--zero", "3", "--dp", "5", "--dtype", "bfloat16"),
            "weights",
            {f"bf16_zero_pp_rank_{dp}_mp_rank_00_optim_states.pt" for dp in range(5)},
        ),
        (("--to", "universal"), "weights", set()),
        (("--to", "native"), "beside bfloat16", set()),
        (("--to", "dcp"), "weights", set()),
    ],
)
def test_a_save_of_deepspeed_at_other_degrees(
    sw: Run,
    saved: Path,
    truth: dict[str, torch.Tensor],
    tmp_path: Path,
    flags: tuple[str, ...],
    masters: str,
    files: set[str],
) -> None:
    out = tmp_path / "out"
    done = sw("convert", saved, out, *flags, *NONE)
    assert (done.code, done.err) == (0, "")
    said = "exp_avg, exp_avg_sq of 12 weights; 2 updates; 1 group of settings"
    assert f"optimizer  {said}" in done.out
    assert {"weights": "weights are the masters, in float32"}.get(
        masters, f"masters {masters} weights"
    ) in done.out
    assert_true(out, truth)
    assert files <= {path.name for path in out.rglob("*optim_states.pt")}
    assert len({path.name for path in out.rglob("*optim_states.pt")}) == len(files)
    assert sw("check", out, *NONE).code == 0
    same = sw("diff", saved, out, *NONE)
    assert same.code == 0 and "states of weights among them" in same.out, same.out


@pytest.mark.parametrize("zero", ["1", "2"])
def test_masters_round_to_the_weights_that_are_written(
    sw: Run, saved: Path, truth: dict[str, torch.Tensor], tmp_path: Path, zero: str
) -> None:
    """The weights come from masters alone, by way of a universal checkpoint."""
    sw("convert", saved, tmp_path / "universal", "--to", "universal", *NONE, "-q")
    flags = ("--to", "deepspeed", "--zero", zero, "--dp", "2", "--dtype", "bfloat16")
    assert sw("convert", tmp_path / "universal", tmp_path / "out", *flags, *NONE).code == 0
    (path,) = (tmp_path / "out").rglob("mp_rank_00_model_states.pt")
    weights = torch.load(path, weights_only=True)["module"]
    for name, values in weights.items():
        assert torch.equal(values, truth[f"fp32.{name}"].bfloat16()), name


def test_in_json(sw: Run, saved: Path, tmp_path: Path) -> None:
    wanted = {
        "weights": NUM_WEIGHTS,
        "states": {"exp_avg": NUM_WEIGHTS, "exp_avg_sq": NUM_WEIGHTS},
        "updates": [2, 2],
        "groups": 1,
        "masters": "beside",
    }
    for command in (
        ("plan", saved, "--to", "deepspeed"),
        ("convert", saved, tmp_path / "o", "--to", "deepspeed", "--dry-run"),
        ("convert", saved, tmp_path / "o", "--to", "deepspeed"),
    ):
        found = json.loads(sw(*command, *NONE, "--json").out)["optimizer"]
        assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--to", "hf"), "hf has no place for it"),
        (("--to", "native", "--weights-only"), "weights alone were asked for"),
        (("--to", "dcp", "--dtype", "bfloat16"), "dcp keeps no masters beside them"),
    ],
)
def test_why_a_state_does_not_go_along(
    sw: Run, saved: Path, tmp_path: Path, flags: tuple[str, ...], why: str
) -> None:
    done = sw("convert", saved, tmp_path / "out", *flags, *NONE)
    assert done.code == 0
    assert "optimizer  left out: " in done.out and why in done.out
    # Nothing is said where there is nothing.
    again = sw("convert", tmp_path / "out", tmp_path / "again", "--to", "hf", *NONE)
    assert again.code == 0 and "optimizer" not in again.out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("hf", "--dp", "2"), "--dp"),
        (("native", "--tp", "2", "--zero", "1"), "--tp, --zero"),
        (("dcp", "--tp-grain", "2"), "--tp-grain"),
        (("universal", "--dp", "2", "--tp", "2"), "--tp, --dp"),
        (("deepspeed", "--pp", "2"), "--pp"),
        (("deepspeed", "--stages", "1,1"), "--stages"),
        (("megatron", "--dp", "2"), "--dp"),
        (("ranks", "--tp", "2"), "--tp"),
    ],
)
def test_flags_that_a_format_does_not_have(
    sw: Run, saved: Path, tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    done = sw("convert", saved, tmp_path / "out", "--to", *flags, *NONE)
    assert done.code == 2
    assert f"--to {flags[0]} with {named}" in done.err and f"leave out {named}" in done.err
    assert not (tmp_path / "out").exists()


def test_other_refusals(sw: Run, saved: Path, tmp_path: Path) -> None:
    for flags, text in (
        (("--to", "universal", "--dtype", "bfloat16"), "masters, which are in float32"),
        (("--to", "deepspeed", "--zero", "4"), "'4' is not one of 1, 2, 3"),
    ):
        done = sw("convert", saved, tmp_path / "out", *flags, *NONE)
        assert done.code == 2 and text in done.err, done.err
    assert not (tmp_path / "out").exists()


# --- a model that nobody describes --------------------------------------------------------------


def test_config_none_everywhere(sw: Run, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    without = sw("convert", saved, out, "--to", "hf")
    assert without.code == 1 and "--config none" in without.err
    assert sw("convert", saved, out, "--to", "hf", *NONE).code == 0
    # Nothing describes it, and nothing pretends to.
    assert not (out / "config.json").exists()
    assert json.loads(sw("check", saved, *NONE, "--json").out)["whole"]
    assert "plain" in sw("plan", saved, "--to", "native", *NONE, "--json").out
    assert sw("diff", saved, saved, "--config-a", "none", "--config-b", "none").code == 0
    assert "blocks.0.up.weight" in sw("show", out, *NONE).out
    for verb in (("check",), ("plan", "--to", "hf"), ("show",)):
        assert sw(verb[0], saved, *verb[1:], "--config", tmp_path / "nowhere").code == 2


def test_a_run_beside_what_was_made_of_it(sw: Run, copy_of: Callable[[str], Path]) -> None:
    """DeepSpeed's own converter puts the universal folder beside the saves; a file names each."""
    folder = copy_of("ds_zero2")
    (folder / "truth.safetensors").unlink()
    done = sw("check", folder, *NONE)
    assert (
        done.code == 1
        and "hint: give the folder of one save, which latest and latest_universal name" in done.err
    )
    assert sw("check", folder / "step2", *NONE).code == sw("check", folder / "universal", *NONE).code == 0


def test_a_file_called_none(sw: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none").write_text((data_dir / "hf_llama_tied_tiny" / "config.json").read_text())
    monkeypatch.chdir(tmp_path)
    model = data_dir / "hf_llama_tied_tiny"
    read = json.loads(sw("plan", model, "--to", "hf", "--config", "./none", "--json").out)
    assert read["source"]["family"] == "llama"
    plain = json.loads(sw("plan", model, "--to", "hf", "--config", "none", "--json").out)
    assert plain["source"]["family"] == "plain"


# --- check and diff -----------------------------------------------------------------------------


@pytest.fixture
def changed(sw: Run, copy_of: Callable[[str], Path]) -> Callable[[str, Callable[[Any], object]], Path]:
    """A copy of the save with something changed in one of its files, as torch writes it."""

    def change(file: str, how: Callable[[Any], object]) -> Path:
        folder = copy_of("ds_zero2/step2")
        what = torch.load(folder / file, weights_only=False)
        how(what)
        torch.save(what, folder / file)
        return folder

    return change


MODEL, OPTIM = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def test_a_weight_that_is_not_its_master_rounded(sw: Run, changed: Any) -> None:
    def shift(what: dict[str, Any]) -> None:
        what["module"]["blocks.1.up.weight"][3, 5] += 1

    done = sw("check", changed(MODEL, shift), *NONE, "--json")
    said = json.loads(done.out)
    assert done.code == 1
    (finding,) = said["findings"]
    assert finding["error"] == "ReplicaError" and finding["rule"].startswith("a master rounds to its weight")
    assert "blocks.1.up.weight" in finding["where"] and "1 elements differ" in finding["equation"]
    assert [step["name"] for step in said["steps"] if step["state"] == "failed"] == ["optimizer"]


def test_any_element_of_a_weight_is_compared_with_its_master(sw: Run, saved: Path, tmp_path: Path) -> None:
    out, name = tmp_path / "native", "blocks.1.up.weight"
    sw("convert", saved, out, "--to", "native", *NONE, "-q")
    manifest = open_checkpoint(out, config=Path("none")).manifest
    (extent,) = manifest.tensors[name].extents
    with (manifest.root / extent.file).open("r+b") as file:
        file.seek(extent.start + 2 * (20 * 37 + 11))
        word = file.read(2)
        file.seek(-2, 1)
        file.write(bytes([word[0] ^ 1, word[1]]))
    said = json.loads(sw("check", out, *NONE, "--json").out)
    assert [step["name"] for step in said["steps"] if step["state"] == "failed"] == ["masters", "digests"]
    assert said["findings"][0]["where"] == f"tensor '{name}' at (20, 11)"


def test_masters_are_not_read_unless_weights_are(sw: Run, saved: Path) -> None:
    steps = {
        step["name"]: step["state"]
        for step in json.loads(sw("check", saved, *NONE, "--no-digests", "--json").out)["steps"]
    }
    assert steps["masters"] == "skipped" and steps["optimizer"] == "proved"


def test_a_moment_that_differs(sw: Run, saved: Path, changed: Any) -> None:
    def shift(what: dict[str, Any]) -> None:
        what["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][7] += 1

    other = changed(OPTIM, shift)
    done = sw("diff", saved, other, *NONE)
    assert done.code == 1 and "1 tensor, 1 element" in done.out and "/exp_avg" in done.out
    assert sw("diff", saved, other, *NONE, "--weights-only").code == 0


def test_settings_and_updates_that_differ(sw: Run, saved: Path, tmp_path: Path, changed: Any) -> None:
    def other_rate(what: dict[str, Any]) -> None:
        (group,) = what["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
        group["lr"] *= 2

    def of(folder: Path) -> Path:
        for file in sorted(folder.glob("*optim_states.pt")):
            what = torch.load(file, weights_only=False)
            other_rate(what)
            for one in what["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                one["step"] += 3
            torch.save(what, file)
        return folder

    done = sw("diff", saved, of(changed(OPTIM, lambda what: None)), *NONE, "--json")
    said = json.loads(done.out)
    assert done.code == 1 and not said["differences"]
    ((one,), updates) = said["settings"], said["updates"]
    assert one["setting"] == "lr" and one["b"] == 2 * one["a"] and len(one["weights"]) == NUM_WEIGHTS
    assert len(updates) == NUM_WEIGHTS and all(u["b"] == u["a"] + 3 for u in updates.values())


def test_what_only_one_side_has_is_said(sw: Run, saved: Path, tmp_path: Path) -> None:
    sw("convert", saved, tmp_path / "alone", "--to", "native", *NONE, "--weights-only", "-q")
    done = sw("diff", saved, tmp_path / "alone", *NONE)
    assert done.code == 0 and "only a has its state; not compared" in done.out


def test_replicas_of_ranks_are_named(sw: Run, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("ds_autotp") / "saved"
    assert sw("check", folder, *NONE).code == 0
    (path,) = folder.rglob("mp_rank_01_model_states.pt")
    what = torch.load(path, weights_only=False)
    name = next(name for name in what["module"] if name.endswith("norm.weight"))
    what["module"][name][2] += 1
    torch.save(what, path)
    done = sw("check", folder, *NONE, "--json")
    found = [one for one in json.loads(done.out)["findings"] if one["rule"] == "replicas hold the same bytes"]
    assert done.code == 1 and len(found) == 1
    assert found[0]["where"] == f"tensor '{name}' at (2,), ranks 0 and 1"


def test_shapes_that_differ_and_models_described_otherwise(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    """Neither is passed over: nothing was compared, so nothing is the same."""
    from safetensors.torch import save_file

    for name, rows in (("a", 5), ("b", 6)):
        (tmp_path / name).mkdir()
        tensors = {"up.weight": torch.arange(rows * 3.0).reshape(rows, 3), "norm": torch.ones(3)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    done = sw("diff", tmp_path / "a", tmp_path / "b", *NONE)
    assert done.code == 1 and "(5, 3) in a, (6, 3) in b; values not compared" in done.out
    model = data_dir / "hf_llama_tied_tiny"
    done = sw("diff", model, model, "--config-a", "none")
    assert done.code == 1 and "described in the same way" in done.err
