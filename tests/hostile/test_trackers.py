"""The small file that names the newest save: it lies in its folder, and little of it is read."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardweave.errors import PathError, ShardweaveError
from shardweave.layout import Box
from shardweave.store import deepspeed, native, torch_dist
from shardweave.store.native_held import Held
from shardweave.store.native_manifest import About
from shardweave.store.native_write import Saver

DATA = Path(__file__).parents[1] / "data"
Case = tuple[Callable[[Path], object], Path]


def of_megatron(root: Path) -> Case:
    shutil.copytree(DATA / "mc_gqa_tp1" / "torch_dist", root / "iter_0000012")
    (root / torch_dist.TRACKER).write_text("12\n")
    return torch_dist.read, root / torch_dist.TRACKER


def of_deepspeed(root: Path) -> Case:
    shutil.copytree(DATA / "ds_zero1", root, dirs_exist_ok=True)
    (root / "latest").write_text("step2")
    return deepspeed.read, root / "latest"


def of_native(root: Path) -> Case:
    held = Held("model/w", (3,), "float32", Box.of((0,), (3,)), np.arange(3, dtype=np.float32))
    Saver(root, fsync=False).save([held], About(step=5))
    return native.read, root / native.LATEST


each_kind = pytest.mark.parametrize("make", [of_megatron, of_deepspeed, of_native])


@each_kind
def test_a_link_may_not_lead_out_of_the_folder(make: Callable[[Path], Case], tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    read, tracker = make(root)
    read(root)
    tracker.rename(root / "moved")
    tracker.symlink_to("moved")
    read(root)
    (root / "moved").rename(tmp_path / "outside")
    tracker.unlink()
    tracker.symlink_to(tmp_path / "outside")
    with pytest.raises(PathError, match="stays inside its folder"):
        read(root)


@each_kind
@pytest.mark.parametrize("size", [0, 1 << 40], ids=["empty", "1 TiB"])
def test_what_names_nothing_is_refused_without_being_read(
    make: Callable[[Path], Case], size: int, tmp_path: Path
) -> None:
    read, tracker = make(tmp_path)
    os.truncate(tracker, 0)
    os.truncate(tracker, size)
    tracemalloc.start()
    try:
        with pytest.raises(ShardweaveError):
            read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
