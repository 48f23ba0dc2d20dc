"""Checkpoint folders that DeepSpeed's engine saves, at any ZeRO stage, read in place.

Neither torch nor DeepSpeed is needed or imported: each file is one stream of ``torch.save``, whose pickle is
read without running it and whose tensors are used where they lie.

The folder of a save (its tag, which the file ``latest`` beside it names):
    ``mp_rank_TT_model_states.pt``   up to ZeRO-2, one a tensor-parallel rank: the module's weights, shapes in
                    the order of the flat groups, buffers, frozen and shared weights, what the script keeps.
    ``zero_pp_rank_D_mp_rank_TT_model_states.pt``   ZeRO-3, one a rank: the same, weights as placeholders.
    ``[bf16_]zero_pp_rank_D_mp_rank_TT_optim_states.pt``   one a data-parallel rank D: masters and states.
    ``layer_L_expert_E_mp_rank_TT_model_states.pt``   one an expert of ``deepspeed.moe``.
    ``layer_LL[-model_TT]-model_states.pt``   one a layer of a pipeline; TT above then numbers the ranks of
                    all stages, those of one stage in a row.

Arrays are named after weights: ``{name}``, ``optim/{name}/master``, ``optim/{name}/{state}``, with ``@{k}``
behind it for tensor-parallel rank k where there are several. ZeRO-3 stores no rounded weights: ``{name}`` is
the master. A buffer keeps its dtype. Of a weight that stages of a pipeline share, the first stage's is taken.

``records``:
    ``optimizer``   `OptimizerRecord`, names without ``@``.
    ``untrained``   names of frozen weights and buffers, which rightly have no state, without ``@``.
    ``shared``      of each weight that is another one that one's name; it has no array of its own.
    ``universal_checkpoint_info``   how weights are cut, where AutoTP or the script says so.
    ``deepspeed``   ``version``, ``stage``, ``dp``, ``tp``, ``pp``, ``buffers`` (names), ``padding_bytes``,
                    ``scalars`` (of states, by group), and ``model_states`` and ``optimizer_states``: all else
                    in files, plain, by file name; of files that say the same only the first.

Source: deepspeed 0.19.8 ``runtime/engine.py`` (``_common_checkpoint_state``, ``_save_zero_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from shardweave.errors import IndexMismatchError
from shardweave.store.deepspeed_experts import Experts
from shardweave.store.deepspeed_files import (
    OPTIMIZER,
    File,
    Ranks,
    broken,
    complete,
    listed,
    load,
    plain,
    saved_folder,
    stage_of,
    tag_folder,
    whole,
)
from shardweave.store.deepspeed_models import (
    Degrees,
    Models,
    Module,
    Untrained,
    model_files,
    rest,
    rest_of_models,
    shapes_of,
)
from shardweave.store.deepspeed_plain import plain_optimizer
from shardweave.store.deepspeed_zero import MASTER, Flat, optimizer_of, ordered, partitions
from shardweave.store.deepspeed_zero3 import slots
from shardweave.store.manifest import Manifest, StoredTensor
from shardweave.store.optimizer import OptimizerRecord
from shardweave.store.tiling import prove_tiling
from shardweave.store.torch_save import TensorAt

FORMAT: Final = "deepspeed"
LATEST: Final = "latest"

_OPTIM: Final = "[bf16_]zero_pp_rank_{1}_mp_rank_{0:02d}_optim_states.pt"
_FLAT: Final = frozenset(
    (
        "base_optimizer_state", "base_optimizer_state_step", "single_partition_of_fp32_groups",
        "param_slice_mappings", "group_paddings", "param_alignment_paddings", "partition_count",
        "optimizer_state_dict", "fp32_flat_groups", "zero_stage", "universal_checkpoint_info",
    )
)  # fmt: skip


def is_deepspeed(root: Path) -> bool:
    """Whether a folder is that of a save of DeepSpeed's engine, or holds ``latest`` and such a folder."""
    folder = saved_folder(Path(root), LATEST)
    if folder is None or (folder / "zero").is_dir():
        return False
    return any(folder.glob("*mp_rank_*_model_states.pt"))


