"""The engine class that vLLM makes in each worker, and what a worker can be asked.

Loaded by vLLM itself, in its workers: this module needs vllm to be imported, the rest of the package not.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from shardweave.errors import GeometryError, ModelError
from shardweave.refit.engines.vllm.twin import Twin
from shardweave.refit.receiver import Receiver
from shardweave.refit.session import Session


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How the workers of an engine find the trainer; the ``init_info`` of ``init_weight_transfer_engine``.

    Attributes:
        publishers: How many ranks the trainer has; they are ranks 0 to ``publishers - 1`` of the refit.
        receivers: How many ranks all engines have together; those of this engine if not given.
        first_rank: The rank in the refit of this engine's first worker; ``publishers`` if not given.
        host: Where the ``TCPStore`` is at which all ranks meet.
        port: Its port.
        path: Instead of these, the file of a ``FileStore``.
        transport: As in ``Session``.
        timeout_s: The longest that a worker waits for the others at any point.
        allow_casts: Whether the engine may store values in a dtype that cannot hold all that are published.
    """

    publishers: int
    receivers: int | None = None
    first_rank: int | None = None
    host: str = ""
    port: int = 0
    path: str = ""
    transport: str = "gloo"
    timeout_s: float = 60.0
    allow_casts: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The ``update_info`` of ``update_weights``: nothing has to be said, the trainer says it all."""


class ShardweaveEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Weights from the ranks of a trainer into a worker of vLLM: the backend ``shardweave``."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    # A draft model would need a twin and a layout of its own.
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        """See ``WeightTransferEngine``."""
        super().__init__(config, vllm_config, device, model)
        self._receiver: Receiver | None = None
        self._twin: Twin | None = None

    @property
    def receiver(self) -> Receiver:
        """The receiver of this worker.

        Raises:
            ModelError: There is none yet, or no longer.
        """
        if self._receiver is None:
            raise ModelError(
                "a worker has met the trainer before it is updated",
                where="vLLM worker",
                equation="init_weight_transfer_engine was not called, or the engine was shut down",
                hint="call init_weight_transfer_engine with the number of publishers and where the store is",
            )
        return self._receiver

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Build the twin, check the layout against the live model, and take a seat among the ranks."""
        self.shutdown()
        parallel = self.vllm_config.parallel_config
        own = parallel.world_size * parallel.data_parallel_size
        first = init_info.publishers if init_info.first_rank is None else init_info.first_rank
        receivers = own if init_info.receivers is None else init_info.receivers
        if self._twin is None or self._twin.layout.mesh.offset != first:
            self._twin = Twin(
                self.model, self.vllm_config, device=self.device, worker_rank=parallel.rank, first_rank=first
            )
        session = Session(
            store=_store(init_info),
            publishers=range(init_info.publishers),
            receivers=range(init_info.publishers, init_info.publishers + receivers),
            rank=self._twin.rank,
            transport=init_info.transport,
            timeout_s=init_info.timeout_s,
        )
        self._receiver = Receiver(session, self._twin, allow_casts=init_info.allow_casts)

    def start_weight_update(self) -> None:
        """See to it that the worker can be updated."""
        _ = self.receiver

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take part in one refit: serve the version that the trainer publishes, or what was served."""
        # The base class would synchronise an accelerator; the twin does, where there is one.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See ``update_weights``."""
        self.receiver.receive()

    def finish_weight_update(self) -> None:
        """See to it that the worker serves what was committed.

        Raises:
            PlanError: Something else has changed the model since; see ``Receiver.version``.
        """
        _ = self.receiver.version

    def shutdown(self) -> None:
        """Leave the ranks. What is served stays."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    @property
    def twin(self) -> Twin:
        """The twin of the worker's model.

        Raises:
            ModelError: There is none yet.
        """
        assert self.receiver is not None and self._twin is not None
        return self._twin


class RefitWorker:
    """What a worker can be asked by name: give it to vLLM as ``worker_extension_cls``.

    Nothing here raises, and every answer is plain. Where several workers raise, vLLM's executor reads the
    first answer and leaves the others, which then answer the next call.
    """

    weight_transfer_engine: Any

    def refit(self) -> dict[str, Any]:
        """Take part in one refit, and say what this worker serves. See ``refit_state``."""
        try:
            self.weight_transfer_engine.receive_weights(UpdateInfo())
        except Exception as error:
            return {**self.refit_state(), "error": f"{type(error).__name__}: {error}"}
        return self.refit_state()

    def refit_state(self) -> dict[str, Any]:
        """What this worker serves.

        Returns:
            ``rank``: its rank in the refit. ``version``: what it serves, ``None`` before the first.
            ``changed``: where the model is no longer what the last commit made it, or nothing. ``error``:
            why the rest cannot be said, or why a refit failed; or nothing.
        """
        state: dict[str, Any] = {"rank": None, "version": None, "changed": "", "error": ""}
        try:
            engine = self.weight_transfer_engine
            state |= {"rank": engine.twin.rank, "changed": engine.twin.broken()}
            state |= {"version": engine.receiver.version}
        except Exception as error:
            state["error"] = f"{type(error).__name__}: {error}"
        return state

    def refit_audit(self) -> dict[str, Any]:
        """What deriving the served weights once more finds: ``compared``, ``different``, ``error``."""
        try:
            audit = self.weight_transfer_engine.twin.audit()
        except Exception as error:
            return {"compared": 0, "different": [], "error": f"{type(error).__name__}: {error}"}
        return {"compared": audit.compared, "different": list(audit.different), "error": ""}


def _store(info: InitInfo) -> Any:
    if bool(info.host) == bool(info.path):
        raise GeometryError(
            "all ranks of a refit meet at one store",
            where="init_info",
            equation=f"host({info.host!r}), path({info.path!r})",
            hint="give host and port of a TCPStore, or the path of a FileStore, and not both",
        )
    if info.path:
        return FileStore(info.path, -1)
    timeout = timedelta(seconds=info.timeout_s)
    return TCPStore(info.host, info.port, is_master=False, timeout=timeout, wait_for_workers=False)
