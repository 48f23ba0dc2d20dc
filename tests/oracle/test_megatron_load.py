"""The real loaders read what we write: megatron-core at six geometries, and torch.distributed.checkpoint."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_processes import run
from safetensors.numpy import load_file

from shardweave.store import torch_dist, torch_save
from shardweave.store.manifest import Manifest, TensorSpec
from shardweave.store.torch_dist_write import allocate, finish

SCRIPT = Path(__file__).with_name("megatron_cpu.py")
DATA = Path(__file__).parents[1] / "data"
Box = tuple[tuple[int, ...], tuple[int, ...]]

# By fixture: its model, tp, pp, ep, and how many ranks it was saved from.
GEOMETRIES = {
    "mc_gqa_tp1": ("gqa", 1, 1, 1, 1),
    "mc_gqa_tp2pp2": ("gqa", 2, 2, 1, 4),
    "mc_gqa_tp4": ("gqa", 4, 1, 1, 4),
    "mc_moe_tp1": ("moe", 1, 1, 1, 1),
    "mc_moe_ep2": ("moe", 1, 1, 2, 2),
    "mc_moe_tp2ep2_etp1": ("moe", 2, 1, 2, 4),
}


def stacked_truth(kind: str) -> dict[str, np.ndarray]:
    """The fixture's tensors under Megatron's stacked keys, assembled from the unstacked truth by name."""
    shapes = {
        record["key"]: tuple(record["global_shape"])
        for records in json.loads((DATA / f"mc_{kind}_tp1/local/rank0.json").read_text())["sharded"].values()
        for record in records
    }
    full = {key: np.full(shape, np.nan, dtype=np.float32) for key, shape in shapes.items()}
    for name, value in load_file(DATA / f"mc_{kind}_tp1/truth.safetensors").items():
        key, index = name, []
        for pattern, stacked in (
            (r"\.layers\.(\d+)\.", ".layers."),
            (r"\.local_experts\.(\d+)\.", ".experts."),
        ):
            if match := re.search(pattern, key):
                index.append(int(match[1]))
                key = key.replace(match[0], stacked)
        key = key.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
        if key not in full:
            key = key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        full[key][tuple(index)] = value
    assert not any(np.isnan(value).any() for value in full.values())
    return full


def uneven(offset: Sequence[int], shape: Sequence[int], rng: np.random.Generator, depth: int) -> list[Box]:
    """A box cut in two at a random place of a random dim, and so on."""
    dims = [d for d, size in enumerate(shape) if size > 1]
    if not depth or not dims:
        return [(tuple(offset), tuple(shape))]
    d = int(rng.choice(dims))
    cut = int(rng.integers(1, shape[d]))
    low, high = list(shape), list(shape)
    low[d], high[d] = cut, shape[d] - cut
    behind = list(offset)
    behind[d] += cut
    return uneven(offset, low, rng, depth - 1) + uneven(behind, high, rng, depth - 1)


def write(folder: Path, tensors: dict[str, np.ndarray], records: dict[str, Any]) -> Manifest:
    """The tensors in uneven chunks and in files of at most 100 kB, payloads written in reverse order."""
    folder.mkdir()
    rng = np.random.default_rng(11)
    specs = [
        TensorSpec(key, "float32", value.shape, tuple(uneven((0,) * value.ndim, value.shape, rng, 3)))
        for key, value in tensors.items()
    ]
    manifest = allocate(folder, specs, records=records, max_file_bytes=100_000)
    for key, tensor in reversed(manifest.tensors.items()):
        for extent in reversed(tensor.extents):
            where = tuple(slice(o, o + s) for o, s in zip(extent.offset, extent.shape, strict=True))
            with (folder / extent.file).open("r+b") as file:
                file.seek(extent.start)
                file.write(np.ascontiguousarray(tensors[key][where]).tobytes())
    finish(manifest, fsync=False)
    return manifest


def objects(kind: str) -> dict[str, bytes]:
    names = torch_dist.read(DATA / f"mc_{kind}_tp1/torch_dist").records["objects"]
    return {name: torch_save.stream([None]) for name in names}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("written")
    common = {"iteration": 7, "args": {"$class": "argparse:Namespace", "state": {"num_layers": 4}}}
    for kind in ("gqa", "moe"):
        manifest = write(folder / kind, stacked_truth(kind), {"objects": objects(kind), "common": common})
        chunks = [len(tensor.extents) for tensor in manifest.tensors.values()]
        assert min(chunks) > 3 and len(manifest.files) > 4
    gqa = stacked_truth("gqa")
    write(folder / "no objects", gqa, {})
    wrong = {**gqa, "decoder.final_layernorm.weight": np.zeros(65, dtype=np.float32)}
    write(folder / "wrong shape", wrong, {"objects": objects("gqa")})
    for name, gone in (("no common.pt", "common.pt"), ("no metadata.json", "metadata.json")):
        (folder / name).mkdir()
        for path in (folder / "gqa").iterdir():
            if path.name != gone:
                os.link(path, folder / name / path.name)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def loaded(written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one world of four ranks: the import of Megatron costs more than the loads."""
    out = tmp_path_factory.mktemp("loaded")
    cases = [
        {"name": name, "kind": kind, "tp": tp, "pp": pp, "ep": ep, "checkpoint": str(written[kind])}
        for name, (kind, tp, pp, ep, _) in GEOMETRIES.items()
    ]
    base = {"kind": "gqa", "tp": 2, "pp": 1, "ep": 1, "strict": "assume_ok_unexpected"}
    cases += [
        {**base, "name": name, "checkpoint": str(written[name])}
        for name in ("no objects", "no common.pt", "no metadata.json", "wrong shape")
    ]
    cases += [
        {
            **base,
            "name": "no objects, lenient",
            "checkpoint": str(written["no objects"]),
            "strict": "log_all",
        },
        {**base, "name": "vocab 208", "checkpoint": str(written["gqa"]), "vocab": 208},
        {**base, "name": "vocab 176", "checkpoint": str(written["gqa"]), "vocab": 176},
    ]
    run(SCRIPT, cases, out, world_size=4, limit_s=240, preload="megatron.core")
    return out


