"""Figure 6: each head as a point (r_q, r_k) at up to six checkpoints, with the thresholds of the taxonomy."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.lenses.canvas import canvas
from qkscope.lenses.kind_marks import KindMark, kind_marks
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.taxonomy.table import HIGH, LOW, POSITION_DOMINATED
from qkscope.lenses.views import WindowView

X_LIMITS, Y_LIMITS = (-0.05, 1.05), (-1.05, 1.05)
GRIDS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3)}


def draw_rq_rk_scatter_grid(at: WindowView) -> Figure:
    """Figure 6: one panel per selected checkpoint; marks tell kinds of layers apart where there are several."""
    study = at.study
    models = list(dict.fromkeys(at.table("portraits")["model"]))
    rows, columns = GRIDS[len(models)]
    which = "at Selected Checkpoints" if study.one_run else f"of Selected {study.noun.title()}s"
    figure = canvas(at, 3.3 * columns + 0.6, 3.1 * rows + 0.9, f"$r_q$ vs $r_k$ (PC0) {which}", models)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    fractions = at.table("taxonomy_fractions").set_index("model")[POSITION_DOMINATED]
    discordant = at.table("concordance").set_index("model")["discordant"]
    marks = kind_marks(kinds_in_order(at.table("portraits")["layer_kind"]))
    for axes, model in zip(grid.flat, models, strict=False):
        heads = at.table("portraits")[at.table("portraits")["model"] == model]
        _draw_panel(axes, heads, marks)
        axes.set_title(style.plain(study.labels[model]), fontsize=9.5, loc="left")
        corner = f"{100 * fractions[model]:.0f}% position-dominated\n{100 * discordant[model]:.0f}% discordant"
        axes.set_title(corner, fontsize=7, loc="right", color=style.GREY)
    for axes in list(grid.flat)[len(models) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("$r_k$")
    for column in range(columns):
        shown = [axes for axes in grid[:, column] if axes.get_visible()]
        shown[-1].set_xlabel("$r_q$")
        shown[-1].tick_params(labelbottom=True)
    panels = [axes.get_legend_handles_labels() for axes in grid.flat]
    handles = {
        label: handle for all_handles, labels in panels for handle, label in zip(all_handles, labels, strict=True)
    }
    if len(handles) > 1:
        style.header_legend(figure, [handles[kind] for kind in marks if kind in handles], min(3, len(handles)))
    return style.finish(figure)


def _draw_panel(axes: Axes, heads: pd.DataFrame, marks: Mapping[str, KindMark]) -> None:
    for kind, group in heads.groupby("layer_kind", sort=False):
        mark = marks.get(str(kind), KindMark(style.BLUE, "o"))
        axes.scatter(
            group["r_q"],
            group["r_k"],
            s=13 if mark.marker == "o" else 17,
            marker=mark.marker,
            facecolor=mark.colour,
            edgecolor="white",
            linewidth=0.3,
            alpha=0.65,
            label=str(kind) if kind else None,
            zorder=3,
            gid="heads",
            clip_on=False,  # r_q may lie on the left limit
        )
    if heads[["r_q_se", "r_k_se"]].notna().any(axis=None):
        axes.errorbar(
            heads["r_q"], heads["r_k"], xerr=heads["r_q_se"], yerr=heads["r_k_se"], fmt="none", ecolor=style.GREY,
            elinewidth=0.5, alpha=0.35, zorder=2,
        )  # fmt: skip
    for threshold in (LOW, HIGH):
        axes.axvline(threshold, color=style.LINE, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
        for level in (threshold, -threshold):
            axes.axhline(level, color=style.LINE, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
    axes.axhline(0.0, color=style.GREY, linewidth=0.9, gid="zero")
    axes.set_xlim(*X_LIMITS)
    axes.set_ylim(*Y_LIMITS)
