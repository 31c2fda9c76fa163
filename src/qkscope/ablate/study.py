"""From a study file to `ablation.csv`, on any engine, or from a model in memory to tables; see `ablate_windows`.

All ablations of a results folder share its tables.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import TypeAdapter

from qkscope.ablate.edits import kernel_spreads
from qkscope.ablate.measure import AblatedText, EditSource, Measurer
from qkscope.ablate.tables import (
    OWN,
    ablation_table,
    course_table,
    document_rows,
    groups_table,
    heads_table,
    join_ablations,
    outcome_records,
    unit_doses,
)
from qkscope.ablate.work import (
    AblationSettings,
    AblationShard,
    CheckpointAblation,
    heads_of,
    plan_ablation,
    units_of,
)
from qkscope.errors import InputError, QkscopeError, located
from qkscope.files import write_text
from qkscope.foreign import Missing, Unreadable, parse_json, read_bytes
from qkscope.lenses.ablation import COURSE_FILE, COURSE_KEY, EDITS, GROUPS_FILE, GROUPS_KEY
from qkscope.lenses.ablation import FILE as HEADS
from qkscope.lenses.registry import registered
from qkscope.lenses.views import build_tables
from qkscope.moments.moments import Moments
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import ABLATION_CSV, ABLATION_JSON, head_table_path, moments_path, results_file
from qkscope.results.lock import lock_folder
from qkscope.results.provenance import environment
from qkscope.results.read import load_results
from qkscope.results.remove import remove_head_table, remove_other_ablations
from qkscope.run.engines import Advanced, CaptureOptions, Finished, Job, Noted, Placement, Report, Task, find_engine
from qkscope.run.execute import results_folder
from qkscope.run.plan import Plan, make_plan, with_tokens_kept
from qkscope.run.progress import Events
from qkscope.run.stopping import Stopped, stoppable
from qkscope.study.load import StudyFile, load_study
from qkscope.text import counted

MAX_RECORD = 64 * 2**20  # bytes of ablation.json
LINE_SECONDS = 10.0  # between two lines about progress
MODEL = "model"  # the name of a model in memory in the tables' first column
SETTINGS = TypeAdapter(AblationSettings)


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
    ablations: list[CheckpointAblation]


def prepare_ablation(
    study: StudyFile | Path | str,
    out: Path | str | None = None,
    settings: AblationSettings = AblationSettings(),  # noqa: B008 - frozen
    events: Events | None = None,
    options: AblationOptions = AblationOptions(),  # noqa: B008 - frozen
) -> list[CheckpointAblation]:
    """The work at each checkpoint; nothing is loaded yet."""
    folder, plan, heads = _planned(study, out, events or Events(), options)
    return plan_ablation(plan, folder, settings, heads)


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
    folder, plan, heads = _planned(study, out, events, options)
    request = Request(settings, command, plan_ablation(plan, folder, settings, heads))
    with lock_folder(folder):
        _run(request.ablations, folder, events, options)
        earlier = [] if options.replace else _earlier(plan, folder, settings, heads, events)
        _write([*earlier, request], plan, folder)
        if options.replace:  # until somebody asks for that, another ablation that was stopped can be resumed
            for name in (each.checkpoint.name for each in plan.checkpoints):
                here = [each for each in request.ablations if each.name == name]
                keys = {each.fingerprint(shard) for each in here for shard in each.shards}
                remove_other_ablations(folder, name, keys)
    for name in (ABLATION_CSV, ABLATION_JSON):
        events.wrote(str(results_file(folder, name)))
    return folder


def _planned(
    study: StudyFile | Path | str, out: Path | str | None, events: Events, options: AblationOptions
) -> tuple[Path, Plan, pd.DataFrame]:
    """The results folder, its plan, and the columns of heads.csv from which a request chooses."""
    find_engine(options.engine)  # refuses an unknown one before anything is read
    file = study if isinstance(study, StudyFile) else load_study(study)
    folder = results_folder(file, out)
    here = options.engine == "local"
    plan = make_plan(file, events, here=here, trust_remote_code=options.trust_remote_code, results=folder)
    plan = with_tokens_kept(plan, folder)
    lenses = [lens for lens in registered() if not options.replace or lens.name != "ablation"]
    return folder, plan, build_tables(load_results(folder), lenses).own.heads


# -- running -----------------------------------------------------------------------------------------------


def _run(ablations: Sequence[CheckpointAblation], folder: Path, events: Events, options: AblationOptions) -> None:
    """Hand the shards that are missing to an engine."""
    missing = [each.missing_shards(folder) for each in ablations]
    tasks = [Task(i, each.name, (shard,)) for i, each in enumerate(ablations) for shard in missing[i]]
    for each in ablations:
        events.noted(
            f"{each.name}: {counted(len(each.units), 'unit')}, at most {counted(each.passes, 'pass', 'passes')}"
        )
    if not tasks:
        return
    progress = _Progress(ablations, [len(shards) for shards in missing], events)
    with stoppable(progress.on_stop) as stop:
        job = Job(ablations, tasks, folder, AblationWorker, CaptureOptions(placement=options.placement))
        find_engine(options.engine).run(job, progress.on_report, stop)
        if stop.asked and progress.left:
            raise Stopped(f"stopped; {progress.text()}: run the same command to resume")


class _Progress:
    """Lines about how far an ablation is."""

    def __init__(self, ablations: Sequence[CheckpointAblation], missing: list[int], events: Events) -> None:
        self._ablations, self._missing, self._events = ablations, missing, events
        self._all = sum(len(each.shards) for each in ablations)
        self.left = self._first = sum(missing)
        self._begun = self._last_line = time.monotonic()

    def on_report(self, report: Report) -> None:
        """Something happened in a worker."""
        if isinstance(report, Noted):
            self._events.noted(report.message)
        elif isinstance(report, Finished):
            self.left -= 1
            self._missing[report.checkpoint] -= 1
            now = time.monotonic()
            if now - self._last_line >= LINE_SECONDS or not self._missing[report.checkpoint]:
                self._last_line = now
                seconds = (now - self._begun) / (self._first - self.left) * self.left
                ahead = f", about {max(1, round(seconds / 60))} min left" if self.left else ""
                self._events.noted(f"{self._ablations[report.checkpoint].name}: {self.text()}{ahead}")

    def text(self) -> str:
        """How many shards are done."""
        return f"{self._all - self.left} of {counted(self._all, 'shard')} done"

    def on_stop(self) -> None:
        """The first Ctrl-C."""
        self._events.noted(f"stopping when the shard in flight is finished ({self.text()}); Ctrl-C again stops at once")


class AblationWorker:
    """A worker of any engine: runs shards one after the other; a checkpoint stays loaded until one of another comes."""

    def __init__(
        self,
        ablations: Sequence[CheckpointAblation],
        folder: Path,
        on_report: Callable[[Report], None],
        *,
        options: CaptureOptions,  # of a capture: none changes an ablation
        shared: bool = True,
    ) -> None:
        self._ablations, self._folder, self._on_report, self._shared = ablations, folder, on_report, shared
        self._loaded: int | None = None
        self._measurer: Measurer | None = None
        self._open = ExitStack()

    def run(self, task: Task, following: int | None = None) -> None:
        """Run all shards of the task."""
        if not self._shared:
            raise InputError(
                "an ablation needs a results folder that every worker sees, for its moments; this one does not"
            )
        ablation = self._ablations[task.checkpoint]
        with located(f"checkpoint {task.name!r}"):
            measurer = self._load(task.checkpoint)
            for shard in task.shards:
                assert isinstance(shard, AblationShard)
                rows = measurer.measure(_text(ablation, shard), shard.edit, shard.units)
                ablation.write_outcomes(self._folder, shard, rows)
                self._on_report(Advanced(task.checkpoint, 0, len(shard.units) * ablation.variants * ablation.tokens))
                self._on_report(Finished(task.checkpoint, shard.number))

    def close(self) -> None:
        """Take all hooks off the model and release it."""
        self._open.close()
        self._measurer = self._loaded = None
        gc.collect()  # before the next one comes

    def _load(self, checkpoint: int) -> Measurer:
        from qkscope.ablate.passes import EditableModel
        from qkscope.capture.load import load_backbone

        if self._measurer is None or self._loaded != checkpoint:
            self.close()
            ablation = self._ablations[checkpoint]
            plan, study = ablation.plan, ablation.plan.study
            moments = Moments.load(moments_path(self._folder, ablation.name))
            model = load_backbone(plan.source, plan.config, dtype=study.dtype, device=study.device, head=True)
            source = EditSource(moments, ablation.tokens, ablation.settings.seed)
            editable = self._open.enter_context(EditableModel(model))
            self._measurer = Measurer(editable, source, ablation.settings, plan.tokenizer)
            self._loaded = checkpoint
        return self._measurer


def _text(ablation: CheckpointAblation, shard: AblationShard) -> AblatedText:
    plan, (document,) = ablation.plan, shard.documents
    (window,) = plan.corpus.windows(plan.tokenizer, plan.context, [document])
    ids = np.asarray(window.ids[: ablation.tokens], dtype=np.int64)
    return AblatedText(document, document % plan.layout.groups, ids)


# -- earlier ablations -------------------------------------------------------------------------------------


def _earlier(
    plan: Plan, folder: Path, settings: AblationSettings, heads: pd.DataFrame, events: Events
) -> list[Request]:
    """Other ablations that the folder's record names and whose outcomes are all there still."""
    requests = []
    for stored in _recorded(folder):
        try:
            theirs = SETTINGS.validate_python(stored.get("settings"))
            ablations = [] if theirs == settings else plan_ablation(plan, folder, theirs, heads)
        except (QkscopeError, ValueError) as error:
            events.noted(f"removed an earlier ablation from {ABLATION_CSV}: {' '.join(str(error).split())[:200]}")
            continue
        if any(each.missing_shards(folder) for each in ablations):
            events.noted(
                f"removed an earlier ablation ({theirs.heads.label}: {', '.join(theirs.edits)}) from {ABLATION_CSV}: "
                "moments, tables or versions have changed since; run it again"
            )
        elif ablations:
            requests.append(Request(theirs, str(stored.get("command"))[:1000], ablations))
    return requests


