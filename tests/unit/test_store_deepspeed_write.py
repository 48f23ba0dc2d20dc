"""Checkpoints of DeepSpeed as they are written: what lies where, counted in another way and by the reader."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filling import fill
from hypothesis import given
from hypothesis import strategies as st

from shardweave.errors import (
    ConfigError,
    DtypeError,
    ExistsError,
    FormatError,
    MissingFileError,
    PathError,
    TruncatedError,
    UnknownNameError,
)
from shardweave.store import deepspeed, deepspeed_state, deepspeed_universal, deepspeed_write, universal_write
from shardweave.store.deepspeed_flat import FlatGroup, SlicedGroup, round_robin, sub_groups
from shardweave.store.deepspeed_write import Zero
from shardweave.store.manifest import Extent, Manifest, StoredTensor, TensorSpec
from shardweave.store.optimizer import OptimizerRecord

SHAPES = {
    "embed.weight": (11, 5),
    "norm.weight": (5,),
    "up.weight": (7, 5),
    "gain": (3, 3),
    "down.weight": (5, 2, 7),
    "scale": (),
    "seen": (2,),
}
TRAINED = ("embed.weight", "norm.weight", "up.weight", "down.weight", "scale")
MATRICES, VECTORS = ("down.weight", "embed.weight", "up.weight"), ("norm.weight", "scale")
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def arrays_of(*, masters: str, dtype: torch.dtype = torch.bfloat16, tp: int = 1) -> dict[str, torch.Tensor]:
    """Values that tell every element of every array from every other; of rank 1 one row more."""
    found: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(3)
    for name, shape in SHAPES.items():
        for rank in range(tp):
            end = f"@{rank}" if tp > 1 else ""
            wide = (shape[0] + rank, *shape[1:]) if shape else shape
            master = torch.randn(wide, generator=generator)
            if name not in TRAINED:
                found[name + end] = (
                    torch.arange(9.0, 9.0 + math.prod(wide))
                    .view(wide)
                    .to(torch.int64 if name == "seen" else dtype)
                )
                continue
            found[name + end] = master if masters == "instead" else master.to(dtype)
            if masters == "beside":
                found[f"optim/{name}/master{end}"] = master
            for state in ("exp_avg", "exp_avg_sq"):
                found[f"optim/{name}/{state}{end}"] = torch.randn(wide, generator=generator)
    return found


def records_of(**more: Any) -> dict[str, Any]:
    groups = (
        {"params": list(MATRICES), **SETTINGS, "weight_decay": 0.1},
        {"params": list(VECTORS), **SETTINGS, "weight_decay": 0.0},
    )
    return {
        "optimizer": OptimizerRecord(dict.fromkeys(TRAINED, 7), groups),
        "untrained": frozenset({"gain"}),
        "buffers": ("seen",),
        **more,
    }


def specs_of(arrays: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(key, str(value.dtype)[6:], tuple(value.shape)) for key, value in arrays.items()]


def below(manifest: Manifest, tag: str) -> dict[str, StoredTensor]:
    """Its arrays as a reader of the folder of the save names their files, extents in any order."""

    def moved(extent: Extent) -> Extent:
        return replace(extent, file=extent.file.removeprefix(f"{tag}/"))

    return {
        key: replace(tensor, extents=tuple(sorted(map(moved, tensor.extents), key=lambda e: e.offset)))
        for key, tensor in manifest.tensors.items()
    }


# --- flat groups ----------------------------------------------------------------------------------

NUMELS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(NUMELS, st.integers(1, 5), st.sampled_from([1, 4, 8]))
def test_ranges_of_ranks_hold_each_element_once_in_order(numels: list[int], dp: int, alignment: int) -> None:
    """Against a list of all elements with their padding, cut by slicing."""
    flat = FlatGroup.of(numels, dp=dp, alignment=alignment)
    row: list[Any] = []
    for number, numel in enumerate(numels):
        row += [(number, i) for i in range(numel)]
        row += [None] * (-len(row) % alignment if number + 1 < len(numels) else 0)
    real = len(row)
    row += [None] * (-len(row) % (2 * dp))
    assert flat.range_numel * dp == len(row)
    for rank in range(dp):
        part = row[rank * flat.range_numel : (rank + 1) * flat.range_numel]
        found: list[Any] = [None] * flat.range_numel
        for piece in flat.pieces(rank):
            found[piece.at : piece.at + piece.stop - piece.start] = [
                (piece.number, i) for i in range(piece.start, piece.stop)
            ]
        assert found == part
        assert flat.padding(rank) == sum(
            place >= real for place in range(rank * flat.range_numel, (rank + 1) * flat.range_numel)
        )


@given(NUMELS, st.integers(1, 5))
def test_slices_of_ranks_hold_each_weight_once(numels: list[int], dp: int) -> None:
    flat = SlicedGroup(tuple(numels), dp)
    weights: list[list[int]] = [[] for _ in numels]
    for rank in range(dp):
        at = 0
        for piece in flat.pieces(rank):
            weights[piece.number] += range(piece.start, piece.stop)
            assert piece.at == sum(-(-numel // dp) for numel in numels[: piece.number])
            at = piece.at + piece.stop - piece.start
        assert at <= flat.range_numel
    assert weights == [list(range(numel)) for numel in numels]


@given(NUMELS, st.integers(1, 4), st.integers(0, 100))
def test_sub_groups_end_where_they_are_full(numels: list[int], dp: int, size: int) -> None:
    found = sub_groups(numels, dp=dp, size=size)
    assert [number for part in found for number in part] == list(range(len(numels)))
    for part in found:
        held = [-(-numels[number] // dp) for number in part]
        assert sum(held[:-1]) < size or len(held) == 1 or len(found) == 1
        assert sum(held) >= size or part.stop == len(numels)


def test_weights_go_around_as_cards_are_dealt() -> None:
    assert round_robin(7, 3) == [0, 3, 6, 1, 4, 2, 5] and round_robin(2, 4) == [0, 1]


# --- native ---------------------------------------------------------------------------------------

RUNS = [
    Zero(1, 1),
    Zero(1, 3),
    Zero(2, 5),
    Zero(2, 2, tp=2),
    Zero(1, 3, parameter_alignment=True),
    Zero(2, 3, round_robin_gradients=True),
    Zero(1, 2, dtype="float16"),
    Zero(2, 4, dtype="float32", tp=3),
    Zero(3, 1),
    Zero(3, 3),
    Zero(3, 2, tp=2),
    Zero(3, 4, sub_group_size=10),
    Zero(3, 70),
]


@pytest.mark.parametrize(
    "zero", RUNS, ids=lambda zero: "-".join(map(str, (zero.stage, zero.dp, zero.tp, zero.dtype)))
)
def test_the_reader_finds_what_was_written_where_it_was_laid_out(zero: Zero, tmp_path: Path) -> None:
    """Every extent, every record; and each file is a whole zip archive with right checksums."""
    masters = "instead" if zero.stage == 3 else "beside"
    arrays = arrays_of(masters=masters, dtype=getattr(torch, zero.dtype), tp=zero.tp)
    manifest = deepspeed_write.allocate(tmp_path, specs_of(arrays), zero=zero, records=records_of())
    assert not (tmp_path / "latest").exists()
    deepspeed_write.finish(manifest, fill(manifest, arrays))
    for path in tmp_path.rglob("*.pt"):
        assert zipfile.ZipFile(path).testzip() is None, path
    found = deepspeed.read(tmp_path)
    assert found.root == tmp_path / "global_step7"
    mine, theirs = below(manifest, "global_step7"), below(found, "")
    assert mine == theirs
    assert found.records["optimizer"] == records_of()["optimizer"]
    assert found.records["untrained"] == {"gain", "seen"}
    own = found.records["deepspeed"]
    assert (own["stage"], own["dp"], own["tp"]) == (zero.stage, zero.dp, zero.tp) and set(own["buffers"]) == {
        "seen"
    }


@pytest.mark.parametrize("zero", [Zero(1, 2), Zero(2, 1), Zero(3, 2)], ids=str)
def test_a_module_has_its_weights_under_all_their_names(zero: Zero, tmp_path: Path) -> None:
    """A tied weight is one array and one storage; the buffer is whole in the file of every rank."""
    masters = "instead" if zero.stage == 3 else "beside"
    arrays = arrays_of(masters=masters)
    records = records_of(
        shared={"head.weight": "embed.weight"}, model_states={"epoch": 3, "global_steps": 11}
    )
    manifest = deepspeed_write.allocate(tmp_path, specs_of(arrays), zero=zero, records=records, tag="here")
    fill(manifest, arrays)
    deepspeed_write.finish(manifest)
    for path in (tmp_path / "here").glob("*_model_states.pt"):
        value = torch.load(path, weights_only=True)
        module = value["module"]
        assert list(value["shared_params"].items()) == [("head.weight", "embed.weight")]
        assert list(module) == [*SHAPES, "head.weight"] and torch.equal(module["seen"], arrays["seen"])
        assert (value["epoch"], value["global_steps"], value["dp_world_size"]) == (3, 11, zero.dp)
        if zero.stage < 3:
            assert module["head.weight"].data_ptr() == module["embed.weight"].data_ptr()
            for name in SHAPES:
                assert torch.equal(module[name], arrays[name])
        else:
            assert module["embed.weight"].shape == (0,) and module["gain"].shape == (0,)


def test_weights_alone_are_model_states_alone(tmp_path: Path) -> None:
    """Without masters and states there are no optimizer states; at stage 3 the masters are the weights."""
    arrays = {
        name: value for name, value in arrays_of(masters="none").items() if not name.startswith("optim/")
    }
    records = {"untrained": frozenset({"gain"}), "buffers": ("seen",)}
    deepspeed_write.allocate(tmp_path, specs_of(arrays), zero=Zero(1, 2), records=records, tag="a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mp_rank_00_model_states.pt"]
    arrays |= {name: arrays[name].float() for name in TRAINED}
    deepspeed_write.allocate(tmp_path, specs_of(arrays), zero=Zero(3, 2), records=records, tag="b")
    assert len(list((tmp_path / "b").iterdir())) == 4


# --- universal ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
def test_a_universal_checkpoint_is_a_file_an_array(flat: bool, tmp_path: Path) -> None:
    arrays = arrays_of(masters="instead")
    one = OptimizerRecord(dict.fromkeys(TRAINED, 7), ({"params": list(TRAINED), **SETTINGS},))
    records = records_of(optimizer=one, parts={"up.weight": {"cat_dim": 1}})
    manifest = universal_write.allocate(tmp_path, specs_of(arrays), records=records, flat=flat)
    assert len(manifest.files) == 3 * len(TRAINED) + 1  # and that of what is not trained
    assert not (tmp_path / "latest_universal").exists()
    universal_write.finish(manifest, fill(manifest, arrays))
    for path in tmp_path.rglob("*.pt"):
        assert zipfile.ZipFile(path).testzip() is None, path
    for name in TRAINED:
        folder = tmp_path / "universal/zero" / name
        for file, key in {
            "fp32": name,
            "exp_avg": f"optim/{name}/exp_avg",
            "exp_avg_sq": f"optim/{name}/exp_avg_sq",
        }.items():
            value = torch.load(folder / f"{file}.pt", weights_only=True)
            if not flat:
                assert value.pop("cat_dim", None) == (1 if name == "up.weight" else None) and list(value) == [
                    "param"
                ]
                value = value["param"]
            assert torch.equal(value, arrays[key].flatten() if flat else arrays[key])
        assert (folder / "step.pt").exists() != flat
        assert flat or torch.load(folder / "step.pt", weights_only=True).item() == 7
    found = deepspeed_universal.read(tmp_path)
    assert below(found, "") == below(manifest, "universal")
    assert found.records["optimizer"] == one and found.records["untrained"] == {"gain", "seen"}


def test_stage_3_finds_its_entry_only_where_it_goes_on_rightly(tmp_path: Path) -> None:
    """DeepSpeed takes the settings of the first group for all there: where that is wrong, it finds none."""

    def has_entry(tag: str, records: Mapping[str, Any], drop: str = "") -> bool:
        arrays = {
            key: value
            for key, value in arrays_of(masters="instead").items()
            if not drop or not key.endswith(drop)
        }
        manifest = universal_write.allocate(tmp_path, specs_of(arrays), records=records, tag=tag)
        universal_write.finish(manifest, fill(manifest, arrays))
        return b"optimizer_state_dict" in (tmp_path / tag / "zero/optimizer_state.pt").read_bytes()

    one = OptimizerRecord(dict.fromkeys(TRAINED, 7), ({"params": list(TRAINED), **SETTINGS},))
    none = OptimizerRecord({}, one.groups)
    assert has_entry("same", records_of(optimizer=one))
    assert not has_entry("groups", records_of())
    assert not has_entry("states", records_of(optimizer=one), drop="exp_avg_sq")
    assert not has_entry("count", records_of(optimizer=none))
    with pytest.raises(FormatError, match="groups differ in settings or counts: weight_decay"):
        universal_write.allocate(
            tmp_path, specs_of(arrays_of(masters="instead")), records=records_of(), tag="flat", flat=True
        )
    assert not (tmp_path / "flat").exists()


# --- what is refused ------------------------------------------------------------------------------


GROUPS = records_of()["optimizer"].groups
NARROW = torch.zeros((), dtype=torch.bfloat16)
ONE, MOE = torch.zeros(()), "moe.deepspeed_moe.w"


def optimizer(*groups: Mapping[str, Any], **count: int) -> dict[str, Any]:
    return {"optimizer": OptimizerRecord(count and {**dict.fromkeys(TRAINED, 7), **count}, groups)}


RUN = Zero(1, 2)
Case = tuple[dict[str, torch.Tensor | None], dict[str, Any], Zero, type[Exception], str]
REFUSED: dict[str, Case] = {
    "record": ({}, {"rng": 1}, RUN, FormatError, r"unknown \['rng'\]"),
    "no weight": ({"optim/other/master": ONE}, {}, RUN, FormatError, "there is no weight 'other'"),
    "shape": ({"optim/scale/exp_avg": torch.zeros(2)}, {}, RUN, FormatError, r"shape\(2,\) != shape\(\)"),
    "state dtype": ({"optim/scale/exp_avg": NARROW}, {}, RUN, DtypeError, "!= float32"),
    "step": ({"optim/scale/step": ONE}, {}, RUN, FormatError, "'step' cannot name a state"),
    "file name": ({"optim/scale/a.b": ONE}, {}, RUN, FormatError, r"'a\.b' cannot name a state"),
    "a state missing": ({"optim/scale/exp_avg": None}, {}, RUN, FormatError, r"states\('exp_avg_sq',\)"),
    "a master missing": ({"optim/scale/master": None}, {}, RUN, FormatError, "go with a float32 master"),
    "state of a buffer": ({"optim/seen/m": torch.zeros(2)}, {}, RUN, FormatError, "not trained, and has"),
    "counts": ({}, optimizer(*GROUPS, scale=6), RUN, FormatError, r"updates\(6\)"),
    "in no group": ({}, optimizer(*GROUPS[:1]), RUN, FormatError, "trained, in 0 groups"),
    "in two groups": ({}, optimizer(*GROUPS, GROUPS[0]), RUN, FormatError, "in 2 groups"),
    "in a group": ({}, optimizer(*GROUPS, {"params": ["nobody"]}), RUN, UnknownNameError, "nobody"),
    "untrained": ({}, {"untrained": {"nobody"}}, RUN, UnknownNameError, "nobody"),
    "settings": ({}, optimizer({"params": TRAINED}), RUN, FormatError, "go with its settings"),
    "scalars": ({}, {"scalars": ({},)}, RUN, FormatError, r"scalars\(1\) != groups\(2\)"),
    "shared": ({}, {"shared": {"gain": "scale"}}, RUN, FormatError, "a further name of another"),
    "run dtype": ({}, {}, Zero(1, 2, dtype="float16"), DtypeError, r"dtype\(bfloat16\) != float16"),
    "stage 3": ({}, {}, Zero(3, 2), DtypeError, "is its float32 master"),
    "tp": ({}, {}, Zero(1, 2, tp=2), FormatError, r"of no rank below tp\(2\)"),
    "experts": ({MOE: ONE}, {"untrained": {"gain", MOE}}, RUN, FormatError, "mixture of experts"),
    "nothing trained": ({}, {"untrained": set(SHAPES)}, RUN, FormatError, "not trained, and has"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_deepspeed_could_not_load_is_refused_before_anything_is_written(
    case: str, tmp_path: Path
) -> None:
    change, more, zero, error, message = REFUSED[case]
    arrays = arrays_of(masters="beside")
    for key, value in change.items():
        arrays = {name: array for name, array in arrays.items() if name != key}
        arrays |= {} if value is None else {key: value}
    with pytest.raises(error, match=message):
        deepspeed_write.allocate(tmp_path, specs_of(arrays), zero=zero, records=records_of(**more), tag="x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"stage": 0, "dp": 1}, r"stage\(0\)"),
        ({"stage": 1, "dp": 0}, r"dp\(0\)"),
        ({"stage": 1, "dp": 1, "dtype": "int8"}, r"dtype\(int8\)"),
        ({"stage": 3, "dp": 1, "round_robin_gradients": True}, "options of stages 1 and 2"),
        ({"stage": 3, "dp": 1, "sub_group_size": -1}, r"sub_group_size\(-1\)"),
    ],
)
def test_a_run_that_cannot_be_started_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Zero(**words)


def test_universal_refusals(tmp_path: Path) -> None:
    def allocate(arrays: Mapping[str, torch.Tensor], tag: str = "x", **more: Any) -> Manifest:
        return universal_write.allocate(tmp_path, specs_of(arrays), records=records_of(**more), tag=tag)

    good = arrays_of(masters="instead")
    with pytest.raises(DtypeError, match="holds the float32 master"):
        allocate(arrays_of(masters="beside"))
    with pytest.raises(FormatError, match=r"its group has \['mu_product'\]"):
        allocate(good, scalars=({"mu_product": 0.5}, {}))
    with pytest.raises(PathError, match=r"a '\.\.' part"):
        allocate(good, tag="../x")
    with pytest.raises(PathError, match=r"a '\.\.' part"):
        allocate({key.replace("scale", "../up"): value for key, value in good.items()}, optimizer=None)
    assert not list(tmp_path.iterdir())
    allocate(good)
    with pytest.raises(ExistsError, match=r"it holds x/zero"):
        allocate(good)
    with pytest.raises(MissingFileError, match="an existing folder"):
        universal_write.allocate(tmp_path / "no", specs_of(good), records=records_of())


def test_a_file_that_was_cut_is_not_sealed(tmp_path: Path) -> None:
    arrays = arrays_of(masters="beside")
    manifest = deepspeed_write.allocate(
        tmp_path, specs_of(arrays), zero=Zero(1, 2), records=records_of(), tag="x"
    )
    fill(manifest, arrays)
    name = sorted(manifest.files)[0]
    with (tmp_path / name).open("r+b") as file:
        file.truncate(manifest.files[name] - 1)
    with pytest.raises(TruncatedError, match="files stay as they were laid out"):
        deepspeed_write.finish(manifest)
    assert not (tmp_path / "latest").exists()


def test_what_a_reader_returns_is_what_a_writer_takes(tmp_path: Path) -> None:
    """Client state, scale of the loss and options go on; a scale does not reach a run that has none."""
    scaler = {"$class": "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler", "state": {"cur_scale": 512.0}}
    more = {
        "model_states": {
            "epoch": 3,
            "lr_scheduler": {"last_epoch": 7},
            "ds_config": {"zero_optimization": {"stage": 1}},
        },
        "optimizer_states": {
            "loss_scaler": scaler,
            "dynamic_loss_scale": True,
            "overflow": False,
            "clip_grad": 0.5,
        },
    }
    arrays = arrays_of(masters="beside", dtype=torch.float16)
    manifest = deepspeed_write.allocate(
        tmp_path, specs_of(arrays), zero=Zero(1, 2, dtype="float16"), records=records_of(**more), tag="x"
    )
    deepspeed_write.finish(manifest, fill(manifest, arrays))
    records = deepspeed_state.of_source(deepspeed.read(tmp_path).records, tp=1)
    assert records["model_states"]["epoch"] == 3 and records["model_states"]["lr_scheduler"] == {
        "last_epoch": 7
    }
    assert records["optimizer_states"] == more["optimizer_states"]
    again = arrays_of(masters="beside")
    manifest = deepspeed_write.allocate(tmp_path, specs_of(again), zero=Zero(2, 3), records=records, tag="y")
    deepspeed_write.finish(manifest, fill(manifest, again))
    found = deepspeed.read(tmp_path / "y").records["deepspeed"]
    states = next(iter(found["optimizer_states"].values()))
    assert "loss_scaler" not in states and states["clip_grad"] == 0.5
    models = next(iter(found["model_states"].values()))
    assert models["epoch"] == 3 and models["ds_config"]["zero_optimization"] == {"stage": 2}
