"""From moments files to the tables of every lens and their provenance. No model, no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from qkscope.errors import InputError, located
from qkscope.kinds import Kind, kind_of, kind_sentence
from qkscope.lenses.heads import HeadSample, LayerChoice, head_sample, layer_choice
from qkscope.lenses.registry import head_tables
from qkscope.lenses.rows import COMPONENTS, RowSettings, checkpoint_rows
from qkscope.moments.file import read_provenance
from qkscope.moments.moments import Moments
from qkscope.results.csv_files import write_csv
from qkscope.results.environment import environment
from qkscope.results.folder import (
    STUDY_YAML,
    head_table_path,
    moments_path,
    results_file,
)
from qkscope.results.left_out import read_left_out
from qkscope.results.lock import only_run
from qkscope.results.provenance import SCHEMA, CheckpointRecord, Provenance, write_provenance
from qkscope.study.harmless import file_safe
from qkscope.study.load import changed, load_study
from qkscope.study.schema import Checkpoint, Study


class Listener(Protocol):
    """Who hears what becomes of the tables; a run's events fit."""

    def wrote(self, path: str) -> None:
        """A file is there."""

    def noted(self, message: str) -> None:
        """Something a reader should know."""


@dataclass(frozen=True)
class AnalysisSettings:
    """How moments become rows."""

    window: int  # the common window, in tokens
    components: int = COMPONENTS
    heads: HeadSample | None = None
    layers: LayerChoice = "all"
    skip: int = 0  # leading positions that are left out

    @classmethod
    def of(cls, study: Study) -> AnalysisSettings:
        """The study's own settings."""
        window, sample, layers = study.window_in_common(), head_sample(study), layer_choice(study)
        return cls(window, study.components, sample, layers, study.skip_positions)

    def rows(self, own: int | None) -> RowSettings:
        """What a checkpoint's rows are made with; `own` is its context where its sums reach further."""
        return RowSettings(own, self.window, self.components, self.heads, self.layers, self.skip)


def analyze_study(folder: Path, study: Study, events: Listener, command: str, out: Path | None = None) -> Path:
    """Tables of every checkpoint of a study, from the moments in `folder`, in study order.

    The caller holds the folder that the tables go to.
    """
    left_out = read_left_out(folder)
    files = {
        checkpoint.name: moments_path(folder, checkpoint.name)
        for checkpoint in study.checkpoints
        if checkpoint.name not in left_out
    }
    if not files:
        name, reason = next(iter(left_out.items()))
        raise InputError(f"{folder}: all checkpoints were left out, the first is {name!r}: {reason}")
    for name, path in files.items():
        if not path.is_file():
            raise InputError(f"checkpoint {name!r} has no moments yet ({path}); run `qkscope run` or `qkscope capture`")
    return write_tables(out or folder, files, AnalysisSettings.of(study), events, command, study, left_out)


def analyze_folder(
    folder: Path,
    events: Listener,
    command: str,
    *,
    out: Path | None = None,
    components: int | None = None,
    common_window: int | None = None,
    skip_positions: int | None = None,
    kind: Kind | None = None,
) -> Path:
    """Analyze a results folder again by the study file that lies in it, with changes."""
    study = load_study(results_file(folder, STUDY_YAML)).study
    changes = {"components": components, "common_window": common_window, "skip_positions": skip_positions, "kind": kind}
    study = changed(study, {key: value for key, value in changes.items() if value is not None})
    with only_run(out or folder):
        return analyze_study(folder, study, events, command, out)


def analyze_files(
    paths: list[Path],
    events: Listener,
    command: str,
    *,
    out: Path | None,
    components: int | None = None,
    common_window: int | None = None,
    skip_positions: int | None = None,
    kind: Kind | None = None,
) -> Path:
    """Analyze moments files from anywhere; they are named by their own provenance and ordered by its numbers."""
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise InputError(f"{missing[0]}: there is no such file or results folder")
    if out is None:
        raise InputError("single moments files need --out, the folder for the tables")
    if components is not None and components < 1:
        raise InputError(f"--components {components}: at least one component is needed")
    files: dict[str, Path] = {}
    contexts = []
    for path in paths:
        with located(str(path)):
            origin = CheckpointRecord.read(read_provenance(path))
        name = _checked_name(path, origin.name or path.stem)
        if name in files:
            raise InputError(f"{path} and {files[name]} are both of a checkpoint named {name!r}")
        files[name] = path
        contexts.append(origin.context or Moments.load(path).layout.context)
    ordered = natural_order(list(files))
    if ordered != list(files):
        events.noted(f"ordered by the numbers in their names: {', '.join(ordered)}")
    settings = AnalysisSettings(common_window or min(contexts), components or COMPONENTS, skip=skip_positions or 0)
    with only_run(out):
        return write_tables(out, {name: files[name] for name in ordered}, settings, events, command, kind=kind)


