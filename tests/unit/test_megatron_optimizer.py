"""The state of Megatron's optimizer in files: buckets by hand, groups by rule, fixtures against ranks."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from shardweave.dialects import megatron
from shardweave.dialects.megatron.buckets import fill, sizes_of
from shardweave.dialects.megatron.parameters import Parameter, parameters, place_of
from shardweave.errors import (
    FormatError,
    GeometryError,
    IndexMismatchError,
    OutsideError,
    ReplicaError,
    UnknownNameError,
)
from shardweave.layout import Box, Mesh
from shardweave.models import from_config
from shardweave.store import megatron_buckets, megatron_optimizer, torch_dist
from shardweave.store.manifest import Extent, Manifest, StoredTensor
from shardweave.store.megatron_buckets import Bucket, Held, assembled, prove_masters
from shardweave.store.megatron_groups import Group, common_of, group_of, num_dims
from shardweave.store.optimizer import OptimizerRecord
from shardweave.store.read import Reader

DATA = Path(__file__).parents[1] / "data"


def folder(name: str) -> Manifest:
    return torch_dist.read(DATA / f"mc_opt_{name}/torch_dist")


# --- whole states ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tp"), [("tp1dp2_fully_reshardable", 1), ("tp2dp2_fully_reshardable", 2)])
def test_every_rank_of_a_fixture_held_what_is_read(name: str, tp: int) -> None:
    """A rank's flat shards are stretches of its cut of what is stored; cuts as Megatron's modules do."""
    view = megatron_optimizer.named(folder(name))
    num = 0
    with Reader(view) as reader:
        for rank in range(2 * tp):
            local = DATA / f"mc_opt_{name}/local/opt_rank{rank}"
            ranges = json.loads(local.with_suffix(".json").read_text())
            for key, values in load_file(local.with_suffix(".safetensors")).items():
                kind, _, module = key.partition(".")
                stacked = re.sub(r"\.layers\.\d+\.", ".layers.", module)
                stacked = stacked.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
                stacked = stacked.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
                whole = reader.load(f"optim/{stacked}/{'master' if kind == 'fp32' else kind}")
                if layer := re.search(r"\.layers\.(\d+)\.", module):
                    whole = whole[int(layer[1])]
                if "layernorm" not in module:
                    dim = 1 if "linear_proj" in module or "linear_fc2" in module else 0
                    halves = np.split(whole, 2) if "linear_fc1" in module else [whole]
                    whole = np.concatenate([np.split(half, tp, dim)[rank % tp] for half in halves], dim)
                assert list(whole.shape) == ranges[module]["shape"]
                flat = whole.reshape(-1)[ranges[module]["start"] : ranges[module]["end"]]
                assert flat.tobytes() == values.tobytes(), (rank, key)
                num += 1
    assert num > 2 * tp * 15


def test_groups_and_counts_of_a_fixture() -> None:
    view = megatron_optimizer.named(folder("tp2dp2_fully_reshardable"))
    record: OptimizerRecord = view.records["optimizer"]
    weights = {name for name in view.tensors if not name.startswith("optim/")}
    assert record.count == dict.fromkeys(weights, 2) and view.records["untrained"] == frozenset()
    matrices, norms = record.groups
    assert set(norms["params"]) == {name for name in weights if "norm" in name}
    assert set(matrices["params"]) == weights - set(norms["params"])
    assert (matrices["wd_mult"], norms["wd_mult"], matrices["lr"]) == (1.0, 0.0, 0.01)


Damage = Callable[[dict[str, StoredTensor], dict[str, Any]], None]
FC2 = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"


def _twice(tensors: dict[str, StoredTensor], common: dict[str, Any]) -> None:
    tensors[f"chained_0.{FC2}"] = tensors[FC2]


def _of_nothing(tensors: dict[str, StoredTensor], common: dict[str, Any]) -> None:
    del tensors["decoder.layers.mlp.linear_fc2.weight"]


def _flattened(tensors: dict[str, StoredTensor], common: dict[str, Any]) -> None:
    tensors[FC2] = replace(tensors[FC2], shape=(2, 48 * 40))


def _no_groups(tensors: dict[str, StoredTensor], common: dict[str, Any]) -> None:
    common["optimizer"] = {"optimizer": {"param_groups": 7}}


def _no_optimizer(tensors: dict[str, StoredTensor], common: dict[str, Any]) -> None:
    del common["optimizer"]


def _half_a_step(tensors: dict[str, StoredTensor], common: dict[str, Any]) -> None:
    group = common["optimizer"]["optimizer"]["param_groups"][0]
    common["optimizer"]["optimizer"]["param_groups"] = [{**group, "step": 2.5}]


def _own_rule(tensors: dict[str, StoredTensor], common: dict[str, Any]) -> None:
    one, *rest = common["optimizer"]["optimizer"]["param_groups"]
    common["optimizer"]["optimizer"]["param_groups"] = [one, {**one, "lr_mult": 0.1, "lr": 1e-3}, *rest]


def _buckets_too(tensors: dict[str, StoredTensor], common: dict[str, Any]) -> None:
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    tensors[f"{key}.param"] = tensors[FC2]


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (_twice, FormatError, "a state of a weight is stored once"),
        (_of_nothing, UnknownNameError, "states are of weights"),
        (_flattened, OutsideError, "a state has the shape of its weight"),
        (_no_groups, FormatError, "param_groups is a int"),
        (_no_optimizer, FormatError, "'optimizer' in common.pt is a NoneType"),
        (_half_a_step, FormatError, r"step\(2.5\)"),
        (_own_rule, UnknownNameError, "2 of 3 groups fit"),
        (_buckets_too, FormatError, "as whole tensors and as flat buckets too"),
    ],
)
def test_what_contradicts_itself_is_refused(damage: Damage, error: type[Exception], says: str) -> None:
    found = folder("tp1dp2_fully_reshardable")
    tensors, common = dict(found.tensors), json.loads(json.dumps(found.records["common"]))
    damage(tensors, common)
    with pytest.raises(error, match=says):
        megatron_optimizer.named(replace(found, tensors=tensors, records={**found.records, "common": common}))


def test_opaque_states_are_refused_by_name() -> None:
    found = folder("tp1dp2_fully_reshardable")
    tensors = {key: one for key, one in found.tensors.items() if not key.startswith("optimizer.")}
    objects = {"optimizer.distributed.dp_group_idx_0.param_state/shard_0_1": {}}
    odd = replace(found, tensors=tensors, records={**found.records, "objects": objects})
    with pytest.raises(FormatError, match="1 of them opaque objects"):
        megatron_optimizer.sharding(odd)


# --- groups ---------------------------------------------------------------------------------------


def group(**said: Any) -> Group:
    base = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "lr": 1.0}
    return Group(base | said)


ALL = [
    group(), group(wd_mult=0.0), group(is_expert_parallel=True), group(wd_mult=0.0, is_expert_parallel=True),
    group(is_decoupled_lr=True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dims", "expected"),
    [
        ("decoder.layers.mlp.linear_fc1.weight", 2, 0),
        ("decoder.layers.mlp.linear_fc1.bias", 1, 1),
        ("decoder.final_layernorm.weight", 1, 1),
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", 2, 2),
        ("decoder.layers.mlp.experts.experts.linear_fc1.bias", 1, 3),
        ("decoder.layers.mlp.shared_experts.linear_fc1.weight", 2, 0),
        ("embedding.word_embeddings.weight", 2, 4),
        ("output_layer.weight", 2, 4),
    ],
)
def test_the_group_of_a_weight(name: str, dims: int, expected: int) -> None:
    assert group_of(name, dims, ALL) == expected


def test_norms_of_queries_decay_where_a_job_asks_for_it() -> None:
    name = "decoder.layers.self_attention.q_layernorm.weight"
    assert group_of(name, 1, ALL[:2]) == 1 and group_of(name, 1, ALL[:2], decays_norms=True) == 0


def test_the_dims_of_a_parameter_are_without_those_it_is_stacked_over() -> None:
    assert num_dims("decoder.layers.12.mlp.experts.experts.linear_fc1.weight", (8, 80, 48)) == 2
    assert num_dims("decoder.layers.mlp.experts.experts.3.linear_fc1.weight", (2, 80, 48)) == 2
    assert num_dims("decoder.layers.mlp.experts.experts.linear_fc1.bias", (2, 8, 80)) == 1


ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
SHAPES = {"output_layer.weight": (96, 48), "decoder.final_layernorm.weight": (48,)}


def record(**norms: Any) -> OptimizerRecord:
    matrix, norm = SHAPES
    return OptimizerRecord(
        dict.fromkeys(SHAPES, 7),
        ({"params": [matrix], **ADAM, "weight_decay": 0.1}, {"params": [norm], **ADAM, **norms}),
    )


def test_settings_in_the_words_of_torch_get_those_of_megatron() -> None:
    common = common_of(record(), SHAPES)
    matrices, norms = common["optimizer"]["optimizer"]["param_groups"]
    assert (matrices["wd_mult"], matrices["weight_decay"], matrices["step"]) == (1.0, 0.1, 7)
    assert (norms["wd_mult"], norms["weight_decay"], norms["betas"]) == (0.0, 0.0, (0.9, 0.95))
    assert type(norms["step"]) is int and not norms["is_expert_parallel"]
    assert common["content_metadata"]["chained_optim_avoid_prefix"] is True


def test_spread_experts_have_an_optimizer_of_their_own() -> None:
    name = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    one = OptimizerRecord({**record().count, name: 7}, (*record().groups, {"params": [name], **ADAM}))
    shapes = {**SHAPES, name: (2, 4, 80, 48)}
    spread = common_of(one, shapes, expert_parallel=True)["optimizer"]
    assert [len(spread[n]["optimizer"]["param_groups"]) for n in (0, 1)] == [2, 1]
    with pytest.raises(FormatError, match="weights that Megatron has in one group"):
        common_of(one, shapes)  # whole experts are in the group of the matrices, which decay


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (record(weight_decay=0.1), r"1 dims: weight_decay\(0.1\)"),
        (record(amsgrad=True), r"amsgrad\(True\)"),
        (OptimizerRecord({"output_layer.weight": 7}, record().groups), "1 without a count"),
        (OptimizerRecord({**record().count, "output_layer.weight": 8}, record().groups), "counts 7, 8"),
    ],
)
def test_settings_that_megatron_would_not_go_on_with_are_refused(made: OptimizerRecord, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        common_of(made, SHAPES)


# --- buckets --------------------------------------------------------------------------------------


def params(*sizes: int, shared: int | None = None) -> list[Parameter]:
    return [Parameter(f"p{n}", (size,), (), shared=n == shared) for n, size in enumerate(sizes)]


def places(buckets: Any) -> list[list[tuple[str, int]]]:
    return [[(one.parameter.name, one.start) for one in bucket] for bucket in buckets]


def test_the_last_parameter_comes_first_and_each_at_a_multiple_of_64() -> None:
    assert places(fill(params(100, 64, 3), [228])) == [[("p2", 0), ("p1", 64), ("p0", 128)]]


def test_an_embedding_that_two_stages_share_has_a_bucket_of_its_own() -> None:
    """What is before it is stored up to where it would have begun."""
    sizes = sizes_of(params(70, 10, 3, shared=1), None)
    assert sizes == (64, 10, 70)
    assert places(fill(params(70, 10, 3, shared=1), sizes)) == [[("p2", 0)], [("p1", 0)], [("p0", 0)]]
    with pytest.raises(GeometryError, match="'p2' ends at 3 before 'p1'"):
        fill(params(70, 10, 3), sizes)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.one_of(st.none(), st.integers(1, 600)),
    st.one_of(st.none(), st.integers(0, 11)),
)
def test_what_sizes_say_is_filled_in_one_way(
    sizes: list[int], bucket: int | None, shared: int | None
) -> None:
    held = params(*sizes, shared=shared)
    made = sizes_of(held, bucket)
    filled = fill(held, made)
    assert [one.parameter.name for few in filled for one in few] == [one.name for one in reversed(held)]
    for few, size in zip(filled, made, strict=True):
        assert all(one.start % 64 == 0 for one in few) and few[0].start == 0
        assert all(a.stop <= b.start < a.stop + 64 for a, b in itertools.pairwise(few))
        assert few[-1].stop <= size < few[-1].stop + 64
    wrong = [*made[:-1], made[-1] + 1]
    with pytest.raises(GeometryError):
        fill(held, wrong)


def by_hand(tmp_path: Path, values: np.ndarray, cuts: list[int]) -> tuple[Manifest, Bucket]:
    """A bucket of float32 in a file, cut into chunks, beside a weight (4, 3) in bfloat16 words."""
    file = tmp_path / "data"
    words = (values[:12].view("<u4") >> 16).astype("<u2")
    file.write_bytes(values.astype("<f4").tobytes() + words.tobytes())
    ends = [*zip([0, *cuts], [*cuts, len(values)], strict=True)]
    extents = tuple(Extent((a,), (b - a,), "data", 4 * a) for a, b in ends)
    flat = StoredTensor("flat", "float32", values.shape, extents)
    weight = StoredTensor("w", "bfloat16", (4, 3), (Extent((0, 0), (4, 3), "data", 4 * len(values)),))
    manifest = Manifest(tmp_path, "megatron", {"w": weight}, {"data": file.stat().st_size})
    return manifest, Bucket(None, 0, 0, 0, "bfloat16", {"master": flat})


def whole(values: np.ndarray) -> list[Held]:
    """A parameter that is the weight, and behind it a copy of its first row."""
    box = Box.of((0, 0), (4, 3))
    row = Box.of((0, 0), (1, 3))
    return [
        Held("w", 0, (4, 3), [("w", box, box)]),
        Held("copy", 12, (1, 3), [("w", row, row)], replica=True),
    ]


EVEN = np.arange(1, 16, dtype=np.float32)
EVEN[12:] = EVEN[:3]


@pytest.mark.parametrize("cuts", [[12], [5, 12], [1, 4, 11, 12, 13]])
def test_a_bucket_becomes_boxes_of_the_weight(tmp_path: Path, cuts: list[int]) -> None:
    manifest, bucket = by_hand(tmp_path, EVEN, cuts)
    made = assembled(manifest, [(bucket, whole(EVEN))], shapes={"w": (4, 3)})
    view = replace(manifest, tensors={**manifest.tensors, **made})
    with Reader(view) as reader:
        assert reader.load("optim/w/master").tobytes() == EVEN[:12].tobytes()
    prove_masters(view)


def test_columns_of_a_weight_are_boxes_with_gaps(tmp_path: Path) -> None:
    """Two ranks that cut columns: each parameter (4, 2) and (4, 1) of (4, 3)."""
    full = np.arange(12, dtype=np.float32).reshape(4, 3)
    values = np.concatenate([full[:, :2].reshape(-1), full[:, 2:].reshape(-1)])
    manifest, bucket = by_hand(tmp_path, values, [3, 8, 10])
    held = [
        Held("left", 0, (4, 2), [("w", Box.of((0, 0), (4, 2)), Box.of((0, 0), (4, 2)))]),
        Held("right", 8, (4, 1), [("w", Box.of((0, 2), (4, 1)), Box.of((0, 0), (4, 1)))]),
    ]
    made = assembled(manifest, [(bucket, held)], shapes={"w": (4, 3)})
    with Reader(replace(manifest, tensors=made)) as reader:
        assert reader.load("optim/w/master").tobytes() == full.tobytes()


def test_gate_and_up_are_stacked_rows_of_two_places(tmp_path: Path) -> None:
    """A rank's (4, 3) of a stacked layer (1, 4, 3): its two halves of rows, in the other order."""
    full = np.arange(12, dtype=np.float32).reshape(1, 4, 3)
    values = full[0][[2, 3, 0, 1]].reshape(-1).copy()
    manifest, bucket = by_hand(tmp_path, values, [4, 7])
    parts = [
        ("w", Box.of((0, 2, 0), (1, 2, 3)), Box.of((0, 0), (2, 3))),
        ("w", Box.of((0, 0, 0), (1, 2, 3)), Box.of((2, 0), (2, 3))),
    ]
    made = assembled(manifest, [(bucket, [Held("w", 0, (4, 3), parts)])], shapes={"w": (1, 4, 3)})
    with Reader(replace(manifest, tensors=made)) as reader:
        assert reader.load("optim/w/master").tobytes() == full.tobytes()


