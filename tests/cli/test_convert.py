"""``shardweave convert``, end to end, with the weights compared by safetensors itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_driver import Run
from safetensors.numpy import load_file, save_file

from shardweave.layout import Box
from shardweave.store import torch_dist
from shardweave.store.native_held import Held
from shardweave.store.native_manifest import About
from shardweave.store.native_write import Saver

Checkpoint = Callable[[str], tuple[Path, Path]]


def weights(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in folder.glob("model*.safetensors"):
        found |= load_file(path)
    return found


def assert_same(left: Path, right: Path) -> None:
    a, b = weights(left), weights(right)
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        np.testing.assert_array_equal(a[key].view(np.uint32), b[key].view(np.uint32), err_msg=key)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    stats = {path: path.stat() for path in [folder, *folder.rglob("*")]}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.mark.parametrize("name", ["mc_gqa_tp2pp2", "mc_gqa_tp4"])
def test_megatron_becomes_the_true_weights(
    process: Run, checkpoint: Checkpoint, data_dir: Path, tmp_path: Path, name: str
) -> None:
    src, config = checkpoint(name)
    done = process("convert", src, tmp_path / "out", "--to", "hf", "--config", config)
    assert (done.code, done.err) == (0, "")
    assert_same(tmp_path / "out", data_dir / "mc_gqa_truth_hf")


def test_experts_there_and_back(sw: Run, checkpoint: Checkpoint, data_dir: Path, tmp_path: Path) -> None:
    src, config = checkpoint("mc_moe_tp2ep2_etp1")
    there = sw("convert", src, tmp_path / "hf", "--to", "hf", "--config", config)
    geometry = ("--tp", "2", "--ep", "2", "--etp", "1", "--max-file-size", "200KB")
    back = sw("convert", tmp_path / "hf", tmp_path / "back", "--to", "torch_dist", *geometry)
    again = sw("convert", tmp_path / "back", tmp_path / "again", "--to", "hf", "--memory", "1MiB")
    assert (there.code, back.code, again.code) == (0, 0, 0)
    assert_same(tmp_path / "hf", data_dir / "mc_moe_truth_hf")
    assert_same(tmp_path / "again", data_dir / "mc_moe_truth_hf")
    assert len(list((tmp_path / "back").glob("*.distcp"))) > 1


def test_table(sw: Run, checkpoint: Checkpoint, golden, data_dir: Path, tmp_path: Path) -> None:
    src, config = checkpoint("mc_gqa_tp2pp2")
    first = sw("convert", src, tmp_path / "out", "--to", "hf", "--config", config)
    second = sw("convert", tmp_path / "out", tmp_path / "back", "--to", "megatron", "--tp", "2")
    golden("convert", f"{first.out}\n{second.out}", tmp=tmp_path, data=data_dir)
    assert first.err == second.err == ""


def test_json(sw: Run, checkpoint: Checkpoint, tmp_path: Path) -> None:
    src, config = checkpoint("mc_gqa_tp2pp2")
    done = sw("convert", src, tmp_path / "out", "--to", "hf", "--config", config, "--json")
    said = json.loads(done.out)
    books = said["account"]
    # 139,904 parameters of four bytes each.
    assert books["used"] == said["written_bytes"] == said["needed_bytes"] == 139_904 * 4
    parts = books["used"] + books["replica"] + books["format"] + sum(books["padding"].values())
    assert parts + sum(one["bytes"] for one in books["left_out"].values()) == books["total"]
    assert books["total"] == sum(path.stat().st_size for path in src.glob("*.distcp"))
    assert said["target"] == {"path": str(tmp_path / "out"), "format": "hf", "arrays": 47}
    assert done.err == ""


def test_quiet(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    done = sw("convert", data_dir / "hf_llama_tied_tiny", tmp_path / "out", "--to", "hf", "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_dtype(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    src = data_dir / "hf_llama_tied_tiny"
    assert sw("convert", src, tmp_path / "out", "--to", "hf", "--dtype", "float16").code == 0
    wide = load_file(src / "model.safetensors")
    for key, narrow in weights(tmp_path / "out").items():
        np.testing.assert_array_equal(narrow, wide[key].astype(np.float16))


def test_to_torch_and_back(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    """The tied head is there under both names; the keys are those that were asked for."""
    src = data_dir / "hf_llama_tied_tiny"
    assert sw("convert", src, tmp_path / "dcp", "--to", "torch_dcp:model=app.model").code == 0
    manifest = torch_dist.read(tmp_path / "dcp")
    assert {"app.model.lm_head.weight", "app.model.model.embed_tokens.weight"} <= manifest.tensors.keys()
    assert not manifest.records["objects"]
    back = sw("convert", tmp_path / "dcp", tmp_path / "hf", "--to", "hf", "--json")
    assert json.loads(back.out)["source"]["format"] == "dcp"
    assert_same(tmp_path / "hf", src)
    assert sw("diff", tmp_path / "dcp", src).code == 0


def test_weights_alone(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    """A state that is there in part is refused with the way around it, which is then gone."""
    names = load_file(data_dir / "hf_llama_tied_tiny" / "model.safetensors")
    tensors = {f"model/{name}": values for name, values in names.items()}
    first = next(iter(names))
    tensors[f"optim/{first}/exp_avg"] = np.zeros_like(names[first])
    boxes = (
        Held(key, values.shape, "float32", Box.of((0,) * values.ndim, values.shape), values)
        for key, values in tensors.items()
    )
    config = json.loads((data_dir / "hf_llama_tied_tiny" / "config.json").read_text())
    src = Saver(tmp_path / "run", fsync=False).save(boxes, About(step=1, config=config))
    done = sw("convert", src, tmp_path / "dcp", "--to", "dcp")
    assert (done.code, done.out) == (1, "")
    assert "convert the weights alone with --weights-only" in done.err
    assert not (tmp_path / "dcp").exists()
    plan = sw("plan", src, "--to", "dcp", "--weights-only")
    assert plan.code == 0
    done = sw("convert", src, tmp_path / "dcp", "--to", "dcp", "--weights-only")
    assert done.code == 0 and f"optim/{first}/exp_avg" in done.out


def test_options_of_the_files(sw: Run, checkpoint: Checkpoint, tmp_path: Path) -> None:
    src, config = checkpoint("mc_moe_ep2")
    switches = ("--stacked-experts", "--no-digests", "--no-fsync", "--workers", "2")
    assert sw("convert", src, tmp_path / "out", "--to", "hf", "--config", config, *switches).code == 0
    assert not (tmp_path / "out" / "shardweave.digests.json").exists()
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in weights(tmp_path / "out"))


# --- what is refused ----------------------------------------------------------------------------


def test_refusals(sw: Run, golden, checkpoint: Checkpoint, copy_of, data_dir: Path, tmp_path: Path) -> None:
    """A drifted tied head, a target that holds something, a target inside its source, no config."""
    drifted = copy_of("hf_llama_tied_tiny")
    tensors = load_file(drifted / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, drifted / "model.safetensors", metadata={"format": "pt"})
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    src, _ = checkpoint("mc_moe_ep2")
    shown = []
    for code, *command in [
        (1, drifted, tmp_path / "out", "--to", "hf"),
        (2, data_dir / "hf_llama_tied_tiny", full, "--to", "hf"),
        (1, drifted, drifted / "inside", "--to", "hf"),
        (1, src, tmp_path / "out", "--to", "hf"),
    ]:
        done = sw("convert", *command)
        assert (done.code, done.out) == (code, "")
        shown.append(done.err)
    assert "replicas hold the same bytes" in shown[0]
    assert "--force" in shown[1]
    assert [path.name for path in full.iterdir()] == ["notes.txt"]
    assert not (tmp_path / "out").exists()
    golden("convert_refusals", "\n".join(shown), tmp=tmp_path, data=data_dir)


def test_force_replaces(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    src, out = data_dir / "hf_llama_tied_tiny", tmp_path / "out"
    assert sw("convert", src, out, "--to", "hf").code == 0
    assert sw("convert", src, out, "--to", "megatron").code == 2
    assert sw("convert", src, out, "--to", "megatron", "--force").code == 0
    assert not list(out.glob("*.safetensors"))
    assert sw("check", out).code == 0


# --- dry runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [(), ("--json",), ("--quiet",)])
def test_dry_run_writes_nothing(
    sw: Run, checkpoint: Checkpoint, copy_of, tmp_path: Path, form: tuple[str, ...]
) -> None:
    copied = copy_of("mc_gqa_tp2pp2/torch_dist")
    _, config = checkpoint("mc_gqa_tp2pp2")
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    before = listing(tmp_path)
    for out in (tmp_path / "out", full):
        assert sw("convert", copied, out, "--to", "hf", "--config", config, "--dry-run", *form).code == 0
    assert listing(tmp_path) == before


def test_dry_run_names_the_files_that_are_written(
    sw: Run, checkpoint: Checkpoint, data_dir: Path, tmp_path: Path, golden
) -> None:
    src, config = checkpoint("mc_gqa_tp2pp2")
    command = ("convert", src, tmp_path / "out", "--to", "hf", "--config", config, "--max-file-size", "200KB")
    said = json.loads(sw(*command, "--dry-run", "--json").out)
    golden("dry_run", sw(*command, "--dry-run").out, tmp=tmp_path, data=data_dir)
    assert sw(*command).code == 0
    written = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(written) > 2
    assert said["files"] == {
        name: sum(tensor.nbytes for tensor in tensors.values()) for name, tensors in written.items()
    }
    assert said["target"]["arrays"] == sum(map(len, written.values()))


# --- progress -----------------------------------------------------------------------------------

TERMINAL = """
import os, pty, sys
status = pty.spawn([sys.executable, "-m", "shardweave", *sys.argv[1:]])
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("off", ["", "NO_COLOR", "SHARDWEAVE_NO_PROGRESS"])
def test_progress_is_for_terminals(
    process: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm-256color")
    if off:
        monkeypatch.setenv(off, "1")
    command = ("convert", data_dir / "hf_llama_tied_tiny", tmp_path / "out", "--to", "hf")
    done = process(*command, program=(sys.executable, "-c", TERMINAL))
    assert done.code == 0, done.out
    assert ("converting" in done.out) == (not off)
