"""Run a plan: read what is there, give the rest to an engine, merge each checkpoint's shards once all are finished."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from qkscope.errors import InputError, ModelError, located
from qkscope.files import as_path, require_writable, write_bytes
from qkscope.results.folder import merging_path, moments_folder, moments_path, refuse_links, vectors_path
from qkscope.results.lock import lock_folder, wait_for_lock
from qkscope.results.provenance import leave_out, read_left_out, remove_left_out
from qkscope.results.remove import remove_other_tokens, remove_unfinished, remove_vectors
from qkscope.run import finished as disk
from qkscope.run.checkpoint_plan import CheckpointPlan, Shard
from qkscope.run.engines import (
    Advanced,
    CaptureOptions,
    Finished,
    Job,
    LeftOut,
    Noted,
    Report,
    Started,
    Task,
    find_engine,
)
from qkscope.run.plan import Plan, make_plan, with_tokens_kept
from qkscope.run.progress import Events, default_events
from qkscope.run.runner import Worker
from qkscope.run.status import write_study_and_plan
from qkscope.run.stopping import Stop, Stopped, stoppable
from qkscope.run.unchanged import is_unchanged, remember_run
from qkscope.study.load import StudyFile, load_study
from qkscope.study.rows import row_settings
from qkscope.tables.workers import TableParts
from qkscope.text import are, counted


def run_study(
    study: StudyFile | Path | str,
    out: Path | str | None = None,
    events: Events | None = None,
    command: str = "run_study",
    options: CaptureOptions = CaptureOptions(),  # noqa: B008 - frozen
) -> Path:
    """Capture and analyze a whole study; returns the results folder."""
    if not isinstance(options, CaptureOptions):
        raise InputError(f"options should be CaptureOptions(...), not {type(options).__name__}")
    events = events or default_events()
    file = study if isinstance(study, StudyFile) else load_study(study)
    folder = results_folder(file, out)
    if is_unchanged(file, folder, events, options):
        return folder
    plan = plan_capture(file, folder, events, options)
    with lock_folder(folder), TableParts(folder, row_settings(file.study), file.study) as parts:
        _capture(plan, folder, events, options, parts)
        from qkscope.tables.from_moments import analyze_study  # loads all lenses

        analyze_study(folder, file.study, events, command, made=parts)
        remember_run(plan, folder, options)
    return folder


def results_folder(file: StudyFile, out: Path | str | None) -> Path:
    """Where a study's results go."""
    return as_path(out, "the results folder") if out is not None else Path("results") / file.study.study


def plan_capture(file: StudyFile, folder: Path, events: Events, options: CaptureOptions) -> Plan:
    """The plan of a capture into `folder`; what cannot be run, or written there, is refused before anything runs."""
    for each in (folder, moments_folder(folder)):
        require_writable(each)
    refuse_links(folder)
    plan = make_plan(
        file,
        events,
        here=options.engine == "local",
        trust_remote_code=options.trust_remote_code,
        results=folder,
        check_tensors=not options.skip_bad_checkpoints,
    )
    events.planned(plan)
    return plan


def capture_plan(
    plan: Plan,
    folder: Path,
    events: Events,
    options: CaptureOptions = CaptureOptions(),  # noqa: B008 - frozen
    *,
    joining: bool = False,
) -> None:
    """Write the moments of every checkpoint that are not there yet.

    `joining`: the checkpoints join others in the folder, whose study file and plan the caller keeps.
    """
    with lock_folder(folder):
        _capture(plan, folder, events, options, joining=joining)


def _capture(
    plan: Plan,
    folder: Path,
    events: Events,
    options: CaptureOptions,
    parts: TableParts | None = None,
    *,
    joining: bool = False,
) -> None:
    """Capture into a folder that the caller holds."""
    chosen = plan.chosen(options.only)
    if not options.overwrite:
        disk.require_nothing_lost(chosen, folder)
    plan = with_tokens_kept(plan, folder)
    remove_other_tokens(folder, {each.corpus.index.key for each in plan.checkpoints})
    if not joining:
        for note in disk.orphan_notes((each.checkpoint.name for each in plan.checkpoints), folder):
            events.noted(note)
        write_study_and_plan(plan, folder, overwrite=options.overwrite)
    run = _Run(plan.chosen(options.only), folder, events, options, parts)
    with stoppable(run.note_stopping) as stop:
        run.go(stop)


