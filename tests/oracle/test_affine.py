"""Affine maps against deepspeed's own: recorded layouts, its constructors, what it does with wrong maps.

`tests/data/deepspeed_layouts/` states the origin of the recording. Where the peer takes what is refused here,
the test says what the peer does with it: the difference is the reason for the check.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardweave.dialects.affine import check_shards, layout, layout_of, map_of, read, write
from shardweave.dialects.deepspeed import AutoTP, weight_layout
from shardweave.errors import (
    BufferRuleError,
    DtypeError,
    FormatError,
    GapError,
    GeometryError,
    HolderError,
    OutsideError,
    OverlapError,
    ShardweaveError,
    TransformError,
)
from shardweave.layout import BufferRule, Dim, Layout, Mesh, Part, Run, Tensor, along, prove
from shardweave.layout.affine import AffineMap
from shardweave.plan import empty, materialise, plan, simulate

Case = Mapping[str, Any]
Document = dict[str, Any]

CASES: list[Case] = json.loads(
    (Path(__file__).parents[1] / "data" / "deepspeed_layouts" / "layouts.json").read_text()
)["cases"]
RAN = [case for case in CASES if "ranks" in case]
PUBLISHED = [case for case in RAN if case["ds_map"].get("published")]
PEER = pytest.mark.peer("deepspeed")


def case_id(case: Case) -> str:
    heads = f"kv{case['meta']['num_kv_heads']}-grain{case['meta']['tp_grain_size']}"
    return f"{case['layout']}-{'x'.join(map(str, case['shape']))}-tp{case['tp']}-{heads}-{case['module']}"


def tensor_of(case: Case) -> Tensor:
    return Tensor("w", tuple(case["shape"]), "float32")


def recorded_dim(case: Case, rank: int) -> Dim:
    return Dim(Run("", start, count) for start, count in case["ranks"][str(rank)]["axis_runs"])


def recorded_layout(case: Case) -> Layout:
    """The recording as a layout, with nothing of the dialect."""
    tensor, mesh = tensor_of(case), Mesh((("dp", 3), ("tp", case["tp"])))
    dims: list[Any] = list(tensor.dims)
    if case["tp"] > 1:
        dims[case["axis"]] = along(mesh, "tp", lambda rank: recorded_dim(case, rank))
    part = Part(tensor, replica=bool(case["replicated_axis_runs"]))
    return Layout("affine", mesh, (BufferRule("w", (part,), tuple(dims)),))


def minimal(case: Case, rank: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """The fewest blocks of a rank: the recording's runs, cut where holders change."""
    return [(start, count, tuple(held)) for start, count, held in case["ranks"][str(rank)]["p5_runs"]]


def blocks(case: Case, found: AffineMap, rank: int) -> list[tuple[int, int, tuple[int, ...]]]:
    pieces = found.of_rank(rank)
    columns = pieces.index[:, case["axis"]].tolist(), pieces.count[:, case["axis"]].tolist()
    return [
        (start, count, found.sets[held])
        for start, count, held in zip(*columns, pieces.holders.tolist(), strict=True)
    ]


def test_the_recording_is_complete() -> None:
    assert (len(CASES), len(RAN), len(PUBLISHED)) == (107, 97, 90)
    assert sum(case["tp"] for case in PUBLISHED) == 322


@pytest.mark.parametrize("case", RAN, ids=case_id)
def test_a_recorded_layout_is_a_map_and_back(case: Case) -> None:
    given, tensor = recorded_layout(case), tensor_of(case)
    found = map_of(given, tensor)
    for rank in range(case["tp"]):
        assert blocks(case, found, rank) == minimal(case, rank)
        assert list(found.shards[rank]) == case["ranks"][str(rank)]["shard_shape"]
    made = layout_of(found, tensor, given.mesh)
    assert made == given
    prove(made)
    document = write({"model.w": found})
    assert read(document, tp=case["tp"]) == {"model.w": found}
    # As JSON has it: numbers of ranks are words.
    assert read(json.loads(json.dumps(document))) == {"model.w": found}


