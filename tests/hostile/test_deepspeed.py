"""DeepSpeed folders that are damaged, mixed of two saves or malicious: refused by name, nothing executed."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardweave.errors import (
    DtypeError,
    FormatError,
    GapError,
    IndexMismatchError,
    MissingFileError,
    PathError,
    PickleError,
    ShardweaveError,
    TruncatedError,
)
from shardweave.store import deepspeed, deepspeed_universal, torch_save
from shardweave.store.deepspeed_files import MODEL, load

DATA = Path(__file__).parents[1] / "data"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
Value = dict[str, Any]
Change = Callable[[Value], Any]


def copied(name: str, tmp_path: Path) -> Path:
    """A fixture that may be damaged."""
    root = shutil.copytree(DATA / name, tmp_path / name)
    return root / {"ds_autotp": "saved"}.get(name, "step2")


def edit(path: Path, change: Change) -> None:
    """Write a file again with a changed value; tensors are dicts with ``$leaf``, ``shape`` and ``data``."""
    value = load(path.parent, path.name, allow=MODEL).value
    data = path.read_bytes()
    plain = torch_save.to_plain(value, data, where="test")
    change(plain)
    path.write_bytes(torch_save.stream(plain))


def state(value: Value) -> Value:
    found: Value = value["optimizer_state_dict"]
    return found


def shorter(tensor: Value, count: int) -> None:
    (size,) = tensor["shape"]
    tensor["shape"] = (size - count,)
    tensor["data"] = tensor["data"][: 4 * (size - count)]


def halved(tensor: Value) -> None:
    tensor["$leaf"] = "bfloat16"
    tensor["data"] = tensor["data"][: len(tensor["data"]) // 2]


def test_editing_without_a_change_changes_nothing(tmp_path: Path) -> None:
    folder = copied("ds_zero1", tmp_path)
    for path in folder.glob("*.pt"):
        edit(path, lambda value: None)
    found, expected = deepspeed.read(folder), deepspeed.read(DATA / "ds_zero1")
    assert found.records == expected.records
    assert {k: (t.dtype, t.shape) for k, t in found.tensors.items()} == {
        k: (t.dtype, t.shape) for k, t in expected.tensors.items()
    }


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("ds_zero1", OPTIM.format(1, 0)),
        ("ds_zero3", OPTIM.format(0, 0)),
        ("ds_zero3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("ds_autotp", "mp_rank_01_model_states.pt"),
        ("ds_autotp", OPTIM.format(1, 1)),
    ],
)
def test_a_missing_file_of_a_rank_is_named(tmp_path: Path, name: str, lost: str) -> None:
    folder = copied(name, tmp_path)
    (folder / lost).unlink()
    with pytest.raises(MissingFileError, match=re.escape(lost.removeprefix("bf16_"))):
        deepspeed.read(folder)


def test_files_of_another_degree_are_found(tmp_path: Path) -> None:
    folder = copied("ds_zero2", tmp_path)
    shutil.copy(folder / OPTIM.format(1, 0), folder / OPTIM.format(2, 0))
    with pytest.raises(IndexMismatchError, match="3 files, 2 ranks"):
        deepspeed.read(folder)


def test_two_files_of_one_rank_are_found(tmp_path: Path) -> None:
    folder = copied("ds_zero2", tmp_path)
    shutil.copy(folder / OPTIM.format(1, 0), folder / OPTIM.format(1, 0).removeprefix("bf16_"))
    with pytest.raises(FormatError, match="are both of rank"):
        deepspeed.read(folder)


@pytest.mark.parametrize(
    "name", ["layer_00-model_00-model_states.pt", "my_model_states.pt", "offloaded_tensors"]
)
def test_what_is_not_read_is_refused(tmp_path: Path, name: str) -> None:
    folder = copied("ds_zero1", tmp_path)
    (folder / name).write_bytes(b"")
    with pytest.raises(FormatError, match=re.escape(name)):
        deepspeed.read(folder)


@pytest.mark.parametrize("count", [10**18, 0, -1, True, "2"])
def test_a_number_of_ranks_is_not_believed(tmp_path: Path, count: Any) -> None:
    folder = copied("ds_zero1", tmp_path)
    edit(folder / "mp_rank_00_model_states.pt", lambda value: value.update(dp_world_size=count))
    with pytest.raises(FormatError):
        deepspeed.read(folder)


def test_what_is_recognised(tmp_path: Path) -> None:
    for stage in (1, 2, 3):
        root = DATA / f"ds_zero{stage}"
        assert deepspeed.is_deepspeed(root)
        assert deepspeed.is_deepspeed(root / "step2")
        assert deepspeed_universal.is_universal(root)
        assert deepspeed_universal.is_universal(root / "universal")
        assert not deepspeed.is_deepspeed(root / "universal")
        assert not deepspeed_universal.is_universal(root / "step2")
    (tmp_path / "latest").write_text("what another tool wrote: 7")
    for folder in (tmp_path, tmp_path / "nowhere", DATA / "hf_llama_tied_tiny", DATA / "mc_gqa_tp1"):
        assert not deepspeed.is_deepspeed(folder)
        assert not deepspeed_universal.is_universal(folder)


@pytest.mark.parametrize(
    ("tag", "error"), [("../step2", PathError), ("/tmp", PathError), ("step3", MissingFileError)]
)
def test_a_tracker_stays_in_its_folder(tmp_path: Path, tag: str, error: type[ShardweaveError]) -> None:
    folder = copied("ds_zero1", tmp_path)
    (folder.parent / "latest").write_text(tag)
    with pytest.raises(error):
        deepspeed.read(folder.parent)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = copied("ds_zero1", tmp_path)
    path = folder / OPTIM.format(1, 0)
    path.rename(tmp_path / "outside.pt")
    path.symlink_to(tmp_path / "outside.pt")
    with pytest.raises(PathError):
        deepspeed.read(folder)


def test_two_ranks_whose_files_changed_places_are_found(tmp_path: Path) -> None:
    folder = copied("ds_zero2", tmp_path)
    one, other = (folder / OPTIM.format(rank, 0) for rank in range(2))
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)
    with pytest.raises(IndexMismatchError, match="fragments"):
        deepspeed.read(folder)


@pytest.mark.parametrize("keep", [0, 100, 5000, -1])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, keep: int) -> None:
    folder = copied("ds_zero1", tmp_path)
    path = folder / OPTIM.format(0, 0)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises((TruncatedError, FormatError)):
        deepspeed.read(folder)


class Bomb:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("name", [OPTIM.format(1, 0), "mp_rank_00_model_states.pt"])
def test_nothing_of_a_file_is_executed(tmp_path: Path, name: str) -> None:
    folder = copied("ds_zero1", tmp_path)
    mark = tmp_path / "executed"
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"module": Bomb(mark)}, protocol=2))
        archive.writestr("archive/version", b"3\n")
    with pytest.raises(PickleError, match="system"):
        deepspeed.read(folder)
    assert not mark.exists()


# --- contradictions -------------------------------------------------------------------------------

ZERO1: list[tuple[str, Change, type[ShardweaveError], str]] = [
    (
        "partition_count",
        lambda v: state(v)["partition_count"].__setitem__(0, 4),
        IndexMismatchError,
        r"\[2, 4\]",
    ),
    ("padding", lambda v: state(v)["group_paddings"].__setitem__(0, 3), IndexMismatchError, "equally long"),
    (
        "master",
        lambda v: shorter(state(v)["single_partition_of_fp32_groups"][0], 5),
        IndexMismatchError,
        "6301 elements",
    ),
    ("dtype", lambda v: halved(state(v)["single_partition_of_fp32_groups"][0]), DtypeError, "bfloat16"),
    (
        "state",
        lambda v: shorter(state(v)["base_optimizer_state"]["state"][0]["exp_avg"], 1),
        GapError,
        r"state 'exp_avg'.*elements\(6305\)",
    ),
    (
        "lost state",
        lambda v: state(v)["base_optimizer_state"]["state"][0].pop("exp_avg_sq"),
        GapError,
        "same states",
    ),
    (
        "square state",
        lambda v: state(v)["base_optimizer_state"]["state"][0]["exp_avg"].update(shape=(2, 3153)),
        FormatError,
        r"flat.*\(2, 3153\)",
    ),
    (
        "count",
        lambda v: state(v)["base_optimizer_state"]["state"][0].update(step=3),
        IndexMismatchError,
        "count 3",
    ),
    (
        "half a count",
        lambda v: state(v)["base_optimizer_state"]["state"][0].update(step=2.5),
        FormatError,
        "not a count",
    ),
    (
        "settings",
        lambda v: state(v)["base_optimizer_state"]["param_groups"][0].update(lr=1.0),
        IndexMismatchError,
        "settings",
    ),
    ("stage", lambda v: state(v).update(zero_stage=2), IndexMismatchError, "one ZeRO stage"),
    (
        "fragment",
        lambda v: state(v)["param_slice_mappings"][0]["head.weight"]["state"].update(start=4048),
        IndexMismatchError,
        r"'head.weight'.*\(4048, 2257\).*\(4049, 2257\)",
    ),
    (
        "unknown fragment",
        lambda v: state(v)["param_slice_mappings"][0].update(
            other=state(v)["param_slice_mappings"][0]["head.weight"]
        ),
        IndexMismatchError,
        "'other'",
    ),
    (
        "alignment",
        lambda v: state(v)["param_alignment_paddings"][0].pop(),
        IndexMismatchError,
        r"param_alignment_paddings\(11\)",
    ),
    ("nothing", lambda v: v.pop("optimizer_state_dict"), FormatError, "optimizer_state_dict"),
]


@pytest.mark.parametrize(("what", "change", "error", "says"), ZERO1, ids=[case[0] for case in ZERO1])
def test_a_file_of_zero1_that_contradicts_the_others(
    tmp_path: Path, what: str, change: Change, error: type[ShardweaveError], says: str
) -> None:
    folder = copied("ds_zero1", tmp_path)
    edit(folder / OPTIM.format(0 if what == "alignment" else 1, 0), change)
    with pytest.raises(error, match=says) as caught:
        deepspeed.read(folder)
    assert caught.value.hint


def _same_shift(value: Value) -> None:
    shorter(state(value)["single_partition_of_fp32_groups"][0], 400)
    for key in ("exp_avg", "exp_avg_sq"):
        shorter(state(value)["base_optimizer_state"]["state"][0][key], 400)


def test_partitions_that_are_too_short_for_their_weights(tmp_path: Path) -> None:
    folder = copied("ds_zero2", tmp_path)
    for rank in range(2):
        edit(folder / OPTIM.format(rank, 0), _same_shift)
    with pytest.raises(GapError, match=r"weights\(12612\) against 2 partitions of 5906"):
        deepspeed.read(folder)


MODELS: list[tuple[str, str, Change, type[ShardweaveError], str]] = [
    (
        "ds_zero1",
        "mp_rank_00_model_states.pt",
        lambda v: v["param_shapes"][0].pop("head.weight"),
        FormatError,
        "param_alignment_paddings|partitions",
    ),
    (
        "ds_zero1",
        "mp_rank_00_model_states.pt",
        lambda v: v["param_shapes"][0].update({"head.weight": (37, 61)}),
        IndexMismatchError,
        r"'head.weight'.*\(61, 37\).*\(37, 61\)",
    ),
    (
        "ds_zero1",
        "mp_rank_00_model_states.pt",
        lambda v: v["module"].pop("head.weight"),
        IndexMismatchError,
        "no tensor",
    ),
    ("ds_zero1", "mp_rank_00_model_states.pt", lambda v: v.update(module=None), FormatError, "pipeline"),
    (
        "ds_zero1",
        "mp_rank_00_model_states.pt",
        lambda v: v.update(dp_world_size=4),
        MissingFileError,
        "rank_3",
    ),
    (
        "ds_zero1",
        "mp_rank_00_model_states.pt",
        lambda v: v.update(dp_world_size=1),
        IndexMismatchError,
        "of none",
    ),
    (
        "ds_zero1",
        "mp_rank_00_model_states.pt",
        lambda v: v["checkpoint_parallel_dimensions"].update(pp_degree=2),
        MissingFileError,
        "mp_rank_01_model_states",
    ),
    (
        "ds_zero1",
        "mp_rank_00_model_states.pt",
        lambda v: v.update(shared_params={"head.weight": "emb.weight"}, param_shapes=v["param_shapes"]),
        FormatError,
        "is trained, and is",
    ),
    (
        "ds_zero3",
        "zero_pp_rank_1_mp_rank_00_model_states.pt",
        lambda v: v["param_shapes"][0].update({"head.weight": (61, 38)}),
        IndexMismatchError,
        "param_shapes differ",
    ),
    (
        "ds_zero3",
        "zero_pp_rank_1_mp_rank_00_model_states.pt",
        lambda v: v.update(ds_version="0.18.0"),
        IndexMismatchError,
        "ds_version",
    ),
    (
        "ds_autotp",
        "mp_rank_01_model_states.pt",
        lambda v: v.update(global_steps=3),
        IndexMismatchError,
        "global_steps",
    ),
]


@pytest.mark.parametrize(("name", "file", "change", "error", "says"), MODELS)
def test_model_states_that_contradict_the_others(
    tmp_path: Path, name: str, file: str, change: Change, error: type[ShardweaveError], says: str
) -> None:
    folder = copied(name, tmp_path)
    edit(folder / file, change)
    with pytest.raises(error, match=says):
        deepspeed.read(folder)


ZERO3: list[tuple[str, Change, type[ShardweaveError], str]] = [
    (
        "count of ranks",
        lambda v: state(v).update(partition_count=4),
        IndexMismatchError,
        r"partition_count\(4\)",
    ),
    ("short", lambda v: shorter(state(v)["fp32_flat_groups"][0], 9), GapError, "'head.weight'"),
    (
        "state",
        lambda v: shorter(state(v)["optimizer_state_dict"]["state"][0]["exp_avg"], 1),
        GapError,
        r"'exp_avg'.*6311",
    ),
    ("groups", lambda v: state(v)["fp32_flat_groups"].append(3), FormatError, r"fp32_flat_groups\(2\)"),
    (
        "members",
        lambda v: state(v)["optimizer_state_dict"]["param_groups"][0].update(params=[1]),
        FormatError,
        "sub-groups",
    ),
    (
        "step",
        lambda v: state(v)["optimizer_state_dict"]["state"][0].update(step=7),
        IndexMismatchError,
        "count",
    ),
    ("dtype", lambda v: halved(state(v)["fp32_flat_groups"][0]), DtypeError, "bfloat16"),
    ("experts", lambda v: state(v).update(ds_zero_partition_groups=[{}]), FormatError, "AutoEP"),
]


@pytest.mark.parametrize(("what", "change", "error", "says"), ZERO3, ids=[case[0] for case in ZERO3])
def test_a_file_of_zero3_that_contradicts_the_others(
    tmp_path: Path, what: str, change: Change, error: type[ShardweaveError], says: str
) -> None:
    folder = copied("ds_zero3", tmp_path)
    edit(folder / OPTIM.format(1, 0), change)
    with pytest.raises(error, match=says):
        deepspeed.read(folder)


# --- universal ------------------------------------------------------------------------------------


def _grown(value: Value) -> None:
    value["param"] = {"$leaf": "float32", "shape": (61, 38), "data": bytes(4 * 61 * 38)}


UNIVERSAL: list[tuple[str, Change, type[ShardweaveError], str]] = [
    ("zero/emb.weight/fp32.pt", _grown, IndexMismatchError, r"\(61, 38\)"),
    ("zero/emb.weight/exp_avg.pt", lambda v: v.update(cat_dim=1), IndexMismatchError, "cat_dim|parts"),
    ("zero/emb.weight/exp_avg.pt", lambda v: halved(v["param"]), DtypeError, "bfloat16"),
    ("zero/emb.weight/exp_avg.pt", lambda v: v.update(scale=2.0), FormatError, "scale"),
    ("zero/emb.weight/exp_avg.pt", lambda v: v.pop("param"), FormatError, "it holds None"),
    (
        "zero/optimizer_state.pt",
        lambda v: v["param_groups"].append({"params": [1]}),
        IndexMismatchError,
        "param_shapes has 1",
    ),
    (
        "mp_rank_00_model_states.pt",
        lambda v: v["checkpoint_parallel_dimensions"].update(tp_degree=0),
        FormatError,
        "degrees",
    ),
]


@pytest.mark.parametrize(("file", "change", "error", "says"), UNIVERSAL)
def test_a_universal_checkpoint_that_contradicts_itself(
    tmp_path: Path, file: str, change: Change, error: type[ShardweaveError], says: str
) -> None:
    folder = copied("ds_zero1", tmp_path).parent / "universal"
    edit(folder / file, change)
    with pytest.raises(error, match=says):
        deepspeed_universal.read(folder)


def test_a_universal_checkpoint_is_whole(tmp_path: Path) -> None:
    folder = copied("ds_zero3", tmp_path).parent / "universal"
    shutil.rmtree(folder / "zero" / "head.weight")
    with pytest.raises(MissingFileError, match=r"head\.weight"):
        deepspeed_universal.read(folder)
    shutil.copytree(DATA / "ds_zero3/universal/zero/head.weight", folder / "zero" / "head.weight")
    (folder / "zero" / "head.weight" / "fp32.pt").unlink()
    with pytest.raises(FormatError, match=r"fp32\.pt"):
        deepspeed_universal.read(folder)
    shutil.copy(DATA / "ds_zero3/universal/zero/head.weight/fp32.pt", folder / "zero" / "head.weight")
    (folder / "zero" / "optimizer_state.pt").unlink()
    with pytest.raises(MissingFileError, match="optimizer_state"):
        deepspeed_universal.read(folder)


def test_a_flat_weight_has_the_elements_of_its_shape(tmp_path: Path) -> None:
    folder = copied("ds_zero3", tmp_path).parent / "universal"
    source, target = (folder / "zero" / name / "fp32.pt" for name in ("emb.weight", "blocks.0.up.weight"))
    shutil.copy(source, target)
    with pytest.raises(IndexMismatchError, match=r"flat of shape \(2257,\).*\(53, 37\)"):
        deepspeed_universal.read(folder)
