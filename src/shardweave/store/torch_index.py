"""``.metadata``, the index of a torch.distributed.checkpoint folder, read and written without torch.

It is the pickle of a ``Metadata`` object: per key the dtype, the shape and the chunks, and per chunk the
file, first byte and length of its stream.

Source: torch 2.13 ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py`` and ``planner.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardweave.errors import DtypeError, FormatError, IndexMismatchError, OutsideError, OverlapError
from shardweave.store import pickles, torch_save
from shardweave.store.manifest import ITEMSIZE
from shardweave.store.pickles import PLAIN, Allow, Global, Instance, brief
from shardweave.store.pickles_write import dump

_DCP: Final = "torch.distributed.checkpoint"

_NAMES: Final[Mapping[tuple[str, str], pickles.Builder | None]] = {
    **{
        (f"{_DCP}.metadata", name): None
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    },
    **{(f"{_DCP}.filesystem", name): None for name in ("_StorageInfo", "_StoragePrefix")},
    **{
        (f"{_DCP}.planner", name): None
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    },
    # torch before 2.3 pickled the properties of its older ShardedTensor.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): None,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): None,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): None,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): None,
    ("torch", "Size"): torch_save.size,
    ("torch.serialization", "_get_layout"): None,
    **{("torch", dtype): None for dtype in torch_save.DTYPES},
    **{
        (module, name): None
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
    **PLAIN,
}  # fmt: skip

Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a box of a tensor."""
Place = tuple[str, int, int]
"""File, first byte and length of a stream."""


class Index:
    """``.metadata`` taken apart, and proved to be of one piece.

    Args:
        data: The file.
        where: Its path, for messages.

    Attributes:
        tensors: Dtype, shape and chunks by key.
        objects: The keys that are no tensors.
        places: The stream of each chunk by key and offset, of each object by key and ``None``.
        planner_data, mcore_data: What planners recorded, as stand-ins; ``None`` where nothing.

    Raises:
        PickleError, FormatError, DtypeError: It is not what torch.distributed.checkpoint writes.
        OutsideError: A chunk reaches outside its tensor.
        OverlapError, IndexMismatchError: A chunk has two streams, or a stream has no chunk.
    """

    def __init__(self, data: bytes, *, where: str) -> None:
        self.where = where
        loaded = pickles.load(data, allow=Allow(_NAMES), where=where)
        state = self._state(loaded, "Metadata")
        self.planner_data, self.mcore_data = state.get("planner_data"), state.get("mcore_data")
        self.tensors: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
        self.objects: list[str] = []
        self.places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
        for key, entry in self._of(state, "state_dict_metadata", dict).items():
            if type(key) is not str:
                raise self._unknown(f"a key of type {type(key).__name__}")
            if type(entry) is Instance and entry.cls.name == "BytesStorageMetadata":
                self.objects.append(key)
            else:
                self.tensors[key] = self._tensor(key, self._state(entry, "TensorStorageMetadata"))
        for index, info in self._of(state, "storage_data", dict).items():
            self._add_place(self._state(index, "MetadataIndex"), self._state(info, "_StorageInfo"))
        known = {(key, box[0]) for key, (_, _, chunks) in self.tensors.items() for box in chunks}
        stray = self.places.keys() - known - {(key, None) for key in self.objects}
        if stray:
            key, offset = min(stray, key=str)
            raise IndexMismatchError(
                "each stream of an index belongs to a chunk or an object of the index",
                where=self.where,
                equation=f"{len(stray)} do not, one is {key!r} at offset {offset}",
                hint="the index was edited or merged by hand; write it again with torch",
            )

    def _tensor(self, key: str, state: dict[str, Any]) -> tuple[str, tuple[int, ...], list[Chunk]]:
        properties, shape = state.get("properties"), self._size(state.get("size"))
        if type(properties) is not Instance or type(properties.state) is not tuple:
            raise self._unknown(f"the properties of {key!r}")
        dtype, layout = (*properties.state, None, None)[:2]
        if type(dtype) is not Global or (type(layout) is Instance and layout.args != ("torch.strided",)):
            raise self._unknown(f"the dtype or the layout of {key!r}")
        if dtype.name not in ITEMSIZE:
            raise DtypeError(
                "a stored tensor has a dtype of known width",
                where=f"{self.where}, {key!r}",
                equation=f"dtype {dtype} has no known width",
                hint=f"known are {', '.join(ITEMSIZE)}",
            )
        boxes = []
        for chunk in self._of(state, "chunks", list):
            fields = self._state(chunk, "ChunkStorageMetadata")
            box = self._size(fields.get("offsets")), self._size(fields.get("sizes"))
            inside_all = len(box[0]) == len(box[1]) == len(shape) and all(
                o + s <= full for o, s, full in zip(*box, shape, strict=True)
            )
            if not inside_all:
                raise OutsideError(
                    "a chunk lies inside its tensor",
                    where=f"{self.where}, {key!r}",
                    equation=f"offset{box[0]} + size{box[1]} is not in shape{shape}",
                    hint="the index is wrong; write it again with the software that saved the tensors",
                )
            boxes.append(box)
        return dtype.name, shape, boxes

    def _add_place(self, index: dict[str, Any], info: dict[str, Any]) -> None:
        key, offset = index.get("fqn"), index.get("offset")
        name, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if type(key) is not str or type(name) is not str or type(start) is not int or type(length) is not int:
            raise self._unknown(f"the place of {brief(key)}")
        if start < 0 or length < 0:
            raise self._unknown(f"a stream of {key!r} at start({start}) with length({length})")
        if info.get("transform_descriptors"):
            raise FormatError(
                "streams are stored as they are",
                where=f"{self.where}, {key!r}",
                equation=f"transform_descriptors is {brief(info['transform_descriptors'])}",
                hint="load and save it once with torch without the extension that compresses or encrypts",
            )
        at = key, None if offset is None else self._size(offset)
        if at in self.places:
            raise OverlapError(
                "a chunk is stored once",
                where=f"{self.where}, {key!r}",
                equation=f"two streams for offset {offset}",
                hint="the index was edited or merged by hand; write it again with torch",
            )
        self.places[at] = name, start, length

    def place(self, key: str, offset: tuple[int, ...] | None) -> Place:
        """The stream of a chunk, or of an object where ``offset`` is ``None``."""
        try:
            return self.places[key, offset]
        except KeyError:
            raise IndexMismatchError(
                "each chunk of an index has a stream",
                where=f"{self.where}, {key!r}",
                equation=f"offset {offset} has none",
                hint="torch would leave these elements at their old values; save the checkpoint again",
            ) from None

    def _state(self, value: Any, name: str) -> dict[str, Any]:
        if type(value) is not Instance or value.cls.name != name or type(value.state) is not dict:
            raise self._unknown(f"a {type(value).__name__} in place of a {name}")
        return value.state

    def _of(self, state: dict[str, Any], field: str, kind: type) -> Any:
        if type(state.get(field)) is not kind:
            raise self._unknown(f"{field} is a {type(state.get(field)).__name__}")
        return state[field]

    def _size(self, value: Any) -> tuple[int, ...]:
        if type(value) is not tuple or not all(type(part) is int and 0 <= part < 1 << 48 for part in value):
            raise self._unknown(f"{brief(value)} in place of a size")
        return value

    def _unknown(self, what: str) -> FormatError:
        return FormatError(
            "an index is what torch.distributed.checkpoint writes",
            where=self.where,
            equation=f"it has {what}",
            hint="fetch the file again; if it stays so, save it once more with a torch that is known here",
        )


