"""Our Megatron layouts against what real megatron-core models held in memory and stored on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from shardweave.dialects import hf, megatron
from shardweave.layout import Box, Mesh, intersect, prove
from shardweave.models import from_config
from shardweave.plan import empty, plan, simulate

FIXTURES = {
    "mc_gqa_tp1": ("mc_gqa_truth_hf", {}),
    "mc_gqa_tp4": ("mc_gqa_truth_hf", {"tp": 4}),
    "mc_gqa_tp2pp2": ("mc_gqa_truth_hf", {"tp": 2, "pp": 2}),
    "mc_moe_tp1": ("mc_moe_truth_hf", {}),
    "mc_moe_ep2": ("mc_moe_truth_hf", {"ep": 2, "etp": 1}),
    "mc_moe_tp2ep2_etp1": ("mc_moe_truth_hf", {"tp": 2, "dp": 2, "ep": 2, "etp": 1}),
}


def _live(data_dir: Path, fixture: str):  # type: ignore[no-untyped-def]
    truth, degrees = FIXTURES[fixture]
    model = from_config(json.loads((data_dir / truth / "config.json").read_text()), dtype="float32")
    mesh = megatron.mesh(**degrees)
    live = megatron.layout(model, mesh, spec="local", experts="sequential", vocab_divisor=1)
    return model, mesh, live, load_file(data_dir / truth / "model.safetensors")


@pytest.mark.parametrize("fixture", FIXTURES)
def test_ranks_hold_what_the_layout_says(data_dir: Path, fixture: str) -> None:
    """From the truth in HF form to every rank's parameters, name by name and bit by bit."""
    model, mesh, live, truth = _live(data_dir, fixture)
    prove(live)
    moved = plan(hf.layout(model), live)
    result = simulate(moved, {0: truth}, into=empty(live, np.float32, fill=np.nan))
    assert len(list((data_dir / fixture / "local").glob("rank*.safetensors"))) == mesh.size
    for rank in mesh.ranks:
        real = load_file(data_dir / fixture / "local" / f"rank{rank}.safetensors")
        assert sorted(real) == sorted(result[rank])
        for name, array in real.items():
            assert array.tobytes() == result[rank][name].tobytes(), name


@pytest.mark.parametrize("fixture", FIXTURES)
def test_ranks_coordinates(data_dir: Path, fixture: str) -> None:
    _, mesh, _, _ = _live(data_dir, fixture)
    for rank in mesh.ranks:
        real = json.loads((data_dir / fixture / "local" / f"rank{rank}.json").read_text())["coords"]
        ours = mesh.coordinate(rank)
        assert real == {axis: ours[axis] for axis in real}


@pytest.mark.parametrize("fixture", FIXTURES)
def test_shards_are_megatrons(data_dir: Path, fixture: str) -> None:
    """Megatron's own sharded tensors lie in our shards; it keeps gate and up apart where they touch."""
    model, mesh, _, _ = _live(data_dir, fixture)
    ours = {
        (key, Box.of(shard.offset, shard.shape))
        for key, shards in megatron.shards(model, mesh, spec="local").items()
        for shard in shards
    }
    theirs = set()
    for rank in mesh.ranks:
        sharded = json.loads((data_dir / fixture / "local" / f"rank{rank}.json").read_text())["sharded"]
        for records in sharded.values():
            for record in records:
                lead = [1] * record["prepend_axis_num"]
                theirs.add((record["key"], Box.of(record["global_offset"], (*lead, *record["local_shape"]))))
    for key, box in theirs - ours:
        assert "linear_fc1.weight" in key
        assert any(key == other and intersect(box, shard) == box for other, shard in ours), (key, str(box))
    assert sum(box.numel for _, box in ours) == sum(box.numel for _, box in theirs)


def test_checkpoint_variants_are_told_apart_by_names(data_dir: Path) -> None:
    model, *_ = _live(data_dir, "mc_moe_tp1")
    for spec in ("te", "local"):
        for layer_keys in ("stacked", "per_layer", "singleton"):
            stored = megatron.checkpoint(model, spec=spec, layer_keys=layer_keys)
            prove(stored)
            assert megatron.variant(stored.arrays(0), model) == stored


@pytest.mark.parametrize("layer_keys", ["stacked", "per_layer", "singleton"])
def test_shards_tile_every_key(data_dir: Path, layer_keys: str) -> None:
    """Also with stages, virtual chunks and padding that no fixture has."""
    model, *_ = _live(data_dir, "mc_moe_tp1")
    mesh = megatron.mesh(tp=2, pp=2, ep=2, etp=2)
    padded = megatron.padded_vocab_size(160, tp=2, divisor=64)
    stored = megatron.checkpoint(model, layer_keys=layer_keys, padded_vocab=padded)
    shards = megatron.shards(
        model,
        mesh,
        layer_keys=layer_keys,
        padded_vocab=padded,
        pipeline=megatron.stages(4, 2, vpp=2),
    )
    arrays = stored.arrays(0)
    assert sorted(shards) == sorted(arrays)
    for key, (buffer, _) in arrays.items():
        hits = np.zeros(buffer.shape, dtype=np.int64)
        for shard in shards[key]:
            hits[tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.shape, strict=True))] += 1
        assert (hits == 1).all(), key
    assert {shard.rank for one in shards.values() for shard in one} <= set(mesh.ranks)
    assert mesh.size == 8 and Mesh(()).size == 1
