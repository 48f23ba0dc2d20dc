"""Folders of safetensors under the names of Hugging Face."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shardweave.convert.checkpoint import Checkpoint, OptimizerState
from shardweave.convert.formats.format import Format
from shardweave.convert.target import Facts, Target, Wanted, refuse_geometry, specs_of, with_dtypes
from shardweave.dialects import hf
from shardweave.errors import ModelError
from shardweave.layout import Layout
from shardweave.models import Model
from shardweave.store import hf_dcp, safetensors
from shardweave.store.manifest import Manifest, StoredTensor


def _recognise(root: Path, names: Collection[str]) -> bool:
    return any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)


def _read(root: Path) -> Manifest:
    return hf_dcp.read(root) if hf_dcp.is_sharded(root) else safetensors.read(root)


def _named(manifest: Manifest, config: Mapping[str, Any] | None) -> Manifest:
    if config is None and manifest.records.get("inferred"):
        raise ModelError(
            "a model says how large the tensors are whose files hold shards of them",
            where=str(manifest.root),
            equation="config(none); the shards say where they begin, and none that it is the last",
            hint="give the config of the model, or else missing files of the last ranks are not seen",
        )
    return manifest


def layout(
    stored: Mapping[str, StoredTensor], model: Model, manifest: Manifest, given: Layout | None
) -> Layout:
    """The form in which the names of Hugging Face are stored."""
    return hf.variant(stored, model)


def _target(source: Checkpoint, state: OptimizerState | None, wanted: Wanted) -> Target:
    refuse_geometry("hf", wanted)
    held = with_dtypes(hf.layout(source.model, stacked_experts=wanted.stacked_experts), source, wanted.dtype)
    specs = tuple(specs_of(held))
    return Target(
        "hf",
        held,
        specs,
        wanted.max_file_bytes,
        allocate=partial(safetensors.allocate, tensors=specs, max_file_bytes=wanted.max_file_bytes),
        finish=_finish,
    )


def _finish(manifest: Manifest, facts: Facts, *, config: Mapping[str, Any], fsync: bool) -> None:
    safetensors.finish(manifest, fsync=fsync)


FORMAT = Format(
    name="hf",
    holds="*.safetensors and their index",
    recognise=_recognise,
    read=_read,
    layout=layout,
    target=_target,
    named=_named,
    takes_part=True,
)
