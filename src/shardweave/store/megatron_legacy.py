"""Megatron's older checkpoints, a folder for each rank of the model, read in place.

    ``iter_NNNNNNN/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``   the weights of the rank, its states where the
                                optimizer is not distributed, and what a run needs beside them
    ``.../distrib_optim.pt``    the states of the distributed optimizer, one flat array a buffer and state

PPP is there where the model has pipeline stages, EEE where it spreads experts; which of the two a single
number is, the arguments say that lie in the file. Arrays are named after the module and, where there are
several ranks, the rank: ``{name}@{rank}``. What is not an array is kept as plain values.

Source: Megatron-LM ``training/checkpointing.py``; megatron-core 0.16.1,
``optimizer/{optimizer,distrib_optimizer}.py``.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Final

from shardweave.errors import FormatError, MissingFileError, ShardweaveError, TruncatedError
from shardweave.store import torch_save
from shardweave.store.manifest import Extent, Manifest, StoredTensor
from shardweave.store.megatron_groups import MASTER
from shardweave.store.paths import inside
from shardweave.store.pickles import Allow, Global, Instance
from shardweave.store.strict_json import some
from shardweave.store.torch_dist import OBJECTS, TRACKER, iteration_folder
from shardweave.store.torch_save import TensorAt
from shardweave.store.tracker import newest

WEIGHTS: Final = "model_optim_rng.pt"
STATES: Final = "distrib_optim.pt"
RECORD: Final = "legacy"
"""The record with a `Legacy`."""

_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


def _with_attributes(make: Any, kind: Any, args: Any, attributes: Any) -> Any:
    """A tensor on which Megatron hung attributes; they are no data."""
    if type(make) is not Global or make.module != "torch._utils" or make.builder is None:
        raise TypeError("a tensor is made by something else than torch")
    return make.builder(*args)


_ALLOWED: Final = Allow(
    {
        **OBJECTS.names,
        ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
        ("torch", "Tensor"): None,
        ("torch.nn.parameter", "Parameter"): None,
    },
    others=True,
)
_DEGREES: Final = (("tp", "tensor_model"), ("pp", "pipeline_model"), ("ep", "expert_model"))


@dataclass(frozen=True, slots=True)
class Flat:
    """States of the distributed optimizer: a buffer of one rank, its buckets end to end without padding.

    Attributes:
        chained: The number of the optimizer.
        buffer: The number of the buffer.
        dtype: The dtype of its parameters.
        size: Its elements.
        states: The key of its array by state.
    """

    chained: int
    buffer: int
    dtype: str
    size: int
    states: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Apart:
    """States of an optimizer that is not distributed, in the order of its groups of parameters.

    Attributes:
        chained: The number of the optimizer.
        groups: For each group the keys of its arrays by state, parameter by parameter.
        masters: For each group the keys of the masters of its rounded parameters.
    """

    chained: int
    groups: tuple[tuple[Mapping[str, str], ...], ...]
    masters: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank of the model stored.

    Attributes:
        at: Its coordinates.
        names: For each chunk of the model the names of its arrays, in the order of the modules.
        flat: The buffers of its distributed optimizer.
        apart: Its optimizers where they are not distributed.
    """

    at: Mapping[str, int]
    names: tuple[tuple[str, ...], ...]
    flat: tuple[Flat, ...]
    apart: tuple[Apart, ...]


@dataclass(frozen=True, slots=True)
class Legacy:
    """The ranks of a checkpoint.

    Attributes:
        degrees: ``tp``, ``pp`` and ``ep``.
        ranks: Along tp, then ep, then pp.
    """

    degrees: Mapping[str, int]
    ranks: tuple[Rank, ...]

    def key(self, rank: int, name: str) -> str:
        """The key of an array of a rank."""
        return name if len(self.ranks) == 1 else f"{name}@{rank}"


def is_legacy(root: Path) -> bool:
    """Whether a folder, or the iteration that its tracker names, has folders of ranks."""
    return any(_FOLDER.fullmatch(path.name) for path in _iteration(root).glob("mp_rank_*"))


