"""A few heads of a study, one panel each: projections on PC0, the drift plane, kernels, and maps of mean scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, Patch

from qkscope.draw import style
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.errors import InputError
from qkscope.lenses.base import error_name
from qkscope.lenses.draws import FREEDOM
from qkscope.lenses.profile import HeadProfile, profile, profiles_of, without_sink
from qkscope.lenses.rope.kernel import HeadKernel
from qkscope.lenses.rope.kernel import chosen_heads as chosen_kernels
from qkscope.lenses.rotation.planes import FILE, chosen_heads, planes
from qkscope.lenses.score.table import ADVANTAGE, ScoreMap, maps_of
from qkscope.lenses.sums import layer_sums
from qkscope.lenses.views import Results, WindowView
from qkscope.moments.moments import Moments
from qkscope.report.charts import layout
from qkscope.stats.significance import is_significant
from qkscope.words.phrases import number

PROFILES = (("q", style.BLUE, "o", "queries"), ("k", style.RED, "s", "keys"))
PROFILE_COLUMNS = 3
SHADES = {"q": "Blues", "k": "Reds"}
PALEST = 0.35  # of a color map: early positions must be seen on white
FINE = 800  # points of a kernel
SHARP, SMOOTH = 0.01, 0.25  # over which share of the distance a kernel is averaged
CURVE, PLANES = style.PURPLE, "#4c1d95"
KERNEL_INCHES = 3.2  # per head
MAP_COLORS = "PuOr_r"  # one hue for above the mean and one for below, distinguishable by any reader
MOST_MAPS = 2
SINK_WIDTH = 0.05  # of the axis: position 0 is one token wide, and would not be seen


# --- projections on PC0 -----------------------------------------------------------------------------


def draw_profile(tables: Results) -> Figure:
    """A panel per chosen head: mean projection on PC0 by position; bands are ± 1 standard deviation over tokens."""
    at = tables.own
    heads = profiles_of(at)
    names = {head.model: style.plain(at.study.labels[head.model]) for head in heads}
    of = f" ({names[heads[0].model]})" if len(names) == 1 else ""
    columns = min(PROFILE_COLUMNS, len(heads))
    rows = -(-len(heads) // columns)
    size = max(7.0, 1.0 + 2.6 * columns), 1.3 + 2.5 * rows
    figure = layout.canvas(tables, *size, f"Projection on PC0 by Position{of}", span=False, models=list(names))
    grid = figure.subplots(rows, columns, squeeze=False)
    known = False
    for axes, head in zip(grid.flat, heads, strict=False):
        known |= _draw_profile(axes, head)
        whose = "" if len(names) == 1 else f"{names[head.model]}\n"
        axes.set_title(f"{whose}{head.name}, {head.why}", fontsize=9, loc="left", pad=14)
        r_q, r_k = (number(float(head.numbers[name])) for name in ("r_q", "r_k"))
        bends = [float(head.numbers[name]) for name in ("bend_q", "bend_k")]
        bent = ", ".join("–" if np.isnan(value) else f"{100 * value:.0f}%" for value in bends)
        numbers = f"$r_q$ {r_q}, $r_k$ {r_k}; bent {bent}"
        axes.text(0.0, 1.01, numbers, transform=axes.transAxes, fontsize=7, color=style.GREY, va="bottom")
    for axes in grid.flat[len(heads) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("position")
    for axes in grid[:, 0]:
        axes.set_ylabel("projection on PC0")
    lines = [Line2D([], [], color=color, marker=marker, label=name) for _, color, marker, name in PROFILES]
    band = Patch(facecolor=style.GREY, alpha=0.25, label="± 1 SD over tokens")
    style.header_legend(figure, [*lines, band, *error_keys(known)], 4)
    return style.finish(figure)


def _draw_profile(axes: Axes, head: HeadProfile) -> bool:
    """Queries and keys of one head; returns whether errors are known."""
    rows = without_sink(head.rows)
    x = ((rows["start"] + rows["end"] - 1) / 2).to_numpy(dtype=float)
    known = False
    for kind, color, marker, _ in PROFILES:
        name = f"{kind}_pc0"
        mean, sd = rows[name].to_numpy(dtype=float), rows[f"{name}_sd"].to_numpy(dtype=float)
        axes.fill_between(x, mean - sd, mean + sd, color=color, alpha=0.16, linewidth=0, gid=f"{name} band")
        axes.plot(x, mean, color=color, marker=marker, markersize=3, linewidth=1.4, gid=name, zorder=3)
        errors = rows[error_name(name)].to_numpy(dtype=float) if error_name(name) in rows.columns else x * np.nan
        draw_errors(axes, x, mean, errors, gid=name)
        known |= bool(np.isfinite(errors).any())
    length = int(head.rows["end"].max())
    axes.set_xticks([0, length // 2, length], ["0", f"{length // 2:,}", f"{length:,}"])
    axes.axhline(0.0, color=style.LINE, linewidth=0.6, zorder=0.5)
    axes.tick_params(labelsize=7.5)
    return known


# --- drift plane ------------------------------------------------------------------------------------


def draw_drift_plane(tables: Results) -> Figure:
    """A column per chosen head; rows are the first and the last checkpoint that are shown."""
    at = tables.own
    heads = chosen_heads(at)
    models = list(dict.fromkeys(heads["model"]))
    columns = int(heads.groupby("model").size().max())
    size = 2.7 * columns + 1.0, 2.75 * len(models) + 1.0
    figure = layout.canvas(tables, *size, "Queries and Keys in the Drift Plane", span=False, models=models)
    panels = figure.subplots(len(models), columns, squeeze=False)
    table = at.table(FILE)
    for row, model in enumerate(models):
        chosen = heads[heads["model"] == model].to_dict("records")
        window = at.window_of(model)
        for axes in panels[row, len(chosen) :]:
            axes.set_visible(False)
        for axes, head in zip(panels[row], chosen, strict=False):
            here = (table["model"] == model) & (table["layer"] == head["layer"]) & (table["head"] == head["head"])
            draw_head(axes, table[here], window)
            axes.set_title(f"layer {head['layer']:.0f}, head {head['head']:.0f}", fontsize=8.5, loc="left")
            axes.set_title(style.plain(at.study.labels[model], 16), fontsize=7, loc="right", color=style.GREY)
    _colour_bars(figure, panels, [at.window_of(model) for model in models])
    return style.finish(figure)


def draw_plane(
    moments: Moments | Path | str, layer: int, head: int, *, window: int | None = None, skip_positions: int = 0
) -> Figure:
    """One head of a moments file in the plane of a and b, from sums alone; `Figure.savefig` writes it.

    `window` takes the first so many positions, `skip_positions` leaves out the first; both must be bucket edges.
    """
    loaded = moments if isinstance(moments, Moments) else Moments.load(moments)
    if layer not in loaded.layers or not 0 <= head < loaded.layers[layer].q_heads:
        layers = sorted(loaded.layers)
        raise InputError(f"there is no layer {layer} with a head {head}; layers are {layers[0]} to {layers[-1]}")
    sums = layer_sums(loaded, layer, [head], window, skip=skip_positions)
    columns = {**profile(sums), **planes(sums), "position": sums.q_buckets.mean_t}  # as rows of `buckets` have them
    rows = pd.DataFrame({name: values[0] for name, values in columns.items()})
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=(5.2, 4.2), dpi=style.DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        draw_head(axes, rows, sums.window)
        axes.set_title(f"Layer {layer}, head {head}, {sums.window:,} tokens", loc="left", fontsize=10)
        _colour_bars(figure, np.array([[axes]]), [sums.window])
        figure.draw_without_rendering()
    return figure


def draw_head(axes: Axes, rows: pd.DataFrame, window: float) -> None:
    """One ellipse (one standard deviation) per bucket and kind, darker with position; a line joins the means."""
    for kind in SHADES:
        shade = shades(kind)
        known = rows[np.isfinite(rows[f"{kind}_a"]) & np.isfinite(rows[f"{kind}_b"])]
        axes.plot(known[f"{kind}_a"], known[f"{kind}_b"], color=shade(0.75), linewidth=0.8, zorder=3, gid=kind)
        for row in known.to_dict("records"):
            colour = shade(row["position"] / window)
            axes.add_patch(_ellipse(row, kind, colour))
            marker = "o" if kind == "q" else "s"
            axes.plot(row[f"{kind}_a"], row[f"{kind}_b"], marker, color=colour, markersize=2.6, zorder=4)
    axes.autoscale_view()
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel("along a (drift)", fontsize=7.5)
    axes.set_ylabel("along b (separation)", fontsize=7.5)
    axes.tick_params(labelsize=7.0)


def _ellipse(row: dict[str, float], kind: str, colour: tuple[float, float, float, float]) -> Ellipse:
    spread = np.array([[row[f"{kind}_var_a"], row[f"{kind}_cov_ab"]], [row[f"{kind}_cov_ab"], row[f"{kind}_var_b"]]])
    values, vectors = np.linalg.eigh(np.nan_to_num(spread))
    width, height = 2.0 * np.sqrt(np.maximum(values[::-1], 0.0))
    angle = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
    return Ellipse(
        (row[f"{kind}_a"], row[f"{kind}_b"]), width, height, angle=float(angle), facecolor=(*colour[:3], 0.05),
        edgecolor=colour, linewidth=0.7, zorder=2, gid=f"{kind} ellipse",
    )  # fmt: skip


def shades(kind: str) -> Colormap:
    """Darker with position: blue for queries, red for keys."""
    return ListedColormap(matplotlib.colormaps[SHADES[kind]](np.linspace(PALEST, 1.0, 256)))


def _colour_bars(figure: Figure, panels: np.ndarray, windows: Sequence[float]) -> None:
    """Position in the window, for queries and for keys."""
    most = max(windows)
    same = min(windows) == most
    for kind, name in (("k", "keys"), ("q", "queries")):
        scale = ScalarMappable(Normalize(0.0, most if same else 1.0), shades(kind))
        bar = figure.colorbar(scale, ax=list(panels.flat), fraction=0.018, pad=0.012, aspect=26)
        bar.set_label(f"{name}: position" + ("" if same else " / window"), fontsize=7)
        bar.ax.tick_params(labelsize=7.0)
        bar.outline.set_visible(False)


# --- kernels ----------------------------------------------------------------------------------------


def draw_kernel(tables: Results) -> Figure:
    """A few heads' kernels above the planes that carry them."""
    at = tables.own
    heads = chosen_kernels(at)
    width, models = 1.4 + KERNEL_INCHES * len(heads), list(dict.fromkeys(each.model for each in heads))
    figure = layout.canvas(tables, width, 5.2, "Which Distances Do Heads Prefer?", span=False, models=models)
    panels = figure.subplots(2, len(heads), height_ratios=[2.6, 1.0], sharex="col", squeeze=False)
    for column, each in zip(panels.T, heads, strict=True):
        _draw_kernel(column[0], each, at)
        axes, end = column[1], float(each.rows["distance"].max())
        axes.vlines(
            each.planes["wavelength"], 0.0, each.planes["kernel_share"], color=PLANES, linewidth=2.2, gid="planes"
        )
        axes.axhline(0.0, color=style.GREY, linewidth=0.8)
        axes.axvspan(each.window, end, color=style.FAINT, alpha=0.35, linewidth=0, zorder=0)
        axes.set_xlabel("distance; wavelength (tokens)")
    panels[0, 0].set_ylabel("mean score, as softmax sees it")
    panels[1, 0].set_ylabel("share of kernel")
    ink: dict[str, Any] = {"color": style.INK, "linestyle": "none"}
    keys = [
        Line2D([], [], color=CURVE, linewidth=2.0, label="kernel (thin: fast planes too)"),
        Line2D([], [], marker="o", markersize=3.0, label="measured, pairs of buckets", **ink),
        Line2D([], [], marker="o", markersize=4.5, markerfacecolor="white", label="kernel, the same pairs", **ink),
        Line2D([], [], color=PLANES, linewidth=2.2, label="plane, at its wavelength"),
        Line2D([], [], color=style.GREY, linewidth=2.2, label="1 SD of the head's scores"),
    ]
    style.header_legend(figure, keys, 3)
    return style.finish(figure)


