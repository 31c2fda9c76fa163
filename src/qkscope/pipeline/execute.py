"""Run a plan: each checkpoint's moments to disk, then the tables from the moments."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qkscope.documents.tokens import batches, group_of
from qkscope.errors import MomentsFileError, located
from qkscope.moments.moments import Moments
from qkscope.pipeline.events import Events, Silent
from qkscope.pipeline.plan import CheckpointPlan, Plan, make_plan
from qkscope.pipeline.tables import STUDY_YAML, analyze_study, moments_path
from qkscope.study.load import StudyFile, load_study


def run_study(
    study: StudyFile | Path | str,
    out: Path | str | None = None,
    events: Events | None = None,
    command: str = "run_study",
    evict: bool = False,
) -> Path:
    """Capture and analyze a whole study; returns the results folder.

    With `evict`, a checkpoint's files leave the Hub cache once its moments are safe.
    """
    reports = events or Silent()
    file = study if isinstance(study, StudyFile) else load_study(study)
    folder = Path(out) if out is not None else Path("results") / file.study.study
    plan = make_plan(file, reports.surveying)
    reports.planned(plan)
    capture_plan(plan, folder, reports, evict=evict)
    return analyze_study(folder, file.study, reports, command)


def capture_plan(plan: Plan, folder: Path, events: Events, only: Sequence[str] = (), evict: bool = False) -> None:
    """Write the moments of every checkpoint (or `only` some) that are not there yet."""
    _keep_study(plan, folder)
    chosen = [each for each in plan.checkpoints if not only or each.checkpoint.name in only]
    for number, each in enumerate(chosen, start=1):
        with located(f"checkpoint {each.checkpoint.name!r}"):
            capture_checkpoint(each, folder, events)
            # Two checkpoints may share one commit (with other contexts): its files stay until the last is done.
            if evict and all(later.source != each.source for later in chosen[number:]):
                _evict(each, events)


def _evict(plan: CheckpointPlan, events: Events) -> None:
    from qkscope.capture.hub import evict

    freed = evict(plan.source, plan.commit)
    if freed:
        events.evicted(plan, freed)


def capture_checkpoint(plan: CheckpointPlan, folder: Path, events: Events) -> None:
    """One checkpoint's moments, unless a file with the same fingerprint is already there."""
    path = moments_path(folder, plan.checkpoint.name)
    if _still_holds(path, plan, events):
        events.reused(plan)
        return
    events.started(plan)
    begun = time.perf_counter()
    moments = _collect(plan, events)
    seconds = time.perf_counter() - begun
    moments.provenance["seconds"] = round(seconds, 3)
    moments.save(path)
    events.finished(plan, seconds)


def _collect(plan: CheckpointPlan, events: Events) -> Any:
    from qkscope.capture.load import load_backbone
    from qkscope.capture.probe import probe_model
    from qkscope.moments.collect import Batch, collect_moments, make_batch
    from qkscope.pipeline.provenance import checkpoint_provenance

    study = plan.study
    model = load_backbone(plan.source, plan.config, dtype=study.dtype, device=study.device)
    probe = probe_model(model)

    def token_batches() -> Iterator[Batch]:
        windows = plan.corpus.windows(plan.tokenizer, plan.context, plan.documents)
        for batch in batches(windows, plan.context, study.batch_tokens, study.groups):
            groups = [group_of(window.index, study.groups) for window in batch]
            yield make_batch([window.ids for window in batch], groups, [window.name for window in batch])

    return collect_moments(
        model,
        token_batches(),
        plan.layout,
        probe=probe,
        provenance=checkpoint_provenance(plan, probe, model),
        done=lambda batch: events.advanced(len(batch.names), batch.tokens),
    )


def _still_holds(path: Path, plan: CheckpointPlan, events: Events) -> bool:
    """Whether the file is whole (its checksum is checked) and made from what the plan would make it from."""
    if not path.exists():
        return False
    try:
        made_from = Moments.load(path).provenance.get("fingerprint")
    except MomentsFileError as error:
        events.replacing(plan, f"{error}")
        return False
    if made_from != plan.fingerprint():
        events.replacing(plan, "its moments were made from other weights, documents or settings")
        return False
    return True


def _keep_study(plan: Plan, folder: Path) -> None:
    """Put the study file beside its results, so that they can be analyzed again without it."""
    folder.mkdir(parents=True, exist_ok=True)
    original, kept = plan.file.path, folder / STUDY_YAML
    if original is not None and original.resolve() != kept.resolve():
        shutil.copyfile(original, kept)
