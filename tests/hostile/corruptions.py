"""What can happen to a checkpoint: damage by chance, mixtures, lies in valid encoding, and attacks.

A damage changes a copy of a sample in place and says what it did; ``None`` where the sample has none of it.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from corruption_lies import Value, edit_header, edit_json, lied, plain_record, write_native
from corruption_samples import Sample

from shardweave.convert import open_checkpoint
from shardweave.layout.dtype import itemsize
from shardweave.store import native_manifest, torch_save

Damage = Callable[[Sample, Path, Random], str | None]

BAD_NAMES = (
    "../secret", "/etc/hostname", "a/../../b", "a\\..\\b", "C:x", "a\0b", "\x1b[2J", "", ".", "..", "a//b",
    "\udcff", "x" * 300,
)  # fmt: skip


# --- files ----------------------------------------------------------------------------------------


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def holds_state(path: Path) -> bool:
    return path.suffix in (".safetensors", ".distcp", ".pt")


@lru_cache(maxsize=64)
def payloads(sample: Sample) -> dict[str, list[range]]:
    """Where values of elements lie in the files of a sample, by their paths below its root."""
    manifest = open_checkpoint(sample.root, **sample.opens).manifest
    begin = manifest.root.relative_to(sample.root)
    found: dict[str, list[range]] = {}
    for tensor in manifest.tensors.values():
        for extent in tensor.extents:
            stop = extent.start + extent.numel * itemsize(tensor.dtype)
            found.setdefault(str(begin / extent.file), []).append(range(extent.start, stop))
    return {name: sorted(set(few), key=lambda one: (one.start, one.stop)) for name, few in found.items()}


def flip(path: Path, at: int, chance: Random) -> str:
    bit = chance.randrange(8)
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    return f"bit {bit} of byte {at} of {path.name}"


def truncated(sample: Sample, root: Path, chance: Random) -> str:
    path = chance.choice(files(root))
    keep = chance.randrange(path.stat().st_size)
    os.truncate(path, keep)
    return f"{path.name} cut to {keep} bytes"


def flipped_around(sample: Sample, root: Path, chance: Random) -> str:
    """A bit of a header, an index, a pickle, a directory or of nothing.

    How many rows of Megatron's vocabulary are words only the config says: it is believed.
    """
    believed = sample.kind.startswith(("torch_dist", "mp_rank"))
    path = chance.choice([path for path in files(root) if not believed or path.name != "config.json"])
    taken = payloads(sample).get(str(path.relative_to(root)), [])
    while True:
        at = chance.randrange(path.stat().st_size)
        if not any(at in one for one in taken):
            return flip(path, at, chance)


def flipped_inside(sample: Sample, root: Path, chance: Random) -> str:
    """A bit of the value of an element."""
    name, places = chance.choice(sorted(payloads(sample).items()))
    return flip(root / name, chance.choice(chance.choice(places)), chance)


def zeroed(sample: Sample, root: Path, chance: Random) -> str:
    """A stretch that a copy left out: zeros, as in a sparse file."""
    path = chance.choice([path for path in files(root) if holds_state(path)])
    size = path.stat().st_size
    start = chance.randrange(size)
    count = min(size - start, chance.choice([16, 200, 4096]))
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(count))
    return f"{count} bytes of {path.name} from {start} are zero"


def shifted(sample: Sample, root: Path, chance: Random) -> str:
    """Bytes that were put in, somewhere or at the end."""
    path = chance.choice(files(root))
    data = path.read_bytes()
    at = chance.choice([chance.randrange(len(data)), len(data)])
    more = chance.randbytes(chance.choice([1, 8, 64]))
    path.write_bytes(data[:at] + more + data[at:])
    return f"{len(more)} bytes put into {path.name} at {at}"


def swapped(sample: Sample, root: Path, chance: Random) -> str | None:
    """Two files of one kind under each other's names."""
    held = [path for path in files(root) if holds_state(path)]
    pairs = [(a, b) for a in held for b in held if a < b and a.suffix == b.suffix]
    alike = [(a, b) for a, b in pairs if kind_of(a) == kind_of(b)] or pairs
    if not alike:
        return None
    one, other = chance.choice(alike)
    aside = root / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    return f"{one.relative_to(root)} and {other.relative_to(root)} have changed places"


def kind_of(path: Path) -> str:
    """The name of a file without the numbers in it."""
    return "".join(letter for letter in path.name if not letter.isdecimal())


def missing(sample: Sample, root: Path, chance: Random) -> str:
    path = chance.choice(files(root))
    path.unlink()
    return f"{path.name} is gone"


