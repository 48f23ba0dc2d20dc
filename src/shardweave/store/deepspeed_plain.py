"""The optimizer of a save without ZeRO, in fp32: torch's own ``state_dict`` in the file of model states.

It numbers weights and names none. The numbers follow the groups of parameters, and scripts build a group by
going through the module's weights in order. So each group is laid along the module: where at every weight
exactly one group goes on with that shape, the outcome is the only one, and is taken; otherwise the save is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardweave.errors import FormatError
from shardweave.store.deepspeed_files import File, broken, members_of, number, settings
from shardweave.store.deepspeed_zero import Flat
from shardweave.store.pickles import brief
from shardweave.store.torch_save import TensorAt


def plain_optimizer(folder: Path, file: File, weights: Mapping[str, TensorAt]) -> Flat:
    """States by weight of a save without ZeRO.

    Args:
        folder: Of the save.
        file: The model states of a tensor-parallel rank.
        weights: The module's weights in order, without buffers and shared ones.

    Raises:
        FormatError: Nothing says which weight a state is of.
    """
    flat, where = Flat(), folder / file.name
    optimizer = file.value.get("optimizer")
    if optimizer is None:
        for name, tensor in weights.items():
            flat.weight(name, tensor.shape, where)
        return flat
    states = optimizer.get("state") if type(optimizer) is dict else None
    groups = optimizer.get("param_groups") if type(optimizer) is dict else None
    if type(states) is not dict or type(groups) is not list:
        raise FormatError(
            "an optimizer without ZeRO is torch's own",
            where=str(where),
            equation=f"optimizer is {brief(optimizer)}"
            + (f" with {sorted(map(str, optimizer))}" if optimizer else ""),
            hint="its masters are one flat tensor of unnamed weights; save with ZeRO stage 1",
        )
    members = members_of(folder, file, groups)
    names = _along(where, [[_shape(states.get(i)) for i in part] for part in members], weights)
    for name, tensor in weights.items():
        flat.weight(name, tensor.shape, where)
    for group, part, named in zip(groups, members, names, strict=True):
        for i, name in zip(part, named, strict=True):
            for key, value in (states.get(i) or {}).items():
                if type(value) is TensorAt and value.shape == weights[name].shape and value.shape:
                    if value.strides is not None:
                        raise broken(where, f"state {key!r} of {name!r} has gaps")
                    flat.piece(name, key, (0, _numel(value)), value, 0, file, folder)
                elif key == "step":
                    flat.count[name] = number(folder, file.name, value, f"the step of {name!r}")
                elif value is not None:
                    raise broken(where, f"state {key!r} of {name!r} is {brief(value)}")
        flat.groups.append({"params": named, **settings(folder, file, group)})
        flat.scalars.append({})
    return flat


def _numel(tensor: TensorAt) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def _shape(state: Any) -> tuple[int, ...] | None:
    """The shape of the weight that a state is of; ``None`` where it has no arrays."""
    arrays = (
        [v for k, v in state.items() if type(v) is TensorAt and k != "step"] if type(state) is dict else []
    )
    return arrays[0].shape if arrays else None


def _along(
    where: Path, groups: Sequence[Sequence[tuple[int, ...] | None]], weights: Mapping[str, TensorAt]
) -> list[list[str]]:
    names: list[list[str]] = [[] for _ in groups]
    if len(groups) == 1 and len(groups[0]) == len(weights):
        for name, shape in zip(weights, groups[0], strict=True):
            if shape is not None and shape != weights[name].shape:
                raise _unclear(where, f"state of shape {shape}, weight {name!r} of {weights[name].shape}")
        return [list(weights)]
    for name, tensor in weights.items():
        goes_on = [
            g for g, shapes in enumerate(groups)
            if len(names[g]) < len(shapes) and shapes[len(names[g])] in (None, tensor.shape)
        ]  # fmt: skip
        if len(goes_on) != 1:
            raise _unclear(where, f"{len(goes_on)} groups go on with shape {tensor.shape} at weight {name!r}")
        names[goes_on[0]].append(name)
    if any(len(found) != len(shapes) for found, shapes in zip(names, groups, strict=True)):
        raise _unclear(where, "the groups have more weights than the module")
    return names


def _unclear(where: Path, equation: str) -> FormatError:
    return FormatError(
        "the numbers of an optimizer's states are those of weights in one way only",
        where=str(where),
        equation=equation,
        hint="nothing in the file names them: save with ZeRO stage 1, whose files do",
    )
