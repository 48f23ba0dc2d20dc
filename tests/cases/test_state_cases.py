"""Public reports on masters, states of optimizers, flat shards, keys and DCP, named after the report.

Saves are written by torch and DeepSpeed's classes; what comes out is compared with what went in, to the bit.
"""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed_folder import Rank, save
from native_ranks import Meeting, each
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

from train_ranks import CONFIG

from shardweave.convert import Geometry, Zero, convert, open_checkpoint, prepare
from shardweave.errors import (
    DtypeError,
    FormatError,
    GapError,
    MissingFileError,
    OutsideError,
    OverlapError,
    PlanError,
    ReplicaError,
    TransformError,
    TruncatedError,
    UnknownNameError,
)
from shardweave.layout import Box, BufferRule, Layout, Mesh, Part, Tensor, Transform, along, even, whole
from shardweave.plan import materialise, plan, simulate
from shardweave.refit.values import apply, landing
from shardweave.store import deepspeed, native
from shardweave.store.native_agree import entry_of
from shardweave.store.native_elect import elect
from shardweave.store.native_held import Held
from shardweave.store.native_manifest import About
from shardweave.store.native_write import Saver
from shardweave.store.read import Reader
from shardweave.train.checkpoint import load_weights, saver, weights_of
from shardweave.train.grid import Groups
from shardweave.train.optimizer import AdamW, Optimizer
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import begun, group_plan, layout_of

NAMED = Path("none")
DATA = Path(__file__).parents[1] / "data"
PLAIN = {"universal_checkpoint_version": 0.4}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32", "vocab_size": 17,
    "hidden_size": 6, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 2, "intermediate_size": 10, "tie_word_embeddings": False,
}  # fmt: skip
ADAMW = {
    "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False,
    "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
LION = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.3}
Tree = dict[str, Any]


def saved(folder: Path, what: Tree) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(what, checkpoint_id=folder)
    return folder


def loaded(folder: Path) -> Tree:
    """All that torch finds in a folder, in the form that it was saved in."""
    found: Tree = {}
    _load_state_dict(
        found,
        storage_reader=dcp.FileSystemReader(folder),
        planner=dcp.default_planner._EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return found


def weights(config: Tree = LLAMA, seed: int = 3) -> dict[str, torch.Tensor]:
    """By the names of Hugging Face's files, written out."""
    chance = torch.Generator().manual_seed(seed)
    hidden, ffn, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.{one}_proj.weight": (n * size, hidden)
            for one, n in (("q", heads), ("k", kv), ("v", kv))
        }
        shapes |= {f"{at}.self_attn.o_proj.weight": (hidden, heads * size)}
        shapes |= {f"{at}.mlp.{one}_proj.weight": (ffn, hidden) for one in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (hidden, ffn)}
        shapes |= {f"{at}.{one}_layernorm.weight": (hidden,) for one in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}
    return {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}


def go(src: Path, dst: Path, to: str, **choices: Any) -> Any:
    return convert(prepare(src, to=to, **choices), dst, fsync=False)


