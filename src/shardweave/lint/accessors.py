"""What the accessors of Megatron's global groups give, and what that goes by as an argument or a field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardweave.lint.finding import REEXPORTED, Finding

__all__ = ["Accessor", "accessor_of"]

_GROUPS: Mapping[str, tuple[str, ...]] = {
    "tensor_model_parallel": ("tp", "tensor_parallel"),
    "context_parallel": ("cp",),
    "data_parallel": ("dp",),
    "data_parallel+context": ("dp_cp", "data_parallel_with_context"),
    "pipeline_model_parallel": ("pp", "pipeline_parallel"),
    "model_parallel": ("mp",),
    "expert_model_parallel": ("ep", "expert_parallel"),
    "expert_tensor_parallel": ("expt_tp", "etp"),
    "expert_data_parallel": ("expt_dp", "edp"),
    "expert_tensor_and_model_parallel": ("tp_ep", "expert_tensor_and_model"),
    "tensor_and_context_parallel": ("tp_cp",),
}
"""Names in accessors, and the short names; embedding groups are not here, for who is outside holds None."""

_NAME = re.compile(r"get_(\w+?)_(group|rank|world_size|src_rank)", re.ASCII)
_OF_MEGATRON = re.compile(r"\bof megatron\.core\b", re.ASCII)


@dataclass(frozen=True, slots=True)
class Accessor:
    """One read, in other words."""

    part: str
    """``group``, ``rank``, ``world_size`` or ``src_rank``."""
    name: str
    """What a new argument is called, such as ``tp_group``."""
    names: frozenset[str]
    """What the group goes by as an argument or a field."""

    @property
    def field(self) -> str:
        """What the group is called in a collection, such as ``tp``."""
        return self.name.removesuffix("_group")

    def of(self, group: str, *, distributed: str = "") -> str:
        """The read, as an expression of the group.

        >>> Accessor("rank", "tp_group", frozenset()).of("self.tp_group")
        'self.tp_group.rank()'
        """
        match self.part:
            case "rank":
                return f"{group}.rank()"
            case "world_size":
                return f"{group}.size()"
            case "src_rank":
                return f"{distributed}.get_global_rank({group}, 0)"
        return group


def accessor_of(finding: Finding, arguments: Mapping[str, str]) -> Accessor | None:
    """What a read gives; ``None`` where that is not understood.

    Args:
        finding: The read.
        arguments: What the call is given: texts by keyword, positions as ``"0"``, ``"1"``.
    """
    # A finding names the function; the module it comes from is in its message only.
    match = _NAME.fullmatch(finding.name)
    if finding.code not in ("SW101", REEXPORTED) or match is None or not _OF_MEGATRON.search(finding.message):
        return None
    group, part = match[1], match[2]
    given = dict(arguments)
    if group == "data_parallel":
        with_context = given.pop("with_context_parallel", given.pop("0", "False"))
        if with_context not in ("True", "False"):
            return None
        group += "+context" if with_context == "True" else ""
    if given or group not in _GROUPS:
        return None
    short = _GROUPS[group]
    long = group.replace("+context", "_with_context")
    stems = (*short, long)
    return Accessor(part, f"{short[0]}_group", frozenset({*short, *(f"{stem}_group" for stem in stems)}))
