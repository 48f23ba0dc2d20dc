"""One model, one text, many layouts: the curves lie on each other, and a resumed one does too.

    python examples/train_curves.py                     300 steps at each layout, half an hour on two cores
    python examples/train_curves.py --steps 30          a look
    python examples/train_curves.py --shared            at layouts whose ranks share weights, cp folded or not
    python examples/train_curves.py --picture PATH      draws what came out

A small qwen3_moe in fp32 learns the text of this project's licence, byte by byte, with `shardweave train`.
Every run is a command with other degrees and nothing else; the last one stops in the middle and goes on at
another layout. Ends with 1 where a curve is farther than 1e-3 from that of one rank.

The learning rate is mild on purpose. Layouts differ by rounding, and sooner or later a token that lies
between two experts goes to the other one; at five times this rate what follows from one such token grows to
1e-2 in 300 steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from shardweave.show.canvas import Drawing, below, heading, inner_width, line, num, page, text

ROOT = Path(__file__).parent.parent
BOUND = 1e-3

MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "dtype": "float32",
}
SETTINGS = {
    "data": {"train": str(ROOT / "LICENSE"), "tokenizer": "bytes"},
    "batch": {"documents": 16, "microbatch": 4, "sequence_length": 128},
    "loss": {"balance": 0.05},
    "optimizer": {"lr": 4e-4, "min_lr": 4e-5, "sharded": True},
}
LAYOUTS: dict[str, dict[str, object]] = {
    "one rank": {},
    "tp 2": {"tp": 2},
    "cp 2": {"cp": 2},
    "pp 2, vp 2": {"pp": 2, "vp": 2},
    "dp 2, ep 2": {"dp": 2, "ep": 2},
    "tp 2, cp 2, ep 2": {"tp": 2, "cp": 2, "ep": 2},
    "tp 2, pp 2, etp 2": {"tp": 2, "pp": 2, "etp": 2},
    "cp 2, dp 2, ep 4": {"cp": 2, "dp": 2, "ep": 4},
}
"""Degrees of each run; the first is the one that the others are compared with."""

RESUMED = ("tp 2", "pp 2, vp 2")
"""The layout that a run begins at, and the one at which it goes on."""

SHARED: dict[str, dict[str, object]] = {
    "one rank": {},
    "remat 2": {"remat": 2},
    "cp 2": {"cp": 2},
    "cp 2 folded": {"cp": 2, "fold_cp": True},
    "cp 2, remat 2": {"cp": 2, "remat": 2},
    "cp 2 folded, remat 2": {"cp": 2, "remat": 2, "fold_cp": True},
    "cp 3 folded, dp 2": {"cp": 3, "dp": 2, "fold_cp": True},
    "dp 2 (FSDP)": {"dp": 2, "weight_axes": ["dp"]},
    "tp 2, remat 2, ep 2, eremat 2": {"tp": 2, "remat": 2, "ep": 2, "eremat": 2},
}
RESUMED_SHARED = ("cp 2 folded, remat 2", "dp 2 (FSDP)")


def train(
    folder: Path, name: str, degrees: dict[str, object], steps: int, *, until: int | None = None
) -> None:
    """A run, as a command; `until` ends it there, as if it had been stopped."""
    config = {
        **SETTINGS,
        "model": {"path": str(folder / "model.json")},
        "parallel": degrees,
        "checkpoint": {"folder": str(folder / name), "every": until or 0},
        "run": {"steps": until or steps, "log": str(folder / f"{name}.jsonl")},
    }
    config["optimizer"] = {**SETTINGS["optimizer"], "decay_steps": steps, "warmup_steps": steps // 10}
    file = folder / f"{name}.json"
    file.write_text(json.dumps(config))
    ranks = math.prod(degrees.get(axis, 1) for axis in ("tp", "cp", "remat", "dp", "pp"))
    command = [sys.executable, "-m", "shardweave", "train", str(file), "--nproc", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)


def losses(folder: Path, name: str) -> list[float]:
    rows = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "grad_norm" in row]


# --- the picture --------------------------------------------------------------------------------


def plot(
    rows: dict[str, list[float]], *, low: float, high: float, ticks: dict[float, str], height: float
) -> Drawing:
    """Curves over the steps; `ticks` are written at the left."""
    left, width = 62.0, inner_width() - 62
    steps = max(len(values) for values in rows.values())

    def y(value: float) -> float:
        return 8 + (high - min(max(value, low), high)) / (high - low) * (height - 16)

    shapes = []
    for at, words in ticks.items():
        shapes += [line(left, y(at), left + width, y(at), "track"), text(left - 8, y(at), words, "n e")]
    for number, (name, values) in enumerate(rows.items()):
        points = " ".join(
            f"{num(left + width * i / max(steps - 1, 1))},{num(y(v))}" for i, v in enumerate(values)
        )
        hue = number * 360 // len(rows)
        shapes.append(
            f'<polyline points="{points}" fill="none" stroke="hsl({hue} 60% 50%)" stroke-width="1.3">'
            f"<title>{name}</title></polyline>"
        )
    return Drawing(left + width, height, tuple(shapes))


def legend(names: list[str]) -> Drawing:
    shapes, x, row = [], 62.0, 0
    for number, name in enumerate(names):
        if x + 26 + 7.2 * len(name) > inner_width():
            x, row = 62.0, row + 1
        at = 8 + 20 * row
        hue = number * 360 // len(names)
        shapes.append(
            f'<line x1="{num(x)}" y1="{num(at)}" x2="{num(x + 20)}" y2="{num(at)}" '
            f'stroke="hsl({hue} 60% 50%)" stroke-width="3"/>'
        )
        shapes.append(text(x + 26, at, name))
        x += 60 + 7.2 * len(name)
    return Drawing(inner_width(), 20 * (row + 1), tuple(shapes))


def picture(curves: dict[str, list[float]]) -> str:
    first, *others = curves
    base = curves[first]
    high = math.ceil(max(base))
    apart = {
        name: [math.log10(max(abs(a - b), 1e-8)) for a, b in zip(curves[name], base, strict=True)]
        for name in others
    }
    # The first has no distance to itself; it keeps its colour.
    apart = {first: [-8.0] * len(base), **apart}
    ticks = {float(exponent): f"1e{exponent}" for exponent in range(-8, -1)}
    return page(
        "The same training at every layout",
        below(
            [
                heading(
                    f"Loss over {len(base)} steps, {len(curves)} curves", note="a small qwen3_moe in fp32"
                ),
                plot(curves, low=0, high=high, ticks={float(n): str(n) for n in range(high + 1)}, height=230),
                heading("Distance from the curve of one rank", note=f"the bound is {BOUND:g}"),
                plot(apart, low=-8, high=-2, ticks=ticks, height=200),
                legend(list(curves)),
            ]
        ),
    )


# --- all of it ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="One model, one text, many layouts.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--shared", action="store_true", help="layouts whose ranks share weights")
    parser.add_argument("--layouts", type=int, help="how many of them, from the first")
    args = parser.parse_args()
    layouts, resumed = (SHARED, RESUMED_SHARED) if args.shared else (LAYOUTS, RESUMED)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "model.json").write_text(json.dumps(MODEL))
        curves = {}
        for name, degrees in list(layouts.items())[: args.layouts]:
            train(folder, name, degrees, args.steps)
            curves[name] = losses(folder, name)
            print(said(name, curves), flush=True)
        before, after = resumed
        name = f"{before}, from the middle on {after}"
        train(folder, name, layouts[before], args.steps, until=args.steps // 2)
        train(folder, name, layouts[after], args.steps)
        curves[name] = losses(folder, name)
        print(said(name, curves), flush=True)
    if args.picture:
        args.picture.write_text(picture(curves))
    farthest = max(gap(curves, name) for name in curves)
    verdict = "at most" if farthest <= BOUND else "beyond"
    print(f"farthest from one rank: {farthest:.1e}, {verdict} {BOUND:g}")
    return int(farthest > BOUND)


def gap(curves: dict[str, list[float]], name: str) -> float:
    base = next(iter(curves.values()))
    return max(abs(a - b) for a, b in zip(curves[name], base, strict=True))


def said(name: str, curves: dict[str, list[float]]) -> str:
    values = curves[name]
    return f"{name:<36} loss {values[0]:.4f} to {values[-1]:.4f}, farthest {gap(curves, name):.1e}"


if __name__ == "__main__":
    sys.exit(main())
