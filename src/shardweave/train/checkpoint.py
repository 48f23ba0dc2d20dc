"""The state of a run from checkpoints and to them: weights of any format, optimizer states of the native one.

A rank reads the bytes that it needs and no others. Weights of Hugging Face and Megatron checkpoints come by
a plan from how they are stored to how ranks hold them; native checkpoints hold boxes of logical tensors, of
which each rank reads those that it has a part of. Nothing depends on the layout that something was saved at.

Ranks hear of each other through an *exchange*: over a group, or through a store where saves run in the
background, which then do not meet the collectives of the steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardweave.convert import GROUPS, Checkpoint, open_checkpoint
from shardweave.errors import DtypeError, OutsideError, TransportTimeoutError, UnknownNameError
from shardweave.layout import PAD, Box, Layout, intersect
from shardweave.layout.dtype import itemsize, lossless
from shardweave.plan import Copy, Family, Plan, plan
from shardweave.store import native
from shardweave.store.manifest import Manifest
from shardweave.store.native import Wanted
from shardweave.store.native_agree import Exchange, alone
from shardweave.store.native_held import Held, held_of
from shardweave.store.native_manifest import About
from shardweave.store.native_write import Saver
from shardweave.store.read import Reader
from shardweave.train.collectives import gather_parts
from shardweave.train.grid import Group
from shardweave.train.muon import MOMENTUM
from shardweave.train.optimizer import FIRST, MASTER, SECOND

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shardweave.train.optimizer import Optimizer, StateBox

_WORDS: Mapping[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLAB_BYTES = 16 << 20
"""The most that is held beside an array while values are cast, or brought to a device."""
_STEP = "optim/all/step"


# --- hearing of each other ----------------------------------------------------------------------


def over_group(group: Group, *, device: str | torch.device = "cpu") -> Exchange:
    """An exchange by collectives of a group, for saves that are not in the background.

    Args:
        group: All ranks that save.
        device: Where the group sends from.
    """

    def exchange(data: bytes) -> list[bytes]:
        if group.comm is None:
            return [data]
        size = torch.tensor([len(data)], dtype=torch.int64, device=device)
        sizes = [int(part) for part in gather_parts(size, group=group)]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        parts = gather_parts(padded.to(device), group=group)
        return [part[:n].cpu().numpy().tobytes() for part, n in zip(parts, sizes, strict=True)]

    return exchange


def through_store(store: Store, *, rank: int, size: int, timeout_s: float = 600.0) -> Exchange:
    """An exchange through a store, also for saves in the background.

    Args:
        store: A store that all ranks reach, with a prefix that nothing else uses.
        rank: This rank, counted from 0 among those that save.
        size: How many they are.
        timeout_s: The longest to wait for the slowest rank: to write its file, above all.
    """
    own: Store = store.clone()  # type: ignore[attr-defined]  # one connection is not for two threads
    turn = 0

    def exchange(data: bytes) -> list[bytes]:
        nonlocal turn
        keys = [f"{turn}/{other}" for other in range(size)]
        own.set(keys[rank], data)  # type: ignore[arg-type]  # bytes as well
        try:
            own.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransportTimeoutError(
                "every rank takes part in a save in time",
                where=f"rank {rank}, round {turn}",
                equation=f"timeout_s({timeout_s:g}): {str(error).partition(chr(10))[0]:.200}",
                hint="look at the log of the rank that is missing; the checkpoint before is as it was",
            ) from error
        found = [bytes(own.get(key)) for key in keys]
        if turn:  # all have begun this round, so all have read the one before
            with contextlib.suppress(RuntimeError, NotImplementedError):
                own.delete_key(f"{turn - 1}/{rank}")
        turn += 1
        return found

    return exchange


# --- native -------------------------------------------------------------------------------------


def saver(
    run: Path,
    *,
    rank: int = 0,
    exchange: Exchange = alone,
    keep: int | None = None,
    compare_replicas: bool = True,
    fsync: bool = True,
) -> Saver:
    """What saves a run's state, again and again; see ``Saver``.

    >>> import tempfile, torch
    >>> from shardweave.layout import BufferRule, Mesh, Part, whole
    >>> from shardweave.layout import Tensor as Logical
    >>> norm = Logical("model.norm.weight", (6,), "float32")
    >>> layout = Layout("one", Mesh(()), (BufferRule(norm.name, (Part(norm),), norm.dims),))
    >>> arrays = {"model.norm.weight": torch.arange(6.0)}
    >>> run = Path(tempfile.mkdtemp())
    >>> saver(run).save(weights_of(layout, 0, arrays), About(step=3)).name
    'step-00000003'
    >>> found = {"model.norm.weight": torch.full((6,), torch.nan)}
    >>> load_weights(run, layout=layout, rank=0, arrays=found).step
    3
    >>> found["model.norm.weight"]
    tensor([0., 1., 2., 3., 4., 5.])
    """
    return Saver(
        run,
        rank=rank,
        exchange=exchange,
        keep=keep,
        compare_replicas=compare_replicas,
        words=words_of,
        fsync=fsync,
    )


def words_of(array: Any) -> NDArray[Any]:
    """The words of a tensor, a view where it is on the processor; an array of numpy is what it is."""
    if not isinstance(array, Tensor):
        return np.asarray(array)
    found = array.detach().cpu()
    if found.is_complex():
        return found.numpy()
    size = found.element_size()
    return found.view(_WORDS[size]).numpy().view(f"<u{size}")


def weights_of(layout: Layout, rank: int, arrays: Mapping[str, Tensor]) -> Iterator[Held]:
    """The weights of a rank as ``Saver.save`` takes them.

    Args:
        layout: What ranks hold.
        rank: The global rank.
        arrays: Its arrays by name.
    """
    return held_of(layout, rank, {name: array.detach() for name, array in arrays.items()})


def states_of(optimizer: Optimizer) -> Iterator[Held]:
    """The optimizer's state that this rank stands for: moments, masters, and the number of the step."""
    for state in optimizer.owned():
        yield from _boxes(state)
    yield Held(_STEP, (), "int64", Box(()), torch.tensor(optimizer.count))


