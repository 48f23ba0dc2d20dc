"""Scripts that are run once a rank, each in a process of its own: started, waited for, and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

Case = dict[str, Any]


def run(script: Path, cases: list[Case], folder: Path, *, world_size: int, limit_s: float) -> None:
    """Run a script on fresh processes of one thread each; fails with what the failing rank printed.

    It is called as ``python SCRIPT RANK WORLD_SIZE STORE CASES OUT``, with CASES a JSON file of the cases.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ranks = []
    for rank in range(world_size):
        log = (folder / f"rank{rank}.log").open("w")
        args = [script, rank, world_size, folder / "store", folder / "cases.json", folder]
        ranks.append(subprocess.Popen([sys.executable, *map(str, args)], env=env, stdout=log, stderr=log))
    deadline = time.monotonic() + limit_s
    try:
        for rank, process in enumerate(ranks):
            code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
            assert code == 0, f"rank {rank}: {(folder / f'rank{rank}.log').read_text()[-4000:]}"
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def play_all(play: Callable[[Case, Path, int], None]) -> None:
    """The other side of ``run``: meet the other ranks, and play the cases one after the other."""
    import torch.distributed as dist

    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    store, cases, out = map(Path, sys.argv[3:6])
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    for case in json.loads(cases.read_text()):
        play(case, out, rank)
        dist.barrier()
    dist.destroy_process_group()
