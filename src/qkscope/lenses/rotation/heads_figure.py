"""Heads of selected entries: how their biases are spread, and how bias goes with separation."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.lenses.canvas import canvas
from qkscope.lenses.kind_marks import KindMark, kind_marks
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.rotation.summaries import relations
from qkscope.lenses.rotation.table import FILE, THOUSAND
from qkscope.lenses.views import WindowView

BINS = 24


def draw_heads(at: WindowView) -> Figure:
    """A column per selected entry: a histogram of bias above, bias against separation below."""
    models = list(at.study.selected)
    which = "at Selected Checkpoints" if at.study.one_run else f"of Selected {at.study.noun.title()}s"
    figure = canvas(at, max(5.2, 2.3 * len(models) + 1.0), 5.6, f"Bias of Every Head {which}", models)
    panels = figure.subplots(2, len(models), squeeze=False, height_ratios=(1, 1.4))
    heads = at.with_kind(at.table(FILE))
    marks = kind_marks(kinds_in_order(heads["layer_kind"]))
    relation = relations(at)
    for column, model in enumerate(models):
        of_model = heads[heads["model"] == model]
        _histogram(panels[0, column], of_model["bias_strength"] * THOUSAND)
        panels[0, column].set_title(style.plain(at.study.labels[model], 20), fontsize=9.5, loc="left")
        _scatter(panels[1, column], of_model, marks)
        panels[1, column].set_title(correlation_words(relation[model]), fontsize=7.5, loc="left", color=style.GREY)
    panels[0, 0].set_ylabel("heads")
    panels[1, 0].set_ylabel("bias per 1,000 tokens")
    if len(marks) > 1:
        handles = {handle.get_label(): handle for axes in panels[1] for handle in axes.collections if handle.get_gid()}
        style.header_legend(figure, list(handles.values()), 2)
    return style.finish(figure)


def _histogram(axes: Axes, bias: pd.Series) -> None:
    known = bias[np.isfinite(bias)].to_numpy(dtype=float)
    if not len(known):
        return
    axes.hist(known, bins=BINS, color=style.PURPLE, alpha=0.75, gid="bias")
    axes.axvline(0.0, color=style.INK, linewidth=0.9, linestyle=(0, (4, 3)), gid="zero")
    above = f"{100 * float((known > 0).mean()):.0f}% above 0"
    axes.set_xlabel(f"bias per 1,000 tokens\n({above})", fontsize=7.5)
    axes.locator_params(axis="x", nbins=4)


def _scatter(axes: Axes, heads: pd.DataFrame, marks: dict[str, KindMark]) -> None:
    small = 14.0 if len(heads) <= 200 else 6.0
    for kind, group in heads.groupby("layer_kind", sort=False, dropna=False):
        mark = marks.get(str(kind), KindMark(style.PURPLE, "o"))
        axes.scatter(
            group["separation_strength"], group["bias_strength"] * THOUSAND, s=small, marker=mark.marker,
            facecolor=mark.colour, edgecolor="white", linewidth=0.3, alpha=0.7, label=str(kind), gid="heads", zorder=3,
        )  # fmt: skip
    axes.axhline(0.0, color=style.GREY, linewidth=0.8)
    axes.set_xlim(0.0, 1.0)
    axes.set_xlabel("separation along b", fontsize=7.5)


def correlation_words(row: Mapping[str, float]) -> str:
    """`r = 0.48 (0.31 to 0.62)`."""
    if not math.isfinite(row["r"]):
        return "r undefined"
    estimate = f"r = {style.signed(row['r'])}"
    if not math.isfinite(row["r_low"]):
        return f"{estimate} (no interval)"
    return f"{estimate} ({style.signed(row['r_low'])} to {style.signed(row['r_high'])})"
