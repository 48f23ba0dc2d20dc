"""Lies of checkpoints: what a file says of itself or of others is changed, and encoded as it should be."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
from corruption_samples import Sample
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardweave.store import native_manifest, torch_save
from shardweave.store.deepspeed_files import MODEL

Value = dict[str, Any]
Lie = tuple[str, Callable[[], object]]


def edit_header(path: Path, change: Callable[[Value], None]) -> None:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def edit_json(path: Path, change: Callable[[Value], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_value(path: Path, change: Callable[[Any], None]) -> None:
    """Write a file of ``torch.save`` again; tensors are dicts with ``$leaf``, ``shape`` and ``data``."""
    data = path.read_bytes()
    value = torch_save.load(data, 0, len(data), allow=MODEL, where="test")
    plain = torch_save.to_plain(value, data, where="test")
    change(plain)
    path.write_bytes(torch_save.stream(plain))


def lied(sample: Sample, root: Path, chance: Random) -> str | None:
    """What a file says of itself or of others is changed, and encoded as it should be."""
    lies = list(_lies(sample, root, chance))
    for name, lie in chance.sample(lies, len(lies)):
        try:
            what = lie()
        except (KeyError, IndexError, TypeError, StopIteration):
            continue
        return f"{name}: {what}"
    return None


def _lies(sample: Sample, root: Path, chance: Random) -> Iterator[Lie]:
    if sample.kind.startswith("ZeRO"):
        yield from _of_deepspeed(root, chance)
    elif sample.kind == "universal":
        yield from _of_universal(root, chance)
    elif sample.kind == "mp_rank":
        yield from _of_ranks(root, chance)
    elif sample.kind == "native":
        yield from _of_native(root, chance)
    elif (root / ".metadata").exists():
        yield from _of_index(root, chance)
    else:
        yield from _of_headers(root, chance)


def _of_headers(root: Path, chance: Random) -> Iterator[Lie]:
    path = chance.choice(sorted(root.glob("*.safetensors")))

    def pick(header: Value, dims: int = 1) -> str:
        return chance.choice(
            [k for k, v in header.items() if k != "__metadata__" and len(v["shape"]) >= dims]
        )

    def transposed(header: Value) -> None:
        key = chance.choice([k for k, v in header.items() if len(set(v.get("shape", ()))) > 1])
        header[key]["shape"].reverse()

    def dtype(header: Value) -> None:
        header[pick(header)]["dtype"] = chance.choice(["F16", "F32", "I16", "Q7"])

    def grown(header: Value) -> None:
        header[pick(header)]["shape"][0] += 1

    def negative(header: Value) -> None:
        header[pick(header)]["shape"][0] *= -1

    def exchanged(header: Value) -> None:
        key = pick(header, 2)
        other = chance.choice(
            [k for k, v in header.items() if v != header[key] and v.get("shape") == header[key]["shape"]]
        )
        for each, place in ((key, header[other]["data_offsets"]), (other, header[key]["data_offsets"])):
            header[each] = {**header[each], "data_offsets": place}

    def overlapping(header: Value) -> None:
        header[pick(header)]["data_offsets"] = header[pick(header)]["data_offsets"]

    def far(header: Value) -> None:
        key = pick(header)
        header[key]["data_offsets"] = [at + (1 << 40) for at in header[key]["data_offsets"]]

    def renamed(header: Value) -> None:
        key = pick(header)
        header[key.replace("weight", "bias")] = header.pop(key)

    def offsets(header: Value) -> None:
        info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        key = chance.choice(sorted(info))
        info[key]["saved_offsets"][0] += chance.choice([-1, 1, 1 << 40])
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)

    for change in (transposed, dtype, grown, negative, exchanged, overlapping, far, renamed, offsets):
        yield change.__name__, lambda change=change: edit_header(path, change)
    index = root / "model.safetensors.index.json"

    def moved(value: Value) -> None:
        names = value["weight_map"]
        key = chance.choice(sorted(names))
        names[key] = chance.choice(sorted(set(names.values()) - {names[key]}))

    def lost(value: Value) -> None:
        del value["weight_map"][chance.choice(sorted(value["weight_map"]))]

    if index.exists():
        yield "moved", lambda: edit_json(index, moved)
        yield "lost", lambda: edit_json(index, lost)


def _of_index(root: Path, chance: Random) -> Iterator[Lie]:
    """Lies of ``.metadata``, told with the classes of torch, and of what all ranks of Megatron share."""
    path = root / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entries = metadata.state_dict_metadata
    tensors = {key: one for key, one in entries.items() if isinstance(one, TensorStorageMetadata)}
    key = chance.choice(sorted(key for key, one in tensors.items() if one.size.numel() > 1))
    entry, places = tensors[key], metadata.storage_data
    index = chance.choice([one for one in places if one.fqn == key])

    def write() -> str:
        path.write_bytes(pickle.dumps(metadata))
        return key

    def chunk_moved() -> str:
        chunk = chance.choice(entry.chunks)
        chunk.offsets = torch.Size([chunk.offsets[0] + 1, *chunk.offsets[1:]])
        return write()

    def size_grown() -> str:
        entry.size = torch.Size([entry.size[0] + 1, *entry.size[1:]])
        return write()

    def dtype() -> str:
        now = entry.properties.dtype
        entry.properties.dtype = torch.int32 if now.itemsize == 4 else torch.float16
        return write()

    def exchanged() -> str:
        other = next(
            one for one in places
            if one.fqn in tensors and one != index and places[one].length == places[index].length
            and tensors[one.fqn].size == entry.size
        )  # fmt: skip
        places[index], places[other] = places[other], places[index]
        return f"{write()} and {other.fqn}"

    def start() -> str:
        places[index].offset += chance.choice([1, 64, 1 << 40, -(1 << 20)])
        return write()

    def length() -> str:
        places[index].length += chance.choice([-1, 1, -22, 1 << 40])
        return write()

    def lost() -> str:
        del places[index]
        return write()

    def chunk_lost() -> str:
        entry.chunks.pop()
        return write()

    def chunk_twice() -> str:
        entry.chunks.append(entry.chunks[0])
        return write()

    def key_lost() -> str:
        del entries[key]
        return write()

    def renamed() -> str:
        entries[f"{key}2"] = entries.pop(key)
        return write()

    def other_file() -> str:
        other = chance.choice(sorted({one.relative_path for one in places.values()}))
        places[index].relative_path = other if other != places[index].relative_path else f"{other}x"
        return write()

    for lie in (
        chunk_moved, size_grown, dtype, exchanged, start, length, lost, chunk_lost, chunk_twice, key_lost,
        renamed, other_file,
    ):  # fmt: skip
        yield lie.__name__, lie
    if (root / "common.pt").exists():
        for name, change in {
            "groups lost": lambda value: _groups(value).pop(),
            "one step": lambda value: _groups(value)[0].update(step=7),
            "step": lambda value: _groups(value)[0].update(step=-3),
            "no optimizer": lambda value: value.pop("optimizer"),
        }.items():
            yield name, lambda change=change: edit_value(root / "common.pt", change)


def _groups(value: Value) -> list[Value]:
    optimizer = value["optimizer"]
    one = optimizer[0] if isinstance(optimizer, list) or 0 in optimizer else optimizer
    found: list[Value] = one["optimizer"]["param_groups"]
    return found


def _shorter(tensor: Value, count: int) -> None:
    (size,) = tensor["shape"]
    width = len(tensor["data"]) // size
    tensor["shape"], tensor["data"] = (size - count,), tensor["data"][: width * (size - count)]


def _exchange(shapes: Value) -> None:
    """Two weights of one shape in each other's place in the order."""
    names = list(shapes)
    a, b = next((a, b) for a in names for b in names if a < b and shapes[a] == shapes[b])
    at = {a: b, b: a}
    items = [(at.get(name, name), shape) for name, shape in shapes.items()]
    shapes.clear()
    shapes.update(items)


