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
    interval,
    load,
    plain,
    same_bytes,
    whole,
)
from shardweave.store.manifest import Extent, StoredTensor
from shardweave.store.pickles import brief
from shardweave.store.torch_save import TensorAt

_KNOWN = frozenset(
    (
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "universal_checkpoint_info",
    )
)  # fmt: skip


def suffix_of(tp: int, degree: int) -> str:
    """What stands behind the names of a tensor-parallel rank's arrays."""
    return f"@{tp}" if degree > 1 else ""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of a save, and its stage where the names of its files say it (3), else 0."""

    tp: int
    dp: int
    stage: int


def model_files(folder: Path, found: Mapping[str, Ranks]) -> tuple[list[list[File]], Degrees]:
    """The files of model states by tensor-parallel rank, one each, or with ZeRO-3 one a data-parallel rank.

    Args:
        folder: Of the save.
        found: From `listed`.

    Raises:
        MissingFileError, IndexMismatchError, FormatError: As `read`.
    """
    if found["layer"]:
        raise FormatError(
            "a save holds its weights in files of model states",
            where=str(folder / next(iter(found["layer"].values()))),
            equation="weights lie in a file a layer: a PipelineModule",
            hint="load it with DeepSpeed and save the module's state_dict; pipelines are not read",
        )
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
    tp = max(key[0] for key in names) + 1
    first = load(folder, names[min(names)], allow=MODEL)
    said_tp, said_dp = _degrees(folder, first)
    if kinds == ["model"]:
        complete(folder, names, [(k,) for k in range(max(tp, said_tp))], "mp_rank_{0:02d}_model_states.pt")
        dp = said_dp
    else:
        dp = max(said_dp, max(key[1] for key in names) + 1)
        wanted = [(k, d) for k in range(max(tp, said_tp)) for d in range(dp)]
        complete(folder, names, wanted, "zero_pp_rank_{1}_mp_rank_{0:02d}_model_states.pt")
    if (tp, dp) != (said_tp, said_dp):
        raise IndexMismatchError(
            "a save has as many files as it says that it had ranks",
            where=str(folder / first.name),
            equation=f"it says tp({said_tp}), dp({said_dp}); files are of tp({tp}), dp({dp})",
            hint="two saves at other degrees were written into one folder; take away the older one",
        )
    grid = [
        [
            first if key == min(names) else load(folder, names[key], allow=MODEL)
            for key in names
            if key[0] == k
        ]
        for k in range(tp)
    ]
    for files in grid:
        for file in files:
            _alike(folder, first, file)
    return grid, Degrees(tp, dp, 3 if kinds == ["model3"] else 0)


def _degrees(folder: Path, file: File) -> tuple[int, int]:
    value = file.value
    degrees = value.get("checkpoint_parallel_dimensions")
    pp = degrees.get("pp_degree", 1) if type(degrees) is dict else 1
    tp, dp = value.get("mp_world_size"), value.get("dp_world_size")
    if type(degrees) is dict and type(degrees.get("tp_degree")) is int:
        tp = degrees["tp_degree"]
    if type(tp) is not int or type(dp) is not int or min(tp, dp) < 1:
        raise broken(folder / file.name, f"mp_world_size is {brief(tp)}, dp_world_size {brief(dp)}")
    if pp != 1:
        raise FormatError(
            "the ranks of a save are tensor- and data-parallel",
            where=str(folder / file.name),
            equation=f"pp_degree({brief(pp)}) != 1",
            hint="convert it with DeepSpeed's ds_to_universal, and read the universal checkpoint",
        )
    return tp, dp


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


def module_of(folder: Path, file: File) -> Mapping[str, Any]:
    """The weights and buffers of a module."""
    module = file.value.get("module")
    if type(module) is not dict or not all(type(name) is str for name in module):
        raise FormatError(
            "model states hold the weights of the module",
            where=str(folder / file.name),
            equation=f"module is {brief(module)}",
            hint="a pipeline keeps its weights elsewhere; load it with DeepSpeed, save the state_dict",
        )
    return module


@dataclass(frozen=True, slots=True)
class Untrained:
    """What a module holds beside the weights of flat groups: buffers, frozen and shared weights.

    Attributes:
        tensors: Their arrays.
        names: Their names, without ``@``.
        buffers: Those that are buffers.
        shared: The name of the weight that a weight is, by its own.
        modules: By tensor-parallel rank what else the module holds: weights that are trained without ZeRO.
    """

    tensors: Mapping[str, StoredTensor]
    names: tuple[str, ...]
    buffers: tuple[str, ...]
    shared: Mapping[str, str]
    modules: tuple[Mapping[str, TensorAt], ...]

    @classmethod
    def of(
        cls, folder: Path, grid: Sequence[Sequence[File]], trained: Sequence[Collection[str]] | None
    ) -> Untrained:
        """From the files of model states, by tensor-parallel rank.

        Args:
            folder: Of the save.
            grid: Its files of model states.
            trained: By tensor-parallel rank the weights of flat groups; ``None`` where no file says which are
                trained: then all that are no buffers are left in ``modules``.

        Raises:
            FormatError, IndexMismatchError, GapError: As `read`.
        """
        tensors: dict[str, StoredTensor] = {}
        names: dict[str, None] = {}
        # DeepSpeed tells shared weights by their address, and those without elements all have the same.
        shapes = grid[0][0].value.get("frozen_param_shapes")
        named = shapes.items() if type(shapes) is dict else ()
        empty = {name for name, shape in named if type(shape) is tuple and 0 in shape}
        shared = {name: owner for name, owner in shared_of(folder, grid[0][0]).items() if name not in empty}
        buffers = _buffers(folder, grid[0][0])
        modules = []
        for tp, files in enumerate(grid):
            suffix = suffix_of(tp, len(grid))
            first, module = files[0], module_of(folder, files[0])
            mine = () if trained is None else trained[tp]
            frozen = {}
            if first.value.get("frozen_param_shapes") is not None:
                value = first.value["frozen_param_shapes"]
                frozen = named_shapes(folder, first, value, "frozen_param_shapes")
            rest: dict[str, TensorAt] = {}
            for name, tensor in module.items():
                if name in mine and name in shared:
                    raise broken(folder / first.name, f"weight {name!r} is trained, and is {shared[name]!r}")
                if name in mine or name in frozen:
                    continue
                if type(tensor) is not TensorAt:
                    _check_extra(folder, first, name, tensor)
                    continue
                if name in shared:
                    _check_shared(folder, first, name, tensor, module.get(shared[name]))
                    continue
                rest[name] = tensor
            modules.append({name: tensor for name, tensor in rest.items() if name not in buffers})
            kept = rest if trained is not None else {n: t for n, t in rest.items() if n in buffers}
            for name, tensor in kept.items():
                if name not in buffers:
                    _check_values(folder, first, name, tensor)
                tensors[f"{name}{suffix}"] = whole(f"{name}{suffix}", first.name, tensor)
                names[name] = None
            for name, shape in frozen.items():
                if name in shared:
                    continue
                tensors[f"{name}{suffix}"] = _frozen(folder, files, name, shape, f"{name}{suffix}")
                names[name] = None
        return cls(tensors, tuple(names), tuple(b for b in buffers if b in names), shared, tuple(modules))


def shared_of(folder: Path, file: File) -> dict[str, str]:
    """The weights of a module that are other ones, by name the other's name."""
    found = file.value.get("shared_params") or {}
    if type(found) is not dict or not all(type(part) is str for pair in found.items() for part in pair):
        raise broken(folder / file.name, f"shared_params is {brief(found)}")
    return found


