"""Reinforcement learning on one machine: train a step, refit the engine, generate, and again.

    python examples/rl_loop.py                  FSDP2 on two ranks, and transformers on one to generate
    python examples/rl_loop.py --engine vllm    vLLM generates; it is installed where this runs

The trainer shards every parameter over its ranks, the engine holds them whole, or fused as vLLM fuses them:
`shardweave.refit` works out who sends what. The reward of an answer is the part of its tokens that lie in the
first quarter of the vocabulary; a policy gradient finds that out in a few steps.

Each iteration is checked: the answers come from the version that was published last, and from exactly its
weights. Ends with 1 where they do not, or where the reward does not improve. `--spoil` changes one bit of the
weights that the engine serves last, to see it found out. While it runs, `shardweave refit status HOST:PORT`
shows who serves what. `rl_loop_ray.py` is the same loop on Ray.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
import torch.distributed as dist

from shardweave.dialects import fsdp
from shardweave.models import from_config
from shardweave.refit import Buffers, Publisher, Receiver, Session, from_fsdp2, from_module

TRAINERS = 2
"""Trainer ranks are 0 and 1 of the refit; the engine is the rank after them."""
TIMEOUT_S = 120.0
PROMPT = (5, 17, 44)
NUM_ANSWERS, NUM_TOKENS = 64, 12

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 61,
}
MODEL = from_config(CONFIG)


def new_model(seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    rest = {key: value for key, value in CONFIG.items() if key != "model_type"}
    config = AutoConfig.for_model("qwen3", **rest)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def rewards(tokens: np.ndarray) -> np.ndarray:
    """For each answer the part of its tokens in the first quarter of the vocabulary."""
    found: np.ndarray = (tokens[:, len(PROMPT) :] < CONFIG["vocab_size"] // 4).mean(axis=1)
    return found


@dataclass
class Answers:
    """What an engine generated.

    Attributes:
        version: The version that it served.
        tokens: Prompts and answers, (answers, prompt + tokens).
        logprobs: What the engine gave each token of an answer, (answers, tokens).
        weights: Every weight that it served by its name, where the engine can say; else nothing.
        changed: What was found to differ from a version that was committed; nothing if all is well.
    """

    version: int
    tokens: np.ndarray
    logprobs: np.ndarray
    weights: dict[str, np.ndarray]
    changed: str = ""


# --- the trainer --------------------------------------------------------------------------------


class Trainer:
    """One rank of a trainer: a model under ``fully_shard``, and a publisher of its parameters."""

    def __init__(self, rank: int, host: str, port: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        self.rank, self.step = rank, 0
        store = connect(host, port)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("trainer", store), rank=rank, world_size=TRAINERS
        )
        mesh = init_device_mesh("cpu", (TRAINERS,), mesh_dim_names=("dp",))
        self.model = new_model(seed=0)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=6e-3)

        source = from_fsdp2(self.model, model=MODEL, mesh=fsdp.mesh(dp=TRAINERS), rank=rank)
        self.publisher = Publisher(seat(store, rank), source)

    def publish(self) -> dict[str, float]:
        """Bring the weights as they are now to the engine; returns when it serves them."""
        begin = time.perf_counter()
        done = self.publisher.publish(self.step)
        return {"seconds": time.perf_counter() - begin, "bytes": done.bytes_sent}

    def train(self, answers: Answers) -> dict[str, Any]:
        """A step of the policy gradient on this rank's share of the answers."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        assert answers.version == self.step, "answers of another version"
        whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        differ = answers.changed or "".join(
            f"{name} differs; "
            for name, array in answers.weights.items()
            if self.rank == 0 and not np.array_equal(bits(array), bits(whole[name].numpy()))
        )
        mine = slice(self.rank, None, TRAINERS)
        reward = rewards(answers.tokens)
        advantage = torch.from_numpy((reward - reward.mean()) / (reward.std() + 1e-6))[mine]
        tokens = torch.from_numpy(answers.tokens)[mine]
        logits = self.model(tokens[:, :-1]).logits[:, len(PROMPT) - 1 :]
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, len(PROMPT) :, None])[..., 0]
        apart = float((logprobs.detach() - torch.from_numpy(answers.logprobs)[mine]).abs().max())
        loss = -(advantage.float()[:, None] * logprobs).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return {"reward": float(reward.mean()), "apart": apart, "differ": differ}

    def close(self) -> None:
        self.publisher.close()
        dist.destroy_process_group()