def _of_deepspeed(root: Path, chance: Random) -> Iterator[Lie]:
    optim = chance.choice(sorted(root.rglob("*_optim_states.pt")))
    model = chance.choice(sorted(root.rglob("*_model_states.pt")))

    def of_state(change: Callable[[Value], object]) -> Callable[[], object]:
        return lambda: edit_value(optim, lambda value: change(value["optimizer_state_dict"]))

    def of_model(change: Callable[[Value], object]) -> Callable[[], object]:
        return lambda: edit_value(model, change)

    def fragment(value: Value) -> None:
        group = value["param_slice_mappings"][0]
        group[chance.choice(sorted(group))]["state"]["start"] += 1

    def fragment_lost(value: Value) -> None:
        group = value["param_slice_mappings"][0]
        del group[chance.choice(sorted(group))]

    def count(value: Value) -> None:
        if isinstance(value["partition_count"], list):
            value["partition_count"][0] += 1
        else:
            value["partition_count"] += 1

    def base(value: Value) -> Value:
        found: Value = value.get("base_optimizer_state") or value["optimizer_state_dict"]
        return found

    def step(value: Value) -> None:
        if "base_optimizer_state_step" in value:
            value["base_optimizer_state_step"] = 7
        of_first = base(value)["state"][0]
        if "step" in of_first:
            of_first["step"] = 7
        for group in base(value)["param_groups"]:
            if "step" in group:
                group["step"] = 7

    def masters(value: Value) -> None:
        flat = value.get("single_partition_of_fp32_groups") or value["fp32_flat_groups"]
        _shorter(flat[0], 3)

    def moment(value: Value) -> None:
        _shorter(base(value)["state"][0]["exp_avg"], 1)

    def moment_lost(value: Value) -> None:
        del base(value)["state"][0]["exp_avg_sq"]

    def first_shape(value: Value) -> None:
        shapes = value["param_shapes"][0]
        name = chance.choice([name for name, shape in shapes.items() if len(set(shape)) > 1])
        shapes[name] = tuple(reversed(shapes[name]))

    yield from {
        "partition_count": of_state(count),
        "group_paddings": of_state(lambda v: v["group_paddings"].__setitem__(0, v["group_paddings"][0] + 2)),
        "zero_stage": of_state(lambda v: v.update(zero_stage=v["zero_stage"] % 3 + 1)),
        "fragment": of_state(fragment),
        "fragment lost": of_state(fragment_lost),
        "step": of_state(step),
        "settings": of_state(lambda v: base(v)["param_groups"][0].update(lr=0.5)),
        "masters": of_state(masters),
        "moment": of_state(moment),
        "moment lost": of_state(moment_lost),
        "param_shapes": of_model(first_shape),
        "order": of_model(lambda v: _exchange(v["param_shapes"][0])),
        "dp_world_size": of_model(lambda v: v.update(dp_world_size=v["dp_world_size"] + 1)),
        "weight lost": of_model(lambda v: v["module"].pop(chance.choice(sorted(v["module"])))),
        "shape lost": of_model(lambda v: v["param_shapes"][0].popitem()),
        "shapes lost": of_model(lambda v: v.pop("param_shapes")),
    }.items()


