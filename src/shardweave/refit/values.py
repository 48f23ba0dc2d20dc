"""Stored values that differ between trainer and engine, converted in steps of their own.

A plan moves bytes untouched. Where an engine stores another function of the logical values than the trainer
(``-exp(A_log)``, a norm around 1 and not around 0), what arrives is not yet what it stores. Therefore:

1. ``landing(src, dst)`` gives the layout in which a receiver lands what it gets, and the steps that make
   of it what ``dst`` stores. Plan to that layout, ``plan(src, landed)``; one straight to ``dst`` is refused.
2. What has landed are the source's values, so that it can be compared with the source's fingerprints.
3. ``apply(steps, rank, landed, final)`` then fills the arrays that steps name. All others have landed where
   they belong, and no step touches them.

An array is converted in place where ``step.in_place`` and the same tensor is given as landed and as final;
else it lands in memory of its own. The padding of arrays that have some is zeroed: a plan never writes it,
and a staging buffer holds whatever was there before.

>>> from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, Transform
>>> tensor = Tensor("A_log", (4,), "bfloat16")
>>> trainer = Layout("trainer", Mesh(()), (BufferRule("A_log", (Part(tensor),), tensor.dims),))
>>> rule = BufferRule("A", (Part(tensor),), tensor.dims, dtype="float32", transform=Transform("neg_exp"))
>>> landed, steps = landing(trainer, Layout("engine", Mesh(()), (rule,)))
>>> print(*steps)
A (of A_log): bfloat16, identity -> float32, neg_exp; by neg_exp in float32
>>> got, final = {"A": torch.zeros(4, dtype=torch.bfloat16)}, {"A": torch.empty(4)}
>>> apply(steps, 0, got, final)
>>> final["A"]
tensor([-1., -1., -1., -1.])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardweave.errors import BufferRuleError, DtypeError, TransformError, UnknownNameError
from shardweave.layout import PAD, Buffer, BufferRule, Layout, Mesh, Transform
from shardweave.layout.buffer import table_of
from shardweave.layout.dtype import lossless
from shardweave.layout.transform import Operation, change

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_BLOCK = 1 << 24
"""Elements that are worked on at once; in float64, 128 MiB."""


@dataclass(frozen=True)
class Step:
    """What is done to one buffer once it has landed: its values converted, its padding zeroed.

    Attributes:
        landed: The buffer as it lands: the destination's name and dims, the source's transform and dtype.
        final: The buffer as the destination stores it.
        mesh: The destination's ranks.
    """

    landed: BufferRule
    final: BufferRule
    mesh: Mesh

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What is done to each value, first to last; nothing where the padding is zeroed only."""
        return change(self.landed.transform, self.final.transform)

    @property
    def dtype(self) -> str:
        """The dtype in which it is done: see ``apply`` for why."""
        if not self.operations:
            return self.final.dtype
        alone = [name for name, _ in self.operations] == ["neg_exp"]
        double = "float64" in (self.landed.dtype, self.final.dtype)
        return "float32" if alone and not double else "float64"

    @property
    def exact(self) -> bool:
        """Whether no value is rounded (away from overflow and underflow)."""
        powers = (
            name in ("multiply", "divide") and math.frexp(constant)[0] in (0.5, -0.5)
            for name, constant in self.operations
        )
        return all(powers) and lossless(self.landed.dtype, self.final.dtype)

    @property
    def in_place(self) -> bool:
        """Whether it can land in the final array itself: both have one dtype."""
        return self.landed.dtype == self.final.dtype

    def arrays(self, rank: int) -> Iterator[str]:
        """The names of the arrays that the step fills on a rank, in both layouts."""
        buffer = self.final.at(self.mesh, rank)
        yield from (name for name, _ in buffer.members()) if buffer is not None else ()

    def __str__(self) -> str:
        told = []
        if self.landed != self.final:
            told.append(
                " -> ".join(f"{rule.dtype}, {_said(rule.transform)}" for rule in (self.landed, self.final))
            )
        if self.operations:
            words = (
                name if name in ("neg_exp", "log_neg") else f"{name} {c:g}" for name, c in self.operations
            )
            told.append(f"by {', '.join(words)} in {self.dtype}")
        if _padded(self.final):
            told.append("padding to 0")
        of = ", ".join(part.tensor.name for part in self.final.parts)
        return f"{self.final.name}{'' if of == self.final.name else f' (of {of})'}: {'; '.join(told)}"


def _said(transform: Transform) -> str:
    return transform.kind if not transform.constant else f"{transform.kind} {transform.constant:g}"


# --- which steps --------------------------------------------------------------------------------


