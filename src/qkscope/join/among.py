"""`qkscope among`: where a model stands among the published ones, by the same means over heads.

The published values are of full-attention layers, so the heads of an entry's other layers are left out of its means.
Nearly all of these numbers depend on the window, so a rank is given only at the published model's own window.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.join.from_results import compared_heads
from qkscope.join.published import PublishedModels, load_published_models
from qkscope.lenses.views import Results, WindowView, build_tables
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import CARD, JOIN, POINTS_CSV, output_folder
from qkscope.results.read import load_results
from qkscope.text import counted
from qkscope.words.blocks import AnyBlock, TableBlock, bullet, heading, paragraph, to_markdown
from qkscope.words.phrases import shortened, significant

# What was published; results have the same measures in the same units.
MEASURES = (
    "r_q", "r_k", "r_q_a_abs", "r_k_a_abs", "var_frac_a", "var_frac_b", "plane_var_fraction", "bias_strength",
    "bias_strength_window", "ap", "ap_first", "ap_last", "ap_drop",
)  # fmt: skip
NEAR = 0.1  # windows that differ by less than that share count as one


def among(folder: Path, published: PublishedModels) -> pd.DataFrame:
    """A row per entry and measure: its mean with error and window, and where that is among the published values."""
    return _among(build_tables(load_results(folder)), published)


def _among(tables: Results, published: PublishedModels) -> pd.DataFrame:
    own, folder = tables.own, tables.files.source
    rows = [row for measure in MEASURES for row in _rows(own, measure, published)]
    if not rows:
        raise InputError(f"{folder}: has no measure that was published; `qkscope analyze {folder}` writes the tables")
    return pd.DataFrame(rows)


def _rows(own: WindowView, measure: str, published: PublishedModels) -> list[dict[str, object]]:
    panel = own.panel
    if not panel.has(measure):
        return []
    theirs = published.table[["model", "window", measure]].dropna()
    values, windows = theirs[measure].to_numpy(dtype=float), theirs["window"].to_numpy(dtype=float)
    rows = []
    for name in own.names:
        heads, window = compared_heads(own, name), own.window_of(name)
        mean = heads.mean(panel, measure, name)
        alike = np.abs(windows / window - 1.0) <= NEAR  # none where the window is not recorded
        rows.append(
            {
                "model": name, "measure": measure, "value": mean, "value_se": heads.error(panel, measure, name),
                "window": window, "heads": heads.heads, "heads_measured": heads.measured,
                "heads_are": heads.description,
                "published_low": values.min(), "published_median": float(np.median(values)),
                "published_high": values.max(), "published_models": len(values),
                "nearest": str(theirs["model"].iloc[int(np.abs(values - mean).argmin())]) if mean == mean else "",
                "at_this_window": int(alike.sum()),
                "above": int((values[alike] < mean).sum()) if alike.any() and mean == mean else math.nan,
            }
        )  # fmt: skip
    return rows


def write_among(folder: Path, out: Path | None = None) -> tuple[list[str], Path]:
    """Write `points.csv` and a card; returns lines for a terminal, and where they are."""
    published = load_published_models()
    tables = build_tables(load_results(folder))
    table = _among(tables, published)
    place = out or output_folder(tables.files.writable_folder, JOIN, "among")
    write_csv(table.drop(columns="heads_are"), place / POINTS_CSV)
    write_text(place / CARD, to_markdown(_card(table, published)))
    return _lines(table, published), place


def _lines(table: pd.DataFrame, published: PublishedModels) -> list[str]:
    lines = [f"among {counted(len(published.table), 'published model')}: means over heads of full-attention layers"]
    for model, rows in table.groupby("model", sort=False):
        window, heads = rows["window"].iloc[0], rows["heads_are"].iloc[0]
        where = "not recorded" if math.isnan(window) else f"{window:,.0f} tokens"
        lines.append(f"{model} (window {where}{f'; {heads}' if heads else ''})")
        lines += [f"  {row['measure']:22} {_value(row):>18}   published {_span(row)}" for row in _records(rows)]
    return [*lines, *_window_warning(table, published)]


def _window_warning(table: pd.DataFrame, published: PublishedModels) -> list[str]:
    """Where no published model has the window of an entry."""
    if (table["at_this_window"] > 0).all():
        return []
    windows = " and ".join(f"{window:,}" for window in sorted({int(window) for window in published.table["window"]}))
    return [
        f"Published windows are {windows} tokens. The same weights have other numbers at another window, so no rank is "
        "given there. Measure with that context, or see the rotated-mean prediction with `qkscope predict --window`."
    ]


def _value(row: dict[str, Any]) -> str:
    value, error = row["value"], row["value_se"]
    return (
        significant(value)
        if math.isnan(value) or math.isnan(error)
        else f"{significant(value)} ± {significant(error, -1)}"
    )


def _span(row: dict[str, Any]) -> str:
    low, middle, high = (significant(row[f"published_{part}"]) for part in ("low", "median", "high"))
    text = f"{low} … {middle} … {high} ({counted(row['published_models'], 'model')})"
    rank = (
        "other windows"
        if math.isnan(row["above"])
        else f"above {row['above']:.0f} of {row['at_this_window']} at this window"
    )
    return f"{text}; {rank}"


def _card(table: pd.DataFrame, published: PublishedModels) -> list[AnyBlock]:
    titles = ("model", "measure", "mean over heads", "window", "published, lowest … median … highest", "nearest")
    rows = [
        (
            shortened(row["model"]), shortened(row["measure"]), _value(row),
            "" if math.isnan(row["window"]) else f"{row['window']:,.0f}", _span(row), shortened(row["nearest"]),
        )
        for row in _records(table)
    ]  # fmt: skip
    some = table[table["heads_are"] != ""].drop_duplicates("model")
    return [
        heading(1, f"Among {shortened(published.title.lower())}"),
        *(paragraph(text) for text in _window_warning(table, published)),
        *(bullet(f"{shortened(row['model'])}: {row['heads_are']}.") for row in _records(some)),
        TableBlock(titles, rows),
        heading(2, "What was published"),
        paragraph(shortened(published.source, 600)),
        *(bullet(shortened(text, 400)) for text in published.warnings),
        paragraph("± is the standard error over documents; published numbers have none."),
    ]


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", table.to_dict("records"))
