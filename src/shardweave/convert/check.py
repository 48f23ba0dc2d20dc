"""Checking a checkpoint: whole, consistent, and the model that its config describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from shardweave.convert.accounting import account
from shardweave.convert.checkpoint import Checkpoint
from shardweave.convert.compare import check_replicas
from shardweave.convert.formats import FORMATS
from shardweave.convert.source import open_checkpoint, read_files
from shardweave.convert.staging import FOLDER, require_finished
from shardweave.dialects import hf
from shardweave.errors import DigestError, ShardweaveError
from shardweave.layout import Layout
from shardweave.layout.holders import first_holders
from shardweave.plan import plan
from shardweave.store import digest, native, torch_dist
from shardweave.store.manifest import Manifest
from shardweave.store.read import Reader

_SLAB_BYTES = 8 << 20

PROVED, FAILED, SKIPPED = "proved", "failed", "skipped"
NONE_RECORDED = "none are recorded"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was looked at: ``state`` is proved, failed or skipped, ``detail`` has the figures."""

    name: str
    state: str
    detail: str


@dataclass(slots=True)
class Checked:
    """What a check found out.

    Attributes:
        root: The checkpoint.
        format: Its format; empty where it has none that is known.
        steps: What was looked at, in order.
        findings: What is wrong.
    """

    root: Path
    format: str = ""
    steps: list[Step] = field(default_factory=list)
    findings: list[ShardweaveError] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def attempt(self, name: str, do: Callable[[], T], detail: Callable[[T], str]) -> T | None:
        """Do one step; what it raises is a finding."""
        try:
            value = do()
        except ShardweaveError as error:
            self.fail(name, error)
            return None
        self.steps.append(Step(name, PROVED, detail(value)))
        return value

    def fail(self, name: str, *errors: ShardweaveError) -> None:
        """Record findings of a step."""
        self.findings += errors
        self.steps.append(Step(name, FAILED, errors[0].rule))

    def skip(self, name: str, why: str) -> None:
        """Record that a step was not done."""
        self.steps.append(Step(name, SKIPPED, why))


