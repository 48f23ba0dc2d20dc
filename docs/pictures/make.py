"""Draws the pictures of the documentation, byte for byte the same wherever it runs.

    python docs/pictures/make.py

Every picture of a layout or plan is drawn from the layout or plan itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardweave.cli import main
from shardweave.dialects import hf, megatron, vllm
from shardweave.dialects.deepspeed import LAYOUTS, AutoTP
from shardweave.layout import (
    Dim,
    concat,
    even,
    pad,
    take,
    whole,
)
from shardweave.models import Model, from_config
from shardweave.plan import plan
from shardweave.show import svg
from shardweave.show.bridge import bridge_picture
from shardweave.show.canvas import (
    Drawing,
    arrow,
    below,
    beside,
    heading,
    inner_width,
    page,
    rect,
    text,
)
from shardweave.show.grids import area_drawing, mesh_drawing
from shardweave.show.model import Panel, drawing, panels
from shardweave.train.parallel import Parallel
from shardweave.train.runtime import layout_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CONFIG = ROOT / "tests/data/mc_gqa_truth_hf/config.json"


def tiny() -> Model:
    """The model of `make demo`: 8 query heads and 2 KV heads of 8 rows, 4 layers."""
    return from_config(CONFIG, dtype="float32")


def model(**changes: Any) -> Model:
    """The same model with other sizes."""
    return from_config(json.loads(CONFIG.read_text()) | changes, dtype="bfloat16")


def bars(panel: Panel, *, width: float = inner_width(), gutter: float = 150, scale: float = 0) -> Drawing:
    """A panel with a narrow gutter."""
    return svg.panel_drawing(panel, width=width, gutter=gutter, scale=scale)


# --- pictures -----------------------------------------------------------------------------------


def even_cut() -> str:
    """8 query heads and 2 KV heads over 4 ranks, twice."""
    title = "An even cut of a concatenation is not a concatenation of even cuts"
    head, half, gutter = 8, inner_width() / 2 - 18, 62
    q, k, v = whole(8 * head, "q"), whole(2 * head, "k"), whole(2 * head, "v")
    fused = megatron.fused_qkv(8, 2, head)
    scale = (half - gutter) / len(fused)

    def step(words: str, formula: str, name: str, dim: Dim, parts: int) -> Drawing:
        cuts = tuple(len(dim) * n // parts for n in range(1, parts))
        panel = replace(drawing(words, {name: dim}, head_dim=head), subtitle=formula, cuts=cuts)
        return bars(panel, width=half, gutter=gutter, scale=scale)

    formulas = (
        "even(concat(q0…3, k0, v0, q4…7, k1, v1), 4, r)",
        "concat(even(q, 4, r), even(k, 2, r // 2), even(v, 2, r // 2))",
    )
    one = step("Megatron: fuse, then cut", formulas[0], "weight", fused, 4)
    three = [
        step("vLLM: cut, then fuse", formulas[1], "q", q, 4),
        step("", "", "k", k, 2),
        step("", "", "v", v, 2),
    ]
    above = (one, below(three, gap=2))
    held = (
        drawing("", {f"rank {r}": even(fused, 4, r) for r in range(4)}, head_dim=head),
        drawing(
            "",
            {f"rank {r}": concat(even(q, 4, r), even(k, 2, r // 2), even(v, 2, r // 2)) for r in range(4)},
            head_dim=head,
        ),
    )
    # Both columns show their ranks at one height.
    columns = [
        below(
            [weights, bars(panel, width=half, gutter=gutter, scale=scale * 2.2)],
            gap=above[1].height - weights.height + 20,
        )
        for weights, panel in zip(above, held, strict=True)
    ]
    note = "8 query heads and 2 KV heads on 4 ranks; red is where the cuts are. No shape tells the two apart."
    return page(title, below([heading(title, note=note), beside(columns, gap=36), svg.legend(held)]))


def megatron_to_hf() -> str:
    """The fused QKV rows of a TP 2 x PP 2 job on their way to Hugging Face names."""
    small = tiny()
    src = megatron.layout(small, megatron.mesh(tp=2, pp=2))
    made = plan(replace(src, name="Megatron TP 2 × PP 2"), replace(hf.layout(small), name="Hugging Face"))
    title = "From the ranks of a Megatron job to Hugging Face files: where the fused QKV rows go"
    return svg.plan_picture(made, "linear_qkv.weight", title=title, head_dim=8)


def kv_heads_below_tp() -> str:
    """64 query heads and 2 KV heads of 128 rows on 8 ranks."""
    sizes = {"num_attention_heads": 64, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 1024}
    big = model(**sizes)
    layouts = (megatron.layout(big, megatron.mesh(tp=8)), vllm.layout(big, vllm.mesh(tp=8)))
    names = ("linear_qkv.weight", "qkv_proj.weight")
    titles = (
        "Megatron TP 8: ranks 3 and 7 own all of K and V",
        "vLLM TP 8: four ranks share each K and V head",
    )
    found = [
        replace(panels(one, select=name, head_dim=128)[0], title=title, subtitle="")
        for one, name, title in zip(layouts, names, titles, strict=True)
    ]
    title = "64 query heads, 2 KV heads, 8 ranks: 2 // 8 == 0 is not the answer"
    note = "Megatron cuts 68 heads of 128 rows into 8.5 a rank: q8 lies half on rank 0 and half on rank 1."
    drawings = [heading(title, note=note), *(bars(panel) for panel in found), svg.legend(found)]
    return page(title, below(drawings))


def deepspeed() -> str:
    """GPTBigCode and Yuan as AutoTP cuts them."""
    bigcode = AutoTP(3, num_heads=8, num_kv_heads=8, hidden=64)
    fused = concat(whole(64, "q"), whole(8, "k"), whole(8, "v"))
    first = drawing(
        "GPTBigCode on 3 ranks: q is cut by whole heads, the one K and V head is held whole",
        {f"tp {r}": LAYOUTS["bigcode"](fused, r, bigcode) for r in range(3)},
        head_dim=8,
    )
    yuan = AutoTP(2, num_heads=8, num_kv_heads=8)
    second = drawing(
        "Yuan on 2 ranks: value heads that are not adjacent",
        {f"tp {r}": LAYOUTS["yuan_value"](whole(64, "v"), r, yuan) for r in range(2)},
        head_dim=8,
        placed=True,
    )
    title = "DeepSpeed AutoTP: widths are data"
    return page(title, below([heading(title), bars(first), bars(second), svg.legend([first, second])]))


def fsdp_on_tp() -> str:
    """A gate/up weight cut by TP, and what is cut cut again."""
    gate, up = whole(20, "gate"), whole(20, "up")

    def tp(r: int) -> Dim:
        return concat(even(gate, 2, r), even(up, 2, r))

    steps = [
        drawing("the weight: gate rows, then up rows", {"": concat(gate, up)}),
        drawing("cut by TP 2, each half on its own", {f"tp {r}": tp(r) for r in range(2)}),
        drawing(
            "each part padded to a multiple of 3, and cut again over 3 ranks",
            {f"tp {r} fsdp {w}": even(pad(tp(r), 3), 3, w) for r in range(2) for w in range(3)},
        ),
    ]
    scale = (inner_width() - 152) / 40
    title = "Weight sharding on top of tensor parallelism"
    note = "The same function on a dim that is cut already: even(pad(concat(even(gate, 2, r), ...), 3), 3, w)"
    drawings = [bars(step, scale=scale) for step in steps]
    return page(title, below([heading(title, note=note), *drawings, svg.legend(steps)]))


def weight_shares() -> str:
    """The rows of one weight on eight ranks, by the axes that share it."""
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "head_dim": 6, "intermediate_size": 28}
    sizes |= {"dtype": "float32"}
    config = json.loads(CONFIG.read_text()) | sizes
    found = [
        replace(
            panels(layout_of(config, Parallel(tp=2, cp=2, remat=2, weight_axes=axes)), select="up_proj")[0],
            title=words,
            subtitle="",
        )
        for words, axes in (
            ("weight_axes = (): every rank has all rows that tp leaves it", ()),
            ("remat: 7 rows on a rank, and its likes of the other context rank have the same", ("remat",)),
            ("remat and cp, folded: 4 rows on a rank, and the last one is filled up", ("remat", "cp")),
        )
    ]
    title = "28 rows of up_proj on 8 ranks, tp 2, cp 2, remat 2"
    note = "What a rank stores. While a layer is computed, its ranks gather what the first picture shows."
    return page(
        title,
        below([heading(title, note=note), *(bars(one, gutter=200) for one in found), svg.legend(found)]),
    )


def experts() -> str:
    """12 experts under two factorisations of the same 4 ranks."""
    sizes = json.loads((ROOT / "tests/data/mc_moe_truth_hf/config.json").read_text())
    moe = from_config(sizes | {"num_local_experts": 8, "moe_intermediate_size": 48}, dtype="float32")
    drawings = []
    for words, mesh in (
        ("EP 4, ETP 1: whole experts", megatron.mesh(tp=2, dp=2, ep=4, etp=1)),
        ("EP 2, ETP 2: half of the columns of each", megatron.mesh(tp=2, dp=2, ep=2, etp=2)),
    ):
        layout = megatron.layout(moe, mesh)
        drawings.append(
            area_drawing(
                layout, "linear_fc2", ("experts", "columns"), title=words, width=inner_width() / 2 - 14
            )
        )
    title = "Experts on the same 4 ranks, under two factorisations"
    note = (
        "A frame is all experts (across) × all columns of linear_fc2 (down); filled is what the rank holds."
    )
    return page(title, below([heading(title, note=note), beside(drawings)]))


def mesh() -> str:
    """Megatron's dense and expert axes over 16 ranks."""
    found = megatron.mesh(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1)
    title = "One set of ranks, two factorisations"
    note = (
        "Above for dense weights, below for experts. Ranks of one colour and letter are a group of the axis."
    )
    return page(title, below([heading(title, note=note), mesh_drawing(found)]))


