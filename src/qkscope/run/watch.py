"""Watch a folder in which checkpoints appear: measure each as it comes, keep tables and page current.

All state is in the results folder, so a watch that was killed continues where it was, also after the checkpoints
themselves were deleted. Tables are made from all moments each time, so they are those of a run over all checkpoints,
whatever the order in which these came. Only the folder is needed, nothing else of the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qkscope.capture.fingerprint import weights_file_state, weights_fingerprint
from qkscope.capture.source import ModelSource
from qkscope.errors import InputError, ModelError, MomentsFileError, located
from qkscope.files import as_path, require_writable, write_text
from qkscope.moments.file import read_provenance
from qkscope.moments.moments import Moments
from qkscope.report.write import write_report
from qkscope.results.folder import (
    MOMENTS_SUFFIX,
    STUDY_YAML,
    entries,
    moments_folder,
    moments_path,
    refuse_links,
    results_file,
)
from qkscope.results.lock import lock_folder
from qkscope.results.provenance import CheckpointRecord, leave_out
from qkscope.run.arrivals import Arrival, delete_checkpoint, find_arrivals, folder_series, symlink_of
from qkscope.run.engines import CaptureOptions
from qkscope.run.execute import capture_plan
from qkscope.run.finished import ROUNDING, changed_settings
from qkscope.run.models import model_source
from qkscope.run.plan import Plan, make_plan
from qkscope.run.progress import Events
from qkscope.run.runner import BAD_CHECKPOINT
from qkscope.run.status import add_to_plan
from qkscope.study.load import StudyFile, series_in, study_of, study_text
from qkscope.study.schema import Study
from qkscope.study.series import FolderState, make_labels_differ, shared_settings
from qkscope.study.values import numbers_in
from qkscope.tables.from_moments import analyze_study
from qkscope.text import counted

# What a record of moments calls what a study states of a checkpoint.
STATED = {"label": "label", "phase": "phase", "step": "step", "trained_tokens": "tokens", "run": "run",
          "context": "context", "model": "model"}  # fmt: skip
ABOUT = "Written by qkscope watch: the checkpoints that were measured so far."


@dataclass(frozen=True)
class WatchSettings:
    """How a folder is watched."""

    every: float = 30.0  # seconds between two searches
    settle: float = 5.0  # seconds for which a checkpoint's files must stay as they are
    once: bool = False  # measure what is there, and end
    evict: int | None = None  # delete the folders of measured checkpoints, all but the newest so many
    page: bool = True
    figures: bool = False
    capture: CaptureOptions = field(default_factory=CaptureOptions)


class SeriesWatcher:
    """Measures the checkpoints of a series as they appear, into one results folder."""

    def __init__(
        self,
        settings: dict[str, Any],
        folder: Path,
        out: Path | str | None = None,
        how: WatchSettings = WatchSettings(),  # noqa: B008 - frozen
        events: Events | None = None,
        command: str = "watch",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings, self._home, self._how = settings, folder, how
        self._events, self._command, self._sleep = events or Events(), command, sleep
        self._series = folder_series(series_in(settings))
        study = _template(settings, self._series, folder)
        self.out = as_path(out, "the results folder") if out is not None else Path("results") / study.study
        for each in (self.out, moments_folder(self.out)):
            require_writable(each)
        refuse_links(self.out)
        self._failed: dict[str, FolderState] = {}  # as they were when they could not be measured
        self._incomplete: dict[str, str] = {}  # what is missing in checkpoints, as it was noted last
        self._kept: dict[str, str] = {}  # why checkpoints were not deleted, as it was noted last
        self._up_to_date = False  # whether this watch has written tables and page

    def go(self) -> None:
        """Measure what appears until somebody stops it; with `once`, only what is there now."""
        self._events.noted(f"{counted(len(self.measured()), 'checkpoint')} measured so far in {self.out}")
        while True:
            self.measure_new()
            if self._how.once:
                return
            self._sleep(self._how.every)

    def measure_new(self) -> list[str]:
        """Measure what has come; returns the names of checkpoints that were added or, with `overwrite`, replaced."""
        records, (complete, incomplete) = self._records(), find_arrivals(self._series, self._home)
        self._note_incomplete(incomplete)
        done = [each for each in complete if self._is_measured(each, records.get(each.name))]
        new = [each for each in complete if each not in done and self._failed.get(each.name) != each.state]
        if new:
            self._sleep(self._how.settle)
        ready = [each for each in new if each.is_unchanged]
        self._require_same_run([each for each in ready if each.name in records], complete, records)
        added = [each for each in ready if self._measure(each)]
        checkpoints = self.measured(records) | {each.name: each.settings for each in added}
        if checkpoints and (added or not self._up_to_date):
            self._write(checkpoints)
            self._up_to_date = True
        if self._how.evict is not None:
            self._evict([*done, *added], complete, self._how.evict)
        return [each.name for each in added]

    def measured(self, records: Mapping[str, CheckpointRecord] | None = None) -> dict[str, dict[str, Any]]:
        """The checkpoints whose moments are in the results folder, as a study would name them."""
        checkpoints = {}
        for name, record in (self._records() if records is None else records).items():
            stated = {key: getattr(record, field) for field, key in STATED.items()}
            checkpoints[name] = {"name": name, **{key: value for key, value in stated.items() if value is not None}}
        return checkpoints

    def _records(self) -> dict[str, CheckpointRecord]:
        """What the moments in the results folder were measured from."""
        records = {}
        for entry in entries(moments_folder(self.out)):
            name = entry.name.removesuffix(MOMENTS_SUFFIX)
            if entry.name.endswith(MOMENTS_SUFFIX) and entry.name[0] != ".":
                try:
                    records[name] = CheckpointRecord.read(read_provenance(moments_path(self.out, name)))
                except MomentsFileError as error:
                    self._events.noted(f"{error}; it is left out of the tables")
        return records

    def _is_measured(self, arrival: Arrival, record: CheckpointRecord | None) -> bool:
        """Whether moments of this name were measured from these weights; reads weights only if files changed."""
        if record is None:
            return False
        try:
            unchanged = weights_file_state(self._source(arrival)) == (record.weights_file_state or "")
            return unchanged or self._weights(arrival) == (record.weights or "")
        except (ModelError, OSError):
            return False

    def _weights(self, arrival: Arrival, *, fresh: bool = False) -> str | None:
        from qkscope.capture.hub import pin_revision  # an adapter's base model may be on the Hub

        return weights_fingerprint(pin_revision(self._source(arrival), "config.json"), fresh=fresh)

    def _source(self, arrival: Arrival) -> ModelSource:
        (checkpoint,) = self._study_of([arrival.settings]).study.resolved_checkpoints()
        return model_source(checkpoint, self._home, self._how.capture.trust_remote_code)

    def _require_same_run(
        self, replaced: list[Arrival], complete: list[Arrival], records: Mapping[str, CheckpointRecord]
    ) -> None:
        """Refuse checkpoints whose weights are not those that their moments were measured from, unless overwriting."""
        if not replaced:
            return
        if not self._how.capture.overwrite:
            lines = [
                f"{each.place} holds other weights than {moments_path(self.out, each.name)} was measured from"
                for each in replaced
            ]
            raise InputError(
                "\n  ".join([*lines, "was training restarted under the same names? Nothing was measured or deleted"])
            ).advised(
                python="choose another `out` to keep both, or CaptureOptions(overwrite=True) to measure again",
                command="give another --out to keep both, or --overwrite to measure again and replace the old moments",
            )
        absent = sorted(set(records) - {each.name for each in complete})
        kept = f"; rows of {', '.join(absent)} stay, though their folders are gone" if absent else ""
        self._events.noted(
            f"{', '.join(each.name for each in replaced)}: weights changed since they were measured; measuring again"
            f"{kept}"
        )

    def _measure(self, arrival: Arrival) -> bool:
        """Write the moments of one checkpoint; False, with a note, where it could not be measured."""
        file = self._study_of([arrival.settings])
        options = replace(self._how.capture, evict=False, only=())
        try:
            plan = make_plan(file, self._events, trust_remote_code=options.trust_remote_code, results=self.out)
            self._require_comparable(plan)
            self._events.planned(plan)
            capture_plan(plan, self.out, self._events, options, joining=True)
        except (*BAD_CHECKPOINT, OSError) as error:
            self._give_up(arrival, error)
            return False
        add_to_plan(plan, self.out)
        return True

    def _give_up(self, arrival: Arrival, error: Exception) -> None:
        if arrival.is_gone:
            self._events.noted(f"{arrival.name} was deleted before it was measured")
            return
        self._failed[arrival.name] = arrival.state
        self.out.mkdir(parents=True, exist_ok=True)
        leave_out(self.out, arrival.name, str(error))
        self._events.noted(f"{arrival.name} cannot be measured, and is left out: {error}")

    def _require_comparable(self, plan: Plan) -> None:
        """Refuse a plan with other documents or settings than earlier ones; note a checkpoint with equal weights."""
        own, now = plan.checkpoints[0].checkpoint.name, plan.checkpoints[0].settings()
        for name, record in self._records().items():
            if name == own and self._how.capture.overwrite:
                continue
            stored = record.settings or {}
            if name != own and stored.get("model") == now["model"]:
                self._events.noted(f"{own} has the same weights as {name}: their rows will be identical")
            changes = changed_settings(stored, now)
            changed = [words for key, words in changes.items() if key not in ("model", *ROUNDING)]
            if changed:
                raise InputError(
                    f"{self.out} holds checkpoint {name!r}, which was measured with {', '.join(changed)}: the results "
                    "cannot be compared"
                ).advised(python="choose another `out`", command="give another --out, or the settings it was made with")

    def _write(self, checkpoints: dict[str, dict[str, Any]]) -> None:
        """Study, tables and page of all that is measured."""
        listed = sorted(checkpoints.values(), key=_order)
        make_labels_differ(listed, range(len(listed)))
        with located(str(results_file(self.out, STUDY_YAML))):
            study = self._study_of(listed).study
        write_text(results_file(self.out, STUDY_YAML), study_text(study, ABOUT))
        with lock_folder(self.out):
            analyze_study(self.out, study, self._events, self._command, page_follows=self._how.page)
        if self._how.page or self._how.figures:
            for path in write_report(self.out, figures=self._how.figures, page=self._how.page)[-1:]:
                self._events.wrote(str(path))

    def _study_of(self, checkpoints: list[dict[str, Any]]) -> StudyFile:
        return study_of({**self._settings, "checkpoints": checkpoints}, self._home)

    def _note_incomplete(self, incomplete: dict[str, str]) -> None:
        for name, why in incomplete.items():
            if self._incomplete.get(name) != why:
                self._events.noted(f"waiting for {name}: {why}")
        self._incomplete = incomplete

    def _evict(self, done: list[Arrival], complete: list[Arrival], keep: int) -> None:
        """Delete what is measured, but never the newest of a run, measured or not: a training may resume from them."""
        runs: dict[Any, list[str]] = {}
        for each in complete:
            runs.setdefault(each.settings.get("run"), []).append(each.name)
        newest = {name for names in runs.values() for name in names[-max(1, keep) :]}
        for arrival in (each for each in done if each.name not in newest):
            why = self._why_kept(arrival)
            try:
                freed = 0 if why else delete_checkpoint(arrival)
            except OSError as error:
                freed, why = 0, f"it cannot be deleted ({error.strerror or error})"
            if freed:
                self._events.noted(f"deleted {arrival.place} ({freed / 1e6:,.0f} MB): its moments are safe")
            elif why and self._kept.get(arrival.name) != why:
                self._events.noted(f"kept {arrival.place}: {why}")
                self._kept[arrival.name] = why

    def _why_kept(self, arrival: Arrival) -> str | None:
        """Why a checkpoint must not be deleted; its moments and its weights are read again to find out."""
        link, moments = symlink_of(arrival), moments_path(self.out, arrival.name)
        if link is not None:
            return f"{link} is a symbolic link; delete it yourself if you no longer need what it points to"
        try:
            measured = CheckpointRecord.read(Moments.load(moments).provenance)
            if measured.weights is None or self._weights(arrival, fresh=True) != measured.weights:
                return f"{moments} was not measured from these weights"
            # The fingerprint samples large files, so a few changed tensors could escape it.
            if weights_file_state(self._source(arrival)) != (measured.weights_file_state or ""):
                return f"its files are not the ones that {moments} was measured from, but saved or copied again since"
        except (InputError, OSError) as error:
            return f"its weights cannot be compared with its moments ({error})"
        return None


def _order(checkpoint: dict[str, Any]) -> tuple[Any, ...]:
    run = str(checkpoint.get("run") or "")
    return numbers_in(run), run, numbers_in(checkpoint["name"]), checkpoint["name"]


def _template(settings: dict[str, Any], series: list[Any], folder: Path) -> Study:
    """The study as it would be with a checkpoint of each series: whatever is wrong with it is refused now."""
    made = [
        {**shared_settings(each), "name": f"checkpoint-{k}", "model": "checkpoint"} for k, each in enumerate(series)
    ]
    study = study_of({**settings, "checkpoints": made, "axis": "entries"}, folder).study
    contexts = {checkpoint.context for checkpoint in study.resolved_checkpoints()}
    if len(contexts) > 1:
        raise InputError(f"a watch has one context for all checkpoints, not {sorted(map(str, contexts))}")
    return study
