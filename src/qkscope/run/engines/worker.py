"""The worker's side of every engine: run a task, put its moments where the run will find them."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.errors import located
from qkscope.moments.moments import Moments
from qkscope.results.folder import vectors_path
from qkscope.run.checkpoint_plan import CheckpointPlan, Shard
from qkscope.run.engines.base import Advanced, Finished, LeftOut, Noted, Report, Task
from qkscope.run.options import CaptureOptions
from qkscope.run.runner import BAD_CHECKPOINT, ShardRunner
from qkscope.run.shards import deliver, delivery_path, running_shard

if TYPE_CHECKING:
    from qkscope.validation.write import VectorWriter


class Worker:
    """Captures: runs tasks one after the other with one `ShardRunner`."""

    def __init__(
        self,
        plans: Sequence[CheckpointPlan],
        folder: Path,
        on_report: Callable[[Report], None],
        *,
        options: CaptureOptions = CaptureOptions(),  # noqa: B008 - frozen
        shared: bool = True,  # whether the run sees this folder too
        lock: bool = True,  # whether to hold each shard's lock, which the caller may hold already
    ) -> None:
        self._plans, self._folder, self._on_report = plans, folder, on_report
        self._options, self._shared, self._lock = options, shared, shared and lock
        self._checkpoint = 0  # index of the plan that runs
        self._runner = ShardRunner(options, self._advanced, self._noted)

    def _advanced(self, documents: int, tokens: int) -> None:
        self._on_report(Advanced(self._checkpoint, documents, tokens))

    def _noted(self, message: str) -> None:
        self._on_report(Noted(f"{self._plans[self._checkpoint].checkpoint.name}: {message}"))

    def run(self, task: Task, following: int | None = None) -> None:
        """Run all shards of the task; without a shared folder, report their moments as bytes.

        `following` is the checkpoint that will probably be next: its weights are fetched meanwhile. A checkpoint that
        cannot be measured is reported as left out, if the options allow that.
        """
        with located(f"checkpoint {task.name!r}"):
            try:
                self._run(task, None if following is None else self._plans[following])
            except BAD_CHECKPOINT as error:
                if not self._options.skip_bad_checkpoints:
                    raise error.advised(
                        python="CaptureOptions(skip_bad_checkpoints=True) goes on without this checkpoint",
                        command="--skip-bad-checkpoints goes on without this checkpoint",
                    ) from error
                self._on_report(LeftOut(task.checkpoint, str(error.args[0])))

    def close(self) -> None:
        """Nothing is open between tasks."""

    def _run(self, task: Task, following: CheckpointPlan | None) -> None:
        self._checkpoint = task.checkpoint
        plan = self._plans[task.checkpoint]
        with self._writer(task) as writer:
            for shard in task.shards:
                with running_shard(self._folder, task.name, shard) if self._lock else nullcontext():
                    self._deliver(task, shard, self._runner.run(plan, shard, writer, following))

    def _writer(self, task: Task) -> AbstractContextManager[VectorWriter | None]:
        if task.vectors is None:
            return nullcontext()
        return self._runner.writer(self._plans[task.checkpoint], vectors_path(self._folder, task.name), task.vectors)

    def _deliver(self, task: Task, shard: Shard, moments: Moments) -> None:
        contents, plan = None, self._plans[task.checkpoint]
        if self._shared:
            deliver(plan, moments, delivery_path(plan, shard.number, self._folder))
        else:
            with tempfile.TemporaryDirectory() as scratch:
                deliver(plan, moments, Path(scratch) / "shard.safetensors")
                contents = (Path(scratch) / "shard.safetensors").read_bytes()
        self._on_report(Finished(task.checkpoint, shard.number, contents))


def pack_plans(plans: Sequence[Any]) -> bytes:
    """Plans for another process of this run, in one pickle, so that shared tokenizers are packed once."""
    return pickle.dumps(list(plans))


def unpack_plans(packed: bytes) -> list[Any]:
    """Plans from the process that started this one."""
    from qkscope.capture.load import allow_unpickling_custom_configs

    allow_unpickling_custom_configs()
    plans: list[Any] = pickle.loads(packed)
    return plans