def _remark(states: Sequence[disk.CheckpointState], events: Events) -> None:
    """Report each remark once, with the checkpoints that it is about."""
    for remark in dict.fromkeys(remark for state in states for remark in state.remarks):
        events.remarked(remark, [state.plan for state in states if remark in state.remarks])


class _Run:
    """One run over some checkpoints of a plan; `parts` are those of the tables, if these follow."""

    def __init__(
        self,
        plans: list[CheckpointPlan],
        folder: Path,
        events: Events,
        options: CaptureOptions,
        parts: TableParts | None,
    ) -> None:
        self._plans, self._folder, self._events, self._options, self._parts = plans, folder, events, options, parts
        self._left: dict[int, set[int]] = {}  # numbers of missing shards, by checkpoint
        self._begun: dict[int, float] = {}
        self._shards = sum(len(plan.shards()) for plan in plans)
        self._shards_done = 0

    def go(self, stop: Stop) -> None:
        states = [disk.examine(plan, self._folder, overwrite=self._options.overwrite) for plan in self._plans]
        tasks = [task for number, state in enumerate(states) for task in self._tasks(number, state)]
        self._shards_done = self._shards - sum(len(task.shards) for task in tasks)
        for state in states:
            self._events.examined(state)
            if state.whole:
                remove_left_out(self._folder, state.plan.checkpoint.name)
        _remark(states, self._events)
        remove_unfinished(self._folder, alone=True)
        for number in [number for number, left in self._left.items() if not left]:
            self._complete(number)
        if tasks:
            for state in states:
                if state.whole:
                    self._begin_tables(state.plan)
            job = Job(self._plans, tasks, self._folder, Worker, self._options)
            find_engine(self._options.engine).run(job, self._on_report, stop)
        if stop.asked and any(self._left.values()):
            raise Stopped(f"stopped; {self._kept()}: run the same command to resume")
        left_out = read_left_out(self._folder)
        names = [plan.checkpoint.name for plan in self._plans]
        if names and set(names) <= set(left_out):
            raise ModelError(f"no checkpoint could be measured; {names[0]!r}: {left_out[names[0]]}")

    def note_stopping(self) -> None:
        """The message at the first Ctrl-C."""
        self._events.noted(
            f"stopping when the shard in flight is finished ({self._kept()} so far); Ctrl-C again stops at once"
        )

    def _kept(self) -> str:
        return f"{self._shards_done} of {counted(self._shards, 'shard')} {are(self._shards_done)} kept"

    def _tasks(self, number: int, state: disk.CheckpointState) -> list[Task]:
        """What is left of a checkpoint; where vectors are wanted, all its shards in one go."""
        plan, wanted, name = state.plan, self._options.vectors, state.plan.checkpoint.name
        sample = vectors_path(self._folder, name)
        whole = state.whole or not state.left  # killed between its vectors and its moments: only to be merged
        if sample.is_dir() and self._options.overwrite and disk.other_vectors(sample, plan, wanted, whole):
            remove_vectors(self._folder, name)
            self._events.noted(f"{name}: removed the vectors of earlier settings")
        together = wanted is not None and not sample.is_dir()
        if wanted is not None and sample.is_dir() and (other := disk.other_vectors(sample, plan, wanted, whole)):
            raise InputError(f"{sample} holds {other}").advised(
                python="remove it, use `overwrite`, or choose another `out`",
                command="remove it, give --overwrite, or another --out",
            )
        if state.whole and not together:
            return []
        left = plan.shards() if together else state.left
        self._left[number] = {shard.number for shard in left}
        return [Task(number, name, tuple(left), wanted)] if together else [Task(number, name, (each,)) for each in left]

    def _on_report(self, report: Report) -> None:
        if isinstance(report, Noted):
            self._events.noted(report.message)
            return
        plan = self._plans[report.checkpoint]
        if isinstance(report, Started):
            if report.checkpoint not in self._begun:
                self._begun[report.checkpoint] = time.perf_counter()
                self._events.started(plan)
        elif isinstance(report, Advanced):
            self._events.advanced(plan, report.documents, report.tokens)
        elif isinstance(report, Finished):
            if report.contents is not None:
                write_bytes(disk.delivery_path(plan, report.shard, self._folder), report.contents)
            left = self._left.get(report.checkpoint, set())
            if report.shard in left:
                left.discard(report.shard)
                self._shards_done += 1
                if not left:
                    self._complete(report.checkpoint, delivered=True)
        elif self._left.pop(report.checkpoint, None) is not None:  # otherwise another worker has reported the same
            leave_out(self._folder, plan.checkpoint.name, report.reason)
            self._events.left_out(plan, report.reason)

    def _complete(self, number: int, *, delivered: bool = False) -> None:
        """All shards of a checkpoint are there; `delivered`: a worker of this run has just written one."""
        plan = self._plans[number]
        begun = self._begun.get(number, time.perf_counter())
        with located(f"checkpoint {plan.checkpoint.name!r}"):
            _make_whole(plan, self._folder, self._events, begun, delivered=delivered)
        self._begin_tables(plan)
        if self._options.evict:
            from qkscope.capture.hub import evict

            # A waiting checkpoint may share some of the files in the Hub cache.
            waiting = {source for other, left in self._left.items() if left for source in self._plans[other].cached()}
            freed = sum(evict(source) for source in plan.cached() if source not in waiting)
            if freed:
                self._events.evicted(plan, freed)

    def _begin_tables(self, plan: CheckpointPlan) -> None:
        """Let the table rows of a finished checkpoint be computed while others run."""
        if self._parts is not None and any(self._left.values()):
            self._parts.begin(plan.checkpoint.name, moments_path(self._folder, plan.checkpoint.name))


