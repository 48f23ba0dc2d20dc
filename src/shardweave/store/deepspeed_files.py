"""The files of a DeepSpeed folder: what their names say, and what lies in them, read without running it.

A folder of one save (its *tag*) holds one file a kind and rank. Names are all that says which rank a file is
of, so each is parsed here, once, and what no name of DeepSpeed's is refused where it could be data.

Source: deepspeed 0.19.8 ``runtime/engine.py`` (``_get_ckpt_name`` and those beside it),
``runtime/pipe/module.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardweave.errors import FormatError, IndexMismatchError, MissingFileError, PathError
from shardweave.store import torch_save
from shardweave.store.manifest import ITEMSIZE, Extent, StoredTensor
from shardweave.store.paths import check_name, inside
from shardweave.store.pickles import Allow, Builder, Global, Instance, brief
from shardweave.store.pickles_write import to_plain
from shardweave.store.torch_dist import OBJECTS
from shardweave.store.torch_save import TensorAt
from shardweave.store.tracker import newest

_REBUILT: Final = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")


def _attributed(function: Any, kind: Any, args: Any, state: Any) -> TensorAt:
    """A tensor with attributes of Python's, which are no data: DeepSpeed hangs its bookkeeping on tensors."""
    known = type(function) is Global and function.module == "torch._utils" and function.name in _REBUILT
    if not known or function.builder is None or type(args) is not tuple:
        raise TypeError(f"a tensor with attributes is made by {brief(function)}")
    tensor: TensorAt = function.builder(*args)
    return tensor


def _attributed_parameter(tensor: Any, grad: Any, hooks: Any, state: Any) -> TensorAt:
    if type(tensor) is not TensorAt:
        raise TypeError("a parameter is made of something else than a tensor")
    return tensor


_NAMES: Final[Mapping[tuple[str, str], Builder | None]] = {
    ("torch._tensor", "_rebuild_from_type_v2"): _attributed,
    ("torch._utils", "_rebuild_parameter_with_state"): _attributed_parameter,
    ("torch", "Tensor"): None,
    ("torch.nn.parameter", "Parameter"): None,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): None,
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): None,
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): None,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): None,
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): None,
}
OPTIMIZER: Final = Allow({**OBJECTS.names, **_NAMES})
"""What a file of optimizer states may mention; all of it stays inert."""
MODEL: Final = Allow({**OBJECTS.names, **_NAMES}, others=True)
"""What a file of model states may mention: a script keeps objects of its own classes there."""

_PIECE: Final = 1 << 22

_KINDS: Final = {
    "model": r"mp_rank_(?P<tp>\d{1,6})_model_states\.pt",
    "model3": r"zero_pp_rank_(?P<dp>\d{1,6})_mp_rank_(?P<tp>\d{1,6})_model_states\.pt",
    "optim": r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d{1,6})_mp_rank_(?P<tp>\d{1,6})_optim_states\.pt",
    "expert": r"layer_(?P<layer>\d{1,6})_expert_(?P<expert>\d{1,6})_mp_rank_(?P<tp>\d{1,6})_model_states\.pt",
    "expert_optim": r"expp_rank_(?P<dp>\d{1,6})_mp_rank_(?P<tp>\d{1,6})_optim_states\.pt",
    "layer": r"layer_(?P<layer>\d{1,6})(?:-model_(?P<tp>\d{1,6}))?-model_states\.pt",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class File:
    """One file of a folder, with its value in which each tensor is a `TensorAt`."""

    name: str
    num_bytes: int
    value: Mapping[str, Any] = field(repr=False)


Ranks = Mapping[tuple[int, ...], str]
"""Names of files by the numbers in them: ``(tp,)``, ``(tp, dp)`` or ``(tp, layer, expert)``."""


