"""Folders of Megatron-Core's ``torch_dist``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from shardweave.convert.checkpoint import Checkpoint, OptimizerState
from shardweave.convert.formats import dcp, megatron_state
from shardweave.convert.formats.format import Format
from shardweave.convert.target import Box, Geometry, Target, Wanted, refuse_stacked, specs_of, with_dtypes
from shardweave.dialects import megatron
from shardweave.layout import Layout
from shardweave.models import Model
from shardweave.store import megatron_legacy, megatron_optimizer, torch_dist, torch_dist_write, torch_save
from shardweave.store.manifest import Manifest, StoredTensor

_EMPTY: Final = torch_save.stream([None])
"""An object without a value, as Megatron stores the extra state of a module that has none."""


def _recognise(root: Path, names: Collection[str]) -> bool:
    return (dcp.is_torch_dist(names) and dcp.is_megatron(names)) or megatron_legacy.is_legacy(root)


def _read(root: Path) -> Manifest:
    if megatron_legacy.is_legacy(root):
        return megatron_legacy.read(root)
    return replace(torch_dist.read(root), format="megatron")


def _config(manifest: Manifest) -> Mapping[str, Any] | None:
    """What Megatron's own arguments say, where no config lies beside them."""
    common = manifest.records.get("common", {})
    recorded = common.get("args") if isinstance(common, dict) else None
    if (manifest.root / "config.json").is_file() or not isinstance(recorded, dict):
        return None
    return megatron.config_of(recorded["state"]) if isinstance(recorded.get("state"), dict) else None


def _layout(
    stored: Mapping[str, StoredTensor], model: Model, manifest: Manifest, given: Layout | None
) -> Layout:
    return megatron.variant(stored, model, padded_vocab=_padded_vocab(stored))


def _padded_vocab(stored: Mapping[str, StoredTensor]) -> int | None:
    """The rows of the stored vocabulary: all that a shape is asked for, and the config bounds it."""
    embedding = stored.get("embedding.word_embeddings.weight")
    return embedding.shape[0] if embedding is not None and len(embedding.shape) == 2 else None


def _target(source: Checkpoint, state: OptimizerState | None, wanted: Wanted) -> Target:
    refuse_stacked("megatron", wanted)
    geometry = _decided(source.model, wanted.geometry or Geometry())
    weights, chunks, objects = _cut(source.model, geometry)
    rules, records = list(weights.rules), dict[str, Any]()
    fixed = dict(objects)
    if state is not None:
        rules += megatron_state.rules_of(source, weights, state)
        common, carried = megatron_state.common_of(
            source, weights, state, expert_parallel=geometry.ep > 1, layer_keys=geometry.layer_keys
        )
        records["common"] = common
        fixed |= carried
    held = with_dtypes(replace(weights, rules=tuple(rules)), source, wanted.dtype)
    specs = specs_of(held, lambda key, _: _boxes(chunks, key))
    records["objects"] = dict(fixed)
    if state is not None:
        fixed["common"] = torch_save.stream(records["common"])
    return Target(
        "megatron",
        held,
        tuple(specs),
        wanted.max_file_bytes,
        allocate=partial(
            torch_dist_write.allocate, tensors=specs, records=records, max_file_bytes=wanted.max_file_bytes
        ),
        finish=dcp.finish,
        fixed=fixed,
        crc=True,
    )


def _boxes(chunks: Mapping[str, tuple[megatron.Shard, ...]], key: str) -> Iterator[Box]:
    """A state is cut as its weight is."""
    weight = megatron_optimizer.weight_of(key) or key
    yield from ((one.offset, one.shape) for one in chunks.get(weight, ()))


def _decided(model: Model, geometry: Geometry) -> Geometry:
    """The geometry with its keys of layers decided."""
    if geometry.layer_keys != "auto":
        return geometry
    return replace(geometry, layer_keys="stacked" if megatron.layers_alike(model) else "per_layer")


def _cut(
    model: Model, geometry: Geometry
) -> tuple[Layout, Mapping[str, tuple[megatron.Shard, ...]], Mapping[str, bytes]]:
    """What a job of this geometry stores, how its ranks cut it, and the objects that it asks for."""
    mesh = megatron.mesh(tp=geometry.tp, pp=geometry.pp, ep=geometry.ep, etp=geometry.etp)
    pipeline = megatron.stages(model.num_layers, geometry.pp, vpp=geometry.vpp, sizes=geometry.stages)
    vocab = next(block.sizes["vocab_size"] for block in model.of("embedding"))
    padded = megatron.padded_vocab_size(vocab, tp=geometry.tp, divisor=geometry.vocab_divisor)
    # The ranks' own layout refuses a geometry that the model cannot be cut by.
    megatron.layout(model, mesh, pipeline=pipeline, vocab_divisor=geometry.vocab_divisor)
    form: dict[str, Any] = {"spec": geometry.spec, "layer_keys": geometry.layer_keys}
    return (
        megatron.checkpoint(model, padded_vocab=padded, **form),
        megatron.shards(model, mesh, pipeline=pipeline, padded_vocab=padded, **form),
        dict.fromkeys(megatron.extra_states(model, **form), _EMPTY),
    )


FORMAT = Format(
    name="megatron",
    holds=f"{torch_dist.INDEX}, *.distcp and {torch_dist.CONFIG}, or {torch_dist.TRACKER} beside iter_*, or "
    "mp_rank_*",
    recognise=_recognise,
    read=_read,
    layout=_layout,
    target=_target,
    beside=(*megatron_state.KEYS, "rng_state", "opt_param_scheduler", "rerun_state_machine"),
    config=_config,
    named=megatron_state.named,
    as_stored=megatron_state.as_stored,
    states=megatron_state.states,
    masters=lambda wanted: "always",
    takes_states=True,
)
