"""Attention plasticity: over checkpoints, and by the position of the query at a few of them."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from qkscope.draw import style
from qkscope.draw.curves import draw_errors
from qkscope.lenses.charts import Panel
from qkscope.lenses.kind_of_layer import EVERY_KIND
from qkscope.lenses.plasticity import PROFILE_FILE, mean_profile, shown_entries
from qkscope.lenses.views import Results, WindowView
from qkscope.report.charts import layout
from qkscope.report.charts.trajectories import draw_panel

OVER_CHECKPOINTS = ("ap_same_position", "ap_content", "ap")
MOST_LINES = 4


def draw_plasticity(tables: Results) -> Figure:
    """A row per layer type: plasticity over checkpoints (left), and by query position at a few checkpoints (right)."""
    at, kinds = tables.own, layout.layer_types(tables.own)
    profiles = at.with_kind(at.table(PROFILE_FILE)) if at.has(PROFILE_FILE) else None
    columns = 1 if profiles is None else 2
    figure = layout.canvas(tables, 5.2 * columns, 1.4 + 2.7 * len(kinds), "Attention Plasticity")
    grid = figure.subplots(len(kinds), columns, squeeze=False, sharey=True)
    for row, kind in zip(grid, kinds, strict=True):
        who = layout.type_title(at, kind)
        draw_panel(row[0], tables, Panel(tuple(filter(at.has_measure, OVER_CHECKPOINTS))), kind)
        row[0].set_title(f"Plasticity, {who}", fontsize=9.5, loc="left")
        row[0].set_ylim(0.0, 1.0)
        style.checkpoint_axis(row[0], at.study, labels=kind == kinds[-1], phase_names=False)
        if profiles is not None:
            _draw_profiles(row[1], at, profiles, kind)
            row[1].set_title("By query position", fontsize=9.5, loc="left")
    layout.panel_legend(grid[0, 0], [at.measures[name] for name in filter(at.has_measure, OVER_CHECKPOINTS)])
    if profiles is not None:
        grid[-1, 1].set_xlabel("query position (tokens)")
        grid[0, 1].legend(loc="lower left", fontsize=7.5, frameon=False)
    return style.finish(figure)


def _draw_profiles(axes: Axes, at: WindowView, profiles: pd.DataFrame, kind: str) -> None:
    """Means over the heads of one layer type at up to four checkpoints."""
    names = shown_entries(at, MOST_LINES)
    for name, shade in zip(names, np.linspace(0.35, 1.0, len(names)), strict=True):
        rows = profiles[(profiles["model"] == name) & profiles["ap"].notna()]
        rows = rows if kind == EVERY_KIND else rows[rows["layer_kind"] == kind]
        if rows.empty:
            continue
        mean = mean_profile(rows)
        axes.plot(
            mean["position"], mean["ap"], color=style.PURPLE, alpha=float(shade), marker="o", markersize=3.2,
            linewidth=1.6, label=style.plain(at.study.labels[name]), gid="profile",
        )  # fmt: skip
        draw_errors(axes, mean["position"], mean["ap"], mean["ap_se"], gid="profile")
    axes.set_ylim(0.0, 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
