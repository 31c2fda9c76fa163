"""Results in a notebook, of a results folder, an archive or moments in memory: tables, figures, cards, page.

results = qkscope.load("results/my_study")
results.heads(), results.means("r_q", "ap"), results.figure("norms"), results.page()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pandas as pd

from qkscope.errors import InputError
from qkscope.files import as_path
from qkscope.lenses.base import Figure as Declared
from qkscope.lenses.long_tables import changes_table, means_table
from qkscope.lenses.registry import derived, registered
from qkscope.lenses.views import Results, WindowView, build_tables, summary_file
from qkscope.page.write import write_page
from qkscope.report.cards import draw_chart, drawable, figure_card
from qkscope.report.summary import summarize
from qkscope.report.write import page_cards
from qkscope.results.entries import Entries
from qkscope.results.folder import MOMENTS_SUFFIX, plain_name
from qkscope.results.read import load_results
from qkscope.text import closest
from qkscope.words.blocks import to_markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from qkscope.moments.moments import Moments

OWN, COMMON = "own", "common"


@dataclass(frozen=True)
class StudyResults(Results):
    """What `qkscope run` wrote, read and checked; or tables of moments in memory, in a temporary folder.

    `window` is `own` (native context length), `common` (the common window), or a number of tokens.
    """

    temporary: TemporaryDirectory[str] | None = None  # removed with this object

    @property
    def folder(self) -> Path:
        """The results folder, or the archive, that was loaded."""
        return self.files.source

    @property
    def study(self) -> Entries:
        """Title, checkpoints (or seeds, or models) and what they are to each other."""
        return self.files.study

    def heads(self, window: str | int = OWN, *, common: bool = False) -> pd.DataFrame:
        """One row per checkpoint and head, with every measure of every lens."""
        if isinstance(window, int) and not isinstance(window, bool):
            rows = self.own.windows
            known = set() if rows is None else {int(each) for each in rows["window"]}
            if rows is None or window not in known:
                known_window = closest(str(window), sorted(known))
                raise InputError(f"{self.folder} was not measured at a window of {window}{known_window}")
            # Copied into a block per type: pandas is slow, and warns, where each of hundreds of columns is a block.
            return derived(rows[rows["window"] == window].reset_index(drop=True).copy(), registered())
        return self._view(window, common).heads.copy()

    def means(self, *measures: str) -> pd.DataFrame:
        """Means over heads with their standard errors, by checkpoint, window and layer type: all measures, or these."""
        return means_table(self, self._known(measures))

    def changes(self, *measures: str) -> pd.DataFrame | None:
        """Changes of these means along a training run: step by step, and from first to last; None without a run."""
        return changes_table(self, self._known(measures))

    def table(self, name: str, window: str = OWN, *, common: bool = False) -> pd.DataFrame:
        """A table such as `heads` or `buckets`, the rows of a set of measures such as `profile`, or a summary."""
        at = self._view(window, common)
        rows = at.find(name)
        if rows is None:
            known = [*(summary_file(each.name, at.common).removesuffix(".csv") for each in at.summaries()), *at.tables]
            raise InputError(f"{self.folder} has no table {name!r}{closest(name, known)}")
        return rows.copy()

    def figure(self, name: str) -> Figure:
        """A figure of the report, as a matplotlib figure."""
        return draw_chart(self._drawable(name), self)

    def card(self, name: str) -> str:
        """What a figure shows, in words (Markdown)."""
        return to_markdown(figure_card(self._drawable(name), self))

    def summary(self) -> str:
        """Headline, findings and heads to inspect first, as `qkscope report` prints them."""
        return str(summarize(self))

    def page(self, out: Path | str | None = None) -> Path:
        """Write the interactive page, `report.html`, into the results folder or into `out`; returns where it is."""
        if out is None and (self.temporary is not None or self.files.folder != self.files.source):
            out = Path.cwd()
        place = None if out is None else as_path(out, "out")
        return write_page(self, summarize(self).to_page(), page_cards(self), place)

    @property
    def figures(self) -> list[str]:
        """Names of all figures that these results carry."""
        return [figure.name for figure in drawable(self)]

    def _known(self, measures: tuple[str, ...]) -> tuple[str, ...] | None:
        for name in measures:
            if not self.own.panel.has(name):
                raise InputError(f"{self.folder} has no measure {name!r}{closest(name, self.own.mean_measures)}")
        return measures or None

    def _drawable(self, name: str) -> Declared:
        known = {figure.name: figure for figure in drawable(self)}
        if name not in known:
            raise InputError(f"{self.folder} has no figure {name!r}{closest(name, list(known))}")
        return known[name]

    def _view(self, window: str | int, common: bool) -> WindowView:
        if window not in (OWN, COMMON):
            raise InputError(f"window should be {OWN!r} or {COMMON!r}, not {window!r}")
        if window == OWN and not common:
            return self.own
        if self.common is None:
            raise InputError(f"{self.folder} has one choice of windows: every context is the common window")
        return self.common

    def __repr__(self) -> str:
        study = self.study
        heads = len(self.files.heads) // max(1, len(study.names))
        noun = study.noun if len(study.names) == 1 else f"{study.noun}s"
        return f"<results of {study.title!r}: {len(study.names)} {noun}, {heads} heads each, in {self.folder}>"


def load(source: Path | str | Moments | Mapping[str, Moments]) -> StudyResults:
    """Read a results folder, an archive or a moments file; or analyze moments in memory, given by name."""
    from qkscope.moments.moments import Moments

    temporary = None
    if not isinstance(source, Moments | Mapping):
        source = as_path(source, "the results folder")
        if source.suffix == MOMENTS_SUFFIX and source.is_file():
            source = Moments.load(source)
    if isinstance(source, Moments):
        source = {str(source.provenance.get("name") or "model"): source}
    if isinstance(source, Mapping):
        temporary, source = _analyzed(source)
    built = build_tables(load_results(source))
    return StudyResults(built.files, built.own, built.common, temporary)


def _analyzed(moments: Mapping[str, Moments]) -> tuple[TemporaryDirectory[str], Path]:
    """A temporary folder, and in it a results folder with the tables of these moments; its name is their title."""
    from qkscope.moments.moments import Moments
    from qkscope.tables.from_moments import analyze_in_memory

    wrong = next((each for each in moments.values() if not isinstance(each, Moments)), None)
    if not moments or wrong is not None:
        raise InputError(f"results are made of moments by name, {{'step 100': moments}}, not {type(wrong).__name__}")
    temporary = TemporaryDirectory(prefix="qkscope-")
    folder = Path(temporary.name) / (plain_name(next(iter(moments))) if len(moments) == 1 else "moments")
    folder.mkdir()
    analyze_in_memory(moments, folder)
    return temporary, folder
