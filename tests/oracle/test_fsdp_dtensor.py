"""FSDP2 and DTensor: our dims are what torch's ranks hold, element by element and in order.

Three ways of asking torch. A process group that sends nothing puts this process at each rank in turn, and
torch's own code cuts there; ``LocalTensorMode``, all ranks in one tensor, is not asked, since it gives empty
parts the shape of another rank's. A few cases, and ``fully_shard``, run on real processes. And the stored
state of a real training run is put together, moved and compared with its truth.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from shardweave.dialects import fsdp, hf
from shardweave.errors import GeometryError, MeshError
from shardweave.layout import Dim, Layout, Mesh, Run, Tensor, chunk, parse_layout, prove, whole
from shardweave.layout.buffer import Buffer
from shardweave.models import from_config
from shardweave.plan import assemble, empty, plan, simulate
from shardweave.store import torch_dist

DRIVER = Path(__file__).with_name("dtensor_ranks.py")
NAMES = ("a", "b", "c")


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """A process group of ``size`` ranks that sends nothing."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _clear_sharding_prop_cache()  # what it remembers has the mesh, and so the rank, of another world
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def marker(shape: Sequence[int]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def cut(buffer: Buffer, whole: np.ndarray) -> np.ndarray:
    """What a buffer holds of a whole tensor, index by index."""
    index = [np.array([i for _, i in dim], dtype=np.int64) for dim in buffer.dims]
    return whole[np.ix_(*index)] if index else whole


def row_major(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in sizes)))


# --- placements ---------------------------------------------------------------------------------


@st.composite
def placed_shapes(draw: st.DrawFn, mesh_dims: int) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    strided = st.builds(lambda dim, n: _StridedShard(dim, split_factor=n), dims, st.integers(1, 4))
    one = st.one_of(dims.map(Shard), dims.map(Shard), strided, st.just(Replicate()))
    return shape, tuple(draw(st.lists(one, min_size=mesh_dims, max_size=mesh_dims)))


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3, 2), (2, 3), (2, 2, 3)], ids=str)
def test_dims_are_what_ranks_hold(sizes: tuple[int, ...]) -> None:
    axes = NAMES[: len(sizes)]
    world = fsdp.mesh(**dict(zip(axes, sizes, strict=True)))

    @settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=50)
    @given(placed_shapes(len(sizes)))
    @example(
        ((3, 3), (_StridedShard(1, split_factor=3), _StridedShard(0, split_factor=4), Shard(0))[: len(sizes)])
    )
    def check(drawn: tuple[tuple[int, ...], tuple[Any, ...]]) -> None:
        shape, placements = drawn
        whole = marker(shape)
        rule = fsdp.placed(Tensor("w", shape, "int64"), world, dict(zip(axes, placements, strict=True)))
        prove(Layout("x", world, (rule,)))
        for rank, coordinate in enumerate(row_major(sizes)):
            buffer = rule.at(world, rank)
            assert buffer is not None
            with fake_world(world.size, rank):
                device = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
                theirs = distribute_tensor(torch.from_numpy(whole), device, placements, src_data_rank=None)
                held = theirs.to_local().numpy()
            np.testing.assert_array_equal(cut(buffer, whole), held)
            assert buffer.shape == held.shape
            size, offset = _compute_local_shape_and_global_offset(shape, sizes, list(coordinate), placements)
            assert buffer.shape == size
            firsts = [dim[0][1] if len(dim) else None for dim in buffer.dims]
            assert all(ours in (None, at) for ours, at in zip(firsts, offset, strict=True))

    check()


def test_plain_data_is_read_as_torchs_own() -> None:
    world, tensor = fsdp.mesh(dp=3, tp=2), Tensor("w", (7, 5), "float32")
    ours = {"dp": fsdp.Shard(0, split_factor=2), "tp": fsdp.Shard(-1)}
    theirs = {"dp": _StridedShard(0, split_factor=2), "tp": Shard(-1)}
    assert fsdp.placed(tensor, world, ours) == fsdp.placed(tensor, world, theirs)
    whole = fsdp.placed(tensor, world, {"dp": fsdp.Replicate(), "tp": Replicate()}, name="v")
    assert (whole.name, whole.axes) == ("v", ())
    row = Tensor("b", (7,), "float32")
    assert fsdp.placed(row, world, {"dp": Shard(-1)}) == fsdp.placed(row, world, {"dp": fsdp.Shard(0)})