def zigzag() -> str:
    """A causal sequence over 4 context parallel ranks."""
    cp = 4
    held = {f"cp {r}": take(whole(2 * cp), (r, 2 * cp - 1 - r)) for r in range(cp)}
    plain = {f"cp {r}": even(whole(2 * cp), cp, r) for r in range(cp)}
    cases = (
        ("zigzag: a chunk from the front and its mirror from the back, the same work for every rank", held),
        ("plain stretches: under a causal mask the last rank has most of the work", plain),
    )
    found = [drawing(words, rows, noun="chunks", placed=True) for words, rows in cases]
    title = "Context parallelism cuts the sequence by the same algebra as weights"
    note = "A sequence of 8 chunks on 4 ranks: take(sequence, (r, 7 - r), length // 8)"
    return page(
        title, below([heading(title, note=note), *(bars(panel) for panel in found), svg.legend(found)])
    )


_LAYERS = {
    "cli": "the command",
    "show": "pictures",
    "testing": "probe, strategies",
    "lint": "checks your code",
    "refit": "trainer to engine",
    "convert": "format to format",
    "train": "a compact runtime",
    "dialects": "how frameworks lay out state",
    "store": "how files hold it",
    "move": "executors and transports",
    "plan": "from two layouts to copies; proof, cost, simulation",
    "models": "which tensors a model has",
    "layout": "runs, dims, boxes, meshes, buffers: the algebra, numpy only",
    "errors": "one class for each rule that can be broken",
}


