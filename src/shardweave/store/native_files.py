"""Native checkpoints laid out first and filled later, by a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardweave.store.manifest import Extent, Manifest, StoredTensor, TensorSpec
from shardweave.store.native import MANIFEST, entry_key
from shardweave.store.native_agree import file_of
from shardweave.store.native_manifest import About, encode
from shardweave.store.paths import require_empty
from shardweave.store.safetensors import files_of
from shardweave.store.safetensors_header import Header, create, read_header, render_header
from shardweave.store.sync import sync

_METADATA = {"format": "shardweave"}


def allocate(root: Path, tensors: Sequence[TensorSpec], *, max_file_bytes: int = 5_000_000_000) -> Manifest:
    """Lay out a folder: files of full size with their headers, each tensor one box of one file.

    Args:
        root: An existing folder that holds nothing.
        tensors: Weights under their Hugging Face names, states under ``optim/{name}/{state}``.
        max_file_bytes: Start another file where one would grow beyond this.

    Returns:
        The manifest; the caller writes the bytes of each tensor at its place and then calls ``finish``.

    Raises:
        ExistsError: The folder holds something.
        DtypeError, FormatError: The format cannot hold the tensors. Nothing was written.
    """
    require_empty(root)
    found: dict[str, StoredTensor] = {}
    heads: dict[str, tuple[bytes, Header]] = {}
    for number, group in enumerate(files_of(tensors, max_file_bytes=max_file_bytes).values()):
        name = file_of(number)
        keys = {_entry(spec.key, spec.shape): spec.key for spec in group}
        boxes = [replace(spec, key=_entry(spec.key, spec.shape), chunks=()) for spec in group]
        heads[name] = render_header(boxes, _METADATA, name)
        for entry, tensor in heads[name][1].tensors.items():
            found[keys[entry]] = replace(tensor, key=keys[entry])
    files = create(root, heads)
    return Manifest(root, "native", {spec.key: found[spec.key] for spec in tensors}, files)


def _entry(name: str, shape: tuple[int, ...]) -> str:
    return entry_key(_key(name), (0,) * len(shape), shape)


def _key(name: str) -> str:
    """A state has a key already."""
    return name if name.startswith("optim/") else f"model/{name}"


def finish(manifest: Manifest, digests: Mapping[Extent, bytes], about: About, *, fsync: bool = True) -> None:
    """Seal a folder that ``allocate`` laid out: the manifest comes last.

    Args:
        manifest: As ``allocate`` returned it.
        digests: The xxh3_128 of each box.
        about: What else the checkpoint says.
        fsync: Whether to wait until the disk has everything.

    Raises:
        TruncatedError, FormatError: A file or header is no longer as it was laid out.
    """
    root = manifest.root
    for name in manifest.files:
        read_header(root / name, name)
        if fsync:
            sync(root / name)
    tensors = [replace(tensor, key=_key(name)) for name, tensor in manifest.tensors.items()]
    of_key = {tensor.key: [digests[extent] for extent in tensor.extents] for tensor in tensors}
    temporary = root / f".{MANIFEST}.tmp"
    temporary.write_bytes(encode(manifest.files, tensors, of_key, about))
    if fsync:
        sync(temporary)
    temporary.replace(root / MANIFEST)
    if fsync:
        sync(root)