def test_a_chunk_across_the_border_of_a_parameter_is_refused(tmp_path: Path) -> None:
    manifest, bucket = by_hand(tmp_path, EVEN, [5, 13])
    with pytest.raises(IndexMismatchError, match=r"chunk \[5:13\] and 'w' at \[0:12\]"):
        assembled(manifest, [(bucket, whole(EVEN))], shapes={"w": (4, 3)})


def test_a_copy_that_differs_is_refused(tmp_path: Path) -> None:
    values = EVEN.copy()
    values[13] = np.nextafter(values[13], np.float32(9))
    manifest, bucket = by_hand(tmp_path, values, [12])
    with pytest.raises(ReplicaError, match="master of 'copy' differ"):
        assembled(manifest, [(bucket, whole(values))], shapes={"w": (4, 3)})


def test_masters_that_are_shifted_are_refused(tmp_path: Path) -> None:
    manifest, bucket = by_hand(tmp_path, EVEN, [12])
    flat = bucket.states["master"]
    moved = replace(flat, key="optim/w/master", shape=(4, 3), extents=(Extent((0, 0), (4, 3), "data", 4),))
    with pytest.raises(ReplicaError, match="12 of 12 elements differ in bfloat16"):
        prove_masters(replace(manifest, tensors={**manifest.tensors, "optim/w/master": moved}))


