"""Runs of ``shardweave train`` one after the other; a case has the file of its settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.distributed import FileStore

from shardweave.train.checks import read_config
from shardweave.train.launch import Place
from shardweave.train.worker import run_rank

if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    for number, case in enumerate(json.loads(Path(sys.argv[4]).read_text())):
        config = read_config(Path(case["run"]), world_size=world_size)
        place = Place(rank, world_size, rank, world_size, "localhost", 0, has_server=True)
        store = FileStore(f"{sys.argv[3]}{number}", world_size)
        run_rank("train", config, place=place, store=store, quiet=True)