def test_families_have_the_placements_of_their_members() -> None:
    tensor = Tensor("l.{layer}.w", (7, 5), "float32", (("layer", Dim([Run("", 3, 4)])),))
    rule = fsdp.placed(tensor, fsdp.mesh(dp=3), {"dp": Shard(0)})
    assert [str(dim) for dim in rule.dims[1].dims] == ["[0:3]", "[3:6]", "[6:7]"]
    assert rule.dims[0] == tensor.dims[0]


class RaggedShard(Shard):
    """A subclass that cuts in a way of its own."""


@pytest.mark.parametrize(
    ("placement", "found"),
    [
        (Partial(), r"placement\(P\(sum\)\)"),
        (RaggedShard(0), r"placement\("),
        ("Shard(0)", r"placement\(Shard\(0\)\)"),
        (fsdp.Shard(2), r"dim\(2\) of 2 dims"),
        (fsdp.Shard(-3), r"dim\(-3\) of 2 dims"),
        (fsdp.Shard(0, split_factor=0), r"split_factor\(0\)"),
    ],
    ids=str,
)
def test_placements_that_say_no_cut_are_refused(placement: Any, found: str) -> None:
    with pytest.raises(GeometryError, match=rf"tensor 'w', mesh axis 'dp': .*{found}"):
        fsdp.placed(Tensor("w", (7, 5), "float32"), fsdp.mesh(dp=3), {"dp": placement})


def test_axes_are_those_of_the_mesh() -> None:
    with pytest.raises(MeshError, match="axis 'tp'"):
        fsdp.placed(Tensor("w", (7,), "float32"), fsdp.mesh(dp=3), {"tp": Replicate()})


# --- real processes -----------------------------------------------------------------------------

TWO, FOUR = {"dp": 2, "tp": 2}, {"dp": 4}
CASES: list[dict[str, Any]] = [
    {"mesh": FOUR, "shape": [6, 3], "placements": [[0, 1]], "made_by": "distribute_tensor"},
    {"mesh": FOUR, "shape": [3, 5, 2], "placements": [[0, 1]], "made_by": "distribute_tensor"},
    {"mesh": FOUR, "shape": [9], "placements": [[0, 3]], "made_by": "distribute_tensor"},
    {"mesh": FOUR, "shape": [2, 5], "placements": [[]], "made_by": "distribute_tensor"},
    {"mesh": TWO, "shape": [5, 7], "placements": [[0, 1], [1, 1]], "made_by": "distribute_tensor"},
    {"mesh": TWO, "shape": [7, 3], "placements": [[0, 1], [0, 1]], "made_by": "distribute_tensor"},
    {"mesh": TWO, "shape": [5, 3], "placements": [[0, 3], [0, 1]], "made_by": "distribute_tensor"},
    {"mesh": TWO, "shape": [3, 5], "placements": [[], [1, 1]], "made_by": "distribute_tensor"},
    {"mesh": FOUR, "shape": [7, 3], "made_by": "fully_shard"},
    {"mesh": FOUR, "shape": [3, 5], "made_by": "fully_shard"},
    {"mesh": {"hsdp": 2, "dp": 2}, "shape": [5, 3], "made_by": "fully_shard"},
    {"mesh": TWO, "shape": [7, 3], "style": "column", "made_by": "fully_shard"},
    {"mesh": TWO, "shape": [3, 7], "style": "row", "made_by": "fully_shard"},
]
for number, one in enumerate(CASES):
    one["name"] = f"case{number}"


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Mapping[str, Any], Mapping[str, str]]]:
    """What each of four processes holds in each case, and the text of the layout that it read off."""
    out = tmp_path_factory.mktemp("ranks")
    (out / "cases.json").write_text(json.dumps(CASES))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, str(DRIVER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "4", str(out / "store"), str(out / "cases.json"), str(out)],
            env=environment,
            stderr=subprocess.PIPE,
        )
        for rank in range(4)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=100)
            assert rank.returncode == 0, said.decode()
    finally:
        for rank in ranks:
            rank.kill()
    return [(np.load(out / f"{r}.npz"), json.loads((out / f"{r}.json").read_text())) for r in range(4)]


