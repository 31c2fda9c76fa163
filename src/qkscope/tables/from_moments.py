"""From moments files to the tables of every lens, their provenance, and `tables.json`. No model, no torch.

`tables.json` is for whoever reads the tables of heads without qkscope: for each measure its definition and unit, and
how its standard errors were found; for each table that is not there, why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from qkscope.errors import InputError, located
from qkscope.files import write_text
from qkscope.kinds import StudyKind, kind_of, kind_sentence, require_kind
from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.registry import head_tables, registered
from qkscope.moments.file import read_provenance
from qkscope.moments.moments import Moments
from qkscope.results import folder as layout
from qkscope.results.current import hash_of
from qkscope.results.lock import lock_folder
from qkscope.results.provenance import (
    SCHEMA,
    CheckpointRecord,
    Provenance,
    environment,
    read_left_out,
    shared_attention,
    write_provenance,
)
from qkscope.results.remove import remove_head_table
from qkscope.results.schema import COMPONENTS_TABLE, EARLIER_TABLES, FILES, HEADS, HEADS_CSV, HEADS_PARQUET
from qkscope.study.load import changed, load_study
from qkscope.study.rows import COMPONENTS, RowSettings, row_settings
from qkscope.study.schema import MOST_IN_DETAIL, Study
from qkscope.study.values import file_safe
from qkscope.tables.of_study import write_study_tables
from qkscope.tables.outdated import remove_outdated
from qkscope.tables.parts import TablePart, is_joined, join_parts, joined_path
from qkscope.tables.workers import TableParts

TABLES_LAYOUT = 3  # of the tables of a results folder; 0.2 had a file per lens


class Listener(Protocol):
    """Who hears what becomes of the tables; a run's events fit."""

    def wrote(self, path: str) -> None:
        """A file is there."""

    def noted(self, message: str) -> None:
        """Something a reader should know."""


def analyze_study(
    folder: Path,
    study: Study,
    events: Listener,
    command: str,
    out: Path | None = None,
    made: TableParts | None = None,
    *,
    page_follows: bool = False,
) -> Path:
    """Tables of every checkpoint of a study, from the moments in `folder`, in study order.

    The caller holds the folder that the tables go to. `made` are the lines that are there or being made already.
    `page_follows`: the caller writes the page next, so the old one may stay until then.
    """
    left_out = read_left_out(folder)
    names = [checkpoint.name for checkpoint in study.checkpoints if checkpoint.name not in left_out]
    files = {name: layout.moments_path(folder, name) for name in names}
    if not files:
        name, reason = next(iter(left_out.items()))
        raise InputError(f"{folder}: all checkpoints were left out, the first is {name!r}: {reason}")
    for name, path in files.items():
        if not path.is_file():
            raise InputError(f"checkpoint {name!r} has no moments yet ({path}); run `qkscope run` or `qkscope capture`")
    settings, out = row_settings(study), out or folder
    with TableParts(out, settings, study) if made is None else nullcontext(made) as made:
        return write_results(
            out, files, settings, events, command, study, left_out, made=made, page_follows=page_follows
        )


def analyze_folder(
    folder: Path,
    events: Listener,
    command: str,
    *,
    out: Path | None = None,
    components: int | None = None,
    common_window: int | None = None,
    skip_positions: int | None = None,
    detail: bool | None = None,
    kind: StudyKind | None = None,
) -> Path:
    """Analyze a results folder again by the study file that lies in it, with changes."""
    changes: dict[str, Any] = {
        "components": components,
        "common_window": common_window,
        "skip_positions": skip_positions,
    }
    changes |= {"detail": detail, "kind": kind}
    changes = {key: value for key, value in changes.items() if value is not None}
    study = changed(load_study(layout.results_file(folder, layout.STUDY_YAML)).study, changes)
    _require_own_moments(folder, study)
    with lock_folder(out or folder):
        return analyze_study(folder, study, events, command, out)


def _require_own_moments(folder: Path, study: Study) -> None:
    """Refuse moments that were renamed from another checkpoint; a new name for the same model is fine."""
    for checkpoint in study.resolved_checkpoints():
        path = layout.moments_path(folder, checkpoint.name)
        if not path.is_file():
            continue
        with located(str(path)):
            origin = CheckpointRecord.read(read_provenance(path))
        made_from = _model_name(origin.model, origin.revision, origin.config_overrides)
        wanted = _model_name(checkpoint.model, checkpoint.revision, checkpoint.config)
        if origin.name not in (None, checkpoint.name) and made_from != wanted:
            raise InputError(
                f"{path}: holds the sums of checkpoint {origin.name!r} ({made_from}), but the study's "
                f"{checkpoint.name!r} is {wanted}; rename it back to {origin.name}{layout.MOMENTS_SUFFIX}, or run the "
                "study again"
            )


