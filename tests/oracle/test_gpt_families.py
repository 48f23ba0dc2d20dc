"""GPT-2, GPT-J, GPTBigCode, CodeGen and Bloom: folders of transformers there and back, and fused rows.

Which rows are Q, K and V is asked of the models' own code: two heads that change places in all three, and in
the output projection, leave the logits as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shardweave.convert import convert, open_checkpoint, prepare
from shardweave.errors import ModelError, UnknownNameError
from shardweave.models import from_config
from shardweave.models.gpt_blocks import qkv_segments

pytestmark = pytest.mark.peer("transformers")

TINY = Path(__file__).parents[1] / "data" / "configs" / "tiny"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "gptj": ("gptj", {}),
    "gptj-tied": ("gptj", {"tie_word_embeddings": True}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode-heads": ("gpt_bigcode", {"multi_query": False}),
    "codegen": ("codegen", {}),
    "bloom": ("bloom", {}),
}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    family, own = CASES[name]
    return json.loads((TINY / f"{family}.json").read_text()) | own | changes


def build(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(11)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values)).eval()


@pytest.mark.parametrize("name", CASES)
def test_a_folder_goes_through_native_and_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    src, native, back = (tmp_path / folder for folder in ("src", "native", "back"))
    model = build(config_of(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(src)
    convert(prepare(src, to="native"), native, fsync=False)
    convert(prepare(native, to="hf"), back, fsync=False)
    one, other = load_file(src / "model.safetensors"), load_file(back / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(
        torch.equal(value.view(torch.int32), other[key].view(torch.int32)) for key, value in one.items()
    )
    again, info = AutoModelForCausalLM.from_pretrained(back, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(8)[None]
    assert torch.equal(again.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "codegen"])
def test_masks_of_old_files_are_left_out_by_name(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    build(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    buffers = from_config(config).buffers
    save_file(weights | {key: torch.ones(1, 1, 19, 19, dtype=torch.uint8) for key in buffers}, file)
    found = open_checkpoint(tmp_path)
    assert found.left_out.keys() == buffers and buffers
    assert set(found.layout.arrays(0)) == set(weights)
    save_file(weights | {"transformer.h.0.attn.rotary": torch.ones(3)}, file)
    with pytest.raises(UnknownNameError, match=r"unexpected 1 \(transformer.h.0.attn.rotary\)"):
        open_checkpoint(tmp_path)


# --- which rows are Q, K and V ------------------------------------------------------------------

MODULES = {
    "gpt2": "transformer.h.0.attn.c_attn",
    "gpt_bigcode": "transformer.h.0.attn.c_attn",
    "gpt_bigcode-heads": "transformer.h.0.attn.c_attn",
    "codegen": "transformer.h.0.attn.qkv_proj",
    "bloom": "transformer.h.0.self_attention.query_key_value",
}


@pytest.mark.parametrize("name", MODULES)
def test_the_rows_of_q_k_and_v_are_those_that_the_code_reads(name: str) -> None:
    """Exchanging two heads in any two of Q, K and V only does not leave the logits: the test can fail."""
    config = config_of(name)
    model = build(config).double()
    (block,) = (b for b in from_config(config).blocks if b.kind in ("fused_attention", "conv_attention"))
    segments = {role: [row for _, row in dim] for role, dim in qkv_segments(block).items()}
    size, heads, kv_heads = (block.sizes[key] for key in ("head_dim", "num_heads", "num_kv_heads"))
    num_rows = (heads + 2 * kv_heads) * size
    assert sorted(row for rows in segments.values() for row in rows) == list(range(num_rows))

    fused = model.get_submodule(MODULES[name])
    parent = model.get_submodule(MODULES[name].rpartition(".")[0])
    out = next(getattr(parent, o) for o in ("c_proj", "out_proj", "dense") if hasattr(parent, o))
    conv = block.kind == "conv_attention"
    if name == "bloom":  # each head has a slope of its own: without positions, all are alike
        real = model.transformer.build_alibi_tensor
        model.transformer.build_alibi_tensor = lambda *args, **kwargs: real(*args, **kwargs) * 0

    def exchanged(count: int, places: list[int]) -> np.ndarray:
        """Rows with those of two heads exchanged; ``places`` are the rows by head."""
        rows = np.arange(count)
        one, other = (places[h * size : (h + 1) * size] for h in (1, heads - 2))
        rows[one], rows[other] = other, one
        return rows

    def logits(roles: str) -> torch.Tensor:
        """With two heads exchanged in the output projection, and in some of Q, K and V."""
        rows = np.arange(num_rows)
        for role in roles if kv_heads > 1 else roles[:1]:
            rows = rows[exchanged(num_rows, segments[role])]
        columns = exchanged(heads * size, list(range(heads * size)))
        kept = [(p, p.detach().clone()) for p in (fused.weight, fused.bias, out.weight) if p is not None]
        for parameter, value in kept:
            if parameter is out.weight:
                parameter.copy_(value[columns] if conv else value[:, columns])
            else:
                parameter.copy_(value[:, rows] if conv and value.dim() == 2 else value[rows])
        found = model(ids, attention_mask=seen).logits
        for parameter, value in kept:
            parameter.copy_(value)
        return found

    ids = torch.arange(24).reshape(2, 12) % config["vocab_size"]
    seen = torch.ones_like(ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
        expected = model(ids, attention_mask=seen).logits
        torch.testing.assert_close(logits("qkv"), expected, rtol=0, atol=1e-5)
        for roles in ("qk", "qv", "kv") if kv_heads > 1 else ("",):
            assert (logits(roles) - expected).abs().max() > 1e-3, roles


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not False"),
        ("gpt2", {"hidden_size": 31}, r"n_embd\(30\) != hidden_size\(31\)"),
        ("gpt2", {"n_head": 7}, r"hidden_size\(30\) % num_attention_heads\(7\) = 2"),
        ("gpt2", {"intermediate_size": 22}, "intermediate_size=22 is not None"),
        ("gpt2", {"n_positions": None}, "max_position_embeddings=None"),
        ("gpt2", {"qkv_bias": False}, "qkv_bias=False"),
        ("gptj", {"num_key_value_heads": 2}, "num_key_value_heads=2 is not None"),
        ("gpt_bigcode", {"num_key_value_heads": 6}, r"num_key_value_heads\(6\) != 1, multi_query=True"),
        (
            "gpt_bigcode-heads",
            {"num_key_value_heads": 1},
            r"num_key_value_heads\(1\) != 6, multi_query=False",
        ),
        ("gpt_bigcode", {"multi_query": 1}, "multi_query=1"),
        ("codegen", {"n_head": 6}, r"num_attention_heads\(6\) % 4 = 2"),
        ("bloom", {"n_inner": 100}, "n_inner=100 is not None"),
        ("bloom", {"n_embed": 36}, r"n_embed\(36\) != hidden_size\(30\)"),
        ("bloom", {"architectures": ["BloomModel"]}, r"architectures=\['BloomModel'\]"),
    ],
)
def test_what_a_config_says_and_is_not_so(name: str, changes: dict[str, Any], message: str) -> None:
    from_config(config_of(name))
    with pytest.raises(ModelError, match=message) as error:
        from_config(config_of(name, **changes))
    assert error.value.hint


def test_other_dialects_refuse_what_they_do_not_describe() -> None:
    from shardweave.dialects import megatron, vllm
    from shardweave.errors import ShardweaveError

    for name in CASES:
        model = from_config(config_of(name))
        for dialect in (megatron, vllm):
            with pytest.raises(ShardweaveError, match=r"kind|family"):
                dialect.layout(model, dialect.mesh(tp=2))
