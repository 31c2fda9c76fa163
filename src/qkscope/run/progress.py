"""What a run reports while it runs, and how that is shown: bars on a terminal, otherwise lines."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from qkscope.text import are, byte_size, clock, counted, short_number, visible

if TYPE_CHECKING:
    from qkscope.run.checkpoint_plan import CheckpointPlan
    from qkscope.run.finished import CheckpointState
    from qkscope.run.plan import Plan

LINE_SECONDS = 10.0  # between two lines about the same work, where there are no bars


class Events:
    """Called by a run. This class does nothing; subclasses override what they handle."""

    def began(self, what: str) -> None:
        """Work begins that may take seconds before anything else is reported."""

    def unchanged(self, names: Sequence[str]) -> None:
        """The results of all checkpoints, by these names, are what a run would make: nothing is to be done."""

    def surveying(self, documents: int) -> None:
        """So many documents have been read and tokenized."""

    def planned(self, plan: Plan) -> None:
        """Everything is checked; the run is about to begin."""

    def examined(self, state: CheckpointState) -> None:
        """What earlier runs left of a checkpoint; called for all checkpoints before any work begins."""

    def remarked(self, remark: str, plans: Sequence[CheckpointPlan]) -> None:
        """How the finished moments of these checkpoints, which are used, differ from what would be made now."""

    def started(self, plan: CheckpointPlan) -> None:
        """Work on the checkpoint begins: its weights are about to be loaded."""

    def advanced(self, plan: CheckpointPlan, documents: int, tokens: int) -> None:
        """So many more documents and tokens went through the checkpoint (negative: a shard starts again)."""

    def noted(self, message: str) -> None:
        """Something the user should know."""

    def finished(self, plan: CheckpointPlan, seconds: float) -> None:
        """The checkpoint's moments are safe on disk."""

    def left_out(self, plan: CheckpointPlan, reason: str) -> None:
        """The checkpoint cannot be measured; the run goes on without it."""

    def evicted(self, plan: CheckpointPlan, freed: int) -> None:
        """The checkpoint's files left the Hub cache; so many bytes are free again."""

    def wrote(self, path: str) -> None:
        """A result file is in place."""


@contextmanager
def progress(stream: TextIO | None = None, *, verbose: bool = False) -> Iterator[Events]:
    """Events that show progress in `stream` (standard error by default); `verbose` lists every file that is written."""
    out = stream or sys.stderr
    with _bars(out) as bars:
        yield _ProgressEvents(out, bars, verbose=verbose)


