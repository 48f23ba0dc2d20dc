"""Which names read a global process group: presets for known code, and the shape of one for any other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

__all__ = ["PRESETS", "Collection", "Preset", "Target"]

_ACCESSOR = r"get_(?!virtual_|all_ranks)\w*_(group|groups|rank|ranks|world_size)(_gloo)?"
_PASS_GROUP = "take the group as an argument, or from the collection that the object was given"


@dataclass(frozen=True)
class Target:
    """Functions of a module that read its state."""

    modules: tuple[str, ...]
    """Dotted names: the module, or ``module.Class``, that defines them, then others that it is known by."""
    names: str
    """Regular expression that a whole name matches."""
    code: str = "SW101"
    hint: str = _PASS_GROUP
    is_chained: bool = False
    """Whether a read is named with the attribute that is taken of its result."""
    reexports: tuple[str, ...] = ()
    """Further modules that hand the names on; reads through them are not in the number of reads."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The names, compiled."""
        return re.compile(self.names)

    @property
    def everywhere(self) -> tuple[str, ...]:
        """All modules that have the names."""
        return (*self.modules, *self.reexports)

    @property
    def module(self) -> str:
        """Where the functions are defined."""
        return self.modules[0]


@dataclass(frozen=True, slots=True)
class Collection:
    """A class whose fields are groups."""

    cls: str
    """Dotted name."""
    owners: tuple[str, ...] = ()
    """Names that objects of it go by, where their type cannot be seen."""


@dataclass(frozen=True, slots=True)
class Preset:
    """What is looked for in code that uses one framework."""

    name: str
    targets: tuple[Target, ...] = ()
    collections: tuple[Collection, ...] = ()
    collectives: tuple[str, ...] = ()
    """Modules whose collectives take a group, and the default group without one."""
    definitions: tuple[str, ...] = ()
    """Modules that are the state itself, and are not looked at."""


_MEGATRON_STATE = ("megatron.core.parallel_state",)
_MPU = ("megatron.core.mpu",)
"""Its old name, which megatron.core makes of it."""
_MEGATRON_COLLECTION = (
    "megatron.core.process_groups_config.ProcessGroupCollection",
    "megatron.core.ProcessGroupCollection",
)
_VLLM = ("vllm.distributed.parallel_state", "vllm.distributed")
_SGLANG = ("sglang.srt.distributed.parallel_state", "sglang.srt.distributed")

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "megatron",
            targets=(
                Target(_MEGATRON_STATE, _ACCESSOR, reexports=_MPU),
                # A text of all ranks, for names of files of logs.
                Target(_MEGATRON_STATE, "get_all_ranks", code="SW203", reexports=_MPU),
                Target(
                    _MEGATRON_STATE,
                    r"is_pipeline_(first|last)_stage|is_rank_in_\w+",
                    code="SW102",
                    reexports=_MPU,
                ),
                Target(
                    _MEGATRON_COLLECTION,
                    "use_mpu_process_groups",
                    code="SW103",
                    hint="take the collection as an argument",
                ),
            ),
            collections=(Collection(_MEGATRON_COLLECTION[0], ("pg_collection", "pg_collections")),),
            definitions=("megatron.core.parallel_state", "megatron.core.process_groups_config"),
        ),
        Preset(
            "deepspeed",
            targets=(
                Target(
                    ("deepspeed.utils.groups",),
                    r"_?get_\w*(group|groups|rank|ranks|ranks_in_group|world_size)(_name)?|_?get_local_all_to_all_group",
                ),
            ),
            collectives=("deepspeed.comm", "deepspeed.comm.comm"),
            definitions=("deepspeed.utils.groups", "deepspeed.comm.comm", "deepspeed.comm.torch"),
        ),
        Preset(
            "torch", collectives=("torch.distributed", "torch.distributed.distributed_c10d"), definitions=()
        ),
        Preset(
            "vllm",
            targets=(Target(_VLLM, rf"get_\w+_group|{_ACCESSOR}|is_global_first_rank", is_chained=True),),
            definitions=("vllm.distributed.parallel_state",),
        ),
        Preset(
            "sglang",
            targets=(
                Target(_SGLANG, rf"get_\w+_group|{_ACCESSOR}", is_chained=True),
                Target(
                    ("sglang.srt.layers.dp_attention",),
                    r"get_(attention|local_attention|moe)_\w*(group|rank|size)",
                    is_chained=True,
                ),
            ),
            definitions=("sglang.srt.distributed.parallel_state", "sglang.srt.layers.dp_attention"),
        ),
        Preset(
            "veomni",
            targets=(
                Target(
                    ("veomni.distributed.parallel_state", "veomni.distributed"),
                    "get_parallel_state",
                    is_chained=True,
                ),
            ),
            definitions=("veomni.distributed.parallel_state",),
        ),
        Preset(
            "torchtitan",
            targets=(
                Target(("torch.distributed.device_mesh._mesh_resources",), "get_current_mesh|get_root_mesh"),
            ),
        ),
    )
}
"""By name. All of them apply unless some are chosen: a name counts only where it is imported."""