peer = [pytest.mark.peer("megatron.core"), pytest.mark.timeout(300)]


def report(loaded: Path, name: str, rank: int) -> dict[str, Any]:
    return dict(json.loads((loaded / f"{name}.{rank}.json").read_text()))


@pytest.mark.parametrize("name", GEOMETRIES)
class TestMegatronLoads:
    pytestmark = peer

    def test_each_rank_holds_what_its_own_checkpoint_gave_it(self, loaded: Path, name: str) -> None:
        ranks = GEOMETRIES[name][-1]
        for rank in range(4):
            said = report(loaded, name, rank)
            assert said.get("error") is None and not said["missing"]
            truth = DATA / name / "local" / f"rank{rank % ranks}"
            coords = json.loads(truth.with_suffix(".json").read_text())["coords"]
            assert [said[axis] for axis in ("tp", "pp", "ep")] == [
                coords[axis] for axis in ("tp", "pp", "ep")
            ]
            found, expected = (
                load_file(loaded / f"{name}.{rank}.safetensors"),
                load_file(f"{truth}.safetensors"),
            )
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert found[key].shape == value.shape
                assert found[key].tobytes() == value.tobytes(), (key, rank)

    def test_what_common_pt_holds_comes_back(self, loaded: Path, name: str) -> None:
        assert report(loaded, name, 0)["beside"] == ["args", "iteration"]


class TestWhatMegatronNeeds:
    pytestmark = peer

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            (
                "no objects",
                r"Missing key in checkpoint state_dict: decoder\.layers\..*_extra_state/shard_0_4",
            ),
            ("no common.pt", "iterdir"),
            ("no metadata.json", "not a distributed checkpoint"),
            ("wrong shape", r"Global shape mismatch .*65.*64.*final_layernorm"),
        ],
    )
    def test_it_refuses(self, loaded: Path, name: str, says: str) -> None:
        assert all(re.search(says, report(loaded, name, rank)["error"], re.S) for rank in range(4))

    def test_without_objects_it_loads_when_unexpected_keys_are_dropped_first(self, loaded: Path) -> None:
        name = "no objects, lenient"
        assert "error" not in report(loaded, name, 0)
        found = load_file(loaded / f"{name}.0.safetensors")
        assert not any(np.isnan(value).any() for value in found.values())

    @pytest.mark.parametrize("vocab", [176, 208])
    def test_the_vocabulary_may_be_padded_otherwise(self, loaded: Path, vocab: int) -> None:
        """Rows that the checkpoint lacks become zeros, rows that the model lacks are left out."""
        truth = load_file(DATA / "mc_gqa_tp1/truth.safetensors")
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            expected = np.zeros((vocab, 64), dtype=np.float32)
            expected[: min(vocab, 192)] = truth[key][:vocab]
            parts = [load_file(loaded / f"vocab {vocab}.{rank}.safetensors")[key] for rank in (0, 1)]
            assert np.concatenate(parts).tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["gqa", "moe"])
def test_plain_dcp_reads_it(written: dict[str, Path], kind: str) -> None:
    truth = stacked_truth(kind)
    state = {key: torch.full(value.shape, math.nan) for key, value in truth.items()}
    dcp.load(state, checkpoint_id=written[kind], no_dist=True)
    for key, value in truth.items():
        assert state[key].numpy().tobytes() == value.tobytes(), key


@pytest.mark.parametrize("kind", ["gqa", "moe"])
def test_torch_unpickles_the_index_to_its_own_classes(written: dict[str, Path], kind: str) -> None:
    metadata = dcp.FileSystemReader(written[kind]).read_metadata()
    truth = stacked_truth(kind)
    for key, value in truth.items():
        entry = metadata.state_dict_metadata[key]
        assert type(entry) is dcp.TensorStorageMetadata
        assert entry.size == torch.Size(value.shape) and entry.properties.dtype == torch.float32
        assert entry.properties == dcp.metadata.TensorProperties(dtype=torch.float32)
        assert all(
            type(chunk.offsets) is torch.Size
            and dcp.metadata.MetadataIndex(key, chunk.offsets) in metadata.storage_data
            for chunk in entry.chunks
        )
    names = set(metadata.state_dict_metadata) - set(truth)
    assert names and all(
        type(metadata.state_dict_metadata[name]) is dcp.BytesStorageMetadata for name in names
    )
