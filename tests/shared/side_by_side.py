"""Files of tests side by side in workers, and then those that want the machine for themselves, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class SideBySide(LoadFileScheduling):
    """A file is run by one worker, from start to end, so that what its tests share is made once.

    Files that want the machine come last in the collection. The first worker gets them when the others have
    ended, so that what starts ranks, kills them or measures time has no neighbour.
    """

    def __init__(self, config: pytest.Config, log: Any, *, is_alone: Callable[[str], bool]) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # not the largest file first, but as they were collected
        self.is_alone = is_alone

    def _is_let_wait(self, node: WorkerController) -> bool:
        """Whether what comes next is nothing for this worker, or not yet."""
        if not self.workqueue or not self.is_alone(next(iter(self.workqueue))):
            return False
        first, *others = self.nodes
        if node is first:
            return any(self._pending_of(self.assigned_work[other]) for other in others)
        # A worker keeps its last test until it hears what comes after it.
        node.shutdown()
        return True

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.workqueue and not self._is_let_wait(node):
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if not node.shutting_down and not self._is_let_wait(node):
            super()._reschedule(node)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        if self.nodes and node is not self.nodes[0]:
            self._reschedule(self.nodes[0])
