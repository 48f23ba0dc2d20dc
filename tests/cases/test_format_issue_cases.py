"""Public reports on formats and their conversions that tests of other kinds do not name, one test each.

Geometry and right values are the reports'. What is read here was written by torch or safetensors, and what is
written here is read by them, or compared with arrays that numpy cut.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed_folder import Rank, rows_map, save, state_of
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from shardweave.convert import Geometry, Zero, convert, open_checkpoint, prepare
from shardweave.dialects import fsdp, hf, megatron
from shardweave.errors import (
    DtypeError,
    GapError,
    MissingFileError,
    OutsideError,
    ReplicaError,
    TruncatedError,
    UnknownNameError,
)
from shardweave.layout import Layout, Tensor, prove
from shardweave.models import from_config
from shardweave.plan import empty, materialise, plan, simulate
from shardweave.store import deepspeed, safetensors, torch_dist
from shardweave.store.read import Reader

NAMED = Path("none")
DATA = Path(__file__).parents[1] / "data"
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32", "vocab_size": 28,
    "hidden_size": 12, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 2, "intermediate_size": 8, "tie_word_embeddings": False,
}  # fmt: skip
MOE: dict[str, Any] = {
    **LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 10,
}  # fmt: skip
Tree = dict[str, Any]


def write_hf(folder: Path, config: Tree) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(2)
    tensors = {
        name: torch.randn(tensor.shape, generator=chance)
        for tensor in from_config(config).tensors
        for name in tensor.names()
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def saved(folder: Path, what: Tree) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(what, checkpoint_id=folder)
    return folder


def go(src: Path, dst: Path, to: str, **choices: Any) -> Any:
    return convert(prepare(src, to=to, **choices), dst, fsync=False)


def read(folder: Path, key: str) -> bytes:
    source = open_checkpoint(folder, config=NAMED)
    with Reader(source.manifest) as reader:
        return reader.load(key).tobytes()


def words(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def two_groups(values: dict[str, torch.Tensor]) -> Tree:
    """Weights with the state of AdamW: matrices decay, vectors do not."""
    state: Tree = {
        name: {"step": torch.tensor(41.0), "exp_avg": value + 1000, "exp_avg_sq": value + 2000}
        for name, value in values.items()
    }
    said = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    groups = [
        {
            **said,
            "weight_decay": decay,
            "params": [name for name, v in values.items() if (v.dim() > 1) == wide],
        }
        for decay, wide in ((0.1, True), (0.0, False))
    ]
    return {"model": values, "optim": {"state": state, "param_groups": groups}}


# --- DeepSpeed ------------------------------------------------------------------------------------


@pytest.mark.peer("deepspeed")
def test_deepspeed_8575_a_divided_map_is_not_that_of_what_is_stored(tmp_path: Path) -> None:
    """GPTBigCode, 48 rows of q at grain 8 over 4 ranks: 16, 16, 8, 8; a map of 12 each is refused."""
    full = torch.arange(56.0 * 6).view(56, 6)
    widths, starts, shared = (16, 16, 8, 8), (0, 16, 32, 40), [0, 1, 2, 3]

    def of(cuts: list[tuple[int, int]]) -> Tree:
        made = rows_map((56, 6), [(start, count, [r]) for r, (start, count) in enumerate(cuts)])
        for rank, entry in made["ranks"].items():
            rows = cuts[rank][1]
            entry["shard_shape"] = [rows + 8, 6]
            entry["pieces"].append(
                {"shape": [8, 6], "source": [48 * 6, [6, 1]], "dest": [rows * 6, [6, 1]], "locations": shared}
            )
        return {"affine_map": {"version": 1, "params": {"^w$": made}}}

    cut = list(zip(starts, widths, strict=True))
    ranks = [Rank({"w": torch.cat([full[a : a + n], full[48:]])}) for a, n in cut]
    go(save(tmp_path / "a", ranks, info=of(cut)), tmp_path / "right", "dcp", config=NAMED)
    assert read(tmp_path / "right", "w") == words(full)
    assert read(tmp_path / "right", "optim/w/exp_avg") == words(state_of(full, "exp_avg"))
    src = save(tmp_path / "b", ranks, info=of([(12 * r, 12) for r in range(4)]))
    with pytest.raises(OutsideError, match=r"array 'w@0': stored \(24, 6\) != \(20, 6\)"):
        prepare(src, to="dcp", config=NAMED)


@pytest.mark.peer("deepspeed")
def test_deepspeed_8575_heads_that_two_ranks_hold_are_compared(tmp_path: Path) -> None:
    """Yuan, 6 heads of 4 rows over 2 ranks: rows 4-7 and 16-19 are on both, and a drift is seen."""
    full = torch.arange(24.0 * 6).view(24, 6)
    rows = [[*range(8), *range(12, 20)], [*range(4, 12), *range(16, 24)]]
    pieces = [
        [(0, 4, 0, [0]), (4, 4, 4, [0, 1]), (12, 4, 8, [0]), (16, 4, 12, [0, 1])],
        [(4, 4, 0, [0, 1]), (8, 4, 4, [1]), (16, 4, 8, [0, 1]), (20, 4, 12, [1])],
    ]
    held = {
        rank: {
            "shard_shape": [16, 6],
            "pieces": [
                {"shape": [n, 6], "source": [a * 6, [6, 1]], "dest": [at * 6, [6, 1]], "locations": who}
                for a, n, at, who in few
            ],
        }
        for rank, few in enumerate(pieces)
    }
    info = {"affine_map": {"version": 1, "params": {"^w$": {"logical_shape": [24, 6], "ranks": held}}}}
    shards = [full[few].clone() for few in rows]
    go(
        save(tmp_path / "a", [Rank({"w": one}) for one in shards], info=info),
        tmp_path / "b",
        "dcp",
        config=NAMED,
    )
    assert read(tmp_path / "b", "w") == words(full)
    shards[1][2, 3] += 1
    src = save(tmp_path / "c", [Rank({"w": one}) for one in shards], info=info)
    with pytest.raises(ReplicaError, match=r"tensor 'w' at \(6, 3\)"):
        go(src, tmp_path / "d", "dcp", config=NAMED)


def test_deepspeed_6691_zero_3_goes_through_the_universal_form_to_the_bit(tmp_path: Path) -> None:
    """Weights whose elements 2 and 5 ranks do not divide: no state is as from scratch."""
    root = DATA / "ds_zero3"
    truth = load_file(root / "truth.safetensors")
    found = deepspeed.read(root).records["optimizer"]
    assert any(truth[f"fp32.{name}"].numel() % 2 for name in found.count)
    other = Zero(stage=3, dp=5, dtype="bfloat16")
    go(root / "step2", tmp_path / "universal", "universal", config=NAMED)
    go(tmp_path / "universal", tmp_path / "dp5", "deepspeed", config=NAMED, zero=other)
    go(tmp_path / "dp5", tmp_path / "back", "universal", config=NAMED)
    for folder in ("universal", "dp5", "back"):
        source = open_checkpoint(tmp_path / folder, config=NAMED)
        with Reader(source.manifest) as reader:
            for key, value in truth.items():
                state, name = key.split(".", 1)
                stored = name if state == "fp32" else f"optim/{name}/{state}"
                assert reader.load(stored).tobytes() == words(value), (folder, key)
        record = source.manifest.records["optimizer"]
        assert record.count == found.count
        assert [group["params"] for group in record.groups] == [group["params"] for group in found.groups]


def test_deepspeed_6691_two_groups_of_weights(tmp_path: Path) -> None:
    """The same of two groups, 35 and 9 elements in the first and 7 in the second, on 2, 4 and 5 ranks."""
    values = {"a": torch.arange(35.0).view(5, 7), "b": torch.arange(9.0).view(3, 3), "c": torch.arange(7.0)}
    tree = two_groups(values)
    src = saved(tmp_path / "src", tree)
    for dp in (2, 4, 5):
        zero = Zero(stage=3, dp=dp, dtype="bfloat16")
        go(src, tmp_path / f"dp{dp}", "deepspeed", config=NAMED, zero=zero)
        src = tmp_path / f"universal{dp}"
        go(tmp_path / f"dp{dp}", src, "universal", config=NAMED)
        groups = open_checkpoint(src, config=NAMED).manifest.records["optimizer"].groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        for name, value in values.items():
            assert read(src, name) == words(value), (dp, name)
            for moment in ("exp_avg", "exp_avg_sq"):
                assert read(src, f"optim/{name}/{moment}") == words(tree["optim"]["state"][name][moment])


@pytest.mark.peer("deepspeed")
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_megatron_1517_states_do_not_depend_on_what_lies_where(dp: int, tmp_path: Path) -> None:
    """Two weights of 1000 and 3 elements: ranks hold parts of one or of both, and the keys are the same."""
    big, small = torch.arange(1000.0), torch.arange(3.0) + 5000
    src = save(tmp_path / "src", [Rank({"big": big, "small": small})], dp=dp, info={})
    go(src, tmp_path / "dcp", "dcp", config=NAMED)
    go(tmp_path / "dcp", tmp_path / "other", "deepspeed", config=NAMED, zero=Zero(stage=2, dp=3))
    for folder in ("dcp", "other"):
        source = open_checkpoint(tmp_path / folder, config=NAMED)
        keys = {key for key in source.manifest.tensors if not key.endswith(("/step", "/master"))}
        states = {f"optim/{name}/{one}" for name in ("big", "small") for one in ("exp_avg", "exp_avg_sq")}
        assert keys == {"big", "small"} | states
        assert read(tmp_path / folder, "small") == words(small)
        assert read(tmp_path / folder, "optim/big/exp_avg_sq") == words(state_of(big, "exp_avg_sq"))


# --- torch ----------------------------------------------------------------------------------------


def test_pytorch_130760_the_order_of_cuts_is_said_and_uneven_ones_are_right() -> None:
    """10 rows over tp 2 and dp 2: tensor-parallel halves of 5, each cut into 3 and 2."""
    tensor, mesh = Tensor("w", (10, 3), "float32"), fsdp.mesh(dp=2, tp=2)
    value = np.arange(30, dtype=np.float32).reshape(10, 3) + 1
    placed = fsdp.placed(tensor, mesh, {"dp": fsdp.Shard(0, split_factor=2), "tp": fsdp.Shard(0)})
    layout = Layout("x", mesh, (placed,))
    prove(layout, [tensor])
    held = {
        (at["tp"], at["dp"]): (arrays["w"][:, 0] - 1) // 3
        for rank, arrays in materialise(layout, {tensor: value}).items()
        for at in [mesh.coordinate(rank)]
    }
    rows = {key: few.astype(int).tolist() for key, few in held.items()}
    assert rows == {(0, 0): [0, 1, 2], (0, 1): [3, 4], (1, 0): [5, 6, 7], (1, 1): [8, 9]}
    one = Layout("whole", fsdp.mesh(dp=1), (fsdp.placed(tensor, fsdp.mesh(dp=1), {}),))
    moved = simulate(
        plan(layout, one), materialise(layout, {tensor: value}), into=empty(one, np.float32, fill=np.nan)
    )
    assert moved[0]["w"].tobytes() == value.tobytes()


def test_megatron_7162_an_offset_has_an_axis_for_each_of_its_sizes(tmp_path: Path) -> None:
    """A stacked expert (1+)2-D: offsets of three axes beside sizes of two."""
    src = saved(tmp_path / "src", {"model": {"experts.w": torch.arange(24.0).view(4, 6)}})
    path = src / ".metadata"
    index = pickle.loads(path.read_bytes())
    (key,) = index.state_dict_metadata
    entry = index.state_dict_metadata[key]
    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0, 0]), torch.Size([4, 6]))]
    (place,) = index.storage_data.values()
    index.storage_data = {MetadataIndex(key, torch.Size([0, 0, 0])): place}
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(OutsideError, match=r"experts\.w"):
        torch_dist.read(src)


def test_pytorch_125740_files_of_other_ranks_are_asked_for_by_name(tmp_path: Path) -> None:
    """After replicas are written once, each rank needs files of others: one that is gone is named."""
    folder = tmp_path / "four"
    shutil.copytree(DATA / "dcp_fsdp2_4", folder)
    files = sorted(folder.rglob("*.distcp"))
    assert len(files) == 4
    torch_dist.read(files[0].parent)
    for path in files:
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(MissingFileError, match=path.name):
            torch_dist.read(path.parent)
        path.write_bytes(data)


def test_pytorch_171885_a_consolidated_model_has_an_index(tmp_path: Path) -> None:
    """Several files have an index of all; without it a whole set is read and a set with a gap is not."""
    tensors = write_hf(tmp_path / "src", LLAMA)
    go(tmp_path / "src", tmp_path / "mc", "megatron", geometry=Geometry(tp=2, pp=2, vocab_divisor=1))
    go(tmp_path / "mc", tmp_path / "hf", "hf", max_file_bytes=3000)
    index = tmp_path / "hf/model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    assert listed.keys() == tensors.keys() and len(set(listed.values())) > 2
    for name, file in listed.items():
        assert name in load_file(tmp_path / "hf" / file)
    index.unlink()
    (tmp_path / "hf/shardweave.digests.json").unlink(missing_ok=True)
    assert open_checkpoint(tmp_path / "hf").manifest.tensors.keys() == tensors.keys()
    (tmp_path / "hf" / sorted(set(listed.values()))[1]).unlink()
    with pytest.raises(MissingFileError, match="of-"):
        open_checkpoint(tmp_path / "hf")


# --- Megatron, Bridge and Automodel ---------------------------------------------------------------


def test_bridge_3001_a_rank_of_gate_and_up_has_half_of_each(tmp_path: Path) -> None:
    """Gate and up of 8 rows at tp 2: rank 0 has g0-3 and u0-3, and the export is what came in."""
    model = from_config(LLAMA)
    source, live = hf.layout(model), megatron.layout(model, megatron.mesh(tp=2), vocab_divisor=1)
    at = itertools.accumulate((tensor.numel for tensor in source.tensors), initial=1)
    values = {
        t: np.arange(a, a + t.numel, dtype=np.float64).reshape([len(d) for d in t.dims])
        for t, a in zip(source.tensors, at, strict=False)
    }
    filled = simulate(
        plan(source, live), materialise(source, values), into=empty(live, np.float64, fill=np.nan)
    )
    gate, up = (next(v for t, v in values.items() if f"{one}_proj" in t.name) for one in ("gate", "up"))
    for rank, layer in itertools.product(range(2), range(4)):
        half = slice(4 * rank, 4 * rank + 4)
        wanted = np.concatenate([gate[layer, half], up[layer, half]])
        assert np.array_equal(filled[rank][f"decoder.layers.{layer}.mlp.linear_fc1.weight"], wanted)
    tensors = write_hf(tmp_path / "src", LLAMA)
    go(tmp_path / "src", tmp_path / "mc", "megatron", geometry=Geometry(tp=2, vocab_divisor=1))
    go(tmp_path / "mc", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back/model.safetensors")
    assert {name: words(value) for name, value in back.items()} == {n: words(v) for n, v in tensors.items()}


def test_bridge_1716_experts_of_all_ranks_are_exported_by_one(tmp_path: Path) -> None:
    """EP 4 to one process: 8 experts of 4 layers are there; one that is missing is refused by name."""
    tensors = write_hf(tmp_path / "src", MOE)
    experts = [name for name in tensors if ".experts." in name]
    assert len(experts) == 4 * 8 * 3
    geometry = Geometry(ep=4, etp=1, vocab_divisor=1)
    go(tmp_path / "src", tmp_path / "mc", "megatron", geometry=geometry)
    go(tmp_path / "mc", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(words(back[name]) == words(tensors[name]) for name in experts)
    (path,) = (tmp_path / "mc").rglob(".metadata")
    index = pickle.loads(path.read_bytes())
    key = next(
        k
        for k, e in index.state_dict_metadata.items()
        if "experts" in k and len(getattr(e, "chunks", ())) > 3
    )
    lost = index.state_dict_metadata[key].chunks.pop()
    index.storage_data = {
        at: place for at, place in index.storage_data.items() if (at.fqn, at.offset) != (key, lost.offsets)
    }
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(GapError, match="experts"):
        prepare(tmp_path / "mc", to="hf")


def test_automodel_1093_consolidation_takes_the_memory_that_it_is_given(tmp_path: Path) -> None:
    """32 MB of weights in shards of 2 ranks, with a budget of 1 MB for buffers."""
    config = {**LLAMA, "vocab_size": 8192, "hidden_size": 480, "num_hidden_layers": 1}
    write_hf(tmp_path / "src", config)
    go(tmp_path / "src", tmp_path / "mc", "megatron", geometry=Geometry(tp=2, vocab_divisor=1))
    job = prepare(tmp_path / "mc", to="hf")
    assert job.num_bytes > 30e6
    tracemalloc.start()
    try:
        convert(job, tmp_path / "hf", fsync=False, memory_bytes=1 << 20, workers=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10e6, peak
    for name, value in load_file(tmp_path / "src/model.safetensors").items():
        assert words(load_file(tmp_path / "hf/model.safetensors")[name]) == words(value)


def test_automodel_3248_stages_have_no_keys_of_their_own(tmp_path: Path) -> None:
    """From 1, 2 and 4 stages, layers numbered from 0 on each: the same files, byte for byte."""
    write_hf(tmp_path / "src", LLAMA)
    found = []
    for pp in (1, 2, 4):
        go(tmp_path / "src", tmp_path / f"mc{pp}", "megatron", geometry=Geometry(pp=pp, vocab_divisor=1))
        go(tmp_path / f"mc{pp}", tmp_path / f"hf{pp}", "hf", max_file_bytes=2000)
        files = [p for p in (tmp_path / f"hf{pp}").iterdir() if p.name.startswith("model")]
        found.append({path.name: path.read_bytes() for path in files})
    assert found[0] == found[1] == found[2] and len(found[0]) > 3


# --- Orbax and accelerate -------------------------------------------------------------------------


@pytest.mark.parametrize(("stored", "wanted"), [(12, 16), (16, 12)])
def test_orbax_2972_a_model_of_other_layers_is_not_restored_in_part(
    stored: int, wanted: int, tmp_path: Path
) -> None:
    write_hf(tmp_path / "src", {**LLAMA, "num_hidden_layers": stored})
    config = {**LLAMA, "num_hidden_layers": wanted}
    count = 9 * abs(wanted - stored)
    what = f"missing {count}" if wanted > stored else f"unexpected {count}"
    for to in ("hf", "native", "dcp", "megatron"):
        with pytest.raises(UnknownNameError, match=rf"{what} \(model\.layers\.1[2-5]\."):
            prepare(tmp_path / "src", to=to, config=config)


def test_orbax_asi_2714_an_integer_stays_the_integer_that_it_is(tmp_path: Path) -> None:
    """int32 16777217: kept by formats that have it, refused by name by those that have floats alone."""
    count = torch.tensor([16777217, -5], dtype=torch.int32)
    src = saved(tmp_path / "src", {"model": {"w": torch.ones(3, 4), "count": count}})
    for to in ("hf", "native", "dcp"):
        go(src, tmp_path / to, to, config=NAMED)
        manifest = open_checkpoint(tmp_path / to, config=NAMED).manifest
        assert manifest.tensors["count"].dtype == "int32"
        assert read(tmp_path / to, "count") == words(count)
    with pytest.raises(DtypeError, match=r"tensor 'count'.*: int32 does not fit in float32"):
        go(src, tmp_path / "universal", "universal", config=NAMED)
    assert not (tmp_path / "universal").exists()


def test_accelerate_3971_a_state_without_its_count_is_named(tmp_path: Path) -> None:
    """The key ``step`` of one weight is not there; with it, it is restored."""
    values = {"w": torch.arange(12.0).view(3, 4), "b": torch.arange(3.0)}
    tree = two_groups(values)
    state = tree["optim"]["state"]
    go(saved(tmp_path / "a", tree), tmp_path / "native", "native", config=NAMED)
    go(tmp_path / "native", tmp_path / "dcp", "dcp", config=NAMED)
    for name in values:
        assert np.frombuffer(read(tmp_path / "dcp", f"optim/{name}/step"), np.float32) == 41
    del state["b"]["step"]
    src = saved(tmp_path / "b", tree)
    for to in ("native", "dcp", "universal"):
        with pytest.raises(UnknownNameError, match="optim/b/step"):
            prepare(src, to=to, config=NAMED)
    prepare(src, to="dcp", config=NAMED, weights_only=True)


# --- files ----------------------------------------------------------------------------------------


def test_b127_safetensors_668_offsets_are_wide_and_short_reads_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor behind 5 GB of holes, read by calls that return a byte less than they were asked for."""
    head = {
        "hole": {"dtype": "U8", "shape": [5 << 30], "data_offsets": [0, 5 << 30]},
        "x": {"dtype": "F32", "shape": [2], "data_offsets": [5 << 30, (5 << 30) + 8]},
    }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(5 << 30, os.SEEK_CUR)
        file.write(np.float32([1.5, -2.5]).tobytes())
    manifest = safetensors.read(tmp_path)
    real = os.preadv
    short = []

    def less(fd: int, buffers: Any, at: int, *more: Any) -> int:
        if len(memoryview(buffers[0])) > 1:
            short.append(at)
            buffers = [memoryview(buffers[0])[:-1]]
        return real(fd, buffers, at, *more)

    monkeypatch.setattr(os, "preadv", less)
    with Reader(manifest) as reader:
        assert reader.load("x").tolist() == [1.5, -2.5]
        assert reader.load_box("hole", ((5 << 30) - 3,), (3,)).tolist() == [0, 0, 0]
    assert any(at > 5 << 30 for at in short)
    os.truncate(path, (5 << 30) + 100)
    with pytest.raises(TruncatedError):
        safetensors.read(tmp_path)
