"""Norms, scores and effective rank over the entries: means over heads, and the head with the largest value."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from qkscope.draw import style
from qkscope.draw.curves import draw_band_line, draw_errors, spread_keys
from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.canvas import canvas
from qkscope.lenses.errors import has_errors
from qkscope.lenses.kind_of_layer import over_all_heads, rows_of_kind, summary_kinds
from qkscope.lenses.layer_kinds.marks import draw_kinds, kind_legend
from qkscope.lenses.norms.summary import NAME

BESIDE = 0.1  # where no line tells measures apart, their bars stand beside each other
SPAN = 20.0  # of the largest to the smallest value, beyond which an axis is logarithmic
Kinds = dict[str, pd.DataFrame]  # rows of each kind of layer, where an entry has several


def draw_norms(at: AtWindow) -> Figure:
    """Lengths, spread of scores, effective rank, and the largest score: four panels, kinds of layers hollow."""
    study, summary = at.study, at.table(NAME)
    table, kinds = over_all_heads(summary), {k: rows_of_kind(summary, k, at.names) for k in summary_kinds(summary)}
    figure = canvas(at, 10.4, 6.6, f"Norms and Scores {style.span_title(study)}")
    panels = figure.subplots(2, 2, sharex=True)
    for axes, draw in zip(panels.flat, (_lengths, _scores, _ranks, _largest), strict=True):
        draw(axes, table, kinds, study.one_run)
    for axes in panels.flat:
        style.checkpoint_axis(axes, study, labels=axes in panels[1], phase_names=False)
    keys = spread_keys(style.GREY, has_errors(table, ("rms_q", "rms_k", "score_std")))
    top = Line2D(
        [], [], color=style.GREY, linestyle=(0, (2, 2)) if study.one_run else "none", marker=_top_marker(kinds),
        markersize=4, label="largest head",
    )  # fmt: skip
    style.header_legend(figure, [*keys, top], 1 + len(keys))
    return style.finish(figure)


def _top_marker(kinds: Kinds) -> str:
    """A triangle, which would be taken for a kind of layer where there are several."""
    return "x" if kinds else "^"


def _lengths(axes: Axes, table: pd.DataFrame, kinds: Kinds, joined: bool) -> None:
    for kind, colour, marker, name, side in (("q", style.BLUE, "o", "queries", -1), ("k", style.RED, "s", "keys", 1)):
        places = np.arange(len(table)) + (0.0 if joined else BESIDE * side)
        draw_band_line(
            axes, table, f"rms_{kind}", colour=colour, marker=marker, label=name, x=list(places), joined=joined
        )
        _top(axes, table, f"rms_{kind}", colour, places, joined, _top_marker(kinds))
        draw_kinds(axes, kinds, f"rms_{kind}", colour, places, joined=joined)
    _limits(axes)
    axes.set_title("Root mean square length", fontsize=9.5, loc="left")
    _legend(axes, 2)


def _scores(axes: Axes, table: pd.DataFrame, kinds: Kinds, joined: bool) -> None:
    """The spread that softmax sees; of raw scores where some entry's scale is not known."""
    known = bool(table["logit_std"].notna().all())
    measure = "logit_std" if known else "score_std"
    places = np.arange(len(table))
    draw_band_line(axes, table, measure, colour=style.PURPLE, marker="o", label="all heads", joined=joined)
    _top(axes, table, measure, style.PURPLE, places, joined, _top_marker(kinds))
    draw_kinds(axes, kinds, measure, style.PURPLE, places, joined=joined)
    _limits(axes)
    axes.set_title("Spread of scores " + ("in softmax" if known else "(raw)"), fontsize=9.5, loc="left")
    kind_legend(axes, list(kinds))


def _ranks(axes: Axes, table: pd.DataFrame, kinds: Kinds, joined: bool) -> None:
    for side, (measure, colour, marker, name) in enumerate(
        (
            ("effective_rank", style.AMBER, "D", "exp of entropy"),
            ("participation_ratio", style.INK, "v", "participation"),
        )
    ):
        places = [i + (0.0 if joined else BESIDE * (2 * side - 1)) for i in range(len(table))]
        draw_band_line(axes, table, measure, colour=colour, marker=marker, label=name, x=places, joined=joined)
        draw_kinds(axes, kinds, measure, colour, places, joined=joined)
    axes.set_ylim(bottom=0.0)
    axes.set_title("Dimensions in use (effective rank)", fontsize=9.5, loc="left")
    _legend(axes, 2)


def _largest(axes: Axes, table: pd.DataFrame, kinds: Kinds, joined: bool) -> None:
    """On a logarithmic axis, of the head with the largest value: the level, and what a sample of pairs has."""
    places, line = np.arange(len(table)), "-" if joined else "none"
    size = style.marker_size(len(table))
    axes.plot(
        places, table["score_level_max"], color=style.GREY, marker="_", markersize=10, linestyle=line, linewidth=1.2,
        label="level (Chebyshev)", gid="score_level_max",
    )  # fmt: skip
    draw_errors(axes, places, table["score_level_max"], table["score_level_max_se"], gid="score_level_max")
    draw_kinds(axes, kinds, "score_level_max", style.GREY, places, joined=joined)
    if table["score_max_sampled_max"].notna().any():
        axes.plot(
            places, table["score_max_sampled_max"], color=style.PURPLE, marker="D", linestyle=line, markersize=size,
            label="sampled pairs", gid="score_max_sampled_max",
        )  # fmt: skip
        draw_kinds(axes, kinds, "score_max_sampled_max", style.PURPLE, places, joined=joined)
    _logarithmic(axes)
    axes.set_title("Largest |score|, raw", fontsize=9.5, loc="left")
    _legend(axes, 2)


def _top(
    axes: Axes, table: pd.DataFrame, measure: str, colour: str, places: np.ndarray, joined: bool, marker: str
) -> None:
    axes.plot(
        places, table[f"{measure}_max"], color=colour, marker=marker, markersize=0.7 * style.marker_size(len(table)),
        linestyle=(0, (2, 2)) if joined else "none", linewidth=1.0, gid=f"{measure}_max",
    )  # fmt: skip
    draw_errors(axes, places, table[f"{measure}_max"], table[f"{measure}_max_se"], gid=f"{measure}_max")


def _limits(axes: Axes) -> None:
    """From 0 on, or logarithmic where values span too much."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    known = values[np.isfinite(values) & (values > 0)]
    if len(known) and known.max() > SPAN * known.min():
        _logarithmic(axes)
    else:
        axes.set_ylim(bottom=0.0)


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _legend(axes: Axes, columns: int) -> None:
    handles = [handle for handle in axes.get_legend_handles_labels()[0] if not str(handle.get_label()).startswith("_")]
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=columns, borderaxespad=0.0,
        handlelength=1.4, columnspacing=1.0, fontsize=7.5,
    )  # fmt: skip
