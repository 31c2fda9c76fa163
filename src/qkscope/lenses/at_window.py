"""A study at one choice of windows, with the tables that the lenses make of it.

There are one or two such choices: each entry's own context, and, where contexts differ, the window that all share
(files ending in `_common`). Summaries are built when they are first asked for, each once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from qkscope.lenses.base import Lens, Summary
from qkscope.lenses.categories import dominated
from qkscope.lenses.draws import KEY, drawn_heads
from qkscope.lenses.means import MEANS_KEY, LensPanel, with_averaged
from qkscope.lenses.registry import registered
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import table_path
from qkscope.results.read import Entries, Results, read_head_table, read_study_table
from qkscope.results.remove import remove_table
from qkscope.results.schema import LAYER_MEANS_CSV, QK_FILES, QK_WINDOWS_CSV, REPLICATES_CSV
from qkscope.stats.noise import HeadPanel
from qkscope.words.blocks import Block

COMMON_SUFFIX = "_common"
NOWHERE = np.zeros(0, dtype=np.intp)
WINDOW_PANELS = 20  # entries whose heads at all windows are kept at hand
RETIRED = ("rope_vs_nope",)  # tables of earlier versions, taken away where they are found


class AtWindow:
    """The heads of each entry over its own context, or over the common window."""

    def __init__(
        self,
        study: Entries,
        heads: pd.DataFrame,
        lenses: Sequence[Lens],
        *,
        common: bool = False,
        windows: pd.DataFrame | None = None,
        window_replicates: pd.DataFrame | None = None,
        head_tables: Mapping[str, pd.DataFrame] | None = None,
        components: pd.DataFrame | None = None,
        contexts: Mapping[str, float] | None = None,
    ) -> None:
        present = set(heads["model"])
        self.study = study.only([name for name in study.names if name in present])
        self.heads = _derived(heads, lenses)  # component 0, one row per head
        self.windows = None if windows is None or windows.empty else _derived(windows, lenses)  # the same, by window
        self._window_replicates = window_replicates  # at every window
        self.components = components  # every component of each head, where they were read
        self.common = common
        self.other: AtWindow | None = None  # the study at the other choice of windows, for drawings that overlay them
        self._lenses = lenses
        self.head_tables = dict(head_tables or {})  # of the lenses, by file name; those about the whole study, too
        self._summaries = {s.name: s for lens in lenses for s in lens.summaries if s.at_common_window or not common}
        self._built: dict[str, pd.DataFrame | None] = {}
        self._panels: dict[str, HeadPanel] = {}
        self._window_panels: dict[str, HeadPanel] = {}
        self._cards: dict[str, list[Block]] = {}
        self._contexts = contexts  # tokens of each entry's own context; by default its window here

    @property
    def names(self) -> tuple[str, ...]:
        """The entries' names, in order."""
        return self.study.names

    @cached_property
    def panel(self) -> HeadPanel:
        """The heads, ready to be compared between entries."""
        draws = [_numbers_of(_derived(draw, self._lenses)) for draw in drawn_heads(self.heads, self.replicates)]
        one_run, same = self.study.one_run, self.study.same_documents
        heads = _with_sides(self.heads)
        return HeadPanel(heads, one_run, draws, same_documents=same, sampled=self.study.sampled_heads)

    def window_panel(self, name: str) -> HeadPanel:
        """One entry's heads at each of its windows, ready to be compared: `256` is the name of a window."""
        if name not in self._window_panels:
            while len(self._window_panels) >= WINDOW_PANELS:
                self._window_panels.pop(next(iter(self._window_panels)))
            self._window_panels[name] = self._window_panel(name)
        return self._window_panels[name]

    def _window_panel(self, name: str) -> HeadPanel:
        if self.windows is None:
            raise KeyError("these results carry no table of windows")
        rows = _by_window(self.windows, self._windows_of_entry.get(name, NOWHERE))
        draws: list[pd.DataFrame] = []
        if self._window_replicates is not None:
            without = _by_window(self._window_replicates, self._replicates_of_entry.get(name, NOWHERE))
            known = without[without.filter(like="r_q_without_").notna().any(axis=1)]
            known = known[known["model"].isin(set(rows["model"]))]
            there = rows[rows["model"].isin(set(known["model"]))]
            draws = [_numbers_of(_derived(draw, self._lenses)) for draw in drawn_heads(there, known)]
        return HeadPanel(rows, True, draws, same_documents=True, sampled=self.study.sampled_heads)

    @cached_property
    def _windows_of_entry(self) -> dict[str, NDArray[np.intp]]:
        return _places_of_entries(self.windows)

    @cached_property
    def _replicates_of_entry(self) -> dict[str, NDArray[np.intp]]:
        return _places_of_entries(self._window_replicates)

    def panel_of(self, file: str) -> HeadPanel:
        """The heads of a lens's table with one row each, ready to be compared: means have errors over documents."""
        if file not in self._panels:
            table = self.table(file)
            places = ["model", "layer", *(n for n in ("layer_kind", "depth") if n not in table.columns)]
            kinds = self.heads[places].drop_duplicates(["model", "layer"])
            heads = table.merge(kinds, on=["model", "layer"], how="left", validate="many_to_one")
            sides = _with_sides(self.heads)[[*KEY, "dominated"]]
            heads = heads.merge(sides, on=KEY, how="left", validate="many_to_one")
            heads = heads.assign(**self._averaged(file, heads))
            means = self.head_tables.get(LAYER_MEANS_CSV)
            one_run, same, sampled = self.study.one_run, self.study.same_documents, self.study.sampled_heads
            self._panels[file] = LensPanel(heads, one_run, means, same_documents=same, sampled=sampled, file=file)
        return self._panels[file]

    def with_kind(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows of any table of heads or layers with the kind of each layer."""
        kinds = self.heads[["model", "layer", "layer_kind"]].drop_duplicates(["model", "layer"])
        return rows.merge(kinds, on=["model", "layer"], how="left", validate="many_to_one")

    def _averaged(self, file: str, heads: pd.DataFrame) -> dict[str, pd.Series[float]]:
        """What a table has for means only, of each head."""
        declared = [table for lens in self._lenses for table in lens.tables if table.file == file]
        return with_averaged(declared[0], {name: heads[name] for name in heads.columns}) if declared else {}

    def card(self, name: str, write: Callable[[], list[Block]]) -> list[Block]:
        """A figure's card, written once: the folder of the figure and the page show the same."""
        if name not in self._cards:
            self._cards[name] = write()
        return self._cards[name]

    @property
    def replicates(self) -> pd.DataFrame | None:
        """Component 0 without each group of documents in turn; None where results have no errors."""
        return self.head_tables.get(REPLICATES_CSV)

    @property
    def files_by_head(self) -> list[str]:
        """The lenses' tables that say something of a head in one row, or in one row per component."""
        declared = [table for lens in self._lenses for table in lens.tables]
        one = [t.file for t in declared if t.per == "head" and t.across in (None, "pc") and not t.replicated]
        return [file for file in one if file in self.head_tables]

    def find(self, name: str) -> pd.DataFrame | None:
        """A summary by its name or a head table by its file; None where the results do not carry it."""
        if name in self.head_tables:
            return self.head_tables[name]
        if name not in self._summaries:
            return None
        if name not in self._built:
            self._built[name] = self._summaries[name].build(self)
        return self._built[name]

    def table(self, name: str) -> pd.DataFrame:
        """A table that is known to be there."""
        found = self.find(name)
        if found is None:
            raise KeyError(f"these results carry no table {name!r}")
        return found

    def has(self, name: str) -> bool:
        """Whether the results carry a table."""
        return self.find(name) is not None

    def summaries(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """(file name, table) of all summaries that exist."""
        for name in self._summaries:
            found = self.find(name)
            if found is not None:
                yield summary_file(name, self.common), found

    def headline(self, text: str) -> str:
        """The title of a figure or card, which says so where it is about the common window."""
        return f"{text} at a Common Window" if self.common else text

    def window_of(self, name: str) -> float:
        """The window over which an entry was measured; NaN where it is not recorded."""
        return self._windows.get(name, math.nan)

    def context_of(self, name: str) -> float:
        """An entry's own context, at whichever choice of windows it is looked at; NaN where it is not recorded."""
        return self.window_of(name) if self._contexts is None else self._contexts.get(name, math.nan)

    @cached_property
    def _windows(self) -> dict[str, float]:
        return {str(name): float(window) for name, window in windows_of(self.heads).items()}


@dataclass(frozen=True)
class StudyTables:
    """A study at each choice of windows."""

    results: Results
    own: AtWindow
    common: AtWindow | None

    def rows_of(self, file: str, at: AtWindow) -> int:
        """How many rows a figure's numbers come from."""
        if file == QK_WINDOWS_CSV:
            return 0 if self.own.windows is None else len(self.own.windows)
        summary = None if file in at.head_tables else at.find(file.removesuffix(".csv").removesuffix(COMMON_SUFFIX))
        return len(at.head_tables.get(file, at.heads) if summary is None else summary)

    def choices(self) -> list[AtWindow]:
        """The choices of windows that there are."""
        return [self.own] if self.common is None else [self.own, self.common]


def build_tables(results: Results, lenses: Sequence[Lens] | None = None) -> StudyTables:
    """A results folder, ready for figures, cards and page."""
    used = registered() if lenses is None else lenses
    study, tables = results.study, _read_head_tables(results, used)
    common = None
    if results.common is not None:
        alone = {table.file for lens in used for table in lens.tables if table.windows == "own"}
        of_common = {file: _rows_at(table, results.common) for file, table in tables.items() if file not in alone}
        of_common |= _read_study_tables(results, used, "common")
        contexts = {str(name): float(window) for name, window in windows_of(results.heads).items()}
        common = AtWindow(
            study,
            results.common,
            used,
            common=True,
            head_tables=of_common,
            components=results.components_common,
            contexts=contexts,
        )
    of_own = {file: _rows_at(table, results.heads) for file, table in tables.items()}
    of_own |= _read_study_tables(results, used, "own")
    replicates = tables.get(REPLICATES_CSV)
    own = AtWindow(
        study,
        results.heads,
        used,
        windows=results.windows,
        window_replicates=replicates,
        head_tables=of_own,
        components=results.components,
    )
    if common is not None:
        own.other, common.other = common, own
    return StudyTables(results, own, common)


def _read_head_tables(results: Results, lenses: Sequence[Lens]) -> dict[str, pd.DataFrame]:
    """The lenses' tables that are there; those of `qk.csv` and its kin are part of the results already."""
    found: dict[str, pd.DataFrame] = {}
    for table in (table for lens in lenses for table in lens.tables if table.file not in QK_FILES):
        rows = read_head_table(results, table.file, table.names, table.key)
        if rows is not None:
            found[table.file] = rows
    means = read_head_table(results, LAYER_MEANS_CSV, ("heads", "mean"), MEANS_KEY)
    return found if means is None else {**found, LAYER_MEANS_CSV: means}


def _read_study_tables(results: Results, lenses: Sequence[Lens], choice: str) -> dict[str, pd.DataFrame]:
    """The lenses' tables about the study as a whole that are there, at one choice of windows."""
    found: dict[str, pd.DataFrame] = {}
    for table in (table for lens in lenses for build in lens.of_study for table in build.tables):
        numbers = [column.name for column in table.columns]
        rows = read_study_table(results, table.file, numbers, table.key, table.texts)
        here = None if rows is None else rows[rows["windows"] == choice].reset_index(drop=True)
        if here is not None and not here.empty:
            found[table.file] = here
    return found


def _rows_at(table: pd.DataFrame, heads: pd.DataFrame) -> pd.DataFrame:
    """A table's rows at the windows over which these heads were measured."""
    return table[table["window"] == table["model"].map(windows_of(heads))].reset_index(drop=True)


def windows_of(heads: pd.DataFrame) -> pd.Series[float]:
    """The window over which each entry's heads were measured."""
    return heads.groupby("model")["window"].max()


def window_names(windows: pd.Series[float]) -> pd.Series[str]:
    """Windows as the names of what is compared: `256`."""
    return windows.astype(int).astype(str)


def _places_of_entries(table: pd.DataFrame | None) -> dict[str, NDArray[np.intp]]:
    """Where each entry's rows are: looked for once, however many entries there are."""
    found = {} if table is None else table.groupby("model").indices
    return {str(name): np.asarray(places) for name, places in found.items()}


def _by_window(table: pd.DataFrame, places: NDArray[np.intp]) -> pd.DataFrame:
    """One entry's rows, its windows in the place of entries."""
    rows = table.iloc[places]
    return rows.assign(model=window_names(rows["window"])).reset_index(drop=True)


def summary_file(name: str, common: bool) -> str:
    """`trajectory.csv`, or `trajectory_common.csv` at the common window."""
    return f"{name}{COMMON_SUFFIX if common else ''}.csv"


def write_tables(tables: StudyTables, folder: Path) -> list[Path]:
    """Write `tables/*.csv`, remove those of an earlier run that no longer apply, and return what was written."""
    written = []
    for choice in tables.choices():
        for name, table in choice.summaries():
            path = table_path(folder, name)
            write_csv(table, path)
            written.append(path)
    for name in set(_possible_files(registered())) - {path.name for path in written}:
        remove_table(folder, name)
    return written


def _possible_files(lenses: Sequence[Lens]) -> Iterator[str]:
    summaries: list[Summary] = [summary for lens in lenses for summary in lens.summaries]
    yield from (summary_file(summary.name, common) for summary in summaries for common in (False, True))
    yield from (f"{name}.csv" for name in RETIRED)


def _numbers_of(heads: pd.DataFrame) -> pd.DataFrame:
    """What a draw is kept for: who, where, and numbers in half the memory."""
    kept = [c for c in ("model", "layer", "head", "depth", "layer_kind", "window") if c in heads.columns]
    others = [c for c in heads.columns if c not in kept and pd.api.types.is_numeric_dtype(heads[c].dtype)]
    numbers = heads[others].to_numpy(dtype=np.float32, na_value=np.nan)
    return pd.concat([heads[kept], pd.DataFrame(numbers, index=heads.index, columns=others)], axis=1)


def _with_sides(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads with whether each is position-dominated."""
    return heads.assign(dominated=dominated(heads["category"]) if "category" in heads.columns else math.nan)


def _derived(heads: pd.DataFrame, lenses: Sequence[Lens]) -> pd.DataFrame:
    for lens in lenses:
        heads = heads if lens.derive is None else lens.derive(heads)
    return heads
