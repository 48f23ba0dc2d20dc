"""Weights and optimizer states from and to checkpoints, by real ranks, against whole tensors."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workers
from native_ranks import each
from safetensors.torch import load_file, save_file
from torch.distributed import FileStore, HashStore, PrefixStore

from shardweave.convert import convert, detect, differences, open_checkpoint, prepare
from shardweave.convert.check import check
from shardweave.errors import (
    DigestError,
    DtypeError,
    ExistsError,
    FormatError,
    OutsideError,
    PlanError,
    ShardweaveError,
    TransportTimeoutError,
    WriteError,
)
from shardweave.layout import Layout
from shardweave.models import Model, from_config
from shardweave.plan import materialise, plan
from shardweave.store import native
from shardweave.store.native_manifest import About
from shardweave.store.native_write import Saver
from shardweave.train import export as export_module
from shardweave.train.checkpoint import (
    load_states,
    load_weights,
    over_group,
    saver,
    states_of,
    through_store,
    weights_of,
    words_of,
)
from shardweave.train.export import save_weights
from shardweave.train.grid import Groups, connect, plan_groups
from shardweave.train.layout import train_layout
from shardweave.train.optimizer import AdamW, Optimizer, StateBox
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan

DATA = Path(__file__).parents[1] / "data"

# A vocabulary that no degree divides, 3 KV heads on 2 ranks, 5 layers on stages of 2 and 3, unequal sizes.
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 101, "hidden_size": 36, "intermediate_size": 44,
    "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [2], "tie_word_embeddings": False, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "attention_bias": False, "max_position_embeddings": 64, "dtype": "bfloat16",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
STATES = ("master", "exp_avg", "exp_avg_sq")
DEGREES = {
    "one": Parallel(),
    "tp4": Parallel(tp=4, ep=2, etp=2),
    "tp2 pp2": Parallel(tp=2, pp=2, ep=2),
    "dp2 pp2": Parallel(dp=2, pp=2, etp=2),
    "cp3 dp2": Parallel(cp=3, dp=2, ep=6),
    "tp2 dp3": Parallel(tp=2, dp=3, ep=3, etp=2),
}


def stages(num_layers: int, pp: int) -> list[list[int]]:
    """The last stage has what is left over."""
    each = num_layers // pp
    return [list(range(s * each, num_layers if s == pp - 1 else (s + 1) * each)) for s in range(pp)]


def layout_of(parallel: Parallel, model: Model, dtype: str = "") -> Layout:
    return train_layout(model, parallel.mesh, stages=stages(model.num_layers, parallel.pp), dtype=dtype)


def truth(model: Model, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Whole tensors by name, all values different; -0.0 and a NaN with a payload are among them."""
    found, rng = {}, torch.Generator().manual_seed(seed)
    for tensor in model.tensors:
        for name in tensor.names():
            values = torch.randn(tensor.shape, generator=rng).to(dtype)
            values.view(-1)[0] = -0.0
            words_of(values).reshape(-1)[-1] = {2: 0x7FC3, 4: 0x7FC00003}[values.element_size()]
            found[name] = values
    return found


def wanted_of(layout: Layout, whole: dict[str, torch.Tensor]) -> dict[int, dict[str, np.ndarray]]:
    """The words that each rank holds, by the reference of layouts; padding is 0."""
    values = {}
    for tensor in layout.tensors:
        shape = tuple(len(dim) for dim in tensor.dims)
        values[tensor] = np.stack([words_of(whole[name]) for name in tensor.names()]).reshape(shape)
    return materialise(layout, values)


def empty_of(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(buffer.shape, torch.nan, dtype=getattr(torch, buffer.dtype), requires_grad=True)
        for name, (buffer, _) in layout.arrays(rank).items()
    }


def compare(arrays: dict[str, torch.Tensor], wanted: dict[str, np.ndarray]) -> None:
    assert arrays.keys() == wanted.keys()
    wrong = [name for name, array in arrays.items() if words_of(array).tobytes() != wanted[name].tobytes()]
    assert not wrong, wrong


