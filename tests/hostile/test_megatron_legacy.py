"""Older Megatron folders of ranks that lie, break off or contradict each other: refused by name.

The folders are written with ``torch.save`` as Megatron-LM's script writes them; what real jobs write is read
in ``tests/oracle/test_megatron_optimizer.py``.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardweave.convert import detect, open_checkpoint, states
from shardweave.dialects import megatron
from shardweave.dialects.megatron.buckets import fill, sizes_of
from shardweave.dialects.megatron.parameters import parameters
from shardweave.errors import (
    FormatError,
    MissingFileError,
    PickleError,
    ReplicaError,
    ShardweaveError,
    TruncatedError,
    UnknownNameError,
)
from shardweave.models import from_config
from shardweave.store import megatron_legacy
from shardweave.store.read import Reader

CONFIG = {
    "model_type": "llama", "vocab_size": 10, "hidden_size": 6, "num_hidden_layers": 2, "head_dim": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 4, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8, "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "wd_mult": 1.0, "lr_mult": 1.0,
         "is_expert_parallel": False, "is_decoupled_lr": False, "step": 3}  # fmt: skip
FILE, STATES = megatron_legacy.WEIGHTS, megatron_legacy.STATES


def whole() -> dict[str, torch.Tensor]:
    """Whole arrays under stacked keys: weights that are their own masters, as many values as elements."""
    model = from_config(CONFIG, dtype="float32")
    shapes = {key: one.shape for key, (one, _) in megatron.checkpoint(model).stored().items()}
    generator = torch.Generator().manual_seed(3)
    return {key: torch.rand(shape, generator=generator) for key, shape in shapes.items()}


def save(root: Path, *, tp: int = 2) -> None:
    """A run folder with one iteration of ``tp`` ranks."""
    model, mesh, arrays = from_config(CONFIG, dtype="float32"), megatron.mesh(tp=tp), whole()
    for rank in range(tp):
        (chunk,) = parameters(model, mesh, rank)
        mine: dict[str, torch.Tensor] = {}
        for one in chunk:
            mine[one.name] = torch.full(one.shape, torch.nan)
            for part in one.stretches:
                box = tuple(slice(dim.start, dim.stop) for dim in part.box.dims)
                at = tuple(slice(dim.start, dim.stop) for dim in part.at.dims)
                mine[one.name][at] = arrays[part.array][box].reshape(part.at.shape)
        folder = root / f"iter_0000003/mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        args = argparse.Namespace(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=1, expert_model_parallel_size=1
        )
        groups = [{**GROUP, "params": [0]}, {**GROUP, "wd_mult": 0.0, "params": [1]}]
        value = {
            "args": args,
            "iteration": 3,
            "model": {**mine, "decoder.layers.0.mlp.linear_fc1._extra_state": None},
            "optimizer": {"optimizer": {"param_groups": groups}},
            "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
        }
        torch.save(value, folder / FILE)
        sizes = sizes_of(chunk, None)
        flat = torch.zeros(sum(sizes))
        for placed in fill(chunk, sizes)[0]:
            flat[placed.start : placed.stop] = mine[placed.parameter.name].reshape(-1)
        moments = {"param": flat, "exp_avg": flat + 1, "exp_avg_sq": flat + 2, "numel_unpadded": len(flat)}
        torch.save({0: {(torch.float32, torch.float32): moments}, "buckets_coalesced": True}, folder / STATES)
    (root / "latest_checkpointed_iteration.txt").write_text("3")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "run")
    return tmp_path / "run"


def test_what_is_not_damaged_is_read(root: Path) -> None:
    assert detect(root) == "megatron"
    source = open_checkpoint(root, config=CONFIG)
    state = states(source)
    assert state is not None and set(state.counts.values()) == {3}
    with Reader(source.manifest) as reader:
        for key, values in whole().items():
            assert reader.load(key).tobytes() == values.numpy().tobytes()
            for n, kind in enumerate(("master", "exp_avg", "exp_avg_sq")):
                assert reader.load(f"optim/{key}/{kind}").tobytes() == (values + n).numpy().tobytes()
    assert source.manifest.records["common"]["iteration"] == 3
    assert (
        source.manifest.records["megatron"]["common"]["rng_state"][0]["torch_rng_state"]["$leaf"] == "uint8"
    )


Edit = Callable[[dict[str, Any]], None]


def edited(root: Path, edit: Edit, *, rank: int = 1, name: str = FILE) -> None:
    path = root / f"iter_0000003/mp_rank_{rank:02d}" / name
    value = torch.load(path, weights_only=False)
    edit(value)
    torch.save(value, path)


def _degree(value: dict[str, Any]) -> None:
    value["args"].tensor_model_parallel_size = 4


def _shape(value: dict[str, Any]) -> None:
    value["model"]["output_layer.weight"] = torch.zeros(5, 7)


def _order(value: dict[str, Any]) -> None:
    value["model"] = dict(reversed(value["model"].items()))


def _older_still(value: dict[str, Any]) -> None:
    value["model"] = {"language_model": {"embedding": {}}}


def _norm(value: dict[str, Any]) -> None:
    value["model"]["decoder.final_layernorm.weight"][2] = 9.0


def _strided(value: dict[str, Any]) -> None:
    value["model"]["output_layer.weight"] = torch.zeros(6, 5).T


def _no_chunks(value: dict[str, Any]) -> None:
    value["model1"] = value.pop("model")


@pytest.mark.parametrize(
    ("edit", "error", "says"),
    [
        (_degree, FormatError, r"tp\(4\) != tp\(2\) of another rank"),
        (_shape, FormatError, r"stored \(5, 7\) != \(5, 6\)"),
        (_order, UnknownNameError, "in their order"),
        (_older_still, FormatError, "a model from before megatron-core"),
        (_norm, ReplicaError, "ranks that hold the same parameter have the same values"),
        (_strided, FormatError, "found a strided one"),
        (_no_chunks, FormatError, "it has 'model1'"),
    ],
)
def test_ranks_that_contradict_each_other(root: Path, edit: Edit, error: type[Exception], says: str) -> None:
    edited(root, edit)
    with pytest.raises(error, match=says):
        open_checkpoint(root, config=CONFIG)


def _no_steps(value: dict[str, Any]) -> None:
    value["optimizer"]["optimizer"] = {"param_groups": 3}


def _odd_states(value: dict[str, Any]) -> None:
    value["optimizer"]["optimizer"]["state"] = {0: {"exp_avg": torch.zeros(3)}}


def _per_bucket(value: dict[str, Any]) -> None:
    value["buckets_coalesced"] = False


def _size(value: dict[str, Any]) -> None:
    value[0][torch.float32, torch.float32]["numel_unpadded"] += 1


def _nothing(value: dict[str, Any]) -> None:
    value[0] = {}


@pytest.mark.parametrize(
    ("edit", "name", "says"),
    [
        (_no_steps, FILE, "param_groups is a int"),
        (_odd_states, FILE, "the state of an optimizer is as Megatron writes it"),
        (_per_bucket, STATES, "buckets_coalesced is not there"),
        (_size, STATES, "numel_unpadded"),
        (_nothing, STATES, "the state of an optimizer is as Megatron writes it"),
    ],
)
def test_states_that_are_not_megatrons(root: Path, edit: Edit, name: str, says: str) -> None:
    edited(root, edit, name=name)
    with pytest.raises(FormatError, match=says):
        open_checkpoint(root, config=CONFIG)


def _shifted(value: dict[str, Any]) -> None:
    states_of = value[0][torch.float32, torch.float32]
    states_of["param"] = states_of["param"].roll(1)


def _short(value: dict[str, Any]) -> None:
    states_of = value[0][torch.float32, torch.float32]
    for key in ("param", "exp_avg", "exp_avg_sq"):
        states_of[key] = states_of[key][:-1].clone()
    states_of["numel_unpadded"] -= 1


@pytest.mark.parametrize(
    ("edit", "error", "says"),
    [
        (_shifted, ReplicaError, "(a master rounds|the same values)"),
        (_short, FormatError, "they take .* in 1 buckets"),
    ],
)
def test_states_at_wrong_places_leave_the_weights(
    root: Path, edit: Edit, error: type[Exception], says: str
) -> None:
    """Weights are there all the same; who asks for the state hears why there is none."""
    edited(root, edit, name=STATES)
    source = open_checkpoint(root, config=CONFIG)
    assert set(source.stored) == set(whole())
    with pytest.raises(error, match=says):
        states(source)


def test_a_rank_that_is_not_there(root: Path) -> None:
    shutil.rmtree(root / "iter_0000003/mp_rank_01")
    with pytest.raises(MissingFileError, match=r"tp\(2\), pp\(1\), ep\(1\): 1 folders; .*\(1, 0, 0\)"):
        open_checkpoint(root, config=CONFIG)


def test_states_of_a_rank_that_are_not_there(root: Path) -> None:
    (root / f"iter_0000003/mp_rank_01/{STATES}").unlink()
    source = open_checkpoint(root, config=CONFIG)
    with pytest.raises(ShardweaveError, match="every rank stored the states"):
        states(source)


@pytest.mark.parametrize("name", [FILE, STATES])
@pytest.mark.parametrize("keep", [0, 1, 1000, -1])
def test_a_file_that_broke_off(root: Path, name: str, keep: int) -> None:
    path = root / f"iter_0000003/mp_rank_00/{name}"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises((TruncatedError, FormatError)):
        open_checkpoint(root, config=CONFIG)


class Evil:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/shardweave-was-here",)


@pytest.mark.parametrize("name", [FILE, STATES])
def test_a_pickle_that_runs_something(root: Path, name: str) -> None:
    edited(root, lambda value: value.update(evil=Evil()), name=name)
    with pytest.raises(PickleError, match="system"):
        open_checkpoint(root, config=CONFIG)


class Odd:
    """A tensor with attributes that is made by something else than torch."""

    def __reduce__(self) -> Any:
        return torch._tensor._rebuild_from_type_v2, (torch.Size, torch.Tensor, ([1],), {})


def test_a_tensor_that_is_made_by_something_else(root: Path) -> None:
    edited(root, lambda value: value.update(odd=Odd()))
    with pytest.raises(PickleError, match="made by something else than torch"):
        open_checkpoint(root, config=CONFIG)


def test_a_link_that_leads_out(root: Path, tmp_path: Path) -> None:
    inner = root / "iter_0000003/mp_rank_01"
    inner.rename(tmp_path / "elsewhere")
    inner.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ShardweaveError, match="stays inside its folder"):
        open_checkpoint(root, config=CONFIG)


def test_a_single_number_without_arguments_is_of_nobody_knows_what(root: Path) -> None:
    for rank in (0, 1):
        edited(root, lambda value: value.pop("args"), rank=rank)
        folder = root / f"iter_0000003/mp_rank_{rank:02d}"
        folder.rename(folder.with_name(f"mp_rank_00_{rank:03d}"))
    with pytest.raises(FormatError, match="may be of a pipeline stage or of a group of experts"):
        open_checkpoint(root, config=CONFIG)


def test_nothing_runs_where_a_file_is_no_archive(root: Path) -> None:
    path = root / f"iter_0000003/mp_rank_00/{FILE}"
    path.write_bytes(pickle.dumps({"model": Evil()}))
    with pytest.raises(FormatError):
        open_checkpoint(root, config=CONFIG)
    assert not Path("/tmp/shardweave-was-here").exists()
