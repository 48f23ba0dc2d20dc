"""Whether an engine's own loader puts every element where the layout says: a marker probe of the live engine.

Weights that say where they come from are loaded, and what landed is compared with the layout, element by
element. A marker has to survive the engine's dtype: bfloat16 keeps integers up to 256. Therefore several
passes, each of which tells one digit: of the number of the tensor, then of the index along each of its dims.
Markers are views of a vector, so a pass takes no memory to speak of. Which tensor lands where is asked of all
of them, which row and column of the first and the last layer of each kind that the rank has: layers of a kind
are built by one piece of code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from shardweave.errors import DtypeError, GeometryError, ProbeError, UnknownNameError
from shardweave.layout import Buffer, Layout, Piece, Tensor
from shardweave.models import Model

BASES = {"bfloat16": 1 << 8, "float16": 1 << 11, "float32": 1 << 24, "float64": 1 << 53}
"""For each dtype, how many integers from 1 on it holds exactly."""

_TRANSFORMED = 64
"""As far as markers go where the loader computes with them: exp(64) is a number of float32."""

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True, slots=True)
class _Pass:
    """What a pass tells: one digit of the number of the tensor, or of the index along a dim of its shape."""

    dim: int | None
    digit: int
    base: int

    def of(self, numbers: torch.Tensor) -> torch.Tensor:
        """The markers of numbers: 1 to ``base``, so that 0 is none."""
        digits: torch.Tensor = numbers // self.base**self.digit % self.base
        return digits + 1

    def __str__(self) -> str:
        return "the tensor" if self.dim is None else f"the index along dim {self.dim}"


def check_parameters(layout: Layout, rank: int, arrays: Mapping[str, torch.Tensor]) -> None:
    """Whether the parameters of an engine's model are those of the layout, before anything is loaded.

    Args:
        layout: The layout.
        rank: The global rank.
        arrays: The parameters by name.

    Raises:
        UnknownNameError: The model has a parameter that nothing of the layout fills, or lacks one.
        GeometryError: One has another shape than the layout says.
        DtypeError: One has another dtype.
    """
    wanted = {name: buffer for name, (buffer, _) in layout.arrays(rank).items()}
    for name in (*wanted, *arrays):
        where = f"layout {layout.name!r}, rank {rank}, {name!r}"
        if name not in wanted or name not in arrays:
            raise UnknownNameError(
                "every parameter of the engine's model is filled, and the model has all that is described",
                where=where,
                equation="only the engine's model has it"
                if name in arrays
                else "the engine's model lacks it",
                hint="the model is described differently from how this version of the engine builds it",
            )
        shape, dtype = tuple(arrays[name].shape), str(arrays[name].dtype).removeprefix("torch.")
        if shape != wanted[name].shape:
            raise GeometryError(
                "a parameter of the engine's model has the shape that the layout says",
                where=where,
                equation=f"shape{shape} != shape{wanted[name].shape}",
                hint="an option of the engine pads or cuts in a way that is not described",
            )
        if dtype != wanted[name].dtype:
            raise DtypeError(
                "a parameter of the engine's model has the dtype of the engine",
                where=where,
                equation=f"dtype({dtype}) != dtype({wanted[name].dtype})",
                hint="the model keeps some of its weights in another dtype, which is not described",
            )


def check_loader(
    load: Load, arrays: Mapping[str, torch.Tensor], *, model: Model, layout: Layout, rank: int
) -> None:
    """Load markers and compare what landed with the layout. Overwrites the arrays.

    Args:
        load: The engine's loader, which fills ``arrays``.
        arrays: The parameters of the rank under the layout's names.
        model: The tensors to load.
        layout: The layout.
        rank: The global rank.

    Raises:
        ProbeError: An element did not land where the layout says, or something landed where it says padding;
            names the array, the position and the marker.
    """
    dtypes = {buffer.dtype for buffer in layout.buffers(rank)}
    base = min(BASES.get(dtype, 0) for dtype in dtypes)
    if any(buffer.transform.kind != "identity" for buffer in layout.buffers(rank)):
        base = min(base, _TRANSFORMED)
    if not base:
        raise ProbeError(
            "a marker probe has a dtype that holds integers",
            where=f"layout {layout.name!r}, rank {rank}",
            equation=f"dtypes({', '.join(sorted(dtypes))}) not all of {', '.join(BASES)}",
            hint="weights of other dtypes need markers of their own",
        )
    names = [name for tensor in model.tensors for name in tensor.names()]
    numbers = {name: number for number, name in enumerate(names)}
    some = _representatives(model, layout, rank)
    for one in _passes(model, len(names), base):
        for array in arrays.values():
            array.fill_(math.nan)
        load(_markers(model, one, numbers, None if one.dim is None else some))
        for name, (buffer, positions) in layout.arrays(rank).items():
            if one.dim is not None and not (_layer(buffer, positions) in some and _has_dim(buffer, one.dim)):
                continue
            expected = _expected(buffer, positions, one, numbers, arrays[name])
            where, transformed = f"rank {rank}, array {name!r}", buffer.transform.kind != "identity"
            _compare(arrays[name], expected, one, names, transformed=transformed, where=where)


def _passes(model: Model, num_names: int, base: int) -> Iterator[_Pass]:
    for digit in range(_digits(num_names, base)):
        yield _Pass(None, digit, base)
    for dim in range(max(len(tensor.shape) for tensor in model.tensors)):
        size = max(tensor.shape[dim] for tensor in model.tensors if len(tensor.shape) > dim)
        for digit in range(_digits(size, base)):
            yield _Pass(dim, digit, base)


def _digits(size: int, base: int) -> int:
    digits = 1
    while base**digits < size:
        digits += 1
    return digits


def _representatives(model: Model, layout: Layout, rank: int) -> set[int]:
    """The layers whose every element is looked at, -1 standing for what is in none."""
    held = {_layer(buffer, positions) for buffer, positions in layout.arrays(rank).values()}
    some = {-1}
    for block in model.blocks:
        mine = sorted(held & {number for _, number in block.layers})
        some |= {mine[0], mine[-1]} if mine else set()
    return some


def _layer(buffer: Buffer, positions: tuple[int, ...]) -> int:
    index = [name for name, _ in buffer.parts[0].tensor.index]
    if "layer" not in index:
        return -1
    dim = index.index("layer")
    return buffer.dims[dim][positions[buffer.separate.index(dim)]][1]


def _has_dim(buffer: Buffer, dim: int) -> bool:
    return len(buffer.parts[0].tensor.shape) > dim


def _markers(
    model: Model, one: _Pass, numbers: Mapping[str, int], layers: set[int] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in model.tensors:
        dtype = getattr(torch, tensor.dtype)
        if one.dim is not None and len(tensor.shape) <= one.dim:
            continue
        for name in tensor.names() if layers is None else _names_on(tensor, layers):
            if one.dim is None:
                values = one.of(torch.tensor([numbers[name]])).reshape([1] * len(tensor.shape))
            else:
                ahead = [-1 if d == one.dim else 1 for d in range(len(tensor.shape))]
                values = one.of(torch.arange(tensor.shape[one.dim])).reshape(ahead)
            yield name, values.to(dtype).expand(tensor.shape)


def _names_on(tensor: Tensor, layers: set[int]) -> Iterator[str]:
    index = dict(tensor.index)
    if "layer" not in index:
        yield from tensor.names()
        return
    for _, layer in index["layer"]:
        if layer in layers:
            others = Tensor(
                tensor.name.replace("{layer}", str(layer)),
                tensor.shape,
                tensor.dtype,
                tuple((name, dim) for name, dim in tensor.index if name != "layer"),
            )
            yield from others.names()


def _expected(
    buffer: Buffer, positions: tuple[int, ...], one: _Pass, numbers: Mapping[str, int], like: torch.Tensor
) -> torch.Tensor:
    """What an array holds after a pass; 0 where it is padding."""
    expected = torch.zeros(buffer.shape, dtype=like.dtype, device=like.device)
    # From the order in which the array is stored to that of the tensor's dims.
    view = expected.permute(*(buffer.stacked.index(d) for d in sorted(buffer.stacked)))
    at = dict(zip(buffer.separate, positions, strict=True))
    for piece in buffer.pieces():
        if any(position not in piece.at.dims[d] for d, position in at.items()):
            continue
        block = tuple(slice(r.start, r.stop, r.step) for d, r in enumerate(piece.at.dims) if d not in at)
        view[block] = _values(piece, at, one, numbers, tuple(view[block].shape)).to(like)
    if buffer.transform.kind != "identity":
        stored = buffer.transform.apply(expected.double().cpu().numpy())
        expected = torch.where(expected == 0, expected, torch.from_numpy(stored).to(like))
    return expected


def _values(
    piece: Piece, at: Mapping[int, int], one: _Pass, numbers: Mapping[str, int], shape: tuple[int, ...]
) -> torch.Tensor:
    index = [name for name, _ in piece.tensor.index]
    stacked = [d for d in range(len(piece.box.dims)) if d not in at]
    if one.dim is not None:
        dim = len(index) + one.dim
        along = torch.tensor(list(piece.box.dims[dim]), dtype=torch.int64)
        return one.of(along).reshape([-1 if d == dim else 1 for d in stacked]).expand(shape)
    fixed = {index[d]: piece.box.dims[d][piece.at.dims[d].index(at[d])] for d in at}
    free = [d for d in stacked if d < len(index)]
    lead = math.prod(len(piece.box.dims[d]) for d in free)
    found = torch.empty(lead, dtype=torch.int64)
    for i in range(lead):
        rest, member = i, dict(fixed)
        for d in reversed(free):
            rest, position = divmod(rest, len(piece.box.dims[d]))
            member[index[d]] = piece.box.dims[d][position]
        found[i] = numbers[piece.tensor.member(member)]
    own = [len(piece.box.dims[d]) if d in free else 1 for d in stacked]
    return one.of(found).reshape(own).expand(shape)


def _compare(
    array: torch.Tensor,
    expected: torch.Tensor,
    one: _Pass,
    names: list[str],
    *,
    transformed: bool,
    where: str,
) -> None:
    # Padding is zeroed by the loader or never written. Of a function of a marker the last bits are free.
    near = torch.isclose(array, expected, rtol=1e-5, atol=0) if transformed else array == expected
    same = near | ((expected == 0) & array.isnan())
    if bool(same.all()):
        return
    at = [int(i) for i in (~same).nonzero()[0]]
    got, wanted = (float(x[tuple(at)]) for x in (array, expected))
    told = str if transformed else functools.partial(_told, one=one, names=names)
    raise ProbeError(
        "the engine's loader puts every element where the layout says",
        where=f"{where}, position {at}",
        equation=f"{one}: {told(wanted)} != {told(got)}, {int((~same).sum())} elements differ",
        hint="this version of the engine lays this model out differently; nothing was changed",
    )


def _told(marker: float, one: _Pass, names: list[str]) -> str:
    if math.isnan(marker):
        return "never written"
    if marker == 0:
        return "padding"
    number = int(marker) - 1
    if one.dim is None and len(names) <= one.base and 0 <= number < len(names):
        return repr(names[number])
    return f"{number}" if one.digit == 0 else f"digit {one.digit} is {number} to the base {one.base}"
