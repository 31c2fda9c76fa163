"""Head tables from datasets of raw vectors: local folders or Hub datasets, one per model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from qkscope.errors import InputError, located
from qkscope.kinds import StudyKind
from qkscope.lenses.registry import tables_from_vectors
from qkscope.lenses.rows import COMPONENTS
from qkscope.lenses.vector_rows import table_from_vectors
from qkscope.results.csv_files import csv_text, write_csv
from qkscope.results.environment import environment
from qkscope.results.folder import head_table_path
from qkscope.results.lock import only_run
from qkscope.results.provenance import SCHEMA, CheckpointRecord, Provenance, write_provenance
from qkscope.results.remove import remove_head_table
from qkscope.results.retired import EARLIER_TABLES
from qkscope.results.schema import FILES, TABLES
from qkscope.study.harmless import file_safe
from qkscope.tables.from_moments import Listener
from qkscope.tables.outdated import remove_outdated
from qkscope.vectors.hub import download_vectors
from qkscope.vectors.layout import stored_sample
from qkscope.vectors.read import Reading, open_vectors

HUB = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>.+))?")


@dataclass(frozen=True)
class VectorSource:
    """A dataset and the name its rows get."""

    name: str
    folder: Path | None  # local, or
    repo: str | None = None  # on the Hub
    revision: str | None = None

    def fetch(self) -> Path:
        """The folder with the dataset; a Hub dataset is downloaded (or found in the cache)."""
        return self.folder if self.folder is not None else download_vectors(self.repo or "", self.revision)


def parse_source(text: str) -> VectorSource:
    """`[NAME=]DIR` or `[NAME=]org/dataset[@REVISION]`; what is there as a folder is a folder."""
    name, _, place = text.rpartition("=")
    hub = HUB.fullmatch(place)
    folder = Path(place)
    if not folder.is_dir() and hub is None:
        raise InputError(f"--vectors {place}: there is no such folder, nor is it the id of a Hub dataset")
    chosen = name or (folder.resolve().name if folder.is_dir() else (hub and (hub["revision"] or hub["id"])) or "")
    chosen = chosen.replace("/", "-")
    try:
        file_safe(chosen)
    except ValueError as error:
        raise InputError(f"--vectors {text}: {chosen!r} cannot name a model ({error}); write NAME={place}") from None
    if folder.is_dir():
        return VectorSource(chosen, folder)
    return VectorSource(chosen, None, hub["id"], hub["revision"]) if hub else VectorSource(chosen, folder)


def analyze_vectors(
    sources: list[str],
    out: Path,
    events: Listener,
    command: str,
    *,
    components: int | None = None,
    window: int | None = None,
    kind: StudyKind | None = None,
    reading: Reading = Reading(),  # noqa: B008 - frozen
) -> Path:
    """Write `qk.csv`, and other tables that lenses make of raw vectors alone, with their provenance.

    They are over the datasets' first `window` positions (or all).
    """
    parsed = [parse_source(text) for text in sources]
    names = [source.name for source in parsed]
    if len(set(names)) != len(names):
        raise InputError(f"two datasets are named {max(names, key=names.count)!r}; write NAME=DIR")
    with only_run(out):
        return _write_tables(parsed, out, events, command, components or COMPONENTS, window, kind, reading)


def _tell_sample(name: str, folder: Path, events: Listener) -> None:
    """Say it where early positions are over-represented: r is then over other positions than those of a text."""
    sample = stored_sample(folder)
    if sample is not None and sample[2]:
        events.noted(
            f"{name}: a log-uniform sample ({sample[2]} tokens each time that the position doubles): r is over "
            "positions as "
            "they were sampled, most of them early, and not to be compared with that of all tokens"
        )


def _write_tables(
    sources: list[VectorSource],
    out: Path,
    events: Listener,
    command: str,
    components: int,
    window: int | None,
    kind: StudyKind | None,
    reading: Reading,
) -> Path:
    tables: dict[str, list[pd.DataFrame]] = {table.table: [] for table in tables_from_vectors()}
    origins: list[CheckpointRecord] = []
    for source in sources:
        with located(f"vectors {source.name!r}"):
            folder = source.fetch()
            _tell_sample(source.name, folder, events)
            for table in tables_from_vectors():
                tables[table.table].append(
                    table_from_vectors(
                        table, folder, model=source.name, components=components, window=window, reading=reading
                    )
                )
            origins.append(_origin(source, folder, reading))
    provenance = {
        "schema": SCHEMA,
        "qkscope": environment()["qkscope"],
        "command": command,
        "study": None,
        **({"kind": kind, "kind_stated": True} if kind else {}),
        "checkpoints": origins,
        "analysis": {
            "components": components,
            "heads": "those in the dataset",
            "common_window": None,
            "window": window,
        },
        "environment": environment(),
    }
    _put_in_place(
        out, {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}, provenance, events
    )
    return out


def _put_in_place(
    out: Path, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any], events: Listener
) -> None:
    """Write tables and provenance, after removing what does not match them."""
    record = Provenance.of(provenance)
    rows = {head_table_path(out, TABLES[name].file): table for name, table in tables.items()}
    removed = remove_outdated(out, record, same_tables=all(map(_is_written, rows.values(), rows)))
    if removed is not None:
        events.noted(removed)
    for path, table in rows.items():
        write_csv(table, path)
        events.wrote(str(path))
    for file in {*FILES, *EARLIER_TABLES} - {path.name for path in rows}:  # of other models, or of moments
        remove_head_table(out, file)
    events.wrote(str(write_provenance(out, record)))


def _is_written(table: pd.DataFrame, path: Path) -> bool:
    return path.is_file() and path.read_bytes() == csv_text(table).encode()


def _origin(source: VectorSource, folder: Path, reading: Reading) -> CheckpointRecord:
    """What a dataset says of itself, and which version of it was read."""
    values = {
        "name": source.name,
        "label": source.name,
        "phase": None,
        "repository": source.repo,
        "revision": source.revision,
        "commit": folder.name if source.repo else None,  # the cache keeps a dataset under its commit
        **open_vectors(folder, reading).provenance,
    }
    return CheckpointRecord.of(values)
