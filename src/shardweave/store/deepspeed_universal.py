"""DeepSpeed's universal checkpoints: a folder a weight, one file for each of its states, read in place.

The folder, as ``ds_to_universal`` writes it::

    mp_rank_TT_model_states.pt          the module's files as they were (ZeRO-3: zero_pp_rank_D_mp_rank_TT_*)
    zero/optimizer_state.pt             groups of parameters and the loss scaler, of the first rank
    zero/<weight>/fp32.pt               {"param": the master, whole, and how its parts were put together}
    zero/<weight>/<state>.pt            the same for each state
    zero/<weight>/step.pt               the number of updates; not from ZeRO-3

From ZeRO-3 the files of weights and states hold a bare flat tensor; its shape is that of ``param_shapes``.

Arrays: ``{name}`` is the master, ``optim/{name}/{state}`` its states, all whole. What the converter writes
into ``fp32.pt`` of buffers and frozen weights went through fp32, and of tensor-parallel ranks is the first
one's part: those are taken from the module's files, with ``@{k}`` for tensor-parallel rank k where there are
several.

``records`` are those of `deepspeed`, with ``universal`` in place of ``deepspeed``: ``version``, ``stage``,
``tp``, ``pp``, ``dp``, ``buffers``, ``parts`` (by weight what stands beside ``param``: ``cat_dim``,
``vocab_tensor``, ``param_n_sub_params``, ``sub_param_shape``, ``is_expert_param``, ``ep_num_experts``),
``optimizer_state`` and ``model_states``.

Source: deepspeed 0.19.8 ``checkpoint/ds_to_universal.py``, ``checkpoint/universal_checkpoint.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardweave.errors import DtypeError, FormatError, IndexMismatchError, MissingFileError
from shardweave.store.deepspeed_files import (
    MODEL,
    OPTIMIZER,
    File,
    broken,
    complete,
    listed,
    load,
    load_value,
    members_of,
    number,
    plain,
    saved_folder,
    settings,
    stage_of,
    tag_folder,
    whole,
)
from shardweave.store.deepspeed_models import (
    Degrees,
    Models,
    Untrained,
    degrees_of,
    groups_of,
    rest_of_models,
    shared_of,
)
from shardweave.store.manifest import Manifest, StoredTensor
from shardweave.store.optimizer import OptimizerRecord
from shardweave.store.paths import check_name
from shardweave.store.pickles import brief
from shardweave.store.pickles_write import to_plain
from shardweave.store.tiling import prove_tiling
from shardweave.store.torch_save import TensorAt

FORMAT: Final = "universal"
LATEST: Final = "latest_universal"
ZERO: Final = "zero"
OPTIMIZER_FILE: Final = "zero/optimizer_state.pt"

_PARAM: Final = "param"
_WEIGHT, _STEP = "fp32", "step"
_PARTS: Final = frozenset(
    ("cat_dim", "vocab_tensor", "param_n_sub_params", "sub_param_shape", "is_expert_param", "ep_num_experts")
)
_OF_RANK: Final = frozenset(
    ("optimizer_state_dict", "fp32_flat_groups", "param_groups", "base_optimizer_state", "zero_stage")
)


def is_universal(root: Path) -> bool:
    """Whether a folder is a universal checkpoint, or holds ``latest_universal`` and one."""
    folder = saved_folder(Path(root), LATEST)
    if folder is None or not (folder / ZERO).is_dir():
        return False
    return any(folder.glob("*mp_rank_*_model_states.pt"))


def read(root: Path) -> Manifest:
    """What a universal checkpoint holds; no weight or state is read.

    Args:
        root: The folder, or the one above it with ``latest_universal``.

    Returns:
        The manifest, rooted at the folder itself. The module says how arrays and records are named.

    Raises:
        MissingFileError: Files of ranks, of weights or of states are not there.
        IndexMismatchError: Files contradict each other.
        PickleError, PathError, FormatError, DtypeError, TruncatedError: As `deepspeed.read`.
    """
    folder = tag_folder(Path(root), LATEST)
    grid, degrees = _models(folder)
    first = grid[0][0]
    shapes = [groups_of(folder, files[0]) for files in grid]
    groups = _groups(folder, shapes, first)
    trained = {name for group in groups for name in group}
    untrained = _untrained(folder, grid, degrees, trained)
    shared = shared_of(folder, first)
    names = _folders(folder)
    tensors: dict[str, StoredTensor] = {}
    sizes = {file.name: file.num_bytes for files in grid for file in files}
    parts: dict[str, Mapping[str, Any]] = {}
    count: dict[str, int] = {}
    without: list[str] = []
    optimizer = load(folder, OPTIMIZER_FILE, allow=OPTIMIZER) if _there(folder) else None
    for name in [n for n in names if n in trained or n not in (*untrained.names, *shared)]:
        told = [group[name] for rank in shapes for group in rank if name in group]
        states = _weight(folder, name, names[name], told, degrees, sizes)
        for state, (tensor, shape, meta) in states.items():
            key = name if state == _WEIGHT else f"optim/{name}/{state}"
            tensors[key] = whole(key, f"{ZERO}/{name}/{state}.pt", tensor, shape)
            if meta != parts.setdefault(name, meta):
                raise _differ(
                    folder, name, f"{state}.pt says {brief(meta)} of its parts, others say another thing"
                )
        if _STEP in names[name]:
            label = f"{ZERO}/{name}/{_STEP}.pt"
            value, size = load_value(folder, label, allow=OPTIMIZER)
            sizes[label] = size
            count[name] = number(folder, label, value, "step")
        if name not in trained:
            without.append(name)
    if missing := sorted(trained - set(names)):
        raise MissingFileError(
            "each weight that was trained has a folder",
            where=str(folder / ZERO),
            equation=f"missing {len(missing)} of {len(trained)}: {', '.join(missing[:20])}",
            hint="the conversion broke off or its outcome was not copied whole; convert again",
        )
    _check_groups(folder, groups, names, count)
    tensors |= untrained.tensors
    prove_tiling(tensors.values(), root=folder)
    settled: list[Mapping[str, Any]] = []
    other: Any = {}
    if optimizer is not None:
        sizes[optimizer.name] = optimizer.num_bytes
        settled = _settings(folder, optimizer, groups)
        count = {**_counts(folder, optimizer, shapes), **count}
        other = plain(folder, optimizer, {k: v for k, v in optimizer.value.items() if k not in _OF_RANK})
    records: dict[str, Any] = {
        "optimizer": OptimizerRecord(count, tuple(settled)),
        "untrained": frozenset(without) | frozenset(untrained.names),
        "shared": shared,
    }
    info = first.value.get("universal_checkpoint_info")
    if info is not None:
        records["universal_checkpoint_info"] = plain(folder, first, info)
    stage = stage_of(optimizer.value.get("zero_stage", 0)) if optimizer is not None else None
    records[FORMAT] = {
        "version": first.value.get("ds_version"),
        "stage": stage,
        **degrees,
        "buffers": untrained.buffers,
        "parts": {name: meta for name, meta in parts.items() if meta},
        "optimizer_state": other,
        "model_states": rest_of_models(folder, [file for files in grid for file in files]),
    }
    return Manifest(folder, FORMAT, tensors, sizes, records)


def _check_groups(
    folder: Path,
    groups: Sequence[Sequence[str]],
    names: Mapping[str, Sequence[str]],
    count: Mapping[str, int],
) -> None:
    """The weights of a group have the same states and one count, as DeepSpeed takes for granted."""
    for group in groups:
        for name in group[1:]:
            mine, first = names[name], names[group[0]]
            if set(mine) != set(first):
                odd = sorted(set(mine) ^ set(first))
                raise MissingFileError(
                    "the weights of a group have the same states",
                    where=str(folder / ZERO),
                    equation=f"of {group[0]!r} and {name!r} one has {', '.join(f'{one}.pt' for one in odd)}",
                    hint="the conversion broke off or its outcome was not copied whole; convert again",
                )
            if count.get(name) != count.get(group[0]):
                raise _differ(
                    folder, name, f"step({count.get(name)}) != step({count.get(group[0])}) of {group[0]!r}"
                )


def _there(folder: Path) -> bool:
    if (folder / OPTIMIZER_FILE).is_file():
        return True
    raise MissingFileError(
        "a universal checkpoint has a file for what its states have in common",
        where=str(folder),
        equation=f"{OPTIMIZER_FILE} is not there",
        hint="the conversion broke off; convert again",
    )


def _models(folder: Path) -> tuple[list[list[File]], dict[str, int]]:
    """Files of model states by model-parallel rank, and the degrees that they were saved at."""
    found = listed(folder)
    kinds = [kind for kind in ("model", "model3") if found[kind]]
    if not kinds:
        raise MissingFileError(
            "a universal checkpoint has the files of model states that it was made from",
            where=str(folder),
            equation="there are none",
            hint="convert again; the folder that is meant holds 'zero' and mp_rank_*_model_states.pt",
        )
    # Those of ZeRO-3 may lie beside the others, for an engine that asks for them, and say the same.
    names = found[kinds[0]]
    first = load(folder, names[min(names)], allow=MODEL)
    tp, pp, dp = degrees_of(folder, first, {})
    count = max(tp * pp, max(key[0] for key in names) + 1)
    pattern = "mp_rank_{0:02d}_model_states.pt"
    wanted: list[tuple[int, ...]] = [(k,) for k in range(count)]
    if kinds[0] == "model3":
        pattern = f"zero_pp_rank_{{1}}_{pattern}"
        wanted = [(k, d) for k in range(count) for d in range(max(dp, max(key[1] for key in names) + 1))]
    complete(folder, names, wanted, pattern)
    if count != tp * pp or len(wanted) not in (count, count * dp):
        raise IndexMismatchError(
            "a save has as many files as it says that it had ranks",
            where=str(folder / first.name),
            equation=f"tp({tp}) * pp({pp}) * dp({dp}), {len(wanted)} files of model states",
            hint="two conversions were written into one folder; convert again into an empty one",
        )
    files = {key: first if key == min(names) else load(folder, names[key], allow=MODEL) for key in names}
    grid = [[files[key] for key in sorted(files) if key[0] == k] for k in range(count)]
    return grid, {"tp": tp, "pp": pp, "dp": dp}


def _groups(folder: Path, shapes: Sequence[Sequence[Mapping[str, Any]]], first: File) -> list[list[str]]:
    """The names of each flat group, over all model-parallel ranks: stages have weights of their own."""
    if len({len(groups) for groups in shapes}) > 1:
        raise IndexMismatchError(
            "model-parallel ranks have the same groups of parameters",
            where=str(folder),
            equation=f"{sorted({len(groups) for groups in shapes})}, {first.name} has {len(shapes[0])}",
            hint="two conversions were written into one folder; convert again into an empty one",
        )
    return [list(dict.fromkeys(n for rank in shapes for n in rank[g])) for g in range(len(shapes[0]))]


def _untrained(
    folder: Path, grid: Sequence[Sequence[File]], degrees: Mapping[str, int], trained: Collection[str]
) -> Untrained:
    """What the module's files hold beside trained weights; those of a pipeline hold none."""
    modules = [row[0].value.get("module") for row in grid]
    if not all(type(module) is dict for module in modules):
        return Untrained({}, (), (), {}, ())
    located = tuple(
        {name: (row[0].name, value) for name, value in (module or {}).items()}
        for row, module in zip(grid, modules, strict=True)
    )
    stage = 3 if grid[0][0].name.startswith("zero_") else 0
    models = Models(Degrees(**degrees, stage=stage), tuple(map(tuple, grid)), located)
    return Untrained.of(folder, models, [trained] * len(grid))