def natural_order(names: Sequence[str]) -> list[str]:
    """Names that differ only in numbers by these numbers (step-20 before step-100); others stay as they were given.

    A shell sorts letter by letter, which is the order of training only by accident.
    """
    patterns = {name: re.sub(r"\d+", "0", name) for name in names}
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(patterns[name], []).append(name)
    in_order = {
        pattern: iter(sorted(group, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]))
        for pattern, group in groups.items()
    }
    return [name for pattern in groups for name in in_order[pattern]]


def _checked_name(path: Path, name: str) -> str:
    """The checkpoint's name in a file that may come from anywhere: it will be a cell of every table."""
    try:
        return file_safe(name)
    except ValueError as error:
        raise InputError(f"{path}: is of a checkpoint named {name[:60]!r}, but {error}") from None


def write_tables(
    out: Path,
    files: Mapping[str, Path],
    settings: AnalysisSettings,
    events: Listener,
    command: str,
    study: Study | None = None,
    left_out: Mapping[str, str] | None = None,
    kind: Kind | None = None,
) -> Path:
    """Analyze one moments file after the other and write every lens's tables and their provenance into `out`."""
    tables = head_tables()
    parts: dict[str, list[pd.DataFrame]] = {table.file: [] for table in tables}
    origins = []
    for name, path in files.items():
        moments = Moments.load(path)
        checkpoint = _named(study, name)
        longest = _longest(name, moments, checkpoint)
        with located(f"checkpoint {name!r}"):
            for file, rows in checkpoint_rows(moments, tables, settings.rows(longest), model=name).items():
                parts[file].append(rows)
        origins.append(_origin(name, moments, checkpoint, longest))
    for file, of_checkpoints in parts.items():
        write_csv(pd.concat(of_checkpoints, ignore_index=True), head_table_path(out, file))
        events.wrote(str(head_table_path(out, file)))
    read_as = _kind(origins, (study.kind if study else None) or kind, events, told=study is None)
    provenance = {**_provenance(settings, origins, command, study), **read_as}
    provenance["checkpoints_left_out"] = _left_out(left_out or {}, study)
    events.wrote(str(write_provenance(out, Provenance.of(provenance))))
    return out


def _named(study: Study | None, name: str) -> Checkpoint | None:
    """The study's checkpoint of that name, resolved."""
    found = [each for each in study.checkpoints if each.name == name] if study else []
    return study.resolved(found[0]) if study and found else None


def _longest(name: str, moments: Moments, checkpoint: Checkpoint | None) -> int | None:
    """The window that stands for a checkpoint's context where its sums reach further; None where they do not."""
    wanted, layout = checkpoint.context if checkpoint else None, moments.layout
    if wanted is None or wanted == layout.context:
        return None
    if wanted not in layout.edges:
        raise InputError(
            f"checkpoint {name!r} has context {wanted} in the study, but its moments are of context {layout.context} "
            "and do not answer for that; run the study again"
        )
    return wanted


def _left_out(reasons: Mapping[str, str], study: Study | None) -> list[dict[str, str]]:
    """The study's checkpoints that the tables are without."""
    names = [checkpoint.name for checkpoint in study.checkpoints] if study else []
    return [{"name": name, "reason": reasons[name]} for name in names if name in reasons]


def _origin(name: str, moments: Moments, checkpoint: Checkpoint | None, longest: int | None) -> CheckpointRecord:
    """What produced a checkpoint's rows, by the names the study has for it now.

    What its capture did not record, the sums themselves tell.
    """
    from_sums = {
        "context": moments.layout.context,
        "skip_positions": moments.layout.skip_positions,
        "layers": [facts.outline() for facts in moments.layers.values()],
    }
    recorded = {key: value for key, value in moments.provenance.items() if value is not None}
    origin = {**moments.provenance, **from_sums, **recorded, "name": name}
    if checkpoint is not None:
        origin.update(name=checkpoint.name, label=checkpoint.label, phase=checkpoint.phase)
    if longest is not None:
        documents = CheckpointRecord.read(origin).documents or 0
        origin.update(context=longest, captured_context=moments.layout.context, tokens=documents * longest)
    return CheckpointRecord.read(origin)


def _kind(origins: list[CheckpointRecord], stated: Kind | None, events: Listener, told: bool) -> dict[str, Any]:
    """What the entries are to each other, for the provenance; said aloud where no plan said it."""
    kind = stated or kind_of([origin.architecture for origin in origins])
    if told and len(origins) > 1:
        events.noted(kind_sentence(kind, len(origins), stated is not None))
    return {"kind": kind, "kind_stated": stated is not None}


def _provenance(
    settings: AnalysisSettings, origins: list[CheckpointRecord], command: str, study: Study | None
) -> dict[str, Any]:
    sample = settings.heads
    return {
        "schema": SCHEMA,
        "qkscope": environment()["qkscope"],
        "command": command,
        "study": study.model_dump(mode="json") if study else None,
        "corpus": origins[0].corpus,
        "checkpoints": origins,
        "analysis": {
            "components": settings.components,
            "heads": {"sample": sample.count, "seed": sample.seed} if sample else "all",
            "layers": settings.layers,
            "common_window": settings.window,
            "skip_positions": max(settings.skip, origins[0].skip_positions or 0),
        },
        "environment": environment(),
    }
