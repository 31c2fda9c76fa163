"""A results folder that grows by one entry for each step that is measured: all tables, provenance, page.

A step's lines are those that a study would have. Each table is replaced by one with these lines behind, so whoever
reads it finds it whole. `training.json` comes last: a process that dies on the way leaves a folder that the next one
goes on with. What is there stays: a step that was measured before is not measured into the tables again.
"""

from __future__ import annotations

import secrets
import warnings
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.errors import InputError, QkscopeWarning
from qkscope.files import as_path, require_writable
from qkscope.kinds import CHECKPOINTS
from qkscope.results.environment import environment
from qkscope.results.folder import (
    QK_CSV,
    head_table_path,
    moments_path,
    parts_path,
    refuse_links,
    results_file,
)
from qkscope.results.lock import only_run
from qkscope.results.provenance import SCHEMA, CheckpointRecord, Provenance, write_provenance
from qkscope.results.remove import remove_parts, remove_unfinished
from qkscope.results.schema import QK, REPLICATES, is_parquet
from qkscope.train.cost import Cost, Seconds
from qkscope.train.record import (
    ANEW,
    SecondsRecord,
    StepRecord,
    TrainingRecord,
    read_origins,
    read_training,
    write_training,
)

if TYPE_CHECKING:
    import pandas as pd

    from qkscope.lenses.rows import RowSettings
    from qkscope.moments.moments import Moments
    from qkscope.tables.parts import TablePart


@dataclass(frozen=True)
class FolderSettings:
    """How sums become tables, and what is kept of them."""

    title: str = "Training"
    components: int = 10  # as in a study
    skip_positions: int = 0  # leading positions that tables leave out: 1 leaves out attention sinks
    detail: bool = False  # tables with many rows per head, which grow fast
    keep_moments: bool = False  # one moments file per step; tables that compare steps need them


def step_name(step: int) -> str:
    """What tables call the entry of a step."""
    return f"step-{step}"