def _boxes(state: StateBox) -> Iterator[Held]:
    """What a box of an array has of each tensor, without padding."""
    dtype = str(state.values.dtype).removeprefix("torch.")
    for part in state.held.parts:
        common = intersect(part.at, state.box)
        if common is None:
            continue
        values = state.values[
            tuple(
                slice(r[0] - own[0], r[-1] - own[0] + 1)
                for r, own in zip(common.dims, state.box.dims, strict=True)
            )
        ]
        # What the array has beside the dims of the tensor is one index here: a layer, an expert.
        extra = [i for i in range(values.dim()) if i not in part.order]
        values = values.permute(*extra, *part.order)[(0,) * len(extra)]
        box = []
        for numbers, d in zip(part.box.dims, part.order, strict=True):
            first = part.at.dims[d].index(common.dims[d][0])
            box.append(numbers[first : first + len(common.dims[d])])
        yield from _plain(
            Held(f"optim/{part.name}/{state.state}", part.shape, dtype, Box(tuple(box)), values)
        )


def _plain(one: Held) -> Iterator[Held]:
    """A box of step 1, or its rows where they have another step."""
    dim = next((d for d, r in enumerate(one.box.dims) if r.step > 1 and len(r) > 1), None)
    if dim is None:
        yield one
        return
    for i, number in enumerate(one.box.dims[dim]):
        dims = (*one.box.dims[:dim], range(number, number + 1), *one.box.dims[dim + 1 :])
        yield from _plain(replace(one, box=Box(dims), values=one.values.narrow(dim, i, 1)))


def load_states(path: Path, optimizer: Optimizer, *, verify: bool = True) -> None:
    """Fill an optimizer's state from a native checkpoint, whatever layout it was saved at.

    Where the checkpoint has no masters, because its weights are of full precision, these are the masters.

    Args:
        path: The checkpoint, or a run folder, of which the newest is read.
        optimizer: What to fill; also its count of steps.
        verify: Whether stored boxes that are read whole are compared with their digests.

    Raises:
        UnknownNameError: The checkpoint has no such state, or one of another optimizer. Nothing was filled.
        DigestError and the errors of ``native.read``.
    """
    manifest = native.read(path, headers=False)
    _require_own(manifest)
    step = torch.zeros((), dtype=torch.int64)
    ones = [one for state in optimizer.states() for one in _boxes(state)]
    ones = [*(_or_weight(one, manifest) for one in ones), Held(_STEP, (), "int64", Box(()), step)]
    _fill(manifest, ones, allow_casts=False, verify=verify)
    optimizer.count = int(step)


def _require_own(manifest: Manifest) -> None:
    """Refuse a state that came from an optimizer that does something else, and would not go on as it was."""
    states = {key.rpartition("/")[2] for key in manifest.tensors if key.startswith("optim/") and key != _STEP}
    odd = {f"state {name}" for name in states - {MASTER, FIRST, SECOND, MOMENTUM}}
    groups = manifest.records["about"].extras.get(GROUPS, ())
    for said in groups:
        odd |= {f"{key}({said[key]})" for key in ("amsgrad", "maximize") if said.get(key)}
        if said.get("weight_decay") and said.get("decoupled_weight_decay") is False:
            odd.add("decoupled_weight_decay(False)")
    if odd:
        raise UnknownNameError(
            "a run goes on with AdamW or Muon",
            where=str(manifest.root),
            equation=", ".join(sorted(odd)),
            hint="train it with AdamW before it is converted, or start from its weights alone",
        )


