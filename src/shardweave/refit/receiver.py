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
        self._is_in_doubt = False

    @property
    def version(self) -> int | None:
        """The version that is served whole; ``None`` before the first.

        Raises:
            PlanError: The store was lost between this rank's vote and the outcome: other ranks may serve the
                next version. The next ``receive`` that succeeds ends that.
        """
        if self._is_in_doubt:
            raise PlanError(
                "a receiver knows which version it serves",
                where=f"rank {self.session.rank}",
                equation=f"this rank serves version({self._version}), others may serve the next",
                hint="stop serving, start a session with a new store, and receive again",
            )
        return self._version

    def receive(self) -> Refit:
        """Take part in bringing the next version to all receivers; returns when this rank serves it.

        Call it while nothing is being served. If it raises, what is served is what was served.

        Raises:
            ShardweaveError: As ``Publisher.publish``; the same class on every rank.
        """
        part = Part(
            None if self._is_in_doubt else self._version,
            target=self.target,
            subset=self._subset,
            allow_casts=self._allow_casts,
        )
        try:
            done = self.session.run(part)
        except BaseException:
            self._is_in_doubt |= part.in_doubt
            raise
        self._version, self._is_in_doubt = done.version, False
        return done

    def close(self) -> None:
        """Close the session."""
        self.session.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
