"""Run a plan: each checkpoint's moments to disk, then the tables from the moments."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qkscope.errors import located
from qkscope.pipeline.checkpoint import VectorSample, capture_checkpoint
from qkscope.pipeline.events import Events
from qkscope.pipeline.lock import only_run
from qkscope.pipeline.plan import CheckpointPlan, Plan, make_plan
from qkscope.pipeline.tables import STUDY_YAML, analyze_study
from qkscope.study.load import StudyFile, load_study


@dataclass(frozen=True)
class CaptureOptions:
    """What a capture does beside summing."""

    only: Sequence[str] = ()  # names of checkpoints; all by default
    evict: bool = False  # delete a checkpoint's files from the Hub cache once its moments are safe
    trust_remote_code: bool = False  # let Python code that lies with a checkpoint run
    vectors: VectorSample | None = None  # keep a sample of raw vectors in the predecessor's layout


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
    folder = Path(out) if out is not None else Path("results") / file.study.study
    plan = make_plan(file, reports.surveying, trust_remote_code=options.trust_remote_code)
    reports.planned(plan)
    capture_plan(plan, folder, reports, options)
    return analyze_study(folder, file.study, reports, command)


def capture_plan(
    plan: Plan,
    folder: Path,
    events: Events,
    options: CaptureOptions = CaptureOptions(),  # noqa: B008 - frozen
) -> None:
    """Write the moments of every checkpoint that are not there yet."""
    chosen = [each for each in plan.checkpoints if not options.only or each.checkpoint.name in options.only]
    with only_run(folder):
        _keep_study(plan, folder)
        for number, each in enumerate(chosen, start=1):
            with located(f"checkpoint {each.checkpoint.name!r}"):
                capture_checkpoint(each, folder, events, options.vectors)
                # Two checkpoints may share one commit (with other contexts): its files stay until the last is done.
                if options.evict and all(later.source != each.source for later in chosen[number:]):
                    _evict(each, events)


def _evict(plan: CheckpointPlan, events: Events) -> None:
    from qkscope.capture.hub import evict

    freed = evict(plan.source, plan.commit)
    if freed:
        events.evicted(plan, freed)


def _keep_study(plan: Plan, folder: Path) -> None:
    """Put the study file beside its results, so that they can be analyzed again without it."""
    folder.mkdir(parents=True, exist_ok=True)
    original, kept = plan.file.path, folder / STUDY_YAML
    if original is not None and original.resolve() != kept.resolve():
        shutil.copyfile(original, kept)
