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
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.layer_kinds.marks import kind_marks
from qkscope.lenses.norms.summary import NAME, kind_means

BESIDE = 0.1  # where no line tells measures apart, their bars stand beside each other
SPAN = 20.0  # of the largest to the smallest value, beyond which an axis is logarithmic


def draw_norms(at: AtWindow) -> Figure:
    """Lengths, spread of scores, effective rank, and the largest score: four panels."""
    table, study = at.table(NAME), at.study
    figure = canvas(at, 10.4, 6.6, f"Norms and Scores {style.span_title(study)}")
    panels = figure.subplots(2, 2, sharex=True)
    _lengths(panels[0, 0], table, study.one_run)
    _scores(panels[0, 1], at, table)
    _ranks(panels[1, 0], table, study.one_run)
    _largest(panels[1, 1], table, study.one_run)
    for axes in panels.flat:
        style.checkpoint_axis(axes, study, labels=axes in panels[1], phase_names=False)
    keys = spread_keys(style.GREY, has_errors(table, ("rms_q", "rms_k", "score_std")))
    top = Line2D([], [], color=style.GREY, linestyle=(0, (2, 2)), marker="^", markersize=4, label="largest head")
    style.header_legend(figure, [*keys, top], 1 + len(keys))
    return style.finish(figure)


def _lengths(axes: Axes, table: pd.DataFrame, joined: bool) -> None:
    for kind, colour, marker, name, side in (("q", style.BLUE, "o", "queries", -1), ("k", style.RED, "s", "keys", 1)):
        places = np.arange(len(table)) + (0.0 if joined else BESIDE * side)
        draw_band_line(
            axes, table, f"rms_{kind}", colour=colour, marker=marker, label=name, x=list(places), joined=joined
        )
        _top(axes, table, f"rms_{kind}", colour, places, joined)
    _limits(axes)
    axes.set_title("Root mean square length", fontsize=9.5, loc="left")
    _legend(axes, 2)


def _scores(axes: Axes, at: AtWindow, table: pd.DataFrame) -> None:
    """The spread that softmax sees; of raw scores where some entry's scale is not known."""
    known = bool(table["logit_std"].notna().all())
    measure = "logit_std" if known else "score_std"
    joined, places = at.study.one_run, np.arange(len(table))
    draw_band_line(axes, table, measure, colour=style.PURPLE, marker="o", label="all heads", joined=joined)
    _top(axes, table, measure, style.PURPLE, places, joined)
    by_kind = kind_means(at, measure)
    for kind, mark in kind_marks(kinds_in_order(by_kind)).items():
        axes.plot(
            places, by_kind[kind], color=mark.colour, marker=mark.marker, linestyle="none", markersize=4,
            label=style.plain(kind), gid=kind, zorder=5,
        )  # fmt: skip
    _limits(axes)
    axes.set_title("Spread of scores " + ("in softmax" if known else "(raw)"), fontsize=9.5, loc="left")
    if by_kind:
        _legend(axes, 3)


def _ranks(axes: Axes, table: pd.DataFrame, joined: bool) -> None:
    for side, (measure, colour, marker, name) in enumerate(
        (
            ("effective_rank", style.AMBER, "D", "exp of entropy"),
            ("participation_ratio", style.INK, "v", "participation"),
        )
    ):
        places = [i + (0.0 if joined else BESIDE * (2 * side - 1)) for i in range(len(table))]
        draw_band_line(axes, table, measure, colour=colour, marker=marker, label=name, x=places, joined=joined)
    axes.set_ylim(bottom=0.0)
    axes.set_title("Dimensions in use (effective rank)", fontsize=9.5, loc="left")
    _legend(axes, 2)


def _largest(axes: Axes, table: pd.DataFrame, joined: bool) -> None:
    """On a logarithmic axis, of the head with the largest value: the level, and what a sample of pairs has."""
    places, line = np.arange(len(table)), "-" if joined else "none"
    size = style.marker_size(len(table))
    axes.plot(
        places, table["score_level_max"], color=style.GREY, marker="_", markersize=10, linestyle=line, linewidth=1.2,
        label="level (Chebyshev)", gid="score_level_max",
    )  # fmt: skip
    draw_errors(axes, places, table["score_level_max"], table["score_level_max_se"], gid="score_level_max")
    if table["score_max_sampled_max"].notna().any():
        axes.plot(
            places, table["score_max_sampled_max"], color=style.PURPLE, marker="D", linestyle=line, markersize=size,
            label="sampled pairs", gid="score_max_sampled_max",
        )  # fmt: skip
    _logarithmic(axes)
    axes.set_title("Largest |score|, raw", fontsize=9.5, loc="left")
    _legend(axes, 2)


def _top(axes: Axes, table: pd.DataFrame, measure: str, colour: str, places: np.ndarray, joined: bool) -> None:
    axes.plot(
        places, table[f"{measure}_max"], color=colour, marker="^", markersize=0.7 * style.marker_size(len(table)),
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
