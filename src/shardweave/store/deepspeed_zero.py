"""The flat groups of ZeRO-1 and ZeRO-2: which stretch of which weight lies where in which rank's file.

The weights of a group of parameters lie one after another, in the order of ``param_shapes``, filled up to a
multiple of the ranks; the whole is cut into equal *partitions*, one a rank. A weight may straddle ranks::

    weights      a a a a a b b b b b b b c c . .      "." is padding at the end of the group
    partitions  |    rank 0     |    rank 1     |

Masters and states are cut alike. Everything that a file says of it is compared with what follows from shapes
and ranks: partition counts, paddings, and the place of each fragment. So files of other saves, of other
degrees, and swapped ones are found.

Laws:
    - The stretches of a weight, over all ranks, tile it; what does not is refused with weight and ranks.
    - Every state that a file has is an array or a scalar of the outcome, or refused.

Source: deepspeed 0.19.8 ``runtime/zero/stage_1_and_2.py`` (``__init__``, ``state_dict``),
``runtime/bf16_optimizer.py``, ``utils/tensor_fragment.py`` (``get_hp_fragment_mapping``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardweave.errors import DtypeError, FormatError, GapError, IndexMismatchError
from shardweave.store.deepspeed_files import File, broken, number, settings
from shardweave.store.deepspeed_flat import round_robin
from shardweave.store.manifest import ITEMSIZE, Extent, StoredTensor, run_extents
from shardweave.store.pickles import Instance, brief
from shardweave.store.torch_save import TensorAt

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of the weights of a flat group, in the order in which they lie there."""
Rename = Callable[[str, int], str]
"""The name in the model of what an expert-parallel rank calls by a name of its own."""

MASTER: Final = "master"
_ALIGNMENT: Final = 2
"""Partitions of ZeRO-1 and ZeRO-2 are multiples of so many elements (``nccl_start_alignment_factor``)."""


