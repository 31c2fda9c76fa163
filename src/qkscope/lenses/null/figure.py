"""Figure 11: r as measured and with shifted positions, and how many heads exceed every shift."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qkscope.draw import style
from qkscope.draw.curves import draw_band_line, draw_errors, spread_keys
from qkscope.lenses.canvas import canvas
from qkscope.lenses.errors import has_errors
from qkscope.lenses.kind_marks import draw_kinds, kind_legend
from qkscope.lenses.kind_of_layer import over_all_heads, rows_of_kind, summary_kinds
from qkscope.lenses.null.summary import NAME
from qkscope.lenses.null.table import KINDS
from qkscope.lenses.views import WindowView

COLOURS = {"q": style.BLUE, "k": style.RED}
BESIDE = 0.08  # where no line tells both apart, their bars stand beside each other


def draw_null(at: WindowView) -> Figure:
    """Means over heads of |r| and of its null; below, the share of heads beyond it and what chance would give."""
    study, summary = at.study, at.table(NAME)
    table, kinds = over_all_heads(summary), {k: rows_of_kind(summary, k, at.names) for k in summary_kinds(summary)}
    figure = canvas(at, 9.0, 5.2, f"Measured against Shifted Positions {style.span_title(study)}")
    panels = figure.subplots(2, 2, height_ratios=(3, 1), sharex=True, sharey="row")
    for (kind, name), axes, below in zip(KINDS, panels[0], panels[1], strict=True):
        for measure, colour, marker, line, label, side in (
            (f"r_{kind}_abs", COLOURS[kind], "o", "-", f"mean $|r_{kind}|$", -1),
            (f"null_r_{kind}", style.GREY, "D", (0, (3, 2)), "shifted positions", 1),
        ):
            places = [i + (0.0 if study.one_run else BESIDE * side) for i in range(len(table))]
            draw_band_line(
                axes, table, measure, colour=colour, marker=marker, label=label, linestyle=line, x=places,
                joined=study.one_run,
            )  # fmt: skip
            draw_kinds(axes, kinds, measure, colour, places, joined=study.one_run)
        axes.set_title(name, fontsize=9.5, loc="left")
        axes.set_ylim(0.0, 1.0)
        style.checkpoint_axis(axes, study, labels=False, phase_names=False)
        _draw_beyond(below, table, kinds, kind, study.one_run)
        style.checkpoint_axis(below, study, phase_names=False)
    kind_legend(panels[0][0], list(kinds))
    panels[0][0].set_ylabel("|Pearson r| on PC0")
    panels[1][0].set_ylabel("beyond every\nshift (% of heads)", fontsize=7.5)
    measures = [f"{m}_{kind}{end}" for kind, _ in KINDS for m, end in (("r", "_abs"), ("null_r", ""))]
    keys = spread_keys(style.GREY, has_errors(table, measures))
    lines = [Line2D([], [], color=c, marker="o", label=f"mean $|r_{k}|$") for k, c in COLOURS.items()]
    lines.append(Line2D([], [], color=style.GREY, marker="D", linestyle=(0, (3, 2)), label="shifted positions"))
    for key in () if study.one_run else lines:  # no line joins what has no order
        key.set_linestyle("none")
    style.header_legend(figure, [*lines, *keys], 3)
    return style.finish(figure)


def _draw_beyond(axes: Axes, table: pd.DataFrame, kinds: dict[str, pd.DataFrame], kind: str, joined: bool) -> None:
    """Bars of heads beyond their null, and a tick at the share that heads without position would have."""
    share = 100.0 * table[f"beyond_null_{kind}"].to_numpy(dtype=float)
    places = np.arange(len(share))
    axes.bar(places, np.nan_to_num(share), width=0.5, color=COLOURS[kind], alpha=0.6, gid=f"beyond_null_{kind}")
    draw_errors(axes, places, share, 100.0 * table[f"beyond_null_{kind}_se"], gid=f"beyond_null_{kind}")
    draw_kinds(axes, kinds, f"beyond_null_{kind}", COLOURS[kind], places, joined=joined, scale=100.0)
    shifts = table["null_shifts"].to_numpy(dtype=float)
    chance = np.where(shifts > 0, 100.0 / (1.0 + shifts), np.nan)
    axes.hlines(chance, places - 0.35, places + 0.35, color=style.INK, linewidth=1.0, gid="chance")
    axes.set_ylim(0.0, 105.0)
