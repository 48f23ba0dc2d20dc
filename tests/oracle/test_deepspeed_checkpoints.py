"""DeepSpeed's own checkpoints, native and universal, against what its engine said of its state."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from shardweave.store import deepspeed, deepspeed_universal
from shardweave.store.read import Reader

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_save_of_each_stage_is_what_the_engine_held(stage: int) -> None:
    root = DATA / f"ds_zero{stage}"
    manifest = deepspeed.read(root)
    truth = load_file(root / "truth.safetensors")
    with Reader(manifest) as reader:
        for key, expected in truth.items():
            state, name = key.split(".", 1)
            master = name if stage == 3 else f"optim/{name}/master"
            found = reader.load(master if state == "fp32" else f"optim/{name}/{state}")
            assert found.shape == expected.shape, key
            assert found.tobytes() == expected.tobytes(), key
            if state == "fp32" and stage < 3:
                # The module's weights are the masters, rounded to bf16: to even, of the upper half.
                words = expected.reshape(expected.shape).view("<u4")
                rounded = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype("<u2")
                assert (reader.load(name) == rounded).all(), name
    assert len(manifest.tensors) == len(truth) + (len(truth) // 3 if stage < 3 else 0)
    record = manifest.records["optimizer"]
    assert set(record.count.values()) == {2}
    assert [name for group in record.groups for name in group["params"]] == list(record.count)
    assert record.groups[0]["lr"] == 0.01
    assert record.groups[0]["betas"] == (0.9, 0.999)
    assert manifest.records["untrained"] == frozenset()
    assert manifest.records["deepspeed"]["stage"] == stage


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_universal_checkpoint_is_what_the_engine_held(stage: int) -> None:
    root = DATA / f"ds_zero{stage}"
    manifest = deepspeed_universal.read(root)
    truth = load_file(root / "truth.safetensors")
    with Reader(manifest) as reader:
        for key, expected in truth.items():
            state, name = key.split(".", 1)
            found = reader.load(name if state == "fp32" else f"optim/{name}/{state}")
            assert found.shape == expected.shape, key
            assert found.tobytes() == expected.tobytes(), key
    assert len(manifest.tensors) == len(truth)
    record = manifest.records["optimizer"]
    assert record.count == deepspeed.read(root).records["optimizer"].count
    assert record.groups == deepspeed.read(root).records["optimizer"].groups
