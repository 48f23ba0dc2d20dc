"""Scripts that are run once a rank, each in a process of its own: started, waited for, and ended.

What a script imports costs more than what it does, and is the same for all ranks: one process imports it, and
ranks are forked from there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

Case = dict[str, Any]


def run(
    script: Path, cases: list[Case], folder: Path, *, world_size: int, limit_s: float, preload: str = "torch"
) -> None:
    """Run a script on fresh processes of one thread each; fails with what the failing rank printed.

    It is called as ``python SCRIPT RANK WORLD_SIZE STORE CASES OUT``, with CASES a JSON file of the cases.
    By then the module ``preload`` has been imported.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    args = map(str, (__file__, preload, script, world_size, folder))
    with (folder / "ranks.log").open("w") as log:
        parent = subprocess.Popen(
            [sys.executable, *args],
            env=env,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        code = parent.wait(timeout=limit_s)
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
        parent.stdin.close()  # type: ignore[union-attr]
    logs = [path for path in (folder / "ranks.log", folder / f"rank{code - 1}.log") if path.exists()]
    assert code == 0, f"rank {code - 1}: {''.join(path.read_text()[-4000:] for path in logs)}"


def _fork(script: str, world_size: int, folder: Path) -> int:
    """Ranks to their end: 0, or one more than the first that failed; the others are killed then."""
    ranks: dict[int, int] = {}
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            _become(script, rank, world_size, folder)
        ranks[pid] = rank
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return rank + 1
    return 0


def _end_with_the_tests() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def _become(script: str, rank: int, world_size: int, folder: Path) -> None:
    code = 1
    with contextlib.suppress(BaseException):
        with (folder / f"rank{rank}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.argv = list(map(str, (script, rank, world_size, folder / "store", folder / "cases.json", folder)))
        try:
            runpy.run_path(script, run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


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


if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
    sys.exit(_fork(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