# --- engines ------------------------------------------------------------------------------------


class TorchEngine:
    """transformers' own generation, on one rank that holds every weight whole."""

    def __init__(self, host: str, port: int) -> None:
        torch.set_num_threads(1)
        self.model = new_model(seed=1).eval()  # weights of its own, until the first refit
        whole = from_module(self.model, model=MODEL, rank=TRAINERS)
        target = Buffers(layout=whole.layout, rank=TRAINERS, arrays=dict(whole.arrays))
        self.receiver = Receiver(seat(connect(host, port), TRAINERS), target)

    def receive(self) -> int:
        """Take part in a refit; the version that is served then."""
        return self.receiver.receive().version

    @torch.no_grad()
    def generate(self) -> Answers:
        prompts = torch.tensor(PROMPT).repeat(NUM_ANSWERS, 1)
        tokens = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            pad_token_id=0,
        )
        logits = self.model(tokens[:, :-1]).logits[:, len(PROMPT) - 1 :]
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, len(PROMPT) :, None])[..., 0]
        weights = {name: value.numpy() for name, value in self.model.state_dict().items()}
        version = self.receiver.version
        assert version is not None
        return Answers(version, tokens.numpy(), logprobs.numpy(), weights)

    def spoil(self) -> None:
        """Change one bit of one weight, past all that torch notices."""
        self.model.model.layers[1].mlp.up_proj.weight.detach().numpy().view(np.uint8)[7, 8] ^= 1

    def close(self) -> None:
        self.receiver.close()