def _of_universal(root: Path, chance: Random) -> Iterator[Lie]:
    (zero,) = root.rglob("zero")
    weight = chance.choice(sorted(path for path in zero.iterdir() if path.is_dir()))
    model = chance.choice(sorted(root.rglob("*_model_states.pt")))

    def reshaped(value: Value) -> None:
        value["param"]["shape"] = (*value["param"]["shape"], 1)

    def turned(value: Value) -> None:
        shape = value["param"]["shape"]
        if len(set(shape)) < 2:
            raise KeyError(shape)
        value["param"]["shape"] = tuple(reversed(shape))

    def first_shape(value: Value) -> None:
        shapes = value["param_shapes"][0]
        name = chance.choice(sorted(shapes))
        shapes[name] = (*shapes[name][:-1], shapes[name][-1] + 1)

    def halved(value: Value) -> None:
        value["param"].update({"$leaf": "bfloat16", "data": value["param"]["data"][::2]})

    def stepped() -> str:
        torch.save(7, weight / "step.pt")
        return weight.name

    yield "reshaped", lambda: edit_value(weight / "exp_avg.pt", reshaped)
    yield "turned", lambda: edit_value(weight / "fp32.pt", turned)
    yield "dtype", lambda: edit_value(weight / "exp_avg_sq.pt", halved)
    yield "cat_dim", lambda: edit_value(weight / "exp_avg.pt", lambda v: v.update(cat_dim=1))
    yield "step", stepped
    yield "groups", lambda: edit_value(zero / "optimizer_state.pt", lambda v: v["param_groups"].pop())
    yield (
        "members",
        lambda: edit_value(zero / "optimizer_state.pt", lambda v: v["param_groups"][0].update(params=[5])),
    )
    yield "shapes", lambda: edit_value(model, first_shape)
    yield "shape lost", lambda: edit_value(model, lambda v: v["param_shapes"][0].popitem())
    yield "weight lost", lambda: shutil.rmtree(weight)
    yield "weight renamed", lambda: weight.rename(weight.with_name(f"{weight.name}2"))
    yield "state lost", lambda: (weight / "exp_avg.pt").unlink()


