"""The same step as ``train_megatron.py``, by our runtime; it also takes ``cp`` and ``pp``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rank_processes import Case, play_all
from safetensors.numpy import save_file
from torch.distributed import FileStore
from train_megatron import config_of

from shardweave.train.batch import microbatch
from shardweave.train.checkpoint import load_weights
from shardweave.train.gradients import sum_gradients
from shardweave.train.grid import connect
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import build, group_plan
from shardweave.train.step import evaluate, forward_backward


def parallel_of(case: Case) -> Parallel:
    return Parallel(**{axis: case.get(axis, 1) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")})


def play(case: Case, out: Path, rank: int) -> None:
    parallel, folder = parallel_of(case), Path(case["hf"])
    store = FileStore(str(out / f"groups {case['name']}"), parallel.world_size)
    groups = connect(group_plan(parallel), rank=rank, store=store)
    runtime = build(config_of(folder), parallel=parallel, groups=groups, seed=None)
    arrays = {name: weight.detach() for name, weight in runtime.weights.items()}
    load_weights(folder, layout=runtime.layout, rank=rank, arrays=arrays)
    dp = parallel.mesh.coordinate(rank)["dp"]
    tokens, weights = (torch.tensor(case[key]).chunk(parallel.dp)[dp] for key in ("tokens", "weights"))
    # The first token of a document is no target, so it is not said here either.
    masks = torch.nn.functional.pad(weights.bool(), (1, 0), value=True)
    halves = [  # two microbatches where there are documents for it
        microbatch(list(ids), list(kept), cp=parallel.cp, tp=parallel.tp)
        for ids, kept in zip(tokens.chunk(2), masks.chunk(2), strict=True)
    ]
    stepped = forward_backward(runtime, halves)
    grads = {name: weight.grad for name, weight in runtime.weights.items()}
    summed = sum_gradients(grads, reduce_plan(runtime.layout, rank), groups).arrays()
    logprobs = evaluate(runtime, halves, keep_logprobs=True).logprobs
    assert logprobs is not None
    losses = -torch.cat([values.view(-1, tokens.shape[1]) for values in logprobs])[:, 1:]
    save_file({n: value.numpy() for n, value in summed.items()}, out / f"{case['name']}.{rank}.safetensors")
    report = {"loss": stepped.report.loss, "losses": losses.tolist(), "dp": dp}
    (out / f"{case['name']}.{rank}.json").write_text(json.dumps(report))
    groups.close()


if __name__ == "__main__":
    play_all(play)
