"""One rank of a real trainer: ``python trainer.py CASE RANK STORE ADDRESS``. CASE is JSON; see ``run.py``.

It takes weights of a version, publishes them, and says what its own forward pass makes of tokens, by which
a run knows that the weights mean to the trainer what they mean to the engine.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import content
import placing
import torch
import torch.distributed as dist
import wire

from shardweave.dialects import fsdp, megatron
from shardweave.errors import ShardweaveError
from shardweave.refit import Publisher, Session
from shardweave.refit.sources import Source, from_fsdp2

TIMEOUT_S = 120.0
"""For processes to come; between the ranks of a refit a run says how long they wait."""


class Megatron:
    """A GPTModel of megatron-core on CPU processes."""

    def __init__(self, case: dict[str, Any], config: dict[str, Any], rank: int) -> None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))
        from megatron_cpu import model_of, replace_cuda

        replace_cuda()
        self.config, self.rank, self.tp = config, rank, case["tp"]
        self.ep, self.etp = case.get("ep", 1), case.get("etp", case["tp"])
        # Another padding than the engine's.
        self.padded = -(-config["vocab_size"] // (self.tp * 3)) * self.tp * 3
        moe = {}
        if "num_experts" in config:
            moe = {
                "num_moe_experts": config["num_experts"],
                "moe_router_topk": config["num_experts_per_tok"],
                "moe_ffn_hidden_size": config["moe_intermediate_size"],
                "moe_token_dispatcher_type": "allgather",
                "moe_router_load_balancing_type": "none",
            }
        self.model = model_of(
            {
                "num_layers": config["num_hidden_layers"],
                "hidden_size": config["hidden_size"],
                "num_attention_heads": config["num_attention_heads"],
                "num_query_groups": config["num_key_value_heads"],
                "kv_channels": config["head_dim"],
                "ffn_hidden_size": config["intermediate_size"],
                "layernorm_epsilon": config["rms_norm_eps"],
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "bias_dropout_fusion": False,
                "masked_softmax_fusion": False,
                **moe,
            },
            vocab=self.padded,
            tp=self.tp,
            ep=self.ep,
            etp=self.etp,
        ).eval()

    def source(self) -> Source:
        from shardweave.refit.sources_megatron import from_megatron

        mesh = megatron.mesh(tp=self.tp, ep=self.ep, etp=self.etp)
        return from_megatron(self.model, model=content.model_of(self.config), mesh=mesh, rank=self.rank)

    def take(self, version: int) -> None:
        held = placing.megatron(
            content.values(self.config, version),
            self.config,
            tp=self.tp,
            rank=self.rank,
            ep=self.ep,
            etp=self.etp,
            padded=self.padded,
        )
        parameters = dict(self.model.named_parameters())
        assert sorted(held) == sorted(parameters)
        with torch.no_grad():
            for name, parameter in parameters.items():
                assert tuple(parameter.shape) == held[name].shape, name
                parameter.copy_(torch.from_numpy(held[name]))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        # (batch, sequence, rows of this rank)
        mine = self.model(tokens, torch.arange(length)[None], mask).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.tp)]
        dist.all_gather(parts, mine, group=self.model.pg_collection.tp)
        return torch.cat(parts, dim=-1)


class Fsdp2:
    """A Hugging Face model under ``fully_shard``, layer by layer."""

    def __init__(self, case: dict[str, Any], config: dict[str, Any], rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoConfig, AutoModelForCausalLM

        self.config, self.rank, self.mesh = config, rank, case["mesh"]
        device = init_device_mesh("cpu", tuple(self.mesh.values()), mesh_dim_names=tuple(self.mesh))
        rest = {key: value for key, value in config.items() if key != "model_type"}
        self.model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **rest), attn_implementation="eager"
        ).eval()
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=device)
        fully_shard(self.model, mesh=device)

    def source(self) -> Source:
        return from_fsdp2(
            self.model, model=content.model_of(self.config), mesh=fsdp.mesh(**self.mesh), rank=self.rank
        )

    def take(self, version: int) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        whole = placing.stacked(content.values(self.config, version), self.config)
        set_model_state_dict(
            self.model,
            {name: torch.from_numpy(array) for name, array in whole.items()},
            options=StateDictOptions(full_state_dict=True, strict=True),
        )

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens).logits
        for layer in (*self.model.model.layers, self.model):
            layer.reshard()
        return logits


class Rank:
    """What a run asks of a rank."""

    def __init__(self, case: dict[str, Any], rank: int, store: Path) -> None:
        self.case, self.rank = case, rank
        self.config = content.CONFIGS[case["model"]]
        world_size = case["trainers"]
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        self.trainer = {"megatron": Megatron, "fsdp2": Fsdp2}[case["trainer"]](case, self.config, rank)

    def join(self, *, host: str, port: int, transport: str, timeout_s: float) -> dict[str, Any]:
        trainers, world = self.case["trainers"], self.case["trainers"] + self.case["engine_tp"]
        store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
        )
        session = Session(
            store=store,
            publishers=range(trainers),
            receivers=range(trainers, world),
            rank=self.rank,
            transport=transport,
            timeout_s=timeout_s,
        )
        source = self.trainer.source()
        self.publisher = Publisher(session, source)
        return {"layout": source.layout.name, "arrays": len(source.arrays)}

    def take(self, *, version: int) -> None:
        """An optimizer step, as far as a refit can tell: other weights in the same parameters."""
        self.trainer.take(version)

    def spoil(self) -> None:
        """One weight of this rank changes, which no other rank holds."""
        with torch.no_grad():
            self.trainer.source().arrays["decoder.layers.1.mlp.linear_fc2.weight"][0, 0] += 0.5

    def publish(self, *, version: int) -> dict[str, Any]:
        begin = time.perf_counter()
        done = self.publisher.publish(version)
        return {
            "seconds": time.perf_counter() - begin,
            "sent": done.bytes_sent,
            "version": done.version,
            "steps": dict(done.seconds),
        }

    def publish_or_say(self, *, version: int) -> str:
        """A publication of which it is said why it failed."""
        try:
            self.publisher.publish(version)
        except ShardweaveError as error:
            return str(error)
        return ""

    def score(self, *, tokens: list[list[int]]) -> list[list[float]]:
        """The log probability of each token after the first, and of the likeliest one in its place."""
        found = []
        with torch.no_grad():
            for one in tokens:
                logits = self.trainer.logits(torch.tensor([one]))[0, :-1, : self.config["vocab_size"]]
                logprobs = logits.double().log_softmax(-1)
                mine = logprobs.gather(1, torch.tensor(one[1:])[:, None])[:, 0]
                found.append([mine.tolist(), logprobs.max(-1).values.tolist()])
        return found


def main() -> None:
    torch.set_num_threads(1)
    case, rank, store, address = json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    here = Rank(case, rank, store)
    commands = ("join", "take", "spoil", "publish", "publish_or_say", "score")
    wire.serve(address, {command: getattr(here, command) for command in commands})


if __name__ == "__main__":
    main()
