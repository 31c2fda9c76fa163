"""A results folder that gains a checkpoint for each step that is measured.

Adding a step saves its sums and the numbers that trackers get, nothing else: a killed training loses no measurement.
Tables are made of all steps at once, when the training ends, when there is time for a page, or by `qkscope analyze` on
the folder. A step's rows stay in the folder, so its moments can be removed once they are made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import struct
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qkscope.errors import InputError, QkscopeWarning
from qkscope.files import as_path, remove_file, require_writable, write_text
from qkscope.foreign import Missing, Unreadable, opened, parse_json, read_bytes
from qkscope.kinds import CHECKPOINTS
from qkscope.results.folder import (
    MOMENTS_SUFFIX,
    QK_CSV,
    REPORT_HTML,
    TRAINING_JSON,
    entries,
    moments_folder,
    moments_path,
    parts_path,
    refuse_links,
    results_file,
)
from qkscope.results.lock import lock_folder
from qkscope.results.provenance import CheckpointRecord
from qkscope.results.remove import remove_unfinished
from qkscope.results.schema import HEADS, QK, REPLICATES
from qkscope.run.progress import Events
from qkscope.study.rows import RowSettings
from qkscope.study.schema import Study
from qkscope.tables.workers import TableParts
from qkscope.train.cost import Cost, Seconds

if TYPE_CHECKING:
    import pandas as pd

    from qkscope.moments.moments import Moments
    from qkscope.tables.parts import TablePart

SCHEMA = 3
LARGEST = 256 * 1024 * 1024  # bytes of training.json; 10 000 steps have 30 MB
MOST_WAITING = 4 * 2**30  # bytes of moments whose rows are not made yet
PREFIX = "qkscope/"  # of scalars
START_OVER = "give another folder, or remove this one"
STEP = re.compile(rf"step-(\d{{1,18}}){re.escape(MOMENTS_SUFFIX)}")
END = struct.Struct("<Q8s")  # behind a step's rows: bytes of what describes them, MAGIC
MAGIC = b"qksteps1"


class StepRecord(BaseModel):
    """One step that was measured."""

    model_config = ConfigDict(extra="forbid")

    step: Annotated[int, Field(ge=0, lt=2**63)]
    scalars: dict[str, float]


class TrainingRecord(BaseModel):
    """`training.json`: which steps were measured, and with what."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Annotated[int, Field(alias="schema")] = SCHEMA
    writer: str = ""  # a mark of whoever adds steps now; another's means that two trainings write here
    title: str = "Training"
    keep_moments: bool = False
    settings: dict[str, Any] = {}
    steps: list[StepRecord] = []  # in the order in which they were measured
    seconds: Seconds = Seconds()  # of the whole training run, when its last step was added