def layers() -> str:
    """The layers that lint-imports checks."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    names = next(one["layers"] for one in contracts if one["id"] == "layers")
    rows = [[word.strip(" ()") for word in row.split("|")] for row in names if not row.startswith("__")]
    # A layer may be absent; only what is there is drawn.
    package = ROOT / "src" / "shardweave"
    here = [
        [name for name in row if (package / name).exists() or (package / f"{name}.py").exists()]
        for row in rows
    ]
    rows = [row for row in here if row]
    shapes: list[str] = []
    for i, row in enumerate(rows):
        width = (inner_width() - 84 - 12 * (len(row) - 1)) / len(row)
        for j, name in enumerate(row):
            x, y = j * (width + 12), i * 58
            look = "lq" if name in ("layout", "models", "plan") else "box"
            ink = " tlq" if look == "lq" else ""
            shapes += [
                rect(x, y, width, 44, look, round_=6),
                text(x + width / 2, y + 14, name, f"s m{ink}"),
                text(x + width / 2, y + 31, _LAYERS.get(name, ""), f"m{ink or ' n'}"),
            ]
    x, y = inner_width() - 64, len(rows) * 58 - 14
    shapes += [arrow(x, 0, x, y), text(x + 10, y / 2, "imports", "n")]
    title = "Arrows point down only"
    note = "A layer imports from those below it. Blue: shapes and ranks alone, no torch, no device."
    return page(title, below([heading(title, note=note), Drawing(inner_width(), y, tuple(shapes))]))


def plan_() -> str:
    """From a trainer on ranks 0 to 3 to an engine on ranks 4 and 5."""
    small = tiny()
    src = replace(megatron.layout(small, megatron.mesh(tp=4)), name="Megatron TP 4, ranks 0-3")
    dst = replace(vllm.layout(small, vllm.mesh(tp=2, offset=4)), name="vLLM TP 2, ranks 4-5")
    title = "A plan: from the ranks of a trainer to those of an engine, each element once"
    return svg.plan_picture(plan(src, dst), "qkv_proj.weight", title=title, head_dim=8)


def two_grids() -> str:
    """The bridge of examples/two_grids.py, of the plan that its ranks carry out."""
    spec = importlib.util.spec_from_file_location("two_grids", ROOT / "examples/two_grids.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    return bridge_picture(
        example.bridge_plan(),
        names=("vision encoder", "language model"),
        title="Two grids in one job, and the bridge between them",
        note=f"{example.NUM_IMAGES} images of {example.PATCHES} patches: each row once, from the rank that "
        "has it to the one that wants it; gradients go back the same way",
    )


def proof() -> str:
    """What a proof refuses."""
    rows = whole(24, "rows")
    cases = (
        ("exactly once: proved", {"rank 0": (0, 10), "rank 1": (10, 18), "rank 2": (18, 24)}),
        ("a remainder was dropped: GapError", {"rank 0": (0, 7), "rank 1": (7, 14), "rank 2": (14, 21)}),
        (
            "two ranks claim the same rows: OverlapError",
            {"rank 0": (0, 10), "rank 1": (7, 18), "rank 2": (18, 24)},
        ),
    )
    gutter, width = 110.0, inner_width()
    scale = (width - gutter) / len(rows)
    drawings = []
    for words, held in cases:
        shapes = [text(0, 9, words, "good" if "proved" in words else "wrong")]
        for i, (name, (start, stop)) in enumerate(held.items()):
            y = 24 + i * 26
            shapes += [
                text(gutter - 12, y + 11, name, "e"),
                rect(gutter, y + 0.5, width - gutter, 21, "track"),
            ]
            shapes += [
                rect(gutter + start * scale, y, (stop - start) * scale, 22, "lq"),
                text(gutter + (start + stop) / 2 * scale, y + 11, f"rows {start}-{stop - 1}", "m tlq"),
            ]
        y = 24 + 3 * 26
        shapes.append(text(gutter - 12, y + 11, "held by", "e n"))
        for i in range(len(rows)):
            number = sum(start <= i < stop for start, stop in held.values())
            if number != 1:
                shapes.append(rect(gutter + i * scale, y, scale, 22, "bad"))
            shapes.append(
                text(gutter + (i + 0.5) * scale, y + 11, str(number), "m" if number != 1 else "m n")
            )
        drawings.append(Drawing(width, y + 24, tuple(shapes)))
    title = "Before a byte moves, every element is proved to be covered exactly once"
    return page(title, below([heading(title), *drawings], gap=24))


_TURN = {
    "hello": ("who it is, and|what it offers", "who it is, and|what it serves"),
    "seal": ("what content|comes to", "room beside|what is served"),
    "stage": ("sends,|or is read", "lands in|staging"),
    "verify": ("", "compares,|then derives"),
    "vote": ("ready", "ready"),
    "commit": ("returns", "serves|what is staged"),
}
"""What publishers and receivers do in each step of a turn."""


def refit() -> str:
    """The steps of a turn, and how it ends."""
    gutter, gap, tall = 84.0, 6.0, 40.0
    wide = (inner_width() - gutter - gap * (len(_TURN) - 1)) / len(_TURN)

    def at(step: int) -> float:
        return gutter + step * (wide + gap)

    def cell(step: int, y: float, words: str, look: str, *, steps: int = 1) -> list[str]:
        across = steps * (wide + gap) - gap
        lines = words.split("|")
        ink = {"lq": " tlq", "lk": " tlk", "lv": " tlv"}.get(look, "")
        first = y + tall / 2 - 8 * (len(lines) - 1)
        return [
            rect(at(step), y, across, tall, look, round_=5),
            *(text(at(step) + across / 2, first + 16 * i, line, f"m{ink}") for i, line in enumerate(lines)),
        ]

    def turn(words: str, style: str, fails: int | None) -> Drawing:
        shapes = [text(0, 9, words, style)]
        top, lanes = 50.0, (50.0, 50.0 + tall + gap)
        steps = list(_TURN.items())[: len(_TURN) if fails is None else fails + 1]
        for i, (name, _) in enumerate(steps):
            shapes.append(text(at(i) + wide / 2, top - 14, name, "s m"))
        for y, side in zip(lanes, ("publishers", "receivers"), strict=True):
            shapes.append(text(gutter - 12, y + tall / 2, side, "e n"))
        for i, (_, cells) in enumerate(steps):
            for y, said in zip(lanes, cells, strict=True):
                if said and i != fails:
                    shapes += cell(i, y, said, "lk" if i == 4 else "lv" if i == 5 else "box")
        y = lanes[1] + tall + 3 * gap
        shapes.append(text(gutter - 12, y + tall / 2, "served", "e n"))
        if fails is None:
            shapes += cell(0, y, "version 6, by every receiver", "lq", steps=5)
            shapes += cell(5, y, "version 7", "lv")
        else:
            middle = (at(fails + 1) + at(fails + 2) + wide) / 2
            shapes.append(text(middle, top - 14, "outcome", "s m"))
            shapes += cell(fails, lanes[1], "one rank fails,|stalls or is gone", "bad")
            shapes += cell(fails + 1, lanes[0], "abort: written once,|by whoever is first", "lk", steps=2)
            shapes += cell(fails + 1, lanes[1], "all discard, and raise|the same error", "box", steps=2)
            shapes += cell(0, y, "version 6, by every receiver", "lq", steps=6)
        return Drawing(inner_width(), y + tall, tuple(shapes))

    title = "A turn brings a version to all receivers, or to none"
    note = "Up to the last vote nothing that is served has changed. The outcome is one key of a store."
    drawings = [
        turn("committed: every rank has said that it is ready", "good", None),
        turn("aborted: whatever fails before that ends the turn for all", "wrong", 3),
    ]
    return page(title, below([heading(title, note=note), *drawings], gap=30))


_READS = """\
import torch
from megatron.core import parallel_state as mpu