def default_events() -> Events:
    """Events of a run that was started from Python: lines in a notebook, else silence."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    in_notebook = shell is not None and getattr(shell, "kernel", None) is not None
    return _ProgressEvents(sys.stdout) if in_notebook else Events()


@contextmanager
def step_progress(what: str, stream: TextIO | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """A function to be called with steps done, steps in all, and a text, after each step of `what`."""
    out, due = stream or sys.stderr, 0.0
    with _bars(out) as bars:
        task = bars.add_task(what, total=None, what="") if bars else None

        def show(done: int, total: int, text: str) -> None:
            nonlocal due
            if bars:
                bars.update(task, total=total, completed=done, what=text)
            elif time.monotonic() >= due:
                due = time.monotonic() + LINE_SECONDS
                print_line(f"{what}: step {done} of {total}, {text}", out, bars)

        yield show


@contextmanager
def _bars(out: TextIO) -> Iterator[Any]:
    """A rich progress display, or None if `out` is not a terminal."""
    if not out.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    name = TextColumn("{task.description}", markup=False)  # names are data, never markup
    what = TextColumn("{task.fields[what]}", markup=False)
    with Progress(
        name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), what, console=Console(file=out)
    ) as bars:
        yield bars


def print_line(line: str, out: TextIO, bars: Any = None) -> None:
    """Print a line, which may quote names of files, above the bars where there are any."""
    if bars:
        bars.console.print(visible(line), markup=False, highlight=False)
        return
    # Hours of work do not end because a terminal was closed. RuntimeError: a signal arrived within another line.
    with suppress(OSError, ValueError, RuntimeError):
        print(visible(line), file=out, flush=True)


class _ProgressEvents(Events):
    """A line for each event, and a bar for each running checkpoint or, without bars, a line every ten seconds."""

    def __init__(self, out: TextIO, bars: Any = None, *, verbose: bool = False) -> None:
        self._out, self._bars, self._verbose = out, bars, verbose
        self._tasks: dict[str, Any] = {}  # bars, by checkpoint; "" is the one of reading
        self._due = time.monotonic() + LINE_SECONDS
        self._documents: Counter[str] = Counter()  # done, by checkpoint
        self._titles: dict[str, str] = {}
        self._tokens_left = self._tokens_done = 0
        self._begun = time.monotonic()

    def _print(self, line: str) -> None:
        print_line(line, self._out, self._bars)

    def began(self, what: str) -> None:
        self._print(f"{what} ...")

    def unchanged(self, names: Sequence[str]) -> None:
        for number, name in enumerate(names, start=1):
            self._print(f"[{number}/{len(names)}] {name}: moments already exist")
        self._print("nothing has changed since they were made, nor the tables: nothing to do")

    def surveying(self, documents: int) -> None:
        if self._bars:
            if "" not in self._tasks:
                self._tasks[""] = self._bars.add_task("reading documents", total=None, what="")
            self._bars.update(self._tasks[""], completed=documents)
        elif self._line_is_due():
            self._print(f"reading documents: {documents}")

    def planned(self, plan: Plan) -> None:
        self._remove_bar("")
        names = [each.checkpoint.name for each in plan.checkpoints]
        self._titles = {name: f"[{number}/{len(names)}] {name}" for number, name in enumerate(names, start=1)}
        self._tokens_left, self._tokens_done, self._begun = plan.tokens, 0, time.monotonic()
        size = f"{counted(len(names), 'checkpoint')}, {short_number(plan.tokens)} tokens"
        lines = [f"study {plan.study.study}: {size}", f"kind: {plan.how_read()}", plan.cost_line()]
        for line in [*lines, *(f"note: {note}" for note in plan.notes())]:
            self._print(line)

    def examined(self, state: CheckpointState) -> None:
        plan, title = state.plan, self._title(state.plan)
        if state.whole:
            self._tokens_left -= plan.tokens
            self._print(f"{title}: moments already exist")
            if state.skipped:
                self._print(f"note: {title}: an earlier run left {counted(state.skipped, 'bad document')} out")
        elif state.done:
            documents, done = sum(len(shard.documents) for shard in state.done), len(state.done)
            self._documents[plan.checkpoint.name] += documents
            self._tokens_left -= documents * plan.context
            shards = counted(len(plan.shards()), "shard")
            self._print(f"{title}: {done} of {shards} {are(done)} there from an earlier run, continuing")
        for reason in state.unusable:
            self._print(f"{title}: will be captured again: {reason}")

    def remarked(self, remark: str, plans: Sequence[CheckpointPlan]) -> None:
        who = self._title(plans[0]) if len(plans) == 1 else counted(len(plans), "checkpoint")
        self._print(f"note: {who}: {remark} (--overwrite captures {'it' if len(plans) == 1 else 'them'} again)")

    def started(self, plan: CheckpointPlan) -> None:
        self._print(f"{self._title(plan)}: {counted(len(plan.documents), 'document')} x {plan.context} tokens")
        if self._bars:
            label, total, done = plan.checkpoint.label, len(plan.documents), self._documents[plan.checkpoint.name]
            task = self._bars.add_task(label, total=total, completed=done, what="loading")
            self._tasks[plan.checkpoint.name] = task

    def advanced(self, plan: CheckpointPlan, documents: int, tokens: int) -> None:
        name = plan.checkpoint.name
        self._documents[name] += documents
        self._tokens_left -= tokens
        self._tokens_done += tokens
        rate = max(0, self._tokens_done) / max(time.monotonic() - self._begun, 1e-9)
        left = clock(self._tokens_left / rate) if self._tokens_done > 0 else "unknown"
        if self._bars:
            what = f"documents  {short_number(rate)} tokens/s  whole run: {left} left"
            if name in self._tasks:
                self._bars.update(self._tasks[name], advance=documents, what=what)
        elif self._line_is_due():
            done = f"{self._documents[name]} of {counted(len(plan.documents), 'document')}"
            self._print(f"{self._title(plan)}: {done}, {short_number(rate)} tokens/s, {left} left")

    def noted(self, message: str) -> None:
        self._print(f"note: {message}")

    def finished(self, plan: CheckpointPlan, seconds: float) -> None:
        self._remove_bar(plan.checkpoint.name)
        rate = short_number(plan.tokens / max(seconds, 1e-9))
        self._print(f"{self._title(plan)}: {seconds:.1f} s, {rate} tokens/s")

    def left_out(self, plan: CheckpointPlan, reason: str) -> None:
        self._remove_bar(plan.checkpoint.name)
        self._tokens_left -= plan.tokens
        self._print(f"{self._title(plan)}: LEFT OUT: {reason}")

    def evicted(self, plan: CheckpointPlan, freed: int) -> None:
        self._print(f"{self._title(plan)}: {byte_size(freed)} removed from the cache")

    def wrote(self, path: str) -> None:
        if self._verbose:
            self._print(f"wrote {path}")

    def _title(self, plan: CheckpointPlan) -> str:
        return self._titles.get(plan.checkpoint.name, plan.checkpoint.name)

    def _remove_bar(self, name: str) -> None:
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))

    def _line_is_due(self) -> bool:
        due = time.monotonic() >= self._due
        self._due = time.monotonic() + LINE_SECONDS if due else self._due
        return due
