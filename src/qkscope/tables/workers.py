"""The parts of the tables, made in this process or by worker processes: during a run, or several at once afterwards.

Workers are processes because limits of threads hold for a whole process: eigenproblems take one core each, and the
model's products all of them.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from qkscope.errors import MomentsFileError, QkscopeError, QkscopeWarning
from qkscope.processes import NICENESS, WorkerPool, free_memory
from qkscope.results.folder import CURRENT_JSON, MOMENTS, parts_path, results_file, vectors_path
from qkscope.results.remove import remove_parts
from qkscope.study.rows import RowSettings
from qkscope.study.schema import Study

if TYPE_CHECKING:
    from qkscope.tables.current import CurrentTables
    from qkscope.tables.parts import PartRequest, TablePart

MIN_BYTES_FOR_WORKER = 16 * 2**20  # of a moments file; tables of smaller ones take less time than a process to start
MIN_BYTES_PER_WORKER = 32 * 2**20  # where several share the files: seconds of work for each
MEMORY_PER_FILE = 4  # what a worker needs, in sizes of a moments file: the sums twice, products, rows


class TableParts:
    """The parts of all checkpoints, each made once; they are removed at the end of the `with` block."""

    def __init__(self, folder: Path, settings: RowSettings, study: Study | None = None) -> None:
        self._folder, self._settings, self._study = folder, settings, study
        self._begun: dict[str, Future[tuple[TablePart, list[str]]]] = {}
        self._beside: WorkerPool | None = None
        self._keys: dict[str, str | None] = {}  # of what a checkpoint's rows depend on

    def __enter__(self) -> Self:
        remove_parts(self._folder)  # of a run that was killed
        return self

    @cached_property
    def current(self) -> CurrentTables:
        """The tables that are there: rows that an earlier run made are taken from them."""
        from qkscope.tables.current import CurrentTables

        return CurrentTables(self._folder)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._beside is not None:
            self._beside.close()
        remove_parts(self._folder)

    def begin(self, name: str, moments: Path) -> None:
        """Make a checkpoint's part in a worker during the run, if the part is large enough to be worth one."""
        if results_file(self._folder, CURRENT_JSON).exists() and self._current_part(name, moments) is not None:
            return
        if self._beside is None and moments.stat().st_size >= MIN_BYTES_FOR_WORKER:
            self._beside = WorkerPool.available(1, niceness=NICENESS)
        if self._beside is not None:
            self._submit(self._beside, name, moments)

    def of(self, files: Mapping[str, Path]) -> list[TablePart]:
        """The parts of these checkpoints, in this order; those that are missing are made.

        Parts that still wait for that worker are made by several workers, because all cores are free now.
        """
        self._begun = {name: part for name, part in self._begun.items() if not part.cancel()}
        known = {name: self._current_part(name, path) for name, path in files.items() if name not in self._begun}
        left = {name: files[name] for name, part in known.items() if part is None}
        count = _worker_count([path.stat().st_size for path in left.values()])
        pool = WorkerPool.available(count) if count > 1 else None
        with pool or nullcontext():
            if pool is not None:
                for name, path in left.items():
                    self._submit(pool, name, path)
            return [known.get(name) or self._part(name, path) for name, path in files.items()]

    def _current_part(self, name: str, moments: Path) -> TablePart | None:
        """The part in the tables that are there, if nothing that it depends on has changed."""
        from qkscope.tables.current import part_key

        if name not in self._keys:
            with suppress(MomentsFileError):  # reported where the sums are read
                self._keys[name] = part_key(self._request(name, moments))
        return self.current.part(name, self._keys.get(name))

    def _submit(self, pool: WorkerPool, name: str, moments: Path) -> None:
        """Ask a worker for a part. Where that is not possible, the part is made here later."""
        from qkscope.lenses.registry import head_tables

        try:
            tables = pickle.dumps(head_tables())
            self._begun[name] = pool.submit(_make_in_worker, self._request(name, moments), tables)
        # A lens whose functions have no importable name, as in a notebook; or the worker died over an earlier part.
        except (pickle.PicklingError, AttributeError, TypeError, BrokenProcessPool):
            pass

    def _part(self, name: str, path: Path) -> TablePart:
        from qkscope.lenses.registry import head_tables
        from qkscope.tables.parts import make_part

        part: TablePart | None = None
        messages: list[str] = []
        if name in self._begun:
            try:
                part, messages = self._begun[name].result()
            except QkscopeError:
                raise
            except Exception:
                part = None  # worth another try here, with its own traceback
        for message in messages:
            warnings.warn(message, QkscopeWarning, stacklevel=2)
        part = part or make_part(self._request(name, path), head_tables())
        # Headers are longer than all else that is kept of a part, and those of all checkpoints are the same.
        headers = {sys.intern(table): sys.intern(line) for table, line in part.headers.items()}
        return replace(part, headers=headers, key=self._keys.get(name))

    def _request(self, name: str, moments: Path) -> PartRequest:
        from qkscope.tables.parts import PartRequest

        study = self._study
        checkpoint = next((each for each in study.checkpoints if each.name == name), None) if study else None
        vectors = None  # where the results folder that has these moments keeps a sample of the checkpoint's vectors
        if moments.parent.name == MOMENTS and vectors_path(moments.parent.parent, name).is_dir():
            vectors = vectors_path(moments.parent.parent, name).resolve()
        return PartRequest(
            name,
            moments.resolve(),
            study.resolved(checkpoint) if study and checkpoint else None,
            replace(self._settings, vectors=vectors),
            parts_path(self._folder, name).absolute(),
        )


def _make_in_worker(request: PartRequest, pickled_tables: bytes) -> tuple[TablePart, list[str]]:
    """The part, and the messages of warnings."""
    from qkscope.tables.parts import make_part

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", QkscopeWarning)
        part = make_part(request, pickle.loads(pickled_tables))
    return part, [str(each.message) for each in caught if issubclass(each.category, QkscopeWarning)]


def _worker_count(sizes: Sequence[int]) -> int:
    """How many workers to share moments files of these sizes: limited by cores, work and memory."""
    if not sizes:
        return 1
    room = free_memory() // (MEMORY_PER_FILE * max(sizes) + 2**28)
    return max(1, min(os.cpu_count() or 1, len(sizes), sum(sizes) // MIN_BYTES_PER_WORKER, room))
