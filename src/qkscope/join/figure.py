"""The figure of a join: each measure against the score, a dot per model, and r of all measures with its interval."""

from __future__ import annotations

import math
from itertools import cycle

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from qkscope.draw import style
from qkscope.join import statistics as stats
from qkscope.join.table import NULL, NULL_ROLE, Joined
from qkscope.results.entries import Entries
from qkscope.words.phrases import number, p_value

PANELS = 8  # measures with a scatter of their own; all are in the panel of intervals
MARKERS = "osD^vPX*<>"
# Families differ in hue and lightness, and none looks like the blue of queries or the red of keys.
FAMILY_COLOURS = ("#8b5cf6", "#b45309", "#0f766e", "#6b7280", "#be185d", "#4d7c0f", "#1f2937", "#a16207")


def draw_join(joined: Joined) -> Figure:
    """Scatters, at most eight, and all correlations with their intervals."""
    names = [name for name in joined.measures.names if joined.points[name].notna().sum() >= 2][:PANELS]
    if joined.points["parameters"].notna().sum() >= 3:
        names.append(NULL)
    columns = min(3, max(1, len(names)))
    rows = max(1, math.ceil(len(names) / columns))
    with matplotlib.rc_context(style.RC):
        models = f"{len(joined.points)} models"
        note = f"{models}; bars are 95 % intervals, thin ones of dots ± 1 standard error over documents"
        size, study = (3.1 * columns + 4.6, 2.7 * rows + 1.2), Entries(joined.scores.name, (), ())
        figure = style.new_figure(*size, study, "Do Measures Correlate with Scores?", note)
        grid = figure.add_gridspec(rows, columns + 1, width_ratios=[1.0] * columns + [1.25])
        families = joined.points["family"].unique()
        marks = dict(zip(families, zip(cycle(FAMILY_COLOURS), cycle(MARKERS), strict=False), strict=False))
        for i, name in enumerate(names):
            axes = figure.add_subplot(grid[i // columns, i % columns])
            _draw_scatter(axes, joined, name, marks)
            if i % columns == 0:
                axes.set_ylabel("score")
        _draw_intervals(figure.add_subplot(grid[:, columns]), joined.table, joined.most_models)
        key = [
            Line2D([], [], color=colour, marker=marker, linestyle="none", label=style.plain(name))
            for name, (colour, marker) in marks.items()
            if name
        ]
        if key:
            style.header_legend(figure, key, min(6, len(key)))
        return style.finish(figure)


def _draw_scatter(axes: Axes, joined: Joined, name: str, marks: dict[str, tuple[str, str]]) -> None:
    points = joined.points[joined.points[name].notna()]
    x, y = points[name].to_numpy(dtype=float), points["score"].to_numpy(dtype=float)
    if name == NULL:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda size, _: f"{size / 1e9:g}B" if size >= 1e9 else f"{size / 1e6:g}M")
        )
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        errors = points[f"{name}_se"].to_numpy(dtype=float)
        known = np.isfinite(errors)
        axes.errorbar(x[known], y[known], xerr=errors[known], fmt="none", ecolor=style.LINE, elinewidth=0.9, zorder=1)
    for family, part in points.groupby("family", sort=False):
        colour, marker = marks[str(family)]
        axes.scatter(part[name], part["score"], s=34, color=colour, marker=marker, zorder=3, gid="model")
    if len(points) <= 12:
        for label, a, b in zip(points["model"], x, y, strict=True):
            axes.annotate(
                style.plain(str(label), 18), (a, b), xytext=(0, 5), textcoords="offset points", ha="center",
                fontsize=6.0, color=style.GREY,
            )  # fmt: skip
        axes.margins(x=0.22, y=0.14)
    row = joined.table[joined.table["measure"] == name].iloc[0]
    title = f"{style.plain(name)}{' (null model)' if name == NULL else ''}"
    axes.set_title(f"{title}\nr = {number(row['r'])}, p = {p_value(row['p'])}", fontsize=8.5, loc="left")


def _draw_intervals(axes: Axes, table: pd.DataFrame, n: int) -> None:
    """Every correlation with its interval; grey is where |r| could not be significant with so many models."""
    limit = stats.smallest_significant(n)
    if math.isfinite(limit):
        axes.axvspan(-limit, limit, color=style.FAINT, alpha=0.45, linewidth=0, gid="not significant")
    axes.axvline(0, color=style.LINE, linewidth=0.8)
    for i, row in enumerate(table.to_dict("records")):
        colour = style.INK if row["role"] == NULL_ROLE else style.PURPLE
        if math.isnan(row["r"]):
            axes.text(0, i, "undefined", ha="center", va="center", fontsize=7, color=style.GREY)
            continue
        if not math.isnan(row["r_low"]):
            axes.plot([row["r_low"], row["r_high"]], [i, i], color=colour, linewidth=1.6, gid="interval")
        axes.plot(row["r"], i, marker="s" if row["role"] == NULL_ROLE else "o", color=colour, markersize=5.5)
        if not math.isnan(row["partial_r"]):
            axes.plot(row["partial_r"], i + 0.22, marker="|", color=style.AMBER, markersize=8, gid="partial")
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.set_xlim(-1.05, 1.05)
    axes.set_yticks(range(len(table)), [style.plain(name) for name in table["measure"]])
    axes.set_xlabel(f"r (grey: not significant with {n} models; amber: at equal parameters)", fontsize=7.5)
    axes.set_title("Correlation with the score", fontsize=8.5, loc="left")
