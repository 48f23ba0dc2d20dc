"""The flat buckets of Megatron's distributed optimizer as geometry.

A rank lays its parameters of one dtype end to end in a buffer, *the last one first*, each from a multiple of
64 elements on. The buffer is cut into buckets, none within a parameter; a bucket is padded at its end until
all data-parallel ranks get equal shares. A checkpoint has of each bucket what comes before that padding, and
says how many elements that is. It does not say which parameter lies where: that follows, uniquely, from the
order of the parameters and from the sizes.

Source: megatron-core 0.16.1, ``distributed/param_and_grad_buffer.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardweave.dialects.megatron.parameters import Parameter
from shardweave.errors import GeometryError

ALIGNMENT = 64
"""A parameter begins at a multiple of so many elements of its buffer."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A parameter at its place in a bucket, whose first element is 0."""

    parameter: Parameter
    start: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.parameter.numel


def fill(parameters: Sequence[Parameter], sizes: Sequence[int]) -> tuple[tuple[Placed, ...], ...]:
    """Which parameter lies where in each bucket of a buffer.

    Args:
        parameters: Those of the buffer, in the order of the modules.
        sizes: How many elements each bucket has before the padding at its end.

    Returns:
        The parameters of each bucket in order of their places. Law: there is one answer, or none.

    Raises:
        GeometryError: No cut of the parameters into buckets has these sizes.

    >>> a, b, c = (Parameter(name, (size,), ()) for name, size in (("a", 100), ("b", 70), ("c", 3)))
    >>> [[(one.parameter.name, one.start) for one in bucket] for bucket in fill((a, b, c), (134, 100))]
    [[('c', 0), ('b', 64)], [('a', 0)]]
    """
    left = list(reversed(parameters))
    found: list[tuple[Placed, ...]] = []
    for number, size in enumerate(sizes):
        bucket: list[Placed] = []
        end = 0
        while end != size and not (bucket and _aligned(end) == size):
            start = _aligned(end)
            if not left or start + left[0].numel > size:
                raise GeometryError(
                    "the parameters of a rank fill the buckets that it stored",
                    where=f"bucket {number} of {len(sizes)}",
                    equation=f"its parameters end at {end}"
                    + (
                        f", with {left[0].name!r} of {left[0].numel} elements at {start + left[0].numel}"
                        if left
                        else " and none are left"
                    )
                    + f"; stored are {size}",
                    hint="it was saved by a job of other degrees, stages or another layer spec",
                )
            bucket.append(Placed(left[0], start))
            end = start + left[0].numel
            # Before an embedding that two stages share, a bucket ends where that one would have begun.
            if end != size and _aligned(end) == size and not (len(left) > 1 and left[1].shared):
                end_of = left[1].name if len(left) > 1 else "nothing"
                raise GeometryError(
                    "the parameters of a rank fill the buckets that it stored",
                    where=f"bucket {number} of {len(sizes)}",
                    equation=f"{left[0].name!r} ends at {end} before {end_of!r}; stored are {size}",
                    hint="it was saved by a job of other degrees, stages or another layer spec",
                )
            del left[0]
        found.append(tuple(bucket))
    if left:
        raise GeometryError(
            "the buckets that a rank stored have a place for each of its parameters",
            where=f"{len(sizes)} buckets",
            equation=f"{len(left)} parameters are left, the first is {left[0].name!r}",
            hint="it was saved by a job of other degrees, stages or another layer spec",
        )
    return tuple(found)


def sizes_of(parameters: Sequence[Parameter], bucket_size: int | None) -> tuple[int, ...]:
    """The sizes of the buckets that Megatron makes, without the padding at their ends.

    Args:
        parameters: Those of a buffer, in the order of the modules.
        bucket_size: A bucket ends with the parameter by which it has so many elements; ``None`` for one.

    Law: ``fill(parameters, sizes_of(parameters, n))`` is not refused.
    """
    return tuple(_sizes(parameters, bucket_size))


def _sizes(parameters: Sequence[Parameter], bucket_size: int | None) -> Iterator[int]:
    # A bucket begins at a multiple of 128, so places within it are those of a buffer of its own.
    end, held = 0, 0
    for parameter in reversed(parameters):
        start = _aligned(end)
        if parameter.shared and held:
            yield start
            start = held = 0
        end, held = start + parameter.numel, held + 1
        if parameter.shared or (bucket_size is not None and end >= bucket_size):
            yield end
            end = held = 0
    if held:
        yield end


def _aligned(at: int) -> int:
    return math.ceil(at / ALIGNMENT) * ALIGNMENT
