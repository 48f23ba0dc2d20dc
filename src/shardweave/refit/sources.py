"""What a trainer's rank owns, as a value: a layout and its live arrays.

A ``Source`` is read off what is there: a module under ``fully_shard`` (``from_fsdp2``), a plain Hugging
Face module (``from_module``), a Megatron model (``sources_megatron.from_megatron``), or any layout and
arrays. Whatever the source, the arrays of the rank are exactly those of its layout, by name, shape and
dtype, or it is refused: nothing that a trainer trains is left behind, and nothing is published that the
layout does not place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardweave.dialects import fsdp, hf
from shardweave.dialects.names import few
from shardweave.errors import DtypeError, GeometryError, PlanError, ReplicaError, UnknownNameError
from shardweave.layout import BufferRule, Layout, Mesh
from shardweave.models import Model

# --- the value ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """What one rank of a trainer owns.

    Attributes:
        layout: Where the state of all ranks of the trainer is.
        arrays: The stored arrays of this rank by name: the parameters themselves, no copies. Ask again after
            every step of training; a parameter may have moved to other memory.
        rank: The global rank whose arrays they are; left out where the layout has one rank.

    Law: ``arrays`` has the names, shapes and dtypes of ``layout.arrays(rank)``.

    Raises:
        GeometryError: The layout has several ranks and none is said.
        UnknownNameError: An array is missing, or is none of the layout's.
        PlanError: An array has another shape.
        DtypeError: An array has another dtype, or is of a class that stores something else than its values.

    >>> from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor
    >>> w = Tensor("w", (5, 3), "float32")
    >>> one = Layout("trainer", Mesh(()), (BufferRule("w", (Part(w),), w.dims),))
    >>> Source(one, {"w": torch.zeros(5, 3)}).rank
    0
    >>> Source(one, {"w": torch.zeros(3, 5)})
    Traceback (most recent call last):
        ...
    shardweave.errors.PlanError: the arrays of a rank are those of its layout: layout 'trainer', rank 0, 'w':
        shape(3, 5) != shape(5, 3). hint: describe the model that is trained; a layout is never bent to what
        is there
    """

    layout: Layout
    arrays: Mapping[str, torch.Tensor]
    rank: int = -1

    def __post_init__(self) -> None:
        if self.rank < 0:
            if self.layout.mesh.size != 1:
                raise GeometryError(
                    "arrays belong to a rank of their layout",
                    where=f"layout {self.layout.name!r}",
                    equation=f"rank(not given), ranks({self.layout.mesh.size})",
                    hint="say whose arrays they are: Source(layout, arrays, rank)",
                )
            object.__setattr__(self, "rank", self.layout.mesh.offset)
        wanted = self.layout.arrays(self.rank)
        _check_names(self.layout.name, self.rank, set(wanted), set(self.arrays))
        for name, (buffer, _) in wanted.items():
            _check_array(self.layout.name, self.rank, name, buffer.shape, buffer.dtype, self.arrays[name])


def _check_names(layout: str, rank: int, wanted: set[str], given: set[str]) -> None:
    if wanted != given:
        raise UnknownNameError(
            "a rank has the arrays of its layout, all of them and no others",
            where=f"layout {layout!r}, rank {rank}",
            equation=f"missing {few(wanted - given)}; unexpected {few(given - wanted)}",
            hint="describe the model that is trained; what a trainer has beside it is not left out silently",
        )


def _check_array(
    layout: str, rank: int, name: str, shape: tuple[int, ...], dtype: str, array: torch.Tensor
) -> None:
    where = f"layout {layout!r}, rank {rank}, {name!r}"
    if tuple(array.shape) != shape:
        raise PlanError(
            "the arrays of a rank are those of its layout",
            where=where,
            equation=f"shape{tuple(array.shape)} != shape{shape}",
            hint="describe the model that is trained; a layout is never bent to what is there",
        )
    if isinstance(array, torch.Tensor) and type(array) not in (torch.Tensor, torch.nn.Parameter):
        raise DtypeError(
            "the arrays of a rank are plain tensors, whose memory is what they hold",
            where=where,
            equation=f"type({type(array).__name__})",
            hint="publish the master weights, or what a quantised tensor is made of: data and scales",
        )
    found = str(array.dtype).removeprefix("torch.")
    if found != dtype:
        raise DtypeError(
            "the arrays of a rank have the dtypes of its layout",
            where=where,
            equation=f"dtype({found}) != dtype({dtype})",
            hint="describe the model with the dtype that is stored: from_config(config, dtype=...)",
        )


class Live(Mapping[str, torch.Tensor]):
    """Parameters by name, each looked up when it is asked for: where its values are now, without a gradient.

    An optimizer may put a parameter into other memory (``parameter.data = ...``); what was handed out before
    then holds old values, what is handed out next does not.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name].detach()
        local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return local

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