def _buffers(folder: Path, file: File) -> dict[str, None]:
    found = file.value.get("buffer_names") or []
    if type(found) is not list or not all(type(name) is str for name in found):
        raise broken(folder / file.name, f"buffer_names is {brief(found)}")
    return dict.fromkeys(found)


def _check_extra(folder: Path, file: File, name: str, value: Any) -> None:
    """A module's own extra state is no weight; TransformerEngine keeps ``None`` or bytes there."""
    if not name.endswith("_extra_state"):
        raise broken(folder / file.name, f"module entry {name!r} is {brief(value)}, not a tensor")


def _check_shared(folder: Path, file: File, name: str, tensor: TensorAt, owner: TensorAt | None) -> None:
    """A shared weight holds the bytes of the one that it is."""
    if tensor.shape == (0,) or owner is None:  # the placeholder of ZeRO-3
        return
    if not same_bytes(folder, file.name, tensor, owner):
        raise IndexMismatchError(
            "a shared weight is the weight that it is shared with",
            where=f"{folder / file.name}, weight {name!r}",
            equation="its bytes are not those of the other one",
            hint="the file was edited; tie the weights and save again",
        )


def _check_values(folder: Path, file: File, name: str, tensor: TensorAt) -> None:
    """A weight of a ZeRO-3 module that no group and no fragment holds has its values here, or nowhere."""
    if tensor.shape == (0,) and file.name.startswith("zero_"):
        raise IndexMismatchError(
            "each weight of a module lies in a flat group or in fragments",
            where=f"{folder / file.name}, weight {name!r}",
            equation="an empty placeholder, and in neither param_shapes nor frozen_param_shapes",
            hint="save without exclude_frozen_parameters",
        )


def _frozen(folder: Path, files: Sequence[File], name: str, shape: tuple[int, ...], key: str) -> StoredTensor:
    """A frozen weight: whole in the module up to ZeRO-2, a fragment a rank in ZeRO-3."""
    first = files[0]
    if not math.prod(shape):
        empty = module_of(folder, first).get(name)
        return StoredTensor(key, empty.dtype if type(empty) is TensorAt else "float32", shape, ())
    fragments = [_fragment(folder, file, name) for file in files]
    if len(files) == 1 and fragments[0].shape == shape:
        held = module_of(folder, first).get(name)
        if type(held) is TensorAt and (held.shape, held.dtype) == (shape, fragments[0].dtype):
            return whole(key, first.name, held)
        return whole(key, first.name, fragments[0])
    numel = math.prod(shape)
    slot, extents = -(-numel // len(files)), list[Extent]()
    for rank, (file, fragment) in enumerate(zip(files, fragments, strict=True)):
        if fragment.shape != (slot,) or fragment.strides is not None or fragment.dtype != fragments[0].dtype:
            raise IndexMismatchError(
                "each rank holds its fragment of a frozen weight",
                where=f"{folder / file.name}, weight {name!r} of shape {shape}",
                equation=f"{fragment.dtype} of shape {fragment.shape} on rank {rank}, "
                f"{fragments[0].dtype} of shape ({slot},) expected",
                hint="files of two saves were mixed; copy the whole folder again",
            )
        low, high = min(rank * slot, numel), min((rank + 1) * slot, numel)
        extents += interval(shape, low, high, file.name, fragment.start, fragment.dtype)
    return StoredTensor(key, fragments[0].dtype, shape, tuple(extents))


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
