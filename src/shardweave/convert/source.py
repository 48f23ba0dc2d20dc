"""Opening a checkpoint: its format, its model, and which stored array holds what.

The format is recognised by the files that it must have. The model is described by a Hugging Face
config, the one given or the one in the folder; nothing is guessed from shapes. Then names decide
in which form the model is stored, and every stored shape and dtype is compared with what that
form says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardweave.convert import part
from shardweave.convert.arrays import as_stored
from shardweave.convert.checkpoint import Checkpoint
from shardweave.convert.formats import FORMATS, detect
from shardweave.convert.staging import require_finished
from shardweave.errors import GeometryError, ModelError
from shardweave.layout import Layout
from shardweave.models import from_config, plain
from shardweave.models.chosen import chosen
from shardweave.store.manifest import Manifest

PLAIN: Final = "none"
"""What is given for a config where a model has none: its tensors are those that the checkpoint names."""


def read_files(root: Path) -> Manifest:
    """What a checkpoint of any format holds, under the keys of the format.

    Raises:
        FormatError and its kin: As ``detect`` and the store of the format.
    """
    return FORMATS[detect(root)].read(root)


def open_checkpoint(
    root: Path, *, config: Path | Mapping[str, Any] | None = None, layout: Layout | None = None
) -> Checkpoint:
    """Read what a checkpoint holds and prove that it is a whole model, without reading its weights.

    What says of itself that it is a part of a model is proved to be that part.

    Args:
        root: A folder, or one safetensors file.
        config: The Hugging Face config of the model; by default the ``config.json`` in the folder. The path
            ``none`` takes the tensors as the checkpoint names them, where the format stores them whole.
        layout: Which shard of a rank holds what, where the format stores shards of ranks and does not say.

    Raises:
        ModelError: No config, or one that is not understood.
        UnknownNameError: The stored names are not those of the model.
        OutsideError: A stored shape is not what the model says.
        GeometryError: A layout is missing, or is given where none is needed.
        FormatError and its kin: The files contradict themselves, or are of an unfinished conversion.
    """
    require_finished(root)
    manifest = read_files(root)
    form = FORMATS[manifest.format]
    require_finished(manifest.root)
    if layout is not None and not form.takes_layout:
        raise GeometryError(
            "a layout is given where ranks store shards of a framework that does not say what they are",
            where=str(root),
            equation=f"layout({layout.name}), and the checkpoint is of format {form.name}",
            hint="leave it out: the names in this format say what an array is",
        )
    values, only = _described(manifest, config)
    manifest = form.named(manifest, values)
    left_out = {key: "not a weight" for key in manifest.tensors if key.startswith(form.beside)}
    if values is not None:
        buffers = from_config(values, dtype="float32").buffers
        left_out |= {
            key: "a buffer, not a weight" for key in manifest.tensors if key.partition("@")[0] in buffers
        }
    stored = {key: tensor for key, tensor in manifest.tensors.items() if key not in left_out}
    dtypes = {tensor.dtype for tensor in stored.values()}
    if values is not None:
        model = from_config(values, dtype=_common(dtypes, values))
    else:
        model = plain(
            form.shapes(stored, manifest),
            dtypes={key.partition("@")[0]: tensor.dtype for key, tensor in stored.items()},
        )
    for patterns in only:
        model = chosen(model, patterns).model
    held = form.layout(stored, model, manifest, layout)
    if set(held.tensors) == set(model.decoder.tensors):
        model = model.decoder  # layers for further tokens that the config has and the weights have not
    return Checkpoint(
        manifest,
        model,
        as_stored(held, stored),
        values or {},
        left_out,
        buffers=frozenset(form.buffers(manifest)),
        only=only,
    )


def _described(
    manifest: Manifest, config: Path | Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, tuple[part.Patterns, ...]]:
    """The config of the model, and which part of it is stored."""
    home = FORMATS[manifest.format].home(manifest)
    said = part.read(home) if config != Path(PLAIN) and home.is_dir() else None
    if said is None:
        return config_of(manifest, config), ()
    return (said[0] if config is None else config_of(manifest, config)), said[1]


def config_of(manifest: Manifest, config: Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The config given, else the one in the folder, else what the checkpoint records; ``None`` for ``none``.

    Raises:
        ModelError: There is none, or it is no JSON object.
    """
    if isinstance(config, Mapping):
        return config
    if config == Path(PLAIN):
        return None
    recorded = FORMATS[manifest.format].config(manifest) if config is None else None
    if recorded is not None:
        return recorded
    root = FORMATS[manifest.format].home(manifest)
    path = config or (root if root.is_dir() else root.parent) / "config.json"
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ModelError(
            "a model is described by a Hugging Face config",
            where=str(root),
            equation=f"{path.name} is not there" if config is None else f"{path} does not exist",
            hint="give one with --config config.json, or --config none to take the tensors as they are "
            "named; nothing is guessed from shapes",
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