@pytest.mark.parametrize("case", [c for c in CASES if "ranks" not in c], ids=case_id)
def test_what_the_peer_refuses_to_cut_is_refused_or_has_a_map(case: Case) -> None:
    """Ten cuts have no recorded ranks; where the dialect has one, its map says it."""
    meta, names = case["meta"], {"yuan_oproj": "yuan_o_proj", "glm_gqa_not_special": "glm"}
    model = AutoTP(
        case["tp"],
        num_heads=meta["num_attention_heads"],
        num_kv_heads=meta["num_kv_heads"],
        hidden=meta["n_embd"],
        grain=meta["tp_grain_size"],
    )
    name = names.get(case["layout"], case["layout"])
    mesh = Mesh((("tp", case["tp"]),))
    if name == "internlm2_wqkv_forced":
        name = "internlm2"
    try:
        given = weight_layout(name, tensor_of(case), mesh, model, dim=case["axis"])
    except ShardweaveError as error:
        assert isinstance(error, GeometryError)
        return
    found = map_of(given, tensor_of(case))
    assert layout_of(found, tensor_of(case), mesh).rules[0].dims == given.rules[0].dims


def test_the_odd_heads_that_the_peer_publishes_no_map_for() -> None:
    """Yuan, 6 heads over 2 ranks: the middle head of each half is on both, four blocks a rank."""
    case = next(c for c in RAN if c["layout"] == "yuan_value" and c["shape"] == [24, 6] and c["tp"] == 2)
    assert not case["ds_map"]["published"]
    entry = write({"w": map_of(recorded_layout(case), tensor_of(case))})["params"]["^w$"]
    told = [
        [(p["source"][0] // 6, p["shape"][0], p["dest"][0] // 6, p["locations"]) for p in each["pieces"]]
        for each in entry["ranks"].values()
    ]
    assert told == [
        [(0, 4, 0, [0]), (4, 4, 4, [0, 1]), (12, 4, 8, [0]), (16, 4, 12, [0, 1])],
        [(4, 4, 0, [0, 1]), (8, 4, 4, [1]), (16, 4, 8, [0, 1]), (20, 4, 12, [1])],
    ]


# --- the real peer ------------------------------------------------------------------------------


@cache
def peer() -> Any:
    import deepspeed  # noqa: F401  (its accelerator is chosen here, by DS_ACCELERATOR)
    from deepspeed.checkpoint import affine, affine_transfer
    from deepspeed.module_inject import fusedqkv_utils, layers, tp_shard

    class Peer:
        Map = affine.ParamAffineMap
        made = affine
        transfer = affine_transfer
        fused = fusedqkv_utils
        shard = tp_shard
        layer = layers

    return Peer


def their_map(case: Case) -> Any:
    """The map as deepspeed publishes it: its constructor for the layout, with its own widths and ids."""
    ds, shape, tp, axis = peer(), tuple(case["shape"]), case["tp"], case["axis"]
    words = case["meta"]
    meta = ds.shard.AutoTPMeta(
        words["num_kv_heads"], words["num_attention_heads"], words["n_embd"], words["tp_grain_size"]
    )
    match case["layout"]:
        case "bigcode":
            hidden = words["n_embd"]
            width = list(ds.shard.get_shard_size_list(hidden, tp, meta))
            segments = [(hidden, False), (shape[0] - hidden, True)]
            return ds.made.segmented_map(shape, segments, 0, tp, split_widths=[width])
        case "codegen":
            size, ids = ds.fused.codegen_block_layout(shape[0], tp, words["num_kv_heads"])
            return ds.made.block_gather_map(shape, ids, size, 0)
        case "yuan_value" | "yuan_oproj":
            heads = words["num_kv_heads"]
            ids = {rank: ds.fused.shared_qk_value_head_ids(heads, tp, rank) for rank in range(tp)}
            return ds.made.block_gather_map(shape, ids, shape[axis] // heads, axis)
        case "column" | "row":
            width = list(ds.shard.get_shard_size_list(shape[axis], tp, meta, case["module"]))
            return ds.made.contiguous_split_map(shape, width, axis)
        case "gate_up_pack":
            sizes = (shape[axis] // 2,) * 2
            return ds.made.sub_param_map(
                shape, sizes, ds.layer._subparam_shard_widths(sizes, tp, meta, "mlp"), axis
            )
    sizes = case["ds_map"]["subparam_sizes"]
    return ds.made.sub_param_map(shape, sizes, ds.layer._subparam_shard_widths(sizes, tp, meta), axis)


@PEER
@pytest.mark.parametrize("case", PUBLISHED, ids=case_id)
def test_a_published_map_is_read_as_the_layout_that_it_is_of(case: Case) -> None:
    theirs = their_map(case)
    published = {rank: len(pieces) for rank, pieces in theirs.pieces_by_rank.items()}
    assert published == {int(rank): count for rank, count in case["ds_map"]["pieces"].items()}
    data = {"version": 1, "params": {r"^h\.0\.w$": theirs.to_dict()}}
    (found,) = read(data, tp=case["tp"]).values()
    given = recorded_layout(case)
    assert found == map_of(given, tensor_of(case))
    assert layout_of(found, tensor_of(case), given.mesh) == given
    assert read({"version": 1, **data["params"]}) == {"h.0.w": found}
    for rank in range(case["tp"]):
        assert len(found.of_rank(rank)) == len(minimal(case, rank)) <= published[rank]
    if all(len(minimal(case, rank)) == count for rank, count in published.items()):
        assert write({"h.0.w": found}) == data


def test_the_published_maps_that_are_not_minimal_become_so() -> None:
    """33 of 322: empty blocks on idle ranks, and neighbours that were never merged."""
    longer = [
        (case, rank)
        for case in PUBLISHED
        for rank in range(case["tp"])
        if case["ds_map"]["pieces"][str(rank)] != len(minimal(case, rank))
    ]
    assert len(longer) == 33
    for case, rank in longer:
        found = map_of(recorded_layout(case), tensor_of(case))
        assert len(found.of_rank(rank)) == len(minimal(case, rank)) < case["ds_map"]["pieces"][str(rank)]


@PEER
@pytest.mark.parametrize("case", RAN, ids=case_id)
def test_the_peer_takes_what_is_written(case: Case) -> None:
    """Its constructor, both of its validations, extract, rebuild, and its planner, on what it cut itself."""
    import torch

    ds, tp = peer(), case["tp"]
    entry = write({"w": map_of(recorded_layout(case), tensor_of(case))})["params"]["^w$"]
    theirs = ds.Map.from_dict(entry)
    theirs.validate()
    theirs.validate_coverage()
    assert theirs.to_dict() == entry
    whole = torch.arange(tensor_of(case).numel, dtype=torch.float64).reshape(case["shape"])
    shards = {}
    for rank in range(tp):
        rows = [
            i for start, count in case["ranks"][str(rank)]["axis_runs"] for i in range(start, start + count)
        ]
        shards[rank] = whole.index_select(case["axis"], torch.tensor(rows, dtype=torch.int64))
        assert torch.equal(theirs.extract(whole, rank), shards[rank])
    assert torch.equal(theirs.rebuild(shards), whole)
    even = ds.Map.from_dict(write({"w": map_of(cut_evenly(case, 3), tensor_of(case))})["params"]["^w$"])
    for source, target in ((theirs, even), (even, theirs)):
        held = {rank: source.extract(whole, rank).reshape(-1) for rank in source.shard_shapes}
        into = {
            rank: torch.full((int(np.prod(shape)),), float("nan"), dtype=torch.float64)
            for rank, shape in target.shard_shapes.items()
        }
        for step in ds.transfer.plan_transfer(target, source).segments:
            torch.as_strided(
                into[step.target_rank], step.shape, step.target_strides, step.target_offset
            ).copy_(
                torch.as_strided(held[step.source_rank], step.shape, step.source_strides, step.source_offset)
            )
        for rank, shape in target.shard_shapes.items():
            assert torch.equal(into[rank].reshape(shape), target.extract(whole, rank))


def cut_evenly(case: Case, tp: int) -> Layout:
    """The same weight over three ranks, its other dim cut: nothing in common with how it was cut."""
    tensor, mesh = tensor_of(case), Mesh((("tp", tp),))
    dims: list[Any] = list(tensor.dims)
    dim = 1 - case["axis"] if len(dims) > 1 else 0
    size = tensor.shape[dim]
    bounds = [0, size // 4, size // 2, size]
    dims[dim] = along(mesh, "tp", lambda r: Dim([Run("", bounds[r], bounds[r + 1] - bounds[r])]))
    return Layout("even", mesh, (BufferRule("w", (Part(tensor),), tuple(dims)),))


@PEER
def test_experts_that_are_placed_anywhere() -> None:
    """Its lowering of expert placements, replicated ones included; keys are names, ranks expert-parallel."""
    from deepspeed.checkpoint.autoep_affine import (
        autoep_metadata_to_affine_map,
        autoep_placement_to_affine_map,
        make_autoep_placement_descriptor,
    )

    placement = make_autoep_placement_descriptor(5, [[0, 2], [4, 3, 1], [2], []])
    theirs = autoep_placement_to_affine_map(placement, (5, 6, 4))
    maps = {"version": 1, "params": {"l.experts.w1": theirs.to_dict()}}
    (found,) = read(maps, patterns=False).values()
    assert found.shared and found.num_ranks == 4
    tensor = Tensor("l.experts.{expert}.w1", (6, 4), "float32", (("expert", Dim([Run("", 0, 5)])),))
    given = layout_of(found, tensor, Mesh((("ep", 4),)), axis="ep")
    prove(given)
    assert [str(dim) for dim in given.rules[0].dims[0].dims] == [  # type: ignore[union-attr]
        "[0:1] [2:3]",
        "[4:5] [3:4] [1:2]",
        "[2:3]",
        "[]",
    ]
    assert map_of(given, tensor, axis="ep") == found
    written = write({"l.experts.w1": found}, patterns=False)
    back = autoep_metadata_to_affine_map({"affine_maps": written}, (5, 6, 4), "l.experts.w1")
    back.validate_coverage()


@PEER
def test_what_its_collector_publishes_is_read() -> None:
    """``collect_autotp_universal_checkpoint_info`` on a module: what it leaves whole, and a map."""
    import torch
    from deepspeed.module_inject.layers import collect_autotp_universal_checkpoint_info

    ds = peer()
    model = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 4, bias=False))
    model[1].tp_world_size = 3
    model[1].weight = torch.nn.Parameter(torch.zeros(8, 6))
    own = ds.made.segmented_map((24, 6), [(16, False), (8, True)], 0, 3, split_widths=[[8, 8, 0]])
    model[1].weight.ds_autotp_universal_checkpoint_meta = {"conversion": {"affine_map": own.to_dict()}}
    info = collect_autotp_universal_checkpoint_info(model)
    maps = read(info["affine_map"], tp=3)
    assert maps.keys() == {"0.weight", "0.bias", "1.weight"}
    made = layout(maps, dtype="float32")
    prove(made)
    held = {rule.name: rule for rule in made.rules}
    assert held["0.weight"].axes == () and held["1.weight"].axes == ("tp",)
    assert [str(dim) for dim in held["1.weight"].dims[0].dims] == [  # type: ignore[union-attr]
        "[0:8] [16:24]",
        "[8:24]",
        "[16:24]",
    ]


# --- what the peer takes and this refuses -------------------------------------------------------


def piece(
    rows: tuple[int, int], at: int, locations: list[int], *, columns: int = 4, **other: Any
) -> dict[str, Any]:
    entry = {
        "shape": [rows[1] - rows[0], columns],
        "source": [rows[0] * columns, [columns, 1]],
        "dest": [at * columns, [columns, 1]],
        "locations": locations,
    }
    return entry | other


def document(*ranks: tuple[int, list[dict[str, Any]]], shape: tuple[int, int] = (8, 4)) -> Document:
    entry = {
        "logical_shape": list(shape),
        "ranks": {
            rank: {"shard_shape": [rows, shape[1]], "pieces": pieces}
            for rank, (rows, pieces) in enumerate(ranks)
        },
    }
    return {"version": 1, "params": {"^w$": entry}}


def good() -> Document:
    return document((4, [piece((0, 4), 0, [0])]), (4, [piece((4, 8), 0, [1])]))


def theirs_of(data: Document) -> Any:
    found = peer().Map.from_dict(data["params"]["^w$"])
    found.validate()
    return found


def shards_of(*rows: list[int], dtype: Any = None) -> dict[int, Any]:
    import torch

    return {
        rank: torch.tensor(each, dtype=dtype or torch.float32)[:, None].repeat(1, 4)
        for rank, each in enumerate(rows)
    }


@PEER
def test_rows_that_nobody_holds() -> None:
    """Two ranks claim rows 0 to 3, nobody has 4 to 7: the peer rebuilds what lay in memory."""
    data = document((4, [piece((0, 4), 0, [0])]), (4, [piece((0, 4), 0, [1])]))
    with pytest.raises(OverlapError, match=r"element \(0, 0\).*rank 0 declares \(0\); rank 1 declares \(1\)"):
        read(data)
    shared = document((4, [piece((0, 4), 0, [0, 1])]), (4, [piece((0, 4), 0, [0, 1])]))
    with pytest.raises(GapError, match=r"element \(4, 0\): held by no rank"):
        read(shared)
    for wrong in (data, shared):
        full = theirs_of(wrong).rebuild(shards_of([0, 1, 2, 3], [0, 1, 2, 3]))
        assert full.shape == (8, 4) and full[:4, 0].tolist() == [0, 1, 2, 3]
        assert theirs_of(wrong).uncovered_offsets() == list(range(16, 32))


def converted(data: Document, rows: list[list[int]], folder: Path, *, name: str = "w") -> Any:
    """What its converter writes of a weight whose ranks hold these rows: ``merge_tp_slices``, as it is."""
    import torch
    from deepspeed.checkpoint.ds_to_universal import merge_tp_slices

    for rank, shard in shards_of(*rows).items():
        (folder / "tmp" / name / str(rank)).mkdir(parents=True)
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save(shard.reshape(-1), folder / "tmp" / name / str(rank) / f"{state}.00")
    info = {"universal_checkpoint_version": 0.4, "affine_map": data}
    shapes = [torch.Size((len(each), 4)) for each in rows]
    merge_tp_slices(info, str(folder / "out"), str(folder / "tmp"), len(rows), (name, shapes))
    return torch.load(folder / "out" / name / "fp32.pt", weights_only=False)["param"]


@PEER
def test_its_converter_writes_what_nobody_holds(tmp_path: Path) -> None:
    """The files of a conversion: right for a right map; for a gap, rows that were never read."""
    assert converted(good(), [[0, 1, 2, 3], [4, 5, 6, 7]], tmp_path / "right")[:, 0].tolist() == list(
        range(8)
    )
    data = document((4, [piece((0, 4), 0, [0])]), (4, [piece((0, 4), 0, [1])]))
    full = converted(data, [[1, 2, 3, 4], [-1, -2, -3, -4]], tmp_path / "wrong")
    assert full.shape == (8, 4) and full[:4, 0].tolist() == [-1, -2, -3, -4]


@PEER
def test_its_converter_takes_the_begin_of_a_name_and_no_version(tmp_path: Path) -> None:
    data = good()
    data["params"] = {"w": data["params"].pop("^w$")}
    del data["version"]
    full = converted(data, [[0, 1, 2, 3], [4, 5, 6, 7]], tmp_path / "a", name="weight_of_another")
    assert full[:, 0].tolist() == list(range(8))
    data["params"]["w"]["transposed"] = True
    converted(data, [[0, 1, 2, 3], [4, 5, 6, 7]], tmp_path / "b")
    with pytest.raises(RuntimeError, match="version 2"):
        converted(data | {"version": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]], tmp_path / "c")


@PEER
def test_ranks_that_disagree_on_rows_of_one_owner() -> None:
    """Rows 2 and 3 are on two ranks and declared by each alone: the peer takes the last that it reads."""
    data = document((4, [piece((0, 4), 0, [0])]), (6, [piece((2, 8), 0, [1])]))
    with pytest.raises(OverlapError, match=r"element \(2, 0\)"):
        read(data)
    full = theirs_of(data).rebuild(shards_of([0, 1, 2, 3], [-2, -3, 4, 5, 6, 7]))
    assert full[:, 0].tolist() == [0, 1, -2, -3, 4, 5, 6, 7]


@PEER
def test_replicas_that_are_equal_to_the_bit() -> None:
    """The peer compares values: it refuses equal NaN, and takes 0.0 for -0.0. A map says who is to agree."""
    import torch

    data = document((8, [piece((0, 8), 0, [0, 1])]), (8, [piece((0, 8), 0, [0, 1])]))
    (found,) = read(data).values()
    assert found.shared and found.sets == ((0, 1),)
    nan = torch.full((8, 4), float("nan"))
    with pytest.raises(ValueError, match="hold different data"):
        theirs_of(data).rebuild({0: nan, 1: nan.clone()})
    theirs_of(data).rebuild({0: torch.zeros(8, 4), 1: -torch.zeros(8, 4)})


@PEER
def test_shards_of_two_dtypes() -> None:
    import torch

    shards = shards_of([0, 1, 2, 3], [4, 5, 6, 7])
    shards[0] = shards[0].to(torch.bfloat16)
    (found,) = read(good()).values()
    check_shards(found, [((4, 4), "float32")] * 2, name="w", shape=(8, 4))
    with pytest.raises(DtypeError, match="rank 0 has bfloat16, rank 1 has float32"):
        check_shards(found, [((4, 4), "bfloat16"), ((4, 4), "float32")], name="w")
    assert theirs_of(good()).rebuild(shards).dtype == torch.bfloat16


@PEER
def test_a_view_that_reads_past_its_shard() -> None:
    """Rows of a neighbour, in memory that two shards share: the peer looks at dense views only."""
    import torch

    data = good()
    data["params"]["^w$"]["ranks"][0]["pieces"][0]["dest"] = [0, [8, 1]]
    with pytest.raises(OutsideError, match=r"last\(27\) >= numel\(16\)"):
        read(data)
    store = torch.arange(48.0)
    full = theirs_of(data).rebuild({0: store[:16].view(4, 4), 1: store[32:].view(4, 4)})
    assert full[3].tolist() == [24, 25, 26, 27]
    with pytest.raises(ValueError, match="expected 4"):
        peer().transfer.plan_transfer(theirs_of(good()), theirs_of(data))


@PEER
def test_a_place_that_is_written_twice() -> None:
    """Strides that overlap: the shard of the peer has one of the two, and places that were never written."""
    import torch

    data = good()
    entry = data["params"]["^w$"]["ranks"][0]
    entry["pieces"][0]["dest"] = [0, [2, 1]]
    with pytest.raises(OverlapError, match=r"stride\(2\) in the shard <= reach\(3\) of axes inside it"):
        read(data)
    theirs_of(data).extract(torch.arange(32.0).view(8, 4), 0)
    dense = document((4, [piece((0, 2), 0, [0]), piece((2, 4), 1, [0])]), (4, [piece((4, 8), 0, [1])]))
    with pytest.raises(OverlapError, match=r"rank 0, place \(1, 0\) of its shard: filled 2 times"):
        read(dense)
    with pytest.raises(ValueError, match="twice"):
        theirs_of(dense)


@PEER
@pytest.mark.parametrize(
    ("locations", "equation"),
    [
        ([], r"holders\(\)"),
        ([0, 1], r"declared \(0, 1\), but rank 0 holds it and rank 1 does not so"),
        ([1], r"declared \(1\), but rank 0 holds it"),
        ([0, 7], r"holders\(0, 7\) against ranks 0..1"),
    ],
)
def test_locations_that_are_not_the_holders(locations: list[int], equation: str) -> None:
    data = good()
    data["params"]["^w$"]["ranks"][0]["pieces"][0]["locations"] = locations
    with pytest.raises(HolderError, match=equation):
        read(data)
    assert theirs_of(data).rebuild(shards_of([0, 1, 2, 3], [4, 5, 6, 7]))[:, 0].tolist() == list(range(8))


@PEER
def test_a_replica_whose_blocks_are_cut_elsewhere() -> None:
    """The same holders in other blocks: true, so it is read. Its planner refuses, so it is not written so."""
    data = document(
        (8, [piece((0, 8), 0, [0, 1])]), (8, [piece((3, 8), 0, [0, 1]), piece((0, 3), 5, [0, 1])])
    )
    (found,) = read(data).values()
    assert [len(found.of_rank(rank)) for rank in (0, 1)] == [1, 2]
    planned = peer().transfer.plan_transfer
    with pytest.raises(ValueError, match="different piece boundaries"):
        planned(theirs_of(good()), theirs_of(data))
    written = write({"w": found})
    assert [len(each["pieces"]) for each in written["params"]["^w$"]["ranks"].values()] == [2, 2]
    assert read(written) == {"w": found}
    planned(theirs_of(good()), theirs_of(written))


@PEER
def test_a_negative_offset() -> None:
    data = good()
    data["params"]["^w$"]["ranks"][1]["pieces"][0]["source"][0] = -4
    with pytest.raises(OutsideError, match="not negative"):
        read(data)
    with pytest.raises(RuntimeError):
        theirs_of(data).rebuild(shards_of([0, 1, 2, 3], [4, 5, 6, 7]))


@PEER
def test_a_whole_of_the_same_size_and_another_shape() -> None:
    """(4, 8) for (8, 4): the peer's restore compares sizes."""
    import torch

    (found,) = read(good()).values()
    with pytest.raises(GeometryError, match=r"shape of the map\(8, 4\) != shape stored\(4, 8\)"):
        check_shards(found, [((4, 4), "float32")] * 2, name="w", shape=(4, 8))
    with pytest.raises(GeometryError, match=r"by shape and not by size"):
        layout_of(found, Tensor("w", (4, 8), "float32"), Mesh((("tp", 2),)))
    assert theirs_restored(torch.arange(32.0).view(4, 8), good(), rank=0).tolist() == list(range(16))


@PEER
def test_a_map_without_the_rank_that_asks() -> None:
    """Rank 2 of 4 with a map of 2: the peer ignores the map and cuts a quarter."""
    import torch

    with pytest.raises(GeometryError, match=r"ranks of the map\(2\) != tp\(4\)"):
        read(good(), tp=4)
    (found,) = read(good()).values()
    with pytest.raises(GeometryError, match=r"ranks of the map\(2\) != shards\(4\)"):
        check_shards(found, [((2, 4), "float32")] * 4, name="w")
    with pytest.raises(GeometryError, match=r"ranks of the map\(2\) != tp\(4\)"):
        layout_of(found, Tensor("w", (8, 4), "float32"), Mesh((("tp", 4),)))
    restored = theirs_restored(torch.arange(32.0).view(8, 4), good(), rank=2, tp=4)
    assert restored.tolist() == list(range(16, 24))
    data = good()
    data["params"]["^w$"]["ranks"][2] = data["params"]["^w$"]["ranks"].pop(1)
    with pytest.raises(FormatError, match="rank 1 is missing"):
        read(data)


def theirs_restored(full: Any, data: Document, *, rank: int, tp: int = 2) -> Any:
    """What the peer's restore gives a rank, for a target layer with this map."""
    import torch
    from deepspeed.checkpoint import universal_checkpoint as restore

    param = torch.nn.Parameter(torch.zeros(8 // tp, 4))
    meta = {
        "partition_dim": 0,
        "logical_shape": (8, 4),
        "conversion": {"affine_map": data["params"]["^w$"]},
    }
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(restore, "_get_param_uc_restore_meta", lambda _: meta)
        return restore._resolve_autotp_partition(param, {}, full, rank, tp)


@PEER
@pytest.mark.parametrize("version", [2, 0, "1", True, 1.0, None])
def test_a_version_that_is_not_known(version: object) -> None:
    """The peer refuses a later one, and takes one that is missing for its own."""
    with pytest.raises(FormatError, match="known version"):
        read(good() | {"version": version})
    without = good()
    del without["version"]
    with pytest.raises(FormatError, match=r"version\(None\)"):
        read(without)


@pytest.mark.parametrize(
    "pattern", ["w", "^w", "w$", "^w.$", "^.*$", r"^a\w$", "^a.b$", "^$", "^a b$", r"^a\ b$", 3, "^(?i)w$"]
)
def test_a_pattern_that_is_not_one_name(pattern: object) -> None:
    """The peer matches the begin of names, so that "w" is a map of "weight" too."""
    data = good()
    data["params"][pattern] = data["params"].pop("^w$")
    with pytest.raises(FormatError, match=r"escaped name of one weight|is a word"):
        read(data)


def test_a_name_is_escaped_as_the_peer_escapes_it() -> None:
    name = "model.layers.0.mlp.(gate)+up-proj_w[0]"
    (found,) = read(good()).values()
    (pattern,) = write({name: found})["params"]
    import re

    assert re.match(pattern, name) and not re.match(pattern, name.replace(".", "x"))
    assert read(write({name: found})) == {name: found}


@PEER
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 0.0, 1 / 3, 3, 0.1, "2", True])
def test_a_scale_that_loses_values(scale: Any) -> None:
    """The peer refuses 0 alone. A third loses a bit of 13.7 % of random numbers."""
    data = good()
    data["params"]["^w$"]["ranks"][0]["pieces"][0]["scale"] = scale
    with pytest.raises(TransformError, match="power of two"):
        read(data)
    if scale not in (0.0, "2"):
        theirs_of(data)


@PEER
def test_a_scale_that_is_exact() -> None:
    """Weights as the peer has them; moments by the powers that it names and does not carry out."""
    import torch
    from deepspeed.checkpoint.affine import SCALE_POWER_BY_STATE

    replicated = peer().made.replicated_map((8, 4), 4, scale=0.25)
    (found,) = read({"version": 1, "params": {"^w$": replicated.to_dict()}}).values()
    assert write({"w": found})["params"]["^w$"] == replicated.to_dict()
    stored = {
        state: layout({"w": found}, dtype="float32", state=state).rules[0].transform.constant
        for state in SCALE_POWER_BY_STATE
    }
    assert stored == {"fp32": 0.25, "exp_avg": 4.0, "exp_avg_sq": 16.0}
    assert stored == {state: 0.25**power for state, power in SCALE_POWER_BY_STATE.items()}
    shard = replicated.extract(torch.full((8, 4), 3.0), 0)
    assert shard.unique().tolist() == [0.75]
    with pytest.raises(NotImplementedError, match="hyperparameters"):
        replicated.extract(torch.full((8, 4), 3.0), 0, -1)
    with pytest.raises(TransformError, match="momentum_buffer is not among"):
        layout({"w": found}, dtype="float32", state="momentum_buffer")


@PEER
def test_a_flat_shard_is_named_and_not_guessed() -> None:
    data = good()
    for entry in data["params"]["^w$"]["ranks"].values():
        entry["shard_shape"] = [16]
    with pytest.raises(BufferRuleError, match="dims of its tensor"):
        read(data)
    with pytest.raises(ValueError, match="different number of axes"):
        peer().transfer.plan_transfer(theirs_of(data), theirs_of(good()))


@PEER
def test_a_transposed_shard_is_named() -> None:
    data = document((4, [piece((0, 4), 0, [0])]), shape=(4, 4))
    data["params"]["^w$"]["ranks"][0]["pieces"][0]["dest"] = [0, [1, 4]]
    with pytest.raises(BufferRuleError, match="dim 0 of the tensor is dim 1 of the shard"):
        read(data)
    with pytest.raises(ValueError, match="dest axis 0"):
        peer().transfer.plan_transfer(theirs_of(data), theirs_of(data))


WRONG: dict[str, Callable[[Document], object]] = {
    "no params": lambda d: d.pop("params"),
    "a key beside params": lambda d: d.update(extra={}),
    "a key of a map": lambda d: d["params"]["^w$"].update(extra=1),
    "a key of a block": lambda d: d["params"]["^w$"]["ranks"][0]["pieces"][0].update(transpose=True),
    "a block without locations": lambda d: d["params"]["^w$"]["ranks"][0]["pieces"][0].pop("locations"),
    "a rank as a fraction": lambda d: d["params"]["^w$"]["ranks"].update(
        {0.5: d["params"]["^w$"]["ranks"].pop(0)}
    ),
    "a rank twice": lambda d: d["params"]["^w$"]["ranks"].update({"0": d["params"]["^w$"]["ranks"][0]}),
    "a rank with a zero": lambda d: d["params"]["^w$"]["ranks"].update(
        {"01": d["params"]["^w$"]["ranks"].pop(1)}
    ),
    "no ranks": lambda d: d["params"]["^w$"].update(ranks={}),
    "ranks in a list": lambda d: d["params"]["^w$"].update(ranks=[]),
    "a size as a float": lambda d: d["params"]["^w$"].update(logical_shape=[8.0, 4]),
    "a shape as a number": lambda d: d["params"]["^w$"].update(logical_shape=32),
    "strides too few": lambda d: d["params"]["^w$"]["ranks"][0]["pieces"][0].update(source=[0, [4]]),
    "an offset too large": lambda d: d["params"]["^w$"]["ranks"][0]["pieces"][0].update(
        source=[1 << 70, [4, 1]]
    ),
    "a stride as a truth": lambda d: d["params"]["^w$"]["ranks"][0]["pieces"][0].update(
        source=[0, [4, True]]
    ),
    "blocks as a number": lambda d: d["params"]["^w$"]["ranks"][0].update(pieces=3),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_document_of_another_form(wrong: str) -> None:
    data = good()
    WRONG[wrong](data)
    with pytest.raises(FormatError):
        read(data)


@PEER
def test_the_example_of_the_specification_is_read() -> None:
    """Patterns beside the version, and not under "params": GPTBigCode over four ranks."""
    theirs = peer().made.segmented_map((48, 8), [(32, False), (16, True)], 0, 4, split_widths=[[8, 8, 8, 8]])
    pattern = r"^transformer\.h\.0\.attn\.c_attn\.weight$"
    data = {"version": 1, pattern: theirs.to_dict()}
    first = data[pattern]["ranks"][0]  # type: ignore[index]
    assert first == {
        "shard_shape": [24, 8],
        "pieces": [
            {"shape": [8, 8], "source": [0, [8, 1]], "dest": [0, [8, 1]], "locations": [0]},
            {"shape": [16, 8], "source": [256, [8, 1]], "dest": [64, [8, 1]], "locations": [0, 1, 2, 3]},
        ],
    }
    (name,) = read(data, tp=4)
    assert name == "transformer.h.0.attn.c_attn.weight"
    # Its own pattern has dots that are not escaped, and would be another name's too.
    with pytest.raises(FormatError, match="escaped name"):
        read({"version": 1, "^transformer.h.0.attn.c_attn.weight$": theirs.to_dict()})


def test_moments_and_weights_move_from_four_ranks_to_three() -> None:
    """From the maps of a checkpoint to a plan of what it stores, every bit, for GPTBigCode and CodeGen."""
    for kind in ("bigcode", "codegen", "yuan_oproj"):
        case = next(c for c in PUBLISHED if c["layout"] == kind and c["tp"] == 4)
        maps = read(write({"w": map_of(recorded_layout(case), tensor_of(case))}), tp=4)
        src, dst, tensor = layout(maps, dtype="float32"), cut_evenly(case, 3), tensor_of(case)
        values = {tensor: np.random.default_rng(0).normal(size=tensor.shape).astype(np.float32)}
        moved = simulate(plan(src, dst), materialise(src, values), into=empty(dst, np.float32, fill=np.nan))
        expected = materialise(dst, values)
        assert all(moved[r]["w"].tobytes() == expected[r]["w"].tobytes() for r in range(3))
