"""Progress: bars on a terminal, plain lines where the output is a file or a pipe."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from qkscope.cli.describe import cost_line, count, plan_summary, size
from qkscope.pipeline.events import Events

if TYPE_CHECKING:
    from qkscope.demo.settings import DemoProgress
    from qkscope.pipeline.plan import CheckpointPlan, Plan

LINE_SECONDS = 10.0  # between two plain lines of the same work


@contextmanager
def progress(stream: TextIO | None = None) -> Iterator[Events]:
    """The right kind of progress for where the output goes."""
    out = stream or sys.stderr
    if not out.isatty():
        yield PlainEvents(lambda line: _tell(line, out))
        return
    with _bars(out) as bars:
        yield BarEvents(bars)


def _tell(line: str, out: TextIO) -> None:
    """Print a line if anybody still listens: hours of work do not end because a terminal was closed."""
    with suppress(OSError, ValueError):
        print(line, file=out, flush=True)


@contextmanager
def training_progress(stream: TextIO | None = None) -> Iterator[Callable[[DemoProgress], None]]:
    """Progress of the demo's training."""
    out = stream or sys.stderr
    if not out.isatty():
        yield _PlainTraining(out)
        return
    with _bars(out) as bars:
        task = bars.add_task("training", total=None, what="")

        def told(step: DemoProgress) -> None:
            what = f"{step.checkpoint}  loss {step.loss:.2f}  {count(step.tokens_per_second)} tokens/s"
            bars.update(task, total=step.total_steps, completed=step.step, what=what)

        yield told


@contextmanager
def _bars(out: TextIO) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )
    with Progress(*columns, console=Console(file=out)) as bars:
        yield bars


class _Meter:
    """Tokens per second and time left over the whole run, from what has been done so far."""

    def __init__(self) -> None:
        self.total = 0
        self.done = 0
        self._begun = 0.0

    def start(self, total: int) -> None:
        self.total, self.done, self._begun = total, 0, time.monotonic()

    def skip(self, tokens: int) -> None:
        self.total -= tokens

    def add(self, tokens: int) -> None:
        self.done += tokens

    def rate(self) -> float:
        return self.done / max(time.monotonic() - self._begun, 1e-9)

    def left(self) -> str:
        if not self.done:
            return "unknown"
        seconds = int((self.total - self.done) / self.rate())
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