def landing(
    src: Layout, dst: Layout, *, as_sent: bool = False, allow_casts: bool = False
) -> tuple[Layout, tuple[Step, ...]]:
    """The layout in which a receiver lands what it gets, and the steps to what ``dst`` stores.

    A buffer whose source stores other values lands in the source's transform and dtype, so that nothing is
    rounded before the step; all others land as ``dst`` has them.

    Laws:
        Same input, same steps.
        ``plan(src, landed)`` is not refused for a transform.
        Where transforms agree and nothing is padded there are no steps, and the layout is ``dst``.
        After ``plan(src, landed)`` and ``apply``, an array is ``dst.transform`` of the logical values,
        rounded as ``apply`` says, with zeros for padding.

    Args:
        src: Where the state is.
        dst: What the receiver stores in the end.
        as_sent: Whether everything lands in the dtype that it is sent in, so that a change of dtype is a step
            as well and what has landed can be compared with the source's fingerprints.
        allow_casts: Whether a step may store values in a dtype that cannot hold them all, as in ``plan``.

    Raises:
        TransformError: The tensors of one buffer are stored by different transforms at the source, or the
            dtype of one side has no arithmetic.
        DtypeError: The destination's dtype does not hold the source's values, and that was not allowed; or
            no dtype of the source holds those of the others.
    """
    rules, steps = [], []
    for final in dst.rules:
        landed = _landed(src, dst, final, as_sent=as_sent)
        rules.append(landed)
        if landed != final or _padded(final):
            step = Step(landed, final, dst.mesh)
            _check(step, allow_casts=allow_casts)
            steps.append(step)
    return replace(dst, rules=tuple(rules)), tuple(steps)


def _landed(src: Layout, dst: Layout, final: BufferRule, *, as_sent: bool) -> BufferRule:
    """A buffer of the destination as it lands. What the source does not have is for the plan to refuse."""
    found = [
        (part.tensor.name, src.rules[number])
        for part in final.parts
        for number, _ in src.holders.get(part.tensor, ())
    ]
    if not found:
        return final
    (first, one), *others = found
    for name, other in others:
        if other.transform != one.transform:
            raise TransformError(
                "what lands in one buffer is stored by one transform at the source",
                where=f"buffer {final.name!r} of layout {dst.name!r}, tensors {first!r} and {name!r}",
                equation=f"{_said(one.transform)} of {one.name!r} != "
                f"{_said(other.transform)} of {other.name!r}",
                hint="publish the tensors of the buffer in one form",
            )
    differs = one.transform != final.transform
    if not differs and not as_sent:
        return final
    dtypes = list(dict.fromkeys(rule.dtype for _, rule in found))
    # Of several dtypes the one that holds the values of all, so that landing rounds nothing.
    holds = [one for one in (*dtypes, final.dtype) if all(lossless(other, one) for other in dtypes)]
    if not holds:
        raise DtypeError(
            "what lands in one buffer fits in one of the dtypes at the source",
            where=f"buffer {final.name!r} of layout {dst.name!r}",
            equation=f"none of {', '.join(dtypes)} holds the others",
            hint="publish the tensors of the buffer in one dtype",
        )
    return replace(final, transform=one.transform, dtype=holds[0])


def _check(step: Step, *, allow_casts: bool) -> None:
    landed, final = step.landed, step.final
    where = f"buffer {final.name!r} of {', '.join(part.tensor.name for part in final.parts)}"
    for dtype in (landed.dtype, final.dtype) if step.operations else ():
        if dtype not in _FLOATS:
            raise TransformError(
                "values are converted between dtypes that have arithmetic",
                where=where,
                equation=f"dtype({dtype}) is not one of {', '.join(_FLOATS)}",
                hint="dequantise before, or publish the values in a dtype of 16 bits or more",
            )
    if not (allow_casts or lossless(landed.dtype, final.dtype)):
        raise DtypeError(
            "the destination's dtype holds every value of the source's",
            where=where,
            equation=f"{landed.dtype} does not fit in {final.dtype}",
            hint="keep the dtype, or allow casts (allow_casts=True)",
        )


# --- carrying them out --------------------------------------------------------------------------


def apply(
    steps: Sequence[Step],
    rank: int,
    landed: Mapping[str, torch.Tensor],
    final: Mapping[str, torch.Tensor],
) -> None:
    """Fill the arrays that steps name on a rank: values converted, padding zeroed.

    Everything is checked before the first array is written. A step reads an array of ``landed`` and writes
    the one of that name in ``final``. The same tensor in both is converted in place: do not repeat it.

    Law: an element is ``dst(src^-1(landed))``, rounded as follows, and bit-exact where ``step.exact``.

    - Sums, products, quotients and logarithms are done in float64 and then rounded to the final dtype. For
      one sum, product or quotient of numbers that the final dtype holds, this is the exact result rounded
      once: 53 bits are at least twice the 24 of float32 and two more, and 24 the same of float16 and bfloat16
      (to which torch goes by way of float32), so that rounding on the way is harmless.
    - ``neg_exp`` is ``-torch.exp`` of float32 values, on the device where they landed: to the bit what a
      loader does that computes it in float32, and so within the error of that one function.

    Args:
        steps: From ``landing``.
        rank: The global rank whose arrays these are.
        landed: The arrays that the plan filled, by name; more than the steps name are ignored.
        final: The arrays of the destination, by name; more than the steps name are not touched.

    Raises:
        UnknownNameError: An array of a step is missing.
        BufferRuleError, DtypeError: An array has not the shape or dtype of its layout, or landed and final
            overlap without being the same.
        TransformError: A stored value is none that the source's transform can have made (``-exp`` is negative
            and finite), so that it cannot be undone. No array has been written.
    """
    work = []
    for step in steps:
        buffer = step.final.at(step.mesh, rank)
        for name in step.arrays(rank):
            assert buffer is not None
            source = _array(landed, name, buffer, step.landed.dtype, rank, "landed")
            target = _array(final, name, buffer, step.final.dtype, rank, "final")
            _check_memory(name, rank, source, target)
            if step.operations and step.operations[0][0] == "log_neg":
                _check_negative(name, rank, buffer, source)
            work.append((step, buffer, source, target))
    for step, buffer, source, target in work:
        if step.operations or not _same(source, target):
            _convert(step, source, target)
        for place in _padding(buffer):
            target[place] = 0