def _iteration(root: Path) -> Path:
    said = newest(root, TRACKER)
    return root if said is None else root / iteration_folder(said, where=str(root / TRACKER))


def read(root: Path) -> Manifest:
    """What the folders of all ranks hold; the arrays are not touched.

    Returns:
        The manifest; ``format`` is ``"megatron"``. Its ``records``: ``legacy``, a `Legacy`; ``common``, what
        rank 0 has beside weights and states, and its ``optimizer`` without tensors; ``ranks``, the same of
        the other ranks.

    Raises:
        MissingFileError: A rank is not there.
        FormatError: Folders and arguments contradict each other, or the file is of another kind.
        PickleError: A file names something outside the allow-list.
        TruncatedError: A file ends early.
    """
    root = _iteration(Path(root))
    folders = {
        path.name: match.groups()
        for path in sorted(root.glob("mp_rank_*"))
        if (match := _FOLDER.fullmatch(path.name)) and path.is_dir()
    }
    if not folders:
        raise MissingFileError(
            "an older Megatron checkpoint has a folder for each rank",
            where=str(root),
            equation="no mp_rank_* is there",
            hint="give the folder of one iteration, iter_*",
        )
    values: dict[str, dict[str, Any]] = {}
    sizes: dict[str, int] = {}
    for folder in folders:
        name = f"{folder}/{WEIGHTS}"
        with _opened(root, name) as data:
            values[folder] = _dict(_loaded(data, f"{root / name}"), f"{root / name}")
            sizes[name] = len(data)
    degrees, at = _degrees(root, folders, values)
    order = sorted(folders, key=lambda folder: [at[folder][axis] for axis in ("pp", "ep", "tp")])
    tensors: dict[str, StoredTensor] = {}
    ranks: list[Rank] = []
    beside: list[dict[str, Any]] = []
    for number, folder in enumerate(order):
        reading = _Reading(root, folder, "" if len(order) == 1 else f"@{number}", tensors, sizes)
        ranks.append(reading.rank(at[folder], values[folder]))
        beside.append(reading.beside)
    for number, (rank, one) in enumerate(zip(ranks, beside, strict=True)):
        # Ranks that differ along tp alone have the same modules.
        twin = next(n for n, other in enumerate(ranks) if {**other.at, "tp": 0} == {**rank.at, "tp": 0})
        for first, same in ((0, False), (twin, True)):
            _check_alike(beside[first], one, same=same, where=f"{root / order[number] / WEIGHTS}")
    records = {
        RECORD: Legacy(degrees, tuple(ranks)),
        "common": beside[0],
        "ranks": {number: one for number, one in enumerate(beside) if number},
    }
    return Manifest(root, "megatron", tensors, sizes, records)


def _check_alike(first: Mapping[str, Any], other: Mapping[str, Any], *, same: bool, where: str) -> None:
    """Two ranks were saved at one iteration, and groups of both are set alike; of the ``same`` all are."""
    mine, theirs = dict(_set(first)), dict(_set(other))
    odd = next((key for key, value in theirs.items() if mine.get(key, value) != value), None)
    if same and odd is None:
        odd = next(iter(mine.keys() ^ theirs.keys()), None)
    if first.get("iteration") != other.get("iteration") or odd is not None:
        raise FormatError(
            "all ranks were saved together",
            where=where,
            equation=f"iteration({other.get('iteration')!r:.40}) != iteration({first.get('iteration')!r:.40})"
            if odd is None
            else f"the settings or the step of group {odd} are not those of another rank",
            hint="folders of two saves were mixed; copy one of them",
        )


