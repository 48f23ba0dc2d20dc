"""Public reports on latent attention, layers for further tokens and block scales, named after the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardweave.convert import Geometry, convert, open_checkpoint, prepare
from shardweave.dialects import hf, megatron, vllm
from shardweave.errors import CutError, GeometryError, ModelError, ReplicaError, UnknownNameError
from shardweave.layout import Dim, Layout, balanced, concat, cut, even, on_grid, whole
from shardweave.models import Model, from_config
from shardweave.plan import empty, plan, simulate

TINY = json.loads((Path(__file__).parents[1] / "data/configs/tiny/deepseek_v3.json").read_text())
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def model(**changes: Any) -> Model:
    return from_config(TINY | changes)


def names(described: Model) -> set[str]:
    return {name for tensor in described.tensors for name in tensor.names()}


def random(described: Model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    found = {
        name: rng.standard_normal(tensor.shape).astype(np.float32)
        for tensor in described.tensors
        for name in tensor.names()
    }
    return found | {name: found[of] for name, of in described.copies.items()}


def write(folder: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(source: Path, target: Path, **choices: Any) -> dict[str, np.ndarray]:
    convert(prepare(source, **choices), target, fsync=False)
    return load_file(target / "model.safetensors") if choices["to"] == "hf" else {}


def held(layout: Layout, rank: int, ending: str) -> Dim:
    """What a rank holds of the first shape dim of the first array with this ending."""
    buffer, _ = next(value for name, value in layout.arrays(rank).items() if name.endswith(ending))
    return buffer.dims[buffer.stacked[0]]


# --- layers for further tokens --------------------------------------------------------------------


@pytest.mark.parametrize("further", [0, 1, 3])
def test_b063_megatron_bridge_5495_further_layers_are_optional_as_a_set(further: int, tmp_path: Path) -> None:
    """Weights trained without them are a whole model; some of them are none."""
    full = model(num_hidden_layers=4, num_nextn_predict_layers=further)
    weights = random(full)
    decoder = {name: weights[name] for name in names(full.decoder)}
    source = write(tmp_path / "src", decoder, num_nextn_predict_layers=further)
    assert open_checkpoint(source).model == full.decoder
    run(source, tmp_path / "mc", to="megatron", geometry=Geometry(tp=2, vocab_divisor=1))
    back = run(tmp_path / "mc", tmp_path / "hf", to="hf", config=source / "config.json")
    assert back.keys() == decoder.keys()
    if further == 3:
        some = {name: value for name, value in weights.items() if ".layers.6." not in name}
        torn = write(tmp_path / "torn", some, num_nextn_predict_layers=further)
        with pytest.raises(UnknownNameError, match=r"missing .*model\.layers\.6\."):
            open_checkpoint(torn)


@pytest.mark.parametrize("live", megatron.MTP_LAYERS)
def test_b065_megatron_bridge_4819_both_names_of_the_inner_layer_are_one_role(live: str) -> None:
    described = model()
    stored = megatron.checkpoint(described, layer_keys="per_layer", mtp_layer=live)
    keys = set(stored.arrays(0))
    assert any(key.startswith(f"mtp.layers.1.{live}.") for key in keys)
    assert megatron.variant(keys, described) == stored
    weights = random(described)
    files = hf.layout(described)
    source = simulate(plan(files, stored), {0: weights}, into=empty(stored, np.float32, fill=np.nan))
    back = simulate(plan(stored, files), source, into=empty(files, np.float32, fill=np.nan))
    for name, value in weights.items():
        assert back[0][name].tobytes() == value.tobytes(), name
    unknown = {key.replace(f".{live}.", ".inner_layer.") for key in keys}
    with pytest.raises(UnknownNameError, match=r"unexpected \d+ \(mtp\.layers\.0\."):
        megatron.variant(unknown, described)
    with pytest.raises(GeometryError, match=r"mtp_layer\('inner_layer'\)"):
        megatron.layout(described, megatron.mesh(), mtp_layer="inner_layer")


@pytest.mark.parametrize("tied", [False, True])
def test_b066_megatron_bridge_5380_the_embedding_is_on_the_first_and_the_further_stage(tied: bool) -> None:
    described = model(tie_word_embeddings=tied)
    layout = megatron.layout(described, megatron.mesh(pp=4), vocab_divisor=1)
    ends = {
        rank: {b.name for b in layout.buffers(rank) if "embedding" in b.name or "output" in b.name}
        for rank in range(4)
    }
    embedding, head = "embedding.word_embeddings.weight", "output_layer.weight"
    assert ends == {0: {embedding}, 1: set(), 2: set(), 3: {embedding, head}}
    copies = {part.replica for b in layout.buffers(3) if b.name == embedding for part in b.parts}
    assert copies == {True}, "the copy owns nothing"


def test_b066_megatron_bridge_5380_a_copy_that_drifted_is_found(tmp_path: Path) -> None:
    weights = random(model())
    drifted = weights["model.layers.5.embed_tokens.weight"].copy()
    drifted[7, 3] += 1
    source = write(tmp_path / "src", {**weights, "model.layers.5.embed_tokens.weight": drifted})
    with pytest.raises(ReplicaError, match=r"embed_tokens\.weight' at \(7, 3\)"):
        run(source, tmp_path / "mc", to="megatron", geometry=Geometry(vocab_divisor=1))


def test_b067_tensorrt_llm_14457_the_count_of_layers_is_that_of_the_decoder() -> None:
    described = model(num_hidden_layers=4, num_nextn_predict_layers=1)
    assert described.num_layers == 4
    assert {n for block in described.decoder.blocks for _, n in block.layers} == {0, 1, 2, 3}
    with pytest.raises(UnknownNameError, match=r"layers\.4\."):
        hf.variant(names(described), model(num_hidden_layers=4, num_nextn_predict_layers=0))


def test_b130_slime_2270_what_the_trainer_has_not_is_refused_by_name(tmp_path: Path) -> None:
    """A file without the further layers' projection is no checkpoint with them and none without."""
    weights = random(model())
    del weights["model.layers.4.eh_proj.weight"]
    with pytest.raises(UnknownNameError, match=r"missing 1 \(model\.layers\.4\.eh_proj\.weight\)"):
        open_checkpoint(write(tmp_path / "src", weights))