def tag_folder(root: Path, file: str) -> Path:
    """The folder of the save that a tracker file names, or ``root`` itself without such a file.

    Raises:
        FormatError, PathError: The tracker holds no name of a folder inside ``root``.
        MissingFileError: There is no such folder.
    """
    tag, where = newest(root, file), str(root / file)
    if tag is None:
        return root
    check_name(tag, where=where)
    folder = inside(root, tag, where=where)
    if not folder.is_dir():
        raise MissingFileError(
            "a tracker file names a folder beside it",
            where=where,
            equation=f"folder {tag!r} is not there",
            hint="give the folder of another save; DeepSpeed writes the tracker last, so this one was moved",
        )
    return folder


def saved_folder(root: Path, file: str) -> Path | None:
    """The folder of a save that is to be recognised, or ``None`` where the tracker is not DeepSpeed's.

    Raises:
        PathError, MissingFileError: It is, and names no folder beside it.
    """
    if not root.is_dir():
        return None
    try:
        return tag_folder(root, file)
    except (PathError, MissingFileError):
        if any(root.glob("*/*mp_rank_*_model_states.pt")):
            raise
        return None


def listed(folder: Path) -> dict[str, dict[tuple[int, ...], str]]:
    """The files of a folder by kind and rank.

    Returns:
        For each of ``model``, ``model3`` (one a ZeRO-3 rank), ``optim``, ``expert``, ``expert_optim`` and
        ``layer`` the names by the numbers in them.

    Raises:
        FormatError: Files that look like state and have no name of DeepSpeed's, or two of one rank.
    """
    found: dict[str, dict[tuple[int, ...], str]] = {kind: {} for kind in _KINDS}
    for name in sorted(path.name for path in folder.iterdir()):
        if not name.endswith("_states.pt"):
            if name == "offloaded_tensors":
                raise FormatError(
                    "the states of a save are in its files",
                    where=str(folder / name),
                    equation="states were kept on NVMe, and lie there as swapped buffers",
                    hint="load the save with DeepSpeed without offload to NVMe, and save it again",
                )
            continue
        for kind, pattern in _KINDS.items():
            if match := re.fullmatch(pattern, name):
                part = match.groupdict(default="0")
                keys = [key for key in ("tp", "dp", "layer", "expert") if key in part]
                rank = tuple(int(part[key]) for key in keys)
                if rank in found[kind]:
                    raise FormatError(
                        "a rank has one file of a kind",
                        where=str(folder),
                        equation=f"{found[kind][rank]!r} and {name!r} are both of rank {rank}",
                        hint="two saves were written into one folder; take away the files of the older one",
                    )
                found[kind][rank] = name
                break
        else:
            raise FormatError(
                "a file of states has a name of DeepSpeed's",
                where=str(folder / name),
                equation=f"{name!r} is of no known kind",
                hint="nothing is left out silently; move it away if it does not belong to the save",
            )
    return found


def complete(folder: Path, found: Ranks, wanted: Iterable[tuple[int, ...]], pattern: str) -> None:
    """All files of a kind are there, and no other; ``pattern`` spells one for the message."""
    expected = set(wanted)
    if missing := sorted(expected - set(found)):
        names = [pattern.format(*rank) for rank in missing[:20]]
        raise MissingFileError(
            "each rank of a save wrote its file",
            where=str(folder),
            equation=f"missing {len(missing)} of {len(expected)}: {', '.join(names)}",
            hint="copy the whole folder; if ranks wrote to disks of their own, gather them",
        )
    if extra := sorted(set(found) - expected):
        raise IndexMismatchError(
            "a save has as many files as it says that it had ranks",
            where=str(folder),
            equation=f"{len(found)} files, {len(expected)} ranks; {found[extra[0]]!r} is of none",
            hint="two saves at other degrees were written into one folder; take away the older one",
        )


def load(folder: Path, name: str, *, allow: Allow) -> File:
    """A file whose value is a dict; no tensor is read.

    Raises:
        PickleError, FormatError, TruncatedError, DtypeError: As `torch_save.load`.
    """
    value, size = load_value(folder, name, allow=allow)
    if type(value) is not dict:
        raise broken(folder / name, f"it holds {brief(value)}, not a dict")
    return File(name, size, value)


