"""The entries of a study, for tables that compare them: what was before rotation, and the finished head tables.

Only what such a table asks for is read, when it asks: a layer's vectors before rotation are a few hundredths of a
moments file, and the rows of a head table come entry by entry. There may be a thousand entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from qkscope.kinds import StudyKind
from qkscope.moments.file import PreRopeFile
from qkscope.results.entries import saw_the_same
from qkscope.results.provenance import CheckpointRecord
from qkscope.study.rows import RowSettings, choose_heads


@dataclass(frozen=True)
class EntrySums:
    """One entry: where its vectors before rotation are read, and what it is."""

    name: str
    path: Path  # of its moments
    window: int  # tokens of its own context
    origin: CheckpointRecord

    @property
    def file(self) -> PreRopeFile:
        """Its moments file, opened again: a header is as large as a layer, and nobody needs those of all entries."""
        return PreRopeFile(self.path)


def shown_heads(file: PreRopeFile, settings: RowSettings) -> dict[int, list[int]]:
    """The query heads of an entry that tables show, by layer."""
    return choose_heads(file.layers.values(), settings.heads, settings.layers)


@dataclass(frozen=True)
class StudySums:
    """The entries of a study in order, and what its head tables say."""

    entries: tuple[EntrySums, ...]
    kind: StudyKind
    settings: RowSettings
    # The rows of each entry in turn of a table (by its name), as they were written, at some windows.
    head_table: Callable[[str, Set[int]], Iterator[pd.DataFrame]]

    @cached_property
    def same_documents(self) -> bool:
        """Whether all entries are known to have seen the same documents, so that errors can be paired."""
        return saw_the_same([entry.origin for entry in self.entries])

    @cached_property
    def windows(self) -> list[tuple[str, list[int]]]:
        """Each choice of windows, with the window of every entry; the common one only where it is another choice."""
        own = [entry.window for entry in self.entries]
        common = [self.settings.common or min(own)] * len(own)
        if self.settings.common_of_sums:
            common = [entry.file.layout.common or entry.window for entry in self.entries]
        return [("own", own)] if common == own else [("own", own), ("common", common)]
