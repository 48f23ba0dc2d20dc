"""Manifests of different ranks joined to one source layout, where they agree, and refused where not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from shardweave.errors import (
    DtypeError,
    GapError,
    GeometryError,
    OverlapError,
    PlanError,
    ReplicaError,
    UnknownNameError,
)
from shardweave.layout import PAD, Buffer, Dim, Layout, Mesh, Tensor, prove
from shardweave.layout.fingerprint import Fingerprint
from shardweave.layout.layout import format_ranks
from shardweave.refit.manifest import Manifest, not_empty, rule_of

_AXIS = "rank"


def merge(manifests: Iterable[Manifest], *, tensors: Iterable[Tensor] | None = None) -> Layout:
    """The source layout that manifests of different ranks describe together, proved.

    Ranks that hold the same are replicas, whichever manifest speaks for them; where they are
    fingerprinted, they are compared.

    Args:
        manifests: Of the ranks that are there; in any order.
        tensors: What must be published, all of it and nothing else; not looked at by default.

    Returns:
        The layout that all manifests state, where they state one and speak for all of its ranks; else a
        layout over the one axis ``rank``. It does not depend on the order of the manifests.

    Raises:
        PlanError: Versions differ, or a tensor has two shapes.
        GeometryError: Some manifests have versions or fingerprints and others have none.
        DtypeError: A tensor or its buffers have two dtypes.
        UnknownNameError: A tensor is published that is not among ``tensors``, or is never published.
        OverlapError: A rank is published twice, or ranks hold overlapping parts that are not the same.
        GapError: Nobody holds some element.
        ReplicaError: Two ranks that hold the same elements have different fingerprints.
    """
    found = sorted(manifests, key=lambda manifest: manifest.ranks)
    if not found:
        raise GapError(
            "a source layout is described by some manifest",
            equation="manifests(0)",
            hint="wait until the trainer has published",
        )
    _check_ranks(found)
    _check_stamps(found)
    _check_tensors(found, tensors)
    layout = _joined(found)
    prove(layout)
    _check_replicas(found)
    return layout


def _check_ranks(manifests: Sequence[Manifest]) -> None:
    seen: set[int] = set()
    for manifest in manifests:
        twice = sorted(seen.intersection(manifest.ranks))
        if twice:
            raise OverlapError(
                "a rank is published by one manifest",
                where=f"layout {manifest.layout.name!r}",
                equation=f"{format_ranks(twice)} in two manifests",
                hint="leave out what a restarted rank had published before",
            )
        seen.update(manifest.ranks)


def _check_stamps(manifests: Sequence[Manifest]) -> None:
    first = manifests[0]
    for other in manifests[1:]:
        where = f"{_ranks(first)} and {_ranks(other)}"
        for what, a, b in (
            ("version", first.version is not None, other.version is not None),
            ("fingerprints", bool(first.fingerprints), bool(other.fingerprints)),
        ):
            if a != b:
                raise GeometryError(
                    f"{what} of a source: given by every manifest or by none",
                    where=where,
                    equation=f"{what} given: {a} != {b}",
                    hint="let every rank publish the same things; an absent version is not version 0",
                )
        if first.version != other.version:
            raise PlanError(
                "manifests that are joined are of one version",
                where=where,
                equation=f"version({first.version}) != version({other.version})",
                hint="wait until every rank has published the same step",
            )
        if first.fingerprints and first.key != other.key:
            raise GeometryError(
                "fingerprints that are compared have one key",
                where=where,
                equation=f"key({first.key}) != key({other.key})",
                hint="agree on the key before fingerprints are taken",
            )


def _check_tensors(manifests: Sequence[Manifest], tensors: Iterable[Tensor] | None) -> None:
    """One name is one tensor of one dtype to everybody, and all that is expected is there."""
    expected = None if tensors is None else tuple(tensors)
    known = {tensor.name: (tensor, "what is expected") for tensor in expected or ()}
    stored: dict[tuple[str, str], tuple[str, str]] = {}
    published: set[str] = set()
    for manifest in manifests:
        for tensor in manifest.layout.tensors:
            if expected is not None and tensor.name not in known:
                raise UnknownNameError(
                    "a published tensor is one that is expected",
                    where=_ranks(manifest),
                    equation=f"{tensor.name!r} is not among {len(known)} tensors",
                    hint="publish with the names of the model's tensors, or expect it too",
                )
            published.add(tensor.name)
            other, who = known.setdefault(tensor.name, (tensor, _ranks(manifest)))
            if other.dtype != tensor.dtype:
                _refuse_dtypes(tensor.name, (other.dtype, who), (tensor.dtype, _ranks(manifest)))
            if other != tensor:
                raise PlanError(
                    "a name means one tensor on every rank",
                    where=f"tensor {tensor.name!r}, {who} and {_ranks(manifest)}",
                    equation=f"{other} != {tensor}",
                    hint="describe the whole tensor on every rank: global sizes, all layers and experts",
                )
        for rule in manifest.layout.rules:
            for part in rule.parts:
                key = rule.name, part.tensor.name
                dtype, who = stored.setdefault(key, (rule.dtype, _ranks(manifest)))
                if dtype != rule.dtype:
                    _refuse_dtypes(rule.name, (dtype, who), (rule.dtype, _ranks(manifest)))
    never = [name for name in known if name not in published]
    if never:
        raise UnknownNameError(
            "a tensor that is expected is published by some rank",
            where=f"{len(manifests)} manifests",
            equation=f"{never[0]!r} is in none of them, {len(never)} of {len(known)} tensors are not",
            hint="publish it, or declare a subset that leaves it out",
        )


def _refuse_dtypes(name: str, first: tuple[str, str], second: tuple[str, str]) -> NoReturn:
    raise DtypeError(
        "a tensor has one dtype on every rank",
        where=f"{name!r}, {first[1]} and {second[1]}",
        equation=f"dtype({first[0]}) != dtype({second[0]})",
        hint="publish the weights in one dtype; what differs is often a copy that the optimizer keeps",
    )


def _joined(manifests: Sequence[Manifest]) -> Layout:
    ranks = [rank for manifest in manifests for rank in manifest.ranks]
    first = manifests[0].layout
    if sorted(ranks) == list(first.mesh.ranks) and all(m.layout == first for m in manifests):
        return first
    mesh = Mesh(((_AXIS, max(ranks) - min(ranks) + 1),), offset=min(ranks))
    holders: dict[Buffer, list[int]] = {}
    for manifest in manifests:
        for rank in manifest.ranks:
            for buffer in not_empty(manifest.layout, rank):
                holders.setdefault(buffer, []).append(rank - mesh.offset)
    rules = tuple(rule_of(buffer, ((_AXIS, tuple(sorted(where))),)) for buffer, where in holders.items())
    return Layout(first.name, mesh, rules)


def _check_replicas(manifests: Sequence[Manifest]) -> None:
    """Ranks that hold the same elements hold the same content, as far as they say what it comes to."""
    known: dict[tuple[Any, ...], tuple[int, Fingerprint]] = {}
    for manifest in manifests:
        for rank, fingerprints in manifest.fingerprints.items():
            left = iter(fingerprints)
            for rule in manifest.layout.rules:
                buffer = rule.at(manifest.layout.mesh, rank)
                for part, found in zip(rule.parts, left, strict=False):
                    if buffer is None:
                        continue
                    elements = tuple(_elements(dim, part.label) for dim in buffer.dims)
                    key = part.tensor, elements, rule.dtype, rule.transform
                    other, expected = known.setdefault(key, (rank, found))
                    if found != expected:
                        raise ReplicaError(
                            "replicas hold the same bytes",
                            where=f"tensor {part.tensor.name!r}, elements {' x '.join(map(str, elements))}",
                            equation=f"fingerprint({expected}) of rank {other} != fingerprint({found}) "
                            f"of rank {rank}",
                            hint="the copies drifted apart, or one is of another step; find out which",
                        )


def _elements(dim: Dim, label: str) -> Dim:
    """The indices of a part in one dim, whatever order they are stored in."""
    runs = (run for run in dim.runs if run.label is not PAD and run.label in ("", label))
    return Dim(sorted(runs, key=lambda run: run.start))


def _ranks(manifest: Manifest) -> str:
    return format_ranks(manifest.ranks)
