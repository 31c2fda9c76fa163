"""Run a plan: look at what is there, hand the rest to an engine, merge each checkpoint as it becomes whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qkscope.capture.source import ModelSource
from qkscope.errors import InputError, ModelError, located
from qkscope.files import as_path, require_writable, write_bytes
from qkscope.results.folder import (
    merging_path,
    moments_folder,
    moments_path,
    refuse_links,
    vectors_path,
)
from qkscope.results.left_out import leave_out, read_left_out, take_back
from qkscope.results.lock import beside_others, in_turn, only_run
from qkscope.results.remove import remove_other_tokens, remove_unfinished, remove_vectors
from qkscope.run.engines import find_engine
from qkscope.run.engines.base import Advanced, Finished, Job, LeftOut, Noted, Placement, Report, Started, Task
from qkscope.run.engines.worker import Worker
from qkscope.run.events import Events
from qkscope.run.finished import orphan_line, orphans, require_nothing_lost
from qkscope.run.kept_vectors import is_sample_of, require_same_sample
from qkscope.run.notebook import default_events
from qkscope.run.plan import CheckpointPlan, Plan, Shard, make_plan, with_tokens_kept
from qkscope.run.record import keep_study
from qkscope.run.runner import Leniency, VectorSample
from qkscope.run.shards import (
    CheckpointState,
    accept_whole,
    delivery_path,
    examine,
    examine_finished,
    is_only,
    merge_shards,
    running_shard,
    usable_shard,
)
from qkscope.run.stopping import Stop, Stopped, stoppable
from qkscope.study.load import StudyFile, load_study
from qkscope.tables.from_moments import analyze_study
from qkscope.tables.makers import TableParts, row_settings
from qkscope.text import are, counted


@dataclass(frozen=True)
class CaptureOptions:
    """What a capture does beside summing, and where it runs."""

    only: Sequence[str] = ()  # names of checkpoints; all by default
    evict: bool = False  # delete a checkpoint's files from the Hub cache once its moments are safe
    trust_remote_code: bool = False  # let Python code that lies with a checkpoint run
    vectors: VectorSample | None = None  # keep a sample of raw vectors in the predecessor's layout
    skip_bad_documents: bool = False  # go on without documents that make the model fail
    overwrite: bool = False  # replace finished moments that were made from other settings
    skip_bad_checkpoints: bool = False  # go on without checkpoints that cannot be measured
    engine: str = "local"
    placement: Placement = Placement()  # noqa: RUF009 - frozen

    @property
    def runs_here(self) -> bool:
        """Whether this machine does the work."""
        return self.engine == "local"

    @property
    def leniency(self) -> Leniency:
        """What may be left out."""
        return Leniency(self.skip_bad_documents, self.skip_bad_checkpoints)


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
    reports = events or default_events()
    file = study if isinstance(study, StudyFile) else load_study(study)
    folder = results_folder(file, out)
    plan = plan_capture(file, folder, reports, options)
    with only_run(folder), TableParts(folder, row_settings(file.study), file.study) as parts:
        _capture(plan, folder, reports, options, parts)
        return analyze_study(folder, file.study, reports, command, made=parts)


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
        here=options.runs_here,
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
) -> None:
    """Write the moments of every checkpoint that are not there yet."""
    with only_run(folder):
        _capture(plan, folder, events, options)


def capture_more(plan: Plan, folder: Path, events: Events, options: CaptureOptions) -> None:
    """Write the moments of checkpoints that join others in the folder, whose study and plan the caller keeps."""
    with only_run(folder):
        _capture(plan, folder, events, options, joining=True)


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
    if not options.overwrite:
        require_nothing_lost(_chosen(plan, options), folder)
    plan = with_tokens_kept(plan, folder)
    remove_other_tokens(folder, {each.corpus.key for each in plan.checkpoints})
    if not joining:
        _tell_orphans(plan, folder, events)
        keep_study(plan, folder, overwrite=options.overwrite)
    run = _Run(_chosen(plan, options), folder, events, options, parts)
    with stoppable(run.tell_stopping) as stop:
        run.go(stop)


def _chosen(plan: Plan, options: CaptureOptions) -> list[CheckpointPlan]:
    return [each for each in plan.checkpoints if not options.only or each.checkpoint.name in options.only]


def capture_shard(plan: Plan, number: int, folder: Path, events: Events, options: CaptureOptions) -> None:
    """Write the moments of exactly one shard of the plan, and merge its checkpoint if it is the last one.

    A checkpoint that cannot be measured is recorded as left out, if the options allow that.
    """
    numbered = plan.numbered_shards()
    if not 0 <= number < len(numbered):
        raise InputError(f"shard {number}: the plan has shards 0 to {len(numbered) - 1}")
    each, shard = numbered[number]
    name = each.checkpoint.name
    with beside_others(folder), running_shard(folder, name, shard) as mine:
        if not mine:
            raise InputError(f"shard {number} is being run by another process; wait for it, or stop it")
        if not options.overwrite:
            require_nothing_lost([each], folder)
        plan = with_tokens_kept(plan, folder)
        each, _ = plan.numbered_shards()[number]
        keep_study(plan, folder, overwrite=options.overwrite)
        reasons: list[str] = []
        whole = examine_finished(each, folder, reasons, overwrite=options.overwrite)
        if whole is not None:
            events.examined(whole)
            _tell_remarks([whole], events)
            return
        if usable_shard(each, shard, folder, reasons) is None:
            for reason in reasons:
                events.noted(f"to be captured again: {reason}")
            begun = time.perf_counter()
            bad = _run_one(each, shard, folder, events, options)
            if bad is not None:
                leave_out(folder, name, bad)
                events.left_out(each, bad)
                return
            if is_only(each):
                _accept(each, folder, events)
                take_back(folder, name)
                events.finished(each, time.perf_counter() - begun)
                return
        _merge_if_last(each, folder, events)


def _run_one(each: CheckpointPlan, shard: Shard, folder: Path, events: Events, options: CaptureOptions) -> str | None:
    """Run the shard; returns why its checkpoint is left out, if it cannot be measured and that is allowed."""
    reasons: list[str] = []

    def on_report(report: Report) -> None:
        if isinstance(report, Started):
            events.started(each)
        elif isinstance(report, Advanced):
            events.advanced(each, report.documents, report.tokens)
        elif isinstance(report, Noted):
            events.noted(report.message)
        elif isinstance(report, LeftOut):
            reasons.append(report.reason)

    task = Task(0, each.checkpoint.name, (shard,))
    job = Job([each], [task], folder, Worker, leniency=options.leniency, held=True)
    find_engine("local").run(job, on_report, Stop())
    return reasons[0] if reasons else None


def _accept(each: CheckpointPlan, folder: Path, events: Events) -> None:
    """Take over the moments that a worker wrote whole, and say how they differ from what this machine would make."""
    for remark in accept_whole(each, folder):
        events.noted(f"{each.checkpoint.name}: {remark}")


def _merge_if_last(each: CheckpointPlan, folder: Path, events: Events) -> None:
    """Merge once all shards are there; of several that finish together one merges, the others find it done.

    Whoever comes while another looks or merges waits and looks too: the other may have looked too early.
    """
    begun, name = time.perf_counter(), each.checkpoint.name
    with in_turn(merging_path(folder, name)):
        if all(usable_shard(each, shard, folder) is not None for shard in each.shards()):
            merge_shards(each, folder)
            take_back(folder, name)
            events.finished(each, time.perf_counter() - begun)


class _Run:
    """One run over some checkpoints of a plan."""

    def __init__(
        self,
        plans: list[CheckpointPlan],
        folder: Path,
        events: Events,
        options: CaptureOptions,
        parts: TableParts | None = None,  # of the tables, which are to follow
    ) -> None:
        self._plans, self._folder, self._events, self._options = plans, folder, events, options
        self._parts = parts
        self._left: dict[int, set[int]] = {}  # numbers of shards that are missing, by checkpoint
        self._begun: dict[int, float] = {}
        self._shards = 0
        self._shards_done = 0

    def go(self, stop: Stop) -> None:
        states = [examine(plan, self._folder, overwrite=self._options.overwrite) for plan in self._plans]
        tasks = [task for number, state in enumerate(states) for task in self._tasks(number, state)]
        self._shards = sum(len(state.plan.shards()) for state in states)
        self._shards_done = self._shards - sum(len(task.shards) for task in tasks)
        for state in states:
            self._events.examined(state)
            if state.whole:
                take_back(self._folder, state.plan.checkpoint.name)
        _tell_remarks(states, self._events)
        remove_unfinished(self._folder, alone=True)
        for number, left in self._left.items():
            if not left:
                self._complete(number)
        for state in states if tasks else []:
            if state.whole:
                self._make_tables(state.plan)
        if tasks:
            find_engine(self._options.engine).run(self._job(tasks), self._on_report, stop)
        if stop.asked and any(self._left.values()):
            raise Stopped(f"stopped; {self._kept_text()}: run the same command to resume")
        self._require_any()

    def tell_stopping(self) -> None:
        """Said at the first Ctrl-C."""
        self._events.noted(
            f"stopping when the shard in flight is finished ({self._kept_text()} so far); Ctrl-C again stops at once"
        )

    def _kept_text(self) -> str:
        return f"{self._shards_done} of {counted(self._shards, 'shard')} {are(self._shards_done)} kept"

    def _tasks(self, number: int, state: CheckpointState) -> list[Task]:
        """What is left of a checkpoint; where vectors are wanted, all its shards in one go."""
        name, wanted = state.plan.checkpoint.name, self._options.vectors
        sample = vectors_path(self._folder, name)
        whole = state.whole or not state.left  # killed between its vectors and its moments: only to be merged
        if sample.is_dir() and self._options.overwrite and not is_sample_of(sample, state.plan, wanted, whole):
            remove_vectors(self._folder, name)
            self._events.noted(f"{name}: removed the vectors of earlier settings")
        if wanted is not None and sample.is_dir():
            require_same_sample(sample, state.plan, wanted, whole)
        elif wanted is not None:
            self._left[number] = {shard.number for shard in state.plan.shards()}
            return [Task(number, name, tuple(state.plan.shards()), wanted)]
        if state.whole:
            return []
        self._left[number] = {shard.number for shard in state.left}
        return [Task(number, name, (shard,)) for shard in state.left]

    def _job(self, tasks: list[Task]) -> Job:
        options = self._options
        return Job(
            plans=self._plans,
            tasks=tasks,
            folder=self._folder,
            worker=Worker,
            placement=options.placement,
            leniency=options.leniency,
        )

    def _on_report(self, report: Report) -> None:
        if isinstance(report, Started):
            if report.checkpoint not in self._begun:
                self._begun[report.checkpoint] = time.perf_counter()
                self._events.started(self._plans[report.checkpoint])
        elif isinstance(report, Advanced):
            self._events.advanced(self._plans[report.checkpoint], report.documents, report.tokens)
        elif isinstance(report, Finished):
            self._finish(report)
        elif isinstance(report, LeftOut):
            self._leave_out(report)
        else:
            self._events.noted(report.message)

    def _finish(self, report: Finished) -> None:
        if report.contents is not None:
            write_bytes(delivery_path(self._plans[report.checkpoint], report.shard, self._folder), report.contents)
        left = self._left.get(report.checkpoint, set())
        if report.shard in left:
            left.discard(report.shard)
            self._shards_done += 1
            if not left:
                self._complete(report.checkpoint, delivered=True)

    def _leave_out(self, report: LeftOut) -> None:
        plan = self._plans[report.checkpoint]
        if self._left.pop(report.checkpoint, None) is None:
            return  # another worker has said so
        leave_out(self._folder, plan.checkpoint.name, report.reason)
        self._events.left_out(plan, report.reason)

    def _require_any(self) -> None:
        """Refuse to go on with nothing."""
        left_out = read_left_out(self._folder)
        bad = [plan.checkpoint.name for plan in self._plans if plan.checkpoint.name in left_out]
        if bad and len(bad) == len(self._plans):
            raise ModelError(f"no checkpoint could be measured; {bad[0]!r}: {left_out[bad[0]]}")

    def _complete(self, number: int, *, delivered: bool = False) -> None:
        """All shards of a checkpoint are there; `delivered` says that a worker of this run has just written one."""
        plan = self._plans[number]
        with located(f"checkpoint {plan.checkpoint.name!r}"):
            if delivered and is_only(plan):
                _accept(plan, self._folder, self._events)
            else:
                merge_shards(plan, self._folder)
        take_back(self._folder, plan.checkpoint.name)
        self._events.finished(plan, time.perf_counter() - self._begun.get(number, time.perf_counter()))
        self._make_tables(plan)
        # Two checkpoints may share one commit (with other contexts): its files stay until the last is done.
        waiting = {each for other, left in self._left.items() if left for each in _cached(self._plans[other])}
        if self._options.evict:
            _evict(plan, [each for each in _cached(plan) if each not in waiting], self._events)

    def _make_tables(self, plan: CheckpointPlan) -> None:
        """Let the lines of a finished checkpoint be made while others run."""
        if self._parts is not None and any(self._left.values()):
            self._parts.begin(plan.checkpoint.name, moments_path(self._folder, plan.checkpoint.name))


def _cached(plan: CheckpointPlan) -> list[ModelSource]:
    """What of a checkpoint may lie in the cache: the model, which its adapters share, and its adapter."""
    adapter = plan.source.adapter_source
    return [plan.source.without_adapter, *([adapter] if adapter is not None else [])]


def _evict(plan: CheckpointPlan, unused: list[ModelSource], events: Events) -> None:
    from qkscope.capture.hub import evict

    freed = sum(evict(each) for each in unused)
    if freed:
        events.evicted(plan, freed)


def _tell_remarks(states: Sequence[CheckpointState], events: Events) -> None:
    """Tell each remark once, with the checkpoints that it is about."""
    for remark in dict.fromkeys(remark for state in states for remark in state.remarks):
        events.remarked(remark, [state.plan for state in states if remark in state.remarks])


def _tell_orphans(plan: Plan, folder: Path, events: Events) -> None:
    unowned = orphans((each.checkpoint.name for each in plan.checkpoints), folder)
    if unowned:
        events.noted(orphan_line(unowned, folder))