# --- modules ------------------------------------------------------------------------------------

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What ``torch.compile`` and activation checkpointing put into names."""


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a module under all their names, without those of wrappers."""
    found: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        own: dict[str, torch.Tensor | None] = dict(part._parameters)
        own |= {k: v for k, v in part._buffers.items() if k not in part._non_persistent_buffers_set}
        for name, tensor in own.items():
            if tensor is not None:
                full = f"{prefix}.{name}" if prefix else name
                for wrapper in _WRAPPERS:
                    full = full.replace(wrapper, "")
                found[full] = tensor
    return found


def from_module(module: torch.nn.Module, *, model: Model, rank: int = 0) -> Source:
    """A Hugging Face module that is whole on one rank.

    Args:
        module: The language model with its head, as ``AutoModelForCausalLM`` makes it.
        model: The model that its config describes.
        rank: The global rank.

    Raises:
        UnknownNameError: A parameter or persistent buffer is none of the model's, or one of those is missing.
        ReplicaError: Tied weights are not one tensor.
        PlanError, DtypeError: As ``Source``.
    """
    state = state_of(module)
    layout = hf.variant(state, model)
    _check_tied(model, state)
    return Source(Layout(layout.name, Mesh((), offset=rank), layout.rules), Live(state), rank)


def _check_tied(model: Model, state: Mapping[str, torch.Tensor]) -> None:
    for name, of in model.aliases.items():
        if name in state and state[name] is not state[of]:
            raise ReplicaError(
                "tied weights are one tensor",
                where=f"{name!r} and {of!r}",
                equation=f"parameter({name}) is not parameter({of})",
                hint="call module.tie_weights(), or take the config in which they are not tied",
            )


def from_fsdp2(module: torch.nn.Module, *, model: Model, mesh: Mesh, rank: int) -> Source:
    """A Hugging Face module under ``fully_shard``, with replicas (HSDP) and tensor parallelism where given.

    What each rank holds is read from the placements of every parameter, and compared with what is there.

    Args:
        module: The module, between steps: its parameters are sharded.
        model: The model that its config describes.
        mesh: The ranks of the job; its axes have the names and sizes of the device mesh's dims, in torch's
            order (``fsdp.mesh(dp_replicate=2, dp_shard=4)``).
        rank: This rank.

    Raises:
        UnknownNameError: A parameter or persistent buffer is none of the model's, or one of those is missing.
        GeometryError: A parameter is not sharded, layers of one family are sharded in different ways, or a
            placement does not say what ranks hold.
        MeshError: The device mesh is no part of ``mesh``.
        ReplicaError: Tied weights are not one tensor.
        PlanError, DtypeError: As ``Source``.
    """
    state = state_of(module)
    for name, tensor in state.items():
        if not hasattr(tensor, "placements"):
            raise GeometryError(
                "under fully_shard every parameter is a DTensor",
                where=f"{name!r}, rank {rank}",
                equation=f"type({type(tensor).__name__})",
                hint="publish between steps, after module.reshard(); wrap the root module too",
            )
    _check_tied(model, state)
    whole = hf.variant(state, model)
    rules = tuple(_sharded(whole, rule, state, mesh) for rule in whole.rules)
    return Source(Layout("fsdp", mesh, rules), Live(state), rank)


def _sharded(whole: Layout, rule: BufferRule, state: Mapping[str, Any], mesh: Mesh) -> BufferRule:
    """A rule of whole arrays, cut as all of its arrays are."""
    buffer = rule.at(whole.mesh, 0)
    assert buffer is not None
    found: dict[str, BufferRule] = {}
    for name, _ in buffer.members():
        found[name] = fsdp.held(rule, state[name], name=name, within=mesh, made_by="fully_shard")
    (first, cut), *others = found.items()
    for name, other in others:
        if other != cut:
            raise GeometryError(
                "the layers of one family are sharded alike",
                where=f"{first!r} and {name!r}",
                equation=f"placements({state[first].placements}) != placements({state[name].placements})",
                hint="shard all layers over one mesh with one plan",
            )
    return cut