def _recorded(folder: Path) -> list[dict[str, Any]]:
    """The requests that `ablation.json` lists."""
    try:
        stored = parse_json(read_bytes(results_file(folder, ABLATION_JSON), MAX_RECORD)).get("requests")
    except Missing:
        return []
    except Unreadable as error:
        raise InputError(f"{results_file(folder, ABLATION_JSON)}: {error}; remove it, or give --replace") from None
    return [each for each in stored if isinstance(each, dict)] if isinstance(stored, list) else []


# -- tables ------------------------------------------------------------------------------------------------


def _write(requests: Sequence[Request], plan: Plan, folder: Path) -> None:
    """The tables of all requests, and `ablation.json`."""
    rows = [document_rows(request.ablations, folder) for request in requests]
    contexts = {each.checkpoint.name: each.context for each in plan.checkpoints}
    table = join_ablations([ablation_table(each) for each in rows], list(contexts))
    spreads, doses = _spreads(requests, folder)
    groups = join_ablations(
        [groups_table(each, doses).assign(windows=OWN) for each in rows], list(contexts), GROUPS_KEY
    )
    course = join_ablations([course_table(each) for each in rows], list(contexts), COURSE_KEY)
    heads = heads_table(table, contexts, spreads)
    write_csv(table, results_file(folder, ABLATION_CSV))
    for file, made in ((GROUPS_FILE, groups), (COURSE_FILE, course), (f"{HEADS}.csv", heads)):
        if made.empty:
            remove_head_table(folder, file)
        else:
            write_csv(made, head_table_path(folder, file))
    write_text(results_file(folder, ABLATION_JSON), json.dumps(_record(requests), indent=1) + "\n")


