"""Where every byte of a source went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardweave.convert.source import Checkpoint
from shardweave.errors import AccountingError
from shardweave.layout import Tensor
from shardweave.layout.dtype import itemsize
from shardweave.plan import Plan


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
    used = replica = 0
    padding: dict[str, int] = {}
    held: dict[Tensor, int] = defaultdict(int)
    for rule in layout.rules:
        buffer = rule.at(layout.mesh, 0)
        assert buffer is not None, "a stored layout has one rank"
        size = itemsize(rule.dtype)
        real = 0
        for part in rule.parts:
            elements = sum(piece.box.numel for piece in buffer.pieces() if piece.tensor == part.tensor)
            real += elements
            if part.replica:
                replica += elements * size
            else:
                used += elements * size
                held[part.tensor] += elements
        if buffer.numel != real:
            padding[buffer.name] = (buffer.numel - real) * size
    read: dict[Tensor, int] = defaultdict(int)
    for family in plan.families:
        # What is written once more, as a replica, uses nothing further.
        parts = plan.dst.rules[family.dst_rule].parts
        if not any(part.replica for part in parts if part.tensor == family.tensor):
            read[family.tensor] += int(family.numel[family.box].sum())
    for tensor, elements in held.items():
        if read[tensor] != elements:
            raise AccountingError(
                "every weight of the source is used",
                where=f"tensor {tensor.name!r}",
                equation=f"read {read[tensor]} of {elements} elements",
                hint="choose a target that holds it: a conversion drops no weight",
            )
    left_out = {key: manifest.tensors[key].num_bytes for key in source.left_out}
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
    reasons = {**source.left_out, **dict.fromkeys(objects, "object of the framework, cannot be converted")}
    return Account(used, replica, padding, left_out, total - payload, total, reasons)
