"""A results folder that gains one entry for each step that is measured: all tables, provenance, page.

A step's rows are those that a study would have. Each table is replaced by one with these rows at its end, so whoever
reads it finds it whole. `training.json` is written last. Whatever a table holds beyond the size that it lists is of a
step that was being added when its process died; the next one to add a step writes over it.
"""

from __future__ import annotations

import json
import secrets
import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qkscope.errors import InputError, QkscopeWarning
from qkscope.files import as_path, require_writable, write_text
from qkscope.foreign import Missing, Unreadable, parse_json, read_bytes
from qkscope.kinds import CHECKPOINTS
from qkscope.results.folder import (
    PROVENANCE_JSON,
    QK_CSV,
    TRAINING_JSON,
    head_table_path,
    moments_path,
    parts_path,
    refuse_links,
    results_file,
)
from qkscope.results.lock import lock_folder
from qkscope.results.provenance import SCHEMA as PROVENANCE_SCHEMA
from qkscope.results.provenance import CheckpointRecord, Provenance, environment, write_provenance
from qkscope.results.read import read_provenance
from qkscope.results.remove import remove_parts, remove_unfinished
from qkscope.results.schema import QK, REPLICATES, is_parquet
from qkscope.train.cost import Cost, Seconds

if TYPE_CHECKING:
    import pandas as pd

    from qkscope.moments.moments import Moments
    from qkscope.study.rows import RowSettings
    from qkscope.tables.parts import TablePart

SCHEMA = 2
LARGEST = 256 * 1024 * 1024  # bytes of training.json; 10 000 steps have 30 MB
PREFIX = "qkscope/"  # of scalars
START_OVER = "give another folder, or remove this one"


class StepRecord(BaseModel):
    """One step that was measured."""

    model_config = ConfigDict(extra="forbid")

    step: Annotated[int, Field(ge=0, lt=2**63)]
    scalars: dict[str, float]


