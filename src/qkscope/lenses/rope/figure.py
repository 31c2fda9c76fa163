"""Measured against RoPE alone: a dot per head, and the means over the entries with what exceeds the prediction."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qkscope.draw import style
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.lenses.canvas import canvas
from qkscope.lenses.kind_of_layer import EVERY_KIND, rows_of_kind, summary_kinds
from qkscope.lenses.rope.chosen import FEW, shown_entries
from qkscope.lenses.rope.summaries import beside_measured
from qkscope.lenses.views import WindowView
from qkscope.results.read import Entries
from qkscope.results.schema import CHUNKED, SLIDING
from qkscope.words.phrases import plus_minus

KINDS = (("r_q", style.BLUE, "$r_q$"), ("r_k", style.RED, "$r_k$"))
# By whether nothing rotates, and whether a layer sees a part of the window only.
MARKS = {(False, False): "o", (False, True): "D", (True, False): "^", (True, True): "v"}
BESIDE = 0.14  # where nothing joins entries, queries and keys stand beside each other


def draw_rope_alone(at: WindowView) -> Figure:
    """Measured r_q and r_k of every head against what RoPE alone predicts."""
    rows, names = beside_measured(at), shown_entries(at.study)
    names = [name for name in names if (rows["model"] == name).any()]
    width = 2.75 * len(names) + 1.0 if len(names) > 1 else 7.4
    figure = canvas(at, width, 6.1 if len(names) > 1 else 4.2, "Measured r against the Rotated-Mean Prediction", names)
    shape = (2, len(names)) if len(names) > 1 else (1, 2)
    panels = np.atleast_2d(figure.subplots(*shape, sharex=True, sharey="row"))
    low = _lowest(rows[rows["model"].isin(names)])
    for column, name in enumerate(names):
        here = rows[rows["model"] == name]
        for row, (measure, colour, symbol) in enumerate(KINDS):
            axes = panels[row, column] if len(names) > 1 else panels[0, row]
            _scatter(axes, here, measure, colour, low)
            _note(axes, at, name, measure)
            if column == 0:
                axes.set_ylabel(f"measured {symbol}")
            if row == 1 or len(names) == 1:
                axes.set_xlabel(f"{symbol if len(names) == 1 else 'r'}, rotated-mean prediction")
            if row == 0 and len(names) > 1:
                axes.set_title(style.plain(at.study.labels[name]), fontsize=9.5, loc="left")
    style.header_legend(figure, _keys(rows["prediction"] == 1, _limited(rows)), 2 if width < 8 else 3)
    return style.finish(figure)


def _lowest(rows: pd.DataFrame) -> float:
    """Where all axes begin."""
    lowest = float(np.nanmin(rows[["r_q", "r_k", "r_q_rope", "r_k_rope"]].to_numpy(dtype=np.float64)))
    return -1.05 if lowest < -0.42 else -0.45 if lowest < -0.08 else -0.1


def _scatter(axes: Axes, rows: pd.DataFrame, measure: str, colour: str, low: float) -> None:
    axes.plot([low, 1.05], [low, 1.05], color=style.GREY, linewidth=0.9, zorder=1, gid="diagonal")
    fills: dict[bool, dict[str, Any]] = {False: {"c": colour}, True: {"facecolors": "none", "edgecolors": style.AMBER}}
    partly = _limited(rows)
    for (still, limited), marker in MARKS.items():
        part = rows[((rows["prediction"] == 1) == still) & (partly == limited)]
        if limited and part.empty:
            continue
        size, name = 16 if len(rows) <= FEW else 7, f"{'still' if still else 'rotary'}{' limited' if limited else ''}"
        axes.scatter(
            part[f"{measure}_rope"], part[measure], s=size, alpha=0.9 if still else 0.6, linewidths=0.8 if still else 0,
            marker=marker, zorder=3, gid=f"{measure} {name}", **fills[still],
        )  # fmt: skip
        if len(rows) <= FEW:
            error = part[f"{measure}_excess_se"]
            axes.vlines(part[f"{measure}_rope"], part[measure] - error, part[measure] + error, color=style.GREY,
                        linewidth=0.7, zorder=2, gid=f"{measure} error")  # fmt: skip
    axes.set_xlim(low, 1.05)
    axes.set_ylim(low, 1.05)
    axes.set_aspect("equal", adjustable="box")


def _note(axes: Axes, at: WindowView, model: str, measure: str) -> None:
    """In the panel's corner: how the prediction does for the heads that rotate."""
    table = at.table("rope_alone")
    here = table[(table["model"] == model) & (table["layer_kind"] == EVERY_KIND)]
    if here.empty:
        return
    row = here.iloc[0]
    lines = [f"correlation {row[f'corr_{measure}']:.2f}"] if np.isfinite(row[f"corr_{measure}"]) else []
    error = row[f"{measure}_excess_se"]
    lines.append(f"mean excess {plus_minus(row[f'{measure}_excess'], error)}")
    axes.text(
        0.97, 0.04, "\n".join(lines), transform=axes.transAxes, ha="right", va="bottom", fontsize=7.5, color=style.INK,
        gid="note",
    )  # fmt: skip