def _array(
    arrays: Mapping[str, torch.Tensor], name: str, buffer: Buffer, dtype: str, rank: int, which: str
) -> torch.Tensor:
    where = f"rank {rank}, {which} array {name!r}"
    if name not in arrays:
        raise UnknownNameError(
            "the arrays of a step are given",
            where=where,
            equation=f"it is not among {len(arrays)} arrays",
            hint="give every array of step.arrays(rank), landed and final",
        )
    array = arrays[name].detach()
    if tuple(array.shape) != buffer.shape:
        raise BufferRuleError(
            "an array has the shape of its layout",
            where=where,
            equation=f"shape{tuple(array.shape)} != {buffer.shape}",
            hint="give the arrays of the rank that is named",
        )
    if array.dtype != getattr(torch, dtype):
        raise DtypeError(
            "an array has the dtype of its layout",
            where=where,
            equation=f"dtype({str(array.dtype).removeprefix('torch.')}) != dtype({dtype})",
            hint="what landed has the source's dtype, what is final the destination's",
        )
    return array


def _check_memory(name: str, rank: int, source: torch.Tensor, target: torch.Tensor) -> None:
    """Landed and final are the same elements or have none in common."""
    if source.device != target.device or not source.numel() or _same(source, target):
        return
    (a, b), (c, d) = (_extent(source), _extent(target))
    if a < d and c < b:
        raise BufferRuleError(
            "what landed is the final array itself or lies apart from it",
            where=f"rank {rank}, array {name!r}",
            equation=f"bytes {a}..{b} and {c}..{d} overlap",
            hint="give the same tensor twice to convert in place",
        )


def _same(source: torch.Tensor, target: torch.Tensor) -> bool:
    return (source.data_ptr(), source.stride(), source.dtype) == (
        target.data_ptr(),
        target.stride(),
        target.dtype,
    )


def _extent(array: torch.Tensor) -> tuple[int, int]:
    """The addresses between which an array lies."""
    span = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True))
    return array.data_ptr(), array.data_ptr() + (span + 1) * array.element_size()


def _check_negative(name: str, rank: int, buffer: Buffer, source: torch.Tensor) -> None:
    bad = ~(torch.isfinite(source) & (source < 0))
    for place in _padding(buffer):
        bad[place] = False
    if bool(bad.any()):
        at = tuple(torch.nonzero(bad)[0].tolist())
        raise TransformError(
            "what is stored as -exp(x) is negative and finite, so that x is its logarithm",
            where=f"rank {rank}, array {name!r} at {list(at)}",
            equation=f"stored({source[at].item():g}); {int(bad.sum())} of {bad.numel()} are no -exp(x)",
            hint="the source stores something else, or exp has overflowed; publish the logical values",
        )


def _convert(step: Step, source: torch.Tensor, target: torch.Tensor) -> None:
    rows = max(_BLOCK // max(source[:1].numel(), 1), 1) if source.ndim else 0
    parts = zip(source.split(rows), target.split(rows), strict=True) if source.ndim else [(source, target)]
    for old, new in parts:
        values = old.to(getattr(torch, step.dtype)) if step.operations else old
        for name, constant in step.operations:
            values = _carried_out(name, constant, values)
        new.copy_(values)


def _carried_out(name: str, constant: float, values: torch.Tensor) -> torch.Tensor:
    match name:
        case "add":
            return values + constant
        case "multiply":
            return values * constant
        case "divide":
            return values / constant
        case "neg_exp":
            return -torch.exp(values)
        case "log_neg":
            return torch.log(-values)
    raise AssertionError(f"{name} is an operation of layout.transform")


# --- padding ------------------------------------------------------------------------------------


def _padded(rule: BufferRule) -> bool:
    return any(run.label is PAD for dim in rule.dims for each in table_of(dim) for run in each.runs)


def _padding(buffer: Buffer) -> Iterator[tuple[slice, ...]]:
    """The padding of each array of a buffer: stretches of single dims, over the whole of the others."""
    for at, number in enumerate(buffer.stacked):
        dim = buffer.dims[number]
        for start, run in zip(dim.positions, dim.runs, strict=True):
            if run.label is PAD:
                yield (*[slice(None)] * at, slice(start, start + run.count))
