"""Falcon, Phi-3, ChatGLM and Yuan through conversions: what transformers saved, and what a script wrote.

Every file goes to the native format and back, and each time is compared bit for bit with what it was made
from, by safetensors and never by what shardweave reads of itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardweave.convert import convert, open_checkpoint, prepare
from shardweave.layout import Dim
from shardweave.models import from_config
from shardweave.models.gpt_blocks import qkv_segments

DATA = Path(__file__).parents[1] / "data"
Tensors = Mapping[str, torch.Tensor]
Q, K, V, GATE, UP = 100, 200, 300, 400, 500


def tensors_of(folder: Path) -> Tensors:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype), key
        assert torch.equal(found[key].view(torch.uint8), value.view(torch.uint8)), key


def there_and_back(source: Path, folder: Path, expected: Tensors) -> None:
    convert(prepare(source, to="native"), folder / "native", fsync=False)
    stored = load_file(next((folder / "native").rglob("rank_*.safetensors")))
    # A key is of a box of a tensor; one rank wrote, so each is the whole.
    same({key.removeprefix("model/").partition("[")[0]: value for key, value in stored.items()}, expected)
    convert(prepare(folder / "native", to="hf"), folder / "hf", fsync=False)
    same(tensors_of(folder / "hf"), expected)
    assert from_config(folder / "hf") == from_config(source)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("falcon", {}),
        ("falcon", {"new_decoder_architecture": False, "multi_query": True, "tie_word_embeddings": False}),
        ("falcon", {"new_decoder_architecture": False, "parallel_attn": False, "alibi": True, "bias": True}),
        ("phi3", {}),
    ],
    ids=["falcon-new", "falcon-multi-query", "falcon-old", "phi3"],
)
def test_what_transformers_saves(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((DATA / "configs" / "tiny" / f"{family}.json").read_text()) | changes
    torch.manual_seed(3)
    name = config.pop("model_type")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **config), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    there_and_back(tmp_path / "saved", tmp_path, tensors_of(tmp_path / "saved"))
    # transformers finds every weight under its name, and nothing beyond.
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("family", ["chatglm", "yuan"])
def test_what_a_script_wrote_by_rows(tmp_path: Path, family: str) -> None:
    source = DATA / f"hf_{family}_tiny"
    whole = tensors_of(source)
    buffers = {key for key in whole if key.endswith("inv_freq")}
    assert buffers
    # Frequencies are no weights: they are named as left out. A tied head is stored once.
    kept = {key: value for key, value in whole.items() if key not in buffers and key != "lm_head.weight"}
    assert open_checkpoint(source).left_out.keys() == buffers
    there_and_back(source, tmp_path, kept)


@pytest.mark.parametrize("family", ["chatglm", "yuan"])
def test_the_script_still_writes_what_is_recorded(tmp_path: Path, family: str) -> None:
    import make_remote_code_models

    make_remote_code_models.main(tmp_path)
    same(tensors_of(tmp_path / f"hf_{family}_tiny"), tensors_of(DATA / f"hf_{family}_tiny"))
    config = Path(f"hf_{family}_tiny") / "config.json"
    assert (tmp_path / config).read_text() == (DATA / config).read_text()


def test_a_frequency_too_many_is_refused(tmp_path: Path) -> None:
    """What the model's code does not register is no buffer of it."""
    from safetensors.torch import save_file

    from shardweave.errors import UnknownNameError

    source = Path(shutil.copytree(DATA / "hf_yuan_tiny", tmp_path / "source"))
    file = source / "model.safetensors"
    save_file({**load_file(file), "model.layers.2.self_attn.rotary_emb.inv_freq": torch.zeros(2)}, file)
    with pytest.raises(UnknownNameError, match=r"model\.layers\.2\.self_attn\.rotary_emb\.inv_freq"):
        open_checkpoint(source)


def marks(rows: torch.Tensor, dim: Dim) -> list[float]:
    return [float(rows[row, 0]) for _, row in dim]


def test_rows_of_chatglm_are_what_the_script_wrote() -> None:
    source = DATA / "hf_chatglm_tiny"
    model, tensors = from_config(source), tensors_of(source)
    (attention,), (mlp,) = model.of("fused_attention"), model.of("gate_up_mlp")
    for name in attention.tensors["qkv"].names():
        for role, first, heads in (("q", Q, 6), ("k", K, 2), ("v", V, 2)):
            found = marks(tensors[name], qkv_segments(attention)[role])
            assert found == [first + 10 * head + i for head in range(heads) for i in range(8)]
    for name in mlp.tensors["gate_up"].names():
        assert [float(x) for x in tensors[name][:, 0]] == [
            first + i for first in (GATE, UP) for i in range(22)
        ]


def test_heads_of_yuan_are_what_the_script_wrote() -> None:
    """Both halves of a rank's value heads go with its rows of Q and of K."""
    from shardweave.dialects.deepspeed import LAYOUTS, AutoTP
    from shardweave.layout import whole

    source = DATA / "hf_yuan_tiny"
    model, tensors = from_config(source), tensors_of(source)
    (attention,), (mlp,) = model.of("filtered_attention"), model.of("mlp")
    assert all(float(tensors[name][0, 0]) == GATE for name in mlp.tensors["gate"].names())
    know = AutoTP(3, num_kv_heads=6, hidden=24)
    for rank in range(3):
        rows = {
            role: marks(
                tensors[next(attention.tensors[role].names())],
                LAYOUTS["yuan_value" if role == "v" else "column"](whole(24), rank, know),
            )
            for role in "qkv"
        }
        queries = {int(row) // 10 % 10 for role in "qk" for row in rows[role] if row < K}
        keys = {int(row) // 10 % 10 for role in "qk" for row in rows[role] if row >= K}
        assert queries == keys == {int(row) // 10 % 10 for row in rows["v"]} == {rank, rank + 3}