def _draw_kernel(axes: Axes, each: HeadKernel, at: WindowView) -> None:
    end = float(each.rows["distance"].max())
    distance = np.geomspace(1.0, end, FINE)
    axes.plot(distance, each.curve(distance, SHARP), color=CURVE, linewidth=0.6, alpha=0.35, zorder=2, gid="sharp")
    axes.plot(distance, each.curve(distance, SMOOTH), color=CURVE, linewidth=2.0, zorder=3, gid="kernel")
    checked = each.rows[each.rows["measured"].notna()]
    fills: dict[str, dict[str, Any]] = {"averaged": {"facecolors": "white"}, "measured": {"color": style.INK}}
    for name, fill in fills.items():
        axes.scatter(checked["distance"], each.scale * checked[name], s=17 if name == "averaged" else 7, linewidths=0.9,
                     edgecolors=style.INK, zorder=4, gid=name, **fill)  # fmt: skip
    axes.axvspan(each.window, end, color=style.FAINT, alpha=0.35, linewidth=0, zorder=0)
    axes.text(each.window, 0.985, " not run", transform=axes.get_xaxis_transform(), fontsize=7, color=style.GREY,
              va="top")  # fmt: skip
    low, high = axes.get_ylim()
    if np.isfinite(each.spread) and each.spread > 0:
        middle, room = (low + high) / 2, 1.25 * max(high - low, each.spread)
        axes.set_ylim(middle - room / 2, middle + room / 2)
        axes.plot([1.35, 1.35], [middle - each.spread / 2, middle + each.spread / 2], color=style.GREY, linewidth=2.2,
                  solid_capstyle="butt", gid="spread")  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(1.0, end)
    label = "" if at.study.one_run or len(at.names) == 1 else f"{style.plain(at.study.labels[each.model])}: "
    axes.set_title(f"{label}layer {each.layer}, head {each.head}", fontsize=9.5, loc="left")
    axes.tick_params(labelbottom=False)