def _make_whole(plan: CheckpointPlan, folder: Path, events: Events, begun: float, *, delivered: bool) -> None:
    """Merge a checkpoint's shards; a single one that was `delivered` is whole, and its header is only checked."""
    if delivered and plan.is_single_shard:
        for remark in disk.accept_whole(plan, folder):
            events.noted(remark)
    else:
        disk.merge_shards(plan, folder)
    remove_left_out(folder, plan.checkpoint.name)
    events.finished(plan, time.perf_counter() - begun)


# -- one shard -------------------------------------------------------------------------------------------------


def capture_shard(plan: Plan, number: int, folder: Path, events: Events, options: CaptureOptions) -> None:
    """Write the moments of exactly one shard of the plan, and merge its checkpoint if it is the last one.

    A checkpoint that cannot be measured is recorded as left out, if the options allow that.
    """
    numbered = plan.numbered_shards()
    if not 0 <= number < len(numbered):
        raise InputError(f"shard {number}: the plan has shards 0 to {len(numbered) - 1}")
    each, shard = numbered[number]
    name = each.checkpoint.name
    with lock_folder(folder, shared=True), disk.running_shard(folder, name, shard) as ours:
        if not ours:
            raise InputError(f"shard {number} is being run by another process; wait for it, or stop it")
        if not options.overwrite:
            disk.require_nothing_lost([each], folder)
        plan = with_tokens_kept(plan, folder)
        each, _ = plan.numbered_shards()[number]
        write_study_and_plan(plan, folder, overwrite=options.overwrite)
        reasons: list[str] = []
        whole = disk.examine_finished(each, folder, reasons, overwrite=options.overwrite)
        if whole is not None:
            events.examined(whole)
            _remark([whole], events)
            return
        begun = time.perf_counter()
        if disk.usable_shard(each, shard, folder, reasons) is None:
            for reason in reasons:
                events.noted(f"to be captured again: {reason}")
            events.started(each)
            if not _run_shard(each, shard, folder, events, options):
                return
            if each.is_single_shard:
                _make_whole(each, folder, events, begun, delivered=True)
                return
        # Of several commands that finish together, one merges and the others wait: the one that is checking may have
        # checked too early to see their shard.
        begun = time.perf_counter()
        with wait_for_lock(merging_path(folder, name)):
            if all(disk.usable_shard(each, one, folder) is not None for one in each.shards()):
                _make_whole(each, folder, events, begun, delivered=False)


def _run_shard(each: CheckpointPlan, shard: Shard, folder: Path, events: Events, options: CaptureOptions) -> bool:
    """Run the shard here; False if its checkpoint cannot be measured and is left out."""
    left_out: list[str] = []

    def on_report(report: Report) -> None:
        if isinstance(report, Advanced):
            events.advanced(each, report.documents, report.tokens)
        elif isinstance(report, Noted):
            events.noted(report.message)
        elif isinstance(report, LeftOut):
            left_out.append(report.reason)
            leave_out(folder, each.checkpoint.name, report.reason)
            events.left_out(each, report.reason)

    Worker([each], folder, on_report, options=options, lock=False).run(Task(0, each.checkpoint.name, (shard,)))
    return not left_out
