"""Token ids kept in one file, so that nothing is tokenized twice and memory does not grow with the corpus."""

from __future__ import annotations

import os
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
from numpy.typing import NDArray

from qkscope.errors import QkscopeWarning

ID = np.dtype("<i4")


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """A file of the ids of all documents, one after the other. A copy in another process reads the same file."""

    path: Path
    starts: NDArray[np.int64]  # where each document begins, and at last the end, in ids
    behind: int = 0  # bytes of the file behind the ids

    @property
    def there(self) -> bool:
        """Whether this process sees the file: another machine does not."""
        try:
            return self.path.stat().st_size == int(self.starts[-1]) * ID.itemsize + self.behind
        except OSError:
            return False

    def ids(self, index: int, count: int) -> NDArray[np.int64]:
        """The first `count` ids of a document."""
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        # Read rather than mapped: a mapping of a large file takes as much address space, which may be limited.
        ids = np.fromfile(self.path, ID, count=min(end - start, count), offset=start * ID.itemsize)
        return ids.astype(np.int64)


class TokenWriter:
    """Writes ids document by document.

    Without a path the file is temporary: removed once nothing refers to its `KeptTokens`, at the latest when the
    process ends, and at once if the block is left with an error. A file at a path of one's own stays.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._temporary = path is None
        self._path = path
        self._file: IO[bytes] | None = None
        self._starts = [0]

    def __enter__(self) -> Self:
        try:
            if self._path is None:
                handle, name = tempfile.mkstemp(prefix="qkscope-", suffix=".tokens")
                self._path, self._file = Path(name), os.fdopen(handle, "wb")
            else:
                self._file = self._path.open("wb")
        except OSError as error:
            self._give_up(error)
        return self

    def append(self, ids: Sequence[int]) -> None:
        """The next document."""
        self._starts.append(self._starts[-1] + len(ids))
        if self._file is not None:
            try:
                self._file.write(np.asarray(ids, dtype=ID).tobytes())
            except OSError as error:
                self._give_up(error)

    def finish(self) -> KeptTokens | None:
        """What was written; None if it could not be, which has been said."""
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._give_up(error)
        if self._file is None or self._path is None:
            return None
        kept = KeptTokens(self._path, np.asarray(self._starts, dtype=np.int64))
        if self._temporary:
            weakref.finalize(kept, _remove, self._path, os.getpid())
        return kept

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._drop()

    def _give_up(self, error: OSError) -> None:
        self._drop()
        warnings.warn(
            f"tokens cannot be kept in {self._path or tempfile.gettempdir()} ({error.strerror or error}): documents "
            "are tokenized again for every checkpoint; TMPDIR names another folder for temporary files",
            QkscopeWarning,
            stacklevel=3,
        )

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None and self._path is not None:
            with suppress(OSError):  # what could not be written is not wanted any more
                file.close()
            _remove(self._path, os.getpid())


def _remove(path: Path, owner: int) -> None:
    """Only in the process that made the file: a fork of it ends too."""
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
