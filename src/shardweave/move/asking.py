"""Questions that may never be answered, and a bound on the wait."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

_Answer = queue.SimpleQueue[tuple[Any, BaseException | None]]
_Questions = queue.SimpleQueue[tuple[Callable[[], Any], _Answer] | None]


class Asker:
    """Asks what may never be answered, and waits for so long and no longer.

    The client of a store raises where the process that serves it is gone. Where that process only stands
    still, it waits for ever, in C++, where nothing interrupts it. So it is called in a thread of its own.

    >>> asker = Asker()
    >>> asker.ask(lambda: 6 * 7, within_s=5)
    42
    """

    def __init__(self) -> None:
        self._questions: _Questions | None = None
        self._late: _Answer | None = None

    def ask(self, question: Callable[[], Any], *, within_s: float) -> Any:
        """What a question returns or raises. Questions are answered one after the other.

        Raises:
            TimeoutError: It was not answered in time, or one before it never was.
        """
        if self._questions is None:
            self._questions = queue.SimpleQueue()
            threading.Thread(
                target=_answer, args=(self._questions,), daemon=True, name="shardweave-asker"
            ).start()
            weakref.finalize(self, self._questions.put, None)
        if self._late is not None and self._late.empty():
            raise TimeoutError("a question before this one was never answered")
        answer: _Answer = queue.SimpleQueue()
        self._questions.put((question, answer))
        try:
            value, error = answer.get(timeout=within_s)
        except queue.Empty:
            self._late = answer
            raise TimeoutError(f"no answer after {within_s:g} s") from None
        if error is not None:
            raise error
        return value


def _answer(questions: _Questions) -> None:
    while (asked := questions.get()) is not None:
        question, answer = asked
        try:
            answer.put((question(), None))
        except BaseException as error:
            answer.put((None, error))
        del asked, question, answer  # which may be all that keeps the asker alive
