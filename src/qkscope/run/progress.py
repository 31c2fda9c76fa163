"""How a run shows its progress: bars on a terminal, lines in a file, a pipe or a notebook."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from qkscope.run.events import Events
from qkscope.text import are, byte_size, clock, counted, short_number, visible

if TYPE_CHECKING:
    from qkscope.run.checkpoint_plan import CheckpointPlan
    from qkscope.run.plan import Plan
    from qkscope.run.shards import CheckpointState

LINE_SECONDS = 10.0  # between two lines about the same work, where there are no bars


@contextmanager
def progress(stream: TextIO | None = None, *, verbose: bool = False) -> Iterator[Events]:
    """Events that show progress in `stream` (standard error by default); `verbose` lists every file that is written."""
    out = stream or sys.stderr
    with _bars(out) as bars:
        yield ProgressEvents(_line_printer(out, bars), bars, verbose=verbose)


def default_events() -> Events:
    """Events of a run that was started from Python: lines in a notebook, else silence."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    in_notebook = shell is not None and getattr(shell, "kernel", None) is not None
    return ProgressEvents(_line_printer(sys.stdout, None)) if in_notebook else Events()


@contextmanager
def step_progress(what: str, stream: TextIO | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """A function to be called with steps done, steps in all, and a text, after each step of `what`."""
    out = stream or sys.stderr
    with _bars(out) as bars:
        print_line = _line_printer(out, bars)
        task = bars.add_task(what, total=None, what="") if bars else None
        due = 0.0

        def show(done: int, total: int, text: str) -> None:
            nonlocal due
            if bars:
                bars.update(task, total=total, completed=done, what=text)
            elif time.monotonic() >= due:
                due = time.monotonic() + LINE_SECONDS
                print_line(f"{what}: step {done} of {total}, {text}")

        yield show


@contextmanager
def _bars(out: TextIO) -> Iterator[Any]:
    """A rich progress display, or None if `out` is not a terminal."""
    if not out.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),  # names are data, never markup
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )
    with Progress(*columns, console=Console(file=out)) as bars:
        yield bars


def _line_printer(out: TextIO, bars: Any) -> Callable[[str], None]:
    def print_line(line: str) -> None:
        line = visible(line)  # it may quote names of files
        if bars:
            bars.console.print(line, markup=False, highlight=False)
            return
        # Hours of work do not end because a terminal was closed. RuntimeError: a signal arrived within another line.
        with suppress(OSError, ValueError, RuntimeError):
            print(line, file=out, flush=True)

    return print_line


class ProgressEvents(Events):
    """A line for each event, and a bar for each running checkpoint or, without bars, a line every ten seconds."""

    def __init__(self, print_line: Callable[[str], None], bars: Any = None, *, verbose: bool = False) -> None:
        self._print, self._bars, self._verbose = print_line, bars, verbose
        self._tasks: dict[str, Any] = {}  # bars, by checkpoint; "" is the one of reading
        self._due = time.monotonic() + LINE_SECONDS
        self._documents: Counter[str] = Counter()  # done, by checkpoint
        self._titles: dict[str, str] = {}
        self._tokens_left = self._tokens_done = 0
        self._begun = time.monotonic()

    def surveying(self, documents: int) -> None:
        """Documents are being read; nobody knows yet how many there are."""
        if self._bars:
            if "" not in self._tasks:
                self._tasks[""] = self._bars.add_task("reading documents", total=None, what="")
            self._bars.update(self._tasks[""], completed=documents)
        elif self._line_is_due():
            self._print(f"reading documents: {documents}")

    def planned(self, plan: Plan) -> None:
        """What will be done and what it costs."""
        self._remove_bar("")
        names = [each.checkpoint.name for each in plan.checkpoints]
        self._titles = {name: f"[{number}/{len(names)}] {name}" for number, name in enumerate(names, start=1)}
        self._tokens_left, self._tokens_done, self._begun = plan.tokens, 0, time.monotonic()
        self._print(
            f"study {plan.study.study}: {counted(len(names), 'checkpoint')}, {short_number(plan.tokens)} tokens"
        )
        self._print(f"kind: {plan.how_read()}")
        self._print(cost_line(plan))
        for note in plan.notes():
            self._print(f"note: {note}")

    def examined(self, state: CheckpointState) -> None:
        """What an earlier run left: used again, continued, or to be made again and why."""
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
        """One line, however many checkpoints it is about."""
        who = self._title(plans[0]) if len(plans) == 1 else counted(len(plans), "checkpoint")
        self._print(f"note: {who}: {remark} (--overwrite captures {'it' if len(plans) == 1 else 'them'} again)")

    def started(self, plan: CheckpointPlan) -> None:
        """A checkpoint is being loaded. Its bar starts where an earlier run stopped."""
        self._print(f"{self._title(plan)}: {counted(len(plan.documents), 'document')} x {plan.context} tokens")
        if self._bars:
            label, total, done = plan.checkpoint.label, len(plan.documents), self._documents[plan.checkpoint.name]
            task = self._bars.add_task(label, total=total, completed=done, what="loading")
            self._tasks[plan.checkpoint.name] = task

    def advanced(self, plan: CheckpointPlan, documents: int, tokens: int) -> None:
        """Documents are done."""
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
        """A line."""
        self._print(f"note: {message}")

    def finished(self, plan: CheckpointPlan, seconds: float) -> None:
        """The checkpoint is safe."""
        self._remove_bar(plan.checkpoint.name)
        rate = short_number(plan.tokens / max(seconds, 1e-9))
        self._print(f"{self._title(plan)}: {seconds:.1f} s, {rate} tokens/s")

    def left_out(self, plan: CheckpointPlan, reason: str) -> None:
        """The run goes on without it."""
        self._remove_bar(plan.checkpoint.name)
        self._tokens_left -= plan.tokens
        self._print(f"{self._title(plan)}: LEFT OUT: {reason}")

    def evicted(self, plan: CheckpointPlan, freed: int) -> None:
        """Disk is free again."""
        self._print(f"{self._title(plan)}: {byte_size(freed)} removed from the cache")

    def wrote(self, path: str) -> None:
        """A result file; the command prints where all of them are."""
        if self._verbose:
            self._print(f"wrote {path}")

    def _title(self, plan: CheckpointPlan) -> str:
        return self._titles.get(plan.checkpoint.name, plan.checkpoint.name)

    def _remove_bar(self, name: str) -> None:
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))

    def _line_is_due(self) -> bool:
        if time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + LINE_SECONDS
        return True


def cost_line(plan: Plan) -> str:
    """Memory and disk that a run takes, predicted."""
    sizes = [each.sizes.file for each in plan.checkpoints]
    least, most = byte_size(min(sizes)), byte_size(max(sizes))
    each = f"{most} on disk per checkpoint" if least == most else f"{least} to {most} on disk per checkpoint"
    return f"sums: {byte_size(plan.memory)} of memory where the layers run, {each}, {byte_size(plan.disk)} in total"
