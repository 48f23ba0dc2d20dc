"""Runs of ``shardweave train`` one after the other, their ranks forked from one process.

Run as ``python train_runs.py 0 1 STORE CASES OUT``; a case has a file of settings and a number of ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from forked import fork
from rank_processes import Case
from torch.distributed import FileStore

from shardweave.train.checks import read_config
from shardweave.train.launch import Place
from shardweave.train.worker import run_rank


def be_rank(rank: int, case: Case, store: str) -> None:
    torch.set_num_threads(1)
    ranks = case["ranks"]
    config = read_config(Path(case["run"]), world_size=ranks)
    place = Place(rank, ranks, rank, ranks, "localhost", 0, has_server=True)
    run_rank("train", config, place=place, store=FileStore(store, ranks), quiet=True)


if __name__ == "__main__":
    for number, case in enumerate(json.loads(Path(sys.argv[4]).read_text())):
        fork(be_rank, case["ranks"], case, f"{sys.argv[3]}{number}")
