"""Opening a checkpoint: its format, its model, and which stored array holds what.

The format is recognised by the files that it must have. The model is described by a Hugging Face
config, the one given or the one in the folder; nothing is guessed from shapes. Then names decide
in which form the model is stored, and every stored shape and dtype is compared with what that
form says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardweave.convert.staging import require_finished
from shardweave.dialects import hf, megatron
from shardweave.errors import DtypeError, FormatError, MissingFileError, ModelError, OutsideError
from shardweave.layout import Layout
from shardweave.models import Model, from_config
from shardweave.store import native, safetensors, torch_dcp, torch_dist
from shardweave.store.manifest import Manifest, StoredTensor

FORMATS = ("hf", "megatron", "native", "dcp")
"""The formats that can be read and written, by the names that commands use."""

_MEGATRON = ("decoder.", "embedding.")
_NOT_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "hf": (),
    "megatron": ("optimizer.", "chained_", "rng_state", "opt_param_scheduler", "rerun_state_machine"),
    "native": ("optim/",),
    "dcp": ("optim/", torch_dcp.OTHER),
}
"""What a checkpoint of a format may hold beside the weights; left out by name, and said so."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is understood.

    Attributes:
        manifest: What its files hold.
        model: The logical tensors.
        layout: Which stored array holds what; the arrays of rank 0.
        config: The Hugging Face config that describes the model.
        left_out: Stored keys that are not in the layout, with the reason.
        read: Stored keys beside the layout that were read nevertheless.
    """

    manifest: Manifest
    model: Model
    layout: Layout
    config: Mapping[str, Any]
    left_out: Mapping[str, str]
    read: frozenset[str] = frozenset()

    @property
    def format(self) -> str:
        """The name of the format, as commands use it."""
        return _format(self.manifest)


def _format(manifest: Manifest) -> str:
    return "megatron" if manifest.format == "torch_dist" else manifest.format


def detect(root: Path) -> str:
    """The format of a checkpoint, by the files that each format must have.

    Raises:
        MissingFileError: There is nothing at the path.
        FormatError: The folder is of no known format, or of two.
    """
    if not root.exists():
        raise MissingFileError(
            "a checkpoint exists",
            where=str(root),
            hint="the path is relative to the folder you are in; check its spelling",
        )
    if root.is_file():
        return "hf"
    names = {path.name for path in root.iterdir()}
    found = []
    if native.is_native(root):
        found.append("native")
        names = {name for name in names if not re.fullmatch(r"rank_\d+\.safetensors", name)}
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        found.append("hf")
    if names & {torch_dist.INDEX, torch_dist.TRACKER} or any(n.endswith(".distcp") for n in names):
        of_megatron = names & {torch_dist.CONFIG, torch_dist.COMMON, torch_dist.TRACKER}
        found.append("megatron" if of_megatron else "dcp")
    if len(found) != 1:
        held = ", ".join(sorted(names)[:6]) or "nothing"
        raise FormatError(
            "a folder holds a checkpoint of one known format",
            where=str(root),
            equation=f"it looks like {' and '.join(found)}" if found else f"it holds {held}",
            hint="hf: *.safetensors and their index; megatron: .metadata, *.distcp and metadata.json, or "
            f"latest_checkpointed_iteration.txt beside iter_*; dcp: .metadata and *.distcp alone; "
            f"native: {native.MANIFEST}, or step-* with it",
        )
    return found[0]


def read_files(root: Path) -> Manifest:
    """What a checkpoint of any format holds; of a native one, its weights by their names.

    Raises:
        FormatError and its kin: As ``detect`` and the store of the format.
    """
    match detect(root):
        case "hf":
            return safetensors.read(root)
        case "native":
            return native.named(native.read(root))
        case "dcp":
            found = torch_dist.read(root)
            # Megatron's tensors, saved by a script without the files beside them.
            if any(key.startswith(_MEGATRON) for key in found.tensors):
                return found
            return replace(found, format=torch_dcp.FORMAT)
        case _:
            return torch_dist.read(root)


def open_checkpoint(root: Path, *, config: Path | Mapping[str, Any] | None = None) -> Checkpoint:
    """Read what a checkpoint holds and prove that it is a whole model, without reading its weights.

    Args:
        root: A folder, or one safetensors file.
        config: The Hugging Face config of the model; by default the ``config.json`` in the folder.

    Raises:
        ModelError: No config, or one that is not understood.
        UnknownNameError: The stored names are not those of the model.
        OutsideError: A stored shape is not what the model says.
        FormatError and its kin: The files contradict themselves, or are of an unfinished conversion.
    """
    require_finished(root)
    manifest = read_files(root)
    format_ = _format(manifest)
    require_finished(manifest.root)
    values = _config(manifest, config)
    if format_ == torch_dcp.FORMAT:
        manifest = torch_dcp.named(manifest, hf.names(from_config(values, dtype="float32")))
    left_out = {key: "not a weight" for key in manifest.tensors if key.startswith(_NOT_WEIGHTS[format_])}
    stored = {key: tensor for key, tensor in manifest.tensors.items() if key not in left_out}
    dtypes = {tensor.dtype for tensor in stored.values()}
    model = from_config(values, dtype=_common(dtypes, values))
    if format_ != "megatron":
        layout = hf.variant(stored, model)
    else:
        layout = megatron.variant(stored, model, padded_vocab=_padded_vocab(stored))
    if set(layout.tensors) == set(model.decoder.tensors):
        model = model.decoder  # layers for further tokens that the config has and the weights have not
    return Checkpoint(manifest, model, as_stored(layout, stored), values, left_out)


def _config(manifest: Manifest, config: Path | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The config given, else the one in the folder, else what the checkpoint itself records."""
    if isinstance(config, Mapping):
        return config
    if config is None and (about := manifest.records.get("about")) is not None and about.config:
        return dict(about.config)
    root = manifest.root
    path = config or (root if root.is_dir() else root.parent) / "config.json"
    recorded = manifest.records.get("common", {}).get("args") if config is None else None
    if isinstance(recorded, dict) and isinstance(recorded.get("state"), dict) and not path.is_file():
        return megatron.config_of(recorded["state"])
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ModelError(
            "a model is described by a Hugging Face config",
            where=str(root),
            equation=f"{path.name} is not there" if config is None else f"{path} does not exist",
            hint="give one with --config config.json; nothing is guessed from shapes",
        )
    try:
        values = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelError(
            "a config is JSON",
            where=str(path),
            equation=str(error),
            hint="copy the config from the model again",
        ) from error
    if not isinstance(values, dict):
        raise ModelError(
            "a config is a JSON object",
            where=str(path),
            equation=f"{type(values).__name__} != object",
            hint="give the config.json of one model",
        )
    return values


def _common(dtypes: set[str], values: Mapping[str, Any]) -> str:
    """The dtype to describe the model in: the stored one, or the config's where several are stored."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    declared = values.get("dtype") or values.get("torch_dtype")
    return declared if declared in dtypes else sorted(dtypes)[0]


def _padded_vocab(stored: Mapping[str, StoredTensor]) -> int | None:
    """The rows of the stored vocabulary: all that a shape is asked for, and the config bounds it."""
    embedding = stored.get("embedding.word_embeddings.weight")
    return embedding.shape[0] if embedding is not None and len(embedding.shape) == 2 else None


def as_stored(layout: Layout, stored: Mapping[str, StoredTensor]) -> Layout:
    """The layout with the dtypes that are stored, every shape compared.

    Raises:
        OutsideError: A stored shape is not that of the layout.
        DtypeError: Arrays of one family are stored in several dtypes.
    """
    dtypes: dict[str, set[str]] = {}
    wrong = [
        (name, stored[name].shape, buffer.shape)
        for name, (buffer, _) in layout.arrays(0).items()
        if stored[name].shape != buffer.shape
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
    for name, (buffer, _) in layout.arrays(0).items():
        dtypes.setdefault(buffer.name, set()).add(stored[name].dtype)
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
