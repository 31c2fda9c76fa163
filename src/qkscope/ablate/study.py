"""An ablation from a study file to `ablation.csv`, on any engine; ablations of one folder stand beside each other."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from qkscope.ablate.edits import KINDS
from qkscope.ablate.kept import left, read_part
from qkscope.ablate.tables import (
    ablation_table,
    course_table,
    document_rows,
    groups_table,
    heads_table,
    join_ablations,
    kernel_spreads,
)
from qkscope.ablate.work import AblationSettings, CheckpointAblation, known_heads, plan_ablation
from qkscope.ablate.worker import AblationWorker
from qkscope.errors import InputError, QkscopeError
from qkscope.files import write_text
from qkscope.foreign import Missing, Unreadable, parse_json, read_bytes
from qkscope.lenses.ablation.table import COURSE_FILE, COURSE_KEY, GROUPS_FILE, GROUPS_KEY
from qkscope.lenses.ablation.table import FILE as HEADS
from qkscope.results.csv_files import write_csv
from qkscope.results.environment import environment
from qkscope.results.folder import ABLATION_CSV, ABLATION_JSON, head_table_path, results_file
from qkscope.results.lock import only_run
from qkscope.results.remove import remove_head_table, remove_other_ablations
from qkscope.run.engines import find_engine
from qkscope.run.engines.base import Finished, Job, Noted, Placement, Report, Task
from qkscope.run.events import Events
from qkscope.run.execute import results_folder
from qkscope.run.plan import Plan, make_plan, with_tokens_kept
from qkscope.run.stopping import Stopped, stoppable
from qkscope.study.load import StudyFile, load_study
from qkscope.text import counted

MAX_RECORD = 64 * 2**20  # bytes of ablation.json
LINE_SECONDS = 10.0  # between two lines about progress


@dataclass(frozen=True)
class AblationOptions:
    """Where an ablation runs, and what becomes of earlier ones of the same folder."""

    engine: str = "local"
    placement: Placement = Placement()  # noqa: RUF009 - frozen
    replace: bool = False  # earlier ablations leave the tables
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Request:
    """One ablation that the tables hold."""

    settings: AblationSettings
    command: str
    works: list[CheckpointAblation]


def prepare_ablation(
    study: StudyFile | Path | str,
    out: Path | str | None = None,
    settings: AblationSettings = AblationSettings(),  # noqa: B008 - frozen
    events: Events | None = None,
    options: AblationOptions = AblationOptions(),  # noqa: B008 - frozen
) -> tuple[Path, list[CheckpointAblation]]:
    """The results folder and the work at each checkpoint; nothing is loaded yet."""
    folder, plan = _planned(study, out, events or Events(), options)
    return folder, plan_ablation(plan, folder, settings, known_heads(folder, ablated=not options.replace))


def ablate_study(
    study: StudyFile | Path | str,
    out: Path | str | None = None,
    settings: AblationSettings = AblationSettings(),  # noqa: B008 - frozen
    events: Events | None = None,
    command: str = "ablate_study",
    options: AblationOptions = AblationOptions(),  # noqa: B008 - frozen
) -> Path:
    """Edit heads of a study's checkpoints and write `ablation.csv` into its results folder; returns the folder.

    What earlier ablations of the folder measured stays in the tables, unless `options.replace`.
    """
    events = events or Events()
    folder, plan = _planned(study, out, events, options)
    heads = known_heads(folder, ablated=not options.replace)
    now = Request(settings, command, plan_ablation(plan, folder, settings, heads))
    with only_run(folder):
        _run(now.works, folder, events, options)
        before = [] if options.replace else _earlier(plan, folder, settings, heads, events)
        _write([*before, now], plan, folder)
        if options.replace:
            _forget_others(now.works, plan, folder)
    for name in (ABLATION_CSV, ABLATION_JSON):
        events.wrote(str(results_file(folder, name)))
    return folder


def _planned(
    study: StudyFile | Path | str, out: Path | str | None, events: Events, options: AblationOptions
) -> tuple[Path, Plan]:
    find_engine(options.engine)  # refuses an unknown one before anything is read
    file = study if isinstance(study, StudyFile) else load_study(study)
    folder = results_folder(file, out)
    here = options.engine == "local"
    plan = make_plan(file, events, here=here, trust_remote_code=options.trust_remote_code, results=folder)
    return folder, with_tokens_kept(plan, folder)


# -- running -----------------------------------------------------------------------------------------------


def _run(works: Sequence[CheckpointAblation], folder: Path, events: Events, options: AblationOptions) -> None:
    """Hand the shards that are missing to an engine."""
    missing = [left(folder, work) for work in works]
    tasks = [Task(i, work.name, (shard,)) for i, work in enumerate(works) for shard in missing[i]]
    for work in works:
        events.noted(
            f"{work.name}: {counted(len(work.units), 'unit')}, at most {counted(work.passes, 'pass', 'passes')}"
        )
    if not tasks:
        return
    progress = _Progress(works, [len(shards) for shards in missing], events)
    with stoppable(progress.stopping) as stop:
        job = Job(works, tasks, folder, AblationWorker, options.placement)
        find_engine(options.engine).run(job, progress.on_report, stop)
        if stop.asked and progress.left:
            raise Stopped(f"stopped; {progress.text()}: run the same command to resume")


class _Progress:
    """Lines about how far an ablation is."""

    def __init__(self, works: Sequence[CheckpointAblation], missing: Sequence[int], events: Events) -> None:
        self._works, self._missing, self._events = works, list(missing), events
        self._all = sum(len(work.shards) for work in works)
        self.left = self._first = sum(missing)
        self._begun = self._said = time.monotonic()

    def on_report(self, report: Report) -> None:
        """Something happened in a worker."""
        if isinstance(report, Noted):
            self._events.noted(report.message)
        elif isinstance(report, Finished):
            self.left -= 1
            self._missing[report.checkpoint] -= 1
            now, work = time.monotonic(), self._works[report.checkpoint]
            if now - self._said >= LINE_SECONDS or not self._missing[report.checkpoint]:
                self._said = now
                self._events.noted(f"{work.name}: {self.text()}{self._ahead(now)}")

    def _ahead(self, now: float) -> str:
        """How long the rest will take, if there is a rest."""
        if not self.left:
            return ""
        seconds = (now - self._begun) / (self._first - self.left) * self.left
        return f", about {max(1, round(seconds / 60))} min left"

    def text(self) -> str:
        """How many shards are done."""
        return f"{self._all - self.left} of {counted(self._all, 'shard')} done"

    def stopping(self) -> None:
        """Said at the first Ctrl-C."""
        self._events.noted(f"stopping when the shard in flight is finished ({self.text()}); Ctrl-C again stops at once")


# -- earlier ablations -------------------------------------------------------------------------------------


def _earlier(
    plan: Plan, folder: Path, settings: AblationSettings, heads: pd.DataFrame, events: Events
) -> list[Request]:
    """Other ablations that the folder's record names and whose outcomes are all there still."""
    requests = []
    for stored in _recorded(folder):
        try:
            theirs = AblationSettings.from_json(stored.get("settings"))
            command = str(stored.get("command"))[:1000]
            works = [] if theirs == settings else plan_ablation(plan, folder, theirs, heads)
        except (QkscopeError, ValueError, TypeError) as error:
            events.noted(f"removed an earlier ablation from {ABLATION_CSV}: {str(error)[:200]}")
            continue
        if not works:
            continue
        if all(read_part(folder, work, shard) for work in works for shard in work.shards):
            requests.append(Request(theirs, command, works))
        else:
            events.noted(
                f"removed an earlier ablation ({theirs.heads.label}: {', '.join(theirs.edits)}) from {ABLATION_CSV}: "
                "moments, tables or versions have changed since; run it again"
            )
    return requests


