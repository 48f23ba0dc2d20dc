"""Layouts and stored arrays compared: every shape, and the dtypes as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardweave.errors import DtypeError, OutsideError
from shardweave.layout import Layout
from shardweave.store.manifest import StoredTensor


def as_stored(layout: Layout, stored: Mapping[str, StoredTensor]) -> Layout:
    """The layout with the dtypes that are stored, every shape compared.

    Raises:
        OutsideError: A stored shape is not that of the layout.
        DtypeError: Arrays of one family are stored in several dtypes.
    """
    dtypes: dict[str, set[str]] = {}
    arrays = layout.stored()
    wrong = [
        (key, stored[key].shape, buffer.shape)
        for key, (buffer, _) in arrays.items()
        if stored[key].shape != buffer.shape
    ]
    if wrong:
        (name, found, expected), *more = wrong
        raise OutsideError(
            "a stored array has the shape that the model says",
            where=f"array {name!r}",
            equation=f"stored {found} != {expected} in layout {layout.name}"
            + (f", and {len(more)} more: {', '.join(name for name, _, _ in more[:3])}" if more else ""),
            hint="the config belongs to another model, or heads, layers or vocabulary differ",
        )
    for key, (buffer, _) in arrays.items():
        dtypes.setdefault(buffer.name, set()).add(stored[key].dtype)
    mixed = {name: several for name, several in dtypes.items() if len(several) > 1}
    if mixed:
        name, several = next(iter(mixed.items()))
        raise DtypeError(
            "arrays of one family have one dtype",
            where=f"arrays {name!r}",
            equation=f"stored as {', '.join(sorted(several))}",
            hint="convert the odd layers to the dtype of the others first",
        )
    return replace(
        layout, rules=tuple(replace(rule, dtype=next(iter(dtypes[rule.name]))) for rule in layout.rules)
    )
