"""Run a plan: look at what is there, hand the rest to an engine, merge each checkpoint as it becomes whole."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qkscope.errors import InputError, located
from qkscope.files import remove_unfinished, require_writable, write_bytes, writing
from qkscope.pipeline.engines import find_engine
from qkscope.pipeline.engines.base import Advanced, Finished, Job, Placement, Report, Started, Task
from qkscope.pipeline.events import Events
from qkscope.pipeline.lock import beside_others, holding, only_run
from qkscope.pipeline.plan import CheckpointPlan, Plan, Shard, make_plan
from qkscope.pipeline.record import write_record
from qkscope.pipeline.runner import VectorSample
from qkscope.pipeline.shards import (
    CheckpointState,
    look,
    merge_shards,
    running_shard,
    shard_folder,
    shard_path,
    usable,
    vectors_path,
)
from qkscope.pipeline.stopping import Stop, Stopped, stoppable
from qkscope.pipeline.tables import STUDY_YAML, analyze_study, moments_path
from qkscope.study.load import StudyFile, load_study
from qkscope.text import are, counted
from qkscope.vectors.layout import stored_sample
from qkscope.vectors.sample import published_rate


@dataclass(frozen=True)
class CaptureOptions:
    """What a capture does beside summing, and where it runs."""

    only: Sequence[str] = ()  # names of checkpoints; all by default
    evict: bool = False  # delete a checkpoint's files from the Hub cache once its moments are safe
    trust_remote_code: bool = False  # let Python code that lies with a checkpoint run
    vectors: VectorSample | None = None  # keep a sample of raw vectors in the predecessor's layout
    skip_bad_documents: bool = False  # go on without documents that make the model fail
    engine: str = "local"
    placement: Placement = Placement()  # noqa: RUF009 - frozen


def run_study(
    study: StudyFile | Path | str,
    out: Path | str | None = None,
    events: Events | None = None,
    command: str = "run_study",
    options: CaptureOptions = CaptureOptions(),  # noqa: B008 - frozen
) -> Path:
    """Capture and analyze a whole study; returns the results folder."""
    reports = events or Events()
    file = study if isinstance(study, StudyFile) else load_study(study)
    folder = results_folder(file, out)
    require_writable(folder)
    plan = make_plan(file, reports.surveying, trust_remote_code=options.trust_remote_code)
    reports.planned(plan)
    capture_plan(plan, folder, reports, options)
    return analyze_study(folder, file.study, reports, command)


def results_folder(file: StudyFile, out: Path | str | None) -> Path:
    """Where a study's results go."""
    return Path(out) if out is not None else Path("results") / file.study.study


def capture_plan(
    plan: Plan,
    folder: Path,
    events: Events,
    options: CaptureOptions = CaptureOptions(),  # noqa: B008 - frozen
) -> None:
    """Write the moments of every checkpoint that are not there yet."""
    chosen = [each for each in plan.checkpoints if not options.only or each.checkpoint.name in options.only]
    with only_run(folder):
        keep_study(plan, folder)
        run = _Run(chosen, folder, events, options)
        with stoppable(run.tell_stopping) as stop:
            run.go(stop)


def capture_shard(plan: Plan, number: int, folder: Path, events: Events, options: CaptureOptions) -> None:
    """Write the moments of exactly one shard of the plan, and merge its checkpoint if it is the last one."""
    numbered = plan.numbered_shards()
    if not 0 <= number < len(numbered):
        raise InputError(f"shard {number}: the plan has shards 0 to {len(numbered) - 1}")
    each, shard = numbered[number]
    name = each.checkpoint.name
    with beside_others(folder), running_shard(folder, name, shard) as mine:
        if not mine:
            raise InputError(f"shard {number} is being run by somebody else; wait for it, or stop it")
        keep_study(plan, folder)
        if usable(moments_path(folder, name), each.fingerprint()) is not None:
            events.reused(each)
            return
        if usable(shard_path(folder, name, shard.number), each.fingerprint(shard)) is None:
            _run_one(each, shard, folder, events, options)
        _merge_if_last(each, folder, events)


def _run_one(each: CheckpointPlan, shard: Shard, folder: Path, events: Events, options: CaptureOptions) -> None:
    def told(report: Report) -> None:
        if isinstance(report, Started):
            events.started(each)
        elif isinstance(report, Advanced):
            events.advanced(each, report.documents, report.tokens)
        elif not isinstance(report, Finished):
            events.noted(report.message)

    task = Task(0, each.checkpoint.name, (shard,))
    job = Job([each], [task], folder, skip_bad_documents=options.skip_bad_documents, held=True)
    find_engine("local").run(job, told, Stop())