def _set(beside: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The settings of each group of parameters, by what makes it a group."""
    said = beside.get("optimizer", {})
    optimizers = said if said and all(type(key) is int for key in said) else {0: said}
    for number, one in optimizers.items():
        for group in one.get("optimizer", {}).get("param_groups", ()):
            if isinstance(group, Mapping):
                what = tuple(
                    str(group.get(key))
                    for key in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
                )
                yield (number, what), {key: value for key, value in group.items() if key != "params"}


def _degrees(
    root: Path, folders: Mapping[str, Sequence[str | None]], values: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """The degrees, and the coordinates of each folder."""
    said: dict[str, int] = {}
    for folder, value in values.items():
        args = value.get("args")
        state = args.state if isinstance(args, Instance) and isinstance(args.state, dict) else {}
        for axis, word in _DEGREES:
            degree = state.get(f"{word}_parallel_size", 1 if axis == "ep" and state else None)
            if type(degree) is not int or degree < 1:
                continue
            if said.setdefault(axis, degree) != degree:
                raise FormatError(
                    "all ranks were of one job",
                    where=f"{root / folder / WEIGHTS}, argument {word}_parallel_size",
                    equation=f"{axis}({degree}) != {axis}({said[axis]}) of another rank",
                    hint="folders of two jobs were mixed; copy one of them",
                )
    numbers = {sum(part is not None for part in parts) for parts in folders.values()}
    if len(numbers) != 1:
        raise FormatError(
            "the folders of all ranks have names of one form",
            where=str(root),
            equation=f"they have {some(map(str, sorted(numbers)))} numbers: {some(folders)}",
            hint="folders of two jobs were mixed; copy one of them",
        )
    (count,) = numbers
    axes = ["tp", *(axis for axis in ("pp", "ep") if said.get(axis, 1) > 1)]
    if len(said) < len(_DEGREES) and count == 2:
        raise FormatError(
            "arguments say what the second number of a folder is",
            where=str(root),
            equation=f"{next(iter(folders))} may be of a pipeline stage or of a group of experts",
            hint="the files record no arguments; save them again with a newer Megatron",
        )
    if len(said) < len(_DEGREES):
        axes = ["tp"] if count == 1 else ["tp", "pp", "ep"]
    if len(axes) != count:
        raise FormatError(
            "the folder of a rank has a number for each way in which the model is cut",
            where=str(root),
            equation=f"{next(iter(folders))} has {count} numbers, for {', '.join(axes)} of "
            + ", ".join(f"{axis}({n})" for axis, n in said.items()),
            hint="folders were renamed; copy them again",
        )
    at = {
        folder: {"pp": 0, "ep": 0}
        | {axis: int(part) for axis, part in zip(axes, parts, strict=False) if part is not None}
        for folder, parts in folders.items()
    }
    found = {axis: 1 + max(one[axis] for one in at.values()) for axis, _ in _DEGREES}
    degrees = {axis: said.get(axis, found[axis]) for axis, _ in _DEGREES}
    wanted = itertools.product(*(range(degrees[axis]) for axis, _ in _DEGREES))
    there = {tuple(one[axis] for axis, _ in _DEGREES) for one in at.values()}
    missing = [place for place in wanted if place not in there]
    if missing or found != degrees:
        raise MissingFileError(
            "every rank of the model has its folder",
            where=str(root),
            equation=", ".join(f"{axis}({n})" for axis, n in degrees.items())
            + f": {len(there)} folders; missing (tp, pp, ep) "
            + (some(map(str, missing)) or f"none, but there are ranks beyond, up to {found}"),
            hint="copy the folders of all ranks; where experts have an etp of their own not all are written, "
            "and such checkpoints are not read",
        )
    return degrees, at


# --- one rank -----------------------------------------------------------------------------------


class _Reading:
    """What is made of the files of one rank."""

    def __init__(
        self, root: Path, folder: str, suffix: str, tensors: dict[str, StoredTensor], sizes: dict[str, int]
    ) -> None:
        self.root, self.folder, self.suffix = root, folder, suffix
        self.tensors, self.sizes = tensors, sizes
        self.beside: dict[str, Any] = {}

    def rank(self, at: Mapping[str, int], value: dict[str, Any]) -> Rank:
        where = f"{self.root / self.folder / WEIGHTS}"
        chunks = [key for key in value if re.fullmatch(r"model\d*", key)]
        if chunks != (["model"] if "model" in chunks else [f"model{n}" for n in range(len(chunks))]):
            raise FormatError(
                "a rank has the chunks of its model in order",
                where=where,
                equation=f"it has {some(map(repr, chunks)) or 'none'}",
                hint="save it again with Megatron-LM",
            )
        names = []
        for chunk in chunks:
            prefix = "" if chunk == "model" else f"{chunk}."
            names.append(tuple(self._weights(prefix, _dict(value[chunk], f"{where}, {chunk!r}"), where)))
        optimizer = value.get("optimizer")
        chained = optimizer if isinstance(optimizer, list) else [optimizer] if optimizer is not None else []
        rest = {key: one for key, one in value.items() if key not in (*chunks, "optimizer")}
        with _opened(self.root, f"{self.folder}/{WEIGHTS}") as data:
            self.beside = torch_save.to_plain(rest, data, where=where)
            apart = tuple(self._apart_or_not(n, one, data, where) for n, one in enumerate(chained))
        plain = [one for one, _ in apart]
        if plain:
            self.beside["optimizer"] = plain[0] if len(plain) == 1 else dict(enumerate(plain))
        return Rank(at, tuple(names), self._flats(), tuple(one for _, one in apart if one is not None))

    def _add(self, key: str, tensor: Any, file: str, where: str) -> str:
        if type(tensor) is not TensorAt or tensor.strides is not None:
            raise FormatError(
                "weights and states are dense tensors",
                where=f"{where}, {key!r}",
                equation=f"found {'a strided one' if type(tensor) is TensorAt else type(tensor).__name__}",
                hint="save it again with Megatron-LM; views of other strides are not read",
            )
        key = f"{key}{self.suffix}"
        box = Extent((0,) * len(tensor.shape), tensor.shape, f"{self.folder}/{file}", tensor.start)
        extents = (box,) if math.prod(tensor.shape) else ()
        self.tensors[key] = StoredTensor(key, tensor.dtype, tensor.shape, extents)
        return key

    def _weights(self, prefix: str, model: Mapping[str, Any], where: str) -> Iterator[str]:
        for name, tensor in model.items():
            if isinstance(tensor, dict):
                raise FormatError(
                    "weights are under the names of megatron-core's modules",
                    where=f"{where}, {name!r}",
                    equation="it holds a dict of its own",
                    hint="a model from before megatron-core; convert it with Megatron-LM's tools first",
                )
            if type(tensor) is TensorAt and not name.endswith("._extra_state"):
                self._add(f"{prefix}{name}", tensor, WEIGHTS, where)
                yield name

    def _apart_or_not(
        self, chained: int, said: Any, data: torch_save.Buffer, where: str
    ) -> tuple[dict[str, Any], Apart | None]:
        try:
            return self._apart(chained, _dict(said, where), data, where)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            if isinstance(error, ShardweaveError):
                raise
            raise _unknown(error, f"{where}, 'optimizer'") from error

    def _apart(
        self, chained: int, said: Mapping[str, Any], data: torch_save.Buffer, where: str
    ) -> tuple[dict[str, Any], Apart | None]:
        """The plain part of an optimizer, and its states where they are here."""
        inner = _dict(said.get("optimizer", said), where)
        groups, state = inner.get("param_groups"), inner.get("state") or {}
        if not isinstance(groups, list) or not isinstance(state, dict):
            raise FormatError(
                "the state of an optimizer has groups of parameters",
                where=f"{where}, 'optimizer'",
                equation=f"param_groups is a {type(groups).__name__}, state a {type(state).__name__}",
                hint="save it again with Megatron-LM, or convert the weights alone with --weights-only",
            )
        steps = {_number(one["step"], data) for one in state.values() if "step" in one}
        if len(steps) > 1:
            raise FormatError(
                "Megatron counts the updates of all weights together",
                where=f"{where}, 'optimizer'",
                equation=f"steps {some(map(str, sorted(steps)))}",
                hint="convert the weights alone with --weights-only",
            )
        plain_groups = torch_save.to_plain(groups, data, where=where)
        plain: dict[str, Any] = {"optimizer": {"param_groups": plain_groups}}
        if steps:
            plain["optimizer"]["state"] = {"common_step": steps.pop()}
        if "grad_scaler" in said:
            plain["grad_scaler"] = torch_save.to_plain(said["grad_scaler"], data, where=where)
        if not state:
            return plain, None
        begin = f"apart/{chained}"
        found = tuple(
            tuple(
                {
                    key: self._add(f"{begin}/{number}/{key}", tensor, WEIGHTS, where)
                    for key, tensor in state[number].items()
                    if key != "step"
                }
                for number in group["params"]
            )
            for group in groups
        )
        masters = tuple(
            tuple(
                self._add(f"{begin}/{g}.{n}/{MASTER}", tensor, WEIGHTS, where)
                for n, tensor in enumerate(group)
            )
            for g, group in enumerate(said.get("fp32_from_fp16_params", [()] * len(groups)))
        )
        return plain, Apart(chained, found, masters)

    def _flats(self) -> tuple[Flat, ...]:
        try:
            return tuple(self._flat())
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ShardweaveError):
                raise
            raise _unknown(error, f"{self.root / self.folder / STATES}") from error

    def _flat(self) -> Iterator[Flat]:
        name = f"{self.folder}/{STATES}"
        if not (self.root / name).is_file():
            return
        where = f"{self.root / name}"
        with _opened(self.root, name) as data:
            value = _loaded(data, where)
            self.sizes[name] = len(data)
        for chained, one in enumerate(value if isinstance(value, list) else [value]):
            buffers = {} if one is None else dict(_dict(one, where))
            if one is not None and buffers.pop("buckets_coalesced", None) is not True:
                raise FormatError(
                    "the states of a buffer are one array each",
                    where=where,
                    equation="buckets_coalesced is not there",
                    hint="this is from before February 2024; load and save it with a newer Megatron-LM, or "
                    "convert the weights alone with --weights-only",
                )
            for buffer, by_dtype in buffers.items():
                ((dtypes, states),) = _dict(by_dtype, where).items()
                dtype = dtypes[0].name if type(dtypes) is tuple and type(dtypes[0]) is Global else "?"
                size = states.get("numel_unpadded")
                keys = {
                    MASTER if state == "param" else state: self._add(
                        f"flat/{chained}/{buffer}/{state}", tensor, STATES, where
                    )
                    for state, tensor in states.items()
                    if state != "numel_unpadded"
                }
                if any(self.tensors[key].shape != (size,) for key in keys.values()) or MASTER not in keys:
                    raise TruncatedError(
                        "the states of a buffer have its size, masters among them",
                        where=f"{where}, buffer {buffer}",
                        equation=f"numel_unpadded({size}) of "
                        + ", ".join(f"{state}{self.tensors[key].shape}" for state, key in keys.items()),
                        hint="the save broke off, or files of two saves were mixed",
                    )
                yield Flat(chained, buffer, dtype, int(size), keys)


def _unknown(error: Exception, where: str) -> FormatError:
    return FormatError(
        "the state of an optimizer is as Megatron writes it",
        where=where,
        equation=f"{type(error).__name__}: {str(error)[:120]}",
        hint="save it again with Megatron-LM, or convert the weights alone with --weights-only",
    )


def _number(step: Any, data: torch_save.Buffer) -> int | float:
    if type(step) is TensorAt and step.shape == () and step.dtype in ("float32", "int64"):
        number: int | float
        (number,) = struct.unpack_from({"float32": "<f", "int64": "<q"}[step.dtype], data, step.start)
        return number
    return step if type(step) in (int, float) else math.nan


def _loaded(data: torch_save.Buffer, where: str) -> Any:
    return torch_save.load(data, 0, len(data), allow=_ALLOWED, where=where)


def _dict(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise FormatError(
            "an older Megatron checkpoint is made of dicts",
            where=where,
            equation=f"found {type(value).__name__}",
            hint="Megatron-LM writes no such file; look at where it comes from",
        )
    return value


@contextmanager
def _opened(root: Path, name: str) -> Iterator[torch_save.Buffer]:
    path = inside(root, name, where=str(root))
    if not path.is_file():
        raise MissingFileError(
            "every rank of the model has its file",
            where=str(path),
            equation="it is not there",
            hint="copy the folders of all ranks",
        )
    if not path.stat().st_size:
        raise TruncatedError(
            "a file of a rank holds something", where=str(path), equation="0 bytes", hint="copy it again"
        )
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        yield data