def read(root: Path) -> Manifest:
    """What a folder of DeepSpeed holds; no weight or state is read.

    Args:
        root: The folder of one save, or the one above it with ``latest``.

    Returns:
        The manifest, rooted at the folder of the save. The module says how arrays and records are named.

    Raises:
        MissingFileError: No files of model states, or files of ranks are not there; all are listed.
        IndexMismatchError: Files contradict each other or their own names.
        GapError: A part of a weight or state lies nowhere.
        DtypeError: Ranks hold a state in different dtypes.
        PickleError: A file names something outside the allow-list.
        PathError: ``latest`` leads out of the folder.
        FormatError: Anything that is not read: AutoEP, states on NVMe, states that are not flat.

    >>> folder = read(Path("tests/data/ds_zero2"))
    >>> folder.tensors["optim/head.weight/exp_avg"].shape, len(folder.tensors["head.weight"].extents)
    ((61, 37), 1)
    """
    folder = tag_folder(Path(root), LATEST)
    found = listed(folder)
    models = model_files(folder, found)
    first, degrees = models.grid[0][0], models.degrees
    states = _states(folder, found["optim"], degrees)
    stage = _stage(folder, first, [file for row in states for file in row], degrees)
    experts = Experts.of(folder, found, first.value)
    groups = [_groups(folder, models, m, row) for m, row in enumerate(states)] if states else None
    trained = None if groups is None else [[name for group in one for name in group] for one in groups]
    untrained = Untrained.of(folder, models, trained)
    if groups is None:
        flats = [
            plain_optimizer(folder, row[0], left)
            for row, left in zip(models.grid, untrained.modules, strict=True)
        ]
    elif stage == 3:
        flats = [slots(folder, row, shapes) for row, shapes in zip(states, groups, strict=True)]
    else:
        cut = partial(partitions, folder, rename=experts.rename, data_first=experts.data_first)
        flats = [cut(row, shapes) for row, shapes in zip(states, groups, strict=True)]
    _give_empty(flats)
    tensors: dict[str, StoredTensor] = {}
    for m, flat in reversed(list(enumerate(flats))):  # of what stages share, the first one's
        suffix = models.suffix(m)
        if stage != 3:
            tensors |= _weights(folder, models.modules[m], flat, experts.weights(m), suffix)
        tensors |= flat.tensors(partial(_key, suffix=suffix, stage=stage))
    tensors |= untrained.tensors
    place = {name: i for i, name in enumerate([name for flat in flats for name in flat.shapes])}
    place |= {name: len(place) + i for i, name in enumerate(untrained.names)}
    tensors = {key: tensors[key] for key in sorted(tensors, key=_order(place))}
    prove_tiling(tensors.values(), root=folder)
    files = [file for grid in (models.grid, states) for row in grid for file in row]
    return Manifest(
        folder,
        FORMAT,
        tensors,
        {file.name: file.num_bytes for file in (*files, *models.layers, *experts.files)},
        _records(folder, models, states, flats, untrained, stage),
    )


def _give_empty(flats: Sequence[Flat]) -> None:
    """Where a rank has nothing of a weight, it has nothing of each state that other ranks have of it."""
    dtypes = {key: dtype for flat in flats for key, dtype in flat.dtypes.items()}
    for flat in flats:
        empty = {name for name, shape in flat.shapes.items() if 0 in shape}
        for key in [key for key in dtypes if key[0] in empty and key not in flat.extents]:
            flat.extents[key], flat.dtypes[key] = [], dtypes[key]


def _key(name: str, state: str, *, suffix: str, stage: int) -> str:
    return f"{name}{suffix}" if (state, stage) == (MASTER, 3) else f"optim/{name}/{state}{suffix}"


def _order(place: Mapping[str, int]) -> Callable[[str], tuple[Any, ...]]:
    """Arrays in the order of weights, a weight before its states, ranks in theirs."""

    def key(array: str) -> tuple[Any, ...]:
        name, _, rank = array.partition("@")
        state = ""
        if name.startswith("optim/"):
            name, _, state = name.removeprefix("optim/").rpartition("/")
        return place[name], state, len(rank), rank

    return key


def _states(folder: Path, names: Ranks, degrees: Degrees) -> list[list[File]]:
    """The files of optimizer states by model-parallel rank, in the order of data-parallel ranks."""
    if not names and degrees.stage != 3:
        return []
    ranks = range(degrees.tp * degrees.pp)
    complete(folder, names, [(m, d) for m in ranks for d in range(degrees.dp)], _OPTIM)
    return [[load(folder, names[m, d], allow=OPTIMIZER) for d in range(degrees.dp)] for m in ranks]


def _stage(folder: Path, first: File, files: Sequence[File], degrees: Degrees) -> int:
    """The stage that all optimizer files state, and the names of files imply."""
    # The optimizer of bf16 states none, and is cut like ZeRO-1 whatever the stage is.
    unsaid = 1 if first.value.get("param_shapes") is not None else 0
    found = {stage_of(optimizer_of(folder, file).get("zero_stage", unsaid)) for file in files} or {0}
    stage = next(iter(found))
    if len(found) > 1 or stage not in range(4) or (stage == 3) != (degrees.stage == 3):
        raise IndexMismatchError(
            "all files of a save are of one ZeRO stage",
            where=str(folder),
            equation=f"zero_stage {sorted(map(str, found))}, names of files are those of stage "
            + ("3" if degrees.stage == 3 else "0 to 2"),
            hint="two saves were written into one folder; take away the files of the older one",
        )
    assert stage is not None
    return stage