def _model_name(model: str | None, revision: str | None, config: Mapping[str, Any] | None) -> str:
    at, changes = f"@{revision}" if revision else "", f" with config {dict(config)}" if config else ""
    return f"model {model}{at}{changes}"


def analyze_files(
    paths: list[Path],
    events: Listener,
    command: str,
    *,
    out: Path | None,
    components: int | None = None,
    common_window: int | None = None,
    skip_positions: int | None = None,
    detail: bool | None = None,
    kind: StudyKind | None = None,
) -> Path:
    """Analyze moments files from anywhere; they are named by their own provenance and ordered by its numbers."""
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise InputError(f"{missing[0]}: there is no such file or results folder")
    if out is None:
        raise InputError("single moments files need --out, the folder for the tables")
    if components is not None and components < 1:
        raise InputError(f"--components {components}: at least one component is needed")
    files, shortest = _named(paths)
    ordered = natural_order(list(files))
    if ordered != list(files):
        events.noted(f"ordered by the numbers in their names: {', '.join(ordered)}")
    settings = RowSettings(
        common=common_window or shortest,
        components=components or COMPONENTS,
        skip=skip_positions or 0,
        detail=len(files) <= MOST_IN_DETAIL if detail is None else detail,
    )
    with lock_folder(out), TableParts(out, settings) as made:
        by_name = {name: files[name] for name in ordered}
        return write_results(out, by_name, settings, events, command, kind=kind, made=made)


class _Silent:
    """Hears nothing: in a notebook, tables from sums in memory are made in a moment."""

    def wrote(self, path: str) -> None:
        """A file is there."""

    def noted(self, message: str) -> None:
        """Something a reader should know."""


def analyze_in_memory(moments: Mapping[str, Moments], out: Path, kind: StudyKind | None = None) -> Path:
    """Write moments that are in memory, by the names their rows get, and all their tables into the folder `out`."""
    paths = []
    for name, each in moments.items():
        path = layout.moments_path(out, _checked_name(out, name))
        path.parent.mkdir(parents=True, exist_ok=True)
        each.settle()
        sums = {layer: each.layer_moments(layer) for layer in each.layers}
        named = {**each.provenance, "name": name}
        Moments.from_layers(each.layout, each.layers.values(), sums, named, each.documents, each.all_attention()).save(
            path
        )
        paths.append(path)
    return analyze_files(paths, _Silent(), "qkscope.load", out=out, kind=kind)


def _named(paths: Sequence[Path]) -> tuple[dict[str, Path], int]:
    """Moments files by the names of their checkpoints, and the shortest context."""
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
    return files, min(contexts)


def natural_order(names: Sequence[str]) -> list[str]:
    """Names that differ only in numbers by these numbers (step-20 before step-100); others stay as they were given.

    A shell sorts letter by letter, which is the order of training only by accident.
    """
    patterns = {name: re.sub(r"\d+", "0", name) for name in names}
    ordered = sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    return [name for pattern in dict.fromkeys(patterns.values()) for name in ordered if patterns[name] == pattern]


def _checked_name(path: Path, name: str) -> str:
    """The checkpoint's name in a file that may come from anywhere: it will be a cell of every table."""
    try:
        return file_safe(name)
    except ValueError as error:
        raise InputError(f"{path}: is of a checkpoint named {name[:60]!r}, but {error}") from None


def write_results(
    out: Path,
    files: Mapping[str, Path],
    settings: RowSettings,
    events: Listener,
    command: str,
    study: Study | None = None,
    left_out: Mapping[str, str] | None = None,
    kind: StudyKind | None = None,
    *,
    made: TableParts,
    page_follows: bool = False,
) -> Path:
    """Make each checkpoint's rows, as far as `made` does not have them, and write tables and provenance into `out`.

    Outputs made from other tables, which an earlier run left there, are removed.
    """
    if not settings.detail:
        events.noted("tables with many rows per head are left out; `detail: true` or analyze --detail writes them")
    parts = made.of(files)
    origins = [part.origin for part in parts]
    stated = (study.kind if study else None) or kind
    require_kind(stated, [(origin.name or "?", origin.architecture) for origin in origins])
    read_as = stated or kind_of([origin.run for origin in origins])
    if study is None and len(origins) > 1:  # otherwise the plan has noted it
        events.noted(kind_sentence(read_as, len(origins), stated is not None))
    names = [checkpoint.name for checkpoint in study.checkpoints] if study else []
    reasons = left_out or {}
    record = Provenance.of(
        {
            **_provenance(settings, origins, command, study),
            "kind": read_as,
            "kind_stated": stated is not None,
            "checkpoints_left_out": [{"name": name, "reason": reasons[name]} for name in names if name in reasons],
        }
    )
    before = made.current.record
    key = hash_of([(name, part.key) for name, part in zip(files, parts, strict=True)], read_as, str(settings))
    is_current = before is not None and before.key == key
    paths = _join(out, parts, record, events, page_follows, is_current=is_current)
    for sentence in shared_attention(origins):
        events.noted(sentence)
    others: list[Path] = []
    if is_current:
        events.noted("tables are current: nothing that they are made from has changed")
    else:
        events.wrote(str(_write_description(out, head_tables(), settings)))
        kept = all(path.is_file() for path in files.values())  # a training run may not have kept them
        others = write_study_tables(out, files, parts, settings, read_as) if kept else []
    for path in (*others, write_provenance(out, record)):
        events.wrote(str(path))
    if is_current:
        made.current.confirm()
    else:
        made.current.remember(key, dict(zip(files, parts, strict=True)), paths, others)
    return out