class TrainingFolder:
    """A results folder that grows while a model trains: `folder.add(step, moments)`, at the end `folder.write_page()`.

    `components` and `skip_positions` are as in a study. `detail` asks for tables with many rows per head, which grow
    fast; `keep_moments` keeps a moments file of each step, which tables that compare steps need.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        title: str = "Training",
        components: int = 10,
        skip_positions: int = 0,
        detail: bool = False,
        keep_moments: bool = False,
    ) -> None:
        self.path = as_path(folder, "the folder for a training's results")
        self.title, self.components, self.skip_positions = title, components, skip_positions
        self.detail, self.keep_moments = detail, keep_moments
        require_writable(self.path)
        refuse_links(self.path)
        record = _read_record(self.path)
        if record is None and results_file(self.path, QK_CSV).exists():
            raise InputError(f"{self.path} holds the results of something else; {START_OVER}")
        self._record = record or TrainingRecord()
        self._writer = secrets.token_hex(8)
        self._warned = False

    @classmethod
    def reopened(cls, folder: Path) -> TrainingFolder | None:
        """The folder of a training, as it was begun; None where no step was measured."""
        record = _read_record(folder)
        if record is None or not record.steps:
            return None
        options = {name: record.settings.get(name) for name in ("components", "skip_positions", "detail")}
        return cls(folder, title=record.title, keep_moments=record.keep_moments, **options)  # type: ignore[arg-type]

    @property
    def steps(self) -> list[int]:
        """The steps that were measured, in order."""
        return sorted(each.step for each in self._record.steps)

    @property
    def seconds(self) -> Seconds:
        """Where the time of the training run went until the last step was added."""
        return self._record.seconds

    def recorded(self, setting: str) -> Any:
        """What the recorded steps were measured with; None where there are none."""
        return self._record.settings.get(setting) if self._record.steps else None

    def scalars(self, step: int) -> dict[str, float] | None:
        """The numbers of a step for trackers; None where it was not measured."""
        return next((dict(each.scalars) for each in self._record.steps if each.step == step), None)

    def add(self, step: int, moments: Moments, tokens: int | None = None, cost: Cost | None = None) -> dict[str, float]:
        """Save a step's moments; returns its scalars. A recorded step stays as it is.

        `tokens` is the number of tokens the model was trained on so far, where known; `cost` counts seconds.
        """
        if (known := self.scalars(step)) is not None:
            return known
        self._claim(moments)
        name = f"step-{step}"
        moments.provenance.update(name=name, label=f"{step:,}", step=step, trained_tokens=tokens)
        moments.save(moments_path(self.path, name))
        scalars = self._noted(step, moments, cost)
        waiting = {each: path for each in self._names() if (path := moments_path(self.path, each)).is_file()}
        if not self.keep_moments and sum(path.stat().st_size for path in waiting.values()) > MOST_WAITING:
            self._parts(moments.layout.context).of(waiting)  # the tables still wait, but take far less room
        return scalars

    def difference(self, step: int, moments: Moments) -> float:
        """The largest difference in |r_q| or |r_k| of any head between moments of now and a recorded step."""
        from qkscope.tables.parts import part_rows

        if step not in self.steps:
            raise InputError(f"{self.path} has no step {step}")
        parts, name = self._parts(moments.layout.context), f"step-{step}"
        recorded = part_rows(parts.of({name: moments_path(self.path, name)})[0], QK).to_pandas()
        now = self._leading_rows(name, moments)[HEADS]
        both = recorded[recorded["pc"] == 0].merge(now, on=["layer", "head"], suffixes=("", "_now"))
        return float(max((both[name].abs() - both[f"{name}_now"].abs()).abs().max() for name in ("r_q", "r_k")))

    def write_tables(self) -> bool:
        """Make the tables of all steps and their provenance; whether there was a step that they did not have."""
        from qkscope.tables.from_moments import write_results

        if self._record.steps:
            self._take_up()
        files = {name: moments_path(self.path, name) for name in self._names()}
        if not files or (results_file(self.path, QK_CSV).is_file() and not self._new(files)):
            return False
        with lock_folder(self.path):
            remove_unfinished(self.path, alone=True)
            context = self._record.settings["buckets"][-1]
            # What provenance states of a training: there is no study file.
            about: dict[str, Any] = {
                "study": "training",
                "title": self.title,
                "kind": CHECKPOINTS,
                "axis": "step",
                "checkpoints": [],
            }
            study, made, settings = Study.model_construct(**about), self._parts(context), self._row_settings(context)
            write_results(
                self.path, files, settings, Events(), "qkscope.train", study, kind=CHECKPOINTS, made=made,
                page_follows=True,
            )  # fmt: skip
            with suppress(OSError):  # unless moments are kept
                moments_folder(self.path).rmdir()
        return True

    def write_page(self) -> None:
        """Bring tables, `report.html` and the tables behind it up to date."""
        from qkscope.report.write import write_report

        page, table = (results_file(self.path, name) for name in (REPORT_HTML, QK_CSV))
        written = self.write_tables()
        if written or not page.is_file() or page.stat().st_mtime < table.stat().st_mtime:
            with lock_folder(self.path):
                write_report(self.path, figures=False)

    def note_seconds(self, cost: Cost) -> None:
        """Record where the time went so far: a resumed training counts on from there."""
        self._record.seconds = cost.seconds
        _write_record(self.path, self._record)

    # -- one step -----------------------------------------------------------------------------------------

    def _claim(self, moments: Moments) -> None:
        """Refuse a folder that another training writes to now, or whose steps were measured with other settings."""
        record = _read_record(self.path)
        if record is not None and record.writer not in ("", self._writer, self._record.writer):
            raise InputError(f"{self.path}: another training has begun to write here; {START_OVER}")
        settings = self._settings_of(moments)
        recorded = record.settings if record is not None and record.steps else settings
        for name, value in settings.items():
            if recorded.get(name) != value:
                texts = (str(recorded.get(name)), str(value))
                was, now = (text if len(text) <= 60 else f"{text[:57]}..." for text in texts)
                raise InputError(
                    f"{self.path} has steps that were measured with {name} {was}, not {now}; measure with the same, "
                    f"or {START_OVER}"
                )
        self._record = record or self._record
        if self._record.writer != self._writer:
            self._record.writer, self._record.settings = self._writer, settings
            self._record.title, self._record.keep_moments = self.title, self.keep_moments
            _write_record(self.path, self._record)
            self._take_up()

    def _settings_of(self, moments: Moments) -> dict[str, Any]:
        """What must be the same for all steps, by names that an error can use."""
        from qkscope.lenses.registry import head_tables

        origin = CheckpointRecord.read(moments.provenance)
        measures = [[each.name, *(column.name for column in each.columns)] for each in head_tables()]
        return {
            "documents": origin.corpus.fingerprint if origin.corpus else None,
            "buckets": list(moments.layout.edges),
            "groups": moments.layout.groups,
            "stage": origin.stage,
            "components": self.components,
            "skip_positions": self.skip_positions,
            "detail": self.detail,
            "model": origin.model_type,
            "heads": [[f.layer, f.q_heads, f.kv_heads, f.head_dim] for f in moments.layers.values()],
            "measures": f"version {hashlib.sha256(json.dumps(measures).encode()).hexdigest()[:8]}",
        }

    def _noted(self, step: int, moments: Moments, cost: Cost | None = None) -> dict[str, float]:
        """Record a step with its scalars, which are those of its tables."""
        from qkscope.moments.file import round_as_stored
        from qkscope.tables.parts import arrow_table

        name = f"step-{step}"
        rows = self._leading_rows(name, round_as_stored(moments))
        heads, replicates = (arrow_table(table, rows[table]).to_pandas() for table in (HEADS, REPLICATES))
        scalars = scalars_of(name, heads, replicates)
        self._record.steps.append(StepRecord(step=step, scalars=scalars))
        if cost is not None:
            self._record.seconds = cost.seconds
        _write_record(self.path, self._record)
        return scalars

    def _leading_rows(self, name: str, moments: Moments) -> dict[str, pd.DataFrame]:
        """Component 0 of each head over its whole context, and its replicates: all that scalars need."""
        from qkscope.lenses import attention
        from qkscope.lenses.position import LEADING
        from qkscope.lenses.rows import checkpoint_rows

        with warnings.catch_warnings():
            if self._warned:  # windows that are too short for a number are so at every step: one warning is enough
                warnings.simplefilter("ignore", QkscopeWarning)
            self._warned = True
            leading = replace(LEADING, windows="own", judged=(), judge=None)
            alone = tuple(replace(column, error=None) for column in attention.TABLE.columns)
            attended = replace(attention.TABLE, windows="own", columns=alone)
            return checkpoint_rows(moments, [leading, attended], self._row_settings(moments.layout.context), model=name)

    def _names(self) -> list[str]:
        """What tables call the steps, in order."""
        return [f"step-{step}" for step in self.steps]

    def _parts(self, context: int) -> StepParts:
        return StepParts(self.path, self._row_settings(context), keep_moments=self.keep_moments)

    def _row_settings(self, context: int) -> RowSettings:
        return RowSettings(common=context, components=self.components, skip=self.skip_positions, detail=self.detail)

    # -- all steps ----------------------------------------------------------------------------------------

    def _take_up(self) -> None:
        """Record the steps whose moments a process saved that was killed before it recorded them."""
        from qkscope.moments.moments import Moments

        saved = (STEP.fullmatch(entry.name) for entry in entries(moments_folder(self.path)))
        for step in sorted({int(name[1]) for name in saved if name is not None} - {*self.steps}):
            self._noted(step, Moments.load(moments_path(self.path, f"step-{step}")))

    def _new(self, files: Mapping[str, Path]) -> bool:
        """Whether a step is not in the tables yet."""
        return any(_stored_part(parts_path(self.path, name)) is None for name in files)


class StepParts(TableParts):
    """The rows of steps, each made once; they stay in the folder, and moments leave it unless they are to be kept."""

    def __init__(self, folder: Path, settings: RowSettings, *, keep_moments: bool) -> None:
        super().__init__(folder, settings)
        self._keep_moments = keep_moments

    def of(self, files: Mapping[str, Path]) -> list[TablePart]:
        """The parts of these steps, in this order; those that are missing are made."""
        parts = {name: _stored_part(parts_path(self._folder, name)) for name in files}
        missing = {name: path for name, path in files.items() if parts[name] is None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QkscopeWarning)  # the first measurement has warned
            made = dict(zip(missing, super().of(missing), strict=True))
        for part in made.values():
            about = {"bytes": part.bytes, "headers": part.headers, "window": part.window}
            described = json.dumps({**about, "origin": part.origin.to_json()}).encode()
            with part.place.open("ab") as file:
                file.write(described + END.pack(len(described), MAGIC))
                file.flush()
                os.fsync(file.fileno())
        for path in () if self._keep_moments else files.values():
            remove_file(path)
        return [parts[name] or made[name] for name in files]


def _stored_part(path: Path) -> TablePart | None:
    """The rows of a step that an earlier call made; None where there are none, or not all of them."""
    from qkscope.tables.parts import TablePart

    try:
        with opened(path, 2**40) as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - END.size))
            ending = file.read(END.size)
            length, magic = END.unpack(ending) if len(ending) == END.size else (0, b"")
            if magic != MAGIC or length > min(end - END.size, LARGEST):
                return None
            file.seek(end - END.size - length)
            stored = parse_json(file.read(length))
    except (Missing, Unreadable):
        return None
    places = {str(table): (int(start), int(stop)) for table, (start, stop) in stored["bytes"].items()}
    headers = {str(table): str(line) for table, line in stored["headers"].items()}
    return TablePart(path, places, headers, CheckpointRecord.read(stored["origin"]), int(stored["window"]))


def scalars_of(name: str, heads: pd.DataFrame, replicates: pd.DataFrame) -> dict[str, float]:
    """A checkpoint in a few numbers for trackers, those of `qkscope log`, from component 0 of its heads."""
    from qkscope.lenses.registry import registered
    from qkscope.lenses.views import WindowView
    from qkscope.results.entries import Entries, Entry
    from qkscope.share.trackers import entry_scalars

    here = replicates[replicates["window"] == heads["window"].max()].reset_index(drop=True)
    study = Entries(name, (Entry(name, name),), (name,), sampled_heads=False, same_documents=True)
    return entry_scalars(WindowView(study, heads, registered(), tables={REPLICATES: here}), name, PREFIX)


# -- files -----------------------------------------------------------------------------------------------------


def _read_record(folder: Path) -> TrainingRecord | None:
    """The record of a folder; None where there is none."""
    path = results_file(folder, TRAINING_JSON)
    try:
        stored = parse_json(read_bytes(path, LARGEST))
    except Missing:
        return None
    except Unreadable as error:
        raise InputError(f"{path}: {error}; {START_OVER}") from None
    if stored.get("schema") != SCHEMA:
        raise InputError(f"{path}: has schema {stored.get('schema')!r}, this qkscope reads {SCHEMA}; {START_OVER}")
    try:
        return TrainingRecord.model_validate(stored)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise InputError(f"{path}: does not list steps ({where}: {first['msg']}); {START_OVER}") from None


def _write_record(folder: Path, record: TrainingRecord) -> None:
    text = json.dumps(record.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False)
    write_text(results_file(folder, TRAINING_JSON), f"{text}\n")