def _groups(
    folder: Path, models: Models, rank: int, states: Sequence[File]
) -> list[dict[str, tuple[int, ...]]]:
    """The flat groups of a model-parallel rank; without ZeRO the names are those of the fragments."""
    if models.grid[rank][0].value.get("param_shapes") is not None:
        return shapes_of(folder, models.grid[rank])
    found = []
    for names in ordered(folder, states):
        shapes = {}
        for name in names:
            where, tensor = models.modules[rank].get(name, (models.grid[rank][0].name, None))
            if type(tensor) is not TensorAt:
                raise broken(folder / where, f"weight {name!r} of a flat group is not in the module")
            shapes[name] = tensor.shape
        found.append(shapes)
    return found


def _weights(
    folder: Path, module: Module, flat: Flat, experts: Mapping[str, tuple[str, TensorAt]], suffix: str
) -> dict[str, StoredTensor]:
    """The rounded weights of those that have masters."""
    found = {}
    for name, shape in flat.shapes.items():
        where, tensor = experts.get(name) or module.get(name, ("", None))
        if type(tensor) is not TensorAt or tensor.shape != shape:
            got = f"shape {tensor.shape}" if type(tensor) is TensorAt else "no tensor"
            raise IndexMismatchError(
                "a weight that is trained is in the module, with the shape of its flat group",
                where=f"{folder / where}, weight {name!r}",
                equation=f"{got} in the module, param_shapes says {shape}",
                hint="files of two saves were mixed; copy the whole folder again",
            )
        found[f"{name}{suffix}"] = whole(f"{name}{suffix}", where, tensor)
    if lost := [name for name in experts if name not in flat.shapes]:
        raise IndexMismatchError(
            "experts of files are those of flat groups",
            where=str(folder / experts[lost[0]][0]),
            equation=f"{len(lost)} weights have no master, such as {lost[0]!r}",
            hint="files of two saves were mixed; copy the whole folder again",
        )
    return found


def _record(folder: Path, models: Models, flats: Sequence[Flat]) -> OptimizerRecord:
    """Counts and settings: ranks of a stage have the same, and stages the same settings."""
    count: dict[str, int] = {}
    groups: list[dict[str, Any]] = [{**group, "params": list[str]()} for group in flats[0].groups]
    for m, flat in enumerate(flats):
        stage = flats[m - m % models.degrees.tp]
        if (list(flat.shapes), flat.count, flat.groups) != (list(stage.shapes), stage.count, stage.groups):
            raise _apart(folder, m, "weights, counts or settings are not those of the stage's first rank")
        apart = any(count.get(name, step) != step for name, step in flat.count.items())
        if apart or len(flat.groups) != len(groups):
            raise _apart(folder, m, "groups or counts are not those of the first stage")
        count |= flat.count
        for group, mine in zip(groups, flat.groups, strict=True):
            if {**group, "params": 0} != {**mine, "params": 0}:
                raise _apart(folder, m, "the settings of a group are not those of the first stage")
            known = set(group["params"])  # what stages share is named once
            group["params"] += [name for name in mine["params"] if name not in known]
    return OptimizerRecord(count, tuple(groups))


def _apart(folder: Path, rank: int, equation: str) -> IndexMismatchError:
    return IndexMismatchError(
        "model-parallel ranks hold parts of one model, updated alike",
        where=f"{folder}, mp_rank_{rank:02d}",
        equation=equation,
        hint="files of two saves were mixed; copy the whole folder again",
    )


def _records(
    folder: Path,
    models: Models,
    states: Sequence[Sequence[File]],
    flats: Sequence[Flat],
    untrained: Untrained,
    stage: int,
) -> dict[str, Any]:
    first = models.grid[0][0]
    records: dict[str, Any] = {
        "optimizer": _record(folder, models, flats),
        "untrained": frozenset(untrained.names),
        "shared": dict(untrained.shared),
    }
    info = first.value.get("universal_checkpoint_info")
    if info is not None:
        records["universal_checkpoint_info"] = plain(folder, first, info)
    records[FORMAT] = {
        "version": first.value.get("ds_version"),
        "stage": stage,
        "dp": models.degrees.dp,
        "tp": models.degrees.tp,
        "pp": models.degrees.pp,
        "buffers": untrained.buffers,
        "padding_bytes": sum(flat.padding_bytes for flat in flats),
        "scalars": tuple(flats[0].scalars),
        "model_states": rest_of_models(folder, [file for row in models.grid for file in row]),
        "optimizer_states": rest(folder, [file for row in states for file in row], _FLAT, inner=True),
    }
    return records
