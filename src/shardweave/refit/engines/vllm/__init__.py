"""vLLM: the weights of a running engine, exchanged for those of a trainer.

A user sets ``weight_transfer_config={"backend": "shardweave"}``; vLLM finds the backend by the entry point
``vllm.general_plugins``, which is ``register``. See ``docs/refit-vllm.md``.
"""

from __future__ import annotations

from typing import Any

from shardweave.errors import TransportError
from shardweave.refit.engines.vllm.twin import Audit, Twin

BACKEND = "shardweave"
"""The name of the backend in vLLM's ``WeightTransferConfig``."""

WORKER = "shardweave.refit.engines.vllm.engine.RefitWorker"
"""The ``worker_extension_cls`` by which workers can be asked by name; ``refit`` needs it."""

__all__ = ["BACKEND", "WORKER", "Audit", "Twin", "refit", "register"]


def register() -> None:
    """Make the backend known to vLLM; called by vLLM in each of its processes, several times in some."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "shardweave.refit.engines.vllm.engine", "ShardweaveEngine"
        )


def refit(llm: Any) -> int:
    """Let all workers of an engine take part in one refit; the version that they serve then.

    Args:
        llm: A ``vllm.LLM`` that was started with ``worker_extension_cls=WORKER``.

    Raises:
        TransportError: The refit failed, on all workers alike; they serve what they served.
    """
    states = llm.collective_rpc("refit")
    failed = [state for state in states if state["error"]]
    if failed:
        raise TransportError(
            "a refit of an engine is done on all its workers",
            where=f"rank {failed[0]['rank']}",
            equation=failed[0]["error"],
            hint="mend what that rank reports; the engine serves what it served",
        )
    return int(states[0]["version"])