def test_no_number_is_any_of_its_words_on_both_sides(tmp_path: Path) -> None:
    values = EVEN.copy()
    values[[2, 14]] = np.nan
    manifest, bucket = by_hand(tmp_path, values, [12])
    made = assembled(manifest, [(bucket, whole(values))], shapes={"w": (4, 3)})
    view = replace(manifest, tensors={**manifest.tensors, **made})
    prove_masters(view)
    data = bytearray((tmp_path / "data").read_bytes())
    data[60 + 2 * 2 : 60 + 2 * 3] = b"\x81\xff"
    (tmp_path / "data").write_bytes(data)
    prove_masters(view)
    data[60 + 2 * 3 : 60 + 2 * 4] = b"\xc0\x7f"  # only the weight is none
    (tmp_path / "data").write_bytes(data)
    with pytest.raises(ReplicaError, match="1 of 12"):
        prove_masters(view)


def test_rounding_is_that_of_torch() -> None:
    words = np.concatenate([np.arange(0, 1 << 32, 65521), [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x8000]])
    values = words.astype("<u4").view("<f4")
    values = values[~np.isnan(values)]
    for dtype in ("bfloat16", "float16"):
        expected = torch.from_numpy(values.copy()).to(getattr(torch, dtype)).view(torch.uint16).numpy()
        assert megatron_buckets._rounded(values, dtype, "x").tobytes() == expected.tobytes()


