"""Figure 7: what mean r_k hides. Keys that run with and against their queries cancel in the mean."""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from qkscope.draw import style
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.lenses.canvas import canvas
from qkscope.lenses.errors import has_errors
from qkscope.lenses.views import WindowView


def draw_concordance(at: WindowView) -> Figure:
    """Figure 7: shares of concordant keys upwards and discordant keys downwards; mean |r_k| over mean r_k."""
    study = at.study
    table = at.table("concordance")
    headline = f"Concordant and Discordant Keys {style.span_title(study)}"
    figure = canvas(at, 9.0, 5.4, headline)
    shares, means = figure.subplots(2, 1, height_ratios=(1.15, 1), sharex=True)
    _draw_shares(shares, table)
    style.checkpoint_axis(shares, study, labels=False)
    style.header_legend(figure, shares.get_legend_handles_labels()[0], 2)
    _draw_means(means, table, study.one_run)
    style.checkpoint_axis(means, study, phase_names=False)
    keys = error_keys(has_errors(table, ("concordant", "discordant", "r_k", "r_k_abs")))
    handles = [*means.get_legend_handles_labels()[0], *keys]
    means.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), borderaxespad=0.0)
    return style.finish(figure)


def _draw_shares(axes: Axes, table: pd.DataFrame) -> None:
    x = range(len(table))
    up, down = 100.0 * table["concordant"], -100.0 * table["discordant"]
    axes.bar(x, up, 0.7, color=style.BLUE, label="$r_k$ > 0.3: keys drift with queries", gid="concordant")
    axes.bar(
        x,
        down,
        0.7,
        color=style.AMBER,
        hatch="////",
        edgecolor="white",
        linewidth=0.0,
        label="$r_k$ < −0.3: keys drift against queries",
        gid="discordant",
    )
    for measure, values in (("concordant", up), ("discordant", down)):
        draw_errors(axes, x, values, 100.0 * table[f"{measure}_se"], gid=measure)
    axes.axhline(0.0, color=style.INK, linewidth=0.8)
    lowest = float(down.min()) if len(down) else 0.0
    axes.set_ylim(min(-25.0, 1.6 * lowest), 100.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{abs(value):.0f}"))
    axes.set_ylabel("% of heads")
    if len(table) <= 16:
        for place, row in enumerate(table.to_dict("records")):
            _percent(axes, place, 100.0 * row["concordant"], 100.0 * row["concordant_se"], "bottom")
            _percent(axes, place, -100.0 * row["discordant"], 100.0 * row["discordant_se"], "top")


def _percent(axes: Axes, x: int, y: float, error: float, side: str) -> None:
    """The share in digits, beyond its bar and the error bar on it."""
    above = side == "bottom"
    beyond = (error if above else -error) if math.isfinite(error) else 0.0
    axes.annotate(
        f"{abs(y):.0f}%",
        (x, y + beyond),
        xytext=(0, 2 if above else -2),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "top",
        fontsize=7.5,
        color=style.INK,
        gid="share",
    )


def _draw_means(axes: Axes, table: pd.DataFrame, joined: bool) -> None:
    x = range(len(table))
    if joined:
        axes.fill_between(
            x, table["r_k"], table["r_k_abs"], color=style.AMBER, alpha=0.15, linewidth=0,
            label="cancelled by the sign", gid="gap",
        )  # fmt: skip
    else:
        axes.vlines(
            x, table["r_k"], table["r_k_abs"], color=style.AMBER, alpha=0.3, linewidth=7,
            label="cancelled by the sign", gid="gap",
        )  # fmt: skip
    size = style.marker_size(len(table))
    axes.plot(
        x, table["r_k_abs"], color=style.INK, marker="D", linestyle="--" if joined else "none", linewidth=1.6,
        markersize=size, markerfacecolor="white", label="mean $|r_k|$", gid="r_k_abs",
    )  # fmt: skip
    axes.plot(
        x, table["r_k"], color=style.RED, marker="s", linestyle="-" if joined else "none", linewidth=1.8,
        markersize=size, label="mean $r_k$", gid="r_k",
    )  # fmt: skip
    for measure in ("r_k_abs", "r_k"):
        draw_errors(axes, x, table[measure], table[f"{measure}_se"], gid=measure)
    axes.axhline(0.0, color=style.GREY, linewidth=0.8)
    lowest = float(table["r_k"].min()) if len(table) else 0.0
    axes.set_ylim(-1.0 if lowest < -0.5 else -0.5 if lowest < -0.02 else -0.02, 1.0)
    axes.set_ylabel("mean over heads")
