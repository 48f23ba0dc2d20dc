"""The weights of a pipeline: a file a layer, in which names begin anew.

A pipeline calls a weight by the number of its layer, ``3.up.weight``; the file of layer 3 calls it
``up.weight``. A layer that several stages share is ``tied_modules.{key}`` in all of them, and one of its
places has the file.

Source: deepspeed 0.19.8 ``runtime/pipe/module.py`` (``_build``, ``save_state_dict``, ``ckpt_layer_path``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from shardweave.errors import FormatError
from shardweave.store.deepspeed_files import MODEL, File, Ranks, broken, complete, load
from shardweave.store.pickles import brief
from shardweave.store.torch_save import TensorAt

_TIED: Final = "tied_modules."

Layers = Mapping[int, Mapping[str, tuple[str, Any]]]
"""By number of a layer its entries, by the name there: the file, and what it is."""


def layers_of(folder: Path, names: Ranks, tp: int) -> tuple[tuple[File, ...], list[Layers]]:
    """The files of layers, and by tensor-parallel rank what they hold.

    Raises:
        MissingFileError, IndexMismatchError: A layer has no file of some rank.
        FormatError: A file of a layer holds something else.
    """
    numbers = sorted({key[1] for key in names})  # layers without weights have no file
    wanted = [(k, layer) for k in range(tp) for layer in numbers]
    complete(folder, names, wanted, "layer_{1:02d}-model_{0:02d}-model_states.pt")
    files: list[File] = []
    found: list[dict[int, dict[str, tuple[str, Any]]]] = [{} for _ in range(tp)]
    for (k, layer), name in sorted(names.items()):
        file = load(folder, name, allow=MODEL)
        files.append(file)
        if not all(type(key) is str for key in file.value):
            raise broken(folder / name, f"its entries are {brief(tuple(file.value)[:4])}")
        found[k][layer] = {key: (name, value) for key, value in file.value.items()}
    return tuple(files), [dict(one) for one in found]


def stage_module(
    folder: Path, layers: Layers, mine: Mapping[str, tuple[int, ...]], every: Collection[str]
) -> dict[str, tuple[str, Any]]:
    """What a stage's module holds, by the names that its optimizer has.

    Args:
        folder: Of the save.
        layers: Of its tensor-parallel rank.
        mine: The shapes of the weights that the stage trains.
        every: The weights that any stage trains.

    Raises:
        FormatError: Nothing says which layer a shared one is.
    """
    module = {f"{i}.{key}": entry for i, entries in layers.items() for key, entry in entries.items()}
    alone = {i for i in layers if not any(name.startswith(f"{i}.") for name in every)}
    wanted: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in mine.items():
        if name.startswith(_TIED):
            key, _, rest = name.removeprefix(_TIED).partition(".")
            wanted.setdefault(key, {})[rest] = shape
    for key, shapes in wanted.items():
        fits = [i for i in sorted(alone) if _shapes(layers[i], shapes) == shapes]
        if len(fits) != 1:
            raise FormatError(
                "a layer that stages share has one file that can be its",
                where=str(folder),
                equation=f"{_TIED}{key}: layers {fits} hold weights of its names and shapes",
                hint="convert it with DeepSpeed's ds_to_universal, and read the universal checkpoint",
            )
        for rest in shapes:
            module[f"{_TIED}{key}.{rest}"] = layers[fits[0]][rest]
            module.pop(f"{fits[0]}.{rest}", None)
    return module


def _shapes(entries: Mapping[str, tuple[str, Any]], like: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {k: v.shape for k, (_, v) in entries.items() if k in like and type(v) is TensorAt}