def hf_folder(folder: Path, model: Model, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Written by safetensors itself."""
    whole = truth(model, dtype)
    folder.mkdir(parents=True)
    save_file(whole, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return whole


# --- from every format --------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", DEGREES)
def test_a_hugging_face_folder_at_every_layout(degrees: str, tmp_path: Path) -> None:
    model = from_config(CONFIG)
    layout = layout_of(DEGREES[degrees], model)
    wanted = wanted_of(layout, hf_folder(tmp_path / "hf", model))
    for rank in layout.mesh.ranks:
        arrays = empty_of(layout, rank)
        about = load_weights(tmp_path / "hf", layout=layout, rank=rank, arrays=arrays)
        assert about.config == CONFIG
        compare(arrays, wanted[rank])


@pytest.mark.parametrize("folder", ["mc_moe_tp1", "mc_moe_tp2ep2_etp1", "mc_gqa_tp4", "mc_gqa_tp2pp2"])
def test_a_megatron_checkpoint_at_other_layouts(folder: str) -> None:
    """Written by megatron-core: fused QKV by KV groups, gate and up in one, layers and experts stacked."""
    reference = DATA / ("mc_moe_truth_hf" if "moe" in folder else "mc_gqa_truth_hf")
    config = json.loads((reference / "config.json").read_text())
    model, whole = from_config(config, dtype="float32"), load_file(reference / "model.safetensors")
    cells = [Parallel(), Parallel(tp=2, pp=2, dp=2), Parallel(tp=4)]
    cells += [Parallel(tp=2, dp=2, ep=2, etp=2)] if "moe" in folder else []
    for parallel in cells:
        layout = layout_of(parallel, model)
        wanted = wanted_of(layout, whole)
        for rank in layout.mesh.ranks:
            arrays = empty_of(layout, rank)
            load_weights(DATA / folder / "torch_dist", layout=layout, rank=rank, arrays=arrays, config=config)
            compare(arrays, wanted[rank])


def test_a_tied_embedding_is_on_both_ends(tmp_path: Path) -> None:
    folder = DATA / "hf_llama_tied_tiny"
    model, whole = from_config(folder / "config.json"), {}
    for path in folder.glob("model*.safetensors"):
        whole |= load_file(path)
    layout = layout_of(Parallel(tp=2, pp=2), model)
    wanted = wanted_of(layout, whole)
    name = "model.embed_tokens.weight"
    for rank in layout.mesh.ranks:
        arrays = empty_of(layout, rank)
        load_weights(folder, layout=layout, rank=rank, arrays=arrays)
        compare(arrays, wanted[rank])
        assert name in arrays
    # Saved once, and read back by every rank.
    save_all(tmp_path / "native", layout, wanted, dtype="float32")
    stored = native.read(tmp_path / "native").tensors[f"model/{name}"]
    assert sum(extent.numel for extent in stored.extents) == whole[name].numel()


@pytest.mark.parametrize(("stored", "held"), [("bfloat16", "float32"), ("float32", "float64")])
def test_wider_arrays_hold_the_same_values(stored: str, held: str, tmp_path: Path) -> None:
    model = from_config(CONFIG, dtype=stored)
    whole = hf_folder(tmp_path / "hf", model, getattr(torch, stored))
    wide = {name: values.to(getattr(torch, held)) for name, values in whole.items()}
    layout = layout_of(DEGREES["tp2 pp2"], model, held)
    wanted = wanted_of(layout, wide)
    narrow = layout_of(DEGREES["dp2 pp2"], model)
    save_all(tmp_path / "native", narrow, wanted_of(narrow, whole), dtype=stored)
    for rank in layout.mesh.ranks:
        for folder in ("hf", "native"):
            arrays = empty_of(layout, rank)
            load_weights(tmp_path / folder, layout=layout, rank=rank, arrays=arrays)
            compare(arrays, wanted[rank])


def test_narrower_arrays_only_where_casts_are_asked_for(tmp_path: Path) -> None:
    model = from_config(CONFIG, dtype="float32")
    whole = hf_folder(tmp_path / "hf", model, torch.float32)
    layout = layout_of(DEGREES["tp2 pp2"], model, "bfloat16")
    wanted = wanted_of(layout, {name: values.to(torch.bfloat16) for name, values in whole.items()})
    full = layout_of(DEGREES["one"], model)
    save_all(tmp_path / "native", full, wanted_of(full, whole), dtype="float32")
    for folder in ("hf", "native"):
        arrays = empty_of(layout, 1)
        given: dict[str, Any] = {"layout": layout, "rank": 1, "arrays": arrays}
        with pytest.raises(DtypeError, match="float32 does not fit in bfloat16"):
            load_weights(tmp_path / folder, **given)
        assert all(array.isnan().all() for array in arrays.values())
        load_weights(tmp_path / folder, **given, allow_casts=True)
        compare(arrays, wanted[1])


def test_arrays_of_another_layout_or_model_are_refused(tmp_path: Path) -> None:
    model = from_config(CONFIG)
    hf_folder(tmp_path / "hf", model)
    layout = layout_of(DEGREES["tp4"], model)
    arrays = empty_of(layout, 1)
    del arrays["model.norm.weight"]
    with pytest.raises(OutsideError, match=r"model\.norm\.weight"):
        load_weights(tmp_path / "hf", layout=layout, rank=1, arrays=arrays)
    wide = {**CONFIG, "vocab_size": 103}
    other = layout_of(DEGREES["tp4"], from_config(wide))
    with pytest.raises(PlanError, match="embed_tokens"):
        load_weights(tmp_path / "hf", layout=other, rank=1, arrays=empty_of(other, 1))


# --- native -------------------------------------------------------------------------------------


def tensors_of(wanted: dict[str, np.ndarray], dtype: str) -> dict[str, torch.Tensor]:
    kind = {"bfloat16": torch.int16, "float32": torch.int32, "float64": torch.int64}[dtype]
    return {
        name: torch.from_numpy(words.view(f"i{words.itemsize}").copy()).to(kind).view(getattr(torch, dtype))
        for name, words in wanted.items()
    }


def save_all(
    run: Path,
    layout: Layout,
    wanted: dict[int, dict[str, np.ndarray]],
    *,
    dtype: str,
    config: dict[str, Any] | None = None,
) -> None:
    """All ranks save, as threads that meet in a store."""
    store, size = HashStore(), layout.mesh.size

    def one(rank: int) -> None:
        exchange = through_store(store, rank=rank, size=size, timeout_s=20)
        mine = tensors_of(wanted[rank], dtype)
        saver(run, rank=rank, exchange=exchange, fsync=False).save(
            weights_of(layout, rank, mine), About(config=config or {})
        )

    for error in each(size, one):
        assert error is None, error


@pytest.mark.parametrize("saved", ["tp4", "cp3 dp2"])
def test_native_from_one_layout_to_all_others(saved: str, tmp_path: Path) -> None:
    model = from_config(CONFIG)
    whole = truth(model, torch.bfloat16)
    layout = layout_of(DEGREES[saved], model)
    save_all(tmp_path, layout, wanted_of(layout, whole), dtype="bfloat16")
    for parallel in DEGREES.values():
        other = layout_of(parallel, model)
        wanted = wanted_of(other, whole)
        for rank in other.mesh.ranks:
            arrays = empty_of(other, rank)
            load_weights(tmp_path, layout=other, rank=rank, arrays=arrays)
            compare(arrays, wanted[rank])


def optimizer_of(layout: Layout, rank: int, *, sharded: bool, fill: float) -> Optimizer:
    """An optimizer that makes no step, with all state prefilled; it needs no peers for that."""
    arrays = {name: array.detach().fill_(1) for name, array in empty_of(layout, rank).items()}
    groups = Groups(plan_groups({"model": layout.mesh}, {}), rank, {})
    reduced = reduce_plan(layout, rank, bucket_bytes=5000)
    optimizer = Optimizer(arrays, plan=reduced, groups=groups, settings=AdamW(), sharded=sharded)
    for box in optimizer.states():
        box.values.fill_(fill)
    return optimizer


def places(box: StateBox) -> tuple[slice, ...]:
    return tuple(slice(r[0], r[-1] + 1) for r in box.box.dims)


@pytest.mark.parametrize(("saved", "sharded"), [("tp2 pp2", True), ("cp3 dp2", True), ("tp2 dp3", False)])
def test_optimizer_state_from_one_layout_to_all_others(saved: str, sharded: bool, tmp_path: Path) -> None:
    """Moments and masters, filled and compared by their places in a rank's arrays, padding apart."""
    model = from_config(CONFIG)
    layout = layout_of(DEGREES[saved], model)
    states = {name: truth(model, torch.float32, seed) for seed, name in enumerate(STATES)}
    weights = wanted_of(layout, truth(model, torch.bfloat16))
    of_rank = {name: wanted_of(layout, whole) for name, whole in states.items()}
    size, store = layout.mesh.size, HashStore()

    def save(rank: int) -> int:
        optimizer = optimizer_of(layout, rank, sharded=sharded, fill=torch.nan)
        for box in optimizer.states():
            words_of(box.values)[...] = of_rank[box.state][rank][box.name][places(box)]
        optimizer.count = 41
        one = saver(
            tmp_path,
            rank=rank,
            exchange=through_store(store, rank=rank, size=size, timeout_s=20),
            fsync=False,
        )
        held = [*weights_of(layout, rank, tensors_of(weights[rank], "bfloat16")), *states_of(optimizer)]
        one.save(held, About(step=41))
        return one.written_bytes

    written = each(size, save)
    elements = sum(values.numel() for values in states["master"].values())
    assert sum(written) == elements * (2 + 3 * 4) + 8, written
    manifest = native.read(tmp_path)
    for name, whole in states.items():
        for key, values in whole.items():
            with native.Reader(manifest) as reader:
                assert reader.load(f"optim/{key}/{name}").tobytes() == words_of(values).tobytes()
    for degrees, parallel in DEGREES.items():
        other = layout_of(parallel, model)
        wanted = {name: wanted_of(other, whole) for name, whole in states.items()}
        nowhere = {n: torch.full(v.shape, torch.nan) for n, v in states["master"].items()}
        # 0 where there is padding, NaN elsewhere.
        real = wanted_of(other, nowhere)
        for rank in other.mesh.ranks:
            optimizer = optimizer_of(other, rank, sharded=degrees != "tp4", fill=torch.nan)
            load_states(tmp_path, optimizer)
            assert optimizer.count == 41
            for box in optimizer.states():
                kept = real[rank][box.name][places(box)] != 0
                found = words_of(box.values)
                assert np.array_equal(found[kept], wanted[box.state][rank][box.name][places(box)][kept])
                assert box.values[torch.from_numpy(~kept)].isnan().all()


def test_masters_and_weights_stand_in_for_each_other(tmp_path: Path) -> None:
    """A run in bfloat16 goes on in float32 from its masters, one in float32 in bfloat16 with its weights."""
    narrow, wide = from_config(CONFIG), from_config(CONFIG, dtype="float32")
    full, states = truth(wide, torch.float32), {name: truth(wide, torch.float32, 9) for name in STATES}
    states["master"] = full
    for model, dtype in ((narrow, "bfloat16"), (wide, "float32")):
        layout = layout_of(DEGREES["one"], model)
        optimizer = optimizer_of(layout, 0, sharded=True, fill=torch.nan)
        for box in optimizer.states():
            words_of(box.values)[...] = wanted_of(layout, states[box.state])[0][box.name][places(box)]
        values = {name: value.to(getattr(torch, dtype)) for name, value in full.items()}
        arrays = tensors_of(wanted_of(layout, values)[0], dtype)
        held = [*weights_of(layout, 0, arrays), *states_of(optimizer)]
        saver(tmp_path / dtype, fsync=False).save(held, About())
    assert "optim/model.norm.weight/master" not in native.read(tmp_path / "float32").tensors

    layout = layout_of(DEGREES["tp2 pp2"], wide)
    for rank in layout.mesh.ranks:
        arrays = empty_of(layout, rank)
        load_weights(tmp_path / "bfloat16", layout=layout, rank=rank, arrays=arrays)
        compare(arrays, wanted_of(layout, full)[rank])
    layout = layout_of(DEGREES["dp2 pp2"], narrow)
    masters = wanted_of(layout, full)
    for rank in layout.mesh.ranks:
        optimizer = optimizer_of(layout, rank, sharded=True, fill=torch.nan)
        load_states(tmp_path / "float32", optimizer)
        for box in optimizer.states():
            if box.state == "master":
                assert np.array_equal(words_of(box.values), masters[rank][box.name][places(box)])


def test_other_commands_read_a_native_checkpoint_too(tmp_path: Path) -> None:
    """Checked, compared and converted like any format; a run folder stands for its newest checkpoint."""
    model = from_config(CONFIG)
    layout = layout_of(DEGREES["tp2 pp2"], model)
    whole = truth(model, torch.bfloat16)
    optimizer = optimizer_of(layout_of(DEGREES["one"], model), 0, sharded=True, fill=1)
    save_all(tmp_path / "run", layout, wanted_of(layout, whole), dtype="bfloat16", config=CONFIG)
    full = layout_of(DEGREES["one"], model)
    arrays = tensors_of(wanted_of(full, whole)[0], "bfloat16")
    # Its masters are of other weights, which a check refuses; moments are of any.
    moments = (one for one in states_of(optimizer) if not one.key.endswith("/master"))
    held = [*weights_of(full, 0, arrays), *moments]
    saver(tmp_path / "with state", fsync=False).save(held, About(config=CONFIG))

    for name in ("run", "with state"):
        found = check(tmp_path / name)
        assert found.whole and found.format == "native", found.findings
        assert {step.state for step in found.steps} == {"proved"}
        source = open_checkpoint(tmp_path / name)
        assert source.model.numel == sum(values.numel() for values in whole.values())
        assert bool(source.left_out) == (name == "with state")
        out = tmp_path / f"{name} hf"
        convert(prepare(tmp_path / name, to="hf"), out, fsync=False)
        stored = load_file(out / "model.safetensors")
        assert stored.keys() == whole.keys()
        for key, values in whole.items():
            assert torch.equal(stored[key].view(torch.int16), values.view(torch.int16)), key
        assert json.loads((out / "config.json").read_text()) == CONFIG
        other = open_checkpoint(out)
        assert not list(differences(plan(source.layout, other.layout), source.manifest, other.manifest))
    convert(prepare(tmp_path / "run", to="megatron"), tmp_path / "mc", fsync=False)
    arrays = empty_of(layout, 3)
    load_weights(tmp_path / "mc", layout=layout, rank=3, arrays=arrays)
    compare(arrays, wanted_of(layout, whole)[3])

    # And back: a conversion writes what a run saves, without the state.
    job = prepare(tmp_path / "mc", to="native", config=CONFIG, max_file_bytes=60_000)
    convert(job, tmp_path / "back", fsync=False)
    assert check(tmp_path / "back").whole
    assert len(native.read(tmp_path / "back").files) > 3
    arrays = empty_of(layout, 3)
    about = load_weights(tmp_path / "back", layout=layout, rank=3, arrays=arrays)
    compare(arrays, wanted_of(layout, whole)[3])
    assert about.config == CONFIG

    path = next((tmp_path / "run").rglob("rank_00002.safetensors"))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert [type(error) for error in check(tmp_path / "run").findings] == [DigestError]
    with pytest.raises(DigestError, match="rank_00002"):
        convert(prepare(tmp_path / "run", to="hf"), tmp_path / "no", fsync=False)
    (path.parent / "model.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match="native and hf"):
        detect(path.parent)


# --- to Hugging Face ----------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", DEGREES)
def test_a_hugging_face_folder_from_every_layout(degrees: str, tmp_path: Path) -> None:
    model = from_config(CONFIG)
    whole = truth(model, torch.bfloat16)
    layout = layout_of(DEGREES[degrees], model)
    wanted = wanted_of(layout, whole)
    store, size = HashStore(), layout.mesh.size

    def export(rank: int, **more: Any) -> None:
        exchange = through_store(store, rank=rank, size=size, timeout_s=20)
        save_weights(
            tmp_path / "out", layout=layout, rank=rank, arrays=tensors_of(wanted[rank], "bfloat16"),
            model=model, config=CONFIG, exchange=exchange, number=rank, max_file_bytes=60_000, **more,
        )  # fmt: skip

    for error in each(size, export):
        assert error is None, error
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        found |= load_file(tmp_path / "out" / name)
    assert found.keys() == whole.keys()
    for name, values in whole.items():
        assert torch.equal(found[name].view(torch.int16), values.view(torch.int16)), name
    assert json.loads((tmp_path / "out/config.json").read_text()) == CONFIG
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # What is there is never written over.
    store = HashStore()
    assert {type(error) for error in each(size, export)} == {ExistsError}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_rounds_as_torch_does_and_fails_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = from_config(CONFIG, dtype="float32")
    whole = truth(model, torch.float32)
    layout = layout_of(DEGREES["tp2 pp2"], model)
    wanted = wanted_of(layout, whole)

    def export(path: Path) -> list[Any]:
        store = HashStore()

        def one(rank: int) -> None:
            save_weights(
                path, layout=layout, rank=rank, arrays=tensors_of(wanted[rank], "float32"), model=model,
                config=CONFIG, exchange=through_store(store, rank=rank, size=4, timeout_s=20), number=rank,
                dtype="bfloat16",
            )  # fmt: skip

        return each(4, one)

    assert export(tmp_path / "out") == [None] * 4
    found = load_file(tmp_path / "out/model.safetensors")
    for name, values in whole.items():
        assert torch.equal(found[name].view(torch.int16), values.to(torch.bfloat16).view(torch.int16)), name

    real = export_module._put

    count = iter(range(10**9))

    def some(fd: int, data: memoryview, at: int) -> None:
        if next(count) == 40:
            raise OSError(28, "No space left on device")
        real(fd, data, at)

    monkeypatch.setattr(export_module, "_put", some)
    errors = export(tmp_path / "again")
    assert {type(error) for error in errors} == {WriteError}
    assert len({str(error) for error in errors}) == 1
    assert not (tmp_path / "again").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- ranks as processes -------------------------------------------------------------------------

PARALLEL = Parallel(tp=2, pp=2, ep=2)


def work(rank: int, *, folder: Path, background: bool) -> dict[str, Any]:
    """Saves over gloo, or through the store in the background with the arrays changed at once."""
    model = from_config(CONFIG)
    layout = layout_of(PARALLEL, model)
    store = FileStore(str(folder / "store"), 4)
    groups = connect(
        plan_groups({"model": PARALLEL.mesh}, {"model": PARALLEL.groups}),
        rank=rank,
        store=store,
        timeout_s=20,
    )
    arrays = tensors_of(wanted_of(layout, truth(model, torch.bfloat16))[rank], "bfloat16")
    if background:
        exchange = through_store(PrefixStore("save", store), rank=rank, size=4, timeout_s=20)
    else:
        exchange = over_group(groups.get("model", "all"))
    one = saver(folder / "run", rank=rank, exchange=exchange, keep=2)
    for step in (1, 2, 3):
        one.save(weights_of(layout, rank, arrays), About(step=step), in_background=background)
        if background and step == 3:
            for array in arrays.values():
                array.fill_(7)
        groups.get("model", "all").comm.barrier().wait()
    one.wait()
    groups.close()
    return {"written": one.written_bytes}


@pytest.mark.parametrize("background", [False, True])
def test_processes_save_and_others_load(background: bool, tmp_path: Path) -> None:
    found = workers.values(workers.run(work, range(4), folder=tmp_path, background=background))
    model = from_config(CONFIG)
    whole = truth(model, torch.bfloat16)
    written = [one["written"] for one in found.values()]
    assert sum(written) == sum(values.nbytes for values in whole.values())
    assert [step for step, _ in native.complete_steps(tmp_path / "run")] == [2, 3]
    for parallel in (DEGREES["one"], DEGREES["tp2 dp3"]):
        layout = layout_of(parallel, model)
        wanted = wanted_of(layout, whole)
        for rank in layout.mesh.ranks:
            arrays = empty_of(layout, rank)
            load_weights(tmp_path / "run", layout=layout, rank=rank, arrays=arrays)
            compare(arrays, wanted[rank])


def with_a_full_disk(rank: int, *, folder: Path) -> str:
    store = FileStore(str(folder / "store"), 4)
    if rank == 2:
        real = Saver._write

        def full(self: Saver, path: Path, *rest: Any) -> bytes:
            if path.parent.name.endswith("2"):
                raise OSError(28, "No space left on device", str(path))
            return real(self, path, *rest)

        Saver._write = full  # type: ignore[method-assign]
    model = from_config(CONFIG)
    layout = layout_of(PARALLEL, model)
    arrays = tensors_of(wanted_of(layout, truth(model, torch.bfloat16))[rank], "bfloat16")
    one = saver(folder / "run", rank=rank, exchange=through_store(store, rank=rank, size=4, timeout_s=20))
    one.save(weights_of(layout, rank, arrays), About(step=1))
    try:
        one.save(weights_of(layout, rank, arrays), About(step=2))
    except ShardweaveError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_full_disk_of_one_process_is_told_to_all(tmp_path: Path) -> None:
    said = workers.values(workers.run(with_a_full_disk, range(4), folder=tmp_path))
    assert len(set(said.values())) == 1
    assert said[0].startswith("WriteError") and "rank 2" in said[0]
    assert [step for step, _ in native.complete_steps(tmp_path / "run")] == [1]
    assert native.read(tmp_path / "run").records["about"].step == 1


def killed_while_it_writes(rank: int, *, folder: Path) -> str:
    store = FileStore(str(folder / "store"), 4)
    model = from_config(CONFIG)
    layout = layout_of(PARALLEL, model)
    arrays = tensors_of(wanted_of(layout, truth(model, torch.bfloat16))[rank], "bfloat16")
    exchange = through_store(store, rank=rank, size=4, timeout_s=8)
    one = saver(folder / "run", rank=rank, exchange=exchange)
    one.save(weights_of(layout, rank, arrays), About(step=1))
    if rank == 1:
        real = os.fsync

        def kill(descriptor: int) -> None:
            real(descriptor)
            os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = kill
    try:
        one.save(weights_of(layout, rank, arrays), About(step=2), in_background=True)
        one.wait()
    except ShardweaveError as error:
        return type(error).__name__
    return "nothing"


def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    ended = workers.run(killed_while_it_writes, range(4), folder=tmp_path)
    assert ended[1].exit_code == -signal.SIGKILL
    assert {ended[rank].value for rank in (0, 2, 3)} == {"TransportTimeoutError"}
    assert native.latest(tmp_path / "run") == tmp_path / "run" / "step-00000001"
    assert native.verify(native.read(tmp_path / "run")) > 0


def test_a_rank_that_does_not_come_is_waited_for_so_long() -> None:
    exchange = through_store(HashStore(), rank=0, size=2, timeout_s=0.2)
    with pytest.raises(TransportTimeoutError, match="round 0"):
        exchange(b"")
