"""All tables of a study in one place: what the figures draw and the cards speak about.

`build_tables` computes them from a results folder, `write_tables` puts them into `tables/*.csv`. A reading is
the set of tables at one choice of windows: each checkpoint's own context, or the window common to all
(files ending in `_matched`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd

from qkscope.lenses.depth.table import DepthAxis
from qkscope.lenses.layer_kinds.table import layer_kinds, with_layer_kind
from qkscope.lenses.position import trajectory
from qkscope.lenses.taxonomy import table as taxonomy
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import table_path
from qkscope.results.read import Results, Study
from qkscope.results.remove import remove_table

MATCHED_SUFFIX = "_matched"
SINGLE = ("layer_kinds", "window_dependence")  # tables that exist at one choice of windows only
RETIRED = ("rope_vs_nope",)  # names of earlier versions, taken away where they are found


@dataclass(frozen=True)
class Reading:
    """The tables at one choice of windows; each field is one CSV file."""

    trajectory: pd.DataFrame
    taxonomy_counts: pd.DataFrame
    taxonomy_fractions: pd.DataFrame
    transitions: pd.DataFrame
    concordance: pd.DataFrame
    depth_rq: pd.DataFrame  # columns depth_0, ... (ten bins), or layer_0, ... where no model has ten layers
    depth_rk: pd.DataFrame
    portraits: pd.DataFrame

    @property
    def depth_axis(self) -> DepthAxis:
        """The cells of the two depth tables, as their columns say."""
        layers = [column for column in self.depth_rq.columns if column.startswith("layer_")]
        return DepthAxis(len(layers) or None)


@dataclass(frozen=True)
class SummaryTables:
    """Every table of a study; what the data does not allow is None."""

    own: Reading
    matched: Reading | None
    layer_kinds: pd.DataFrame | None
    window_dependence: pd.DataFrame | None

    def by_file_name(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """(file name, table) of all tables that exist."""
        for reading, suffix in ((self.own, ""), (self.matched, MATCHED_SUFFIX)):
            if reading is not None:
                for entry in fields(reading):
                    yield f"{entry.name}{suffix}.csv", getattr(reading, entry.name)
        for name in SINGLE:
            table = getattr(self, name)
            if table is not None:
                yield f"{name}.csv", table


def build_reading(heads: pd.DataFrame, study: Study) -> Reading:
    """The tables of one PC0 table; checkpoints without rows in it are left out."""
    present = set(heads["model"])
    names = [name for name in study.names if name in present]
    categorised = taxonomy.with_category(heads)
    counts = taxonomy.category_counts(categorised, names)
    moves = taxonomy.transitions(categorised, names if study.one_run else [])
    selected = [name for name in study.selected if name in present]
    columns = ["model", "layer", "head", "rotary", "layer_kind", "r_q", "r_k", "category"]
    named = with_layer_kind(categorised)
    portraits = [named.loc[named["model"] == name, columns] for name in selected]
    axis = DepthAxis.of(heads)
    return Reading(
        trajectory=trajectory.trajectory(heads, names),
        taxonomy_counts=counts,
        taxonomy_fractions=taxonomy.category_fractions(counts),
        transitions=moves,
        concordance=trajectory.concordance(heads, names),
        depth_rq=axis.means(heads, "r_q", names),
        depth_rk=axis.means(heads, "r_k", names),
        portraits=pd.concat(portraits) if portraits else named.loc[[], columns],
    )


def build_tables(results: Results) -> SummaryTables:
    """All tables of a results folder."""
    study = results.study
    has_windows = results.windows is not None and not results.windows.empty
    return SummaryTables(
        own=build_reading(results.heads, study),
        matched=None if results.matched is None else build_reading(results.matched, study),
        layer_kinds=layer_kinds(results.heads, study.names),
        window_dependence=(
            trajectory.window_dependence(results.windows, study.names)
            if has_windows and results.windows is not None
            else None
        ),
    )


def all_file_names() -> list[str]:
    """Every file name that `write_tables` may write: what is there from an earlier run and not written now
    is out of date."""
    readings = [f"{entry.name}{suffix}.csv" for suffix in ("", MATCHED_SUFFIX) for entry in fields(Reading)]
    return [*readings, *(f"{name}.csv" for name in (*SINGLE, *RETIRED))]


def write_tables(tables: SummaryTables, results_folder: Path) -> list[Path]:
    """Write `tables/*.csv`, remove tables of an earlier run that no longer apply, and return what was
    written."""
    written = []
    for name, table in tables.by_file_name():
        path = table_path(results_folder, name)
        write_csv(table, path)
        written.append(path)
    for name in set(all_file_names()) - {path.name for path in written}:
        remove_table(results_folder, name)
    return written
