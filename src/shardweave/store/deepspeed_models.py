"""The files of model states: degrees, shapes of flat groups, and what a module holds beside trained weights.

Source: deepspeed 0.19.8 ``runtime/engine.py`` (``_common_checkpoint_state`` and what it calls).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave.errors import FormatError, IndexMismatchError, MissingFileError
from shardweave.store.deepspeed_files import (
    MODEL,
    File,
    Ranks,
    broken,
    complete,
    load,
    plain,
    same_bytes,
    whole,
)
from shardweave.store.deepspeed_layers import layers_of, stage_module
from shardweave.store.manifest import Extent, StoredTensor, run_extents
from shardweave.store.pickles import brief
from shardweave.store.torch_save import TensorAt

_KNOWN = frozenset(
    (
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "universal_checkpoint_info",
    )
)  # fmt: skip


_MAX_RANKS = 1 << 20
"""More than anybody has; the files of so many are counted before any is opened."""

Module = Mapping[str, tuple[str, Any]]
"""The entries of a module by name: the file that each lies in, and what it is there."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of a save, and its stage where the names of its files say it (3), else 0."""

    tp: int
    pp: int
    dp: int
    stage: int


@dataclass(frozen=True, slots=True)
class Models:
    """The model states of a save.

    Attributes:
        degrees: Of the save.
        grid: Its files by model-parallel rank (tensor-parallel ranks of a stage are adjacent), one each, or
            with ZeRO-3 one a data-parallel rank.
        modules: What each model-parallel rank's module holds.
        layers: The files of a pipeline's layers, which hold it there.
    """

    degrees: Degrees
    grid: tuple[tuple[File, ...], ...]
    modules: tuple[Module, ...]
    layers: tuple[File, ...] = ()

    def suffix(self, rank: int) -> str:
        """What stands behind the names of the arrays of a model-parallel rank."""
        return f"@{rank % self.degrees.tp}" if self.degrees.tp > 1 else ""


def model_files(folder: Path, found: Mapping[str, Ranks]) -> Models:
    """The model states of a save.

    Args:
        folder: Of the save.
        found: From `listed`.

    Raises:
        MissingFileError, IndexMismatchError, FormatError: As `read`.
    """
    kinds = [kind for kind in ("model", "model3") if found[kind]]
    if len(kinds) != 1:
        raise MissingFileError(
            "a folder of DeepSpeed has files of model states, of one kind",
            where=str(folder),
            equation="neither mp_rank_* nor zero_pp_rank_* files"
            if not kinds
            else "both mp_rank_* and zero_pp_rank_* files",
            hint="give the folder of one save (its tag), such as global_step100, or the one with 'latest'",
        )
    names = found[kinds[0]]
    first = load(folder, names[min(names)], allow=MODEL)
    tp, pp, dp = degrees_of(folder, first, found["layer"])
    files = range(tp * pp)
    if kinds == ["model"]:
        complete(folder, names, [(m,) for m in files], "mp_rank_{0:02d}_model_states.pt")
    else:
        wanted = [(m, d) for m in files for d in range(dp)]
        complete(folder, names, wanted, "zero_pp_rank_{1}_mp_rank_{0:02d}_model_states.pt")
    values = {key: first if key == min(names) else load(folder, names[key], allow=MODEL) for key in names}
    grid = tuple(tuple(values[key] for key in sorted(values) if key[0] == m) for m in files)
    for row in grid:
        for file in row:
            _alike(folder, first, file)
    degrees = Degrees(tp, pp, dp, 3 if kinds == ["model3"] else 0)
    if not found["layer"]:
        modules = tuple({k: (row[0].name, v) for k, v in _module(folder, row[0]).items()} for row in grid)
        return Models(degrees, grid, modules)
    layers, by_rank = layers_of(folder, found["layer"], tp)
    shapes = [
        {name: shape for group in groups_of(folder, row[0]) for name, shape in group.items()}
        if row[0].value.get("param_shapes") is not None
        else {}
        for row in grid
    ]
    tables = tuple(
        stage_module(folder, by_rank[m % tp], shapes[m], set().union(*shapes)) for m in range(tp * pp)
    )
    return Models(degrees, grid, tables, layers)


