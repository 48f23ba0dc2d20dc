"""Where every byte of a source went."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from shardweave.convert.checkpoint import Checkpoint
from shardweave.errors import AccountingError
from shardweave.layout import Buffer, Layout, Tensor
from shardweave.layout.dtype import itemsize
from shardweave.layout.holders import first_holders
from shardweave.plan import Plan
from shardweave.store.manifest import Manifest

NOT_ASKED: Final = "not asked for"
"""Why what is stored of a model is left out of a part of it."""


@dataclass(frozen=True, slots=True)
class Account:
    """The bytes of a source's files, each in one row.

    Attributes:
        used: Bytes of weights, and of the state of an optimizer, that the target was made of.
        replica: Bytes of copies that were compared with those and agree.
        padding: Bytes of stored padding, by array.
        left_out: Bytes that are no weights, by key.
        format: Bytes of headers, indexes and alignment.
        total: Bytes of all data files together.
    """

    used: int
    replica: int
    padding: Mapping[str, int]
    left_out: Mapping[str, int]
    format: int
    total: int
    reasons: Mapping[str, str] = field(default_factory=dict)


def account(source: Checkpoint, plan: Plan) -> Account:
    """Account for every byte of a source.

    Raises:
        AccountingError: Some element of the source was not read by the plan, or bytes do not add up.
    """
    layout, manifest = source.layout, source.manifest
    places = manifest.records.get("objects", {})
    shared = _shared(manifest)
    held: dict[Tensor, int] = defaultdict(int)
    used = 0
    for key, buffer, elements in arrays_of(first_holders(layout)):
        for tensor, count in elements.items():
            held[tensor] += count
        if key not in shared:
            used += sum(elements.values()) * itemsize(buffer.dtype)
    stored, padding = 0, dict[str, int]()
    for key, buffer, elements in arrays_of(layout):
        if key in shared:
            continue
        real, size = sum(elements.values()), itemsize(buffer.dtype)
        stored += real * size
        if math.prod(buffer.shape) != real:
            padding[key] = (math.prod(buffer.shape) - real) * size
    replica = stored - used
    in_part = {key: padding.pop(key) for key in source.in_part & padding.keys()}
    for tensor, count in held.items():
        # A plan is proved to fill every element of every tensor that its target has.
        read = tensor.numel if tensor in plan.dst.holders else 0
        if read != count:
            raise AccountingError(
                "every weight of the source is used",
                where=f"tensor {tensor.name!r}",
                equation=f"read {read} of {count} elements",
                hint="choose a target that holds it: a conversion drops no weight",
            )
    left_out = in_part | {key: manifest.tensors[key].num_bytes for key in source.left_out}
    objects = {key: place for key, place in places.items() if key not in source.read}
    beside = sum(
        manifest.tensors[key].num_bytes if key in manifest.tensors else places[key]["length"]
        for key in source.read
    )
    left_out |= {key: int(place["length"]) for key, place in objects.items()}
    for key in manifest.records.get("overlaid", ()):
        left_out.setdefault(str(key), 0)
    used += beside
    total = sum(manifest.files.values())
    payload = used + replica + sum(padding.values()) + sum(left_out.values())
    if payload > total:
        raise AccountingError(
            "the parts of a source are not larger than its files",
            where=str(manifest.root),
            equation=f"used({used}) + replica({replica}) + padding({sum(padding.values())}) "
            f"+ left out({sum(left_out.values())}) = {payload} > files({total})",
            hint="two arrays share bytes in the files; the checkpoint is damaged",
        )
    reasons = {
        **dict.fromkeys(in_part, NOT_ASKED),
        **source.left_out,
        **dict.fromkeys(objects, "object of the framework, cannot be converted"),
    }
    return Account(used, replica, padding, left_out, total - payload, total, reasons)


def arrays_of(layout: Layout) -> Iterator[tuple[str, Buffer, Mapping[Tensor, int]]]:
    """Every array by key, with its buffer and the elements of each tensor in it."""
    counts: dict[int, Mapping[Tensor, int]] = {}
    for key, (buffer, _) in layout.stored().items():
        if id(buffer) not in counts:
            found: Counter[Tensor] = Counter()
            for piece in buffer.pieces():
                found[piece.tensor] += piece.box.numel
            members = math.prod(len(buffer.dims[d]) for d in buffer.separate)
            counts[id(buffer)] = {tensor: count // members for tensor, count in found.items()}
        yield key, buffer, counts[id(buffer)]


def _shared(manifest: Manifest) -> frozenset[str]:
    """The keys of arrays that are stored in the bytes of one before them."""
    seen: dict[object, str] = {}
    for key, tensor in manifest.tensors.items():
        if tensor.extents:
            seen.setdefault(tensor.extents, key)
    return frozenset(
        key for key, tensor in manifest.tensors.items() if tensor.extents and seen[tensor.extents] != key
    )
