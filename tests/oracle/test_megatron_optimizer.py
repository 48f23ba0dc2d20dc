"""The state of Megatron's optimizers, read and written against megatron-core itself: bits, and losses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run
from safetensors.torch import load_file

from shardweave.convert import convert, open_checkpoint, prepare
from shardweave.convert.convert import states
from shardweave.convert.target import Geometry
from shardweave.errors import ReplicaError
from shardweave.store import megatron_optimizer, torch_dist
from shardweave.store.manifest import Manifest, TensorSpec
from shardweave.store.megatron_groups import common_of
from shardweave.store.optimizer import OptimizerRecord
from shardweave.store.read import Reader
from shardweave.store.torch_dist_write import allocate, finish

SCRIPT = Path(__file__).with_name("megatron_optimizer_cpu.py")
DATA = Path(__file__).parents[1] / "data"
STATES = ("master", "exp_avg", "exp_avg_sq")
State = Mapping[str, np.ndarray]

pytestmark = [pytest.mark.peer("megatron.core"), pytest.mark.timeout(400)]


def report(folder: Path, name: str, rank: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"{name}.{rank}.json").read_text()))


def on_rank(folder: Path, name: str, rank: int) -> dict[str, np.ndarray]:
    """What a rank held, bf16 as words."""
    held = load_file(folder / f"{name}.{rank}.safetensors")
    words = {key: value.view(torch.uint16) if value.itemsize == 2 else value for key, value in held.items()}
    return {key: value.numpy() for key, value in words.items()}


def whole(folder: Path, name: str, ranks: int) -> dict[str, np.ndarray]:
    """Weights and states of all ranks put together by their own ranges and attributes, under module names.

    An element that no rank has is NaN; one that several have is the same on all of them.
    """
    held: dict[int, dict[str, np.ndarray]] = {}
    said: dict[str, dict[str, Any]] = {}
    for rank in range(ranks):
        about = report(folder, name, rank)
        mine = held.setdefault(about["tp"], {})
        for key, value in on_rank(folder, name, rank).items():
            kind, _, weight = key.partition(".")
            at = said[weight] = about["ranges"][weight] | said.get(weight, {})
            if kind == "weight":
                assert key not in mine or mine[key].tobytes() == value.tobytes(), key
                mine[key] = value
                continue
            span = about["ranges"][weight]
            flat = mine.setdefault(key, np.full(int(np.prod(at["shape"])), np.nan, np.float32))
            assert flat[span["start"] : span["stop"]].shape == value.shape
            flat[span["start"] : span["stop"]] = value
    out = {}
    for key in held[0]:
        cut = said[key.partition(".")[2]]["cut"]
        parts = [mine[key].reshape(said[key.partition(".")[2]]["shape"]) for _, mine in sorted(held.items())]
        if cut is None:
            assert len({part.tobytes() for part in parts}) == 1, key
            out[key] = parts[0]
            continue
        dim, stride = cut
        pieces = [np.split(part, stride, dim) for part in parts]
        out[key] = np.concatenate([piece[n] for n in range(stride) for piece in pieces], dim)
        assert not (key.partition(".")[0] in STATES and np.isnan(out[key]).any()), key
    return out


def stored(
    view: Manifest, kind: str, name: str, reader: Reader, *, layers: int = 0, experts: int = 0
) -> np.ndarray:
    """What a view has of a parameter of a module of the local spec, found by its stacked key.

    ``layers`` and ``experts`` come before those of the module.
    """
    key, at = name, []
    for pattern, stacked, first in (
        (r"\.layers\.(\d+)\.", ".layers.", layers),
        (r"\.local_experts\.(\d+)\.", ".experts.", experts),
    ):
        if match := re.search(pattern, key):
            at.append(int(match[1]) + first)
            key = key.replace(match[0], stacked)
    key = key.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    if key not in view.tensors:
        key = key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    if key not in view.tensors:
        key = "embedding.word_embeddings.weight"  # the tied output of the last stage
    found = np.asarray(reader.load(key if kind == "weight" else f"optim/{key}/{kind}")[tuple(at)])
    return found.view("<u2") if found.dtype.itemsize == 2 else found


def check_ranks(
    folder: Path, name: str, ranks: int, view: Manifest, *, degrees: tuple[int, int, int], vpp: int = 1
) -> int:
    """Compare what every rank held with its part of what a view has; returns how many shards that were."""
    tp, pp, ep = degrees
    num = 0
    with Reader(view) as reader:
        for rank in range(ranks):
            about = report(folder, name, rank)
            for key, value in on_rank(folder, name, rank).items():
                kind, _, weight = key.partition(".")
                at = about["ranges"][weight]
                first = {"layers": about["pp"] * 4 // pp, "experts": about["ep"] * 4 // ep}
                if chunk := re.match(r"chunk(\d)\.", weight):
                    weight = weight[chunk.end() :]
                    first["layers"] = (int(chunk[1]) * pp + about["pp"]) * 4 // pp // vpp
                full = stored(view, kind, weight, reader, **first)
                if at["cut"] is not None:
                    dim, stride = at["cut"]
                    cuts = [np.split(part, tp, dim)[about["tp"]] for part in np.split(full, stride, dim)]
                    full = np.concatenate(cuts, dim)
                if kind == "weight":
                    assert full.tobytes() == value.tobytes(), (rank, key)
                else:
                    flat = full.reshape(-1)[at["start"] : at["stop"]]
                    assert flat.tobytes() == value.tobytes(), (rank, key)
                num += 1
    return num


def rewritten(source: Path, target: Path, *, of_torch: bool = False) -> None:
    """The same weights and states through the store's own writers, with everything that is carried.

    ``of_torch`` says the settings in torch's words alone, as a run outside Megatron has them.
    """
    view = megatron_optimizer.named(torch_dist.read(source))
    kept = megatron_optimizer.carried(view)
    trained = {
        name: tensor.shape
        for name, tensor in view.tensors.items()
        if not name.startswith("optim/") and name not in view.records["untrained"]
    }
    keys = {name: name for name in view.tensors if not name.startswith("optim/")}
    for name in trained:
        keys |= {f"optim/{name}/{state}": megatron_optimizer.key_of(name, state) for state in STATES}
    assert keys.keys() == view.tensors.keys()
    specs = []
    for name, key in keys.items():
        tensor = view.tensors[name]
        rows, rest = tensor.shape[0] // 2, tensor.shape[1:]
        ends = (0, rows), (rows, tensor.shape[0] - rows)
        halves = tuple(((at, *(0 for _ in rest)), (size, *rest)) for at, size in ends)
        specs.append(TensorSpec(key, tensor.dtype, tensor.shape, halves))
    record = view.records["optimizer"]
    if of_torch:
        groups = [
            {**{word: group[word] for word in ("params", "lr", "betas", "eps")}, "weight_decay": decay}
            for group, decay in zip(record.groups, (0.1, 0.0), strict=True)
        ]
        record = OptimizerRecord(record.count, tuple(groups))
    common = common_of(record, trained, kept=kept)
    extra = {
        key: torch_dist.object_bytes(view, key) for key in view.records["objects"] if "._extra_state/" in key
    }
    target.mkdir()
    laid = allocate(target, specs, records={"common": common, "objects": {**extra, **kept["objects"]}})
    with Reader(view) as reader:
        for name, key in keys.items():
            values = reader.load(name)
            for extent in laid.tensors[key].extents:
                box = tuple(slice(o, o + s) for o, s in zip(extent.offset, extent.shape, strict=True))
                with (target / extent.file).open("r+b") as file:
                    file.seek(extent.start)
                    file.write(np.ascontiguousarray(values[box]).tobytes())
    finish(laid, fsync=False)


# --- one training, stopped and gone on with elsewhere ---------------------------------------------

BEGUN = {"kind": "gqa", "tp": 1, "steps": 2, "more": 3}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on two data-parallel ranks, saved by Megatron, and the three after them."""
    folder = tmp_path_factory.mktemp("begun")
    beside = {"iteration": 2, "opt_param_scheduler": {"max_lr": 3e-3, "num_steps": 8}}
    cases = [{**BEGUN, "name": "dp2", "sharding": "fully_reshardable", "save": str(folder / "saved"),
              "beside": beside}]  # fmt: skip
    run(SCRIPT, cases, folder, world_size=2, limit_s=150, preload="megatron_adam")
    return folder


