"""Progress: bars on a terminal, plain lines where the output is a file or a pipe."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from qkscope.cli.describe import byte_size, clock, cost_line, plan_summary, short_number
from qkscope.cli.visible import visible
from qkscope.run.events import Events
from qkscope.text import are, counted

if TYPE_CHECKING:
    from qkscope.demo.settings import DemoProgress
    from qkscope.run.plan import CheckpointPlan, Plan
    from qkscope.run.shards import CheckpointState

LINE_SECONDS = 10.0  # between two plain lines of the same work


@contextmanager
def progress(stream: TextIO | None = None, *, verbose: bool = False) -> Iterator[Events]:
    """The right kind of progress for where the output goes; `verbose` lists every file that is written."""
    out = stream or sys.stderr
    if not out.isatty():
        yield PlainEvents(lambda line: _tell(line, out), verbose=verbose)
        return
    with _bars(out) as bars:
        yield BarEvents(bars, verbose=verbose)


def _tell(line: str, out: TextIO) -> None:
    """Print a line if anybody still listens: hours of work do not end because a terminal was closed."""
    # RuntimeError: a signal arrived in the middle of another line.
    with suppress(OSError, ValueError, RuntimeError):
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

        def show(step: DemoProgress) -> None:
            what = f"{step.checkpoint}  loss {step.loss:.2f}  {short_number(step.tokens_per_second)} tokens/s"
            bars.update(task, total=step.total_steps, completed=step.step, what=what)

        yield show


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
        return max(0, self.done) / max(time.monotonic() - self._begun, 1e-9)

    def left(self) -> str:
        if self.done <= 0:
            return "unknown"
        return clock((self.total - self.done) / self.rate())


class PlainEvents(Events):
    """One line per event, and one every ten seconds of long work."""

    def __init__(self, say: Callable[[str], None], every: float = LINE_SECONDS, *, verbose: bool = False) -> None:
        self._print, self._verbose = say, verbose
        self._every = every
        self._meter = _Meter()
        self._next = time.monotonic() + every
        self._documents: Counter[str] = Counter()
        self._numbers: dict[str, str] = {}

    def _say(self, line: str) -> None:
        self._print(visible(line))  # lines quote names of files

    def surveying(self, documents: int) -> None:
        """A line now and then."""
        if self._due():
            self._say(f"reading documents: {documents}")

    def planned(self, plan: Plan) -> None:
        """What will be done and what it costs."""
        total = len(plan.checkpoints)
        self._numbers = {
            each.checkpoint.name: f"[{number}/{total}] {each.checkpoint.name}"
            for number, each in enumerate(plan.checkpoints, start=1)
        }
        self._meter.start(plan.tokens)
        self._say(f"study {plan.study.study}: {counted(total, 'checkpoint')}, {short_number(plan.tokens)} tokens")
        self._say(f"kind: {plan.how_read()}")
        self._say(cost_line(plan))
        for note in plan.notes():
            self._say(f"note: {note}")

    def examined(self, state: CheckpointState) -> None:
        """What an earlier run left: used again, gone on with, or to be made again and why."""
        plan = state.plan
        if state.whole:
            self.reused(plan)
            if state.skipped:
                self._say(f"note: {self._name(plan)}: an earlier run left {counted(state.skipped, 'bad document')} out")
        elif state.done:
            documents = sum(len(shard.documents) for shard in state.done)
            self._documents[plan.checkpoint.name] += documents
            self._meter.skip(documents * plan.context)
            total = len(plan.shards())
            self._say(
                f"{self._name(plan)}: {len(state.done)} of {counted(total, 'shard')} {are(len(state.done))} there from "
                "an earlier run, continuing"
            )
        for reason in state.unusable:
            self._say(f"{self._name(plan)}: will be captured again: {reason}")

    def remarked(self, remark: str, plans: Sequence[CheckpointPlan]) -> None:
        """One line, however many checkpoints it is about."""
        who = self._name(plans[0]) if len(plans) == 1 else counted(len(plans), "checkpoint")
        self._say(f"note: {who}: {remark} (--overwrite captures {'it' if len(plans) == 1 else 'them'} again)")

    def reused(self, plan: CheckpointPlan) -> None:
        """Nothing to do for this one."""
        self._meter.skip(plan.tokens)
        self._say(f"{self._name(plan)}: moments already exist")

    def started(self, plan: CheckpointPlan) -> None:
        """A new checkpoint."""
        self._say(f"{self._name(plan)}: {plan_summary(plan)}")

    def advanced(self, plan: CheckpointPlan, documents: int, tokens: int) -> None:
        """A line now and then."""
        self._documents[plan.checkpoint.name] += documents
        self._meter.add(tokens)
        if self._due():
            self._say(
                f"{self._name(plan)}: {self._documents[plan.checkpoint.name]} of "
                f"{counted(len(plan.documents), 'document')}, "
                f"{short_number(self._meter.rate())} tokens/s, {self._meter.left()} left"
            )

    def noted(self, message: str) -> None:
        """A line."""
        self._say(f"note: {message}")

    def finished(self, plan: CheckpointPlan, seconds: float) -> None:
        """The checkpoint is safe."""
        rate = short_number(plan.tokens / max(seconds, 1e-9))
        self._say(f"{self._name(plan)}: {seconds:.1f} s, {rate} tokens/s")

    def left_out(self, plan: CheckpointPlan, reason: str) -> None:
        """The run goes on without it."""
        self._meter.skip(plan.tokens)
        self._say(f"{self._name(plan)}: LEFT OUT: {reason}")

    def evicted(self, plan: CheckpointPlan, freed: int) -> None:
        """Disk is free again."""
        self._say(f"{self._name(plan)}: {byte_size(freed)} removed from the cache")

    def wrote(self, path: str) -> None:
        """A result; the command prints where all of them are."""
        if self._verbose:
            self._say(f"wrote {path}")

    def _name(self, plan: CheckpointPlan) -> str:
        return self._numbers.get(plan.checkpoint.name, plan.checkpoint.name)

    def _due(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._every
        return True


class BarEvents(PlainEvents):
    """A bar for the documents of each running checkpoint; all else becomes lines above the bars."""

    def __init__(self, bars: Any, *, verbose: bool = False) -> None:
        # Names are data: never markup. Bars show progress, so no lines are needed in between.
        super().__init__(
            lambda line: bars.console.print(line, markup=False, highlight=False), every=math.inf, verbose=verbose
        )
        self._bars = bars
        self._reading: Any = None
        self._running: dict[str, Any] = {}

    def surveying(self, documents: int) -> None:
        """A bar without an end: nobody knows yet how many there are."""
        if self._reading is None:
            self._reading = self._bars.add_task("reading documents", total=None, what="")
        self._bars.update(self._reading, completed=documents)

    def planned(self, plan: Plan) -> None:
        """Lines above the bar."""
        if self._reading is not None:
            self._bars.remove_task(self._reading)
            self._reading = None
        super().planned(plan)

    def started(self, plan: CheckpointPlan) -> None:
        """A new bar, from where an earlier run stopped."""
        super().started(plan)
        name = plan.checkpoint.name
        self._running[name] = self._bars.add_task(
            plan.checkpoint.label, total=len(plan.documents), completed=self._documents[name], what="loading"
        )

    def advanced(self, plan: CheckpointPlan, documents: int, tokens: int) -> None:
        """Move the bar."""
        super().advanced(plan, documents, tokens)
        what = f"documents  {short_number(self._meter.rate())} tokens/s  whole run: {self._meter.left()} left"
        if plan.checkpoint.name in self._running:
            self._bars.update(self._running[plan.checkpoint.name], advance=documents, what=what)

    def finished(self, plan: CheckpointPlan, seconds: float) -> None:
        """The bar becomes a line."""
        task = self._running.pop(plan.checkpoint.name, None)
        if task is not None:
            self._bars.remove_task(task)
        super().finished(plan, seconds)

    def left_out(self, plan: CheckpointPlan, reason: str) -> None:
        """The bar goes away."""
        task = self._running.pop(plan.checkpoint.name, None)
        if task is not None:
            self._bars.remove_task(task)
        super().left_out(plan, reason)


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
            f"{step.loss:.2f}, {short_number(step.tokens_per_second)} tokens/s",
            self._out,
        )
