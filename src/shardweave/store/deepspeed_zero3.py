"""The flat sub-groups of ZeRO-3: each weight is cut for itself.

Of a weight each rank has a slot of ``ceil(numel / ranks)`` elements, and a rank's flat tensor is its slots of
a sub-group, one after another. The last slots that a weight reaches are filled up::

    weights     a a a a a          b b b b b b b
    rank 0      a a a              b b b b            its flat tensor: a a a b b b b
    rank 1            a a .                b b b .    its flat tensor: a a . b b b .

Nothing in a file says which rank it is of: lengths are compared, and which file is whose is in the names.

Source: deepspeed 0.19.8 ``runtime/zero/stage3.py`` (``_rigid_state_dict``), ``utils/zero_to_fp32.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardweave.errors import FormatError, GapError, IndexMismatchError
from shardweave.store.deepspeed_files import File, broken, members_of, number, settings
from shardweave.store.deepspeed_flat import sliced
from shardweave.store.deepspeed_zero import (
    MASTER,
    Flat,
    Shapes,
    differ,
    flat_tensor,
    optimizer_of,
    split_states,
)
from shardweave.store.manifest import ITEMSIZE
from shardweave.store.pickles import brief
from shardweave.store.torch_save import TensorAt


def slots(folder: Path, files: Sequence[File], shapes: Sequence[Shapes]) -> Flat:
    """Masters and states of ZeRO-3.

    Args:
        folder: Of the save.
        files: The files of optimizer states of one tensor-parallel rank, by data-parallel rank.
        shapes: Of the weights of each flat sub-group.

    Raises:
        As `partitions`.
    """
    flat, cut = Flat(), len(files)
    for group in shapes:
        for name, shape in group.items():
            flat.weight(name, shape, folder)
    outcome = [_rank(flat, folder, file, shapes, rank, cut) for rank, file in enumerate(files)]
    for file, one in zip(files, outcome, strict=True):
        for g, (mine, first) in enumerate(zip(one, outcome[0], strict=True)):
            if mine != first:
                key = next(key for key in first if mine[key] != first[key])
                raise differ(f"{folder / file.name}, group {g}", f"{key} {brief(mine[key])}")
    for found in outcome[0]:
        for i, step in zip(found["members"], found["count"], strict=True):
            if step is not None:
                flat.count |= dict.fromkeys(shapes[i], step)
        names = [name for i in found["members"] for name in shapes[i]]
        flat.groups.append({"params": names, **found["settings"]})
        flat.scalars.append(found["scalars"])
    return flat


def _rank(
    flat: Flat, folder: Path, file: File, shapes: Sequence[Shapes], rank: int, cut: int
) -> list[dict[str, Any]]:
    """The slots of one rank, and what its file says of each group of parameters."""
    where, state = folder / file.name, optimizer_of(folder, file)
    if state.get("ds_zero_partition_groups"):
        raise FormatError(
            "a ZeRO-3 save without expert parallelism is read",
            where=str(where),
            equation="ds_zero_partition_groups: experts are partitioned among ranks of their own (AutoEP)",
            hint="convert it with DeepSpeed's ds_to_universal, and read the universal checkpoint",
        )
    if state.get("partition_count") != cut:
        raise IndexMismatchError(
            "a ZeRO-3 save has a file for each rank that a weight is cut among",
            where=str(where),
            equation=f"partition_count({brief(state.get('partition_count'))}) != ranks({cut})",
            hint="copy the whole folder; of MiCS each rank of a shard group has to be there",
        )
    base = state.get("optimizer_state_dict")
    states = base.get("state") if type(base) is dict else None
    groups = base.get("param_groups") if type(base) is dict else None
    masters = state.get("fp32_flat_groups")
    if type(states) is not dict or type(groups) is not list or type(masters) is not list:
        raise broken(where, "it lacks optimizer_state_dict or fp32_flat_groups")
    if len(masters) != len(shapes):
        raise broken(where, f"fp32_flat_groups({len(masters)}) != param_shapes({len(shapes)})")
    members = members_of(folder, file, groups)
    if [i for part in members for i in part] != list(range(len(shapes))):
        raise broken(
            where, f"the groups of parameters do not list sub-groups 0 to {len(shapes) - 1} in order"
        )
    steps: list[int | None] = []
    kinds: list[list[str]] = []
    extras: list[dict[str, Any]] = []
    for i, group in enumerate(shapes):
        master = flat_tensor(masters[i], f"{where}, fp32_flat_groups {i}")
        found = states.get(i, {})
        size = _fill(flat, folder, file, i, group, {MASTER: master}, rank, cut)
        arrays, scalars = split_states(folder, file, found, (size,), f"sub-group {i}")
        _fill(flat, folder, file, i, group, arrays, rank, cut)
        step = scalars.pop("step", None)
        steps.append(None if step is None else number(folder, file.name, step, f"the step of sub-group {i}"))
        kinds.append(sorted(arrays))
        extras.append(scalars)
    outcome = []
    for group, part in zip(groups, members, strict=True):
        settled = settings(folder, file, group)
        common = settled.pop("step", None)
        count = [steps[i] if steps[i] is not None else common for i in part]
        told = {i: extras[i] for i in part if extras[i]}
        found = {"members": part, "settings": settled, "scalars": told, "states": [kinds[i] for i in part]}
        outcome.append({**found, "count": count})
    return outcome


def _fill(
    flat: Flat,
    folder: Path,
    file: File,
    i: int,
    group: Shapes,
    arrays: Mapping[str, TensorAt],
    rank: int,
    cut: int,
) -> int:
    """Note what a rank's flat tensors of a sub-group hold; the elements of each."""
    at = held = 0
    for name, shape in group.items():
        numel = math.prod(shape)
        slot = sliced(numel, cut)
        low, high = min(rank * slot, numel), min((rank + 1) * slot, numel)
        for key, tensor in arrays.items():
            if at + slot > tensor.shape[0]:
                raise GapError(
                    "a rank's flat tensor has a slot for its part of each weight",
                    where=f"{folder / file.name}, sub-group {i}, weight {name!r}",
                    equation=f"slot {at} to {at + slot} of rank {rank}, {tensor.shape[0]} elements in all",
                    hint="the file is of another save than the model states; copy the whole folder again",
                )
            if low < high:
                flat.piece(name, key, (low, high), tensor, at, file, folder)
        at, held = at + slot, held + high - low
    for key, tensor in arrays.items():
        if tensor.shape[0] != at:
            raise IndexMismatchError(
                "a rank's flat tensor holds the slots of its weights and nothing else",
                where=f"{folder / file.name}, sub-group {i}, {key}",
                equation=f"elements({tensor.shape[0]}) != slots({at})",
                hint="the file is of another save than the model states; copy the whole folder again",
            )
        flat.padding_bytes += (at - held) * ITEMSIZE[tensor.dtype]
    return at
