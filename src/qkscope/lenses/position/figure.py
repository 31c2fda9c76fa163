"""Figures 1 and 3: means over heads at each checkpoint, with a band of one standard deviation and error bars."""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.draw.curves import draw_band_line, draw_errors, spread_keys
from qkscope.lenses.canvas import canvas
from qkscope.lenses.errors import has_errors
from qkscope.lenses.views import WindowView
from qkscope.results.read import Entries

BESIDE = 0.08  # where no line tells two measures apart, their bars stand beside each other


def draw_position_signal(at: WindowView) -> Figure:
    """Figure 1: mean r_q and r_k; below, the share of keys that run against their queries."""
    study = at.study
    table = at.table("trajectory")
    headline = f"Position Correlation on PC0 {style.span_title(study)}"
    figure = canvas(at, 9.0, 4.7, headline)
    signal, against = figure.subplots(2, 1, height_ratios=(6, 1), sharex=True)
    for measure, colour, marker, side in (("r_q", style.BLUE, "o", -1), ("r_k", style.RED, "s", 1)):
        places = [i + (0 if study.one_run else BESIDE * side) for i in range(len(table))]
        draw_band_line(
            signal, table, measure, colour=colour, marker=marker, label=f"mean ${measure}$", x=places,
            joined=study.one_run, outlined=measure == "r_k",
        )  # fmt: skip
    signal.axhline(0.0, color=style.GREY, linewidth=0.8, zorder=2, gid="zero")
    lowest = min(float((table[m] - table[f"{m}_std"].fillna(0.0)).min()) for m in ("r_q", "r_k"))
    highest = max(float((table[m] + table[f"{m}_std"].fillna(0.0)).max()) for m in ("r_q", "r_k"))
    # A band may reach beyond what a correlation can be; cut off flat it would look as if the heads did.
    signal.set_ylim(-1.0 if lowest < -0.6 else -0.6 if lowest < -0.2 else -0.2, max(1.0, highest + 0.02))
    signal.set_ylabel("Pearson r with position")
    style.checkpoint_axis(signal, study, labels=False)
    keys = spread_keys(style.GREY, has_errors(table, ("r_q", "r_k")))
    style.header_legend(figure, [*signal.get_legend_handles_labels()[0], *keys], 2 + len(keys))
    draw_discordant_strip(against, study, at.table("concordance"))
    return style.finish(figure)


def draw_discordant_strip(axes: Axes, study: Entries, concordance: pd.DataFrame) -> None:
    """Thin bars under a mean of r_k: what share of heads has r_k < -0.3, which the mean cancels out."""
    share = [0.0 if math.isnan(v) else 100.0 * v for v in concordance["discordant"]]
    axes.bar(range(len(share)), share, width=0.5, color=style.AMBER, gid="discordant")
    draw_errors(axes, range(len(share)), share, 100.0 * concordance["discordant_se"], gid="discordant")
    axes.set_ylim(0, max(20.0, 1.15 * max(share)))
    axes.set_ylabel("$r_k$ < −0.3\n(% of heads)", fontsize=7.5)
    style.checkpoint_axis(axes, study, phase_names=False)


def draw_explained_variance(at: WindowView) -> Figure:
    """Figure 3: the share of the variance of queries and keys that PC0 carries."""
    study = at.study
    table = at.table("trajectory")
    headline = f"PC0 Explained Variance {style.span_title(study)}"
    figure = canvas(at, 9.0, 4.0, headline)
    axes = figure.subplots()
    draw_band_line(
        axes,
        table,
        "explained_variance",
        colour=style.PURPLE,
        marker="o",
        label="mean over heads",
        joined=study.one_run,
    )
    axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]), top=min(1.0, axes.get_ylim()[1]))
    axes.set_ylabel("mean explained variance ratio")
    style.checkpoint_axis(axes, study)
    keys = spread_keys(style.PURPLE, has_errors(table, ("explained_variance",)))
    style.header_legend(figure, [*axes.get_legend_handles_labels()[0], *keys], 1 + len(keys))
    return style.finish(figure)