def _merge_if_last(each: CheckpointPlan, folder: Path, events: Events) -> None:
    """Merge once all shards are there; of several that finish together one merges, the others find it done."""
    begun, name = time.perf_counter(), each.checkpoint.name
    lock = folder / "moments" / f".{name}.merging"
    with holding(lock) as mine:
        if not mine:
            return
        missing = [
            shard
            for shard in each.shards()
            if usable(shard_path(folder, name, shard.number), each.fingerprint(shard)) is None
        ]
        if not missing:
            merge_shards(each, folder)
            events.finished(each, time.perf_counter() - begun)
            lock.unlink(missing_ok=True)


class _Run:
    """One run over some checkpoints of a plan."""

    def __init__(self, plans: list[CheckpointPlan], folder: Path, events: Events, options: CaptureOptions) -> None:
        self._plans, self._folder, self._events, self._options = plans, folder, events, options
        self._left: dict[int, set[int]] = {}  # numbers of shards that are missing, by checkpoint
        self._begun: dict[int, float] = {}
        self._shards = 0
        self._kept = 0

    def go(self, stop: Stop) -> None:
        states = [look(plan, self._folder) for plan in self._plans]
        tasks = [task for number, state in enumerate(states) for task in self._tasks(number, state)]
        self._shards = sum(len(state.plan.shards()) for state in states)
        self._kept = self._shards - sum(len(task.shards) for task in tasks)
        for state in states:
            self._events.found(state)
        names = [plan.checkpoint.name for plan in self._plans]
        remove_unfinished(self._folder / "moments", *(shard_folder(self._folder, name) for name in names))
        for number, left in self._left.items():
            if not left:
                self._complete(number)
        if tasks:
            find_engine(self._options.engine).run(self._job(tasks), self._told, stop)
        if stop.asked and any(self._left.values()):
            raise Stopped(f"stopped; {self._kept_text()}: run the same command to go on")

    def tell_stopping(self) -> None:
        """Said at the first Ctrl-C."""
        self._events.noted(
            f"stopping when the shard in flight is finished ({self._kept_text()} so far); Ctrl-C again stops at once"
        )

    def _kept_text(self) -> str:
        return f"{self._kept} of {counted(self._shards, 'shard')} {are(self._kept)} kept"

    def _tasks(self, number: int, state: CheckpointState) -> list[Task]:
        """What is left of a checkpoint; where vectors are wanted, all its shards in one go."""
        name, wanted = state.plan.checkpoint.name, self._options.vectors
        kept = vectors_path(self._folder, name)
        if wanted is not None and kept.is_dir():
            whole = state.whole or not state.left  # killed between its vectors and its moments: only to be merged
            _require_same_sample(kept, state.plan, wanted, whole)
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
            placement=options.placement,
            skip_bad_documents=options.skip_bad_documents,
        )

    def _told(self, report: Report) -> None:
        if isinstance(report, Started):
            if report.checkpoint not in self._begun:
                self._begun[report.checkpoint] = time.perf_counter()
                self._events.started(self._plans[report.checkpoint])
        elif isinstance(report, Advanced):
            self._events.advanced(self._plans[report.checkpoint], report.documents, report.tokens)
        elif isinstance(report, Finished):
            self._finish(report)
        else:
            self._events.noted(report.message)

    def _finish(self, report: Finished) -> None:
        name = self._plans[report.checkpoint].checkpoint.name
        if report.contents is not None:
            write_bytes(shard_path(self._folder, name, report.shard), report.contents)
        left = self._left[report.checkpoint]
        if report.shard in left:
            left.discard(report.shard)
            self._kept += 1
            if not left:
                self._complete(report.checkpoint)

    def _complete(self, number: int) -> None:
        plan = self._plans[number]
        with located(f"checkpoint {plan.checkpoint.name!r}"):
            merge_shards(plan, self._folder)
        self._events.finished(plan, time.perf_counter() - self._begun.get(number, time.perf_counter()))
        # Two checkpoints may share one commit (with other contexts): its files stay until the last is done.
        waiting = (self._plans[other] for other, left in self._left.items() if left)
        if self._options.evict and all(other.source != plan.source for other in waiting):
            _evict(plan, self._events)


def _require_same_sample(kept: Path, plan: CheckpointPlan, wanted: VectorSample, holds: bool) -> None:
    """Refuse vectors that an earlier run kept of something else: they must not pass for this run's."""
    rate = published_rate(plan.context) if wanted.rate is None else wanted.rate
    if not holds or stored_sample(kept) != (rate, wanted.seed):
        raise InputError(f"{kept} holds vectors of another run or rate; remove it, or give another --out")


def _evict(plan: CheckpointPlan, events: Events) -> None:
    from qkscope.capture.hub import evict

    freed = evict(plan.source, plan.commit)
    if freed:
        events.evicted(plan, freed)


def keep_study(plan: Plan, folder: Path) -> None:
    """Put the study file and the plan beside the results, so that these can be analyzed and watched without it."""
    original, kept = plan.file.path, folder / STUDY_YAML
    with writing(kept):
        folder.mkdir(parents=True, exist_ok=True)
        if original is not None and original.resolve() != kept.resolve():
            shutil.copyfile(original, kept)
    write_record(plan, folder)