def degrees_of(folder: Path, file: File, layers: Ranks) -> tuple[int, int, int]:
    """Tensor-, pipeline- and data-parallel degrees, as one file says them.

    Older files say the first two as one product; a pipeline's layers have a file a tensor-parallel rank.
    """
    value = file.value
    said = value.get("checkpoint_parallel_dimensions")
    both, dp = value.get("mp_world_size"), value.get("dp_world_size")
    tp: Any = both if not layers else max(key[0] for key in layers) + 1
    pp: Any = both // tp if type(both) is int and layers else 1
    if type(said) is dict:
        tp, pp = said.get("tp_degree"), said.get("pp_degree")
    if type(dp) is not int or not all(type(degree) is int and degree > 0 for degree in (tp, pp, dp)):
        raise broken(folder / file.name, f"degrees (tp, pp, dp) are {brief((tp, pp, dp))}")
    if tp * pp * dp > _MAX_RANKS:
        raise broken(folder / file.name, f"tp({tp}) * pp({pp}) * dp({dp}) > {_MAX_RANKS} ranks")
    if type(both) is int and both not in (tp, tp * pp):
        raise broken(folder / file.name, f"mp_world_size({both}) is neither tp({tp}) nor tp * pp({tp * pp})")
    return tp, pp, dp


def _alike(folder: Path, first: File, file: File) -> None:
    """What all ranks of a save say alike."""
    for key in ("ds_version", "dp_world_size", "mp_world_size", "global_steps"):
        mine, other = file.value.get(key), first.value.get(key)
        if mine != other:
            raise IndexMismatchError(
                "all files of a save are of one save",
                where=str(folder / file.name),
                equation=f"{key}({brief(mine)}) != {brief(other)} of {first.name}",
                hint="files of two saves were mixed; copy the whole folder again",
            )


def shapes_of(folder: Path, files: Sequence[File]) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the flat groups of one tensor-parallel rank, the same in all its files."""
    shapes = [groups_of(folder, file) for file in files]
    for file, found in zip(files, shapes, strict=True):
        if [list(group.items()) for group in found] != [list(group.items()) for group in shapes[0]]:
            raise IndexMismatchError(
                "the ranks of a save agree on the weights and their shapes",
                where=str(folder / file.name),
                equation=f"param_shapes differ from those of {files[0].name}",
                hint="files of two saves were mixed; copy the whole folder again",
            )
    return shapes[0]


def groups_of(folder: Path, file: File) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the weights of each flat group, in their order."""
    groups = file.value.get("param_shapes")
    if type(groups) is not list:
        raise broken(folder / file.name, f"param_shapes is {brief(groups)}")
    return [named_shapes(folder, file, group, "param_shapes") for group in groups]


def named_shapes(folder: Path, file: File, value: Any, what: str) -> dict[str, tuple[int, ...]]:
    """Shapes by name, checked to be that."""
    if type(value) is not dict:
        raise broken(folder / file.name, f"{what} is {brief(value)}")
    for name, shape in value.items():
        sizes = type(shape) is tuple and all(type(size) is int and size >= 0 for size in shape)
        if type(name) is not str or not sizes or "@" in name or name.startswith("optim/"):
            raise broken(folder / file.name, f"{what} of {brief(name)} is {brief(shape)}")
    return value


def _module(folder: Path, file: File) -> Mapping[str, Any]:
    module = file.value.get("module")
    if type(module) is not dict or not all(type(name) is str for name in module):
        raise FormatError(
            "model states hold the weights of the module",
            where=str(folder / file.name),
            equation=f"module is {brief(module)}",
            hint="a pipeline's weights are in layer_* files beside it; copy the whole folder",
        )
    return module


