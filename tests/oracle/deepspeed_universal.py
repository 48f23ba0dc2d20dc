"""DeepSpeed's own converter to universal checkpoints, run as people run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def convert(source: Path, target: Path, *options: str) -> None:
    """Run ``ds_to_universal`` in one process of its own, with one worker a phase."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
            *("--input_folder", str(source), "--output_folder", str(target)),
            *("--num_extract_workers", "1", "--num_merge_workers", "1", *options),
        ],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
