"""Plasticity against the position of the query, and against the distances of keys and query, at selected entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from qkscope.draw import style
from qkscope.draw.curves import band_key, draw_errors
from qkscope.lenses.canvas import canvas
from qkscope.lenses.kind_marks import KindMark, kind_marks
from qkscope.lenses.kind_of_layer import EVERY_KIND
from qkscope.lenses.plasticity.shown import MOST_MAPS, mean_map, mean_profile, shown_entries, with_kinds
from qkscope.lenses.plasticity.summaries import MEANS, kinds_of
from qkscope.lenses.plasticity.table import MAP_FILE, PROFILE_FILE
from qkscope.lenses.views import WindowView

GRIDS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3)}
THIN = 3e-4  # of all pairs: a cell of whole parts has at least twice that; those of position 0 are not worth a colour
COLOURS = "viridis"


# --- profile ----------------------------------------------------------------------------------------


def draw_profile(at: WindowView) -> Figure:
    """A panel per selected entry: heads faint, means of each kind of layer with their spread."""
    models, study = shown_entries(at), at.study
    table = with_kinds(at, at.table(PROFILE_FILE))
    rows, columns = GRIDS[len(models)]
    figure = canvas(at, max(5.6, 3.5 * columns + 0.5), 2.9 * rows + 1.0, "Plasticity by Query Position", models)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    marks = _marks(kinds_of(at.table(MEANS)))
    for axes, model in zip(grid.flat, models, strict=False):
        _draw_profile_panel(axes, table[table["model"] == model], marks)
        axes.set_xlim(0.0, at.window_of(model))
        axes.set_title(style.plain(study.labels[model]), fontsize=9.5, loc="left")
        _token_axis(axes)
    for axes in list(grid.flat)[len(models) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("plasticity (AP)")
    for axes in grid.flat[max(0, len(models) - columns) : len(models)]:
        axes.set_xlabel("position of the query (tokens)")
    keys = [_kind_key(kind, mark) for kind, mark in marks.items()]
    style.header_legend(figure, [*keys, band_key(style.GREY)], min(3, len(keys) + 1))
    return style.finish(figure)


def _marks(kinds: Sequence[str]) -> dict[str, KindMark]:
    return {EVERY_KIND: KindMark(style.PURPLE, "o")} if list(kinds) == [EVERY_KIND] else kind_marks(kinds)


def _kind_key(kind: str, mark: KindMark) -> Line2D:
    label = "mean over heads" if kind == EVERY_KIND else style.plain(kind)
    return Line2D([], [], color=mark.colour, marker=mark.marker, linestyle=cast(Any, mark.line), label=label)


def _draw_profile_panel(axes: Axes, table: pd.DataFrame, marks: Mapping[str, KindMark]) -> None:
    heads = table.groupby(["layer", "head"]).ngroups
    for kind, mark in marks.items():
        rows = table[(table["layer_kind"] == kind) & table["ap"].notna()]
        if rows.empty:
            continue
        lines = [one[["position", "ap"]].to_numpy() for _, one in rows.groupby(["layer", "head"])]
        axes.add_collection(
            LineCollection(lines, colors=mark.colour, alpha=max(0.12, min(0.45, 25 / heads)), linewidths=0.6, zorder=1)
        )
        mean = mean_profile(rows)
        axes.fill_between(
            mean["position"], mean["ap"] - mean["ap_std"], mean["ap"] + mean["ap_std"], color=mark.colour, alpha=0.16,
            linewidth=0, zorder=2, gid="band",
        )  # fmt: skip
        axes.plot(
            mean["position"], mean["ap"], color=mark.colour, marker=mark.marker, linestyle=mark.line, linewidth=1.8,
            markersize=3.5, zorder=4, gid=f"profile {kind}",
        )  # fmt: skip
        draw_errors(axes, mean["position"], mean["ap"], mean["ap_se"], gid=kind)
    axes.set_ylim(0.0, 1.0)


def _token_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


# --- map --------------------------------------------------------------------------------------------


def draw_map(at: WindowView) -> Figure:
    """Entries beside each other, kinds of layers below each other; one colour scale from 0 to 1."""
    models, kinds, study = shown_entries(at, MOST_MAPS), kinds_of(at.table(MEANS)), at.study
    table = with_kinds(at, at.table(MAP_FILE))
    size = max(6.4, 3.0 * len(models) + 1.6), 2.9 * len(kinds) + 1.0
    figure = canvas(at, *size, "Plasticity by Distance of Keys and Query", models)
    grid = figure.subplots(len(kinds), len(models), squeeze=False)
    image = None
    for row, kind in zip(grid, kinds, strict=True):
        for axes, model in zip(row, models, strict=True):
            rows = table[(table["model"] == model) & (table["layer_kind"] == kind)]
            image = _draw_map_panel(axes, rows, at.window_of(model)) or image
            title = style.plain(study.labels[model])
            axes.set_title(title if kind == EVERY_KIND else f"{title}\n{style.plain(kind)}", fontsize=9, loc="left")
        row[0].set_ylabel("distance to the query (tokens)")
    for axes in grid[-1]:
        axes.set_xlabel("distance between the keys (tokens)")
    if image is not None:
        bar = figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, pad=0.02, aspect=24)
        bar.set_label("plasticity (AP), mean over heads")
        bar.outline.set_visible(False)
    thin = Patch(facecolor="#f3f4f6", edgecolor=style.LINE, hatch="/////", linewidth=0, label="hardly any pairs")
    style.header_legend(figure, [thin], 1)
    return style.finish(figure)


def _draw_map_panel(axes: Axes, rows: pd.DataFrame, window: float) -> QuadMesh | None:
    cells = mean_map(rows)
    _token_axis(axes)
    if cells["ap"].isna().all():
        axes.text(0.5, 0.5, "no layer of this kind", transform=axes.transAxes, ha="center", color=style.GREY)
        axes.set_axis_off()
        return None
    x, y = (np.unique(cells[name]) for name in ("key_distance", "query_distance"))
    step = float(x[1] - x[0]) if len(x) > 1 else window
    values, weights = np.full((2, len(y), len(x)), np.nan)
    places = np.searchsorted(y, cells["query_distance"]), np.searchsorted(x, cells["key_distance"])
    values[places], weights[places] = cells["ap"], cells["weight"]
    edges = [np.append(x - step / 2, x[-1] + step / 2), np.append(y, y[-1] + step)]  # across, a cell is about its value
    colours = matplotlib.colormaps[COLOURS].with_extremes(bad=(1.0, 1.0, 1.0, 0.0))
    image = axes.pcolormesh(*edges, np.ma.masked_invalid(values), cmap=colours, vmin=0.0, vmax=1.0, gid="map")
    for row, column in np.argwhere(np.isfinite(values) & (weights < THIN)):
        corner = edges[0][column], edges[1][row]
        axes.add_patch(
            Rectangle(
                corner, step, step, facecolor="#f3f4f6", edgecolor=style.LINE, hatch="/////", linewidth=0, gid="thin"
            )
        )
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return image