def render(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Sequence[Chunk]]],
    objects: Sequence[str],
    places: Mapping[tuple[str, tuple[int, ...] | None], Place],
    *,
    planner_data: Any = None,
    mcore_data: Any = None,
) -> bytes:
    """The bytes of ``.metadata``, for which ``Index`` returns the arguments again."""
    layout = Instance(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Instance(Global(f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"), (0,))

    def made(name: str, /, module: str = "metadata", **state: Any) -> Instance:
        return Instance(Global(f"{_DCP}.{module}", name), (), state)

    def sizes(values: tuple[int, ...]) -> Instance:
        return Instance(Global("torch", "Size"), (values,))

    def index(key: str, offset: tuple[int, ...] | None) -> Instance:
        place: dict[str, Any] = {} if offset is None else {"offset": sizes(offset)}
        return made("MetadataIndex", fqn=key, index=None, **place)

    entries: dict[str, Instance] = {}
    for key, (dtype, shape, chunks) in tensors.items():
        like = Global("torch", dtype), layout, False, contiguous, False
        properties = Instance(Global(f"{_DCP}.metadata", "TensorProperties"), (), like)
        boxes = [made("ChunkStorageMetadata", offsets=sizes(o), sizes=sizes(s)) for o, s in chunks]
        entries[key] = made("TensorStorageMetadata", properties=properties, size=sizes(shape), chunks=boxes)
    entries |= {key: made("BytesStorageMetadata") for key in objects}
    state: dict[str, Any] = {
        "state_dict_metadata": entries,
        "planner_data": planner_data,
        "storage_data": {
            index(*at): made("_StorageInfo", "filesystem", relative_path=name, offset=start, length=length)
            for at, (name, start, length) in places.items()
        },
        "storage_meta": None,
        "version": "1.0.0",
    }
    if mcore_data is not None:
        state["mcore_data"] = mcore_data
    return dump(made("Metadata", **state))