def _or_weight(one: Held, manifest: Manifest) -> Held:
    """The weight in place of a master that was not stored."""
    name, _, state = one.key.removeprefix("optim/").rpartition("/")
    if state != MASTER or one.key in manifest.tensors:
        return one
    return replace(one, key=f"model/{name}")


def _or_master(one: Held, manifest: Manifest) -> Held:
    """The master in place of a weight that was stored with less precision than is asked for."""
    master = f"optim/{one.key.removeprefix('model/')}/{MASTER}"
    if master not in manifest.tensors or one.key not in manifest.tensors:
        return one
    if manifest.tensors[one.key].dtype != one.dtype and manifest.tensors[master].dtype == one.dtype:
        return replace(one, key=master)
    return one


# --- weights of any format ----------------------------------------------------------------------


def load_weights(
    path: Path,
    *,
    layout: Layout,
    rank: int,
    arrays: Mapping[str, Tensor],
    config: Path | Mapping[str, Any] | None = None,
    allow_casts: bool = False,
    verify: bool = True,
) -> About:
    """Fill the arrays of a rank from a Hugging Face, Megatron or native checkpoint.

    Ranks do not communicate. Padding becomes 0.

    Args:
        path: The checkpoint.
        layout: What ranks hold.
        rank: The global rank.
        arrays: Its arrays by name; they are written in place.
        config: The Hugging Face config, where the checkpoint has none with it.
        allow_casts: Whether values may be rounded to the arrays' dtype.
        verify: Whether stored boxes that are read whole are compared with their digests, where there are any.

    Returns:
        What the checkpoint says beside its weights; of other formats the config only.

    Raises:
        DtypeError: The arrays cannot hold the stored values, and casts were not allowed.
        UnknownNameError, PlanError, OutsideError: It is of another model. Nothing was written.
        The errors of the formats: the files are damaged.
    """
    path = Path(path)
    _check_arrays(layout, rank, arrays)
    if native.is_native(path):
        manifest = native.read(path, headers=False)
        ones = [_or_master(one, manifest) for one in weights_of(layout, rank, arrays)]
        _fill(manifest, ones, allow_casts=allow_casts, verify=verify)
        about: About = manifest.records["about"]
    else:
        source = open_checkpoint(path, config=config)
        _fill_planned(source, layout, rank, arrays, allow_casts=allow_casts)
        about = About(config=dict(source.config))
    _zero_padding(layout, rank, arrays)
    return about


def _check_arrays(layout: Layout, rank: int, arrays: Mapping[str, Tensor]) -> None:
    for name, (buffer, _) in layout.arrays(rank).items():
        found = arrays.get(name)
        dtype = None if found is None else str(found.dtype).removeprefix("torch.")
        if found is None or tuple(found.shape) != buffer.shape or dtype != buffer.dtype:
            raise OutsideError(
                "the arrays of a rank are those of its layout",
                where=f"rank {rank}, array {name!r}",
                equation="it is not there"
                if found is None
                else f"{dtype} {tuple(found.shape)} != {buffer.dtype} {buffer.shape}",
                hint="make the arrays from the layout that is passed along with them",
            )