def _recorded(folder: Path) -> list[dict[str, Any]]:
    try:
        stored = parse_json(read_bytes(results_file(folder, ABLATION_JSON), MAX_RECORD)).get("requests")
    except Missing:
        return []
    except Unreadable as error:
        raise InputError(f"{results_file(folder, ABLATION_JSON)}: {error}; remove it, or give --replace") from None
    return [each for each in stored if isinstance(each, dict)] if isinstance(stored, list) else []


# -- tables ------------------------------------------------------------------------------------------------


def _write(requests: Sequence[Request], plan: Plan, folder: Path) -> None:
    rows = [document_rows(request.works, folder) for request in requests]
    context = {each.checkpoint.name: each.context for each in plan.checkpoints}
    table = join_ablations([ablation_table(each) for each in rows], list(context))
    write_csv(table, results_file(folder, ABLATION_CSV))
    for file, make, key in ((GROUPS_FILE, groups_table, GROUPS_KEY), (COURSE_FILE, course_table, COURSE_KEY)):
        part = join_ablations([make(each) for each in rows], list(context), key)
        _write_or_remove(None if part.empty else part, folder, file)
    _write_or_remove(heads_table(table, context, _spreads(requests, folder)), folder, f"{HEADS}.csv")
    write_text(results_file(folder, ABLATION_JSON), json.dumps(_record(requests), indent=1) + "\n")


def _forget_others(works: Sequence[CheckpointAblation], plan: Plan, folder: Path) -> None:
    """Remove outcomes of all other ablations; until somebody asks for that, one that was stopped can go on."""
    for name in (each.checkpoint.name for each in plan.checkpoints):
        keys = {work.fingerprint(shard) for work in works if work.name == name for shard in work.shards}
        remove_other_ablations(folder, name, keys)


def _write_or_remove(table: pd.DataFrame | None, folder: Path, file: str) -> None:
    if table is None:
        remove_head_table(folder, file)
    else:
        write_csv(table, head_table_path(folder, file))


def _spreads(requests: Sequence[Request], folder: Path) -> dict[tuple[str, int, int], float]:
    spreads: dict[tuple[str, int, int], float] = {}
    for work in (work for request in requests for work in request.works):
        heads = [unit.heads[0] for unit in work.units if unit.role == "head"]
        if heads:
            spreads |= kernel_spreads(folder, work, heads)
    return spreads


def _record(requests: Sequence[Request]) -> dict[str, Any]:
    """What `ablation.json` says: every ablation that the tables hold, and what made them."""
    edits = sorted({edit for request in requests for edit in request.settings.edits})
    return {
        "requests": [
            {
                "command": request.command,
                "settings": asdict(request.settings),
                "checkpoints": [
                    {
                        "name": work.name,
                        "moments": work.plan.fingerprint(),
                        "tokens": work.tokens,
                        "documents": list(work.documents),
                        "units": {unit.name: [list(head) for head in unit.heads] for unit in work.units},
                    }
                    for work in request.works
                ],
            }
            for request in requests
        ],
        "edits": {name: KINDS[name].definition for name in edits},
        "environment": environment(),
    }
