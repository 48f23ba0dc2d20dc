"""A vLLM engine on this CPU: ``python engine.py FOLDER TP BACKEND ADDRESS``, in vLLM's own environment.

FOLDER is a Hugging Face checkpoint. Where BACKEND is ``none`` the engine serves it; else its weights are not
read, and all that it ever has comes through the weight transfer.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import wire


class Engine:
    """What a run asks of an engine."""

    def __init__(self, folder: str, tp: int, backend: str) -> None:
        self.given = folder, tp, backend

    def start(self) -> dict[str, Any]:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        folder, tp, backend = self.given
        begin = time.perf_counter()
        refit: dict[str, Any] = {}
        if backend != "none":
            from shardweave.refit.engines.vllm import WORKER

            refit = {
                "weight_transfer_config": WeightTransferConfig(backend=backend),
                "load_format": "dummy",
                "worker_extension_cls": WORKER,
            }
        self.llm = LLM(
            model=folder,
            tensor_parallel_size=tp,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=8,
            num_gpu_blocks_override=64,  # a cache that fits the prompts: each rank has one
            seed=0,
            **refit,
        )
        return {"seconds": time.perf_counter() - begin}

    def join(self, *, info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": info})

    def refit(self) -> dict[str, Any]:
        begin = time.perf_counter()
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {}})
        self.llm.finish_weight_update()
        self.llm.reset_prefix_cache()
        return {"seconds": time.perf_counter() - begin}

    def refit_or_say(self) -> str:
        """A refit of which it is said why it failed."""
        from shardweave.errors import TransportError
        from shardweave.refit.engines.vllm import refit

        try:
            refit(self.llm)
        except TransportError as error:
            return str(error)
        return ""

    def audit(self) -> list[dict[str, Any]]:
        """What each worker finds where it derives the served weights once more."""
        return list(self.llm.collective_rpc("refit_audit"))

    def generate(self, *, prompts: list[list[int]], num_tokens: int) -> list[dict[str, Any]]:
        """For each prompt the greedy tokens, and the log probabilities of prompt and tokens."""
        from vllm import SamplingParams

        asked = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            logprobs=3,
            prompt_logprobs=1,
            ignore_eos=True,
            detokenize=False,
        )
        found = []
        for output in self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False
        ):
            answer = output.outputs[0]
            found.append(
                {
                    "tokens": list(answer.token_ids),
                    "prompt": [_plain(one) for one in output.prompt_logprobs or [] if one],
                    "logprobs": [_plain(one) for one in answer.logprobs],
                }
            )
        return found


def _plain(logprobs: Any) -> list[list[float]]:
    """Token and log probability; JSON gives every float back to its last bit."""
    return sorted([token, one.logprob] for token, one in logprobs.items())


def main() -> None:
    folder, tp, backend, address = sys.argv[1:]
    engine = Engine(folder, int(tp), backend)
    wire.serve(
        address,
        {
            "start": engine.start,
            "join": engine.join,
            "refit": engine.refit,
            "refit_or_say": engine.refit_or_say,
            "audit": engine.audit,
            "generate": engine.generate,
        },
    )


if __name__ == "__main__":
    main()