# --- maps of scores ---------------------------------------------------------------------------------


def draw_score_map(tables: Results) -> Figure:
    """One panel per chosen head: keys across, queries up, colors from each row's mean in standard deviations."""
    at = tables.own
    maps = maps_of(at)[:MOST_MAPS]
    models = list(dict.fromkeys(each.model for each in maps))
    whose = style.plain(at.study.labels[models[0]]) if len(models) == 1 else f"{len(models)} {at.study.noun.title()}s"
    headline = f"Mean Scores by Position ({whose})"
    grid = [[each for each in maps if each.model == model] for model in models]
    wide, high = max(map(len, grid)), len(grid)
    figure = layout.canvas(tables, 1.6 + 3.2 * wide, 1.0 + 3.4 * high, headline, span=False, models=models)
    cells = figure.subplots(high, wide, sharey=high == 1, squeeze=False)
    largest = max((float(np.nanmax(np.abs(each.scores))) for each in maps), default=1.0)
    scale = Normalize(-largest, largest)
    for row, heads in zip(cells, grid, strict=True):
        for axes, each in zip(row, heads, strict=False):
            _draw_map(axes, each, scale, "" if high == 1 else f"{style.plain(at.study.labels[each.model])}, ")
        for axes in row[len(heads) :]:
            axes.set_visible(False)
        row[0].set_ylabel("query position")
    bar = figure.colorbar(cells[0, 0].collections[0], ax=list(cells.flat), shrink=0.85, pad=0.01, aspect=22)
    bar.set_label("mean score, from its row's mean\n(standard deviations of scores)")
    return style.finish(figure)


