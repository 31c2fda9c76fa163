"""Which task a free worker gets: of the checkpoint it has loaded, else of one nobody has, else where most is left.

A worker is also told which checkpoint it will probably get next, so that it can fetch it ahead: each a different one.
"""

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
        self._promised: dict[int, int] = {}  # by worker: the checkpoint that it was told of

    @property
    def waiting(self) -> int:
        """Tasks that nobody works on."""
        return len(self._waiting)

    def take(self, loaded: int | None, worker: int = 0) -> Task | None:
        """The next task for a worker that has checkpoint `loaded` in memory; None if nothing waits."""
        task = self._choose(loaded, worker)
        if task is not None:
            self._waiting.remove(task)
            self._running[task.checkpoint] += 1
        return task

    def following(self, task: Task, worker: int = 0) -> int | None:
        """The checkpoint that a worker on this task will probably get when its own is used up, if there is one."""
        self._promised.pop(worker, None)
        free = self._free(worker)
        if not free or free[0].checkpoint == task.checkpoint:
            return None
        self._promised[worker] = free[0].checkpoint
        return free[0].checkpoint

    def _free(self, worker: int) -> list[Task]:
        """Waiting tasks of checkpoints that nobody works on or was told of, other than this worker."""
        others = {checkpoint for each, checkpoint in self._promised.items() if each != worker}
        return [task for task in self._waiting if not self._running[task.checkpoint] and task.checkpoint not in others]

    def _choose(self, loaded: int | None, worker: int) -> Task | None:
        if not self._waiting:
            return None
        for wanted in (loaded, self._promised.get(worker)):
            for task in self._waiting:
                if task.checkpoint == wanted and (wanted == loaded or not self._running[wanted]):
                    return task
        untouched = [task for task in self._waiting if not self._running[task.checkpoint]]
        for task in (*self._free(worker), *untouched):
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
                f"{what}: {self._lost[task]} workers died on it, the last: {how}; the system may have killed them for "
                "lack of memory (try fewer workers or a smaller batch_tokens), or one of its documents crashes the "
                "process"
            )
        if task.checkpoint in self._dropped:
            return f"{what}: {how}; its checkpoint is left out anyway"
        self._waiting.insert(0, task)
        return f"{what}: {how}; it is given to another worker (attempt {self._lost[task] + 1} of {ATTEMPTS})"