@dataclass(frozen=True, slots=True)
class Untrained:
    """What modules hold beside the weights of flat groups: buffers, frozen and shared weights.

    Attributes:
        tensors: Their arrays.
        names: Their names, without ``@``.
        buffers: Those that are buffers.
        shared: The name of the weight that a weight is, by its own.
        modules: By model-parallel rank what else the module holds: weights that are trained without ZeRO.
    """

    tensors: Mapping[str, StoredTensor]
    names: tuple[str, ...]
    buffers: tuple[str, ...]
    shared: Mapping[str, str]
    modules: tuple[Mapping[str, TensorAt], ...]

    @classmethod
    def of(cls, folder: Path, models: Models, trained: Sequence[Collection[str]] | None) -> Untrained:
        """From the files of model states.

        Args:
            folder: Of the save.
            models: Its model states.
            trained: By model-parallel rank the weights of flat groups; ``None`` where no file says which are
                trained: then all that are no buffers are left in ``modules``.

        Raises:
            FormatError, IndexMismatchError, GapError: As `read`.
        """
        tensors: dict[str, StoredTensor] = {}
        names: dict[str, None] = {}
        shared = shared_of(folder, models.grid[0][0])
        buffers = {name: None for row in models.grid for name in _buffers(folder, row[0])}
        every = set() if trained is None else {name for mine in trained for name in mine}
        left = []
        for rank, (files, module) in enumerate(zip(models.grid, models.modules, strict=True)):
            suffix, first = models.suffix(rank), files[0]
            frozen = _frozen_shapes(folder, first)
            rest: dict[str, tuple[str, TensorAt]] = {}
            for name, (where, tensor) in module.items():
                if name in every and name in shared:
                    raise broken(folder / where, f"weight {name!r} is trained, and is {shared[name]!r}")
                if name in every or name in frozen:
                    continue
                if type(tensor) is not TensorAt:
                    _check_extra(folder, where, name, tensor)
                elif name in shared:
                    _check_shared(folder, where, name, tensor, module.get(shared[name]))
                else:
                    rest[name] = where, tensor
            left.append({name: tensor for name, (_, tensor) in rest.items() if name not in buffers})
            for name, (where, tensor) in rest.items():
                if trained is None and name not in buffers:
                    continue
                if name not in buffers:
                    _check_values(folder, where, name, tensor)
                tensors.setdefault(f"{name}{suffix}", whole(f"{name}{suffix}", where, tensor))
                names[name] = None
            for name, shape in frozen.items():
                if name not in shared:
                    key = f"{name}{suffix}"
                    tensors[key] = _frozen(folder, files, module.get(name), name, shape, key)
                    names[name] = None
        kept = tuple(name for name in buffers if name in names)
        return cls(tensors, tuple(names), kept, shared, tuple(left))


def _frozen_shapes(folder: Path, file: File) -> dict[str, tuple[int, ...]]:
    value = file.value.get("frozen_param_shapes")
    return {} if value is None else named_shapes(folder, file, value, "frozen_param_shapes")


def shared_of(folder: Path, file: File) -> dict[str, str]:
    """The weights of a module that are other ones, by name the other's name."""
    found = file.value.get("shared_params") or {}
    if type(found) is not dict or not all(type(part) is str for pair in found.items() for part in pair):
        raise broken(folder / file.name, f"shared_params is {brief(found)}")
    # DeepSpeed tells them by their address, and weights without elements all have the same.
    empty = {name for name, shape in _frozen_shapes(folder, file).items() if 0 in shape}
    return {name: owner for name, owner in found.items() if name not in empty}


def _buffers(folder: Path, file: File) -> dict[str, None]:
    found = file.value.get("buffer_names") or []
    if type(found) is not list or not all(type(name) is str for name in found):
        raise broken(folder / file.name, f"buffer_names is {brief(found)}")
    return dict.fromkeys(found)


def _check_extra(folder: Path, where: str, name: str, value: Any) -> None:
    """A module's own extra state is no weight; TransformerEngine keeps ``None`` or bytes there."""
    if not name.endswith("_extra_state"):
        raise broken(folder / where, f"module entry {name!r} is {brief(value)}, not a tensor")