def _spreads(
    requests: Sequence[Request], folder: Path
) -> tuple[dict[tuple[str, int, int], float], dict[tuple[str, str], float]]:
    """How much the edit `kernel` removes: by (model, layer, head) and by (model, group of heads)."""
    spreads: dict[tuple[str, int, int], float] = {}
    doses: dict[tuple[str, str], float] = {}
    for each in (ablation for request in requests for ablation in request.ablations):
        moments = Moments.load(moments_path(folder, each.name))
        here = kernel_spreads(moments, heads_of(each.units), each.tokens)
        spreads |= {(each.name, *head): spread for head, spread in here.items()}
        doses |= {(each.name, unit): dose for unit, dose in unit_doses(each.units, here).items()}
    return spreads, doses


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
                        "name": each.name,
                        "moments": each.plan.fingerprint(),
                        "tokens": each.tokens,
                        "documents": list(each.documents),
                        "units": {unit.name: [list(head) for head in unit.heads] for unit in each.units},
                    }
                    for each in request.ablations
                ],
            }
            for request in requests
        ],
        "edits": {name: f"takes away {EDITS[name]}" for name in edits},
        "environment": environment(),
    }


# -- in a notebook: a model in memory, nothing on disk ---------------------------------------------------------


@dataclass(frozen=True)
class AblationTables:
    """What an ablation of a model in memory measured."""

    table: pd.DataFrame  # as `ablation.csv`: means over documents with errors
    controls: pd.DataFrame  # as `ablation_groups.csv`; empty unless heads were edited together
    documents: pd.DataFrame  # a row per document, edit, unit and outcome


def ablate_windows(
    model: Any,
    windows: Sequence[Any],
    moments: Moments,
    heads: pd.DataFrame,
    settings: AblationSettings,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> AblationTables:
    """Measure every window (tokens,); `heads` has a row per head with its numbers, from which the settings choose.

    `progress` gets how many passes over a window under an edit are done, and of how many.
    """
    from qkscope.ablate.passes import EditableModel

    everyone = list(zip(heads["layer"].astype(int), heads["head"].astype(int), strict=True))
    together = settings.heads.together
    spreads = kernel_spreads(moments, everyone, moments.layout.context) if together else {}
    units = units_of(settings.heads, heads, spreads)
    source = EditSource(moments, moments.layout.context, settings.seed)
    records: list[dict[str, Any]] = []
    with EditableModel(model) as editable:
        measurer = Measurer(editable, source, settings, tokenizer)
        for document, window in enumerate(windows):
            text = AblatedText(document, document % moments.layout.groups, np.asarray(window, dtype=np.int64))
            for number, edit in enumerate(settings.edits, start=1):
                rows = measurer.measure(text, edit, units)
                records += outcome_records(MODEL, document, edit, units, rows)
                if progress is not None:
                    progress(document * len(settings.edits) + number, len(windows) * len(settings.edits))
    documents = pd.DataFrame(records)
    doses = {(MODEL, name): dose for name, dose in unit_doses(units, spreads).items()}
    return AblationTables(ablation_table(documents), groups_table(documents, doses), documents)