# --- the order of parameters ----------------------------------------------------------------------

SIZES = {
    "vocab_size": 192, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
EXPERTS = SIZES | {
    "vocab_size": 160, "hidden_size": 48, "num_attention_heads": 4, "head_dim": 12, "num_experts": 4,
    "intermediate_size": 40, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fixture", "degrees"),
    [
        ("mc_gqa_tp1", {}),
        ("mc_gqa_tp2pp2", {"tp": 2, "pp": 2}),
        ("mc_gqa_tp4", {"tp": 4}),
        ("mc_moe_tp1", {}),
        ("mc_moe_ep2", {"ep": 2}),
    ],
)
def test_parameters_are_in_the_order_of_real_modules(fixture: str, degrees: dict[str, int]) -> None:
    moe = "moe" in fixture
    values = {"model_type": "qwen3_moe", **EXPERTS} if moe else {"model_type": "qwen3", **SIZES}
    model = from_config(values, dtype="float32")
    mesh: Mesh = megatron.mesh(**degrees)  # type: ignore[arg-type]
    for rank in range(mesh.size):
        said = json.loads((DATA / fixture / f"local/rank{rank}.json").read_text())["params"]
        (found,) = parameters(model, mesh, rank, spec="local", experts="sequential")
        assert [one.name for one in found] == list(said)
        held = load_file(DATA / fixture / f"local/rank{rank}.safetensors")
        assert all(held[one.name].shape == one.shape for one in found)


def test_a_module_without_a_known_place_is_refused() -> None:
    values = {"model_type": "qwen3", **SIZES}
    model = from_config(values, dtype="float32")
    one = parameters(model, megatron.mesh(), 0)[0][3]
    with pytest.raises(GeometryError, match="the place of its module is not known"):
        place_of(replace(one, name="decoder.layers.0.self_attention.something.weight"))
