"""From moments files to the tables of every lens and their provenance. No model, no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from qkscope.errors import InputError, located
from qkscope.kinds import StudyKind, kind_of, kind_sentence, require_kind
from qkscope.lenses.registry import head_tables
from qkscope.moments.file import read_provenance
from qkscope.moments.moments import Moments
from qkscope.results.environment import environment
from qkscope.results.folder import (
    MOMENTS_SUFFIX,
    STUDY_YAML,
    head_table_path,
    moments_path,
    results_file,
)
from qkscope.results.left_out import read_left_out
from qkscope.results.lock import lock_folder
from qkscope.results.provenance import SCHEMA, CheckpointRecord, Provenance, shared_attention, write_provenance
from qkscope.results.remove import remove_head_table
from qkscope.results.retired import EARLIER_TABLES
from qkscope.results.schema import FILES, HEADS_CSV, HEADS_PARQUET
from qkscope.study.load import changed, load_study
from qkscope.study.rows import COMPONENTS, RowSettings, row_settings
from qkscope.study.schema import MOST_IN_DETAIL, Study
from qkscope.study.values import file_safe
from qkscope.tables.description import write_description
from qkscope.tables.of_study import write_study_tables
from qkscope.tables.outdated import remove_outdated
from qkscope.tables.parts import TablePart, is_joined, join_parts, joined_name, require_same_columns
from qkscope.tables.workers import TableParts


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
    return write_results(
        out or folder,
        files,
        row_settings(study),
        events,
        command,
        study,
        left_out,
        made=made,
        page_follows=page_follows,
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
    study = load_study(results_file(folder, STUDY_YAML)).study
    changes = {
        "components": components,
        "common_window": common_window,
        "skip_positions": skip_positions,
        "detail": detail,
        "kind": kind,
    }
    study = changed(study, {key: value for key, value in changes.items() if value is not None})
    _require_own_moments(folder, study)
    with lock_folder(out or folder):
        return analyze_study(folder, study, events, command, out)


def _require_own_moments(folder: Path, study: Study) -> None:
    """Refuse moments that were renamed from another checkpoint; a new name for the same model is fine."""
    for checkpoint in study.resolved_checkpoints():
        path = moments_path(folder, checkpoint.name)
        if not path.is_file():
            continue
        with located(str(path)):
            origin = CheckpointRecord.read(read_provenance(path))
        made_from = _model_name(origin.model, origin.revision, origin.config_overrides)
        wanted = _model_name(checkpoint.model, checkpoint.revision, checkpoint.config)
        if origin.name not in (None, checkpoint.name) and made_from != wanted:
            raise InputError(
                f"{path}: holds the sums of checkpoint {origin.name!r} ({made_from}), but the study's "
                f"{checkpoint.name!r} is {wanted}; rename it back to {origin.name}{MOMENTS_SUFFIX}, or run the study "
                "again"
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
    with lock_folder(out):
        return write_results(out, {name: files[name] for name in ordered}, settings, events, command, kind=kind)


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
        path = moments_path(out, _checked_name(out, name))
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


def write_results(
    out: Path,
    files: Mapping[str, Path],
    settings: RowSettings,
    events: Listener,
    command: str,
    study: Study | None = None,
    left_out: Mapping[str, str] | None = None,
    kind: StudyKind | None = None,
    made: TableParts | None = None,
    *,
    page_follows: bool = False,
) -> Path:
    """Make each checkpoint's lines, as far as `made` does not have them, and write tables and provenance into `out`.

    Outputs made from other tables, which an earlier run left there, are removed.
    """
    with ExitStack() as closing:
        if made is None:
            made = closing.enter_context(TableParts(out, settings, study))
        if not settings.detail:
            events.noted("tables with many rows per head are left out; `detail: true` or analyze --detail writes them")
        parts = made.of(files)
        origins = [part.origin for part in parts]
        read_as = _kind(origins, (study.kind if study else None) or kind, events, aloud=study is None)
        provenance = {**_provenance(settings, origins, command, study), **read_as}
        provenance["checkpoints_left_out"] = _left_out(left_out or {}, study)
        record = Provenance.of(provenance)
        _join(out, parts, record, events, page_follows)
    for sentence in shared_attention(origins):
        events.noted(sentence)
    events.wrote(str(write_description(out, head_tables(), settings)))
    for path in write_study_tables(out, files, parts, settings, read_as["kind"]):
        events.wrote(str(path))
    events.wrote(str(write_provenance(out, record)))
    return out


def _join(out: Path, parts: Sequence[TablePart], record: Provenance, events: Listener, page_follows: bool) -> None:
    """Write the tables of heads, after removing what does not match them."""
    tables = {name: [part for part in parts if name in part.headers] for part in parts for name in part.headers}
    for name, having in tables.items():
        require_same_columns(having, name)
    paths = {name: head_table_path(out, joined_name(having, name)) for name, having in tables.items()}
    same = all(is_joined(having, name, paths[name]) for name, having in tables.items())
    removed = remove_outdated(out, record, same_tables=same, page=not page_follows)
    if removed is not None:
        events.noted(removed)
    for name, having in tables.items():
        join_parts(having, name, paths[name])
        events.wrote(str(paths[name]))
        if paths[name].name == HEADS_PARQUET:
            events.noted(f"{HEADS_PARQUET} is too large for a spreadsheet, so it is not written as {HEADS_CSV}")
    # An earlier run may have had more detail, vectors, or other contexts, and 0.2 had other tables.
    for file in {*FILES, *EARLIER_TABLES} - {path.name for path in paths.values()}:
        remove_head_table(out, file)


def _left_out(reasons: Mapping[str, str], study: Study | None) -> list[dict[str, str]]:
    """The study's checkpoints that the tables are without."""
    names = [checkpoint.name for checkpoint in study.checkpoints] if study else []
    return [{"name": name, "reason": reasons[name]} for name in names if name in reasons]


def _kind(origins: list[CheckpointRecord], stated: StudyKind | None, events: Listener, aloud: bool) -> dict[str, Any]:
    """What the entries are to each other, for the provenance; noted where no plan noted it."""
    require_kind(stated, [(origin.name or "?", origin.architecture) for origin in origins])
    kind = stated or kind_of([origin.run for origin in origins])
    if aloud and len(origins) > 1:
        events.noted(kind_sentence(kind, len(origins), stated is not None))
    return {"kind": kind, "kind_stated": stated is not None}


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