def _limited(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which heads see a part of the window only."""
    return rows["layer_kind"].str.contains(f"{SLIDING}|{CHUNKED}")


def _keys(still: "pd.Series[bool]", limited: "pd.Series[bool]") -> list[Line2D]:
    dots: dict[str, Any] = {"marker": "o", "linestyle": "none", "markersize": 4.5}
    keys = [
        Line2D([], [], color=style.BLUE, label="queries", **dots),
        Line2D([], [], color=style.RED, label="keys", **dots),
        Line2D([], [], color=style.GREY, linewidth=0.9, label="prediction"),
    ]
    if still.any():
        dots = {"marker": "^", "linestyle": "none", "markersize": 4.5, "markerfacecolor": "none"}
        keys.insert(2, Line2D([], [], color=style.AMBER, label="NoPE heads, predicted 0", **dots))
    if limited.any():
        dots = {"marker": MARKS[False, True], "linestyle": "none", "markersize": 4.5}
        pointed = " (NoPE: pointing down)" if (still & limited).any() else ""
        keys.insert(2, Line2D([], [], color=style.GREY, label=f"sliding or chunked layers{pointed}", **dots))
    return keys


# --- over the entries -------------------------------------------------------------------------------


def draw_rope_excess(at: WindowView) -> Figure:
    """Mean r_q and r_k as measured and as RoPE alone predicts, and the difference with its error."""
    table, study = at.table("rope_alone"), at.study
    kinds = summary_kinds(table) or [EVERY_KIND]
    shown = kinds[:3]
    figure = canvas(
        at, 10.4, 3.2 + 1.25 * len(shown), f"What the Rotated-Mean Prediction Leaves {style.span_title(study)}"
    )
    panels = figure.subplots(len(shown), 2, squeeze=False)
    for number, (row, kind) in enumerate(zip(panels, shown, strict=True)):
        here = rows_of_kind(table, kind, study.names)
        _draw_means(row[0], here, study)
        _draw_excess(row[1], here, study)
        name = "all heads" if kind == EVERY_KIND else f"{style.plain(kind)} heads"
        row[0].set_ylabel(f"{name}\nmean over heads")
        for axes in row:
            style.checkpoint_axis(axes, study, labels=number == len(shown) - 1, phase_names=number == 0)
    panels[0][0].set_title("measured, and predicted", fontsize=9.5, loc="left", pad=14)
    panels[0][1].set_title("excess: measured minus predicted", fontsize=9.5, loc="left", pad=14)
    known = bool(table["r_q_excess_se"].notna().any())
    keys = [
        Line2D([], [], color=style.BLUE, marker="o", label="queries"),
        Line2D([], [], color=style.RED, marker="s", label="keys"),
        Line2D([], [], color=style.GREY, linestyle="--", label="prediction"),
        *error_keys(known),
    ]
    style.header_legend(figure, keys, 4)
    return style.finish(figure)


def _places(study: Entries, number: int) -> Sequence[float]:
    aside = 0.0 if study.one_run else BESIDE * (number - 0.5)
    return [i + aside for i in range(len(study.names))]


def _draw_means(axes: Axes, here: pd.DataFrame, study: Entries) -> None:
    size = style.marker_size(len(here))
    for number, (measure, colour, _) in enumerate(KINDS):
        x, marker, line = _places(study, number), "os"[number], "-" if study.one_run else "none"
        axes.plot(x, here[measure], color=colour, marker=marker, linestyle=line, markersize=size, zorder=3, gid=measure)
        draw_errors(axes, x, here[measure], here[f"{measure}_se"], gid=measure)
        dash = {"linestyle": "--"} if study.one_run else {"linestyle": "none", "marker": "_", "markersize": 14}
        axes.plot(x, here[f"{measure}_rope"], color=colour, alpha=0.8, zorder=2, gid=f"{measure}_rope", **dash)
        if study.one_run:
            axes.fill_between(x, here[measure], here[f"{measure}_rope"], color=colour, alpha=0.14, linewidth=0)
    values = here[["r_q", "r_k", "r_q_rope", "r_k_rope"]].to_numpy(dtype=np.float64)
    lowest = float(np.nanmin(values)) if np.isfinite(values).any() else 0.0
    axes.set_ylim(min(-0.05, lowest - 0.05), 1.02)
    axes.axhline(0.0, color=style.GREY, linewidth=0.8)


def _draw_excess(axes: Axes, here: pd.DataFrame, study: Entries) -> None:
    size = style.marker_size(len(here))
    for number, (measure, colour, _) in enumerate(KINDS):
        x, marker, line = _places(study, number), "os"[number], "-" if study.one_run else "none"
        name = f"{measure}_excess"
        axes.plot(x, here[name], color=colour, marker=marker, linestyle=line, markersize=size, zorder=3, gid=name)
        draw_errors(axes, x, here[name], here[f"{name}_se"], gid=name)
    axes.axhline(0.0, color=style.GREY, linewidth=0.8)
    reach = float(np.nanmax(np.abs(here[["r_q_excess", "r_k_excess"]].to_numpy(dtype=np.float64)), initial=0.0))
    axes.set_ylim(-max(0.06, 1.3 * reach), max(0.06, 1.3 * reach))
