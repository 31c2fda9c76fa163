"""Who makes the parts of the tables: this process, or others beside it, while the run goes on or several at once.

Others are processes and not threads: the limits that keep small eigenproblems on one core each hold for a whole
process, and would hold for the model's products too.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from qkscope.lenses.base import HeadTable
from qkscope.lenses.heads import head_sample, layer_choice
from qkscope.lenses.registry import head_tables
from qkscope.lenses.rows import RowSettings
from qkscope.results.folder import MOMENTS, parts_path, vectors_path
from qkscope.results.remove import remove_parts
from qkscope.study.schema import Checkpoint, Study
from qkscope.tables.memory import free_memory
from qkscope.tables.parts import PartRequest, TablePart, make_part

WORTH_ONE = 16 * 2**20  # bytes of a moments file; of smaller ones a process takes longer to start than the tables
WORTH_SEVERAL = 32 * 2**20  # bytes for each of several processes, which is seconds of work
IN_MEMORY = 4  # what a process holds at most, in sizes of a moments file: the sums twice, products, rows
POLITE = 10  # how far processes beside a run stand back behind it
SERVE = (
    "import sys, pickle; sys.path[:] = pickle.load(sys.stdin.buffer); from qkscope.tables import makers; makers.serve()"
)


def row_settings(study: Study) -> RowSettings:
    """Which rows the tables of a study have."""
    window = study.window_in_common()
    return RowSettings(
        common=window,
        components=study.components,
        heads=head_sample(study),
        layers=layer_choice(study),
        skip=study.skip_positions,
        detail=study.in_detail(),
        common_of_sums=window is None,
    )


class TableParts:
    """The parts of all checkpoints, each made once; they are gone when the block is left."""

    def __init__(self, folder: Path, settings: RowSettings, study: Study | None = None) -> None:
        self._folder, self._settings, self._study = folder, settings, study
        self._tables = head_tables()
        self._begun: dict[str, Future[TablePart | None]] = {}
        self._makers: _Makers | None = None

    def __enter__(self) -> Self:
        remove_parts(self._folder)  # of a run that was killed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._makers is not None:
            self._makers.close()
        remove_parts(self._folder)

    def begin(self, name: str, moments: Path) -> None:
        """Make a checkpoint's part beside what goes on here, if that is worth a process."""
        if self._makers is None and moments.stat().st_size >= WORTH_ONE:
            self._makers = _Makers.of(self._tables, 1, behind=True)
        if self._makers is not None:
            self._begun[name] = self._makers.make(self._request(name, moments))

    def of(self, files: Mapping[str, Path]) -> list[TablePart]:
        """The parts of these checkpoints, in this order; those that are missing are made.

        What waits behind the one process beside the run is taken back: now all cores are free for it.
        """
        self._begun = {name: part for name, part in self._begun.items() if not part.cancel()}
        left = {name: path for name, path in files.items() if name not in self._begun}
        several = _processes([path.stat().st_size for path in left.values()])
        makers = _Makers.of(self._tables, several, behind=False) if several > 1 else None
        try:
            if makers is not None:
                self._begun |= {name: makers.make(self._request(name, path)) for name, path in left.items()}
            return [self._part(name, path) for name, path in files.items()]
        finally:
            if makers is not None:
                makers.close()

    def _part(self, name: str, path: Path) -> TablePart:
        made = self._begun[name].result() if name in self._begun else None
        part = made or make_part(self._request(name, path), self._tables)
        # Headers are longer than all else that is kept of a part, and those of all checkpoints are the same.
        return replace(part, headers={sys.intern(table): sys.intern(line) for table, line in part.headers.items()})

    def _request(self, name: str, moments: Path) -> PartRequest:
        place, settings = parts_path(self._folder, name), replace(self._settings, vectors=_kept(moments, name))
        return PartRequest(name, moments.resolve(), self._named(name), settings, place.absolute())

    def _named(self, name: str) -> Checkpoint | None:
        """The study's checkpoint of that name, resolved."""
        matches = [each for each in self._study.checkpoints if each.name == name] if self._study else []
        return self._study.resolved(matches[0]) if self._study and matches else None


def _kept(moments: Path, name: str) -> Path | None:
    """Where the results folder that has these moments keeps a sample of the checkpoint's vectors."""
    if moments.parent.name != MOMENTS:
        return None
    folder = vectors_path(moments.parent.parent, name)
    return folder.resolve() if folder.is_dir() else None


def _processes(sizes: Sequence[int]) -> int:
    """How many processes to share files of these sizes: as many as have something to do, and room."""
    if not sizes:
        return 1
    room = free_memory() // (IN_MEMORY * max(sizes) + 2**28)
    return max(1, min(os.cpu_count() or 1, len(sizes), sum(sizes) // WORTH_SEVERAL, room))


class _Makers:
    """Processes that make parts; each is spoken to by a thread of its own."""

    def __init__(self, packed: bytes, count: int, behind: bool) -> None:
        self._packed, self._behind = packed, behind
        self._processes: list[subprocess.Popen[bytes]] = []
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(count, "tables")

    @classmethod
    def of(cls, tables: Sequence[HeadTable], count: int, *, behind: bool) -> _Makers | None:
        """So many processes that know these tables; None where a table cannot be told to another process."""
        try:
            return cls(pickle.dumps(tuple(tables)), count, behind)
        except Exception:  # a lens whose functions have no importable name, as in a notebook
            return None

    def make(self, request: PartRequest) -> Future[TablePart | None]:
        """The part, later; None if its process died: it may have been killed for memory, and is worth another try."""
        return self._threads.submit(self._make, request)

    def _make(self, request: PartRequest) -> TablePart | None:
        try:
            process = self._process()
            pickle.dump(request, _there(process.stdin))
            _there(process.stdin).flush()
            answer = pickle.load(_there(process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError):
            self._own.process = None
            return None
        if isinstance(answer, BaseException):
            raise answer
        part: TablePart | None = answer
        return part

    def _process(self) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is None:
            # A session of its own: Ctrl-C in a terminal is for the run, which decides.
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            self._processes.append(process)
            self._own.process = process
            for state in (sys.path, self._behind, self._packed):
                pickle.dump(state, _there(process.stdin))
        return process

    def close(self) -> None:
        """End all processes; what they were at is not wanted any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True)
        for process in self._processes:  # with those that a thread started meanwhile
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what was not yet written to it is lost, as it should be
                    _there(pipe).close()


def _there(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # both were asked for
    return pipe


# -- the other process -------------------------------------------------------------------------------------


def serve() -> None:
    """Make what is asked for until whoever asks goes away."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not be taken for an answer
    behind: bool = pickle.load(requests)
    if behind and hasattr(os, "nice"):
        os.nice(POLITE)
    tables: tuple[HeadTable, ...] = pickle.loads(pickle.load(requests))
    with suppress(EOFError, BrokenPipeError):
        while True:
            request: PartRequest = pickle.load(requests)
            answer: Any
            try:
                answer = make_part(request, tables)
            except Exception as error:
                answer = error
            answers.write(_packed(answer))
            answers.flush()


def _packed(answer: Any) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception:  # an error that cannot be told: the run makes the part itself, and meets it there
        return pickle.dumps(None)
