"""Where a model stands among the published ones: the same mean over heads, each with its window.

The published values are of full-attention layers, so the heads of an entry's other layers are left out of its means.
Nearly all of these numbers depend on the window, so a rank is given only at the published model's own window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.join.full_heads import compared_heads
from qkscope.join.published import PublishedModels, load_published_models
from qkscope.lenses.views import Results, WindowView, build_tables
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import CARD, POINTS_CSV, join_folder
from qkscope.results.read import load_results
from qkscope.text import counted
from qkscope.words.blocks import (
    AnyBlock,
    Code,
    Run,
    TableBlock,
    bullet,
    heading,
    markdown_text,
    paragraph,
    to_markdown,
)
from qkscope.words.phrases import shortened, significant

# Where these results have what was published, in the same units: means over heads, of sizes where it has sizes.
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
    if not own.panel.has(measure):
        return []
    panel = own.panel
    theirs = published.table[["model", "window", measure]].dropna()
    values, windows = theirs[measure].to_numpy(dtype=float), theirs["window"].to_numpy(dtype=float)
    rows = []
    for name in own.names:
        heads, window = compared_heads(own, name), own.window_of(name)
        mean, error = heads.mean(panel, measure, name), heads.error(panel, measure, name)
        alike = np.abs(windows / window - 1.0) <= NEAR if window == window else np.zeros(len(windows), dtype=bool)
        there = values[alike]
        rows.append(
            {
                "model": name, "measure": measure, "value": mean, "value_se": error, "window": window,
                "heads": heads.heads, "heads_measured": heads.every, "heads_said": heads.words,
                "published_low": values.min(), "published_median": float(np.median(values)),
                "published_high": values.max(), "published_models": len(values),
                "nearest": str(theirs["model"].iloc[int(np.abs(values - mean).argmin())]) if mean == mean else "",
                "at_this_window": int(alike.sum()),
                "above": int((there < mean).sum()) if len(there) and mean == mean else math.nan,
            }
        )  # fmt: skip
    return rows


def among_lines(table: pd.DataFrame, published: PublishedModels) -> list[str]:
    """The table in words."""
    said = [
        f"among {counted(len(published.table), 'published model')}: means over heads of full-attention layers; "
        "published from lowest to highest over the models that have the measure"
    ]
    for model, rows in table.groupby("model", sort=False):
        window = rows["window"].iloc[0]
        heads = f"; {rows['heads_said'].iloc[0]}" if rows["heads_said"].iloc[0] else ""
        said.append(f"{model} (window {'not recorded' if window != window else f'{window:,.0f} tokens'}{heads})")
        said += [f"  {row['measure']:22} {_value(row):>18}   {_span(row)}" for row in rows.to_dict("records")]
    warning = markdown_text(window_warning(table, published))
    return [*said, warning] if warning else said


def window_warning(table: pd.DataFrame, published: PublishedModels) -> list[Run]:
    """That windows differ, where they do."""
    theirs = sorted({int(w) for w in published.table["window"]})
    other = table[table["at_this_window"] == 0]["model"].nunique()
    if not other:
        return []
    return [
        f"Published windows are {' and '.join(f'{w:,}' for w in theirs)} tokens. At another window these numbers are "
        "others for the same weights, so no rank is given there; ",
        Code("qkscope predict --window"),
        " says what RoPE alone would give, and a study with that context measures it.",
    ]


def _value(row: Mapping[Any, Any]) -> str:
    value, error = row["value"], row["value_se"]
    if math.isnan(value):
        return "undefined"
    return significant(value) if math.isnan(error) else f"{significant(value)} ± {significant(error, -1)}"


def _span(row: Mapping[Any, Any]) -> str:
    low, middle, high = (significant(row[f"published_{part}"]) for part in ("low", "median", "high"))
    text = f"published {low} … {middle} … {high} ({counted(int(row['published_models']), 'model')})"
    here = row["at_this_window"]
    if here and not math.isnan(row["above"]):
        return f"{text}; above {int(row['above'])} of {here} at this window"
    return f"{text}; other windows"


def write_among(folder: Path, out: Path | None = None) -> tuple[list[str], Path]:
    """Write `points.csv` and a card; returns lines for a terminal, and where they are."""
    published = load_published_models()
    tables = build_tables(load_results(folder))
    table = _among(tables, published)
    place = out or join_folder(tables.files.writable_folder, "among")
    lines = among_lines(table, published)
    write_csv(table.drop(columns="heads_said"), place / POINTS_CSV)
    write_text(place / CARD, to_markdown(_card(table, published)))
    return lines, place


def _heads_said(table: pd.DataFrame) -> list[AnyBlock]:
    """Which heads the means of an entry are over, where that is not plain."""
    entries = table[table["heads_said"] != ""].drop_duplicates("model")
    return [bullet(f"{shortened(str(row['model']))}: {row['heads_said']}.") for row in entries.to_dict("records")]


def _card(table: pd.DataFrame, published: PublishedModels) -> list[AnyBlock]:
    titles = (
        "model", "measure", "mean over heads", "window", "published, lowest … median … highest", "nearest",
    )  # fmt: skip
    rows = [
        (
            shortened(str(row["model"])),
            shortened(str(row["measure"])),
            _value(row),
            "" if row["window"] != row["window"] else f"{int(row['window']):,}",
            _span(row),
            shortened(str(row["nearest"])),
        )
        for row in table.to_dict("records")
    ]
    warning = window_warning(table, published)
    return [
        heading(1, f"Among {shortened(published.title.lower())}"),
        *([paragraph(*warning)] if warning else []),
        *_heads_said(table),
        TableBlock(titles, rows),
        heading(2, "What was published"),
        paragraph(shortened(published.source, 600)),
        *(bullet(shortened(text, 400)) for text in published.warnings),
        paragraph("± is the standard error over documents; published numbers have none."),
    ]