class VllmEngine:
    """vLLM, started from meaningless weights; all that it ever has comes through refits."""

    def __init__(self, host: str, port: int) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from shardweave.refit.engines.vllm import WORKER

        self.folder = tempfile.TemporaryDirectory()
        (Path(self.folder.name) / "config.json").write_text(json.dumps(CONFIG))
        self.llm = LLM(
            model=self.folder.name,
            load_format="dummy",
            weight_transfer_config=WeightTransferConfig(backend="shardweave"),
            worker_extension_cls=WORKER,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            seed=0,
        )
        info = {"publishers": TRAINERS, "host": host, "port": port, "timeout_s": TIMEOUT_S}
        self.llm.init_weight_transfer_engine({"init_info": info})

    def receive(self) -> int:
        """Take part in a refit; the version that is served then."""
        from shardweave.refit.engines.vllm import refit

        version = refit(self.llm)
        self.llm.reset_prefix_cache()
        return version

    def generate(self) -> Answers:
        from vllm import SamplingParams

        asked = SamplingParams(
            temperature=1.0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": list(PROMPT)} for _ in range(NUM_ANSWERS)]
        found = [one.outputs[0] for one in self.llm.generate(prompts, asked, use_tqdm=False)]
        tokens = np.array([[*PROMPT, *one.token_ids] for one in found])
        logprobs = [
            [said[token].logprob for token, said in zip(one.token_ids, one.logprobs, strict=True)]
            for one in found
        ]
        (state,), (audit,) = (self.llm.collective_rpc(ask) for ask in ("refit_state", "refit_audit"))
        changed = "; ".join([state["changed"], state["error"], audit["error"], *audit["different"]]).strip(
            "; "
        )
        return Answers(state["version"], tokens, np.array(logprobs, dtype=np.float32), {}, changed)

    def close(self) -> None:
        del self.llm
        self.folder.cleanup()


ENGINES: dict[str, Any] = {"torch": TorchEngine, "vllm": VllmEngine}


# --- meeting ------------------------------------------------------------------------------------


def connect(host: str, port: int) -> Any:
    timeout = timedelta(seconds=TIMEOUT_S)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def seat(store: Any, rank: int) -> Session:
    """A rank's seat in the refits: the same ranks on all of them, and its own."""
    return Session(
        store=store, publishers=range(TRAINERS), receivers=(TRAINERS,), rank=rank, timeout_s=TIMEOUT_S
    )


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# --- the loop -----------------------------------------------------------------------------------


def trainer_process(rank: int, port: int, steps: int, inbox: Any, outbox: Any) -> None:
    trainer = Trainer(rank, "127.0.0.1", port)
    for _ in range(steps):
        moved = trainer.publish()
        version = trainer.step
        outbox.put((version, {**moved, **trainer.train(inbox.get(timeout=TIMEOUT_S))}))
    trainer.close()


def engine_process(kind: str, port: int, steps: int, spoil: bool, outboxes: list[Any]) -> None:
    engine: Any = ENGINES[kind]("127.0.0.1", port)
    for step in range(steps):
        engine.receive()
        if spoil and step == steps - 1:
            engine.spoil()
        answers = engine.generate()
        for outbox in outboxes:
            outbox.put(answers)
    engine.close()


class Table:
    """What each iteration came to, printed; and whether the loop did what it is for."""

    HEAD = "version  reward                        refit    bytes sent  weights  log probabilities"

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.well = True
        print(self.HEAD, flush=True)

    def add(self, version: int, ranks: list[dict[str, Any]]) -> None:
        reward, apart = ranks[0]["reward"], max(one["apart"] for one in ranks)
        differ = "".join(one["differ"] for one in ranks)
        # Two implementations add up in other orders; another version is off by a thousand times as much.
        well = not differ and apart < 1e-4 and version == len(self.rewards)
        self.well &= well
        self.rewards.append(reward)
        print(
            f"{version:>7}  {reward:5.3f} {'#' * round(20 * reward):<20}  "
            f"{max(one['seconds'] for one in ranks):6.3f} s  {sum(one['bytes'] for one in ranks):>10,.0f}  "
            f"{'the same' if not differ else 'DIFFER'}  {'equal' if apart < 1e-4 else 'OFF'} ({apart:.0e})",
            flush=True,
        )
        if differ:
            print(f"         {differ}", flush=True)

    def verdict(self) -> int:
        gain = np.mean(self.rewards[-2:]) - np.mean(self.rewards[:2])
        print(f"\nreward {self.rewards[0]:.3f} -> {self.rewards[-1]:.3f}", flush=True)
        if not self.well:
            print("WRONG: answers did not come from the weights that were published")
        if gain < 0.1:
            print("WRONG: the reward did not improve")
        return 0 if self.well and gain >= 0.1 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=sorted(ENGINES), default="torch")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--spoil", action="store_true")
    given = parser.parse_args()
    if given.spoil and given.engine != "torch":
        parser.error("--spoil is for --engine torch")

    # The one server. It belongs to neither side, so that either may be restarted.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(f"shardweave refit status 127.0.0.1:{store.port}\n", flush=True)
    # A server that has imported what is slow to import forks the processes.
    spawn = multiprocessing.get_context("forkserver")
    spawn.set_forkserver_preload(["torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3"])
    told, boxes = spawn.Queue(), [spawn.Queue() for _ in range(TRAINERS)]
    work: list[Any] = [(engine_process, (given.engine, store.port, given.steps, given.spoil, boxes))]
    work += [(trainer_process, (r, store.port, given.steps, boxes[r], told)) for r in range(TRAINERS)]
    processes = [spawn.Process(target=run, args=arguments) for run, arguments in work]
    for process in processes:
        process.start()
    try:
        table = Table()
        said: dict[int, list[dict[str, Any]]] = {}
        while len(table.rewards) < given.steps:
            version, facts = hear(told, processes)
            said.setdefault(version, []).append(facts)
            if len(said[version]) == TRAINERS:
                table.add(version, said.pop(version))
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
    return table.verdict()


def hear(told: Any, processes: list[Any]) -> tuple[int, dict[str, Any]]:
    """The next version, and what a trainer rank says of it; unless a process has failed."""
    while True:
        try:
            said: tuple[int, dict[str, Any]] = told.get(timeout=1.0)
            return said
        except queue.Empty:
            if any(process.exitcode for process in processes):
                sys.exit("a process has failed; its error is above")


if __name__ == "__main__":
    sys.exit(main())