def _check_shared(
    folder: Path, where: str, name: str, tensor: TensorAt, owner: tuple[str, Any] | None
) -> None:
    """A shared weight holds the bytes of the one that it is."""
    if tensor.shape == (0,) or owner is None:  # the placeholder of ZeRO-3
        return
    if where != owner[0] or type(owner[1]) is not TensorAt or not same_bytes(folder, where, tensor, owner[1]):
        raise IndexMismatchError(
            "a shared weight is the weight that it is shared with",
            where=f"{folder / where}, weight {name!r}",
            equation="its bytes are not those of the other one",
            hint="the file was edited; tie the weights and save again",
        )


def _check_values(folder: Path, where: str, name: str, tensor: TensorAt) -> None:
    """A weight of a ZeRO-3 module that no group and no fragment holds has its values here, or nowhere."""
    if tensor.shape == (0,) and where.startswith("zero_"):
        raise IndexMismatchError(
            "each weight of a module lies in a flat group or in fragments",
            where=f"{folder / where}, weight {name!r}",
            equation="an empty placeholder, and in neither param_shapes nor frozen_param_shapes",
            hint="save without exclude_frozen_parameters",
        )


def _frozen(
    folder: Path,
    files: Sequence[File],
    held: tuple[str, Any] | None,
    name: str,
    shape: tuple[int, ...],
    key: str,
) -> StoredTensor:
    """A frozen weight: whole in the module up to ZeRO-2, a fragment a rank in ZeRO-3."""
    module = held[1] if held is not None and type(held[1]) is TensorAt else None
    if not math.prod(shape):
        return StoredTensor(key, "float32" if module is None else module.dtype, shape, ())
    fragments = [_fragment(folder, file, name) for file in files]
    dtype = fragments[0].dtype
    if held is not None and module is not None and (module.shape, module.dtype) == (shape, dtype):
        return whole(key, held[0], module)
    if len(files) == 1 and fragments[0].shape == shape:
        return whole(key, files[0].name, fragments[0])
    numel = math.prod(shape)
    slot, extents = -(-numel // len(files)), list[Extent]()
    for rank, (file, fragment) in enumerate(zip(files, fragments, strict=True)):
        if fragment.shape != (slot,) or fragment.strides is not None or fragment.dtype != dtype:
            raise IndexMismatchError(
                "each rank holds its fragment of a frozen weight",
                where=f"{folder / file.name}, weight {name!r} of shape {shape}",
                equation=f"{fragment.dtype} of shape {fragment.shape} on rank {rank}, "
                f"{dtype} of shape ({slot},) expected",
                hint="files of two saves were mixed; copy the whole folder again",
            )
        low, high = min(rank * slot, numel), min((rank + 1) * slot, numel)
        extents += run_extents(shape, low, high, file.name, fragment.start, dtype)
    return StoredTensor(key, dtype, shape, tuple(extents))


def _fragment(folder: Path, file: File, name: str) -> TensorAt:
    fragments = file.value.get("frozen_param_fragments")
    fragment = fragments.get(name) if type(fragments) is dict else None
    if type(fragment) is not TensorAt:
        raise broken(folder / file.name, f"frozen weight {name!r} has no fragment")
    return fragment


def rest_of_models(folder: Path, files: Sequence[File]) -> dict[str, Any]:
    """What files of model states hold beside weights, as `rest`."""
    return rest(folder, files, _KNOWN)


def rest(
    folder: Path, files: Sequence[File], known: Collection[str], *, inner: bool = False
) -> dict[str, Any]:
    """What files hold beside what is known, plain, by file; of files that say the same only the first.

    Args:
        folder: Of the save.
        files: The files.
        known: Keys of what is not wanted.
        inner: Take what lies in ``optimizer_state_dict`` too.
    """
    found: dict[str, Any] = {}
    for file in files:
        value = {**file.value, **(file.value["optimizer_state_dict"] if inner else {})}
        value = plain(folder, file, {key: part for key, part in value.items() if key not in known})
        if not any(value == other for other in found.values()):
            found[file.name] = value
    return found
