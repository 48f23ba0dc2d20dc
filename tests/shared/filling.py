"""Files that a writer has laid out, filled as a conversion fills them: extent by extent, in any order."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any

from shardweave.store.manifest import Extent, Manifest


def raw(tensor: Any) -> Any:
    """A torch tensor as a numpy array of its bytes, with one more dim of the bytes of an element."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.reshape(*tensor.shape, tensor.element_size())


def fill(manifest: Manifest, arrays: Mapping[str, Any]) -> dict[Extent, int]:
    """Write each extent of each array at its place; returns the checksums of all but a few of them."""
    pairs = [(key, extent) for key, tensor in manifest.tensors.items() for extent in tensor.extents]
    random.Random(len(pairs)).shuffle(pairs)
    checksums = {}
    for number, (key, extent) in enumerate(pairs):
        tensor, array = manifest.tensors[key], arrays[key]
        assert tuple(array.shape) == tensor.shape and str(array.dtype) == f"torch.{tensor.dtype}", key
        box = tuple(slice(o, o + n) for o, n in zip(extent.offset, extent.shape, strict=True))
        data = raw(array)[box].tobytes()
        with (manifest.root / extent.file).open("r+b") as file:
            file.seek(extent.start)
            file.write(data)
        if number % 5:
            checksums[extent] = zlib.crc32(data)
    return checksums