def words(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read(folder: Path, key: str) -> bytes:
    source = open_checkpoint(folder, config=NAMED)
    with Reader(source.manifest) as reader:
        return reader.load(key).tobytes()


# --- K14: values that an engine stores otherwise --------------------------------------------------


def test_b086_sglang_30761_an_update_is_a_load_however_often() -> None:
    """A norm around 1 where the trainer's is around 0: what is done to values once is done once an update."""
    tensor = Tensor("norm", (16,), "float32")
    trainer = Layout("trainer", Mesh(()), (BufferRule("norm", (Part(tensor),), tensor.dims),))
    rule = BufferRule("norm", (Part(tensor),), tensor.dims, transform=Transform("shift", 1.0))
    engine = Layout("engine", Mesh(()), (rule,))
    landed, steps = landing(trainer, engine)

    def update(served: dict[str, torch.Tensor], values: np.ndarray[Any, Any]) -> None:
        into = {0: {name: array.numpy() for name, array in served.items()}}
        simulate(plan(trainer, landed), {0: {"norm": values}}, into=into)
        apply(steps, 0, served, served)

    first, second = (np.random.default_rng(i).standard_normal(16).astype(np.float32) for i in (0, 1))
    served = {"norm": torch.full((16,), torch.nan)}
    update(served, first)
    fresh = words(served["norm"])
    assert fresh == words(torch.from_numpy(first) + 1)
    for _ in range(3):
        update(served, first)
        assert words(served["norm"]) == fresh
    update(served, second)
    assert words(served["norm"]) == words(torch.from_numpy(second) + 1)
    # Values of the trainer's kind straight into what the engine stores are refused, by what the layouts say.
    with pytest.raises(TransformError, match="store the same function of the logical values"):
        plan(trainer, engine)


# --- K15: masters, dtypes, kinds of states --------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_b087_deeperspeed_56_b088_megatron_5071_weights_alone_are_the_masters(
    dtype: str, tmp_path: Path
) -> None:
    """After weights without a state every copy of them is theirs, and a step of rate 0 changes nothing."""
    model = {**CONFIG, "num_hidden_layers": 2, "mlp_only_layers": [1], "dtype": dtype}
    layout = layout_of(model, Parallel())
    other = begun(layout, 0, config=model, seed=9)
    saver(tmp_path, rank=0, exchange=Meeting(1).of(0), fsync=False).save(
        list(weights_of(layout, 0, other)), About(config=model)
    )
    arrays = begun(layout, 0, config=model, seed=1)
    optimizer = Optimizer(
        arrays, plan=reduce_plan(layout, 0), groups=Groups(group_plan(Parallel()), 0, {}),
        settings=AdamW(lr=0.0),
    )  # fmt: skip
    load_weights(tmp_path, layout=layout, rank=0, arrays=arrays)
    wide = dtype == "float32"
    stale = [box for box in optimizer.states() if box.state == "master" and "norm" not in box.name]
    assert bool(stale) != wide
    if stale:  # what was a master before is not one of these weights
        assert any(not torch.equal(box.values, part(arrays, box)) for box in stale)
    optimizer.reset_masters()
    for box in optimizer.states():
        if box.state == "master":
            assert torch.equal(box.values, part(arrays, box))
    optimizer.step({name: torch.ones_like(array) for name, array in arrays.items()})
    assert optimizer.count == 1
    assert {name: words(array) for name, array in arrays.items()} == {n: words(a) for n, a in other.items()}


def part(arrays: dict[str, torch.Tensor], of: Any) -> torch.Tensor:
    """The elements of an array that a box of a state is of."""
    at = tuple(slice(r.start, r.stop) for r in of.box.dims)
    return arrays[of.name].detach()[at].float()


@pytest.mark.peer("deepspeed")
def test_b087_deeperspeed_56_a_stale_master_is_found(tmp_path: Path) -> None:
    """Model states of another step than the optimizer's beside them: nobody knows which are right."""
    value = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    src = save(tmp_path / "src", [Rank({"w": value}, dtype=torch.bfloat16)], info=PLAIN)
    go(src, tmp_path / "right", "dcp", config=NAMED)
    assert read(tmp_path / "right", "w") == words(value)
    path = src / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=False)
    states["module"]["w"] = (value * 1.01).bfloat16()
    torch.save(states, path)
    for to in ("dcp", "native", "universal"):
        with pytest.raises(ReplicaError, match=r"a master rounds to its weight: .*'optim/w/master'"):
            go(src, tmp_path / to, to, config=NAMED)
        assert not (tmp_path / to).exists()
    go(src, tmp_path / "weights", "dcp", config=NAMED, weights_only=True)
    assert read(tmp_path / "weights", "w") == words((value * 1.01).bfloat16())


def test_b089_pytorch_187138_a_cast_is_asked_for() -> None:
    """(4, 3) in float32 into a bfloat16 template; the other way nothing is lost."""
    wide, narrow = Tensor("w", (4, 3), "float32"), Mesh(())
    src = Layout("saved", narrow, (BufferRule("w", (Part(wide),), wide.dims),))
    dst = Layout("template", narrow, (BufferRule("w", (Part(wide),), wide.dims, dtype="bfloat16"),))
    with pytest.raises(DtypeError, match=r"'w'.*: float32 does not fit in bfloat16"):
        plan(src, dst)
    plan(src, dst, allow_casts=True)
    plan(dst, src)


