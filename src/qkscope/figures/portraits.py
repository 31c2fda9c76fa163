"""Figure 6: each head as a point (r_q, r_k) at up to six checkpoints, with the thresholds of the taxonomy."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.analysis.results import Study
from qkscope.analysis.schema import NOPE, ROTARY
from qkscope.analysis.summary_tables import Reading
from qkscope.analysis.taxonomy import HIGH, LOW, POSITION_DOMINATED
from qkscope.figures import style

X_LIMITS, Y_LIMITS = (-0.05, 1.05), (-1.05, 1.05)
GRIDS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 3), 6: (2, 3)}


def draw_rq_rk_scatter_grid(study: Study, reading: Reading, matched: bool = False) -> Figure:
    """Figure 6: one panel per selected checkpoint; NoPE heads are triangles where a model has both kinds."""
    models = list(dict.fromkeys(reading.portraits["model"]))
    rows, columns = GRIDS[len(models)]
    windows = reading.trajectory.set_index("model")["window"].reindex(models)
    note = style.window_note(list(windows), matched)
    figure = style.new_figure(
        3.3 * columns + 0.6, 3.1 * rows + 0.9, study, "$r_q$ vs $r_k$ (PC0) at Selected Checkpoints", note
    )
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    fractions = reading.taxonomy_fractions.set_index("model")[POSITION_DOMINATED]
    discordant = reading.concordance.set_index("model")["discordant"]
    for axes, model in zip(grid.flat, models, strict=False):
        heads = reading.portraits[reading.portraits["model"] == model]
        _draw_panel(axes, heads)
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
    handles = grid.flat[0].get_legend_handles_labels()[0]
    if handles:
        style.header_legend(figure, handles, len(handles))
    return style.finish(figure)


def _draw_panel(axes: Axes, heads: pd.DataFrame) -> None:
    both = {ROTARY, NOPE} <= set(heads["rotary"])
    nope = heads["rotary"] == NOPE if both else pd.Series(False, index=heads.index)
    kinds = ((heads[~nope], style.BLUE, "o", "rotary layer"), (heads[nope], style.AMBER, "^", "NoPE layer"))
    for group, colour, marker, label in kinds:
        if group.empty:
            continue
        axes.scatter(
            group["r_q"],
            group["r_k"],
            s=13 if marker == "o" else 17,
            marker=marker,
            facecolor=colour,
            edgecolor="white",
            linewidth=0.3,
            alpha=0.65,
            label=label if both else None,
            zorder=3,
            gid="heads",
            clip_on=False,  # r_q may lie on the left limit
        )
    for threshold in (LOW, HIGH):
        axes.axvline(threshold, color=style.LINE, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
        for level in (threshold, -threshold):
            axes.axhline(level, color=style.LINE, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
    axes.axhline(0.0, color=style.GREY, linewidth=0.9, gid="zero")
    axes.set_xlim(*X_LIMITS)
    axes.set_ylim(*Y_LIMITS)
