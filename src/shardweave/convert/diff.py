"""Comparing two checkpoints as models, whatever their formats: names, dtypes, and every bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardweave.convert.checkpoint import Checkpoint
from shardweave.convert.compare import Difference, check_replicas, differences
from shardweave.convert.source import open_checkpoint
from shardweave.convert.staging import require_finished
from shardweave.layout import Layout, Tensor
from shardweave.layout.dtype import itemsize
from shardweave.plan import plan


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two checkpoints differ.

    Attributes:
        missing: Tensors that only the left has, by canonical name.
        extra: Tensors that only the right has.
        dtypes: Families that both have in different dtypes, which are not compared further.
        first: The first differing element of each tensor, in order.
        num_elements: Differing elements of each tensor.
        num_tensors: Tensors whose bits were compared.
        num_bytes: Bytes that were compared.
        stored: The dtype of each tensor that differs.
    """

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    dtypes: Mapping[str, tuple[str, str]]
    first: Mapping[str, Difference]
    num_elements: Mapping[str, int]
    num_tensors: int
    num_bytes: int
    stored: Mapping[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.missing or self.extra or self.dtypes or self.first)


def compare(
    left: Path,
    right: Path,
    *,
    left_config: Path | Mapping[str, Any] | None = None,
    right_config: Path | Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints of any format, element by element and bit by bit.

    Args:
        left: A folder, or one safetensors file.
        right: The other.
        left_config: The model's Hugging Face config; by default the one in the folder.
        right_config: The same of the other.
        progress: Told ``(bytes compared, bytes in all)``.

    Raises:
        ReplicaError: One of the two contradicts itself.
        ShardweaveError: One of the two cannot be understood.
    """
    a, b = _open(left, left_config), _open(right, right_config)
    ours, theirs = _families(a.layout), _families(b.layout)
    names, others = ({name for tensor in found for name in tensor.names()} for found in (ours, theirs))
    dtypes = {
        tensor.name: (ours[tensor], theirs[tensor])
        for tensor in ours
        if tensor in theirs and ours[tensor] != theirs[tensor]
    }
    alike = {tensor for tensor in ours if ours[tensor] == theirs.get(tensor)}
    compared = plan(_bare_layout(a.layout, ours), _bare_layout(b.layout, ours), allow_casts=True)
    compared = replace(compared, families=tuple(f for f in compared.families if f.tensor in alike))
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, compared.num_bytes)

    first: dict[str, Difference] = {}
    count: Counter[str] = Counter()
    for found in differences(compared, a.manifest, b.manifest, progress=tell):
        first.setdefault(found.tensor, found)
        count[found.tensor] += found.num_elements
    return Comparison(
        missing=tuple(sorted(names - others)),
        extra=tuple(sorted(others - names)),
        dtypes=dtypes,
        first=first,
        num_elements=count,
        num_tensors=sum(1 for tensor in alike for _ in tensor.names()),
        num_bytes=compared.num_bytes,
        stored={name: ours[tensor] for tensor in alike for name in tensor.names() if name in first},
    )


def _open(root: Path, config: Path | Mapping[str, Any] | None) -> Checkpoint:
    require_finished(root)
    found = open_checkpoint(root, config=config)
    check_replicas(found)
    return found


def _families(layout: Layout) -> dict[Tensor, str]:
    """Each family, without a dtype of its own, and the dtype that it is stored in."""
    return {_bare(part.tensor): rule.dtype for rule in layout.rules for part in rule.parts}


def _bare(tensor: Tensor) -> Tensor:
    return replace(tensor, dtype="float32")


def _bare_layout(layout: Layout, tensors: Collection[Tensor]) -> Layout:
    """The buffers of a layout that hold nothing but the given tensors, all of one dtype."""
    rules = (
        replace(rule, parts=tuple(replace(part, tensor=_bare(part.tensor)) for part in rule.parts))
        for rule in layout.rules
    )
    kept = (rule for rule in rules if all(part.tensor in tensors for part in rule.parts))
    return replace(layout, rules=tuple(kept))


def value_of(word: str, dtype: str) -> float | int | bool | complex:
    """The number that a stored word, as hexadecimal text, is in a dtype.

    >>> value_of("0x3f800000", "float32"), value_of("0x4049", "bfloat16"), value_of("0xff", "int8")
    (1.0, 3.140625, -1)
    """
    size = itemsize(dtype)
    data = int(word, 16).to_bytes(size, "little")
    if dtype == "bfloat16":
        return float(np.frombuffer(b"\0\0" + data, "<f4")[0])
    if dtype.startswith("float8"):
        import torch

        return float(torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))[0])
    value: float | int | bool | complex = np.frombuffer(data, np.dtype(dtype)).item()
    return value
