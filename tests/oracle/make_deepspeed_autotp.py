"""Makes `tests/data/ds_autotp`: a save of DeepSpeed at TP2 x DP2, its conversion, and what the engine held.

Run as ``python tests/oracle/make_deepspeed_autotp.py`` in an environment with deepspeed and transformers.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from deepspeed_universal import convert
from rank_processes import run

HERE = Path(__file__).parent
DATA = HERE.parent / "data" / "ds_autotp"
CASE = {
    "name": "autotp", "stage": 1, "dtype": "bf16", "optimizer": "adamw", "llama": True, "tp": 2,
    "config": {"tensor_parallel": {"autotp_size": 2}},
}  # fmt: skip


def main() -> None:
    """Train, save, convert, copy."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run(HERE / "deepspeed_training.py", [CASE], folder, world_size=4, limit_s=300, preload="deepspeed")
        for name in ("saved", "universal"):
            shutil.rmtree(DATA / name, ignore_errors=True)
        convert(folder / "autotp" / "saved", DATA / "universal")
        (DATA / "latest_universal").unlink(missing_ok=True)
        shutil.copytree(folder / "autotp" / "saved", DATA / "saved")
        for tp in range(2):
            shutil.copy(folder / f"autotp.rank{tp}.safetensors", DATA / f"truth.tp{tp}.safetensors")


if __name__ == "__main__":
    sys.exit(main())
