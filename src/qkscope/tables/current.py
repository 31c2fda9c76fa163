"""Rows that an earlier run made, taken from the tables that are there instead of being made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qkscope.files import remove_file
from qkscope.moments.header import read_header
from qkscope.results.current import (
    Current,
    CurrentPart,
    code_version,
    file_state,
    has_foreign_lenses,
    hash_of,
    read_current,
)
from qkscope.results.folder import CURRENT_JSON, PROVENANCE_JSON, head_table_path, results_file
from qkscope.results.read import read_provenance
from qkscope.tables.parts import PartRequest, TablePart, stored_header


def part_key(request: PartRequest) -> str | None:
    """A hash of all that a checkpoint's rows depend on; None with lenses from elsewhere."""
    if has_foreign_lenses():
        return None
    vectors, checkpoint = request.settings.vectors, request.checkpoint
    kept = sorted(path for path in vectors.rglob("*") if path.is_file()) if vectors else []
    return hash_of(
        code_version(),
        request.name,
        read_header(request.moments).checksum,
        file_state(request.moments),
        checkpoint.model_dump(mode="json") if checkpoint else None,
        str(replace(request.settings, vectors=None)),
        [[path.name, *file_state(path)] for path in kept],
    )


class CurrentTables:
    """The tables of a results folder with their record, where each file is as it was."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.record = folder, read_current(folder)
        if self.record is not None:
            self._files = {table: head_table_path(folder, name) for table, name in self.record.tables.items()}
            self._headers = {table: stored_header(path) for table, path in self._files.items()}
            self._origins = read_provenance(results_file(folder, PROVENANCE_JSON)).by_name()

    def part(self, name: str, key: str | None) -> TablePart | None:
        """A checkpoint's rows in the tables that are there, if they are of that key."""
        stored = self.record.parts.get(name) if self.record is not None and key is not None else None
        if stored is None or stored.key != key or name not in self._origins or not set(stored.rows) <= set(self._files):
            return None
        spans = {table: (start, end) for table, (start, end) in stored.rows.items()}
        files = {table: self._files[table] for table in spans}
        headers = {table: self._headers[table] for table in spans}
        return TablePart(self.folder, spans, headers, self._origins[name], stored.window, files, key)

    def remember(
        self, key: str | None, parts: Mapping[str, TablePart], tables: Mapping[str, Path], others: Sequence[Path]
    ) -> None:
        """Record tables that were just written from these parts, in this order, with other tables."""
        path = results_file(self.folder, CURRENT_JSON)
        if key is None or any(part.key is None for part in parts.values()):
            remove_file(path)
            return
        spans: dict[str, dict[str, list[int]]] = {name: {} for name in parts}
        for table, file in tables.items():
            at = 0 if file.suffix == ".parquet" else len(stored_header(file).encode()) + 1
            for name, part in parts.items():
                if table in part.bytes:
                    start, end = part.bytes[table]
                    spans[name][table] = [at, at := at + (1 if file.suffix == ".parquet" else end - start)]
        known = {
            name: CurrentPart(key=part.key or "", window=part.window, rows=spans[name]) for name, part in parts.items()
        }
        names, files = {table: file.name for table, file in tables.items()}, [*tables.values(), *others]
        states = {file.name: file_state(file) for file in files}
        provenance = file_state(results_file(self.folder, PROVENANCE_JSON))
        Current(key=key, tables=names, parts=known, files=states, provenance=provenance).save(self.folder)

    def confirm(self) -> None:
        """Record that the tables are what they were; only their provenance was written again."""
        assert self.record is not None
        provenance = file_state(results_file(self.folder, PROVENANCE_JSON))
        self.record.model_copy(update={"provenance": provenance}).save(self.folder)