def doubled(sample: Sample, root: Path, chance: Random) -> str:
    """A file again, under the name that one of a further rank would have."""
    path = chance.choice([path for path in files(root) if holds_state(path)])
    digits = [i for i, letter in enumerate(path.stem) if letter.isdecimal()]
    name = f"{path.stem}_1{path.suffix}"
    if digits:
        at = chance.choice(digits)
        name = f"{path.stem[:at]}{(int(path.stem[at]) + 5) % 10}{path.stem[at + 1 :]}{path.suffix}"
    shutil.copyfile(path, path.with_name(name))
    return f"{path.name} is there again as {name}"


def mixed(sample: Sample, root: Path, chance: Random) -> str | None:
    """A file of a later save of the same job in place of its own."""
    held = [path for path in files(root) if path.name != "config.json"]
    path = chance.choice(held)
    name = str(path.relative_to(root)).replace("1234", "1235")
    other = sample.other / name
    if sample.other == sample.root or not other.is_file() or other.read_bytes() == path.read_bytes():
        return None
    shutil.copyfile(other, path)
    return f"{path.relative_to(root)} is of another save"


def linked(sample: Sample, root: Path, chance: Random) -> str:
    """A file that is a link to one outside of the folder."""
    path = chance.choice([path for path in files(root) if path.name != "config.json"])
    outside = root.parent / "outside" / path.name
    outside.parent.mkdir(exist_ok=True)
    path.rename(outside)
    path.symlink_to(outside)
    return f"{path.name} is a link out of the folder"


# --- containers -----------------------------------------------------------------------------------


def streams(root: Path) -> list[tuple[Path, int, int]]:
    """The streams of ``torch.save``, found by the ends of zip archives."""
    found = []
    for path in files(root):
        data, start = path.read_bytes(), 0
        while path.suffix in (".pt", ".distcp") and start < len(data):
            start = data.index(b"PK\x03\x04", start)
            stop = data.index(b"PK\x05\x06", start) + 22
            found.append((path, start, stop))
            start = stop
    return found


def container(sample: Sample, root: Path, chance: Random) -> str | None:
    """The directory of an archive, or the header of a safetensors file, says something else."""
    every = streams(root)
    if not every:
        path = chance.choice([path for path in files(root) if path.suffix == ".safetensors"])
        return _header_framed(path, chance)
    path, start, stop = chance.choice(every)
    data = bytearray(path.read_bytes())
    entries, at = [], start + struct.unpack_from("<I", data, stop - 6)[0]
    while data[at : at + 4] == b"PK\x01\x02":
        entries.append(at)
        at += 46 + sum(struct.unpack_from("<3H", data, at + 28))
    at = chance.choice(entries)
    size = struct.unpack_from("<H", data, at + 28)[0]
    name = bytes(data[at + 46 : at + 46 + size])
    local = start + struct.unpack_from("<I", data, at + 42)[0]
    what = chance.choice(["renamed", "crc", "method", "encrypted", "size", "position"])
    if what == "renamed":  # in both places
        new = name[:-1] + bytes([name[-1] ^ 1])
        data[at + 46 : at + 46 + size] = data[local + 30 : local + 30 + size] = new
    elif what == "crc":
        data[at + 16 : at + 20] = chance.randbytes(4)
    elif what == "method":
        data[at + 10] = 8
    elif what == "encrypted":
        data[at + 8] |= 1
    elif what == "size":
        data[at + 20] ^= 4
        data[at + 24] ^= 4
    else:
        other = chance.choice([one for one in entries if one != at])
        data[at + 42 : at + 46] = data[other + 42 : other + 46]
    path.write_bytes(data)
    return f"{what} of record {name!r} in {path.name} at {start}"


def _header_framed(path: Path, chance: Random) -> str:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    text, rest = data[8 : 8 + size].rstrip(), data[8 + size :]
    what = chance.choice(["length", "twice", "behind", "metadata", "encoding", "more"])
    length = None
    if what == "length":
        length = chance.choice([0, size - 1, size + 8, 1 << 62])
    elif what == "twice":
        first = text.index(b'"', 1)
        entry = json.loads(text)
        key = next(key for key in entry if key != "__metadata__")
        text = text[:first] + json.dumps({key: entry[key]})[1:-1].encode() + b"," + text[first:]
    elif what == "behind":
        text += b"x"
    elif what == "metadata":
        text = (
            text[:-1] + b',"__metadata__":{"a":1}}' if b"__metadata__" not in text else text[:-1] + b',"b":3}'
        )
    elif what == "encoding":
        text = text.replace(b"model", b"mod\xffl", 1)
    else:
        rest += b"0123"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + rest)
    return f"{what} of the header of {path.name}"


# --- attacks --------------------------------------------------------------------------------------