class Router:
    def __init__(self, tp_group: torch.distributed.ProcessGroup):
        self.tp_group = tp_group

    def gather(self, x):
        torch.distributed.all_reduce(x, group=mpu.get_tensor_model_parallel_group())
        return x / mpu.get_context_parallel_world_size()
"""
_RUN = '<testsuite><testcase classname="test_router" name="test_gather">{}</testcase>{}</testsuite>'
_FAILURE = '<failure message="AssertionError: norm(1.4142136) != 1.7320508"/>'
_OTHER = '<testcase classname="test_router" name="test_offset_grid"/>'


def lint() -> str:
    """A session of shardweave lint, as it is printed."""
    title = "shardweave lint: what is there, what a change adds, what a change breaks"
    baseline = "--baseline groups.txt"
    shown: list[tuple[str, str]] = []

    def say(words: str) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(["lint", *words.split(), *(["--no-cache"] if "groups " in words else [])])
        shown.append((f"$ shardweave lint {words}", "s"))
        shown.extend((row, "wrong" if code else "good") for row in out.getvalue().splitlines()[-1:])
        shown[-1:-1] = [(row, "") for row in out.getvalue().splitlines()[:-1] if row]
        shown.append(("", ""))

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        code = Path("router.py")
        code.write_text(_READS, encoding="utf-8")
        Path("base.xml").write_text(_RUN.format("", _OTHER), encoding="utf-8")
        Path("head.xml").write_text(_RUN.format(_FAILURE, ""), encoding="utf-8")
        say(f"groups router.py {baseline} --begin")
        code.write_text(f"{_READS}\n    def rank(self):\n        return mpu.get_data_parallel_rank()\n")
        say(f"groups router.py {baseline}")
        code.write_text(_READS, encoding="utf-8")
        say("groups router.py --fix")
        say(f"groups router.py {baseline} --update")
        say("paired base.xml head.xml")
    rows = shown[:-1]
    height = 17 * len(rows) + 20
    shapes = [rect(0, 0, inner_width(), height, "box", round_=6)]
    for index, (words, style) in enumerate(rows):
        line = text(14, 20 + 17 * index, words, style)
        shapes.append(line.replace("<text ", f'<text style="{_TERMINAL}" xml:space="preserve" ', 1))
    drawing_ = Drawing(inner_width(), height, tuple(shapes))
    return page(title, below([heading(title), drawing_], gap=14))


_TERMINAL = "font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

PICTURES: dict[str, Callable[[], str]] = {
    "even-cut": even_cut,
    "megatron-to-hf": megatron_to_hf,
    "kv-heads-below-tp": kv_heads_below_tp,
    "deepspeed": deepspeed,
    "fsdp-on-tp": fsdp_on_tp,
    "weight-shares": weight_shares,
    "experts": experts,
    "mesh": mesh,
    "zigzag": zigzag,
    "layers": layers,
    "plan": plan_,
    "two-grids": two_grids,
    "proof": proof,
    "refit": refit,
    "lint": lint,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw(), encoding="utf-8", newline="\n")