# --- latent attention -----------------------------------------------------------------------------


@pytest.mark.parametrize("down", ["replicated", "column"])
def test_b069_te_715_replicated_weights_are_told_from_cut_ones_by_the_layout(down: str) -> None:
    """Norms of 3 and 4 make 5 at any tp: what counts once and what counts by share follows from the axes."""
    described, tp = model(hidden_size=40, intermediate_size=40, moe_intermediate_size=20), 2
    layout = megatron.layout(described, megatron.mesh(tp=tp), vocab_divisor=1, down_proj=down)
    total = 0.0
    for ending, norm in ("linear_q_down_proj.weight", 3.0), ("linear_q_up_proj.weight", 4.0):
        rule = next(rule for rule in layout.rules if rule.name.endswith(ending))
        cut_over_tp = "tp" in rule.axes
        assert cut_over_tp == (down == "column" or norm == 4.0)
        held_by_a_rank, owners = (norm**2 / tp, tp) if cut_over_tp else (norm**2, 1)
        total += held_by_a_rank * owners
    assert total == 25.0


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_b070_paddlefleet_1070_rows_are_divided_once(tp: int) -> None:
    """16 heads of 256 rows: 4096 in all, 1024 a rank at tp 4, never 256."""
    described = model(
        num_attention_heads=16, num_key_value_heads=16, qk_nope_head_dim=128, v_head_dim=128,
        q_lora_rank=32, kv_lora_rank=60, qk_rope_head_dim=4, hidden_size=64, intermediate_size=64,
        moe_intermediate_size=32, n_routed_experts=2, num_nextn_predict_layers=0,
    )  # fmt: skip
    for layout, ending in (
        (megatron.layout(described, megatron.mesh(tp=tp), vocab_divisor=1), "linear_kv_up_proj.weight"),
        (vllm.layout(described, vllm.mesh(tp=tp)), "kv_b_proj.weight"),
    ):
        rows = [held(layout, rank, ending) for rank in range(tp)]
        assert {len(dim) for dim in rows} == {4096 // tp}
        assert concat(*rows) == whole(4096)


def test_b071_sglang_30761_derived_weights_are_no_weights_of_the_model() -> None:
    """What an engine derives from kv_b has no place in a layout: it is made again, and never sent."""
    layout = vllm.layout(model(), vllm.mesh(tp=2))
    stored = {name.rpartition(".self_attn.")[2] for name in layout.arrays(0) if ".self_attn." in name}
    assert stored == {
        f"{name}.weight"
        for name in ("fused_qkv_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj")
    }


# --- block scales ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "rows"), [([192, 192], 4), ([64] * 4, 4), ([384, 64, 64], 5)], ids=str)
def test_b080_vllm_52997_parts_that_are_no_blocks_have_no_common_grid(parts: list[int], rows: int) -> None:
    """Rounding the sum up gives fewer rows than the parts have: such a fusion is refused, not guessed."""
    assert sum(-(-part // 128) for part in parts) == rows > -(-sum(parts) // 128)
    labels = [f"p{i}" for i in range(len(parts))]
    fused = concat(*(whole(n, label) for n, label in zip(parts, labels, strict=True)))
    with pytest.raises(CutError, match=r"% block\(128\) = 64"):
        on_grid(fused, 128, dict(zip(labels, parts, strict=True)))


def test_b080_vllm_52997_ranks_of_half_a_block_are_refused() -> None:
    with pytest.raises(CutError, match=r"end\(64\) % block\(128\) = 64"):
        on_grid(even(whole(512), 8, 0), 128, {"": 512})


def test_b081_sglang_3345_what_is_not_on_the_grid_is_refused_when_planning() -> None:
    """18432 / 32 = 576 = 4.5 blocks; 18432 / 16 = 9 blocks; 12 blocks over 8 ranks as 2 2 2 2 1 1 1 1."""
    with pytest.raises(CutError, match=r"end\(576\) % block\(128\) = 64"):
        on_grid(even(whole(18432), 32, 0), 128, {"": 18432})
    assert [len(on_grid(even(whole(18432), 16, r), 128, {"": 18432})) for r in range(16)] == [9] * 16
    uneven = [balanced(whole(1536), 8, r, block=128) for r in range(8)]
    assert [len(on_grid(dim, 128, {"": 1536})) for dim in uneven] == [2, 2, 2, 2, 1, 1, 1, 1]
    sizes: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 1152, "moe_intermediate_size": 256, "n_shared_experts": 1,
        "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "qk_rope_head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 8,
    }  # fmt: skip
    described = model(**sizes, quantization_config=FP8)
    with pytest.raises(
        GeometryError, match=r"mlp\.gate_up_proj\.weight', run gate\[0:576\] of 1152: .*end\(576\).* = 64"
    ):
        vllm.layout(described, vllm.mesh(tp=2))


def test_b082_xinfer_252_empty_shares_and_no_negative_ones() -> None:
    """Shares rounded up to blocks: ranks 0 to 5 own 256 rows, 6 and 7 none, and all is covered once."""
    shares = [cut(whole(1536), min(r * 256, 1536), min((r + 1) * 256, 1536)) for r in range(8)]
    blocks = [on_grid(dim, 128, {"": 1536}) for dim in shares]
    assert [len(dim) for dim in blocks] == [2] * 6 + [0] * 2
    assert concat(*blocks) == whole(12)


def test_b084_sglang_19983_scales_are_cut_in_the_dim_that_their_weights_are() -> None:
    """Rows of kv_b and columns of o, whatever the dtype."""
    described = model(
        hidden_size=256, intermediate_size=512, moe_intermediate_size=256, n_shared_experts=1,
        q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=128, v_head_dim=128, qk_rope_head_dim=128,
        num_attention_heads=4, num_key_value_heads=4, quantization_config=FP8,
    )  # fmt: skip
    arrays = [vllm.layout(described, vllm.mesh(tp=2)).arrays(rank) for rank in range(2)]
    prefix = "model.layers.0.self_attn."
    for rank in range(2):
        up, _ = arrays[rank][f"{prefix}kv_b_proj.weight_scale_inv"]
        assert (str(up.dims[1]), str(up.dims[2])) == (("[0:4]", "[4:8]")[rank], "[0:1]")
        out, _ = arrays[rank][f"{prefix}o_proj.weight_scale_inv"]
        assert (str(out.dims[1]), str(out.dims[2])) == ("[0:2]", ("[0:2]", "[2:4]")[rank])
        norm, _ = arrays[rank]["model.norm.weight"]
        assert norm.dims == (whole(256),)


def test_b085_vllm_21404_a_last_part_may_end_in_half_a_block() -> None:
    sizes = {"q_a": 1536, "kv_a": 576}
    fused = concat(whole(1536, "q_a"), whole(576, "kv_a"))
    assert on_grid(fused, 128, sizes) == concat(whole(12, "q_a"), whole(5, "kv_a"))
    with pytest.raises(CutError, match=r"run kv_a\[0:576\] of 576"):
        on_grid(concat(whole(576, "kv_a"), whole(1536, "q_a")), 128, sizes)
    with pytest.raises(CutError, match=r"end\(288\) % block\(128\) = 32"):
        on_grid(even(whole(576), 2, 0), 128, {"": 576})


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, r"bits=4"),
        ({"quant_method": "awq"}, r"quant_method='awq' is not fp8"),
        ({"quant_method": "fp8"}, r"weight_block_size=None"),
        ({**FP8, "fmt": "e5m2"}, r"fmt='e5m2' is not e4m3"),
        ({**FP8, "modules_to_not_convert": ["model.layers.1.self_attn.q_b_proj"]}, r"q_b_proj"),
        ({**FP8, "modules_to_not_convert": ["self_attn"]}, r"which is or holds '.*self_attn"),
        ("fp8", r"quantization_config='fp8'"),
    ],
    ids=str,
)
def test_other_quantisation_is_refused_by_name(quantisation: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model(quantization_config=quantisation)


def test_modules_that_are_never_quantised_may_be_listed() -> None:
    spared = ["lm_head", "model.embed_tokens", "model.layers.1.mlp.gate", "model.layers.3.input_layernorm"]
    listed = model(quantization_config={**FP8, "modules_to_not_convert": spared})
    assert listed == model(quantization_config=FP8)


def test_scales_go_with_their_weights_from_file_to_file(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save

    from shardweave.errors import DtypeError

    config = TINY | {"quantization_config": {**FP8, "weight_block_size": [16, 8]}}
    described = from_config(config, dtype="bfloat16")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator).to(getattr(torch, tensor.dtype))
        for tensor in described.tensors
        for name in tensor.names()
    }
    assert tensors["model.layers.2.mlp.experts.9.down_proj.weight_scale_inv"].shape == (2, 2)
    tensors |= {name: tensors[of].clone() for name, of in described.copies.items()}
    source = tmp_path / "src"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    save(tensors, source / "model.safetensors")
    convert(prepare(source, to="hf", max_file_bytes=40_000), tmp_path / "out", fsync=False)
    found = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load(file).items()}
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
    with pytest.raises(DtypeError, match=r"dtype\(bfloat16\), and weights are float8_e4m3fn"):
        prepare(source, to="hf", dtype="bfloat16")
    with pytest.raises(GeometryError, match="experts with block scales, or some of a layer, are stored one"):
        prepare(source, to="hf", stacked_experts=True)
    with pytest.raises(GeometryError, match="Megatron stores weights whose values are their own"):
        prepare(source, to="megatron")