def expected(case: Mapping[str, Any]) -> Layout:
    """The layout of a case from its description: what made the tensor, and how."""
    world, shape = fsdp.mesh(**case["mesh"]), tuple(case["shape"])
    if case["made_by"] == "distribute_tensor":
        tensor = Tensor("w", shape, "int64")
        cuts = [fsdp.Shard(*given) if given else fsdp.Replicate() for given in case["placements"]]
        return Layout(
            "dtensor", world, (fsdp.placed(tensor, world, dict(zip(case["mesh"], cuts, strict=True))),)
        )
    steps = {"dp": fsdp.Shard(0)}
    if "tp" in case["mesh"]:  # cut by tp first, and what that left by dp
        steps = {"tp": fsdp.Shard(int(case["style"] == "row")), **steps}
    return Layout("dtensor", world, (fsdp.placed(Tensor("w", shape, "float32"), world, steps),))


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['made_by']}-{case['name']}")
def test_real_ranks_hold_our_dims(case: Mapping[str, Any], four_ranks: Any) -> None:
    layout, whole = expected(case), marker(case["shape"])
    prove(layout)
    for rank, (held, said) in enumerate(four_ranks):
        (buffer,) = layout.buffers(rank)
        np.testing.assert_array_equal(held[case["name"]], cut(buffer, whole))
        assert held[case["name"]].shape == buffer.shape
        assert parse_layout(said[case["name"]]) == layout


# --- a model under fully_shard ------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "model_type": "llama", "dtype": "float32", "vocab_size": 53, "hidden_size": 30, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 43,
    "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
}  # fmt: skip


def tensor_parallel_plan() -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    into, out_of = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    return {
        "model.embed_tokens": RowwiseParallel(),
        "lm_head": ColwiseParallel(),
        **{f"model.layers.*.*.{name}": ColwiseParallel() for name in into},
        **{f"model.layers.*.*.{name}": RowwiseParallel() for name in out_of},
    }


