"""A real vLLM engine on a CPU, refitted from the ranks of a Megatron job: run as a program by the tests.

``python vllm_engine.py FOLDER MODEL TP live`` makes a tiny checkpoint in ``FOLDER``, starts an engine from
it, and prints what it saw as one line of JSON. ``fresh`` in place of ``live`` prints what an engine says that
was started from another checkpoint, ``stages`` what two pipeline stages hold.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardweave.dialects import megatron
from shardweave.errors import TransportError
from shardweave.layout import Layout
from shardweave.models import Model, from_config
from shardweave.plan.simulate import materialise
from shardweave.refit import Publisher, Session, Source
from shardweave.refit.engines.vllm import BACKEND, WORKER, refit

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32", "hidden_size": 96,
    "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 199, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [1],
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
# Sizes of latent and linear attention are those that vLLM has kernels for.
DEEPSEEK = {
    **{key: QWEN3[key] for key in QWEN3 if key not in ("head_dim", "tie_word_embeddings")},
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16",
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 64,
    "n_shared_experts": 1, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_NEXT = {
    **QWEN3_MOE, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "dtype": "bfloat16",
    "num_hidden_layers": 4, "num_attention_heads": 4, "full_attention_interval": 4, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 64, "partial_rotary_factor": 0.25,
    "mlp_only_layers": [],
}  # fmt: skip
CONFIGS = {
    "qwen3": QWEN3,
    "qwen3_next": QWEN3_NEXT,
    "deepseek_v3": DEEPSEEK,
    "qwen3_bf16": {**QWEN3, "dtype": "bfloat16", "tie_word_embeddings": False},
    "qwen3_moe": QWEN3_MOE,
}
PROMPTS = ([3, 5, 7, 11], [13, 17])
SEEDS = (1, 2)


def weights(model: Model, seed: int) -> dict[str, NDArray[np.float32]]:
    """Weights of every tensor by name; norms around 1, and exact less 1, as some trainers hold them."""
    generator = np.random.default_rng(seed)
    found: dict[str, NDArray[np.float32]] = {}
    for tensor in model.tensors:
        for name in tensor.names():
            values = generator.standard_normal(tensor.shape).astype(np.float32) * np.float32(0.08)
            found[name] = 1 + np.round(values * 128) / 128 if "norm" in name else values
    return found


def checkpoint(folder: Path, name: str, seed: int) -> Path:
    """A checkpoint as Hugging Face stores one."""
    from safetensors.torch import save_file

    path, model = folder / f"{name}-{seed}", from_config(CONFIGS[name])
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[name]))
    dtypes = {key: getattr(torch, tensor.dtype) for tensor in model.tensors for key in tensor.names()}
    stored = {key: torch.from_numpy(values).to(dtypes[key]) for key, values in weights(model, seed).items()}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    return path


def engine(path: Path, *, tp: int = 1, **more: Any) -> Any:
    from vllm import LLM

    config = json.loads((path / "config.json").read_text())

    return LLM(
        model=str(path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=config["dtype"],  # vLLM would serve float32 in half of it
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        tensor_parallel_size=tp,
        **more,
    )


def said(llm: Any) -> list[Any]:
    """The tokens that an engine chooses, and their logprobs as they are."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, detokenize=False)
    done = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    chosen = [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in done]
    return [[[t, at[t].logprob] for t, at in zip(ids, logs, strict=True)] for ids, logs in chosen]


# --- the trainer --------------------------------------------------------------------------------


class Trainer:
    """The ranks of a Megatron job, each a thread: fused weights, cut as raw rows."""

    def __init__(self, name: str, *, store: str, receivers: int, transport: str) -> None:
        self.model = from_config(CONFIGS[name])
        self.layout: Layout = megatron.layout(self.model, megatron.mesh(tp=4, ep=2, etp=2))
        self.ranks = range(4)
        self.store, self.transport = store, transport
        self.receivers = range(4, 4 + receivers)
        self.arrays = {
            rank: {
                name: torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype))
                for name, (buffer, _) in self.layout.arrays(rank).items()
            }
            for rank in self.ranks
        }
        self.step(SEEDS[0])
        self.publishers = [self._publisher(rank) for rank in self.ranks]

    def _whole(self, seed: int) -> dict[Any, Any]:
        values = weights(self.model, seed)
        return {
            tensor: np.stack([values[name] for name in tensor.names()]).reshape([len(d) for d in tensor.dims])
            for tensor in self.layout.tensors
        }

    def _publisher(self, rank: int) -> Publisher:
        from torch.distributed import FileStore

        session = Session(
            store=FileStore(self.store, -1),
            publishers=self.ranks,
            receivers=self.receivers,
            rank=rank,
            transport=self.transport,
            timeout_s=60,
        )
        return Publisher(session, Source(self.layout, self.arrays[rank], rank))

    def step(self, seed: int) -> None:
        """Train: other values in the same memory."""
        held = materialise(self.layout, self._whole(seed))
        for rank in self.ranks:
            for name, (buffer, _) in self.layout.arrays(rank).items():
                stored = buffer.transform.apply(held[rank][name])
                self.arrays[rank][name].copy_(torch.from_numpy(stored))

    @contextmanager
    def publishing(self, version: int) -> Iterator[list[str]]:
        """Publish from every rank while the block runs; gives the errors of the ranks."""
        errors: list[str] = []

        def publish(publisher: Publisher) -> None:
            try:
                publisher.publish(version)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=publish, args=(each,)) for each in self.publishers]
        for thread in threads:
            thread.start()
        yield errors
        for thread in threads:
            thread.join(90)
            assert not thread.is_alive(), "a publisher hangs"


