"""Which task a free worker gets: of the checkpoint it has loaded, else of one nobody has, else where most is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qkscope.errors import QkscopeError
from qkscope.run.engines.base import Task

ATTEMPTS = 3  # a task whose worker died so often is itself the likely cause


class WorkerLost(QkscopeError):
    """Workers died again and again over one task."""


class Schedule:
    """Tasks that wait, in plan order, and who works on what."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._waiting = list(tasks)
        self._running: Counter[int] = Counter()
        self._lost: Counter[Task] = Counter()
        self._dropped: set[int] = set()

    @property
    def waiting(self) -> int:
        """Tasks that nobody works on."""
        return len(self._waiting)

    def take(self, loaded: int | None) -> Task | None:
        """The next task for a worker that has checkpoint `loaded` in memory; None if nothing waits."""
        task = self._choose(loaded)
        if task is not None:
            self._waiting.remove(task)
            self._running[task.checkpoint] += 1
        return task

    def _choose(self, loaded: int | None) -> Task | None:
        if not self._waiting:
            return None
        for task in self._waiting:
            if task.checkpoint == loaded:
                return task
        for task in self._waiting:
            if not self._running[task.checkpoint]:
                return task
        left = Counter(task.checkpoint for task in self._waiting)
        return max(self._waiting, key=lambda task: (left[task.checkpoint], -task.checkpoint, -task.shards[0].number))

    def finish(self, task: Task) -> None:
        """The task is done."""
        self._running[task.checkpoint] -= 1

    def drop(self, checkpoint: int) -> None:
        """Nobody takes a task of this checkpoint any more."""
        self._waiting = [task for task in self._waiting if task.checkpoint != checkpoint]
        self._dropped.add(checkpoint)

    def lose(self, task: Task, how: str) -> str:
        """The task's worker died: it waits again, first in line. Says so; raises when it happened too often."""
        self._running[task.checkpoint] -= 1
        self._lost[task] += 1
        what = f"checkpoint {task.name!r}, shard {task.shards[0].number}"
        if self._lost[task] >= ATTEMPTS:
            raise WorkerLost(
                f"{what}: {self._lost[task]} workers died over it, the last: {how}; the system may have killed them "
                "for memory: try fewer workers or a smaller batch_tokens, or a document of it crashes the process"
            )
        if task.checkpoint in self._dropped:
            return f"{what}: {how}; its checkpoint is left out anyway"
        self._waiting.insert(0, task)
        return f"{what}: {how}; it is given to another worker (attempt {self._lost[task] + 1} of {ATTEMPTS})"