def _draw_map(axes: Axes, of: ScoreMap, scale: Normalize, whose: str) -> None:
    length = of.edges[-1]
    sink = SINK_WIDTH * length
    options: dict[str, Any] = {"cmap": MAP_COLORS, "norm": scale, "linewidth": 0, "rasterized": True}
    axes.pcolormesh(of.cells, of.edges, of.scores, gid="scores", **options)
    if np.isfinite(of.first).any():
        axes.pcolormesh([-1.6 * sink, -0.6 * sink], of.edges, of.first[:, None], gid="first", **options)
        axes.text(-1.1 * sink, length * 1.01, "0", ha="center", va="bottom", fontsize=7, color=style.GREY)
    axes.set_xlim(-1.8 * sink, length)
    axes.set_ylim(0, length)
    ticks = [0, length // 2, length]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("key position")
    share = float(of.numbers[of.column])
    axes.set_title(f"{whose}L{of.layer} H{of.head}: {100 * share:.0f}% {of.part}", fontsize=9.5, loc="left", pad=14)
    # which keys win for late queries, and by how much, if that is significant
    advantage, error = (float(of.numbers.get(name, np.nan)) for name in (ADVANTAGE, error_name(ADVANTAGE)))
    lean = "neither late nor early keys win"
    if is_significant(advantage, error, float(of.numbers[FREEDOM])) != 0:
        lean = f"{'late' if advantage > 0 else 'early'} keys win by {number(abs(advantage))} SD"
    axes.text(1.0, 1.01, lean, transform=axes.transAxes, ha="right", va="bottom", fontsize=7, color=style.GREY)