def update(llm: Any, trainer: Trainer, version: int) -> list[str]:
    """One refit; the errors of all sides, the engine's first."""
    errors: list[str] = []
    with trainer.publishing(version) as theirs:
        try:
            assert refit(llm) == version
        except TransportError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors + theirs


def update_by_steps(llm: Any, trainer: Trainer, version: int) -> list[str]:
    """One refit by the calls that vLLM has for every backend."""
    with trainer.publishing(version) as errors:
        llm.collective_rpc("start_weight_update")
        llm.collective_rpc("update_weights", kwargs={"update_info": {}})
        llm.collective_rpc("finish_weight_update")
    return errors


# --- what is done in the workers ----------------------------------------------------------------


def parameters(worker: Any) -> dict[str, str]:
    """A digest of every parameter and buffer of the served model, as it is stored."""
    from hashlib import blake2b

    import torch

    model = worker.model_runner.get_model()
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def digest(tensor: torch.Tensor) -> str:
        stored = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{tuple(tensor.shape)} {blake2b(stored, digest_size=8).hexdigest()}"

    return {name: digest(tensor) for name, tensor in held.items()}


def caches(worker: Any) -> list[int]:
    """Where the KV caches of the layers are."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    held = [layer.kv_cache for layer in layers if hasattr(layer, "kv_cache")]
    return [part.data_ptr() for cache in held for part in ([cache] if hasattr(cache, "shape") else cache)]


def write_in_place(worker: Any) -> None:
    """What one would do who does not know the engine: scale the weights that it shows."""
    for name, parameter in worker.model_runner.get_model().named_parameters():
        if "lm_head" in name or "proj" in name:
            parameter.data.mul_(-1)


def break_derivation(worker: Any) -> None:
    """Let the last module that is derived fail, once."""
    import vllm.model_executor.model_loader.utils as utils

    whole = utils.process_weights_after_loading

    def broken(model: Any, *more: Any) -> None:
        utils.process_weights_after_loading = whole
        whole(model, *more)
        raise RuntimeError("the derivation broke off at its end")

    utils.process_weights_after_loading = broken


def reload_by_vllm(worker: Any, path: str) -> None:
    """vLLM's own way to load weights into a running engine."""
    worker.reload_weights(weights_path=path)


# --- the program --------------------------------------------------------------------------------


def start(path: Path, name: str, tp: int, pp: int = 1) -> tuple[Any, Trainer]:
    llm = engine(
        path,
        tp=tp,
        pipeline_parallel_size=pp,
        weight_transfer_config={"backend": BACKEND},
        worker_extension_cls=WORKER,
    )
    store, transport = str(path.parent / f"store-{name}-{tp}-{pp}"), "shared" if tp * pp == 1 else "gloo"
    where = {"publishers": 4, "path": store, "transport": transport, "timeout_s": 60.0}
    llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": where})
    return llm, Trainer(name, store=store, receivers=tp * pp, transport=transport)


def run(folder: Path, name: str, tp: int) -> dict[str, Any]:
    """Refit an engine several times, and say what it said in between."""
    one = checkpoint(folder, name, SEEDS[0])
    llm, trainer = start(one, name, tp)
    ask: Callable[..., Any] = llm.collective_rpc
    found: dict[str, Any] = {"caches": [ask(caches)], "errors": []}

    def note(what: str) -> None:
        state = ask("refit_state")
        found[what] = {"said": said(llm), "state": state, "parameters": ask(parameters)}
        found[what]["audit"] = ask("refit_audit")

    note("at start")
    found["errors"] += update(llm, trainer, 0)
    note("the same weights")
    trainer.step(SEEDS[1])
    found["errors"] += update_by_steps(llm, trainer, 1)
    note("other weights")
    trainer.step(SEEDS[0])
    ask(break_derivation)
    found["broken"] = update(llm, trainer, 2)
    note("after a failure")
    found["errors"] += update(llm, trainer, 3)
    note("the first again")
    ask(write_in_place)
    note("written in place")
    ask(reload_by_vllm, args=(str(one),))
    note("reloaded by vLLM")
    found["errors"] += update(llm, trainer, 4)
    note("refitted after that")
    found["caches"].append(ask(caches))
    return found


def run_stages(folder: Path, name: str) -> dict[str, Any]:
    """Refit an engine of two pipeline stages, which on a CPU vLLM starts and does not generate with."""
    llm, trainer = start(checkpoint(folder, name, SEEDS[0]), name, tp=1, pp=2)
    ask: Callable[..., Any] = llm.collective_rpc
    found: dict[str, Any] = {"parameters": [ask(parameters)], "audits": [], "errors": []}
    for version, seed in enumerate((SEEDS[0], SEEDS[1], SEEDS[0])):
        trainer.step(seed)
        found["errors"] += update(llm, trainer, version)
        found["parameters"].append(ask(parameters))
        found["audits"] += ask("refit_audit")
    found["state"] = ask("refit_state")
    return found


def main() -> None:
    folder, name, tp, how = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind" if tp == 1 and how != "stages" else "0|1",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
    )
    if how == "fresh":
        result: Any = said(engine(checkpoint(folder, name, SEEDS[1]), tp=tp))
    elif how == "stages":
        result = run_stages(folder, name)
    else:
        result = run(folder, name, tp)
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