def load_value(folder: Path, name: str, *, allow: Allow) -> tuple[Any, int]:
    """A file's value, and the file's size; no tensor is read.

    Raises:
        PickleError, FormatError, TruncatedError, DtypeError: As `torch_save.load`.
    """
    path = inside(folder, name, where=str(folder))
    size = path.stat().st_size
    with path.open("rb") as file:
        if not size:
            value = torch_save.load(b"", 0, 0, allow=allow, where=str(path))
        else:
            with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
                value = torch_save.load(data, 0, size, allow=allow, where=str(path))
    return value, size


def plain(folder: Path, file: File, value: Any) -> Any:
    """A part of a file's value as plain values, small tensors included."""
    with (folder / file.name).open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
        return torch_save.to_plain(value, data, where=str(folder / file.name))


def broken(path: Path | str, equation: str) -> FormatError:
    """The error for a file that is not as DeepSpeed writes it."""
    return FormatError(
        "a file of a save has the form that DeepSpeed gives it",
        where=str(path),
        equation=equation,
        hint="forms of 0.19 and near it are read; save it once more with a current DeepSpeed",
    )


def number(folder: Path, name: str, value: Any, what: str) -> int:
    """A count of updates, stored as a number or as a tensor of one element."""
    got: Any = value
    if type(value) is TensorAt and math.prod(value.shape) == 1:
        got = _one(folder, name, value)
    if type(got) is float and got.is_integer():
        got = int(got)
    if type(got) is not int or got < 0:
        raise broken(folder / name, f"{what} is {brief(got)}, not a count")
    return got


def _one(folder: Path, name: str, tensor: TensorAt) -> Any:
    kinds = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "int64": "<i8", "int32": "<i4"}
    if tensor.dtype not in kinds:
        return None
    with (folder / name).open("rb") as file:
        file.seek(tensor.start)
        return np.frombuffer(file.read(ITEMSIZE[tensor.dtype]), kinds[tensor.dtype])[0].item()


def settings(folder: Path, file: File, group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group of parameters as plain values; tensors of one element as numbers."""
    found = {}
    for key, value in group.items():
        if key == "params":
            continue
        single = type(value) is TensorAt and math.prod(value.shape) == 1
        found[key] = _one(folder, file.name, value) if single else value
    result: dict[str, Any] = to_plain(found, where=f"{folder / file.name}, settings of a group")
    return result


def members_of(folder: Path, file: File, groups: Sequence[Any]) -> list[list[int]]:
    """The numbers that each group of parameters lists."""
    members = [group.get("params") if type(group) is dict else None for group in groups]
    found = [part for part in members if type(part) is list and all(type(i) is int for i in part)]
    if len(found) != len(members):
        raise broken(folder / file.name, "a group of parameters lists none")
    return found


def stage_of(value: Any) -> int | None:
    """A ZeRO stage, a number or a member of DeepSpeed's enumeration."""
    if type(value) is Instance and value.cls.name == "ZeroStageEnum" and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is int else None


def whole(key: str, name: str, tensor: TensorAt, shape: tuple[int, ...] | None = None) -> StoredTensor:
    """An array that is one tensor of a file; ``shape`` is that of the array where the file has it flat."""
    shape = tensor.shape if shape is None else shape
    if not math.prod(shape):
        return StoredTensor(key, tensor.dtype, shape, ())
    extent = Extent((0,) * len(shape), shape, name, tensor.start, tensor.strides)
    return StoredTensor(key, tensor.dtype, shape, (extent,))


def same_bytes(folder: Path, name: str, a: TensorAt, b: TensorAt) -> bool:
    """Whether two dense tensors of a file hold the same bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.strides is not None or b.strides is not None:
        return False
    if a.start == b.start:
        return True
    with (folder / name).open("rb") as file:
        for at in range(0, a.num_bytes, _PIECE):
            pieces = []
            for tensor in (a, b):
                file.seek(tensor.start + at)
                pieces.append(file.read(min(_PIECE, tensor.num_bytes - at)))
            if pieces[0] != pieces[1]:
                return False
    return True