@pytest.fixture(scope="module")
def gone_on(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rewritten folder, loaded at other degrees; and all of the training at another DP."""
    folder = tmp_path_factory.mktemp("gone_on")
    rewritten(begun / "saved", folder / "written")
    rewritten(begun / "saved", folder / "of torch", of_torch=True)
    loaded = {"kind": "gqa", "checkpoint": str(folder / "written"), "at": 2, "more": 3}
    cases = [
        {**BEGUN, "name": "uninterrupted"},
        {**loaded, "name": "dp4", "tp": 1},
        {**loaded, "name": "tp2", "tp": 2},
        {**loaded, "name": "of torch", "tp": 2, "checkpoint": str(folder / "of torch")},
    ]  # fmt: skip
    run(SCRIPT, cases, folder, world_size=4, limit_s=200, preload="megatron_adam")
    return folder


class TestFullyReshardable:
    def test_what_is_read_is_what_the_ranks_held(self, begun: Path) -> None:
        view = megatron_optimizer.named(torch_dist.read(begun / "saved"))
        truth = whole(begun, "dp2", 2)
        with Reader(view) as reader:
            for key, value in truth.items():
                kind, _, name = key.partition(".")
                assert stored(view, kind, name, reader).tobytes() == value.tobytes(), key
        assert sum(key.startswith("exp_avg_sq.") for key in truth) == 35

    def test_the_real_optimizer_loads_it_at_another_dp(self, begun: Path, gone_on: Path) -> None:
        truth, found = whole(begun, "dp2", 2), whole(gone_on, "dp4", 4)
        assert truth.keys() == found.keys()
        assert all(found[key].tobytes() == value.tobytes() for key, value in truth.items())

    @pytest.mark.parametrize("name", ["tp2", "of torch"])
    def test_the_real_optimizer_loads_it_at_another_tp(self, begun: Path, gone_on: Path, name: str) -> None:
        truth, found = whole(begun, "dp2", 2), whole(gone_on, name, 4)
        assert truth.keys() == found.keys()
        assert all(found[key].tobytes() == value.tobytes() for key, value in truth.items())

    def test_the_training_goes_on_with_the_same_losses(self, begun: Path, gone_on: Path) -> None:
        ours = report(begun, "dp2", 0)["more"]
        other = report(gone_on, "uninterrupted", 0)["more"]
        noise = max(abs(a - b) for a, b in zip(ours, other, strict=True))
        at_dp4 = [abs(a - b) for a, b in zip(report(gone_on, "dp4", 0)["more"], ours, strict=True)]
        assert max(at_dp4) <= noise

    def test_what_all_ranks_share_comes_back(self, gone_on: Path) -> None:
        assert set(report(gone_on, "dp4", 0)["beside"]) >= {"iteration", "opt_param_scheduler"}


# --- what jobs of other degrees save --------------------------------------------------------------

GQA = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 192, "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 96, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
MOE = GQA | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 160, "hidden_size": 48,
    "num_attention_heads": 4, "head_dim": 12, "intermediate_size": 40, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True,
}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "tp2, several buckets": {"kind": "gqa", "tp": 2, "bucket_size": 9000},
    "tp2 pp2, tied": {"kind": "gqa", "tp": 2, "pp": 2, "tied": True},
    "pp2, two chunks a stage": {"kind": "gqa", "tp": 2, "pp": 2, "vpp": 2, "bucket_size": 9000},
    "ep2": {"kind": "moe", "tp": 1, "ep": 2},
    "tp2 ep2, several buckets": {"kind": "moe", "tp": 2, "ep": 2, "bucket_size": 5000},
    "ep2, whole": {"kind": "moe", "tp": 1, "ep": 2, "sharding": "fully_reshardable"},
    "several buckets, whole": {
        "kind": "moe", "tp": 1, "ep": 2, "bucket_size": 5000, "sharding": "fully_reshardable",
    },
    "older, tp2": {"kind": "gqa", "tp": 2, "older": True},
    "older, tp2 pp2, tied, several buckets": {
        "kind": "gqa", "tp": 2, "pp": 2, "tied": True, "older": True, "bucket_size": 9000,
    },
    "older, ep2": {"kind": "moe", "tp": 1, "ep": 2, "older": True},
    "older, pp2, not distributed": {"kind": "gqa", "tp": 2, "pp": 2, "older": True, "distributed": False},
    "older, ep2, not distributed": {"kind": "moe", "tp": 1, "ep": 2, "older": True, "distributed": False},
    "tp2, one dtype": {"kind": "gqa", "tp": 2, "one_dtype": True},
    "tp2, one dtype, not distributed": {"kind": "gqa", "tp": 2, "one_dtype": True, "distributed": False},
}  # fmt: skip

LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 72,
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 6,
    "intermediate_size": 44, "moe_intermediate_size": 14, "n_routed_experts": 10, "n_shared_experts": 3,
    "num_experts_per_tok": 4, "n_group": 5, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "q_lora_rank": 22, "kv_lora_rank": 18,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_nextn_predict_layers": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "max_position_embeddings": 32, "attention_bias": False,
}  # fmt: skip
FURTHER: dict[str, dict[str, Any]] = {
    "further tokens, tp2 pp2": {"tp": 2, "pp": 2, "bucket_size": 9000},
    "further tokens, ep2": {"tp": 1, "ep": 2},
}
"""Jobs with latent attention and layers for further tokens, which the last stage has.

megatron-core 0.16.1 cannot save a bucket before a shared embedding whose last parameter is no multiple of 64:
the padding that it stores there is longer than the bucket.
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks hold and save after two steps, for every job."""
    folder = tmp_path_factory.mktemp("saved")
    cases = [
        {
            "sharding": "dp_reshardable" if job.get("distributed", True) else None,
            **job,
            "name": name,
            "pushed": 2,
            "save": str(folder / name),
        }
        for name, job in {
            **JOBS,
            **{name: {**job, "config": LATENT, "one_dtype": True} for name, job in FURTHER.items()},
        }.items()
    ]
    run(SCRIPT, cases, folder, world_size=4, limit_s=240, preload="megatron_adam")
    return folder


def config_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """The config that describes the model of a job."""
    return (MOE if job["kind"] == "moe" else GQA) | {"tie_word_embeddings": job.get("tied", False)}


@pytest.mark.parametrize("name", [name for name in JOBS if name != "several buckets, whole"])
def test_what_a_job_saves_is_read(saved: Path, name: str) -> None:
    job = JOBS[name]
    source = open_checkpoint(saved / name, config=config_of(job))
    state = states(source)
    assert state is not None and set(state.counts.values()) == {2} and len(state.counts) == len(state.weights)
    degrees = job["tp"], job.get("pp", 1), job.get("ep", 1)
    shards = check_ranks(saved, name, 4, source.manifest, degrees=degrees, vpp=job.get("vpp", 1))
    assert shards > 4 * 60
    decays = {name: said["wd_mult"] for name, said in state.settings.items()}
    assert all((decay == 0.0) is ("norm" in name) for name, decay in decays.items())


@pytest.mark.parametrize("name", FURTHER)
def test_what_a_job_with_layers_for_further_tokens_saves_is_read(saved: Path, name: str) -> None:
    """Its keys are per layer; the bias of a router is a buffer and has no state."""
    tp, pp, ep = (FURTHER[name].get(axis, 1) for axis in ("tp", "pp", "ep"))
    source = open_checkpoint(saved / name, config=LATENT)
    state = states(source)
    assert state is not None and set(state.counts.values()) == {2}
    untrained = source.manifest.records["untrained"]
    assert untrained and all(key.endswith("mlp.router.expert_bias") for key in untrained)
    seen = set()
    with Reader(source.manifest) as reader:
        for rank in range(4):
            about = report(saved, name, rank)
            for key, value in on_rank(saved, name, rank).items():
                kind, _, weight = key.partition(".")
                at, place = about["ranges"][weight], ()
                if match := re.match(r"decoder\.layers\.(\d+)", weight):
                    layer = int(match[1]) + about["pp"] * 4 // pp
                    weight = f"decoder.layers.{layer}{weight[match.end() :]}"
                if match := re.search(r"\.local_experts\.(\d+)\.", weight):
                    place = (int(match[1]) + about["ep"] * 10 // ep,)
                    weight = weight.replace(match[0], ".experts.")
                full = reader.load(weight if kind == "weight" else f"optim/{weight}/{kind}")[place]
                full = full.view("<u2") if full.itemsize == 2 else full
                if at["cut"] is not None:
                    dim, stride = at["cut"]
                    cuts = [np.split(part, tp, dim)[about["tp"]] for part in np.split(full, stride, dim)]
                    full = np.concatenate(cuts, dim)
                if kind != "weight":
                    full = full.reshape(-1)[at["start"] : at["stop"]]
                assert full.tobytes() == value.tobytes(), (rank, key)
                seen.add(weight)
    assert {"mtp.layers.0.enorm.weight", "mtp.layers.1.eh_proj.weight"} < seen
    assert seen == source.manifest.records["optimizer"].count.keys()


def test_shifted_states_of_megatron_are_refused(saved: Path) -> None:
    """megatron-core 0.16.1 itself saves whole states at wrong places where padding is between buckets."""
    source = open_checkpoint(saved / "several buckets, whole", config=MOE)
    with pytest.raises(ReplicaError, match="a master rounds to its weight"):
        states(source)
    with pytest.raises(AssertionError):
        check_ranks(saved, "several buckets, whole", 4, source.manifest, degrees=(1, 1, 2))


# --- from every form into jobs of other degrees ---------------------------------------------------

MOVES: dict[str, tuple[str, dict[str, Any]]] = {
    "spread experts to whole ones": ("ep2", {"kind": "moe", "tp": 1}),
    "several buckets to one": ("tp2 ep2, several buckets", {"kind": "moe", "tp": 1, "ep": 4}),
    "folders of ranks to tp4": (
        "older, tp2 pp2, tied, several buckets",
        {"kind": "gqa", "tp": 4, "tied": True},
    ),
    "no distributed optimizer to one": ("older, ep2, not distributed", {"kind": "moe", "tp": 2, "ep": 2}),
}


@pytest.fixture(scope="module")
def moved(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What jobs saved, converted for others and loaded by them."""
    folder = tmp_path_factory.mktemp("moved")
    cases = []
    for name, (source, job) in MOVES.items():
        etp = 1 if job["kind"] == "moe" else None
        geometry = Geometry(tp=job["tp"], ep=job.get("ep", 1), etp=etp, spec="local", vocab_divisor=1)
        plan = prepare(saved / source, to="megatron", config=config_of(job), geometry=geometry)
        convert(plan, folder / name, fsync=False)
        cases.append({**job, "name": name, "checkpoint": str(folder / name), "at": 2})
    run(SCRIPT, cases, folder, world_size=4, limit_s=240, preload="megatron_adam")
    return folder


@pytest.mark.parametrize("name", MOVES)
def test_a_job_of_other_degrees_loads_what_was_converted(saved: Path, moved: Path, name: str) -> None:
    source, job = MOVES[name]
    view = open_checkpoint(saved / source, config=config_of(job)).manifest
    assert check_ranks(moved, name, 4, view, degrees=(job["tp"], 1, job.get("ep", 1))) > 4 * 60
