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
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from qkscope.lenses.base import Lens, Measure, Summary
from qkscope.lenses.categories import dominated
from qkscope.lenses.draws import FREEDOM, KEY, draw_tables, replicate_groups
from qkscope.lenses.kind_of_layer import EVERY_KIND, kinds_in_order, part_of
from qkscope.lenses.means import MEANS_KEY, LensPanel, with_averaged
from qkscope.lenses.registry import registered
from qkscope.results.csv_files import write_csv, write_csv_pieces
from qkscope.results.folder import table_path
from qkscope.results.mapped import NOWHERE, Rows, let_go, mapped, rows_of_entries, taken
from qkscope.results.read import Entries, ResultsFolder, read_head_table, read_study_table
from qkscope.results.remove import remove_table
from qkscope.results.schema import LAYER_MEANS_CSV, QK_FILES, QK_WINDOWS_CSV, REPLICATES_CSV
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.stats.noise import HeadPanel
from qkscope.words.blocks import AnyBlock

COMMON_SUFFIX = "_common"
T = TypeVar("T")
RETIRED = ("rope_vs_nope",)  # tables of earlier versions, taken away where they are found


class WindowView:
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
        self.windows = None if windows is None or windows.empty else windows  # the same at several windows, as read
        self._window_replicates = window_replicates  # at every window
        self.components = components  # every component of each head, where they were read
        self.common = common
        self.other: WindowView | None = None  # the study at the other choice of windows, for drawings that overlay them
        self._lenses = lenses
        self.head_tables = dict(head_tables or {})  # of the lenses, by file name; those about the whole study, too
        self._freedoms: dict[str, float] = {}
        known = heads.assign(**{FREEDOM: heads["model"].map({name: self.freedom(name) for name in present})})
        self.heads = mapped(_derived(known, lenses))  # component 0, one row per head
        self._summaries = {s.name: s for lens in lenses for s in lens.summaries if s.at_common_window or not common}
        self._built: dict[str, pd.DataFrame | None] = {}
        self._panels: dict[str, HeadPanel] = {}
        self._entry_rows: dict[str | None, tuple[pd.DataFrame, dict[str, Rows]]] = {}
        self._once: dict[Callable[[WindowView], Any], Any] = {}
        self._cards: dict[str, list[AnyBlock]] = {}
        self._contexts = contexts  # tokens of each entry's own context; by default its window here

    @property
    def names(self) -> tuple[str, ...]:
        """The entries' names, in order."""
        return self.study.names

    def freedom(self, *names: str) -> float:
        """Degrees of freedom of these entries' standard errors over documents: the fewest groups they have, less one.

        Results whose groups are not recorded count as if they had the fewest that give standard errors.
        """
        for name in names:
            if name not in self._freedoms:
                rows = (
                    None if self.replicates is None else self.replicates.iloc[self._replicate_rows.get(name, NOWHERE)]
                )
                groups = [] if rows is None else replicate_groups(rows)
                self._freedoms[name] = float(max(len(groups), FEWEST_GROUPS) - 1)
        return min(self._freedoms[name] for name in names)

    @cached_property
    def _replicate_rows(self) -> dict[str, Rows]:
        rows = self.replicates
        return {} if rows is None or rows.empty else rows_of_entries(rows["model"])

    @cached_property
    def panel(self) -> HeadPanel:
        """The heads, ready to be compared between entries."""
        draws = draw_tables(self.heads, self.replicates, self.derived)
        one_run, same = self.study.one_run, self.study.same_documents
        heads = mapped(self.heads.assign(dominated=self._sides["dominated"]))
        return HeadPanel(heads, one_run, draws, same_documents=same, sampled=self.study.sampled_heads)

    def derived(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows of component 0 with what the lenses derive from them."""
        return _derived(rows, self._lenses)

    def once(self, make: Callable[[WindowView], T]) -> T:
        """What a function finds of this study; it is called once."""
        if make not in self._once:
            self._once[make] = make(self)
        kept: T = self._once[make]
        return kept

    def window_panel(self, name: str) -> HeadPanel:
        """One entry's heads at each of its windows, ready to be compared: `256` is the name of a window.

        It takes longer to make than to look at, and is not kept: whoever needs all of them goes through them `once`.
        """
        if self.windows is None:
            raise KeyError("these results carry no table of windows")
        known = self.windows.iloc[self._windows_of_entry.get(name, NOWHERE)].assign(**{FREEDOM: self.freedom(name)})
        derived = self.derived(known)
        # One entry does not say whether the study names how far layers attend: its kinds are those of the study.
        rows = _by_window(self.with_kind(derived.drop(columns="layer_kind", errors="ignore")))
        draws: list[pd.DataFrame] = []
        if self._window_replicates is not None:
            without = _by_window(self._window_replicates.iloc[self._replicates_of_entry.get(name, NOWHERE)])
            known = without[without.filter(like="r_q_without_").notna().any(axis=1)]
            known = known[known["model"].isin(set(rows["model"]))]
            there = rows[rows["model"].isin(set(known["model"]))]
            draws = draw_tables(there, known, self.derived)
        return HeadPanel(rows, True, draws, same_documents=True, sampled=self.study.sampled_heads)

    @cached_property
    def _windows_of_entry(self) -> dict[str, Rows]:
        return {} if self.windows is None else rows_of_entries(self.windows["model"])

    @cached_property
    def _replicates_of_entry(self) -> dict[str, Rows]:
        return {} if self._window_replicates is None else rows_of_entries(self._window_replicates["model"])

    def panel_of(self, file: str) -> HeadPanel:
        """The heads of a lens's table with one row each, ready to be compared: means have errors over documents."""
        if file not in self._panels:
            table = self.table(file)
            places = ["model", "layer", *(n for n in ("layer_kind", "depth") if n not in table.columns)]
            kinds = self.heads[places].drop_duplicates(["model", "layer"])
            beside = table[KEY].merge(kinds, on=["model", "layer"], how="left", validate="many_to_one")
            beside = beside.merge(self._sides, on=KEY, how="left", validate="many_to_one").drop(columns=KEY)
            heads = table.assign(**{str(name): column.array for name, column in beside.items()})
            heads = mapped(heads.assign(**self._averaged(file, heads)))
            means = self.head_tables.get(LAYER_MEANS_CSV)
            one_run, same, sampled = self.study.one_run, self.study.same_documents, self.study.sampled_heads
            self._panels[file] = LensPanel(heads, one_run, means, same_documents=same, sampled=sampled, file=file)
        return self._panels[file]

    @cached_property
    def measures(self) -> dict[str, Measure]:
        """Every measure that these heads may have, by name."""
        of_sets = [c for lens in self._lenses for t in lens.tables if t.has_row_per_head for c in t.columns]
        components = [c for lens in self._lenses for t in lens.tables if t.across == "pc" for c in t.columns]
        derived = [c for lens in self._lenses for c in lens.derived]
        return {each.name: each for each in (*components, *of_sets, *derived)}

    def has_measure(self, name: str) -> bool:
        """Whether any head has the measure here."""
        panel = self._panel_with(name)
        return panel is not None and any(math.isfinite(panel.mean(name, model)) for model in self.names)

    def panel_with(self, name: str) -> HeadPanel:
        """The heads with this measure, ready for means and changes."""
        panel = self._panel_with(name)
        if panel is None:
            raise KeyError(f"these results carry no measure {name!r}")
        return panel

    def _panel_with(self, name: str) -> HeadPanel | None:
        if name in self.heads.columns:
            return self.panel
        for table in (table for lens in self._lenses for table in lens.tables):
            if table.has_row_per_head and not table.replicated and table.file in self.head_tables:
                if name in table.names or (table.averaged is not None and self.panel_of(table.file).has(name)):
                    return self.panel_of(table.file)
        return None

    def mean_table(self, measures: Sequence[str], kind: str = EVERY_KIND) -> pd.DataFrame:
        """A row per checkpoint: mean, `_std` over heads and `_se` over documents of each measure.

        `kind` is a layer type. A checkpoint without such heads has NaN.
        """
        part, columns = part_of(kind), {"model": list(self.names)}
        for name in measures:
            panel = self.panel_with(name)
            values = [panel.values(name, model, part) for model in self.names]
            columns[name] = [panel.mean(name, model, part) for model in self.names]
            columns[f"{name}_std"] = [float(np.nanstd(v, ddof=1)) if len(v) > 1 else math.nan for v in values]
            columns[f"{name}_se"] = [panel.error(name, model, part) for model in self.names]
        return pd.DataFrame(columns)

    def largest(self, measure: str, model: str, kind: str = EVERY_KIND) -> tuple[float, int, int] | None:
        """The largest value of a measure over heads, with its layer and head; None where no head has one."""
        panel, part = self.panel_with(measure), part_of(kind)
        values = panel.values(measure, model, part)
        if not np.isfinite(values).any():
            return None
        top = int(np.nanargmax(values))
        layer, head = panel.places(model, part)[top]
        return float(values[top]), layer, head

    @cached_property
    def layer_types(self) -> list[str]:
        """The layer types of these heads, or `all` where there is one."""
        kinds = kinds_in_order(self.heads["layer_kind"])
        return kinds if len(kinds) > 1 else [EVERY_KIND]

    @cached_property
    def _sides(self) -> pd.DataFrame:
        """Whether each head is position-dominated."""
        known = "category" in self.heads.columns
        return self.heads[KEY].assign(dominated=dominated(self.heads["category"]) if known else math.nan)

    def of_entry(self, name: str, file: str | None = None) -> pd.DataFrame:
        """One entry's rows: its heads, or its part of a head table; where they are is looked for once for all."""
        table = self.heads if file is None else self.table(file)
        if file not in self._entry_rows or self._entry_rows[file][0] is not table:
            self._entry_rows[file] = table, rows_of_entries(table["model"])
        return table.iloc[self._entry_rows[file][1].get(name, NOWHERE)]

    def with_kind(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows of any table of heads or layers with the kind of each layer."""
        names = rows["model"].unique()
        heads = self.of_entry(str(names[0])) if len(names) == 1 else self.heads
        kinds = heads[["model", "layer", "layer_kind"]].drop_duplicates(["model", "layer"])
        return rows.merge(kinds, on=["model", "layer"], how="left", validate="many_to_one")

    def _averaged(self, file: str, heads: pd.DataFrame) -> dict[str, pd.Series[float]]:
        """What a table has for means only, of each head."""
        declared = [table for lens in self._lenses for table in lens.tables if table.file == file]
        return with_averaged(declared[0], {name: heads[name] for name in heads.columns}) if declared else {}

    def card(self, name: str, write: Callable[[], list[AnyBlock]]) -> list[AnyBlock]:
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
        rows = self.find(name)
        if rows is None:
            raise KeyError(f"these results carry no table {name!r}")
        return rows

    def has(self, name: str) -> bool:
        """Whether the results carry a table."""
        return self.find(name) is not None

    def summaries(self) -> Iterator[Summary]:
        """Those that exist."""
        return (each for name, each in self._summaries.items() if each.pieces is not None or self.has(name))

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
class Results:
    """A study at each choice of windows."""

    files: ResultsFolder  # what was read
    own: WindowView
    common: WindowView | None

    def rows_of(self, file: str, at: WindowView) -> int:
        """How many rows a figure's numbers come from."""
        if file == QK_WINDOWS_CSV:
            return 0 if self.own.windows is None else len(self.own.windows)
        summary = None if file in at.head_tables else at.find(file.removesuffix(".csv").removesuffix(COMMON_SUFFIX))
        return len(at.head_tables.get(file, at.heads) if summary is None else summary)

    def views(self) -> list[WindowView]:
        """The choices of windows that there are."""
        return [self.own] if self.common is None else [self.own, self.common]


def build_tables(results: ResultsFolder, lenses: Sequence[Lens] | None = None) -> Results:
    """A results folder, ready for figures, cards and page."""
    used = registered() if lenses is None else lenses
    study, tables = results.study, _read_head_tables(results, used)
    common = None
    if results.common is not None:
        alone = {table.file for lens in used for table in lens.tables if table.windows == "own"}
        of_common = {file: _rows_at(table, results.common) for file, table in tables.items() if file not in alone}
        of_common |= _read_study_tables(results, used, "common")
        contexts = {str(name): float(window) for name, window in windows_of(results.heads).items()}
        common = WindowView(
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
    own = WindowView(
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
    return Results(results, own, common)


def _read_head_tables(results: ResultsFolder, lenses: Sequence[Lens]) -> dict[str, pd.DataFrame]:
    """The lenses' tables that are there; those of `qk.csv` and its kin are part of the results already."""
    by_file: dict[str, pd.DataFrame] = {}
    for table in (table for lens in lenses for table in lens.tables if table.file not in QK_FILES):
        rows = read_head_table(results, table.file, table.names, table.key, table.texts)
        if rows is not None:
            by_file[table.file] = rows
        let_go()
    means = read_head_table(results, LAYER_MEANS_CSV, ("heads", "mean"), MEANS_KEY)
    return by_file if means is None else {**by_file, LAYER_MEANS_CSV: means}


def _read_study_tables(results: ResultsFolder, lenses: Sequence[Lens], choice: str) -> dict[str, pd.DataFrame]:
    """The lenses' tables about the study as a whole that are there, at one choice of windows."""
    by_file: dict[str, pd.DataFrame] = {}
    for table in (table for lens in lenses for build in lens.of_study for table in build.tables):
        numbers = [column.name for column in table.columns]
        rows = read_study_table(results, table.file, numbers, table.key, table.texts)
        here = None if rows is None else rows[rows["windows"] == choice].reset_index(drop=True)
        if here is not None and not here.empty:
            by_file[table.file] = here
    return by_file


def _rows_at(table: pd.DataFrame, heads: pd.DataFrame) -> pd.DataFrame:
    """A table's rows at the windows over which these heads were measured."""
    return taken(table, (table["window"] == table["model"].map(windows_of(heads))).to_numpy())


def windows_of(heads: pd.DataFrame) -> pd.Series[float]:
    """The window over which each entry's heads were measured."""
    return heads.groupby("model")["window"].max()


def window_names(windows: pd.Series[float]) -> pd.Series[str]:
    """Windows as the names of what is compared: `256`."""
    return windows.astype(int).astype(str)


def _by_window(rows: pd.DataFrame) -> pd.DataFrame:
    """One entry's rows, its windows in the place of entries."""
    return rows.assign(model=window_names(rows["window"])).reset_index(drop=True)


def summary_file(name: str, common: bool) -> str:
    """`trajectory.csv`, or `trajectory_common.csv` at the common window."""
    return f"{name}{COMMON_SUFFIX if common else ''}.csv"


def write_tables(tables: Results, folder: Path) -> list[Path]:
    """Write `tables/*.csv`, remove those of an earlier run that no longer apply, and return what was written."""
    written = []
    for choice in tables.views():
        for summary in choice.summaries():
            path = table_path(folder, summary_file(summary.name, choice.common))
            if summary.pieces is not None:
                write_csv_pieces(summary.pieces(choice), path)
            else:
                write_csv(choice.table(summary.name), path)
            written.append(path)
            let_go()
    for name in set(summary_files()) - {path.name for path in written}:
        remove_table(folder, name)
    return written


def summary_files() -> Iterator[str]:
    """The names of all tables that a report may write."""
    summaries: list[Summary] = [summary for lens in registered() for summary in lens.summaries]
    yield from (summary_file(summary.name, common) for summary in summaries for common in (False, True))
    yield from (f"{name}.csv" for name in RETIRED)


def _derived(heads: pd.DataFrame, lenses: Sequence[Lens]) -> pd.DataFrame:
    for lens in lenses:
        heads = heads if lens.derive is None else lens.derive(heads)
    return heads
