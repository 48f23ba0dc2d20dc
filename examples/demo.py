"""A real Megatron checkpoint becomes a Hugging Face folder, and transformers computes with it.

Run it from anywhere: ``.venv/bin/python examples/demo.py``. It ends with 1 where anything differs.

The checkpoint in tests/data/mc_gqa_tp2pp2 was written by megatron-core 0.16.1 from 4 ranks (TP 2, PP 2): 8
query heads over 2 KV heads, so that the fused QKV rows of a rank are no whole number of KV groups' parts.
The logits to compare with are those of Megatron's own forward of the same weights.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

ROOT = Path(__file__).resolve().parents[1]
os.chdir(ROOT)

SOURCE = Path("tests/data/mc_gqa_tp2pp2/torch_dist")
TRUTH = Path("tests/data/mc_gqa_truth_hf")
OUT = Path("build/demo")

# Two fp32 forwards of the same weights add up in another order; Megatron and transformers were measured to
# differ by 6e-7 here. A single wrong row moves logits by about 1e-2.
TOLERANCE = 1e-5


def main() -> int:
    start = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)

    say("1. Who holds which rows of the fused QKV weight, on the 4 ranks that wrote the checkpoint")
    picture = OUT.with_suffix(".svg")
    picture.parent.mkdir(parents=True, exist_ok=True)
    layout = ("--as", "megatron:tp=2,pp=2", "--select", "qkv", "--dtype", "float32")
    run("show", str(TRUTH / "config.json"), *layout)
    run("show", str(TRUTH / "config.json"), *layout, "--to", "hf", "--svg", str(picture))

    say("2. From Megatron to Hugging Face: planned, proved, then written")
    run("convert", str(SOURCE), str(OUT), "--to", "hf", "--config", str(TRUTH / "config.json"))

    say("3. transformers loads it, strictly, and computes")
    return compare(time.monotonic() - start)


def compare(seconds: float) -> int:
    import torch
    import transformers
    from safetensors.torch import load_file

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    reference = load_file(TRUTH / "reference_logits.safetensors")
    ours, info = logits_of(OUT, reference["input_ids"])
    theirs, _ = logits_of(TRUTH, reference["input_ids"])
    wrong = {kind: keys for kind, keys in info.items() if keys}
    megatron = float((ours - reference["logits"]).abs().max())
    checks = {
        "no missing, unexpected or mismatched keys": not wrong,
        "logits equal those of the true weights, bit for bit": torch.equal(ours, theirs),
        f"logits equal Megatron's own forward within {TOLERANCE:g} (off by {megatron:.1e})": (
            megatron <= TOLERANCE
        ),
    }
    for text, holds in checks.items():
        print(f"   {'ok   ' if holds else 'WRONG'} {text}")
    if wrong:
        print(f"   {wrong}")
    print(f"\nthe folder   {OUT}\nthe picture  {OUT.with_suffix('.svg')}")
    return 0 if all(checks.values()) else 1


def logits_of(folder: Path, input_ids: Any) -> tuple[Any, dict[str, Any]]:
    """The logits that transformers computes with a folder, and what it says about loading it."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    with torch.no_grad():
        return model.eval()(input_ids).logits, info


def run(*arguments: str) -> None:
    """Run the command ``shardweave`` as a shell would, and stop where it fails."""
    from shardweave.cli import main as shardweave

    print(f"$ shardweave {' '.join(arguments)}\n", flush=True)
    code = shardweave(arguments)
    print(flush=True)
    if code:
        sys.exit(code)


def say(text: str) -> None:
    print(f"\n{text}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