@pytest.mark.parametrize("to", ["dcp", "hf"])
def test_b089_pytorch_187138_a_cast_rounds_to_nearest_even(to: str, tmp_path: Path) -> None:
    ties = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], [1 + 2**-8 + 2**-20, 3e38, -0.0]])
    values = torch.cat([ties, torch.randn(2, 3, generator=torch.Generator().manual_seed(5)) * 100])
    src = saved(tmp_path / "src", {"model": {"w": values}})
    go(src, tmp_path / "same", to, config=NAMED)
    assert read(tmp_path / "same", "w") == words(values)
    go(src, tmp_path / "cast", to, config=NAMED, dtype="bfloat16")
    assert read(tmp_path / "cast", "w") == words(values.bfloat16())
    go(tmp_path / "cast", tmp_path / "back", to, config=NAMED, dtype="float32")
    assert read(tmp_path / "back", "w") == words(values.bfloat16().float())


def test_b091_nemo_rl_3540_a_router_bias_keeps_its_dtype(tmp_path: Path) -> None:
    """1.001 and 1.002 are one number in bfloat16, and the choice of experts another."""
    from safetensors.torch import load_file, save_file

    from shardweave.models import from_config

    config = json.loads((DATA / "configs/tiny/deepseek_v3.json").read_text()) | {
        "num_nextn_predict_layers": 0
    }
    model = from_config(config, dtype="float32")
    tensors = {name: torch.randn(tensor.shape) for tensor in model.tensors for name in tensor.names()}
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    for name in biases:
        tensors[name] = torch.full(tensors[name].shape, 1.001)
        tensors[name][1] = 1.002
    assert biases and tensors[biases[0]].bfloat16().unique().numel() == 1
    (tmp_path / "src").mkdir()
    (tmp_path / "src/config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "src/model.safetensors", metadata={"format": "pt"})
    go(tmp_path / "src", tmp_path / "hf", "hf", dtype="bfloat16")
    go(tmp_path / "src", tmp_path / "mc", "megatron", dtype="bfloat16", geometry=Geometry(vocab_divisor=1))
    go(tmp_path / "mc", tmp_path / "back", "hf")
    for folder in ("hf", "back"):
        found = load_file(tmp_path / folder / "model.safetensors")
        for name, value in tensors.items():
            assert words(found[name]) == words(value if name in biases else value.bfloat16()), name
        assert int(found[biases[0]].argmax()) == 1


@pytest.mark.peer("deepspeed")
def test_b092_opentau_185_masters_are_stored_or_named_as_left_out(tmp_path: Path) -> None:
    """A master of 1.0009765625 under a bfloat16 of 1.0."""
    master = torch.tensor([[1.0009765625, 2.0], [-3.0029296875, 4.0]])
    src = save(tmp_path / "src", [Rank({"w": master}, dtype=torch.bfloat16)], info=PLAIN)
    go(src, tmp_path / "native", "native", config=NAMED)
    manifest = open_checkpoint(tmp_path / "native", config=NAMED).manifest
    kinds = {key: tensor.dtype for key, tensor in manifest.tensors.items()}
    assert (kinds["w"], kinds["optim/w/master"], kinds["optim/w/exp_avg"]) == (
        "bfloat16",
        "float32",
        "float32",
    )
    assert read(tmp_path / "native", "optim/w/master") == words(master)
    go(tmp_path / "native", tmp_path / "dcp", "dcp", config=NAMED)
    assert read(tmp_path / "dcp", "w") == words(master)
    for to, choices in (("dcp", {"weights_only": True}), ("hf", {})):
        report = go(src, tmp_path / f"{to} alone", to, config=NAMED, **choices)
        assert report.account.left_out["optim/w/master"] == master.nbytes
        assert read(tmp_path / f"{to} alone", "w") == words(master.bfloat16())


def lion_and_adam() -> Tree:
    """Matrices by Lion, which has one moment and counts nothing, the rest by AdamW."""
    values = weights()
    own = [name for name, value in values.items() if value.dim() > 1]
    state: Tree = {}
    for i, (name, value) in enumerate(values.items()):
        chance = torch.Generator().manual_seed(100 + i)
        state[name] = {"exp_avg": torch.randn(value.shape, generator=chance)}
        if name not in own:
            state[name] |= {"exp_avg_sq": torch.rand(value.shape, generator=chance)}
        state[name]["step"] = torch.tensor(12.0)
    groups = [{**LION, "params": own}, {**ADAMW, "params": [name for name in values if name not in own]}]
    return {"model": values, "optim": {"state": state, "param_groups": groups}}


def test_b093_megatron_5742_every_weight_has_the_states_of_its_optimizer(tmp_path: Path) -> None:
    """From torch to DeepSpeed at 2 ranks, at 4, and back: one moment stays one, two stay two."""
    what = lion_and_adam()
    src = saved(tmp_path / "src", what)
    (src / "config.json").write_text(json.dumps(LLAMA))
    go(src, tmp_path / "tp2", "deepspeed", zero=Zero(stage=1, dp=2, tp=2))
    go(tmp_path / "tp2", tmp_path / "tp4", "deepspeed", zero=Zero(stage=2, dp=3, tp=4))
    go(tmp_path / "tp4", tmp_path / "back", "dcp")
    found = loaded(tmp_path / "back")
    assert {n: words(v) for n, v in found["model"].items()} == {n: words(v) for n, v in what["model"].items()}
    for name, states in what["optim"]["state"].items():
        mine = found["optim"]["state"][name]
        assert mine.keys() == states.keys(), name
        assert all(words(mine[state]) == words(value) for state, value in states.items()), name
    lost = lion_and_adam()
    del lost["optim"]["state"]["model.norm.weight"]["exp_avg_sq"]
    with pytest.raises(
        UnknownNameError, match=r"exp_avg, exp_avg_sq of .* != exp_avg of 'model\.norm\.weight'"
    ):
        prepare(saved(tmp_path / "lost", lost), to="dcp", config=LLAMA)
    more = lion_and_adam()
    more["optim"]["state"]["model.norm.weight"]["max_exp_avg_sq"] = torch.ones(6)
    with pytest.raises(
        UnknownNameError, match=r"!= exp_avg, exp_avg_sq, max_exp_avg_sq of 'model\.norm\.weight'"
    ):
        prepare(saved(tmp_path / "more", more), to="dcp", config=LLAMA)


# --- K16: flat shards -----------------------------------------------------------------------------


def test_b096_deepspeed_8168_zero_3_under_tensor_parallel_ranks_is_whole(tmp_path: Path) -> None:
    """K of (4, 6) on 2 ranks, each flat over 4: whole in the universal form, and at 4 ranks, flat over 2."""
    what = lion_and_adam()
    src = saved(tmp_path / "src", what)
    (src / "config.json").write_text(json.dumps(LLAMA))
    go(src, tmp_path / "zero3", "deepspeed", zero=Zero(stage=3, dp=4, tp=2, dtype="bfloat16"))
    key = "model.layers.0.self_attn.k_proj.weight"
    shards = [deepspeed.read(tmp_path / "zero3").tensors[f"{key}@{rank}"].shape for rank in (0, 1)]
    assert shards == [(2, 6), (2, 6)]
    go(tmp_path / "zero3", tmp_path / "universal", "universal")
    go(
        tmp_path / "universal",
        tmp_path / "other",
        "deepspeed",
        zero=Zero(stage=3, dp=2, tp=4, dtype="bfloat16"),
    )
    shards = [deepspeed.read(tmp_path / "other").tensors[f"{key}@{rank}"].shape for rank in range(4)]
    assert shards == [(2, 6), (2, 6), (0, 6), (0, 6)]
    go(tmp_path / "other", tmp_path / "back", "dcp")
    for folder, config in (("universal", LLAMA), ("back", None)):
        source = open_checkpoint(tmp_path / folder, config=config)
        with Reader(source.manifest) as reader:
            for name, value in what["model"].items():
                assert source.manifest.tensors[name].shape == tuple(value.shape)
                assert reader.load(name).tobytes() == words(value), name
                assert reader.load(f"optim/{name}/exp_avg").tobytes() == words(
                    what["optim"]["state"][name]["exp_avg"]
                )


def test_b097_deepspeed_8270_shapes_are_not_those_of_placeholders(tmp_path: Path) -> None:
    """Weights of ZeRO-3 have shape (0,) in the module: shapes are those that the save declares, or none."""
    import shutil

    root = shutil.copytree(DATA / "ds_zero3", tmp_path / "zero3")
    files = sorted((root / "step2").glob("*model_states.pt"))
    states = [torch.load(path, weights_only=False) for path in files]
    held = {name: tuple(value.shape) for name, value in states[0]["module"].items()}
    declared = {name: tuple(shape) for group in states[0]["param_shapes"] for name, shape in group.items()}
    assert set(held.values()) == {(0,)} and all(len(shape) for shape in declared.values())
    found = deepspeed.read(root)
    assert {name: found.tensors[name].shape for name in declared} == declared
    for path, state in zip(files, states, strict=True):
        del state["param_shapes"]
        torch.save(state, path)
    with pytest.raises(FormatError, match="has the form that DeepSpeed gives it"):
        deepspeed.read(root)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_b098_megatron_5077_padding_of_buckets_is_of_no_weight(dp: int, tmp_path: Path) -> None:
    """Groups of 10 elements, filled up at their ends: the second begins where its own begins."""
    values = {name: torch.arange(10.0) + 100 * i + 1 for i, name in enumerate(("a", "b", "c"))}
    state = {
        name: {"step": torch.tensor(3.0), "exp_avg": value + 1000, "exp_avg_sq": value + 2000}
        for name, value in values.items()
    }
    groups = [{**ADAMW, "weight_decay": 0.1 * i, "params": [name]} for i, name in enumerate(values)]
    src = saved(tmp_path / "src", {"model": values, "optim": {"state": state, "param_groups": groups}})
    go(src, tmp_path / "zero", "deepspeed", config=NAMED, zero=Zero(stage=1, dp=dp))
    padding = deepspeed.read(tmp_path / "zero").records["deepspeed"]["padding_bytes"]
    assert padding == 3 * (-10 % (2 * dp)) * 2 * 4  # masters are stored without
    go(tmp_path / "zero", tmp_path / "back", "dcp", config=NAMED)
    for name in values:
        assert read(tmp_path / "back", name) == words(values[name])
        for moment in ("exp_avg", "exp_avg_sq"):
            assert read(tmp_path / "back", f"optim/{name}/{moment}") == words(state[name][moment])


# --- K17: keys and writers ------------------------------------------------------------------------


def test_b108_megatron_1053_no_two_ranks_write_into_one_place(tmp_path: Path) -> None:
    """Shards of 3 rows into chunks of 4: each byte of the target has one writer, and a lost slice is seen."""
    tensor = Tensor("w", (12, 5), "float32")
    mesh = Mesh((("dp", 2), ("tp", 4)))
    rows = along(mesh, "tp", lambda r: even(whole(12), 4, r))
    layout = Layout("ranks", mesh, (BufferRule("w", (Part(tensor),), (rows, whole(5))),))
    value = np.arange(60, dtype=np.float32).reshape(12, 5) + 1
    state = materialise(layout, {tensor: value})
    tp = [mesh.coordinate(rank)["tp"] for rank in range(8)]
    boxes = [Box.of((3 * at, 0), (3, 5)) for at in tp]
    held = [[Held("model/w", (12, 5), "float32", boxes[r], state[r]["w"])] for r in range(8)]
    count = np.zeros((12, 5), int)
    for rank, mine in enumerate(elect([[entry_of(one) for one in few] for few in held])):
        for share in mine:
            (r, c), (n, m) = share.offset, share.size
            assert r // 3 == (r + n - 1) // 3 == tp[rank]
            count[r : r + n, c : c + m] += 1
    assert (count == 1).all()
    meeting = Meeting(8)
    each(
        8,
        lambda r: Saver(tmp_path / "run", rank=r, exchange=meeting.of(r), fsync=False).save(held[r], About()),
    )
    go(tmp_path / "run", tmp_path / "dcp", "dcp", config=NAMED)
    assert read(tmp_path / "dcp", "w") == value.tobytes()
    (folder,) = (path for path in (tmp_path / "run").iterdir() if path.is_dir())
    path = max(folder.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-20:] = bytes(20)
    path.write_bytes(data)
    with pytest.raises(Exception, match="digest") as caught:
        go(tmp_path / "run", tmp_path / "zeroed", "dcp", config=NAMED)
    assert type(caught.value).__name__ == "DigestError" and not (tmp_path / "zeroed").exists()


def test_b110_pytorch_120356_ranks_say_what_they_hold(tmp_path: Path) -> None:
    """[0, 1] and [2, 3] under one name: two halves of four, or two names, or an error; never one of them."""

    def save_each(run: Path, *ones: Held) -> list[Any]:
        meeting = Meeting(len(ones))

        def one(rank: int) -> None:
            Saver(run, rank=rank, exchange=meeting.of(rank), fsync=False).save([ones[rank]], About())

        return each(len(ones), one)

    low, high = np.float32([0, 1]), np.float32([2, 3])

    def half(key: str, size: int, at: int, values: np.ndarray[Any, Any]) -> Held:
        return Held(key, (size,), "float32", Box.of((at,), (2,)), values)

    assert (
        save_each(tmp_path / "cut", half("model/weight", 4, 0, low), half("model/weight", 4, 2, high))
        == [None] * 2
    )
    assert read(tmp_path / "cut", "weight") == np.float32([0, 1, 2, 3]).tobytes()
    save_each(tmp_path / "named", half("model/weight.0", 2, 0, low), half("model/weight.1", 2, 0, high))
    assert [read(tmp_path / "named", f"weight.{i}") for i in (0, 1)] == [low.tobytes(), high.tobytes()]
    for name, second in (
        ("gap", half("model/weight", 5, 3, high)),
        ("shape", half("model/weight", 2, 0, high)),
        ("undeclared", half("model/weight", 2, 0, high)),
    ):
        first = half("model/weight", 2 if name == "undeclared" else 4, 0, low)
        told = save_each(tmp_path / name, first, second)
        kinds = ReplicaError if name == "undeclared" else FormatError | GapError | OverlapError
        assert all(isinstance(one, kinds) for one in told), told
        assert not native.is_native(tmp_path / name)


# --- K18: corner cases of DCP ---------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 2])
def test_b119_pytorch_141571_another_size_is_another_tensor(rows: int, tmp_path: Path) -> None:
    """(4,) where (8,) or (2,) is wanted: neither a part that stays as it was, nor a part that is dropped."""
    values = weights()
    name = "model.norm.weight"
    values[name] = torch.arange(float(rows))
    src = saved(tmp_path / "src", {"model": values})
    with pytest.raises(OutsideError, match=rf"'model\.norm\.weight': stored \({rows},\) != \(6,\)"):
        prepare(src, to="hf", config=LLAMA)
    values[name] = torch.ones(1, 6)
    with pytest.raises(OutsideError, match=r"'model\.norm\.weight': stored \(1, 6\) != \(6,\)"):
        prepare(saved(tmp_path / "more", {"model": values}), to="hf", config=LLAMA)
    stored, wanted = (Tensor("w", (n,), "float32") for n in (4, rows))
    layouts = [Layout("x", Mesh(()), (BufferRule("w", (Part(t),), t.dims),)) for t in (stored, wanted)]
    with pytest.raises(PlanError, match="w"):
        plan(*layouts)


def test_b120_torchtitan_811_what_is_of_a_rank_is_named_and_left(tmp_path: Path) -> None:
    """States of 8 loaders beside weights and moments: these go to any number of ranks, those are named."""
    what = lion_and_adam()
    loaders = {f"dp_rank_{i}": {"position": 7 * i, "order": torch.arange(5) + i} for i in range(8)}
    src = saved(tmp_path / "src", {**what, "dataloader": loaders})
    (src / "config.json").write_text(json.dumps(LLAMA))
    for dp in (16, 3):
        report = go(src, tmp_path / f"dp{dp}", "deepspeed", zero=Zero(stage=1, dp=dp))
        named = [key for key in report.account.left_out if "dataloader" in key]
        assert len(named) == 16 and sum("position" in key for key in named) == 8
        go(tmp_path / f"dp{dp}", tmp_path / f"back{dp}", "dcp")
        found = loaded(tmp_path / f"back{dp}")
        for name, value in what["model"].items():
            assert words(found["model"][name]) == words(value)
            for state, values in what["optim"]["state"][name].items():
                assert words(found["optim"]["state"][name][state]) == words(values), (name, state)


def test_b122_burn_5392_a_view_is_its_elements_and_not_its_storage(tmp_path: Path) -> None:
    """Transposed, with an offset, expanded without a stride; and a storage that ends too early."""
    plain = torch.arange(35.0).view(5, 7)
    views = {
        "transposed": plain.T[1:],
        "expanded": torch.arange(3.0)[:, None].expand(3, 4),
        "plain": plain[1:, 2:],
    }
    src = saved(tmp_path / "src", {"model": views})
    go(src, tmp_path / "hf", "hf", config=NAMED)
    for name, view in views.items():
        assert read(tmp_path / "hf", name) == words(view), name
    (path,) = src.glob("*.distcp")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(TruncatedError):
        open_checkpoint(src, config=NAMED)
    path.unlink()
    with pytest.raises(MissingFileError, match=path.name):
        open_checkpoint(src, config=NAMED)
    assert pickle.loads((src / ".metadata").read_bytes()).storage_data