class TrainingFolder:
    """Tables that grow while a model trains: `folder.add(step, moments)`."""

    def __init__(self, folder: Path | str, settings: FolderSettings = FolderSettings()) -> None:  # noqa: B008 - frozen
        self.path = as_path(folder, "the folder for a training's results")
        self.settings = settings
        require_writable(self.path)
        refuse_links(self.path)
        record = read_training(self.path)
        if record is None and results_file(self.path, QK_CSV).exists():
            raise InputError(f"{self.path} holds the results of something else; {ANEW}")
        self._record = record or TrainingRecord()
        self._writer = secrets.token_hex(8)
        self._warned = False
        self._page_is_of: int | None = None  # steps that the page shows

    @property
    def steps(self) -> list[int]:
        """The steps that the tables hold, in order."""
        return sorted(each.step for each in self._record.steps)

    def recorded(self, setting: str) -> Any:
        """What the steps that are there were measured with; None where there are none."""
        return self._record.settings.get(setting) if self._record.steps else None

    def scalars(self, step: int) -> dict[str, float] | None:
        """What was found at a step; None where it was not measured."""
        record = self._record.find(step)
        return None if record is None else dict(record.scalars)

    @property
    def seconds(self) -> Seconds:
        """Where the time of the training run went until the last step was added."""
        return Seconds(self._record.seconds.training, self._record.seconds.measuring)

    def add(self, step: int, moments: Moments, tokens: int | None = None, cost: Cost | None = None) -> dict[str, float]:
        """Add a step's lines to every table; returns its scalars. A step that is there stays as it is.

        `tokens` is the number of tokens the model was trained on so far, where known; `cost` counts seconds.
        """
        from qkscope.train.scalars import scalars_of

        if (known := self.scalars(step)) is not None:
            return known
        with only_run(self.path):
            self._take_over(moments)
            part = self._part(step, moments, tokens)
            self._require_same_columns(part)
            if self.settings.keep_moments:
                moments.save(moments_path(self.path, step_name(step)))
            self._write_provenance(part.origin)
            lines = {table: self._append(table, part) for table in part.headers}
            scalars = scalars_of(step_name(step), self._rows(part, QK), self._rows(part, REPLICATES))
            self._record.headers = part.headers
            self._record.steps.append(StepRecord(step=step, lines=lines, scalars=scalars))
            if cost is not None:
                spent = cost.seconds
                self._record.seconds = SecondsRecord(training=spent.training, measuring=spent.measuring)
            write_training(self.path, self._record)
            remove_parts(self.path)
        return scalars

    def apart(self, step: int, moments: Moments) -> float:
        """How far r_q or r_k of any head, measured now, is from what the tables say of that step."""
        with only_run(self.path):
            part = self._part(step, moments)
            new = self._rows(part, QK)
            remove_parts(self.path)
        recorded = self._record.find(step)
        if recorded is None:
            raise InputError(f"{self.path} has no step {step}")
        start, end = recorded.lines[QK]
        with head_table_path(self.path, QK_CSV).open("rb") as file:
            file.seek(start)
            old = _csv(self._record.headers[QK], file.read(end - start))
        old, new = (rows[rows["pc"] == 0] for rows in (old, new))
        both = old.merge(new, on=["layer", "head"], suffixes=("", "_now"))
        return float(max((both[name].abs() - both[f"{name}_now"].abs()).abs().max() for name in ("r_q", "r_k")))

    def write_page(self) -> None:
        """Bring `report.html` and `tables/` up to date, and tables that compare steps, where moments are kept."""
        from qkscope.report.write import write_report

        if self._page_is_of == len(self._record.steps) or not self._record.steps:
            return
        with only_run(self.path):
            self._write_study_tables()
            write_report(self.path, figures=False)
        self._page_is_of = len(self._record.steps)

    # -- one step -----------------------------------------------------------------------------------------

    def _take_over(self, moments: Moments) -> None:
        """Refuse a folder that another training writes to now, or whose steps were measured otherwise."""
        stored = read_training(self.path)
        if stored is not None and stored.writer not in ("", self._writer, self._record.writer):
            raise InputError(f"{self.path}: another training has begun to write here; {ANEW}")
        settings = self._described(moments)
        if stored is not None and stored.steps:
            for name, value in settings.items():
                before = stored.settings.get(name)
                if before != value:
                    raise InputError(
                        f"{self.path} has steps that were measured with {name} {_short(before)}, not {_short(value)}; "
                        f"measure with the same, or {ANEW}"
                    )
        self._record = stored or self._record
        self._record.writer, self._record.settings = self._writer, settings
        remove_unfinished(self.path, alone=True)
        remove_parts(self.path)  # of a process that was killed
        write_training(self.path, self._record)

    def _described(self, moments: Moments) -> dict[str, Any]:
        """What must be the same for all steps, by names that an error can use."""
        origin = CheckpointRecord.read(moments.provenance)
        return {
            "documents": origin.corpus.fingerprint if origin.corpus else None,
            "buckets": list(moments.layout.edges),
            "groups": moments.layout.groups,
            "stage": origin.stage,
            "components": self.settings.components,
            "skip_positions": self.settings.skip_positions,
            "detail": self.settings.detail,
            "model": origin.model_type,
            "heads": [[f.layer, f.q_heads, f.kv_heads, f.head_dim] for f in moments.layers.values()],
        }

    def _rows_settings(self, moments_context: int) -> RowSettings:
        from qkscope.lenses.rows import RowSettings

        settings = self.settings
        return RowSettings(
            common=moments_context,
            components=settings.components,
            skip=settings.skip_positions,
            detail=settings.detail,
        )

    def _part(self, step: int, moments: Moments, tokens: int | None = None) -> TablePart:
        from qkscope.lenses.registry import head_tables
        from qkscope.moments.file import as_stored
        from qkscope.tables.parts import PartRequest, part_of

        name, context = step_name(step), moments.layout.context
        moments.provenance.update(name=name, label=f"{step:,}", step=step, trained_tokens=tokens)
        place = parts_path(self.path, name)
        request = PartRequest(name, moments_path(self.path, name), None, self._rows_settings(context), place)
        with warnings.catch_warnings():
            if self._warned:  # windows that are too short for a number are so at every step: said once
                warnings.simplefilter("ignore", QkscopeWarning)
            self._warned = True
            return part_of(as_stored(moments), request, head_tables())  # the lines that its file would give

    def _require_same_columns(self, part: TablePart) -> None:
        for table in {*part.headers, *self._record.headers} if self._record.steps else ():
            if part.headers.get(table) != self._record.headers.get(table):
                raise InputError(
                    f"{self.path}: {table} of its steps has other columns than this qkscope "
                    f"({environment()['qkscope']}) writes; {ANEW}"
                )

    def _append(self, table: str, part: TablePart) -> tuple[int, int]:
        """Put a table with the part's rows behind in the place of the table; returns where they are in it."""
        from qkscope.tables.parts import append_part, stored_size

        path = head_table_path(self.path, f"{table}.{'parquet' if is_parquet(table) else 'csv'}")
        kept = self._record.size(table)
        if kept and (not path.is_file() or stored_size(path) < kept):
            raise InputError(f"{path}: is shorter than what was written to it; {ANEW}")
        return append_part(part, table, path, kept)

    def _rows(self, part: TablePart, table: str) -> pd.DataFrame:
        from qkscope.tables.parts import part_rows

        return part_rows(part, table).to_pandas()

    # -- all steps ----------------------------------------------------------------------------------------

    def _origins(self) -> dict[str, CheckpointRecord]:
        """What is recorded of the steps that are there, by name, in the order of steps."""
        known = read_origins(self.path)
        return {step_name(step): known.get(step_name(step), CheckpointRecord()) for step in self.steps}

    def _write_provenance(self, new: CheckpointRecord) -> None:
        origins = {**self._origins(), str(new.name): new}
        ordered = [origins[name] for name in sorted(origins, key=lambda name: int(name.rpartition("-")[2]))]
        provenance = {
            "schema": SCHEMA,
            "qkscope": environment()["qkscope"],
            "command": "qkscope.train",
            "study": {"study": "training", "title": self.settings.title, "kind": CHECKPOINTS, "axis": "step"},
            "kind": CHECKPOINTS,
            "kind_stated": True,
            "corpus": new.corpus,
            "checkpoints": ordered,
            "checkpoints_left_out": [],
            "analysis": {
                "components": self.settings.components,
                "heads": "all",
                "layers": "all",
                "common_window": new.context,
                "skip_positions": self.settings.skip_positions,
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
        if not all(path.is_file() for path in files.values()):
            return
        context = max(origin.context or 0 for origin in origins.values())
        parts = [TablePart(self.path, {}, {}, origin, origin.context or context) for origin in origins.values()]
        write_study_tables(self.path, files, parts, self._rows_settings(context), CHECKPOINTS)


def _csv(header: str, lines: bytes) -> pd.DataFrame:
    import pandas as pd

    text = StringIO(f"{header}\n{lines.decode()}")
    return pd.read_csv(text, dtype={"model": str}, keep_default_na=False, na_values=[""], low_memory=False)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
