"""A study at one choice of windows, with every measure of its heads and the tables that lenses make of them.

There are one or two such choices: each entry's own context, and, where contexts differ, the window that all share.
Summaries are built when they are first asked for, each once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from qkscope.lenses.base import HeadTable, Lens, Measure, Summary
from qkscope.lenses.categories import dominated
from qkscope.lenses.draws import FREEDOM, KEY, OF_COMPONENT_0, draw_tables, groups_freedom
from qkscope.lenses.kind_of_layer import EVERY_KIND, kinds_in_order, part_of
from qkscope.lenses.registry import derived, registered
from qkscope.results.csv_files import write_csv
from qkscope.results.entries import Entries, Entry
from qkscope.results.folder import table_path
from qkscope.results.mapped import (
    NO_ROWS,
    Rows,
    SpillingTable,
    drop_page_cache,
    in_blocks,
    rows_of_entries,
    select_rows,
)
from qkscope.results.read import ResultsFolder, read_named_table, require_numbers
from qkscope.results.remove import remove_table
from qkscope.results.schema import (
    COMPONENTS_TABLE,
    HEADS,
    IDENTITY_COLUMNS,
    JUDGED_COLUMNS,
    LAYER_COLUMNS,
    LAYER_MEANS,
    QK,
    QK_COLUMNS,
    REPLICATES,
    earlier_summaries,
)
from qkscope.stats.means import HeadPanel, LayerMeans
from qkscope.words.blocks import AnyBlock

COMMON_SUFFIX = "_common"
NAMED_AT_MOST = 6  # seeds or models that are named one by one
T = TypeVar("T")


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
        tables: Mapping[str, pd.DataFrame] | None = None,
        components: pd.DataFrame | None = None,
        contexts: Mapping[str, float] | None = None,
    ) -> None:
        """`heads` is component 0; `tables` are rows at this choice of windows, by name of a table or set of measures.

        `windows` and `window_replicates` are the same heads at every window.
        """
        present = set(heads["model"])
        self.study = study.only([name for name in study.names if name in present])
        self.names = self.study.names  # of the entries, in order
        self.windows = None if windows is None or windows.empty else windows
        self._window_replicates = window_replicates
        self.components = components  # every component of each head, where they were read
        self.common = common
        self.other: WindowView | None = None  # the study at the other choice of windows, for drawings that overlay them
        self._lenses = lenses
        self.tables = dict(tables or {})
        self.replicates = self.tables.get(REPLICATES)  # of component 0, without each group of documents in turn
        self._places: dict[str, tuple[pd.DataFrame, dict[str, Rows]]] = {}
        self._freedoms = {name: groups_freedom(self._rows_of(REPLICATES, self.replicates, name)) for name in present}
        known = heads.assign(**{FREEDOM: heads["model"].map(self._freedoms)})
        with_more = self.derived(known)
        self._derived = [name for name in with_more.columns if name not in known.columns]
        self.heads = self._measured(with_more)  # one row per head, with every measure
        self._summaries = {s.name: s for lens in lenses for s in lens.summaries if s.at_common_window or not common}
        self._built: dict[str, pd.DataFrame | None] = {}
        self._once: dict[Callable[[WindowView], Any], Any] = {}
        self._cards: dict[str, list[AnyBlock]] = {}
        self._windows = {str(name): float(window) for name, window in windows_of(self.heads).items()}
        self._contexts = contexts or self._windows  # tokens of each entry's own context; by default its window here

    def freedom(self, *names: str) -> float:
        """Degrees of freedom of these entries' standard errors over documents: the fewest groups they have, less one.

        Results whose groups are not recorded count as if they had the fewest that give standard errors.
        """
        return min(self._freedoms.get(name, groups_freedom(None)) for name in names)

    @cached_property
    def panel(self) -> HeadPanel:
        """The heads with every measure, ready for means and changes with errors over documents."""
        means = self.tables.get(LAYER_MEANS)
        return HeadPanel(
            self.heads,
            self.study.one_run,
            draw_tables(self.heads, self.replicates, self.derived),
            layer_means=None if means is None else LayerMeans(means),
            same_documents=self.study.same_documents,
            sampled=self.study.sampled_heads,
        )

    def _measured(self, heads: pd.DataFrame) -> pd.DataFrame:
        """Component 0 of each head with the measures of all lenses, and what of them is of use for means only."""
        side = dominated(heads["category"]) if "category" in heads.columns else math.nan
        by_source: dict[str, list[HeadTable]] = {}
        for each in (each for each in self.sets if each.has_row_per_head):
            by_source.setdefault(str(self._source(each)), []).append(each)
        joined = SpillingTable()
        for block in in_blocks(heads.assign(dominated=side)):
            for source, sets in sorted(by_source.items()):
                table, names = self.tables[source], block["model"].unique()
                rows = pd.concat([table.iloc[:0], *(self._rows_of(source, table, name) for name in names)])
                columns = {name: rows[name] for name in KEY}
                for each in sets:
                    columns |= {name: rows[name] for name in each.written if name in rows.columns}
                    columns |= each.with_averaged(columns)
                own = [name for name in columns if name in KEY or name not in block.columns]
                measured = pd.DataFrame({name: columns[name] for name in own})
                block = block.merge(measured, on=KEY, how="left", validate="one_to_one")
            joined.add(block)
        return joined.table()

    @property
    def study_tables(self) -> list[str]:
        """The tables about the study as a whole that these results carry."""
        declared = [table.file for lens in self._lenses for build in lens.of_study for table in build.tables]
        return [name for name in declared if name in self.tables]

    @cached_property
    def sets(self) -> list[HeadTable]:
        """The sets of measures that these results carry, by their declarations."""
        declared = [each for lens in self._lenses for each in lens.tables]
        here = [each for each in declared if not (self.common and each.windows == "own")]
        return [each for each in here if self._source(each) is not None]

    def _source(self, measures: HeadTable) -> str | None:
        """The table that has a set's columns here; None where there is none."""
        names = [name for name in (measures.name, measures.table) if name in self.tables]
        there = [name for name in names if set(measures.names) & set(self.tables[name].columns)]
        return there[0] if there else None

    def derived(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows of component 0 with what the lenses derive from them."""
        return derived(rows, self._lenses)

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
        rows = self._rows_of("windows", self.windows, name)
        rows = rows[[column for column in rows.columns if column in OF_COMPONENT_0]]
        rows = self.derived(rows.assign(**{FREEDOM: self.freedom(name)}))
        # One entry does not say whether the study names how far layers attend: its kinds are those of the study.
        rows = _by_window(self.with_kind(rows.drop(columns="layer_kind", errors="ignore")))
        draws: list[pd.DataFrame] = []
        if self._window_replicates is not None:
            without = _by_window(self._rows_of("replicates of windows", self._window_replicates, name))
            known = without[without.filter(like="r_q_without_").notna().any(axis=1)]
            known = known[known["model"].isin(set(rows["model"]))]
            there = rows[rows["model"].isin(set(known["model"]))]
            draws = draw_tables(there, known, self.derived)
        return HeadPanel(rows, True, draws, same_documents=True, sampled=self.study.sampled_heads)

    @cached_property
    def measures(self) -> dict[str, Measure]:
        """Every measure that these heads may have, by name."""
        tables = [table for lens in self._lenses for table in lens.tables]
        of_sets = [c for t in tables if t.has_row_per_head for c in (*t.columns, *t.judged, *t.averaged_measures)]
        components = [c for t in tables if t.across == "pc" for c in (*t.columns, *t.judged)]
        derived = [c for lens in self._lenses for c in lens.derived]
        return {each.name: each for each in (*components, *of_sets, *derived)}

    @cached_property
    def mean_measures(self) -> list[str]:
        """The measures whose mean over heads says something: numbers and indicators, in the order of lenses."""
        of_sets: list[str] = []
        for each in (each for each in self.sets if each.has_row_per_head):
            of_sets += [*each.names, *(column.name for column in each.judged)]
            there = [name for name in each.names if name in self.heads.columns]
            of_sets += each.with_averaged({name: self.heads.iloc[:0][name] for name in there})
        codes = {name for name, each in self.measures.items() if each.kind in ("code", "constant")}
        known = dict.fromkeys([*QK_COLUMNS, *JUDGED_COLUMNS, *self._derived, *of_sets])
        unknown = {*IDENTITY_COLUMNS, *LAYER_COLUMNS, "layer_kind", *codes}
        return [name for name in known if name not in unknown and self.panel.has(name)]

    @cached_property
    def redrawn_measures(self) -> list[str]:
        """Those of component 0 and what follows from it, which are known at every window."""
        of_component = {*QK_COLUMNS, *JUDGED_COLUMNS, *self._derived}
        return [name for name in self.mean_measures if name in of_component]

    def windows_of_entry(self, name: str) -> list[float]:
        """The windows at which an entry was measured, rising."""
        if self.windows is None:
            return []
        return sorted(float(window) for window in self._rows_of("windows", self.windows, name)["window"].unique())

    def attribution(self, before: str, after: str) -> dict[tuple[str, str], dict[str, float]]:
        """What a change is made of, by measure and layer type, where a lens knows; else nothing."""
        known: dict[tuple[str, str], dict[str, float]] = {}
        for lens in self._lenses:
            of_lens = lens.attribution(self, before, after) if lens.attribution is not None else {}
            known |= {key: dict(parts) for key, parts in of_lens.items()}
        return known

    def has_measure(self, name: str) -> bool:
        """Whether any head has the measure here."""
        return self.panel.has(name) and any(math.isfinite(self.panel.mean(name, model)) for model in self.names)

    def panel_with(self, name: str) -> HeadPanel:
        """The panel, for a measure that is known to be there."""
        if not self.panel.has(name):
            raise KeyError(f"these results carry no measure {name!r}")
        return self.panel

    def mean_table(self, measures: Sequence[str], kind: str = EVERY_KIND) -> pd.DataFrame:
        """A row per checkpoint: mean, `_std` over heads and `_se` over documents of each measure.

        `kind` is a layer type. A checkpoint without such heads has NaN.
        """
        part = part_of(kind)
        columns: dict[str, list[Any]] = {"model": list(self.names)}
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

    def of_entry(self, name: str, table: str = HEADS) -> pd.DataFrame:
        """One entry's rows: its heads, or its part of a table; where they are is looked for once for all."""
        return self._rows_of(table, self.table(table), name)

    def _rows_of(self, table: str, rows: pd.DataFrame | None, name: str) -> pd.DataFrame:
        """An entry's rows of a table; where they are is looked for once for all entries."""
        if rows is None or rows.empty:
            return pd.DataFrame() if rows is None else rows
        if table not in self._places or self._places[table][0] is not rows:
            self._places[table] = rows, rows_of_entries(rows["model"])
        return rows.iloc[self._places[table][1].get(name, NO_ROWS)]

    def with_kind(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows of any table of heads or layers with the kind of each layer."""
        if "layer_kind" in rows.columns:
            return rows
        names = rows["model"].unique()
        heads = self.of_entry(str(names[0])) if len(names) == 1 else self.heads
        kinds = heads[["model", "layer", "layer_kind"]].drop_duplicates(["model", "layer"])
        return rows.merge(kinds, on=["model", "layer"], how="left", validate="many_to_one")

    def card(self, name: str, write: Callable[[], list[AnyBlock]]) -> list[AnyBlock]:
        """A figure's card, written once: the folder of the figure and the page show the same."""
        if name not in self._cards:
            self._cards[name] = write()
        return self._cards[name]

    def find(self, name: str) -> pd.DataFrame | None:
        """A table by its name (`heads`, `buckets`), or that of a set of measures; else a summary; None if not here."""
        if name == HEADS:
            return self.heads
        known = next((each for each in self.sets if each.name == name), None)
        if name in self.tables and not (known and known.has_row_per_head):
            return self.tables[name]
        if known is not None:
            return self.heads if known.has_row_per_head else self.tables[str(self._source(known))]
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
        return (each for name, each in self._summaries.items() if self.has(name))

    def window_of(self, name: str) -> float:
        """The window over which an entry was measured; NaN where it is not recorded."""
        return self._windows.get(name, math.nan)

    def context_of(self, name: str) -> float:
        """An entry's own context, at whichever choice of windows it is looked at; NaN where it is not recorded."""
        return self._contexts.get(name, math.nan)


@dataclass(frozen=True)
class Results:
    """A study at each choice of windows."""

    files: ResultsFolder  # what was read
    own: WindowView
    common: WindowView | None

    def views(self) -> list[WindowView]:
        """The choices of windows that there are."""
        return [self.own] if self.common is None else [self.own, self.common]


def named_entries(study: Entries) -> tuple[Entry, ...]:
    """Those that are drawn one by one: the last checkpoint of a run; of seeds and models the first six."""
    return study.checkpoints[-1:] if study.one_run else study.checkpoints[:NAMED_AT_MOST]


def build_tables(files: ResultsFolder, lenses: Sequence[Lens] | None = None) -> Results:
    """A results folder, ready for figures, cards and page."""
    used = registered() if lenses is None else lenses
    tables, of_study = _read_tables(files, used), _read_study_tables(files, used)

    def view(heads: pd.DataFrame, names: Iterable[str], *, common: bool = False, **read: Any) -> WindowView:
        windows = windows_of(heads)
        here = {name: tables[name]["window"] == tables[name]["model"].map(windows) for name in names}
        rows = {name: select_rows(tables[name], mask.to_numpy()) for name, mask in here.items()}
        choice = "common" if common else "own"
        chosen = {file: each[each["windows"] == choice].reset_index(drop=True) for file, each in of_study.items()}
        rows |= {file: each for file, each in chosen.items() if not each.empty}
        return WindowView(files.study, heads, used, common=common, tables=rows, **read)

    windows: dict[str, Any] = {"windows": files.windows, "window_replicates": tables.get(REPLICATES)}
    own, common = view(files.heads, tables, components=files.components, **windows), None
    if files.common is not None:
        at_common = [each for lens in used for each in lens.tables if each.windows != "own"]
        names = {REPLICATES, LAYER_MEANS, *(name for each in at_common for name in (each.name, each.table))}
        contexts = {name: own.window_of(name) for name in own.names}
        common = view(
            files.common,
            [name for name in tables if name in names],
            common=True,
            components=files.components_common,
            contexts=contexts,
        )
        own.other, common.other = common, own
    return Results(files, own, common)


def _read_tables(files: ResultsFolder, lenses: Sequence[Lens]) -> dict[str, pd.DataFrame]:
    """The tables of heads that are there, by name; `qk.csv` and its like are part of what was read already."""
    sets = [each for lens in lenses for each in lens.tables]
    named = [each for each in sets if each.rows is None]  # by other commands, into files of their own
    read = {each.name: read_named_table(files, f"{each.name}.csv", each.names, each.key) for each in named}
    of_heads = [each for each in sets if each.rows is not None and each.name not in (QK, COMPONENTS_TABLE)]
    kinds = {each.table: each.kind for each in of_heads}
    for name in (*kinds, REPLICATES, LAYER_MEANS):
        table = read[name] = files.table(name, kinds.get(name))
        if table is not None:
            for each in (each for each in of_heads if each.table == name):
                require_numbers(files, table, name, each.names)
    return {name: table for name, table in read.items() if table is not None}


def _read_study_tables(files: ResultsFolder, lenses: Sequence[Lens]) -> dict[str, pd.DataFrame]:
    """The lenses' tables about the study as a whole that are there, at all choices of windows."""
    declared = [table for lens in lenses for build in lens.of_study for table in build.tables]
    read = {
        each.file: read_named_table(
            files, each.file, [c.name for c in each.columns if not c.optional], each.key, each.texts
        )
        for each in declared
    }
    return {file: rows for file, rows in read.items() if rows is not None}


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
    """`claims.csv`, or `claims_common.csv` at the common window."""
    return f"{name}{COMMON_SUFFIX if common else ''}.csv"


def write_tables(tables: Results, folder: Path) -> list[Path]:
    """Write `tables/*.csv`, remove those of an earlier run that no longer apply, and return what was written."""
    written = []
    for choice in tables.views():
        for summary in choice.summaries():
            path = table_path(folder, summary_file(summary.name, choice.common))
            write_csv(choice.table(summary.name), path)
            written.append(path)
            drop_page_cache()
    for name in set(summary_files()) - {path.name for path in written}:
        remove_table(folder, name)
    return written


def summary_files() -> Iterator[str]:
    """The names of all tables that a report may write, or have written in earlier versions."""
    names = [summary.name for lens in registered() for summary in lens.summaries]
    yield from (summary_file(name, common) for name in names for common in (False, True))
    yield from earlier_summaries()
