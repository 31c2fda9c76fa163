"""The worker's side of every engine: run a task, put its moments where the run will find them."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.errors import QkscopeError, located
from qkscope.moments.moments import Moments
from qkscope.results.folder import vectors_path
from qkscope.run.engines.base import Advanced, Finished, LeftOut, Noted, Report, Task
from qkscope.run.plan import CheckpointPlan, Shard
from qkscope.run.runner import BAD_CHECKPOINT, Leniency, ShardListener, ShardRunner
from qkscope.run.shards import deliver, delivery_path, running_shard

if TYPE_CHECKING:
    from qkscope.vectors.write import VectorWriter


class Worker:
    """Runs tasks one after the other with one `ShardRunner`; `on_report` hears of everything."""

    def __init__(
        self,
        plans: Sequence[CheckpointPlan],
        folder: Path,
        on_report: Callable[[Report], None],
        *,
        leniency: Leniency,
        shared: bool = True,  # whether the run sees this folder too
        held: bool = False,  # whether the caller holds the shard's lock already
    ) -> None:
        self._plans = plans
        self._folder = folder
        self._on_report = on_report
        self._leniency = leniency
        self._shared, self._lock = shared, shared and not held
        self._checkpoint = 0
        listener = ShardListener(
            advanced=lambda documents, tokens: on_report(Advanced(self._checkpoint, documents, tokens)),
            noted=lambda message: on_report(Noted(f"{self._plans[self._checkpoint].checkpoint.name}: {message}")),
        )
        self._runner = ShardRunner(leniency=leniency, listener=listener)

    def run(self, task: Task, following: int | None = None) -> None:
        """Run all shards of the task; without a shared folder their moments are told as bytes.

        `following` is the checkpoint that will probably be asked for next: its weights are fetched meanwhile.

        A checkpoint that cannot be measured is told as left out, if that is wanted, or raised with the way out.
        """
        with located(f"checkpoint {task.name!r}"):
            try:
                self._run(task, None if following is None else self._plans[following])
            except BAD_CHECKPOINT as error:
                if not self._leniency.checkpoints:
                    raise _advised(error) from error
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


def _advised(error: QkscopeError) -> QkscopeError:
    return error.advised(
        python="CaptureOptions(skip_bad_checkpoints=True) goes on without this checkpoint",
        command="--skip-bad-checkpoints goes on without this checkpoint",
    )


def pack_plans(plans: Sequence[Any]) -> bytes:
    """Plans for another process of this run; tokenizers that checkpoints share are packed once."""
    return pickle.dumps(list(plans))


def unpack_plans(packed: bytes) -> list[Any]:
    """Plans from the process that started this one."""
    from qkscope.capture.load import allow_unpickling_custom_configs

    allow_unpickling_custom_configs()
    plans: list[Any] = pickle.loads(packed)
    return plans
