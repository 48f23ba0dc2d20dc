"""The formats of checkpoints: one module each, one table of them all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from shardweave.convert.formats import dcp, deepspeed, hf, megatron, native, ranks
from shardweave.convert.formats.format import Format
from shardweave.errors import FormatError, GeometryError, MissingFileError

FORMATS: Final[Mapping[str, Format]] = MappingProxyType(
    {
        form.name: form
        for form in (
            hf.FORMAT,
            megatron.FORMAT,
            deepspeed.FORMAT,
            deepspeed.UNIVERSAL,
            dcp.FORMAT,
            native.FORMAT,
            ranks.FORMAT,
        )
    }
)
"""Every format by the name that commands use."""

__all__ = ["FORMATS", "Format", "detect", "written"]


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
        return hf.FORMAT.name
    names = {path.name for path in root.iterdir()}
    found = []
    if native.FORMAT.recognise(root, names):
        found.append(native.FORMAT.name)
        names = {name for name in names if not native.is_part(name)}
    # Files that are named by ranks are of safetensors as those of Hugging Face are.
    spared = {native.FORMAT, *((hf.FORMAT,) if ranks.FORMAT.recognise(root, names) else ())}
    found += [form.name for form in FORMATS.values() if form not in spared and form.recognise(root, names)]
    if len(found) != 1:
        held = ", ".join(sorted(names)[:6]) or "nothing"
        raise FormatError(
            "a folder holds a checkpoint of one known format",
            where=str(root),
            equation=f"it looks like {' and '.join(found)}" if found else f"it holds {held}",
            hint="give the folder of one save, which latest and latest_universal name"
            if set(found) == {deepspeed.FORMAT.name, deepspeed.UNIVERSAL.name}
            else "; ".join(f"{form.name}: {form.holds}" for form in FORMATS.values()),
        )
    return found[0]


def written(name: str) -> Format:
    """The format of that name, to write.

    Raises:
        GeometryError: There is none, or it is only read.
    """
    targets = [form.name for form in FORMATS.values() if form.target is not None]
    if name not in targets:
        raise GeometryError(
            "the target format is known",
            equation=f"{name!r} is not one of {', '.join(targets)}",
            hint="name one",
        )
    return FORMATS[name]
