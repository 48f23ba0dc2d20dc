"""Logical tensors: what a model has, before anyone has cut it.

A tensor knows its canonical name (the Hugging Face name), its global shape and its dtype, and
nothing of ranks. Tensors that differ only by layer or expert are one ``Tensor`` with index dims:
a model of a trillion parameters is a few dozen tensors, not a hundred thousand names.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardweave.errors import ModelError
from shardweave.layout.run import Dim, whole
from shardweave.layout.table import atoms, table

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)
_NAME = re.compile(r"(?:[^\s{}]|\{[A-Za-z_]\w*\})+", re.ASCII)
_WORD = re.compile(r"\w+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor or a family of them.

    Attributes:
        name: The name, with one ``{placeholder}`` for each index dim.
        shape: Global shape of one member.
        dtype: The dtype by torch's name, without ``torch.``.
        index: Name of each index dim, and the numbers that it takes as a ``Dim``. The numbers are
            those of the names: a family that exists on layers 3 to 60 has the index ``[3:61]``.

    >>> t = Tensor("model.layers.{layer}.mlp.up_proj.weight", (96, 64), "bfloat16", (("layer", whole(4)),))
    >>> print(t)
    model.layers.{layer[0:4]}.mlp.up_proj.weight (96, 64) bfloat16
    >>> t.num_dims, t.numel
    (3, 24576)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    index: tuple[tuple[str, Dim], ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or not _WORD.fullmatch(self.dtype):
            raise ModelError(
                "a tensor has a name without blanks and a dtype",
                where=f"tensor {self.name!r}",
                equation=f"name({self.name!r}), dtype({self.dtype!r})",
                hint="write the name as 'model.layers.{layer}.weight' and the dtype as 'bfloat16'",
            )
        names = [name for name, _ in self.index]
        written = placeholders(self.name)
        if sorted(written) != sorted(names) or len(names) != len(set(names)):
            raise ModelError(
                "the name of a family has one placeholder for each index dim",
                where=f"tensor {self.name!r}",
                equation=f"placeholders({', '.join(written)}) != index dims({', '.join(names)})",
                hint="write the name as 'model.layers.{layer}.weight'",
            )
        for name, dim in self.index:
            found = atoms(table((dim,), ""))
            if any(run.label != "" for run in dim.runs) or len(found.holders) != len(found.pieces):
                raise ModelError(
                    "an index dim takes each of its numbers once",
                    where=f"tensor {self.name!r}, index {name!r}",
                    equation=f"index({dim})",
                    hint="list the layers or experts that the family exists on",
                )
        if any(size < 0 for size in self.shape):
            raise ModelError(
                "the sizes of a tensor are not negative",
                where=f"tensor {self.name!r}",
                equation=f"shape{self.shape}",
                hint="give the global shape of one member; an empty dim has size 0",
            )

    @property
    def dims(self) -> tuple[Dim, ...]:
        """All dims of the family, index dims first; the domain of its elements."""
        return (*(dim for _, dim in self.index), *(whole(size) for size in self.shape))

    @property
    def num_dims(self) -> int:
        """The number of dims, index dims included."""
        return len(self.index) + len(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements of all members together."""
        return math.prod(len(dim) for _, dim in self.index) * math.prod(self.shape)

    def member(self, numbers: Mapping[str, int]) -> str:
        """The name of one member. Law: it is one of ``names()`` for numbers of the index."""
        return fill(self.name, numbers)

    def names(self) -> Iterator[str]:
        """The names of all members, the last index dim varying fastest."""
        keys = [name for name, _ in self.index]
        for numbers in itertools.product(*((i for _, i in dim) for _, dim in self.index)):
            yield fill(self.name, dict(zip(keys, numbers, strict=True)))

    def __str__(self) -> str:
        from shardweave.layout.notation import format_tensor

        return format_tensor(self)


def placeholders(template: str) -> list[str]:
    """The names of the ``{placeholders}`` of a name template, in order."""
    return _PLACEHOLDER.findall(template)


def fill(template: str, numbers: Mapping[str, int]) -> str:
    """A name template with its ``{placeholders}`` replaced by numbers.

    Law: ``placeholders(fill(t, n)) == [name for name in placeholders(t) if name not in n]``.
    """
    for name, number in numbers.items():
        template = template.replace(f"{{{name}}}", str(number))
    return template