def _join(
    out: Path, parts: Sequence[TablePart], record: Provenance, events: Listener, page_follows: bool, *, is_current: bool
) -> dict[str, Path]:
    """Write the tables of heads, unless they are current, after removing what does not match them."""
    tables = {name: [part for part in parts if name in part.headers] for part in parts for name in part.headers}
    paths = {name: joined_path(out, having, name) for name, having in tables.items()}
    same = is_current or all(is_joined(having, name, paths[name]) for name, having in tables.items())
    removed = remove_outdated(out, record, same_tables=same, page=not page_follows)
    if removed is not None:
        events.noted(removed)
    for name, having in tables.items() if not is_current else ():
        join_parts(having, name, paths[name])
        events.wrote(str(paths[name]))
        if paths[name].name == HEADS_PARQUET:
            events.noted(f"{HEADS_PARQUET} is too large for a spreadsheet, so it is not written as {HEADS_CSV}")
    # An earlier run may have had more detail, vectors, or other contexts, and 0.2 had other tables.
    for file in {*FILES, *EARLIER_TABLES} - {path.name for path in paths.values()}:
        remove_head_table(out, file)
    return paths


def _provenance(
    settings: RowSettings, origins: list[CheckpointRecord], command: str, study: Study | None
) -> dict[str, Any]:
    sample = settings.heads
    characters = study.characters_in_common if study and settings.common is None else None
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
            "common_window": settings.common,
            **({} if characters is None else {"common_characters": characters}),
            "skip_positions": max(settings.skip, origins[0].skip_positions or 0),
        },
        "environment": environment(),
    }


# -- tables.json -----------------------------------------------------------------------------------------------


def _write_description(folder: Path, sets: Sequence[HeadTable], settings: RowSettings) -> Path:
    """Write the description of the tables that these sets of measures give."""
    by_table: dict[str, list[HeadTable]] = {}
    for each in sets:
        by_table.setdefault(each.table, []).append(each)
    tables = {name: _table_description(folder, its, settings) for name, its in by_table.items()}
    path = layout.results_file(folder, layout.TABLES_JSON)
    write_text(path, json.dumps({"layout": TABLES_LAYOUT, "tables": tables}, indent=1, ensure_ascii=False) + "\n")
    return path


def _table_description(folder: Path, sets: Sequence[HeadTable], settings: RowSettings) -> dict[str, Any]:
    name, path = sets[0].table, layout.stored_table(folder, sets[0].table)
    there = {"file": path.name} if path is not None else {"absent": _why_absent(name, sets, settings)}
    measures = {column.name: _measure(each, column) for each in sets for column in (*each.columns, *each.judged)}
    if name == HEADS:  # what follows from component 0 of each head
        measures |= {each.name: _definition(lens.name, each) for lens in registered() for each in lens.derived}
    return {**there, "rows": list(sets[0].key), "measures": measures}


def _why_absent(name: str, sets: Sequence[HeadTable], settings: RowSettings) -> str:
    if name == COMPONENTS_TABLE:
        return "every context is the common window"
    if all(each.detail for each in sets) and not settings.detail:
        return "left out: the study's `detail` is false"
    return "no checkpoint's vectors were kept" if all(each.needs_vectors for each in sets) else "not made"


def _measure(measures: HeadTable, column: Measure) -> dict[str, Any]:
    about = _definition(measures.name, column)
    about |= {"estimator": measures.estimator} if measures.estimator else {}
    if column.error is None or column not in measures.columns:
        return about
    if measures.own_buckets:
        return about | {"errors": "jackknife over document groups, covariances of buckets by first order"}
    if measures.first_order:
        return about | {"errors": f"jackknife over document groups, {measures.first_order} by first order"}
    fixed = f", {measures.holds_fixed} fixed" if measures.holds_fixed else ""
    return about | {"errors": f"jackknife over document groups{fixed}"}


def _definition(of: str, column: Measure) -> dict[str, Any]:
    return {"set": of, "definition": column.definition, **({"unit": column.unit} if column.unit else {})}
