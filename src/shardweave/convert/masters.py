"""Weights in full precision and rounded: which of the two a target has, and where it comes from.

Formats differ in what they call a weight. Some keep it rounded, as the model computes with it, and a master
in full precision beside it; the others have one of the two. A conversion never rounds what it need not round,
and what a rounded weight is rounded from goes with the optimizer's state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shardweave.convert.checkpoint import Checkpoint, OptimizerState
from shardweave.convert.states import MASTER, owners, state_rule
from shardweave.layout import BufferRule
from shardweave.layout.dtype import itemsize

ROUNDED: Final = "rounded from its master, which is converted in its place"


def with_states(
    source: Checkpoint, state: OptimizerState, *, masters: bool, dtype: str | None
) -> tuple[Checkpoint, OptimizerState]:
    """The source with the states among what it holds.

    Args:
        source: The checkpoint.
        state: The state of its optimizer.
        masters: Whether the target keeps masters beside rounded weights. Where it does not, its weights are
            the masters, and those that were rounded from them are left out.
        dtype: The dtype that weights are asked for in. Where the target keeps masters, these are what the
            source has in full precision.
    """
    kept = {rule.name: rule for rule in state.layout.rules}
    weights = list(source.layout.rules)
    stored = dict(source.manifest.tensors)
    left_out = {key: why for key, why in source.left_out.items() if key not in state.read}
    has = {rule.name: any(state.states_of(part.tensor.name) for part in rule.parts) for rule in weights}
    owned = {rule.name for rule in owners(source.layout)}
    for i, rule in enumerate(weights):
        if rule.name not in owned:
            continue
        master = kept.get(f"optim/{rule.name}/{MASTER}")
        if master is not None and (not masters or dtype == master.dtype):
            # The weight is the master: what was rounded from it is not needed.
            del kept[master.name]
            weights[i] = replace(master, parts=rule.parts)
            left_out |= dict.fromkeys(_keys(source, rule), ROUNDED)
        elif master is None and masters and dtype and _narrower(dtype, rule) and has[rule.name]:
            # The weight is rounded, and its master is what it is rounded from: the same bytes once more.
            made = state_rule(rule, MASTER)
            kept[made.name] = made
            for key, of in zip(_keys(source, made), _keys(source, rule), strict=True):
                stored[key] = replace(stored[of], key=key)
    rules = tuple(kept.values())
    manifest = replace(source.manifest, tensors=stored)
    layout = replace(source.layout, rules=(*weights, *rules))
    for key in layout.stored():
        left_out.pop(key, None)
    return (
        replace(source, manifest=manifest, layout=layout, left_out=left_out, read=state.read),
        replace(state, layout=replace(state.layout, rules=rules)),
    )


def _narrower(dtype: str, rule: BufferRule) -> bool:
    return itemsize(dtype) < itemsize(rule.dtype)


def _keys(source: Checkpoint, rule: BufferRule) -> list[str]:
    """The keys of the arrays of a rule, on all ranks."""
    return list(replace(source.layout, rules=(rule,)).stored())
