"""``shardweave check``: what is whole passes, and every way of not being whole is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_driver import Run
from safetensors.numpy import load_file, save_file

Checkpoint = Callable[[str], tuple[Path, Path]]


@pytest.fixture
def converted(sw: Run, checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A Hugging Face folder with digests."""
    src, config = checkpoint("mc_gqa_tp2pp2")
    sizes = ("--max-file-size", "300KB")
    assert sw("convert", src, tmp_path / "hf", "--to", "hf", "--config", config, *sizes).code == 0
    return tmp_path / "hf"


def states(out: str) -> dict[str, str]:
    return {step["name"]: step["state"] for step in json.loads(out)["steps"]}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_whole(sw: Run, converted: Path, golden, tmp_path: Path) -> None:
    done = sw("check", converted)
    assert (done.code, done.err) == (0, "")
    golden("check_whole", done.out, tmp=tmp_path)
    proved = ("files", "model", "coverage", "digests")
    assert states(sw("check", converted, "--json").out) == dict.fromkeys(proved, "proved")


@pytest.mark.parametrize("name", ["mc_gqa_tp4", "mc_moe_ep2", "mc_moe_tp2ep2_etp1", "mc_moe_tp1"])
def test_megatron(sw: Run, checkpoint: Checkpoint, name: str) -> None:
    src, config = checkpoint(name)
    done = sw("check", src, "--config", config, "--json")
    assert done.code == 0
    assert states(done.out) == dict.fromkeys(("files", "model", "coverage", "digests"), "proved")


def test_a_flipped_byte_of_a_folder_of_torch(sw: Run, copy_of) -> None:
    """torch saved a CRC with each tensor, and does not look at it when it loads."""
    folder = copy_of("mc_moe_ep2") / "torch_dist"
    path = max(folder.glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    done = sw("check", folder)
    assert done.code == 1
    assert path.name in done.out + done.err


@pytest.mark.parametrize("name", ["hf_llama_tied_tiny", "hf_qwen3moe_tiny", "mc_gqa_truth_hf"])
def test_hugging_face(sw: Run, copy_of, name: str) -> None:
    folder = copy_of(name)
    for side in ("expected.safetensors", "reference_logits.safetensors"):
        (folder / side).unlink(missing_ok=True)
    assert sw("check", folder).code == 0


def test_without_a_config_files_are_still_proved(sw: Run, checkpoint: Checkpoint) -> None:
    src, _ = checkpoint("mc_moe_ep2")
    done = sw("check", src, "--json")
    assert done.code == 0
    assert states(done.out) == {"files": "proved", "model": "skipped", "digests": "proved"}
    assert "not looked at: model" in sw("check", src).out


def test_names_of_the_source_prove_nothing_of_the_model(sw: Run, converted: Path) -> None:
    done = sw("check", converted, "--config", "none", "--json")
    assert done.code == 0
    assert states(done.out) == {
        "files": "proved", "model": "skipped", "coverage": "proved", "digests": "proved",
    }  # fmt: skip
    said = sw("check", converted, "--config", "none").out
    assert "layers" not in said and "not looked at: model" in said


def test_all_findings_are_named(sw: Run, converted: Path, golden, tmp_path: Path) -> None:
    """Two flipped bits in two files, and a config of another model."""
    first, *_, last = sorted(converted.glob("*.safetensors"))
    flip(first, -1)
    flip(last, -1)
    config = json.loads((converted / "config.json").read_text())
    (converted / "config.json").write_text(json.dumps(config | {"intermediate_size": 112}))
    done = sw("check", converted)
    assert done.code == 1
    assert done.err.count("error: ") == done.err.count("hint: ") == 3
    assert f"in {first.name}" in done.err
    assert f"in {last.name}" in done.err
    golden("check_findings", f"{done.out}\n{done.err}", tmp=tmp_path)
    said = json.loads(sw("check", converted, "--json").out)
    assert not said["whole"]
    assert [found["error"] for found in said["findings"]] == ["OutsideError", "DigestError", "DigestError"]
    assert states(sw("check", converted, "--json", "--no-digests").out)["digests"] == "skipped"


def test_digests_of_arrays_that_are_not_there(sw: Run, converted: Path) -> None:
    path = converted / "shardweave.digests.json"
    digests = json.loads(path.read_text())
    digests["tensors"]["ghost"] = "0" * 32
    del digests["tensors"]["lm_head.weight"]
    path.write_text(json.dumps(digests))
    done = sw("check", converted)
    assert done.code == 1
    assert "array 'ghost'" in done.err
    assert "array 'lm_head.weight'" in done.err
    assert done.err.count("error: ") == 2


def test_drifted_copy(sw: Run, copy_of) -> None:
    folder = copy_of("hf_llama_tied_tiny")
    (folder / "expected.safetensors").unlink()
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = sw("check", folder, "--json")
    assert states(done.out)["replicas"] == "proved"
    tensors["lm_head.weight"][7, 2] = -tensors["lm_head.weight"][7, 2]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = sw("check", folder)
    assert done.code == 1
    assert "replicas hold the same bytes: tensor 'model.embed_tokens.weight' at (7, 2)" in done.err


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "model-00002-of-00002.safetensors"),
        (lambda f: cut(f / "model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "config"),
        (lambda f: rename(f / "model.safetensors.index.json", "lm_head", "lm_haed"), "lm_haed"),
        (lambda f: (f / "shardweave.digests.json").write_text("[]"), "digests"),
    ],
)
def test_damage(sw: Run, converted: Path, damage: Callable[[Path], object], text: str) -> None:
    damage(converted)
    done = sw("check", converted)
    assert done.code == 1
    assert text in done.err


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def rename(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def test_unfinished(sw: Run, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    src, out = data_dir / "hf_llama_tied_tiny", tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("shardweave.store.digest.write_sidecar", stop)
        assert sw("convert", src, out, "--to", "hf").code == 130
    done = sw("check", out)
    assert done.code == 1
    assert done.err.count("error: ") == 1
    assert "not finished" in done.err
    again = sw("convert", src, out, "--to", "hf")
    assert again.code == 0
    assert "20 extents of an earlier run kept" in again.out
    assert sw("check", out).code == 0


def test_nothing_there(sw: Run, tmp_path: Path) -> None:
    assert sw("check", tmp_path / "nowhere").code == 2
    assert sw("check", tmp_path).code == 1
