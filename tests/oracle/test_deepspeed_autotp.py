"""A save of tensor-parallel ranks, converted here and by DeepSpeed's own converter: the same bits.

The save is of real DeepSpeed at TP2 x DP2 (``make_deepspeed_autotp.py``); it says as affine maps how AutoTP
cut the weights. What is written at other degrees goes through DeepSpeed's converter too.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_universal import convert as convert_by_deepspeed

from shardweave.convert import FORMATS, Zero, check_replicas, convert, open_checkpoint, prepare
from shardweave.errors import DigestError, GeometryError, ReplicaError
from shardweave.store.read import Reader

pytestmark = [pytest.mark.peer("deepspeed"), pytest.mark.peer("transformers")]

DATA = Path(__file__).parents[1] / "data" / "ds_autotp"
SAVED, UNIVERSAL = DATA / "saved", DATA / "universal"
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 12, "intermediate_size": 22, "num_hidden_layers": 1,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 23,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
NAMED = Path("none")


def held(folder: Path) -> dict[str, bytes]:
    """What a universal folder has of each weight, as torch loads it."""
    found = {}
    for path in sorted((folder / "zero").glob("*/*.pt")):
        value = torch.load(path, weights_only=False)
        tensor = value["param"] if isinstance(value, dict) else torch.as_tensor(value, dtype=torch.float32)
        found[f"{path.parent.name}/{path.name}"] = tensor.detach().contiguous().numpy().tobytes()
    return found


def go(src: Path, dst: Path, to: str, config: Any = CONFIG, **options: Any) -> Path:
    convert(prepare(src, to=to, config=config, **options), dst, fsync=False)
    return dst


@pytest.mark.parametrize("config", [CONFIG, NAMED], ids=["its config", "no config"])
def test_what_ranks_saved_is_what_deepspeed_makes_of_it(config: Any, tmp_path: Path) -> None:
    made = go(SAVED, tmp_path / "made", "universal", config)
    expected = held(UNIVERSAL)
    assert len(expected) == 12 * 4
    assert held(made / "universal") == expected


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("whole", Zero(stage=1, dp=2)),
        ("other ranks", Zero(stage=2, dp=3, tp=2)),
        ("a rank without KV heads", Zero(stage=1, dp=2, tp=3)),
        ("slots of ranks", Zero(stage=3, dp=2)),
    ],
)
def test_what_is_written_at_other_degrees_is_whole_again_by_deepspeed(
    name: str, zero: Zero, tmp_path: Path
) -> None:
    made = go(SAVED, tmp_path / "made", "deepspeed", zero=zero)
    tag = made / (made / "latest").read_text()
    convert_by_deepspeed(tag, tmp_path / "back")
    back, expected = held(tmp_path / "back"), held(UNIVERSAL)
    if zero.stage == 3:  # whose converter writes no step of a weight
        expected = {key: value for key, value in expected.items() if not key.endswith("step.pt")}
        back = {key: value for key, value in back.items() if not key.endswith("step.pt")}
    assert back == expected


def test_ranks_whose_copies_differ_are_named(tmp_path: Path) -> None:
    """A norm is on both ranks. One of its bits is turned, in the file of the second."""
    folder = tmp_path / "saved"
    shutil.copytree(SAVED, folder)
    manifest = open_checkpoint(folder, config=CONFIG).manifest
    extent = manifest.tensors["model.norm.weight@1"].extents[0]
    path = manifest.root / extent.file
    data = bytearray(path.read_bytes())
    data[extent.start + 6] ^= 1  # the fourth element
    path.write_bytes(data)
    with pytest.raises(ReplicaError, match=r"norm\.weight' at \(3,\).*norm\.weight@0.*norm\.weight@1"):
        check_replicas(open_checkpoint(folder, config=CONFIG))
    with pytest.raises(DigestError):  # the CRC of its record tells too
        go(folder, tmp_path / "dst", "hf")
    with pytest.raises(ReplicaError):
        convert(prepare(folder, to="hf", config=CONFIG), tmp_path / "dst", digests=False)
    assert not (tmp_path / "dst").exists()


def test_a_cut_that_nobody_states_is_not_guessed(tmp_path: Path) -> None:
    source = open_checkpoint(SAVED, config=CONFIG)
    with Reader(source.manifest) as reader:
        assert reader.load("lm_head.weight@0").shape == (12, 12)
    silent = replace(source.manifest, records={"untrained": frozenset()})
    with pytest.raises(GeometryError, match=r"--layout FILE"):
        FORMATS["deepspeed"].layout(source.stored, source.model, silent, None)
