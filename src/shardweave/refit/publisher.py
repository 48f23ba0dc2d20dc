"""The trainer's side of a refit."""

from __future__ import annotations

import secrets
from types import TracebackType

from shardweave.errors import GeometryError
from shardweave.refit.session import Part, Refit, Session
from shardweave.refit.sources import Source
from shardweave.refit.verify import Sums


class Publisher:
    """One trainer rank: offers what it owns, in place, and returns when every receiver serves it.

    The arrays are read while ``publish`` runs and at no other time. They are those that were given; where a
    trainer replaces them, it makes another publisher.
    """

    def __init__(self, session: Session, source: Source) -> None:
        """Publish what a rank owns.

        Args:
            session: The rank's seat.
            source: Its layout and arrays; see ``shardweave.refit.sources``.

        Raises:
            GeometryError: The session's rank does not publish.
        """
        _check_role(session, session.publishers, "publishes")
        self.session, self.source = session, source
        self.version: int | None = None
        self._published: dict[str, Sums] = {}
        self._name = secrets.token_hex(8)

    def publish(self, version: int) -> Refit:
        """Bring a version to all receivers. Every publisher and every receiver takes part.

        Laws:
            It returns on every rank, and then all receivers serve ``version``; or it raises on every rank
            that lives, and then each receiver serves what it served.
            To publish what this object published and all serve already moves nothing.

        Args:
            version: Counted up by the caller whenever the weights change, for example the step.

        Raises:
            PlanError: Publishers offer different versions, or other content under a number that was
                published; or there is no plan.
            DigestError: Content changed on its way, more often than ``retries``.
            TransportError, TransportTimeoutError: A rank is gone, stalls, or reported a failure.
            ShardweaveError: Whatever makes the refit unsound; the same class on every rank.
        """
        if version < 0:
            raise GeometryError(
                "versions are counted from 0",
                where=f"rank {self.session.rank}",
                equation=f"version({version}) < 0",
                hint="use the training step, or any number that is counted up",
            )
        again = self._published if version == self.version else {}
        part = Part(version, source=self.source, origin=self._name, published=again)
        done = self.session.run(part)
        self.version, self._published = version, {**again, **part.sealed}
        return done

    def close(self) -> None:
        """Close the session."""
        self.session.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_role(session: Session, ranks: tuple[int, ...], what: str) -> None:
    if session.rank not in ranks:
        raise GeometryError(
            f"this rank {what}",
            where=f"rank {session.rank}",
            equation=f"ranks({', '.join(map(str, ranks))})",
            hint="give the session of every rank the same publishers and receivers, and its own rank",
        )
