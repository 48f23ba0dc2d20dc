"""The engine's side of a refit."""

from __future__ import annotations

from types import TracebackType

from shardweave.errors import GeometryError, PlanError
from shardweave.refit.session import Part, Refit, Session
from shardweave.refit.target import Target


class Receiver:
    """One engine rank: serves one whole version, and knows which."""

    def __init__(
        self, session: Session, target: Target, *, subset: bool = False, allow_casts: bool = False
    ) -> None:
        """Receive into a target.

        Args:
            session: The rank's seat.
            target: Where versions go; ``Buffers`` for plain arrays.
            subset: Whether the target's layout leaves out, on purpose, some of what is published: some
                layers, some experts, an adapter. What it has is proved and complete all the same.
            allow_casts: Whether it stores values in a dtype that cannot hold them all.

        Raises:
            GeometryError: The session's rank does not receive, or is not the target's.
        """
        if session.rank not in session.receivers or session.rank != target.rank:
            raise GeometryError(
                "this rank receives, into the target of its own rank",
                where=f"rank {session.rank}",
                equation=f"receivers({', '.join(map(str, session.receivers))}), target({target.rank})",
                hint="give the session of every rank the same publishers and receivers, and its own rank",
            )
        self.session, self.target = session, target
        self._subset, self._allow_casts = subset, allow_casts
        self._version: int | None = None
        self._origin, self._is_in_doubt = "", False

    @property
    def version(self) -> int | None:
        """The version that is served whole; ``None`` before the first.

        Raises:
            PlanError: It cannot be known: the store was lost between this rank's vote and the outcome, so
                that others may serve the next version; or arrays are not as the last commit left them. The
                next ``receive`` that succeeds ends that.
        """
        if self._is_in_doubt or (broken := self.target.broken()):
            raise PlanError(
                "a receiver knows which version it serves",
                where=f"rank {self.session.rank}",
                equation=f"version({self._version}) or the next, whose outcome was lost"
                if self._is_in_doubt
                else f"{broken!r} was changed since version({self._version}) was committed",
                hint="stop serving, and receive again; with a new store, if that is what was lost",
            )
        return self._version

    def receive(self) -> Refit:
        """Take part in bringing the next version to all receivers; returns when this rank serves it.

        Call it while nothing is being served. If it raises, what is served is what was served.

        Raises:
            ShardweaveError: As ``Publisher.publish``; the same class on every rank.
        """
        part = Part(
            self._version,
            target=self.target,
            origin=self._origin,
            subset=self._subset,
            allow_casts=self._allow_casts,
            in_doubt=self._is_in_doubt or bool(self.target.broken()),
        )
        try:
            return self.session.run(part)
        finally:
            self._version, self._origin, self._is_in_doubt = part.version, part.origin, part.in_doubt

    def close(self) -> None:
        """Close the session."""
        self.session.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
