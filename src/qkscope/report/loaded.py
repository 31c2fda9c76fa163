"""Results in a notebook, of a results folder or of moments in memory: heads, tables, figures, page."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from qkscope.errors import InputError
from qkscope.files import as_path
from qkscope.results.read import load_results

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from qkscope.lenses.views import Results, WindowView
    from qkscope.moments.moments import Moments
    from qkscope.report.catalogue import Numbered
    from qkscope.results.entries import Entries


class StudyResults:
    """What `qkscope run` wrote, read and checked; or tables of moments in memory, in a temporary folder."""

    def __init__(self, source: Path | str | Moments | Mapping[str, Moments]) -> None:
        from qkscope.moments.moments import Moments

        if isinstance(source, Moments):
            source = {str(source.provenance.get("name") or "model"): source}
        if isinstance(source, Mapping):
            self._temporary = _analyzed(source)  # removed with this object
            source = self._temporary.name
        self.folder = as_path(source, "the results folder")
        self._results = load_results(self.folder)

    @property
    def study(self) -> Entries:
        """Title, entries and what they are to each other."""
        return self._results.study

    @cached_property
    def _tables(self) -> Results:
        from qkscope.lenses.views import build_tables

        return build_tables(self._results)

    def heads(self, *, common: bool = False) -> pd.DataFrame:
        """One row per entry and head, with all that any lens says of it; over the common window, if asked."""
        return self.table("heads", common=common)

    def table(self, name: str, *, common: bool = False) -> pd.DataFrame:
        """A summary such as `trajectory`, or a head table by its file, such as `score.csv`."""
        from qkscope.lenses.views import summary_file

        at = self._at(common)
        table = at.find(name)
        if table is None:
            known = [
                *(summary_file(each.name, common).removesuffix(".csv") for each in at.summaries()),
                *at.tables,
            ]
            raise InputError(f"{self.folder} has no table {name!r}{_closest(name, known)}")
        return table.copy()

    def figure(self, name: str, *, common: bool = False) -> Figure:
        """A figure of the report, as a matplotlib figure."""
        from qkscope.report.figures import draw

        entry, at = self._drawable(name, common)
        return draw(entry, self._tables, at)

    def card(self, name: str, *, common: bool = False) -> str:
        """What a figure shows, in words (Markdown)."""
        from qkscope.words.blocks import to_markdown

        entry, at = self._drawable(name, common)
        return to_markdown(entry.card(self._tables, at))

    @property
    def figures(self) -> list[str]:
        """Names of all figures that these results carry."""
        from qkscope.report.catalogue import drawable

        return list(dict.fromkeys(entry.name for entry, _ in drawable(self._tables)))

    def _drawable(self, name: str, common: bool) -> tuple[Numbered, WindowView]:
        from qkscope.report.catalogue import drawable

        for entry, at in drawable(self._tables):
            if entry.name == name and at.common == common:
                return entry, at
        where = " at the common window" if common else ""
        raise InputError(f"{self.folder} has no figure {name!r}{where}{_closest(name, self.figures)}")

    def _at(self, common: bool) -> WindowView:
        if not common:
            return self._tables.own
        if self._tables.common is None:
            raise InputError(f"{self.folder} has one choice of windows: every context is the common window")
        return self._tables.common

    def __repr__(self) -> str:
        study = self.study
        heads = len(self._results.heads) // max(1, len(study.names))
        noun = study.noun if len(study.names) == 1 else f"{study.noun}s"
        return f"<results of {study.title!r}: {len(study.names)} {noun}, {heads} heads each, in {self.folder}>"


def _analyzed(moments: Mapping[str, Moments]) -> TemporaryDirectory[str]:
    """A results folder with the tables of these moments."""
    from qkscope.moments.moments import Moments
    from qkscope.tables.from_moments import analyze_in_memory

    wrong = next((each for each in moments.values() if not isinstance(each, Moments)), None)
    if not moments or wrong is not None:
        raise InputError(f"results are made of moments by name, {{'step 100': moments}}, not {type(wrong).__name__}")
    folder = TemporaryDirectory(prefix="qkscope-")
    analyze_in_memory(moments, Path(folder.name))
    return folder


def _closest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