def _folders(folder: Path) -> dict[str, tuple[str, ...]]:
    """The states of each weight, by the weight's name."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted((folder / ZERO).iterdir()):
        if path.name == Path(OPTIMIZER_FILE).name:
            continue
        where = str(folder / ZERO)
        check_name(path.name, where=where)
        files = sorted(one.name for one in path.iterdir()) if path.is_dir() else []
        states = tuple(name.removesuffix(".pt") for name in files)
        if _WEIGHT not in states or not all(name.endswith(".pt") and "@" not in path.name for name in files):
            raise FormatError(
                "what lies in 'zero' is a folder a weight, with fp32.pt and its states",
                where=str(path),
                equation=f"{len(files)} files {files[:6]}" if path.is_dir() else "it is no folder",
                hint="the conversion broke off, or somebody put it there; convert again",
            )
        found[path.name] = states
    return found


Found = tuple[TensorAt, tuple[int, ...], Mapping[str, Any]]


def _weight(
    folder: Path,
    name: str,
    states: Sequence[str],
    told: Sequence[tuple[int, ...]],
    degrees: Mapping[str, int],
    sizes: dict[str, int],
) -> dict[str, Found]:
    """The tensors of one weight, each with its shape and what is said of its parts."""
    found: dict[str, Found] = {}
    for state in states:
        if state == _STEP:
            continue
        label = f"{ZERO}/{name}/{state}.pt"
        value, sizes[label] = load_value(folder, label, allow=OPTIMIZER)
        meta: Mapping[str, Any] = {}
        flat = type(value) is TensorAt
        if type(value) is dict:
            meta = to_plain({k: v for k, v in value.items() if k != _PARAM}, where=str(folder / label))
            value = value.get(_PARAM)
        if type(value) is not TensorAt or not set(meta) <= _PARTS:
            raise broken(folder / label, f"it holds {brief(value)} and {sorted(map(str, meta))[:8]}")
        shape = value.shape
        if flat:
            if not told or len(shape) != 1 or shape[0] != math.prod(told[0]):
                raise _differ(
                    folder, name, f"{state}.pt is flat of shape {shape}, param_shapes says {told[:1]}"
                )
            shape = told[0]
        elif told and not _fits(shape, told, meta, degrees["tp"]):
            raise _differ(
                folder, name, f"{state}.pt has shape {shape}, parts of ranks {list(told)[:4]}, {brief(meta)}"
            )
        found[state] = value, shape, meta
    weight = found[_WEIGHT]
    for state, (tensor, shape, _) in found.items():
        if shape != weight[1]:
            raise _differ(folder, name, f"{state}.pt has shape {shape}, fp32.pt {weight[1]}")
        if tensor.dtype != weight[0].dtype:
            raise DtypeError(
                "a weight and its states are of one dtype",
                where=f"{folder / ZERO / name / state}.pt",
                equation=f"{tensor.dtype} != {weight[0].dtype} of fp32.pt",
                hint="DeepSpeed writes all of them in fp32; convert again",
            )
    return found


def _fits(shape: tuple[int, ...], told: Sequence[tuple[int, ...]], meta: Mapping[str, Any], tp: int) -> bool:
    """Whether the parts of tensor-parallel ranks come to a shape, as far as the file says how."""
    if any(len(part) != len(shape) for part in told):
        return False
    if meta.get("vocab_tensor"):  # rows that only fill up were cut off
        return shape[1:] == told[0][1:] or tp > 1
    if meta.get("is_expert_param"):
        return shape[1:] == told[0][1:]
    if tp == 1:
        return all(part == shape for part in told)
    cut = meta.get("cat_dim")
    if type(cut) is not int:
        return True  # an affine map, sub-parameters or replicas: the layout decides
    parts = told[:tp]
    return 0 <= cut < len(shape) and shape == tuple(
        sum(part[d] for part in parts) if d == cut else parts[0][d] for d in range(len(shape))
    )


def _settings(folder: Path, file: File, groups: Sequence[Sequence[str]]) -> list[Mapping[str, Any]]:
    """Groups of parameters. Of ZeRO-3 each lists the flat sub-groups that it is; of others it is one."""
    found = file.value.get("param_groups")
    if found is None or found == []:  # weights alone were converted
        return [{"params": list(names)} for names in groups]
    if type(found) is not list or not all(type(group) is dict for group in found):
        raise broken(folder / file.name, f"param_groups is {brief(found)}")
    members = members_of(folder, file, found)
    if [i for part in members for i in part] != list(range(len(groups))):
        raise IndexMismatchError(
            "the groups of an optimizer are the flat groups of the model states",
            where=str(folder / file.name),
            equation=f"they list {[len(part) for part in members]} groups, param_shapes has {len(groups)}",
            hint="two conversions were written into one folder; convert again into an empty one",
        )
    result: list[Mapping[str, Any]] = []
    for group, part in zip(found, members, strict=True):
        settled = settings(folder, file, group)
        settled.pop(_STEP, None)
        result.append({"params": [name for i in part for name in groups[i]], **settled})
    return result


def _counts(folder: Path, file: File, shapes: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, int]:
    """The counts of ZeRO-3, which has them in the first rank's states only, and those of groups."""
    count: dict[str, int] = {}
    groups = file.value.get("param_groups") or []
    for group in groups:
        if group.get(_STEP) is not None:
            step = number(folder, file.name, group[_STEP], "the step of a group")
            count |= {name: step for i in group["params"] for rank in shapes for name in rank[i]}
    base = file.value.get("optimizer_state_dict")
    states = base.get("state") if type(base) is dict else None
    for i, state in states.items() if type(states) is dict else ():
        if type(state) is dict and state.get(_STEP) is not None and type(i) is int and i < len(shapes[0]):
            step = number(folder, file.name, state[_STEP], f"the step of sub-group {i}")
            count |= {name: step for rank in shapes for name in rank[i]}
    return count


def _differ(folder: Path, name: str, equation: str) -> IndexMismatchError:
    return IndexMismatchError(
        "the files of a weight are of one weight, and of its shape",
        where=str(folder / ZERO / name),
        equation=equation,
        hint="two conversions were written into one folder; convert again into an empty one",
    )