def check(
    root: Path,
    *,
    config: Path | Mapping[str, Any] | None = None,
    layout: Layout | None = None,
    digests: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Checked:
    """Look at everything about a checkpoint that can be proved; only the digests read its weights.

    A step that fails is a finding, and the steps that do not need it are still done.

    Args:
        root: A folder, or one safetensors file.
        config: The model's Hugging Face config; by default the one in the folder. Without any, names
            and shapes are not compared with a model.
        layout: Which shard of a rank holds what, where the format does not say.
        digests: Whether to read all weights and compare them with recorded digests, or with the CRCs that
            torch saves with them.
        progress: Told ``(bytes read, bytes in all)``.
    """
    checked = Checked(root)
    try:
        require_finished(root)
    except ShardweaveError as error:
        checked.fail("finished", error)
        if {path.name for path in root.iterdir()} <= {FOLDER}:
            return checked
    manifest = checked.attempt("files", lambda: read_files(root), _files)
    if manifest is None:
        return checked
    checked.format = manifest.format
    if config is None and not _describes_itself(manifest):
        checked.skip("model", "no config is given or found; names and shapes are not compared")
    else:
        _check_model(checked, root, config, layout)
    if not digests:
        checked.skip("digests", "not asked for")
    elif manifest.format == "native":
        checked.attempt(
            "digests", lambda: native.verify(manifest), lambda size: f"{size:,} bytes are as recorded"
        )
    elif (manifest.root / digest.SIDECAR).is_file():
        _check_digests(checked, manifest, progress or (lambda done, total: None))
    elif (manifest.root / torch_dist.INDEX).is_file():
        _check_crcs(checked, manifest)
    else:
        checked.skip("digests", NONE_RECORDED)
    return checked


def _files(manifest: Manifest) -> str:
    count = len(manifest.files)
    return (
        f"every element of {len(manifest.tensors):,} arrays is stored once, "
        f"in {count:,} file{'' if count == 1 else 's'} of {sum(manifest.files.values()):,} bytes"
    )


def _describes_itself(manifest: Manifest) -> bool:
    root = FORMATS[manifest.format].home(manifest)
    root = root if root.is_dir() else root.parent
    return (root / "config.json").is_file() or FORMATS[manifest.format].config(manifest) is not None


def _check_model(
    checked: Checked, root: Path, config: Path | Mapping[str, Any] | None, layout: Layout | None
) -> None:
    source = checked.attempt(
        "model",
        lambda: open_checkpoint(root, config=config, layout=layout),
        lambda found: (
            f"names, shapes and dtypes are those of {found.model.family}, "
            f"{found.model.num_layers} layers, {found.model.numel:,} parameters"
        ),
    )
    if source is None:
        return
    checked.attempt("coverage", lambda: _coverage(source), lambda found: found)
    if first_holders(source.layout) != source.layout:
        checked.attempt("replicas", lambda: check_replicas(source), lambda size: f"{size:,} bytes agree")


def _coverage(source: Checkpoint) -> str:
    """Every element of the model is held, and every byte of the files is accounted for."""
    canonical = hf.layout(source.model)
    books = account(source, plan(source.layout, canonical, allow_casts=True))
    parts = {
        "weights": books.used,
        "replicas": books.replica,
        "padding": sum(books.padding.values()),
        "no weights": sum(books.left_out.values()),
        "format": books.format,
    }
    return "every byte is of " + ", ".join(f"{name} {size:,}" for name, size in parts.items() if size)


def _check_digests(checked: Checked, manifest: Manifest, progress: Callable[[int, int], None]) -> None:
    try:
        recorded = digest.read_sidecar(manifest.root)
    except ShardweaveError as error:
        checked.fail("digests", error)
        return
    wrong = list(_wrong_digests(manifest, recorded, progress))
    if wrong:
        checked.fail("digests", *wrong)
    else:
        size = sum(tensor.num_bytes for tensor in manifest.tensors.values())
        checked.steps.append(
            Step("digests", PROVED, f"{len(recorded):,} arrays, {size:,} bytes, are as recorded")
        )


def _check_crcs(checked: Checked, manifest: Manifest) -> None:
    """Those that torch saves with each tensor, and does not look at when it loads."""
    try:
        compared = torch_dist.verify(manifest)
    except ShardweaveError as error:
        checked.fail("digests", error)
        return
    if compared:
        detail = f"{compared:,} bytes have the CRCs that were saved with them"
        checked.steps.append(Step("digests", PROVED, detail))
    else:
        checked.skip("digests", NONE_RECORDED)


def _wrong_digests(
    manifest: Manifest, recorded: Mapping[str, str], progress: Callable[[int, int], None]
) -> Iterator[ShardweaveError]:
    for key in (key for key in recorded if key not in manifest.tensors):
        yield DigestError(
            "digests and arrays are of the same keys",
            where=f"array {key!r}",
            equation="it has a digest and is not there",
            hint="the digests belong to another checkpoint, or files were lost since",
        )
    total, done = sum(tensor.num_bytes for tensor in manifest.tensors.values()), 0
    with Reader(manifest) as reader:
        for key, tensor in manifest.tensors.items():
            state = xxhash.xxh3_128()
            try:
                for _, slab in reader.iter_rows(key, max_bytes=_SLAB_BYTES):
                    state.update(slab.reshape(-1).view(np.uint8).data)
                    done += slab.nbytes
                    progress(done, total)
            except ShardweaveError as error:
                yield error
                continue
            if state.hexdigest() != recorded.get(key):
                files = sorted({extent.file for extent in tensor.extents})
                yield DigestError(
                    "bytes have the digest that was recorded for them",
                    where=f"array {key!r} in {', '.join(files)}",
                    equation=f"recorded {recorded.get(key, 'nothing')} != {state.hexdigest()}",
                    hint="the file is damaged or was written again; restore it from its source",
                )
