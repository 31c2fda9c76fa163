"""Bars over the entries of a study: how far queries and keys drift along a, and what that adds to a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from qkscope.draw import style
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.lenses.canvas import canvas
from qkscope.lenses.kind_marks import KindMark, kind_marks
from qkscope.lenses.kind_of_layer import EVERY_KIND, rows_of_kind, summary_kinds
from qkscope.lenses.views import WindowView

WIDTH = 0.62  # of a bar, in steps between entries
PAIR = 0.19  # how far two bars of one entry stand from its middle
REST = "#e5e7eb"
THRESHOLDS = (0.3, 0.7)


def draw_drift(at: WindowView) -> Figure:
    """How closely both kinds follow position along a, how far they are apart, what share the plane has, whose slope."""
    figure = canvas(at, 10.4, 6.6, f"Drift along a, Separation along b {style.span_title(at.study)}")
    panels = figure.subplots(2, 2, sharex=True)
    table, kinds = _rows(at)
    _correlations(panels[0, 0], table, kinds)
    bars(panels[0, 1], table, kinds, "separation_strength", style.PURPLE)
    panels[0, 1].set_ylim(0.0, 1.0)
    panels[0, 1].set_title("Share of a query–key difference along b", fontsize=9.5, loc="left")
    _variance(panels[1, 0], table)
    _slopes(panels[1, 1], table, kinds)
    for axes in panels.flat:
        style.checkpoint_axis(axes, at.study, labels=axes in panels[1], phase_names=False)
    own = Line2D([], [], color=style.INK, marker="_", markersize=11, markeredgewidth=1.6, linestyle="none")
    own.set_label("on its own drift direction")
    style.header_legend(figure, [*_keys(table, kinds), own], 3)
    return style.finish(figure)


def draw_bias(at: WindowView) -> Figure:
    """What the bias is made of, per token above and over the window below."""
    figure = canvas(at, 11.4, 6.2, f"What Position Adds to a Score {style.span_title(at.study)}")
    panels = figure.subplots(2, 3, sharex=True)
    table, kinds = _rows(at)
    shown = (
        ("mu_q_a", style.BLUE, "Mean query along a"),
        ("alpha_k_per_1000", style.RED, "Slope of keys along a, per 1,000 tokens"),
        ("bias_per_1000", style.PURPLE, "Bias (product of both), per 1,000 tokens"),
        ("bias_effect", style.AMBER, "Bias over the window, in standard deviations"),
        ("alpha_k_window_abs", style.RED, "Drift of keys along a, over the window"),
        ("bias_strength_window", style.PURPLE, "Bias over the window"),
    )
    for axes, (measure, colour, title) in zip(panels.flat, shown, strict=True):
        bars(axes, table, kinds, measure, colour)
        axes.axhline(0.0, color=style.GREY, linewidth=0.8)
        axes.set_title(title, fontsize=9.5, loc="left")
        style.checkpoint_axis(axes, at.study, labels=axes in panels[1], phase_names=False)
    for axes, total in ((panels[0, 2], "bias_total_per_1000"), (panels[1, 2], "bias_window")):
        _ticks(axes, np.arange(len(table)), table[total], gid=total)
    total_key = Line2D([], [], color=style.INK, marker="_", markersize=11, markeredgewidth=1.6, linestyle="none")
    total_key.set_label("in all directions")
    style.header_legend(figure, [*_keys(table, kinds), total_key], 3)
    return style.finish(figure)


def _rows(at: WindowView) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """The rows over all heads in the order of the study, and those of each kind of layer."""
    table = at.table("rotation")
    by_kind = {kind: rows_of_kind(table, kind, at.names) for kind in summary_kinds(table)}
    return rows_of_kind(table, EVERY_KIND, at.names), by_kind


def _keys(table: pd.DataFrame, kinds: Mapping[str, pd.DataFrame]) -> list[Artist]:
    """What marks mean: quartiles, errors, kinds of layers."""
    spread = Line2D([], [], color=style.INK, alpha=0.25, linewidth=5, label="middle half of heads")
    by_kind = kind_marks(list(kinds))
    marks = [
        Line2D([], [], color=mark.colour, marker=mark.marker, linestyle="none", markersize=5, label=style.plain(kind),
               markeredgecolor="white", markeredgewidth=0.6)
        for kind, mark in by_kind.items()
    ]  # fmt: skip
    return [spread, *error_keys(bool(table["separation_strength_se"].notna().any())), *marks]


def bars(
    axes: Axes,
    table: pd.DataFrame,
    kinds: Mapping[str, pd.DataFrame],
    measure: str,
    colour: str,
    *,
    aside: float = 0.0,
    width: float = WIDTH,
    label: str | None = None,
) -> None:
    """Means as bars, the middle half of heads behind them, errors over documents, and a mark per kind of layer."""
    places = np.arange(len(table)) + aside
    axes.bar(places, table[measure], width, color=colour, alpha=0.75, label=label, gid=measure, zorder=2)
    low, high = table[f"{measure}_p25"], table[f"{measure}_p75"]
    axes.vlines(
        places, low, high, color=style.INK, alpha=0.25, linewidth=_spread_width(table), zorder=3, gid="quartiles"
    )
    draw_errors(axes, places, table[measure], table[f"{measure}_se"], gid=measure)
    for kind, mark in kind_marks(list(kinds)).items():
        _marks(axes, places, kinds[kind][measure], mark, kind)


def _spread_width(table: pd.DataFrame) -> float:
    return 5.0 if len(table) <= 20 else 2.0


def _marks(axes: Axes, places: np.ndarray, values: pd.Series, mark: KindMark, kind: str) -> None:
    size = 0.9 * style.marker_size(len(places))
    axes.plot(
        places, values, color=mark.colour, marker=mark.marker, linestyle="none", markersize=size,
        markeredgecolor="white", markeredgewidth=0.6, zorder=5, gid=kind,
    )  # fmt: skip


def _ticks(
    axes: Axes, places: np.ndarray, values: Sequence[float] | pd.Series, *, gid: str, half: float = 0.36
) -> None:
    axes.hlines(values, places - half, places + half, color=style.INK, linewidth=1.6, zorder=6, gid=gid)


def _correlations(axes: Axes, table: pd.DataFrame, kinds: Mapping[str, pd.DataFrame]) -> None:
    for kind, colour, side in (("q", style.BLUE, -1), ("k", style.RED, 1)):
        name, aside = {"q": "queries", "k": "keys"}[kind], PAIR * side
        bars(axes, table, kinds, f"r_{kind}_a_abs", colour, aside=aside, width=2 * PAIR, label=name)
        _ticks(axes, np.arange(len(table)) + aside, table[f"r_{kind}_own"], gid=f"r_{kind}_own", half=0.9 * PAIR)
    for threshold in THRESHOLDS:
        axes.axhline(threshold, color=style.LINE, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
    axes.set_ylim(0.0, 1.05)
    axes.set_title("Mean |r| with position along a", fontsize=9.5, loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.0, handlelength=1.2, fontsize=8)


def _variance(axes: Axes, table: pd.DataFrame) -> None:
    """The pool's variance, a stack to 1."""
    places, bottom = np.arange(len(table)), np.zeros(len(table))
    for measure, colour, label in (("var_frac_a", style.AMBER, "along a"), ("var_frac_b", style.PURPLE, "along b")):
        axes.bar(places, table[measure], WIDTH, bottom=bottom, color=colour, label=label, gid=measure)
        bottom = bottom + table[measure].to_numpy(dtype=float)
        draw_errors(axes, places, bottom, table[f"{measure}_se"], gid=measure)
    axes.bar(places, 1.0 - bottom, WIDTH, bottom=bottom, color=REST, label="elsewhere", gid="rest")
    low, high = (table[f"plane_var_fraction_{quartile}"] for quartile in ("p25", "p75"))
    axes.vlines(places, low, high, color=style.INK, alpha=0.25, linewidth=_spread_width(table), gid="quartiles")
    axes.set_ylim(0.0, 1.0)
    axes.set_title("Share of the variance", fontsize=9.5, loc="left")
    slices = ((style.AMBER, "a"), (style.PURPLE, "b"), (REST, "rest"))
    axes.legend(
        handles=[Patch(facecolor=colour, label=text) for colour, text in slices],
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, borderaxespad=0.0, handlelength=1.2, fontsize=8,
    )  # fmt: skip


def _slopes(axes: Axes, table: pd.DataFrame, kinds: Mapping[str, pd.DataFrame]) -> None:
    """Slope of keys over slope of queries: geometric means as bars from 1, medians as diamonds."""
    bars(axes, table, kinds, "slope_ratio_log2", style.GREY)
    axes.plot(
        np.arange(len(table)), np.log2(table["slope_ratio_median"]), color=style.INK, marker="D", linestyle="none",
        markersize=0.8 * style.marker_size(len(table)), markerfacecolor="white", zorder=6, gid="slope_ratio_median",
    )  # fmt: skip
    axes.axhline(0.0, color=style.INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{2.0**value:g}"))
    axes.set_title("Slope of keys / slope of queries along a (◇ median)", fontsize=9.5, loc="left")
