"""Two grids in one job: a vision encoder on ranks 0-2, a language model on ranks 2-5, trained as one.

    python examples/two_grids.py              32 steps on six processes, half a minute on two cores
    python examples/two_grids.py --steps 10   a look
    python examples/two_grids.py --blind      the images are black: nothing can be learnt
    torchrun --nproc-per-node 6 examples/two_grids.py

A LLaVA, very small: a SigLIP encoder with three data ranks, and a qwen3 decoder with tp 2 and cp 2. Rank 2
has a part of both. An image is noise with a bright square in it; the text asks in which quarter it is. There
is no default process group: ranks meet in a store, and each makes the groups that it is in.

Every image is made for its step and never seen again, so that the answers that are counted are new ones. At
the end one process trains the same model on the same images. Ends with 1 where its losses differ by more than
1e-9, where the bridge sends a byte that nobody needs, or where the model does not learn.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor

from shardweave.layout import Layout
from shardweave.plan import Plan, plan
from shardweave.show.bridge import lanes
from shardweave.train.batch import Microbatch
from shardweave.train.collectives import sum_all
from shardweave.train.grid import GRID, Group, Groups, connect
from shardweave.train.launch import find_place, launch, open_store
from shardweave.train.loss import Tokens, cross_entropy
from shardweave.train.optimizer import AdamW
from shardweave.train.parallel import Parallel
from shardweave.train.sequence import SequenceLayout
from shardweave.train.step import Objective
from shardweave.train.vision_language import (
    LANGUAGE,
    VISION,
    WORLD,
    VisionLanguage,
    build_vision_language,
    group_plan,
    optimizers,
    rows_of_decoder,
    rows_of_encoder,
    scene,
    step,
)

ENCODER = Parallel(dp=3)
DECODER = Parallel(tp=2, cp=2, offset=2)
TIMEOUT_S = 120.0

NUM_IMAGES = 22
"""Of a step, in two microbatches. The three ranks of the encoder have unequally many of them."""
SIDE, PATCH, SQUARE = 8, 2, 3
PATCHES = (SIDE // PATCH) ** 2
BEGIN, ASK, IMAGE = 4, 5, 6
"""Tokens. 0 to 3 are the quarters: above left, above right, below left, below right."""

CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "dtype": "float64",
    "image_token_id": IMAGE,
    "image_seq_length": PATCHES,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "multimodal_projector_bias": True,
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_channels": 3,
        "image_size": SIDE,
        "patch_size": PATCH,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "vision_use_head": False,
    },
    "text_config": {
        "model_type": "qwen3",
        "vocab_size": 7,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.15,
        "max_position_embeddings": 64,
    },
}


# --- the task -----------------------------------------------------------------------------------


def quarter(number: int) -> int:
    """Where the square of an image is."""
    return int(np.random.default_rng((1, number)).integers(4))


def image(number: int) -> Tensor:
    """An image by its number, so that it is the same wherever it is asked for."""
    chance = np.random.default_rng((2, number))
    found = chance.normal(0, 0.1, (3, SIDE, SIDE))
    half = SIDE // 2
    down, across = chance.integers(0, half - SQUARE + 1, 2)
    y, x = half * (quarter(number) // 2) + down, half * (quarter(number) % 2) + across
    found[:, y : y + SQUARE, x : x + SQUARE] += 2.0
    return torch.from_numpy(found)


def images_of(number: int, *, blind: bool) -> Callable[[range], Tensor]:
    """The images of a step; each rank of the encoder asks for its own."""

    def give(asked: range) -> Tensor:
        made = [image(number * NUM_IMAGES + one) * (not blind) for one in asked]
        return torch.stack(made) if made else torch.zeros(0, 3, SIDE, SIDE, dtype=torch.float64)

    return give


def texts_of(number: int, parallel: Parallel) -> list[list[Microbatch]]:
    """For each image: begin, its patches, the question, the answer; only the answer is a target."""
    found = []
    for half in np.array_split(np.arange(NUM_IMAGES), 2):
        rows = [[BEGIN, *[IMAGE] * PATCHES, ASK, quarter(number * NUM_IMAGES + int(one))] for one in half]
        ids = torch.tensor(rows)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, -1] = True
        layout = SequenceLayout((ids.shape[1],) * len(rows), "thd", parallel.cp, parallel.tp)
        found.append(Microbatch(layout, ids.view(-1), mask.view(-1)))
    return [found]


# --- training -----------------------------------------------------------------------------------


@dataclass
class Answers:
    """Counts the answers of this rank that have more than half of the probability, while a loss is taken."""

    right: int = 0

    def loss(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        self.right += int((tokens.logprobs.detach().exp() > 0.5)[tokens.mask].sum())
        return cross_entropy(tokens)


def train(
    groups: Groups,
    *,
    vision: Parallel,
    language: Parallel,
    steps: int,
    blind: bool,
    told: Callable[[int, float, float, int], None] = lambda *row: None,
) -> list[float]:
    """The loss of each step, where this rank is on the grid of the language model.

    Args:
        groups: This rank's.
        vision: The degrees of the encoder.
        language: Those of the decoder.
        steps: How many.
        blind: Whether images are black.
        told: Is told of each step: its number, loss, the part of answers that are right, bytes of the bridge.
    """
    model = build_vision_language(CONFIG, vision=vision, language=language, groups=groups, seed=11)
    update = optimizers(model, AdamW(lr=4e-3, beta2=0.98, eps=1e-6), max_norm=1.0)
    losses = []
    for number in range(steps):
        answers = Answers()
        out = step(
            model,
            texts_of(number, language),
            images_of(number, blind=blind),
            Objective(loss=answers.loss),
            number=number,
        )
        if out.stepped is not None:
            # Each of a rank's own slots is on no other rank of the grid.
            all_of_grid = groups.of(LANGUAGE).get(GRID, "all")
            right = int(sum_all(torch.tensor([answers.right]), group=all_of_grid))
            losses.append(out.stepped.report.loss)
            told(number, losses[-1], right / NUM_IMAGES, out.moved_bytes)
        update.step(model.grads())
        for module in model.modules.values():
            for weight in module.weights.values():
                weight.grad = None
    return losses


def train_on_one_rank(steps: int, *, blind: bool) -> list[float]:
    """The same training in this process alone."""
    one = Parallel()
    groups = Groups(group_plan(vision=one, language=one), 0, {})
    return train(groups, vision=one, language=one, steps=steps, blind=blind)


# --- the bridge, before there is a rank ---------------------------------------------------------


def bridge_plan() -> Plan:
    """Which rows go from which rank to which, in every step."""
    everybody = group_plan(vision=ENCODER, language=DECODER).across[WORLD]
    outline = VisionLanguage(
        CONFIG, {VISION: ENCODER, LANGUAGE: DECODER}, None, None, Group(WORLD, everybody, 0), {}, {}
    )
    known = scene(outline, texts_of(0, DECODER))
    width = CONFIG["text_config"]["hidden_size"]
    return plan(rows_of_encoder(known, ENCODER, width=width), rows_of_decoder(known, DECODER, width=width))


def needed_bytes(found: Plan) -> int:
    """Rows that a rank wants and has not, counted from the two layouts and not from the plan."""

    def rows(layout: Layout, rank: int) -> set[int]:
        if rank not in layout.mesh.ranks:
            return set()
        return {row for buffer in layout.buffers(rank) for _, row in buffer.dims[0]}

    missing = sum(len(rows(found.dst, rank) - rows(found.src, rank)) for rank in found.dst.mesh.ranks)
    return missing * int(CONFIG["text_config"]["hidden_size"]) * 8


def format_numbers(ranks: tuple[int, ...]) -> str:
    """Ranks as ``2,4``, or as ``0-2`` where they are consecutive."""
    is_run = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]}-{ranks[-1]}" if is_run else ",".join(map(str, ranks))


def say_plans() -> None:
    """What is known before a process is started."""
    print("1. Groups: each rank makes those that it is in, and no other\n")
    print("           vision  language    communicators")
    groups = group_plan(vision=ENCODER, language=DECODER)
    for rank in groups.across[WORLD]:
        at = {
            name: ", ".join(f"{axis} {where[axis]}" for axis in axes)
            for name, axes in (("vision", ("dp",)), ("language", ("tp", "cp")))
            if rank in groups.grids[name].ranks and (where := groups.grids[name].coordinate(rank))
        }
        made = [format_numbers(groups.communicators[number]) for number in groups.of_rank[rank]]
        both = f"{at.get('vision', ''):<8}{at.get('language', ''):<12}"
        print(f"   rank {rank}  {both}{len(made)}: {'  '.join(made)}")

    found = bridge_plan()
    print(f"\n2. The bridge: {NUM_IMAGES} images of {PATCHES} patches, rows from rank to rank\n")
    table = {(lane.src, lane.dst): lane.count for lane in lanes(found)}
    wanted = found.dst.mesh.ranks
    print("             " + "".join(f"  to {rank}" for rank in wanted))
    for src in found.src.mesh.ranks:
        print(f"   from {src}    " + "".join(f"{table.get((src, dst), 0):>6}" for dst in wanted))
    stay = sum(count for (src, dst), count in table.items() if src == dst)
    rows = f"{sum(table.values())} rows, each once, of which {stay} stay where they are"
    print(f"\n   {rows}; {needed_bytes(found):,} bytes are sent there and as many back\n")


# --- a rank -------------------------------------------------------------------------------------


def live(steps: int, *, blind: bool) -> int:
    """One rank of the job. The last one is on the language model's grid, and prints."""
    place = find_place()
    assert place is not None, "launch() and torchrun say it"
    plan_ = group_plan(vision=ENCODER, language=DECODER)
    if place.world_size != plan_.world_size:
        print(f"WRONG: the job has {plan_.world_size} ranks, not {place.world_size}")
        return 2
    groups = connect(
        plan_, rank=place.rank, store=open_store(place, timeout_s=TIMEOUT_S), timeout_s=TIMEOUT_S
    )
    speaks = place.rank == place.world_size - 1
    moved: set[int] = set()
    right = []
    begin = time.perf_counter()
    if speaks:
        print("3. Training\n\n   step    loss  right", flush=True)

    def told(number: int, loss: float, part: float, sent: int) -> None:
        moved.add(sent)
        right.append(part)
        if speaks and (number % max(1, steps // 10) == 0 or number == steps - 1):
            bar = "#" * round(20 * loss)
            print(f"   {number:>4}  {loss:6.4f}  {part:5.0%}  {bar}", flush=True)

    losses = train(groups, vision=ENCODER, language=DECODER, steps=steps, blind=blind, told=told)
    code = verdict(losses, right, moved, steps, blind, time.perf_counter() - begin) if speaks else 0
    groups.close()
    return code


def verdict(
    losses: list[float], right: list[float], moved: set[int], steps: int, blind: bool, seconds: float
) -> int:
    """What came of it, against one process."""
    needed = needed_bytes(bridge_plan())
    alone = train_on_one_rank(steps, blind=blind)
    apart = [abs(a - b) for a, b in zip(losses, alone, strict=True)]
    few = max(1, steps // 8)
    checks = {
        f"the bridge sent {max(moved) / needed:.3f} of what is needed": moved == {needed},
        f"the first loss is that of one process, {losses[0]:.12f} (off by {apart[0]:.1e})": apart[0] < 1e-12,
        f"and so are all {steps} (off by {max(apart):.1e} at most)": max(apart) < 1e-9,
    }
    if blind:
        words = (
            f"without images nothing is learnt: loss {np.mean(losses[-few:]):.3f}, ln 4 is {math.log(4):.3f}"
        )
        checks[words] = bool(np.mean(losses[-few:]) > math.log(4) - 0.1)
    elif steps >= 32:
        words = f"it sees: {np.mean(right[-few:]):.0%} of the last {few * NUM_IMAGES} answers are right"
        checks[words] = bool(np.mean(right[-few:]) > 0.9)
    print(f"\n   {seconds:.1f} s on six ranks\n\n4. Against one process\n")
    for words, holds in checks.items():
        print(f"   {'ok   ' if holds else 'WRONG'} {words}")
    return 0 if all(checks.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--blind", action="store_true", help="black images, to see that they are needed")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error("--steps is 1 or more")
    torch.set_num_threads(1)
    if find_place() is not None:
        return live(given.steps, blind=given.blind)
    say_plans()
    sys.stdout.flush()
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    return launch(command, ranks=group_plan(vision=ENCODER, language=DECODER).world_size, told=print)


if __name__ == "__main__":
    sys.exit(main())