def named(sample: Sample, root: Path, chance: Random) -> str | None:
    """A name that leads out of the folder, or is none."""
    bad = chance.choice(BAD_NAMES)
    trackers = [path for name in ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
                for path in [root / name] if path.exists()]  # fmt: skip
    index = root / "model.safetensors.index.json"
    if (root / ".metadata").exists():
        metadata = pickle.loads((root / ".metadata").read_bytes())
        place = chance.choice(list(metadata.storage_data.values()))
        place.relative_path = bad
        (root / ".metadata").write_bytes(
            pickle.dumps(metadata) if bad != "\udcff" else _surrogate(metadata, place)
        )
    elif trackers:
        trackers[0].write_bytes(
            chance.choice([b"\xff\xfe", bad.encode("utf-8", "surrogateescape") or b"\0", b"9" * 5000])
        )
    elif sample.kind == "native":
        body = native_manifest.decode((root / "shardweave.manifest").read_bytes(), where="test")
        plain = json.loads(json.dumps([body.software, body.step, body.config, body.data, body.extras]))
        names = [list(one) for one in body.files]
        names[0][0] = bad.encode("utf-8", "replace").decode()
        write_native(
            root / "shardweave.manifest", [*plain, names, [plain_record(one) for one in body.tensors]]
        )
    elif index.exists():

        def change(value: Value) -> None:
            value["weight_map"][chance.choice(sorted(value["weight_map"]))] = bad

        edit_json(index, change)
    else:

        def rename(header: Value) -> None:
            header[bad] = header.pop(chance.choice([key for key in header if key != "__metadata__"]))

        edit_header(chance.choice(sorted(root.glob("*.safetensors"))), rename)
    return f"a file is named {bad!r}"


def _surrogate(metadata: Any, place: Any) -> bytes:
    place.relative_path = "a\ud800b"
    return pickle.dumps(metadata)


class Bomb:
    """What a pickle would call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def _pickles() -> dict[str, bytes]:
    deep = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    laughs = b"\x80\x02]q\x00" + b"".join(
        b"(" + b"h" + bytes([i]) * 1 + (b"h" + bytes([i])) * 9 + b"lq" + bytes([i + 1]) for i in range(30)
    ) + b"."  # fmt: skip
    return {
        "code": pickle.dumps(Bomb(), protocol=2),
        "code in a dict": pickle.dumps({"module": Bomb()}, protocol=4),
        "code by name": b"\x80\x02cbuiltins\neval\nX\x04\x00\x00\x001+1\x85R.",
        "nested": deep,
        "laughs": laughs,
        "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
        "long text": b"\x80\x02X\xff\xff\xff\xffabc.",
        "memo": b"\x80\x02]r\xff\xff\xff\xffj\xfe\xff\xff\xff.",
        "long number": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"1.",
        "huge tensor": _tensor_of((1 << 40, 1 << 20)),
        "strided tensor": _tensor_of((1 << 40,), strides=(0,)),
        "negative tensor": _tensor_of((4,), offset=-4),
    }


def _tensor_of(shape: tuple[int, ...], *, strides: tuple[int, ...] | None = None, offset: int = 0) -> bytes:
    from shardweave.store import pickles_write

    made = torch_save.rebuild("0", "float32", (4,))
    storage, _, _, _, *rest = made.args
    made.args = (storage, offset, shape, strides or (1,) * len(shape), *rest)
    return pickles_write.dump(made)


def attacked(sample: Sample, root: Path, chance: Random) -> str | None:
    """A pickle or a header that would run something, or take all memory."""
    held = [path for path in files(root) if path.suffix == ".pt" or path.name == ".metadata"]
    if held:
        path = chance.choice(held)
        what, data = chance.choice(sorted(_pickles().items()))
        if path.name == ".metadata":
            path.write_bytes(data)
        else:
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}.items():
                    archive.writestr(f"archive/{name}", content)
                archive.writestr("archive/data/0", bytes(16))
        return f"{what} in {path.relative_to(root)}"
    path = chance.choice([path for path in files(root) if path.suffix == ".safetensors"])
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    wide = json.dumps({"a": {"dtype": "U8", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 0]}}).encode()
    dims = json.dumps({"a": {"dtype": "U8", "shape": [1] * 100_000, "data_offsets": [0, 1]}}).encode()
    number = b'{"a":{"dtype":"U8","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,0]}}'
    what, text = chance.choice([("deep", deep), ("wide", wide), ("dims", dims), ("number", number)])
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0")
    return f"{what} header of {path.name}"


DAMAGES: Mapping[str, Damage] = {
    "truncated": truncated,
    "bit around values": flipped_around,
    "bit of a value": flipped_inside,
    "zeros": zeroed,
    "bytes put in": shifted,
    "files swapped": swapped,
    "file missing": missing,
    "file doubled": doubled,
    "saves mixed": mixed,
    "container": container,
    "lie": lied,
    "name": named,
    "attack": attacked,
    "link": linked,
}
"""Every damage, by what the table of what is seen calls it."""
TIMES: Mapping[str, int] = {"bit around values": 2, "lie": 3}
"""How often a damage is tried on a sample, where it is not once."""