def sharded_parameters(whole: Mapping[str, torch.Tensor], device: DeviceMesh, axes: tuple[str, ...]) -> Any:
    """transformers' own model under torch's own tensor parallelism and ``fully_shard``, on this rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(**{k: v for k, v in CONFIG.items() if k not in ("model_type", "dtype")})
    )
    model.load_state_dict(whole)
    if "tp" in (device.mesh_dim_names or ()):
        parallelize_module(model, device["tp"], tensor_parallel_plan(), src_data_rank=None)
    for layer in model.model.layers:
        fully_shard(layer, mesh=device[axes])
    fully_shard(model, mesh=device[axes])
    return dict(model.named_parameters())


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(
    ("mesh", "replicate"),
    [({"dp": 4}, ()), ({"dp": 3, "tp": 2}, ()), ({"hsdp": 2, "dp": 2, "tp": 2}, ("hsdp",))],
    ids=str,
)
def test_a_model_of_transformers_under_fully_shard(mesh: dict[str, int], replicate: tuple[str, ...]) -> None:
    model, world = from_config(CONFIG), fsdp.mesh(**mesh)
    layout = fsdp.layout(model, world, replicate=replicate, tp="tp" if "tp" in mesh else None)
    prove(layout, model.tensors)
    random = np.random.default_rng(0)
    whole = {
        name: torch.from_numpy(random.standard_normal(tensor.shape, dtype=np.float32))
        for tensor in model.tensors
        for name in tensor.names()
    }
    state, unclear = {}, set()
    for rank in world.ranks:
        with fake_world(world.size, rank):
            device = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
            found = sharded_parameters(whole, device, (*replicate, "dp"))
            state[rank] = {name: p.to_local().detach().numpy() for name, p in found.items()}
            arrays = layout.arrays(rank)
            assert arrays.keys() == found.keys()
            for name, (buffer, _) in arrays.items():
                read = fsdp.of_dtensor(name, found[name], within=world, made_by="fully_shard")
                (live,) = read.buffers(rank)
                assert (live.dims, live.dtype) == (buffer.dims[len(buffer.separate) :], "float32"), name
                try:
                    assert fsdp.of_dtensor(name, found[name], within=world) == read
                except GeometryError:
                    unclear.add(name.rpartition(".layers.")[2])
    values = assemble(layout, state)
    target = hf.layout(model)
    moved = simulate(plan(layout, target), state, into=empty(target, np.float32, fill=np.nan))
    for name, tensor in whole.items():
        np.testing.assert_array_equal(moved[0][name], tensor.numpy())
    assert all(value.dtype == np.float32 for value in values.values())
    # Where nothing divides, placements alone say two things.
    expected = {f"{n}.mlp.{k}_proj.{p}" for n in range(3) for k in ("gate", "up") for p in ("weight", "bias")}
    assert unclear == (expected if mesh == {"dp": 3, "tp": 2} else set())


# --- live tensors -------------------------------------------------------------------------------


def live(
    sizes: Sequence[int],
    placements: Sequence[Any],
    shape: Sequence[int],
    local: Sequence[int],
    **changed: Any,
) -> Any:
    """What ``of_dtensor`` looks at, at the first coordinate of a mesh."""
    ranks = torch.arange(math.prod(sizes)).reshape(*sizes)
    device = {
        "mesh": ranks,
        "mesh_dim_names": ("dp", "ep", "tp") if len(sizes) == 3 else ("dp", "tp")[: len(sizes)],
        "get_coordinate": lambda: [0] * len(sizes),
    }
    return SimpleNamespace(
        device_mesh=SimpleNamespace(**device | changed),
        placements=tuple(placements),
        shape=torch.Size(shape),
        dtype=torch.bfloat16,
        to_local=lambda: torch.empty(tuple(local)),
    )


def test_a_live_tensor_says_its_own_mesh() -> None:
    (rule,) = fsdp.of_dtensor("w", live((4,), [Shard(0)], (10, 3), (3, 3))).rules
    assert [str(dim) for dim in rule.dims[0].dims] == ["[0:3]", "[3:6]", "[6:9]", "[9:10]"]
    assert rule.dtype == "bfloat16"
    layout = fsdp.of_dtensor("w", live((2,), [Shard(0)], (3,), (2,), mesh=torch.tensor([6, 7])))
    assert layout.mesh == Mesh((("dp", 2),), offset=6)
    nameless = fsdp.of_dtensor("w", live((2,), [Shard(0)], (3,), (2,), mesh_dim_names=None))
    assert str(nameless.mesh) == "dim0=2"
    elsewhere = live((2,), [Shard(0)], (3,), (99,), get_coordinate=lambda: None)
    assert fsdp.of_dtensor("w", elsewhere).mesh.size == 2


def test_a_shape_that_was_guessed_from_one_rank_is_refused() -> None:
    """Ranks of 3, 3, 3 and 1 rows: the last of them would guess 4."""
    with pytest.raises(GeometryError, match=r"rank 0: local shape\(3, 3\) != \(1, 3\) of shape\(4, 3\)"):
        fsdp.of_dtensor("w", live((4,), [Shard(0)], (4, 3), (3, 3)))


def test_a_part_of_a_mesh_needs_the_whole_one() -> None:
    part = live((3,), [Shard(0)], (7,), (3,), mesh=torch.tensor([1, 3, 5]))
    with pytest.raises(MeshError, match=r"ranks\(1, 3, 5\)"):
        fsdp.of_dtensor("w", part)
    world = fsdp.mesh(dp=3, tp=2)
    layout = fsdp.of_dtensor("w", part, within=world)
    assert layout.rules[0].axes == ("dp",) and layout.mesh == world
    wrong = [fsdp.mesh(dp=2, tp=2), fsdp.mesh(tp=2, dp=3), fsdp.mesh(a=3, b=2), fsdp.mesh(dp=4, tp=2)]
    for other in wrong:
        with pytest.raises(MeshError, match=r"ranks\(1, 3, 5\) in "):
            fsdp.of_dtensor("w", part, within=other)


def test_strided_placements_that_do_not_divide_need_their_maker() -> None:
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    even = live((3, 2), strided, (12,), (2,))
    assert fsdp.of_dtensor("w", even) == fsdp.of_dtensor("w", even, made_by="fully_shard")
    uneven = live((3, 2), strided, (7,), (2,))
    with pytest.raises(GeometryError, match=r"_S\(0, 2\), S\(0\).*made_by='fully_shard'"):
        fsdp.of_dtensor("w", uneven)
    held = {}
    for made_by in ("fully_shard", "distribute_tensor"):
        layout = fsdp.of_dtensor("w", uneven, made_by=made_by)
        held[made_by] = [str(buffer.dims[0]) for rank in range(6) for buffer in layout.buffers(rank)]
    common = ["[0:2]", "[4:5]", "[2:4]", "[5:6]"]
    assert held == {"fully_shard": [*common, "[]", "[6:7]"], "distribute_tensor": [*common, "[6:7]", "[]"]}
    with pytest.raises(GeometryError, match=r"made_by\('megatron'\)"):
        fsdp.of_dtensor("w", uneven, made_by="megatron")
    # Experts over ep, cut by tp, and what that left by dp: three cuts of one dim.
    three = live((2, 2, 2), [_StridedShard(0, split_factor=4), Shard(0), Shard(0)], (13,), (2,))
    layout = fsdp.of_dtensor("w", three, made_by="fully_shard")
    for rank, (dp, ep, tp) in enumerate(row_major((2, 2, 2))):
        (buffer,) = layout.buffers(rank)
        assert buffer.dims[0] == chunk(chunk(chunk(whole(13), 2, ep), 2, tp), 2, dp)
    # A cut of another dim is none of the parts that a factor counts.
    other = live((3, 2, 2), [_StridedShard(0, split_factor=2), Shard(1), Shard(0)], (7, 5), (2, 3))
    layout = fsdp.of_dtensor("w", other, made_by="fully_shard")
    for rank, (dp, ep, tp) in enumerate(row_major((3, 2, 2))):
        (buffer,) = layout.buffers(rank)
        assert buffer.dims == (chunk(chunk(whole(7), 2, tp), 3, dp), chunk(whole(5), 2, ep))
    # Plain cuts are made in the order of the mesh, whoever makes them.
    plain = live((3, 2), [Shard(0), Shard(0)], (7,), (2,))
    assert fsdp.of_dtensor("w", plain) == fsdp.of_dtensor("w", plain, made_by="fully_shard")
    # A factor that no later cut explains is no doing of fully_shard: there is one reading.
    other = live((3, 2), [_StridedShard(0, split_factor=3), Shard(0)], (7,), (2,))
    assert fsdp.of_dtensor("w", other) == fsdp.of_dtensor("w", other, made_by="fully_shard")


# --- a real run of fully_shard ------------------------------------------------------------------


class Run4:
    """Parameters and AdamW moments of a run on 4 ranks: local shards, whole tensors, and its DCP folder."""

    def __init__(self, data: Path) -> None:
        folder = data / "dcp_fsdp2_4"
        self.truth = load_file(folder / "truth.safetensors")
        described = json.loads((folder / "local/rank0.json").read_text())
        assert {one["placements"] for one in described.values()} == {"(Shard(dim=0),)"}
        self.tensors = {
            name: Tensor(name, tuple(one["global_shape"]), "float32") for name, one in described.items()
        }
        self.state = {}
        for rank in range(4):
            local = load_file(folder / f"local/rank{rank}.safetensors")
            shapes = json.loads((folder / f"local/rank{rank}.json").read_text())
            # An empty part has no bytes, and its file may leave out its shape too.
            self.state[rank] = {name: local[name].reshape(one["local_shape"]) for name, one in shapes.items()}
        self.manifest = torch_dist.read(folder / "dcp")

    def layout(self, world: int) -> Layout:
        mesh = fsdp.mesh(dp=world)
        rules = (fsdp.placed(tensor, mesh, {"dp": fsdp.Shard(0)}) for tensor in self.tensors.values())
        return Layout(f"fsdp {world}", mesh, tuple(rules))


@pytest.fixture(scope="module")
def run4(data_dir: Path) -> Run4:
    return Run4(data_dir)


def test_local_shards_of_a_real_run_are_its_truth(run4: Run4) -> None:
    layout = run4.layout(4)
    prove(layout)
    for rank in range(4):
        for name, (buffer, _) in layout.arrays(rank).items():
            assert run4.state[rank][name].shape == buffer.shape
    whole = assemble(layout, run4.state)
    assert len(whole) == 36 and any(0 in a.shape for a in run4.state[3].values())
    for name, tensor in run4.tensors.items():
        np.testing.assert_array_equal(whole[tensor].view(np.uint32), run4.truth[name].view(np.uint32))


@pytest.mark.parametrize("world", [1, 3, 5])
def test_a_real_run_moves_to_other_ranks(run4: Run4, world: int) -> None:
    src, dst = run4.layout(4), run4.layout(world)
    found = simulate(plan(src, dst), run4.state, into=empty(dst, np.float32, fill=np.nan))
    for name, truth in run4.truth.items():
        if name in run4.tensors:
            size = -(-len(truth) // world)
            for rank in range(world):
                part = truth[rank * size : (rank + 1) * size]
                np.testing.assert_array_equal(found[rank][name].view(np.uint32), part.view(np.uint32))


def test_the_stored_chunks_of_a_real_run_are_ours(run4: Run4) -> None:
    layout = run4.layout(4)
    for name in run4.tensors:
        parts = [layout.arrays(rank)[name][0] for rank in range(4)]
        boxes = {piece.box for part in parts for piece in part.pieces()}
        key = name if name.startswith("model.") else "optim.state." + name.removeprefix("optim.")
        stored = run4.manifest.tensors[key]
        extents = {(extent.offset, extent.shape) for extent in stored.extents if extent.numel}
        assert extents == {(box.offset, box.shape) for box in boxes}
        assert stored.shape == run4.tensors[name].shape
