"""The loop of `rl_loop.py` on Ray: trainer ranks and the engine are actors, and a driver calls them.

    pip install 'shardweave[ray,transformers]'
    python examples/rl_loop_ray.py

A refit is one call on every actor that takes part: they meet in the store, and the driver waits for all. Ray
carries the calls and the answers; weights go from actor to actor and never through Ray's object store.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).parent))

import ray
import rl_loop
from rl_loop import TRAINERS, Table


@ray.remote(num_cpus=0)
class Trainer(rl_loop.Trainer):
    """A trainer rank as an actor."""


@ray.remote(num_cpus=0)
class TorchEngine(rl_loop.TorchEngine):
    """An engine as an actor."""


@ray.remote(num_cpus=0)
class Store:
    """The store in which all ranks meet; an actor of its own, so that either side may be restarted."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        self.store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)

    def place(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address() or socket.gethostname(), self.store.port


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    here = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(here), "OMP_NUM_THREADS": "1"}},
    )
    try:
        return loop(given.steps)
    finally:
        ray.shutdown()


def loop(steps: int) -> int:
    store = Store.remote()
    host, port = ray.get(store.place.remote())
    print(f"shardweave refit status {host}:{port}\n", flush=True)
    trainers = [Trainer.remote(rank, host, port) for rank in range(TRAINERS)]
    engine = TorchEngine.remote(host, port)
    table = Table()
    for _ in range(steps):
        version, *moved = refit(trainers, engine)
        answers = engine.generate.remote()
        trained = ray.get([trainer.train.remote(answers) for trainer in trainers])
        table.add(version, [{**one, **two} for one, two in zip(moved, trained, strict=True)])
    ray.get([actor.close.remote() for actor in (*trainers, engine)])
    return table.verdict()


def refit(trainers: list[Any], engine: Any) -> list[Any]:
    """Bring the trainer's weights to the engine: the version that it serves, and what each rank moved.

    Where one rank fails all raise the same, and the engine serves what it served. So the driver may repeat
    the call, or start an actor again and then repeat it.
    """
    found: list[Any] = ray.get([engine.receive.remote(), *(trainer.publish.remote() for trainer in trainers)])
    return found


if __name__ == "__main__":
    sys.exit(main())
