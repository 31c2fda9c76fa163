"""Several training runs: a line per run over its steps, their mean, and their spread."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qkscope.draw import style
from qkscope.draw.axis import number_ticks
from qkscope.lenses.runs import ACROSS, NAME
from qkscope.lenses.views import Results
from qkscope.report.charts import layout

PANELS = (("r_q", "mean r_q"), ("r_k", "mean r_k"), ("position-dominated", "share of position-dominated heads"))
NAMED = 10  # runs with a colour of their own in the legend


def draw_runs(tables: Results) -> Figure:
    """Three panels over steps: mean r_q, mean r_k, share of position-dominated heads."""
    at = tables.own
    table, across = at.table(NAME), at.table(ACROSS)
    runs = list(dict.fromkeys(table["run"]))
    figure = layout.canvas(tables, 11.0, 4.2, f"{len(runs)} Training Runs", span=False)
    panels = figure.subplots(1, len(PANELS))
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.88, len(runs)))
    log = at.study.axis_scale == "log"
    for axes, (measure, title) in zip(panels, PANELS, strict=True):
        for run, colour in zip(runs, colours, strict=True):
            rows = table[table["run"] == run].sort_values("step")
            axes.plot(rows["step"], rows[measure], "o-", color=colour, markersize=4, linewidth=1.2,
                      gid=f"{measure} {run}")  # fmt: skip
            _draw_errors(axes, rows, measure)
        _draw_across(axes, across, measure)
        axes.set_ylabel(title)
        axes.set_xlabel("training step (log)" if log else "training step")
        number_ticks(axes, log=log)
    _legend(figure, runs, colours)
    return style.finish(figure)


def _draw_errors(axes: Axes, rows: pd.DataFrame, measure: str) -> None:
    known = rows[np.isfinite(rows[f"{measure}_se"])]
    low, high = known[measure] - known[f"{measure}_se"], known[measure] + known[f"{measure}_se"]
    axes.vlines(known["step"], low, high, color=style.INK, linewidth=0.8, gid=f"{measure} error")


def _draw_across(axes: Axes, across: pd.DataFrame, measure: str) -> None:
    mean, between = across[measure], across[f"{measure}_between"]
    axes.plot(across["step"], mean, color=style.INK, linewidth=2.0, zorder=4, gid=f"{measure} mean")
    axes.fill_between(across["step"], mean - between, mean + between, color=style.GREY, alpha=0.2, linewidth=0,
                      gid=f"{measure} between")  # fmt: skip


def _legend(figure: Figure, runs: list[str], colours: np.ndarray) -> None:
    lines: list[Artist] = [Line2D([], [], color=style.INK, linewidth=2.0, label="mean of runs"),
                           Patch(facecolor=style.GREY, alpha=0.3, label="± 1 SD between runs")]  # fmt: skip
    shown = list(zip(runs, colours, strict=True))[: NAMED if len(runs) <= NAMED else 0]
    lines += [Line2D([], [], color=colour, marker="o", label=style.plain(run, 12)) for run, colour in shown[:3]]
    style.header_legend(figure, lines, len(lines))