def _of_ranks(root: Path, chance: Random) -> Iterator[Lie]:
    weights = chance.choice(sorted(root.rglob("model_optim_rng.pt")))
    states = chance.choice(sorted(root.rglob("distrib_optim.pt")))

    def edit(path: Path, change: Callable[[Any], object]) -> Callable[[], object]:
        def lie() -> None:
            value = torch.load(path, weights_only=False)
            change(value)
            torch.save(value, path)

        return lie

    def flat(value: Value) -> Value:
        found: Value = next(iter(value[0].values()))
        return found

    def group(value: Value) -> list[Value]:
        found: list[Value] = value["optimizer"]["optimizer"]["param_groups"]
        return found

    def order(value: Value) -> None:
        value["model"] = dict(reversed(value["model"].items()))

    def exchanged(value: Value) -> None:
        _exchange({name: tuple(one.shape) for name, one in value["model"].items()})
        shapes = {name: tuple(one.shape) for name, one in value["model"].items()}
        names = list(shapes)
        a, b = next((a, b) for a in names for b in names if a < b and shapes[a] == shapes[b])
        held = value["model"]
        held[a], held[b] = held[b], held[a]

    def weight_lost(value: Value) -> None:
        del value["model"][chance.choice(sorted(value["model"]))]

    def turned(value: Value) -> None:
        name = chance.choice([name for name, one in value["model"].items() if len(set(one.shape)) > 1])
        value["model"][name] = value["model"][name].T.contiguous()

    def shorter(value: Value) -> None:
        flat(value)["exp_avg"] = flat(value)["exp_avg"][:-1].clone()

    yield from {
        "tp": edit(weights, lambda v: setattr(v["args"], "tensor_model_parallel_size", 4)),
        "pp": edit(weights, lambda v: setattr(v["args"], "pipeline_model_parallel_size", 2)),
        "iteration": edit(weights, lambda v: v.update(iteration=7)),
        "step": edit(weights, lambda v: group(v)[0].update(step=7)),
        "settings": edit(weights, lambda v: group(v)[0].update(lr=0.5)),
        "groups": edit(weights, lambda v: group(v).pop()),
        "order": edit(weights, order),
        "exchanged": edit(weights, exchanged),
        "weight lost": edit(weights, weight_lost),
        "turned": edit(weights, turned),
        "numel": edit(states, lambda v: flat(v).update(numel_unpadded=flat(v)["numel_unpadded"] - 64)),
        "moment": edit(states, shorter),
        "moment lost": edit(states, lambda v: flat(v).pop("exp_avg_sq")),
        "masters lost": edit(states, lambda v: flat(v).pop("param")),
        "buffer": edit(states, lambda v: v.update({1: v.pop(0)})),
    }.items()


def _of_native(root: Path, chance: Random) -> Iterator[Lie]:
    """Lies in a manifest whose digest is right."""
    path = root / "shardweave.manifest"
    body = native_manifest.decode(path.read_bytes(), where="test")
    plain = json.loads(json.dumps([body.software, body.step, body.config, body.data, body.extras]))
    names, tensors = [list(one) for one in body.files], [plain_record(one) for one in body.tensors]
    at = chance.choice([i for i, one in enumerate(tensors) if one[3] and one[2]])

    def write(change: Callable[[], object]) -> Callable[[], object]:
        def lie() -> str:
            change()
            write_native(path, [*plain, names, tensors])
            return str(tensors[at][0])

        return lie

    extent = tensors[at][3][0]

    def exchanged() -> None:
        mine = tensors[at]
        alike = [one for one in tensors if one[1:3] == mine[1:3] and len(one[3]) == len(mine[3])]
        other = next(one for one in alike if one is not mine)
        tensors[at][3], other[3] = other[3], tensors[at][3]

    for name, change in {
        "shape": lambda: tensors[at][2].__setitem__(0, tensors[at][2][0] + 1),
        "offset": lambda: extent[0].__setitem__(0, extent[0][0] + 1),
        "box": lambda: extent[1].__setitem__(0, extent[1][0] + 1),
        "file": lambda: extent.__setitem__(2, (extent[2] + 1) % len(names)),
        "no file": lambda: extent.__setitem__(2, 99),
        "start": lambda: extent.__setitem__(3, extent[3] + chance.choice([2, 64, 1 << 40])),
        "dtype": lambda: tensors[at].__setitem__(1, "float16" if tensors[at][1] == "bfloat16" else "int32"),
        "digest": lambda: extent.__setitem__(4, bytes(16)),
        "lost": lambda: tensors.pop(at),
        "twice": lambda: tensors.append(tensors[at]),
        "exchanged": exchanged,
        "size": lambda: names[0].__setitem__(1, names[0][1] + 1),
        "extents": lambda: tensors[at][3].append(extent),
    }.items():
        yield name, write(change)


def plain_record(record: Any) -> list[Any]:
    extents = [[list(e.offset), list(e.shape), e.file, e.start, e.digest] for e in record.extents]
    return [record.key, record.dtype, list(record.shape), extents]


def write_native(path: Path, body: list[Any]) -> None:
    """A manifest with a digest that is right, whatever it says."""
    data = msgspec.msgpack.encode(body)
    magic = path.read_bytes()[: len(native_manifest._MAGIC)]
    path.write_bytes(magic + hashlib.blake2b(data, digest_size=16).digest() + data)
