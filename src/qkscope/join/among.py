"""`qkscope among`: where a model stands among the published ones, by the same means over heads.

The published values are of full-attention layers, so the heads of a checkpoint's other layers are left out of its
means. Nearly all of these numbers depend on the window, so a rank is given only at the published model's own window.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.join.from_results import compared_heads
from qkscope.join.inputs import PublishedModels, load_published_models
from qkscope.join.table import Row, records
from qkscope.lenses.views import Results, build_tables
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import CARD, JOIN, POINTS_CSV, output_folder
from qkscope.results.read import load_results
from qkscope.text import counted
from qkscope.words.blocks import AnyBlock, bullet, heading, paragraph, table_of, to_markdown, to_terminal
from qkscope.words.phrases import plus_minus, shortened, significant

# What was published; results have the same measures in the same units.
MEASURES = (
    "r_q", "r_k", "r_q_a_abs", "r_k_a_abs", "var_frac_a", "var_frac_b", "plane_var_fraction", "bias_strength",
    "bias_strength_window", "ap", "ap_first", "ap_last", "ap_drop",
)  # fmt: skip
NEAR = 0.1  # windows that differ by less than that share count as one


def among(tables: Results, published: PublishedModels) -> pd.DataFrame:
    """A row per checkpoint and measure: mean with error and window, and where that is among the published values."""
    own, rows = tables.own, []
    for measure in filter(own.panel.has, MEASURES):
        theirs = published.table[["model", "window", measure]].dropna()
        values, windows = theirs[measure].to_numpy(dtype=float), theirs["window"].to_numpy(dtype=float)
        for name in own.names:
            heads, window = compared_heads(own, name), own.window_of(name)
            mean = heads.mean(own.panel, measure, name)
            alike = np.abs(windows / window - 1.0) <= NEAR  # none where the window is not recorded
            rows.append(
                {
                    "model": name, "measure": measure, "value": mean,
                    "value_se": heads.error(own.panel, measure, name),
                    "window": window, "heads": heads.heads, "heads_measured": heads.measured,
                    "heads_are": heads.description,
                    "published_low": values.min(), "published_median": float(np.median(values)),
                    "published_high": values.max(), "published_models": len(values),
                    "nearest": str(theirs["model"].iloc[int(np.abs(values - mean).argmin())]) if mean == mean else "",
                    "at_this_window": int(alike.sum()),
                    "above": int((values[alike] < mean).sum()) if alike.any() and mean == mean else math.nan,
                }
            )  # fmt: skip
    if not rows:
        folder = tables.files.source
        raise InputError(f"{folder}: has no measure that was published; `qkscope analyze {folder}` writes the tables")
    return pd.DataFrame(rows)


def write_among(folder: Path, out: Path | None = None) -> tuple[list[str], Path]:
    """Write `points.csv` and a card; returns lines for a terminal, and where they are."""
    published, tables = load_published_models(), build_tables(load_results(folder))
    table = among(tables, published)
    place = out or output_folder(tables.files.writable_folder, JOIN, "among")
    write_csv(table.drop(columns="heads_are"), place / POINTS_CSV)
    blocks = _blocks(table, published)
    card = [
        heading(1, f"Among {shortened(published.title.lower())}"),
        *blocks,
        heading(2, "What was published"),
        paragraph(shortened(published.source, 600)),
        *(bullet(shortened(text, 400)) for text in published.warnings),
        paragraph("± is the standard error over documents; published numbers have none."),
    ]
    write_text(place / CARD, to_markdown(card))
    return to_terminal(blocks), place


def _published(row: Row) -> str:
    low, middle, high = (significant(row[f"published_{part}"]) for part in ("low", "median", "high"))
    return f"{low} … {middle} … {high} ({counted(row['published_models'], 'model')})"


_COLUMNS = {
    "model": lambda row: shortened(row["model"]),
    "measure": lambda row: row["measure"],
    "mean over heads": lambda row: plus_minus(row["value"], row["value_se"]),
    "window": lambda row: "" if math.isnan(row["window"]) else f"{row['window']:,.0f}",
    "published, lowest … median … highest": _published,
    "rank": lambda row: "" if math.isnan(row["above"]) else f"above {row['above']:.0f} of {row['at_this_window']}",
    "nearest": lambda row: row["nearest"],
}


def _blocks(table: pd.DataFrame, published: PublishedModels) -> list[AnyBlock]:
    """The table, which heads it is about, and where no published model has the window."""
    some = table[table["heads_are"] != ""].drop_duplicates("model")
    blocks: list[AnyBlock] = [
        table_of(records(table), _COLUMNS),
        *(bullet(f"{shortened(row['model'])}: {row['heads_are']}.") for row in records(some)),
    ]
    if not (table["at_this_window"] > 0).all():
        windows = " and ".join(f"{each:,}" for each in sorted({int(each) for each in published.table["window"]}))
        blocks.append(
            paragraph(
                f"Published windows are {windows} tokens. The same weights have other numbers at another window, so no "
                "rank is given there. Measure with that context, or see the rotated-mean prediction with `qkscope "
                "predict --window`."
            )
        )
    return blocks