class PlainEvents(Events):
    """One line per event, and one every ten seconds of long work."""

    def __init__(self, say: Callable[[str], None], every: float = LINE_SECONDS) -> None:
        self._say = say
        self._every = every
        self._meter = _Meter()
        self._next = time.monotonic() + every
        self._documents = 0
        self._number = 0
        self._plan: CheckpointPlan | None = None
        self._checkpoints = 0

    def surveying(self, documents: int) -> None:
        """A line now and then."""
        if self._due():
            self._say(f"reading documents: {documents}")

    def planned(self, plan: Plan) -> None:
        """What will be done and what it costs."""
        self._checkpoints = len(plan.checkpoints)
        self._meter.start(plan.tokens)
        self._say(f"study {plan.study.study}: {self._checkpoints} checkpoints, {count(plan.tokens)} tokens")
        self._say(cost_line(plan))
        for note in plan.notes():
            self._say(f"note: {note}")

    def reused(self, plan: CheckpointPlan) -> None:
        """Nothing to do for this one."""
        self._number += 1
        self._meter.skip(plan.tokens)
        self._say(f"[{self._number}/{self._checkpoints}] {plan.checkpoint.name}: moments are there already")

    def replacing(self, plan: CheckpointPlan, reason: str) -> None:
        """Say why work is done again."""
        self._say(f"{plan.checkpoint.name}: captured again: {reason}")

    def resumed(self, plan: CheckpointPlan, shards: int, documents: int) -> None:
        """Part of the work is there already."""
        self._documents += documents
        self._meter.skip(documents * plan.context)
        total = len(plan.shards())
        self._say(f"{plan.checkpoint.name}: {shards} of {total} shards are there from an earlier run, going on")

    def started(self, plan: CheckpointPlan) -> None:
        """A new checkpoint."""
        self._number += 1
        self._documents = 0
        self._plan = plan
        self._say(f"[{self._number}/{self._checkpoints}] {plan_summary(plan)}")

    def advanced(self, documents: int, tokens: int) -> None:
        """A line now and then."""
        self._documents += documents
        self._meter.add(tokens)
        if self._plan is not None and self._due():
            self._say(
                f"[{self._number}/{self._checkpoints}] {self._plan.checkpoint.name}: {self._documents} of "
                f"{len(self._plan.documents)} documents, {count(self._meter.rate())} tokens/s, "
                f"{self._meter.left()} left"
            )

    def finished(self, plan: CheckpointPlan, seconds: float) -> None:
        """The checkpoint is safe."""
        rate = count(plan.tokens / max(seconds, 1e-9))
        self._say(f"[{self._number}/{self._checkpoints}] {plan.checkpoint.name}: {seconds:.1f} s, {rate} tokens/s")

    def evicted(self, plan: CheckpointPlan, freed: int) -> None:
        """Disk is free again."""
        self._say(f"{plan.checkpoint.name}: {size(freed)} left the cache")

    def wrote(self, path: str) -> None:
        """A result."""
        self._say(f"wrote {path}")

    def _due(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._every
        return True


class BarEvents(Events):
    """One bar for the documents of the running checkpoint; finished ones become lines above it."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        # Names are data: never markup. The bar moves by itself, so no lines in between.
        self._lines = PlainEvents(lambda line: bars.console.print(line, markup=False, highlight=False), every=math.inf)
        self._task: Any = None
        self._meter = _Meter()

    def surveying(self, documents: int) -> None:
        """A bar without an end: nobody knows yet how many there are."""
        if self._task is None:
            self._task = self._bars.add_task("reading documents", total=None, what="")
        self._bars.update(self._task, completed=documents)

    def planned(self, plan: Plan) -> None:
        """Lines above the bar."""
        self._drop()
        self._meter.start(plan.tokens)
        self._lines.planned(plan)

    def reused(self, plan: CheckpointPlan) -> None:
        """A line."""
        self._meter.skip(plan.tokens)
        self._lines.reused(plan)

    def replacing(self, plan: CheckpointPlan, reason: str) -> None:
        """A line."""
        self._lines.replacing(plan, reason)

    def resumed(self, plan: CheckpointPlan, shards: int, documents: int) -> None:
        """Move the bar to where the earlier run stopped."""
        self._meter.skip(documents * plan.context)
        self._lines.resumed(plan, shards, documents)
        self._bars.update(self._task, advance=documents)

    def started(self, plan: CheckpointPlan) -> None:
        """A new bar."""
        self._drop()
        self._lines.started(plan)
        self._task = self._bars.add_task(plan.checkpoint.label, total=len(plan.documents), what="loading")

    def advanced(self, documents: int, tokens: int) -> None:
        """Move the bar."""
        self._meter.add(tokens)
        what = f"documents  {count(self._meter.rate())} tokens/s  whole run: {self._meter.left()} left"
        self._bars.update(self._task, advance=documents, what=what)

    def finished(self, plan: CheckpointPlan, seconds: float) -> None:
        """The bar becomes a line."""
        self._drop()
        self._lines.finished(plan, seconds)

    def evicted(self, plan: CheckpointPlan, freed: int) -> None:
        """A line."""
        self._lines.evicted(plan, freed)

    def wrote(self, path: str) -> None:
        """A line."""
        self._lines.wrote(path)

    def _drop(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None


class _PlainTraining:
    """A line for each checkpoint and every ten seconds."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._next = time.monotonic()
        self._checkpoint = ""

    def __call__(self, step: DemoProgress) -> None:
        if time.monotonic() < self._next and step.checkpoint == self._checkpoint:
            return
        self._next, self._checkpoint = time.monotonic() + LINE_SECONDS, step.checkpoint
        _tell(
            f"training: step {step.step} of {step.total_steps}, {step.phase}, towards {step.checkpoint}, loss "
            f"{step.loss:.2f}, {count(step.tokens_per_second)} tokens/s",
            self._out,
        )
