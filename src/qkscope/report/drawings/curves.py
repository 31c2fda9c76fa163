"""Means over heads against context length, query position, component, or the steps of several runs."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from qkscope.draw import style
from qkscope.draw.axis import number_ticks
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.lenses.across_models import EVERY_MODEL, ROLES, at_component
from qkscope.lenses.charts import Panel
from qkscope.lenses.kind_of_layer import EVERY_KIND
from qkscope.lenses.plasticity import PROFILE_FILE, mean_profile, shown_entries
from qkscope.lenses.runs import ACROSS
from qkscope.lenses.runs import NAME as RUNS
from qkscope.lenses.views import Results, WindowView
from qkscope.lenses.windows import is_shown
from qkscope.report.charts import layout
from qkscope.report.charts.means import draw_panel

CORRELATIONS = ("r_q", "r_k")
LENGTH_MARKERS = ("o", "s", "^")
MOST_LENGTHS = 6  # models
OVER_CHECKPOINTS = ("ap_same_position", "ap_content", "ap")
MOST_LINES = 4
COMPONENT_COLUMNS = 4  # panels next to each other
MOST_PANELS = 16
BAR = 0.38
RUN_PANELS = (("r_q", "mean r_q"), ("r_k", "mean r_k"), ("position-dominated", "share of position-dominated heads"))
MOST_RUNS, MOST_NAMED_RUNS = 10, 3  # up to so many runs, so many are named in the legend


# --- context length ---------------------------------------------------------------------------------


def draw_context_length(tables: Results) -> Figure:
    """Mean r_q and r_k against the number of leading tokens; filled markers are the native context length."""
    at = tables.own
    kind = at.layer_types[0]
    table = at.table("window_dependence")
    table = table[table["layer_kind"] == kind]
    names = _shown_checkpoints(at, table)
    who = "all heads" if kind == EVERY_KIND else f"{style.plain(kind)} heads"
    figure = layout.canvas(tables, 8.6, 4.0, "Correlation by Context Length", span=False)
    panels = figure.subplots(1, len(CORRELATIONS), sharey=True)
    colors = _colors_of_checkpoints(len(names))
    known, windows = False, sorted(table["window"].unique())
    for axes, measure in zip(panels, CORRELATIONS, strict=True):
        for name, color, marker in zip(names, colors, (LENGTH_MARKERS * 2)[: len(names)], strict=True):
            rows = table[(table["model"] == name) & is_shown(table, measure)]
            label = style.plain(at.study.labels[name])
            known |= _draw_length(axes, rows, measure, at.window_of(name), color, marker, label)
        axes.set_title(f"Mean {layout.in_math(at.measures[measure].label)}, {who}", fontsize=9.5, loc="left")
        axes.axhline(0.0, color=style.GREY, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(windows[:: max(1, int(np.ceil(len(windows) / 8)))]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}K" if value % 1024 == 0 else f"{value:,.0f}")
        axes.set_xlabel("context length (leading tokens)")
    panels[0].set_ylabel("correlation with position")
    panels[0].set_ylim(top=1.0)
    style.header_legend(figure, [*panels[0].get_legend_handles_labels()[0], *error_keys(known)], len(names) + 1)
    return style.finish(figure)


def _shown_checkpoints(at: WindowView, table: pd.DataFrame) -> list[str]:
    """The first checkpoint of a run, the last before its context length grows, and the last; up to six models."""
    names = [name for name in at.names if (table["model"] == name).any()]
    if not at.study.one_run:
        return names[:MOST_LENGTHS]
    grows = [i for i in range(1, len(names)) if at.window_of(names[i]) != at.window_of(names[i - 1])]
    middle = grows[0] - 1 if grows else len(names) // 2
    return list(dict.fromkeys((names[0], names[middle], names[-1])))


def _draw_length(
    axes: Axes, rows: pd.DataFrame, measure: str, native: float, color: tuple[float, ...], marker: str, label: str
) -> bool:
    """One checkpoint over its windows; returns whether errors are known."""
    size = style.marker_size(len(rows))
    axes.plot(
        rows["window"], rows[measure], color=color, marker=marker, markersize=size, markerfacecolor="white",
        linewidth=1.4, label=label, gid=measure,
    )  # fmt: skip
    own = rows["window"] == native
    axes.plot(rows["window"][own], rows[measure][own], color=color, marker=marker, markersize=size, linestyle="none")
    draw_errors(axes, rows["window"], rows[measure], rows[f"{measure}_se"], gid=measure)
    return bool(rows[f"{measure}_se"].notna().any())


def _colors_of_checkpoints(count: int) -> list[tuple[float, ...]]:
    """Dark to light in their order."""
    return [tuple(color) for color in matplotlib.colormaps["viridis"](np.linspace(0.0, 0.72, max(2, count)))][:count]


# --- plasticity -------------------------------------------------------------------------------------


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
            _draw_plasticity(row[1], at, profiles, kind)
            row[1].set_title("By query position", fontsize=9.5, loc="left")
    layout.panel_legend(grid[0, 0], [at.measures[name] for name in filter(at.has_measure, OVER_CHECKPOINTS)])
    if profiles is not None:
        grid[-1, 1].set_xlabel("query position (tokens)")
        grid[0, 1].legend(loc="lower left", fontsize=7.5, frameon=False)
    errors = any(at.mean_table([name])[f"{name}_se"].notna().any() for name in filter(at.has_measure, OVER_CHECKPOINTS))
    style.header_legend(figure, layout.keys(tables, errors=errors), 4)
    return style.finish(figure)


def _draw_plasticity(axes: Axes, at: WindowView, profiles: pd.DataFrame, kind: str) -> None:
    """Means over the heads of one layer type at up to four checkpoints."""
    names = shown_entries(at, MOST_LINES)
    for name, color, marker in zip(names, _colors_of_checkpoints(len(names)), "os^D", strict=False):
        rows = profiles[(profiles["model"] == name) & profiles["ap"].notna()]
        rows = rows if kind == EVERY_KIND else rows[rows["layer_kind"] == kind]
        if rows.empty:
            continue
        mean = mean_profile(rows)
        axes.plot(
            mean["position"], mean["ap"], color=color, marker=marker, markersize=3.2, linewidth=1.4,
            label=style.plain(at.study.labels[name]), gid="profile",
        )  # fmt: skip
        draw_errors(axes, mean["position"], mean["ap"], mean["ap_se"], gid="profile")
    axes.set_ylim(0.0, 1.0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


# --- components -------------------------------------------------------------------------------------


def draw_components(tables: Results) -> Figure:
    """Mean r_q and r_k of each component: a panel per model, and one over all heads."""
    at = tables.own
    shown = list(at.study.checkpoints[:MOST_PANELS])
    panels = [(entry.label, entry.name) for entry in shown]
    panels += [("all heads", EVERY_MODEL)] if len(shown) > 1 else []
    columns = min(COMPONENT_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = max(6.4, 3.0 * columns), 2.1 * rows + 1.0
    figure = layout.canvas(tables, *size, "Which Components Follow Position?", span=False)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, name) in zip(grid.flat, panels, strict=False):
        _draw_components(axes, at, name)
        axes.set_title(style.plain(title), fontsize=9, loc="left")
    keys: list[Artist] = [
        Patch(facecolor=style.BLUE, label="mean $r_q$"),
        Patch(facecolor=style.RED, label="mean $r_k$"),
        Line2D([], [], color=style.INK, marker="_", linestyle="none", markersize=8, label="mean size |r|"),
    ]
    style.header_legend(figure, keys, 3)
    return style.finish(figure)


def _draw_components(axes: Axes, at: WindowView, name: str) -> None:
    table = at.table(ROLES)
    components = at_component(table, name, "pc")
    for kind, colour, side in (("q", style.BLUE, -0.5), ("k", style.RED, 0.5)):
        x = components + BAR * side
        axes.bar(x, at_component(table, name, f"r_{kind}"), BAR, color=colour, gid=f"r_{kind}")
        sizes = at_component(table, name, f"r_{kind}_abs")
        axes.plot(x, sizes, color=style.INK, marker="_", linestyle="none", markersize=6, gid=f"size {kind}")
    axes.axhline(0, color=style.LINE, linewidth=0.8)
    axes.set_ylim(min(-0.12, 1.1 * float(np.nanmin([table["r_k"].min(), 0.0]))), 1.02)  # the same in every panel
    axes.set_xticks(components, [f"{int(c)}" for c in components])
    axes.set_xlabel("component", fontsize=7.5)


# --- several runs -----------------------------------------------------------------------------------


def draw_runs(tables: Results) -> Figure:
    """Three panels over steps: mean r_q, mean r_k, share of position-dominated heads."""
    at = tables.own
    table, across = at.table(RUNS), at.table(ACROSS)
    runs = list(dict.fromkeys(table["run"]))
    figure = layout.canvas(tables, 11.0, 4.2, f"{len(runs)} Training Runs", span=False)
    panels = figure.subplots(1, len(RUN_PANELS))
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.88, len(runs)))
    log = at.study.axis_scale == "log"
    for axes, (measure, title) in zip(panels, RUN_PANELS, strict=True):
        for run, colour in zip(runs, colours, strict=True):
            rows = table[table["run"] == run].sort_values("step")
            axes.plot(rows["step"], rows[measure], "o-", color=colour, markersize=4, linewidth=1.2,
                      gid=f"{measure} {run}")  # fmt: skip
            draw_errors(axes, rows["step"], rows[measure], rows[f"{measure}_se"], gid=measure)
        mean, between = across[measure], across[f"{measure}_between"]
        axes.plot(across["step"], mean, color=style.INK, linewidth=2.0, zorder=4, gid=f"{measure} mean")
        axes.fill_between(across["step"], mean - between, mean + between, color=style.GREY, alpha=0.2, linewidth=0,
                          gid=f"{measure} between")  # fmt: skip
        axes.set_ylabel(title)
        axes.set_xlabel("training step (log)" if log else "training step")
        number_ticks(axes, log=log)
    keys: list[Artist] = [Line2D([], [], color=style.INK, linewidth=2.0, label="mean of runs"),
                          Patch(facecolor=style.GREY, alpha=0.3, label="± 1 SD between runs")]  # fmt: skip
    shown = list(zip(runs, colours, strict=True))[: MOST_NAMED_RUNS if len(runs) <= MOST_RUNS else 0]
    keys += [Line2D([], [], color=colour, marker="o", label=style.plain(run, 12)) for run, colour in shown]
    style.header_legend(figure, keys, len(keys))
    return style.finish(figure)