class TrainingRecord(BaseModel):
    """`training.json`: which steps the tables hold, and what they were measured with."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Annotated[int, Field(alias="schema")] = SCHEMA
    writer: str = ""  # a mark of whoever adds steps now; another's means that two trainings write here
    settings: dict[str, Any] = {}
    tables: dict[
        str, Annotated[int, Field(ge=0)]
    ] = {}  # by table: bytes of a CSV file with these steps, row groups of a Parquet file
    steps: list[StepRecord] = []  # in the order in which they were measured
    seconds: Seconds = Seconds()  # of the whole training run, when its last step was added

    def find(self, step: int) -> StepRecord | None:
        """What is known of a step; None where it was not measured."""
        return next((each for each in self.steps if each.step == step), None)


def step_name(step: int) -> str:
    """What tables call the entry of a step."""
    return f"step-{step}"


class TrainingFolder:
    """Tables that grow while a model trains: `folder.add(step, moments)`.

    `components` and `skip_positions` are as in a study. `detail` asks for tables with many rows per head, which grow
    fast; `keep_moments` for a moments file of each step, which tables that compare steps need.
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
        self._steps_on_page = 0

    @property
    def steps(self) -> list[int]:
        """The steps that the tables hold, in order."""
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
        record = self._record.find(step)
        return None if record is None else dict(record.scalars)

    def add(self, step: int, moments: Moments, tokens: int | None = None, cost: Cost | None = None) -> dict[str, float]:
        """Add a step's lines to every table; returns its scalars. A recorded step stays as it is.

        `tokens` is the number of tokens the model was trained on so far, where known; `cost` counts seconds.
        """
        if (known := self.scalars(step)) is not None:
            return known
        with lock_folder(self.path):
            self._claim(moments)
            part = self._part(step, moments, tokens)
            self._require_same_tables(part)
            if self.keep_moments:
                moments.save(moments_path(self.path, step_name(step)))
            self._write_provenance(part.origin)
            sizes = {table: self._append(table, part) for table in part.headers}
            scalars = scalars_of(step_name(step), _part_rows(part, QK), _part_rows(part, REPLICATES))
            self._record.tables = sizes
            self._record.steps.append(StepRecord(step=step, scalars=scalars))
            if cost is not None:
                self._record.seconds = cost.seconds
            _write_record(self.path, self._record)
            remove_parts(self.path)
        return scalars

    def difference(self, step: int, moments: Moments) -> float:
        """The largest difference in |r_q| or |r_k| of any head between moments of now and a recorded step."""
        if self._record.find(step) is None:
            raise InputError(f"{self.path} has no step {step}")
        with lock_folder(self.path):
            now = _part_rows(self._part(step, moments), QK)
            remove_parts(self.path)
        with head_table_path(self.path, QK_CSV).open("rb") as table:
            start = f"{step_name(step)},".encode()
            recorded = _frame(table.readline(), b"".join(line for line in table if line.startswith(start)))
        both = recorded[recorded["pc"] == 0].merge(now[now["pc"] == 0], on=["layer", "head"], suffixes=("", "_now"))
        return float(max((both[name].abs() - both[f"{name}_now"].abs()).abs().max() for name in ("r_q", "r_k")))

    def write_page(self) -> None:
        """Bring `report.html` and `tables/` up to date, and tables that compare steps, where moments are kept."""
        from qkscope.report.write import write_report

        if self._steps_on_page == len(self._record.steps):
            return
        with lock_folder(self.path):
            self._write_study_tables()
            write_report(self.path, figures=False)
        self._steps_on_page = len(self._record.steps)

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
                raise InputError(
                    f"{self.path} has steps that were measured with {name} {_short(recorded.get(name))}, not "
                    f"{_short(value)}; measure with the same, or {START_OVER}"
                )
        self._record = record or self._record
        self._record.writer, self._record.settings = self._writer, settings
        remove_unfinished(self.path, alone=True)
        remove_parts(self.path)  # of a process that was killed
        _write_record(self.path, self._record)

    def _settings_of(self, moments: Moments) -> dict[str, Any]:
        """What must be the same for all steps, by names that an error can use."""
        origin = CheckpointRecord.read(moments.provenance)
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
        }

    def _row_settings(self, context: int) -> RowSettings:
        from qkscope.study.rows import RowSettings

        return RowSettings(common=context, components=self.components, skip=self.skip_positions, detail=self.detail)

    def _part(self, step: int, moments: Moments, tokens: int | None = None) -> TablePart:
        """The step's lines of all tables, in a file of their own: those that its moments file would give."""
        from qkscope.lenses.registry import head_tables
        from qkscope.moments.file import round_as_stored
        from qkscope.tables.parts import PartRequest, part_of

        name, settings = step_name(step), self._row_settings(moments.layout.context)
        moments.provenance.update(name=name, label=f"{step:,}", step=step, trained_tokens=tokens)
        request = PartRequest(name, moments_path(self.path, name), None, settings, parts_path(self.path, name))
        with warnings.catch_warnings():
            if self._warned:  # windows that are too short for a number are so at every step: one warning is enough
                warnings.simplefilter("ignore", QkscopeWarning)
            self._warned = True
            return part_of(round_as_stored(moments), request, head_tables())

    def _require_same_tables(self, part: TablePart) -> None:
        """Refuse to add rows to tables that another version has written, or that somebody has cut."""
        from qkscope.tables.parts import stored_header, stored_size

        recorded = self._record.tables
        for table in sorted({*part.headers, *recorded}) if self._record.steps else ():
            path = self._table_path(table)
            if stored_size(path) < recorded.get(table, 0):
                raise InputError(f"{path}: is shorter than what was written to it; {START_OVER}")
            if table not in recorded or stored_header(path) != part.headers.get(table):
                raise InputError(
                    f"{self.path}: {path.name} of its steps has other columns than this qkscope "
                    f"({environment()['qkscope']}) writes; {START_OVER}"
                )

    def _append(self, table: str, part: TablePart) -> int:
        """Replace a table by one with the part's rows after those of the recorded steps; returns its size."""
        from qkscope.tables.parts import append_part

        return append_part(part, table, self._table_path(table), self._record.tables.get(table, 0))

    def _table_path(self, table: str) -> Path:
        return head_table_path(self.path, f"{table}.{'parquet' if is_parquet(table) else 'csv'}")

    # -- all steps ----------------------------------------------------------------------------------------

    def _origins(self) -> dict[str, CheckpointRecord]:
        """The provenance of the recorded steps, by name, in the order of steps."""
        known = read_provenance(results_file(self.path, PROVENANCE_JSON)).by_name()
        return {name: known.get(name, CheckpointRecord()) for name in map(step_name, self.steps)}

    def _write_provenance(self, new: CheckpointRecord) -> None:
        origins = {**self._origins(), str(new.name): new}
        provenance = {
            "schema": PROVENANCE_SCHEMA,
            "qkscope": environment()["qkscope"],
            "command": "qkscope.train",
            "study": {"study": "training", "title": self.title, "kind": CHECKPOINTS, "axis": "step"},
            "kind": CHECKPOINTS,
            "kind_stated": True,
            "corpus": new.corpus,
            "checkpoints": [origins[name] for name in sorted(origins, key=lambda name: int(name.rpartition("-")[2]))],
            "checkpoints_left_out": [],
            "analysis": {
                "components": self.components,
                "heads": "all",
                "layers": "all",
                "common_window": new.context,
                "skip_positions": self.skip_positions,
            },
            "environment": environment(),
        }
        write_provenance(self.path, Provenance.of(provenance))

    def _write_study_tables(self) -> None:
        """Tables about all steps at once, which need the moments of each."""
        from qkscope.tables.of_study import write_study_tables
        from qkscope.tables.parts import TablePart

        origins = self._origins()
        files = {name: moments_path(self.path, name) for name in origins}
        if all(path.is_file() for path in files.values()):
            context = max(origin.context or 0 for origin in origins.values())
            parts = [TablePart(self.path, {}, {}, origin, origin.context or context) for origin in origins.values()]
            write_study_tables(self.path, files, parts, self._row_settings(context), CHECKPOINTS)


def scalars_of(name: str, components: pd.DataFrame, replicates: pd.DataFrame) -> dict[str, float]:
    """An entry in a few numbers for trackers, those of `qkscope log`, from its rows of `qk` and `replicates`."""
    from qkscope.lenses.registry import registered
    from qkscope.lenses.views import WindowView
    from qkscope.results.entries import Entries, Entry
    from qkscope.share.scalars import entry_scalars

    heads = components[components["pc"] == 0].reset_index(drop=True)
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


def _part_rows(part: TablePart, table: str) -> pd.DataFrame:
    from qkscope.tables.parts import part_rows

    rows: pd.DataFrame = part_rows(part, table).to_pandas()
    return rows


def _frame(header: bytes, lines: bytes) -> pd.DataFrame:
    import pandas as pd

    text = BytesIO(header + lines)
    return pd.read_csv(text, dtype={"model": str}, keep_default_na=False, na_values=[""], low_memory=False)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
