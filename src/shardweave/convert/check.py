"""Checking a checkpoint: whole, consistent, and the model that its config describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from shardweave.convert import part
from shardweave.convert.accounting import account
from shardweave.convert.checkpoint import Checkpoint, OptimizerState, Settings
from shardweave.convert.compare import check_masters, check_replicas
from shardweave.convert.convert import states
from shardweave.convert.formats import FORMATS
from shardweave.convert.kept import kept
from shardweave.convert.masters import with_states
from shardweave.convert.source import open_checkpoint, read_files
from shardweave.convert.staging import FOLDER, require_finished
from shardweave.convert.states import MASTER
from shardweave.convert.target import state_rules
from shardweave.dialects import hf
from shardweave.errors import DigestError, ShardweaveError
from shardweave.layout import Layout
from shardweave.layout.holders import first_holders
from shardweave.models.plain import FAMILY
from shardweave.plan import plan
from shardweave.store import digest, native, torch_crc
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
    settings: Settings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Checked:
    """Look at everything about a checkpoint that can be proved; digests, copies and masters read its arrays.

    A step that fails is a finding, and the steps that do not need it are still done.

    Args:
        root: A folder, or one safetensors file.
        config: The model's Hugging Face config; by default the one in the folder. Without any, names
            and shapes are not compared with a model.
        layout: Which shard of a rank holds what, where the format does not say.
        digests: Whether to read all weights and compare them with recorded digests, or with the CRCs that
            torch saves with them, and with their masters.
        settings: What reads the settings of the optimizer off a native checkpoint that a run saved.
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
        _check_model(checked, root, config, layout, settings, reads=digests)
    if not digests:
        checked.skip("digests", "not asked for")
    elif manifest.format == "native":
        checked.attempt(
            "digests", lambda: native.verify(manifest), lambda size: f"{size:,} bytes are as recorded"
        )
    elif (manifest.root / digest.SIDECAR).is_file():
        _check_digests(checked, manifest, progress or (lambda done, total: None))
    elif torch_crc.streams(manifest):
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
    said = any((root / name).is_file() for name in ("config.json", part.FILE))
    return said or FORMATS[manifest.format].config(manifest) is not None


def _check_model(
    checked: Checked,
    root: Path,
    config: Path | Mapping[str, Any] | None,
    layout: Layout | None,
    settings: Settings | None,
    *,
    reads: bool,
) -> None:
    source = checked.attempt("model", lambda: open_checkpoint(root, config=config, layout=layout), _described)
    if source is None:
        return
    if source.model.family == FAMILY:
        checked.steps.pop()
        checked.skip("model", _described(source))
    has = len(checked.findings)
    state = checked.attempt(
        "optimizer", lambda: states(source, settings=settings), lambda found: _state_said(source, found)
    )
    if state is None and len(checked.findings) == has:
        checked.steps.pop()  # it has none
    whole = source if state is None else with_states(source, state, masters="beside", dtype=None)[0]
    checked.attempt("coverage", lambda: _coverage(whole, state), lambda found: found)
    if first_holders(whole.layout) != whole.layout:
        checked.attempt("replicas", lambda: check_replicas(whole), lambda size: f"{size:,} bytes agree")
    if state is not None and any(tensor.name.endswith(f"/{MASTER}") for tensor in state.layout.tensors):
        if reads:
            checked.attempt(
                "masters",
                lambda: check_masters(source, state),
                lambda count: f"{count:,} elements round to their weights",
            )
        else:
            checked.skip("masters", "not asked for")


def _described(found: Checkpoint) -> str:
    model, parameters = found.model, f"{found.model.numel:,} parameters"
    of, layers = f"names, shapes and dtypes are those of {model.family}", f"{model.num_layers} layers, "
    if model.family == FAMILY:
        of, layers = "no config describes it, and its names are the source's own", ""
    if found.only:
        patterns = ", of these ".join(", ".join(few) for few in found.only)
        return f"{of}, a part: {patterns}; {parameters}"
    return f"{of}, {layers}{parameters}"


def _state_said(source: Checkpoint, state: OptimizerState | None) -> str:
    if state is None:
        return ""
    layout = replace(source.layout, rules=(*source.layout.rules, *state.layout.rules))
    found = kept(state, layout)
    return f"{found}; {found.masters_said}"


def _coverage(source: Checkpoint, state: OptimizerState | None) -> str:
    """Every element of the model is held, and every byte of the files is accounted for."""
    weights = hf.layout(source.model)
    rules = state_rules(weights, state) if state is not None else ()
    canonical = replace(weights, rules=(*weights.rules, *rules))
    books = account(source, plan(source.layout, canonical, allow_casts=True))
    parts = {
        "weights" if state is None else "weights and states": books.used,
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
        compared = torch_crc.verify(manifest)
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