@dataclass(slots=True)
class Flat:
    """What the optimizer files of one tensor-parallel rank come to.

    Attributes:
        extents: Of each weight and state; ``master`` is the copy that is trained.
        dtypes: Of the same.
        shapes: Of each weight.
        count: Updates of each weight.
        groups: Groups of parameters with their settings.
        scalars: For each group what its states have beside arrays and the count.
        padding_bytes: Bytes of all files that belong to no weight.
    """

    extents: dict[tuple[str, str], list[Extent]] = field(default_factory=dict)
    dtypes: dict[tuple[str, str], str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    groups: list[Mapping[str, Any]] = field(default_factory=list)
    scalars: list[Mapping[str, Any]] = field(default_factory=list)
    padding_bytes: int = 0

    def weight(self, name: str, shape: tuple[int, ...], where: Path) -> None:
        """A weight of a group; it is in one group."""
        if name in self.shapes:
            raise broken(where, f"weight {name!r} is in two groups")
        self.shapes[name] = shape

    def piece(
        self,
        name: str,
        state: str,
        part: tuple[int, int],
        tensor: TensorAt,
        at: int,
        file: File,
        folder: Path,
    ) -> None:
        """Elements ``part`` of a weight's state lie in ``tensor`` from element ``at``."""
        key = name, state
        dtype = self.dtypes.setdefault(key, tensor.dtype)
        if dtype != tensor.dtype:
            raise DtypeError(
                "ranks hold a state in one dtype",
                where=f"{folder / file.name}, state {state!r} of {name!r}",
                equation=f"{tensor.dtype} != {dtype}, that of the ranks before",
                hint="files of two saves were mixed; copy the whole folder again",
            )
        begin = tensor.start + at * ITEMSIZE[dtype]
        self.extents.setdefault(key, []).extend(
            run_extents(self.shapes[name], *part, file.name, begin, dtype)
        )

    def tensors(self, key_of: Callable[[str, str], str]) -> dict[str, StoredTensor]:
        """All arrays, by their keys."""
        found = {}
        for (name, state), extents in self.extents.items():
            key = key_of(name, state)
            found[key] = StoredTensor(key, self.dtypes[name, state], self.shapes[name], tuple(extents))
        return found


def partitions(
    folder: Path, files: Sequence[File], shapes: Sequence[Shapes], *, rename: Rename, data_first: bool
) -> Flat:
    """Masters and states of ZeRO-1, ZeRO-2 and of the bf16 optimizer.

    Args:
        folder: Of the save.
        files: The files of optimizer states of one tensor-parallel rank, by data-parallel rank.
        shapes: Of each flat group, as the rank's model states have them.
        rename: The names of expert weights, of which each expert-parallel rank has others.
        data_first: Ranks that hold the same experts are adjacent (``use_data_before_expert_parallelism``).

    Raises:
        FormatError: A file lacks a part, or has states that are no flat arrays.
        IndexMismatchError: Files contradict each other, or their own names.
        GapError: A part of a weight, or a state on some ranks, lies nowhere.
        DtypeError: Ranks hold a state in different dtypes.
    """
    flat, dicts = Flat(), [optimizer_of(folder, file) for file in files]
    count = len(files)
    for g, group in enumerate(shapes):
        say = f"{folder}, group {g}"
        parts = {_partition_count(folder, file, state, g) for file, state in zip(files, dicts, strict=True)}
        cut = parts.pop()
        if parts or cut < 1 or count % cut:
            raise IndexMismatchError(
                "a group is cut into one partition a rank, or into one a rank of its experts",
                where=say,
                equation=f"partition_count {sorted({cut, *parts})}, {count} data-parallel ranks",
                hint="files of two saves were mixed, or ranks are missing; copy the whole folder again",
            )
        experts = count // cut
        sets: list[Mapping[str, Any]] = []
        for e in range(experts):
            ranks = [e * cut + i if data_first else i * experts + e for i in range(cut)]
            names = {rename(name, e) if experts > 1 else name: shape for name, shape in group.items()}
            owners = [(files[r], dicts[r]) for r in ranks]
            sets.append(_group(flat, folder, g, owners, names, list(group), ranks))
        if any(one != sets[0] for one in sets[1:]):
            raise differ(say, "the settings of a group")
        given = list(group)
        if _round_robin(files[0]):  # as the optimizer was given them, whatever order they lie in
            given = [name for _, name in sorted(zip(round_robin(len(given), cut), given, strict=True))]
        params = [rename(name, e) if experts > 1 else name for e in range(experts) for name in given]
        flat.groups.append({"params": params, **sets[0]["settings"]})
        flat.scalars.append(sets[0]["scalars"])
    return flat


def optimizer_of(folder: Path, file: File) -> Mapping[str, Any]:
    """The state of the optimizer in one of its files."""
    state = file.value.get("optimizer_state_dict")
    if type(state) is not dict:
        raise broken(folder / file.name, "it has no optimizer_state_dict")
    return state


def ordered(folder: Path, files: Sequence[File]) -> list[list[str]]:
    """The names of each flat group in their order, from the fragments that ranks list."""
    found: list[dict[str, None]] = []
    for file in files:
        listed = optimizer_of(folder, file).get("param_slice_mappings")
        groups = listed if type(listed) is list else []
        if not groups or not all(type(group) is dict for group in groups):
            raise broken(folder / file.name, f"param_slice_mappings is {brief(listed)}")
        found += [{} for _ in range(len(groups) - len(found))]
        for names, group in zip(found, groups, strict=False):
            names |= dict.fromkeys(group)
    return [list(names) for names in found]


def _partition_count(folder: Path, file: File, state: Mapping[str, Any], g: int) -> int:
    cut = state.get("partition_count")
    if type(cut) is list and g < len(cut):
        cut = cut[g]
    if type(cut) is not int:
        raise broken(folder / file.name, f"partition_count of group {g} is {brief(cut)}")
    return cut


def _item(folder: Path, file: File, state: Mapping[str, Any], key: str, g: int, kind: type) -> Any:
    values = state.get(key)
    value = values[g] if type(values) is list and g < len(values) else None
    if type(value) is not kind:
        raise broken(folder / file.name, f"{key} of group {g} is {brief(value)}, not a {kind.__name__}")
    return value


def flat_tensor(value: Any, where: str) -> TensorAt:
    """A value, checked to be a flat tensor without gaps."""
    if type(value) is not TensorAt or len(value.shape) != 1 or value.strides is not None:
        raise broken(where, f"a flat tensor without gaps was expected, not {brief(value)}")
    return value


def _group(
    flat: Flat,
    folder: Path,
    g: int,
    owners: Sequence[tuple[File, Mapping[str, Any]]],
    names: Shapes,
    called: Sequence[str],
    ranks: Sequence[int],
) -> dict[str, Any]:
    """One flat group over the ranks that it is cut among; ``called`` are the names in their files."""
    masters, paddings = [], []
    for file, state in owners:
        value = _item(folder, file, state, "single_partition_of_fp32_groups", g, TensorAt)
        masters.append(flat_tensor(value, f"{folder / file.name}, single_partition_of_fp32_groups {g}"))
        paddings.append(_item(folder, file, state, "group_paddings", g, int))
    offsets, total = _offsets(folder, owners[0], g, names)
    # The optimizer of bf16 without ZeRO keeps the padding in its masters; ZeRO itself cuts it off.
    kept = "zero_stage" not in owners[0][1]
    sizes = [m.shape[0] + (0 if kept else p) for m, p in zip(masters, paddings, strict=True)]
    size = _partition(folder, g, owners, sizes, ranks, total)
    for rank, (file, _), padding in zip(range(len(owners)), owners, paddings, strict=True):
        room = size - min(max(total - rank * size, 0), size)
        if padding != room:
            raise IndexMismatchError(
                "the padding of a partition is what its weights leave free",
                where=f"{folder / file.name}, group {g}, partition {rank} of {len(owners)}",
                equation=f"group_paddings({padding}) != {room}, of {size} elements",
                hint="files of two ranks or of two saves have changed places; copy the whole folder again",
            )
    for name, shape in names.items():
        flat.weight(name, shape, folder)

    outcome: list[dict[str, Any]] = []
    reordered = _round_robin(owners[0][0])
    for rank, ((file, state), master) in enumerate(zip(owners, masters, strict=True)):
        arrays, scalars, count = _states(folder, file, state, g, (size, master.shape[0]))
        stretch = range(rank * size, (rank + 1) * size)
        places = {}
        for (name, shape), label in zip(names.items(), called, strict=True):
            begin, end = offsets[name], offsets[name] + math.prod(shape)
            low, high = max(begin, stretch.start), min(end, stretch.stop)
            if low >= high:
                continue
            places[label] = low - stretch.start, high - low
            for key, tensor in {MASTER: master, **arrays}.items():
                part = low - begin, high - begin
                flat.piece(name, key, part, tensor, low - stretch.start, file, folder)
        if not reordered:
            _check_places(folder, file, state, g, places, ranks[rank])
        held = sum(length for _, length in places.values())
        flat.padding_bytes += sum(
            (tensor.shape[0] - held) * ITEMSIZE[tensor.dtype] for tensor in (master, *arrays.values())
        )
        outcome.append(
            {
                "settings": _settings(folder, file, state, g),
                "scalars": scalars,
                "states": _dtypes(master, arrays),
                "count": count,
            }
        )
    _agree(folder, g, owners, outcome)
    if outcome[0]["count"] is not None:
        flat.count |= dict.fromkeys(names, outcome[0]["count"])
    return {key: outcome[0][key] for key in ("settings", "scalars")}


def _offsets(
    folder: Path, owner: tuple[File, Mapping[str, Any]], g: int, names: Shapes
) -> tuple[dict[str, int], int]:
    """Where each weight begins in its group, and where the last one ends."""
    file, state = owner
    gaps: Any = [0] * len(names)
    if state.get("param_alignment_paddings") is not None:
        gaps = _item(folder, file, state, "param_alignment_paddings", g, list)
    if len(gaps) != len(names) or not all(type(gap) is int and gap >= 0 for gap in gaps):
        raise IndexMismatchError(
            "a group has one alignment padding a weight",
            where=f"{folder / file.name}, group {g}",
            equation=f"param_alignment_paddings({len(gaps)}) != param_shapes({len(names)})",
            hint="the file is of another save than the model states beside it; copy the whole folder again",
        )
    offsets, at = {}, 0
    for (name, shape), gap in zip(names.items(), gaps, strict=True):
        offsets[name] = at
        at += math.prod(shape) + gap
    return offsets, at


def _partition(
    folder: Path,
    g: int,
    owners: Sequence[tuple[File, Mapping[str, Any]]],
    sizes: Sequence[int],
    ranks: Sequence[int],
    total: int,
) -> int:
    """The elements of a partition, the same on all ranks, and just enough for the weights of the group."""
    if len(set(sizes)) > 1:
        odd = next(i for i, size in enumerate(sizes) if size != sizes[0])
        raise IndexMismatchError(
            "the partitions of a group are equally long",
            where=f"{folder / owners[odd][0].name}, group {g}, rank {ranks[odd]}",
            equation=f"{sizes[odd]} elements with padding, rank {ranks[0]} has {sizes[0]}",
            hint="files of two saves were mixed, or one is damaged; copy the whole folder again",
        )
    room = sizes[0] * len(sizes)
    if not total <= room < total + max(_ALIGNMENT * len(sizes), 1):
        raise GapError(
            "the partitions of a group hold its weights and less than one more row of padding",
            where=f"{folder}, group {g}, ranks {list(ranks)}",
            equation=f"weights({total}) against {len(sizes)} partitions of {sizes[0]} = {room} elements",
            hint="the model states are of another save, or ranks are missing; copy the whole folder again",
        )
    return sizes[0]


def _round_robin(file: File) -> bool:
    """Whether weights were put into another order than the one that DeepSpeed says their places in.

    With ``round_robin_gradients`` the fragments that DeepSpeed records are those of an order that it does not
    use; ``param_shapes`` has the true one.
    """
    config = file.value.get("ds_config")
    zero = config.get("zero_optimization") if type(config) is dict else None
    return type(zero) is dict and bool(zero.get("round_robin_gradients"))


def _check_places(
    folder: Path,
    file: File,
    state: Mapping[str, Any],
    g: int,
    places: Mapping[str, tuple[int, int]],
    rank: int,
) -> None:
    """The fragments that a file lists are those that its name makes it hold."""
    listed = _item(folder, file, state, "param_slice_mappings", g, dict)
    said = {}
    for name, address in listed.items():
        fields = address.state if type(address) is Instance else None
        if type(fields) is not dict or not {"start", "numel"} <= fields.keys():
            raise broken(folder / file.name, f"the fragment of {brief(name)} is {brief(address)}")
        said[name] = fields["start"], fields["numel"]
    if said == places:
        return
    wrong = next(name for name in {**places, **said} if said.get(name) != places.get(name))
    raise IndexMismatchError(
        "a rank's file lists the fragments that its partition holds",
        where=f"{folder / file.name}, group {g}, weight {brief(wrong)}",
        equation=f"(start, numel) {said.get(wrong)} in the file, {places.get(wrong)} at rank {rank}",
        hint="files of two ranks or of two saves have changed places; copy the whole folder again",
    )


def _states(
    folder: Path, file: File, state: Mapping[str, Any], g: int, lengths: tuple[int, int]
) -> tuple[dict[str, TensorAt], dict[str, Any], int | None]:
    """Arrays, scalars and the count of one group in one file."""
    base = state.get("base_optimizer_state")
    if type(base) is dict:
        states = base.get("state")
        found = states.get(g, {}) if type(states) is dict else None
    else:  # saved for a change of the number of ranks: a list, without padding and without settings
        found = base[g] if type(base) is list and g < len(base) else None
    if type(found) is not dict:
        raise broken(folder / file.name, f"it has no base_optimizer_state of group {g}")
    arrays, scalars = split_states(folder, file, found, lengths, f"group {g}")
    for source in (scalars, _param_group(state, g), {"step": state.get("base_optimizer_state_step")}):
        step = source.get("step")
        if step is not None:
            scalars.pop("step", None)
            return arrays, scalars, number(folder, file.name, step, f"the step of group {g}")
    return arrays, scalars, None


def split_states(
    folder: Path, file: File, found: Mapping[Any, Any], lengths: Sequence[int], what: str
) -> tuple[dict[str, TensorAt], dict[str, Any]]:
    """The arrays of a state and all else of it; ``lengths`` are those that an array may have."""
    arrays: dict[str, TensorAt] = {}
    scalars: dict[str, Any] = {}
    for key, value in found.items():
        if type(key) is not str or "/" in key or key == MASTER:
            raise broken(folder / file.name, f"a state of {what} has the name {brief(key)}")
        if type(value) is TensorAt and len(value.shape) == 1:
            if value.shape[0] not in lengths or value.strides is not None:
                raise GapError(
                    "a state has a value for each element of its flat group",
                    where=f"{folder / file.name}, state {key!r} of {what}",
                    equation=f"elements({value.shape[0]}) not in {sorted(set(lengths))}",
                    hint="the file is of another save than those beside it, or its states were on NVMe",
                )
            arrays[key] = value
        elif type(value) is TensorAt and not value.shape:
            one = settings(folder, file, {key: value})[key]
            scalars[key] = value if one is None else one
        elif value is None or type(value) in (int, float, bool, str):
            if value is not None:
                scalars[key] = value
        else:
            raise FormatError(
                "a state of a flat group is flat, or a scalar",
                where=f"{folder / file.name}, state {key!r} of {what}",
                equation=f"it is {brief(value)}"
                + (f" of shape {value.shape}" if type(value) is TensorAt else ""),
                hint="states that are no values of elements cannot be cut; leave the states out",
            )
    return arrays, scalars


def _dtypes(master: TensorAt, arrays: Mapping[str, TensorAt]) -> dict[str, str]:
    return {key: tensor.dtype for key, tensor in sorted({MASTER: master, **arrays}.items())}


def _param_group(state: Mapping[str, Any], g: int) -> Mapping[str, Any]:
    base = state.get("base_optimizer_state")
    groups = base.get("param_groups") if type(base) is dict else None
    group = groups[g] if type(groups) is list and g < len(groups) else {}
    return group if type(group) is dict else {}


def _settings(folder: Path, file: File, state: Mapping[str, Any], g: int) -> dict[str, Any]:
    found = settings(folder, file, _param_group(state, g))
    found.pop("step", None)
    return found


def _agree(
    folder: Path,
    g: int,
    owners: Sequence[tuple[File, Mapping[str, Any]]],
    outcome: Sequence[Mapping[str, Any]],
) -> None:
    for (file, _), one in zip(owners, outcome, strict=True):
        mine, first = one["states"], outcome[0]["states"]
        if mine != first:
            known = GapError if mine.keys() != first.keys() else DtypeError
            raise known(
                "ranks hold the same states of a group, in the same dtypes",
                where=f"{folder / file.name}, group {g}",
                equation=f"{mine}, {owners[0][0].name} has {first}",
                hint="files of two saves were mixed; copy the whole folder again",
            )
        for key in ("count", "settings", "scalars"):
            if one[key] != outcome[0][key]:
                raise differ(f"{folder / file.name}, group {g}", f"{key} {brief(one[key])}")


def differ(where: str, what: str) -> IndexMismatchError:
    """The error for ranks that say different things of a group."""
    return IndexMismatchError(
        "ranks agree on the count and the settings of a group",
        where=where,
        equation=f"{what}: another one than on the rank before",
        hint="files of two saves were mixed; copy the whole folder again",
    )