def _fill(manifest: Manifest, ones: Iterable[Held], *, allow_casts: bool, verify: bool) -> None:
    """Read boxes of a native checkpoint, straight to their place where no value changes."""
    straight: list[Wanted] = []
    others: list[tuple[Held, str]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for one in ones:
        shapes[one.key] = one.shape
        stored = manifest.tensors.get(one.key)
        if stored is None:
            continue
        _check_cast(stored.dtype, one.dtype, allow_casts, where=f"{manifest.root}, {one.key!r}")
        if stored.dtype == one.dtype and one.values.device.type == "cpu":
            straight.append(Wanted(one.key, one.shape, one.box, words_of(one.values)))
        else:
            others.append((one, stored.dtype))
    native.check_wanted(manifest, shapes)
    native.fill(manifest, straight, verify=verify)
    for one, dtype in others:
        for part in _slabs(one, itemsize(dtype)):
            words = np.empty(part.box.shape, f"<u{itemsize(dtype)}")
            native.fill(manifest, [Wanted(part.key, part.shape, part.box, words)], verify=verify)
            part.values.copy_(_tensor(words, dtype))


def _slabs(one: Held, item: int) -> Iterator[Held]:
    """A box in pieces of bounded size, along its first dim."""
    rows = one.box.shape[0] if one.box.dims else 0
    step = max(1, _SLAB_BYTES * rows // max(1, one.box.numel * item)) if rows else 1
    if rows <= step:
        yield one
        return
    for at in range(0, rows, step):
        dims = (one.box.dims[0][at : at + step], *one.box.dims[1:])
        yield replace(one, box=Box(dims), values=one.values[at : at + step])


def _tensor(words: NDArray[Any], dtype: str) -> Tensor:
    """Words as a tensor of their dtype."""
    size = itemsize(dtype)
    found = torch.from_numpy(np.ascontiguousarray(words).view(f"i{size}"))
    return found.view(getattr(torch, dtype))


def _check_cast(source: str, target: str, allow_casts: bool, *, where: str) -> None:
    if not allow_casts and not lossless(source, target):
        raise DtypeError(
            "an array holds every value of what is stored",
            where=where,
            equation=f"{source} does not fit in {target}",
            hint="train in the stored dtype, or allow casts (allow_casts=True)",
        )


def _fill_planned(
    source: Checkpoint, layout: Layout, rank: int, arrays: Mapping[str, Tensor], *, allow_casts: bool
) -> None:
    """Read what the plan brings to this rank."""
    moves = plan(source.layout, _described(layout, source.layout), allow_casts=allow_casts)
    mine = [_only(family, rank) for family in moves.families]
    dtypes = {name: buffer.dtype for name, (buffer, _) in source.layout.arrays(0).items()}
    views = {name: array.detach() for name, array in arrays.items()}
    with Reader(source.manifest) as reader:
        for copy in Plan(moves.src, moves.dst, tuple(mine)).copies():
            view = views[copy.dst_name][tuple(slice(r.start, r.stop, r.step) for r in copy.dst_box.dims)]
            _read(reader, copy, copy.to_source(view), dtypes[copy.src_name])


def _only(family: Family, rank: int) -> Family:
    """The moves of a family that bring something to a rank."""
    kept = family.dst == rank
    return replace(family, box=family.box[kept], src=family.src[kept], dst=family.dst[kept])


def _described(layout: Layout, source: Layout) -> Layout:
    """The same layout, of the same tensors in the dtype that the source stores them in."""
    stored = {tensor.name: tensor for tensor in source.tensors}
    rules = []
    for rule in layout.rules:
        parts = tuple(
            replace(part, tensor=replace(part.tensor, dtype=stored[part.tensor.name].dtype))
            if part.tensor.name in stored
            else part
            for part in rule.parts
        )
        rules.append(replace(rule, parts=parts))
    return replace(layout, rules=tuple(rules))


def _read(reader: Reader, copy: Copy, view: Tensor, stored: str) -> None:
    """One copy, into a view that has its dims in the source's order."""
    dense = all(r.step == 1 or len(r) < 2 for r in copy.src_box.dims)
    offset = [r.start for r in copy.src_box.dims]
    same = stored == str(view.dtype).removeprefix("torch.")
    if dense and same and view.device.type == "cpu":
        reader.fill(copy.src_name, offset, words_of(view))
        return
    # Slabs along the first dim that has more than one index; steps are read with what is between.
    dims = copy.src_box.dims
    dim = next((d for d, r in enumerate(dims) if len(r) > 1), 0)
    rows = len(dims[dim]) if dims else 1
    hull = [r[-1] - r[0] + 1 for r in dims]
    row_bytes = int(np.prod(hull)) // max(1, rows) * itemsize(stored)
    step = max(1, _SLAB_BYTES // max(1, row_bytes))
    for at in range(0, rows, step):
        parts = [r[at : at + step] if d == dim else r for d, r in enumerate(dims)]
        words = reader.load_box(copy.src_name, [r[0] for r in parts], [r[-1] - r[0] + 1 for r in parts]).view(
            f"<u{itemsize(stored)}"
        )
        block = words[tuple(slice(None, None, r.step) for r in parts)]
        target = view.narrow(dim, at, len(parts[dim])) if dims else view
        target.copy_(_tensor(block, stored))


def _zero_padding(layout: Layout, rank: int, arrays: Mapping[str, Tensor]) -> None:
    """Rows that no token has compute to 0, and not to what was in memory."""
    for name, (buffer, _) in layout.arrays(rank).items():
        for axis, d in enumerate(buffer.stacked):
            for run, at in zip(buffer.dims[d].runs, buffer.dims[d].positions, strict=True):
                if run.label is PAD:
                    arrays[name].detach().narrow(axis, at, run.count).zero_()
