"""A real Megatron checkpoint becomes a Hugging Face folder, and transformers computes with it.

Run it from anywhere: ``.venv/bin/python examples/demo.py``. It ends with 1 where anything differs.

The checkpoint in tests/data/mc_gqa_tp2pp2 was written by megatron-core 0.16.1 on 4 ranks, TP 2 x PP 2. Its
model has 8 query heads over 2 KV heads, whose rows Megatron fuses group by group. The logits to compare
with are those of Megatron's own forward of the same weights.
"""

from __future__ import annotations

import os
import shlex
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
# differ by 7e-7 here. Two rows in each other's place move a logit by 0.09 and more.
TOLERANCE = 1e-5


def main() -> int:
    start = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)

    say("1. Where the rows of the fused QKV weight lie on 4 Megatron ranks, and where they go")
    picture = OUT.with_suffix(".svg")
    picture.parent.mkdir(exist_ok=True)
    layouts = ("--as", "megatron:tp=2,pp=2", "--to", "hf")
    draw = ("show", str(TRUTH / "config.json"), *layouts, "--select", "linear_qkv.weight")
    run(*draw)
    run(*draw, "--svg", str(picture))

    say("2. From Megatron to Hugging Face: planned, proved, then written")
    run("convert", str(SOURCE), str(OUT), "--to", "hf", "--config", str(TRUTH / "config.json"))

    say("3. transformers loads it, strictly, and computes")
    code = compare()
    print(f"\nthe folder   {OUT}\nthe picture  {picture}\n{time.monotonic() - start:.0f} seconds")
    return code


def compare() -> int:
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

    print(f"$ shardweave {shlex.join(arguments)}", flush=True)
    code = shardweave(arguments)
    print(flush=True)
    if code:
        sys.exit(code)


def say(text: str) -> None:
    print(f"\n{text}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
