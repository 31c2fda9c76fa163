"""What edits cost: single heads against measures of strength, groups against random ones, and over training."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qkscope.draw import style
from qkscope.lenses.ablation.strength import NAME, STRENGTHS, rank_correlation
from qkscope.lenses.ablation.summary import BEGINS
from qkscope.lenses.ablation.table import (
    COURSE_FILE,
    EDITS,
    GROUPS_FILE,
    grouped_entries,
    last_measured,
    shown_edit,
)
from qkscope.lenses.canvas import canvas
from qkscope.lenses.kind_marks import KindMark, kind_marks
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.views import WindowView

RISE = "rise of the loss (nats per token)"
MARKERS = "osD^vP*X"


def draw_ablation(at: WindowView) -> Figure:
    """One panel per measure that the results have: a dot per head of the last entry, its error over documents."""
    edit, model = shown_edit(at), last_measured(at)
    ranks = at.table(NAME)
    ranks = ranks[(ranks["edit"] == edit) & (ranks["model"] == model)].set_index("strength")
    names = [name for name in STRENGTHS if name in ranks.index]
    heads = at.heads
    heads = heads[(heads["model"] == model) & heads[f"loss_{edit}"].notna()]
    label = at.study.labels[model]
    figure = canvas(at, 3.1 * len(names) + 0.6, 3.7, f"Does It Matter? Loss without {EDITS[edit]} ({label})", [model])
    panels = np.atleast_1d(figure.subplots(1, len(names), sharey=True))
    for name, axes in zip(names, panels, strict=True):
        _panel(axes, heads, name, edit)
        row = ranks.loc[name]
        axes.set_title(f"rank correlation {rank_correlation(row)}", fontsize=8)
        axes.set_xlabel(STRENGTHS[name])
    panels[0].set_ylabel(RISE)
    return style.finish(figure)


def _panel(axes: Axes, heads: pd.DataFrame, name: str, edit: str) -> None:
    loss, error = f"loss_{edit}", f"loss_{edit}_se"
    axes.axhline(0.0, color=style.GREY, linewidth=0.8)
    kinds = kinds_in_order(heads["layer_kind"])
    marks = (
        kind_marks(kinds) if len(kinds) > 1 else {kind: KindMark(style.INK, "o") for kind in set(heads["layer_kind"])}
    )
    for kind, mark in marks.items():
        rows = heads[heads["layer_kind"] == kind]
        known = rows[rows[name].notna()]
        axes.errorbar(
            known[name].abs(), known[loss], yerr=known[error], fmt=mark.marker, color=mark.colour,
            markersize=3.2, linewidth=0.6, alpha=0.75, label=style.plain(kind), gid=f"{name} {mark.marker}",
        )  # fmt: skip
    if len(marks) > 1:
        axes.legend(loc="upper left", fontsize=7, frameon=False)


def draw_groups(at: WindowView) -> Figure:
    """Chosen heads and matched random ones, edit by edit, and how far they differ: of the last checkpoint with both, or
    of every model."""
    table = at.table(GROUPS_FILE)
    table = table[table["outcome"] == "all"]
    models = grouped_entries(at)
    parts = [table[table["model"] == model] for model in models]
    heights = [0.7 + 0.34 * part["edit"].nunique() * part["group"].nunique() for part in parts]
    of = f"({at.study.labels[models[0]]})" if len(models) == 1 else style.span_title(at.study)
    figure = canvas(at, 10.6, 1.0 + sum(heights), f"Chosen Heads against Matched Random Heads {of}", models)
    grid = figure.subplots(len(models), 2, sharey="row", squeeze=False, height_ratios=heights)
    for (left, right), part, model in zip(grid, parts, models, strict=True):
        _groups(left, right, part)
        if len(models) > 1:
            left.set_title(style.plain(at.study.labels[model]), fontsize=9.5, loc="left")
    for axes, label in zip(grid[-1], (RISE, "chosen minus random: 95 % interval (nats per token)"), strict=True):
        axes.set_xlabel(label)
    return style.finish(figure)


def _groups(left: Axes, right: Axes, table: pd.DataFrame) -> None:
    """All groups of one entry."""
    edits = [edit for edit in EDITS if edit in set(table["edit"])]
    groups = list(dict.fromkeys(table["group"]))
    for place, group in enumerate(groups):
        _group(left, right, table[table["group"] == group].set_index("edit"), edits, group, (place, len(groups)))
    left.set_yticks(range(len(edits)), edits)
    left.set_ylim(len(edits) - 0.5, -0.5)
    for axes in (left, right):
        axes.axvline(0.0, color=style.GREY, linewidth=0.8)
    keys = left.get_legend_handles_labels()[0]  # beside the panels: inside, some data would lie under them
    right.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.0, fontsize=7)


def _group(left: Axes, right: Axes, rows: pd.DataFrame, edits: list[str], group: str, place: tuple[int, int]) -> None:
    number, count = place
    known = rows.reindex(edits)
    y = np.arange(len(edits)) + (number - (count - 1) / 2) * 0.8 / count
    marker = MARKERS[number % len(MARKERS)]
    name = style.plain(group)
    left.plot(known["chosen"], y, marker, color=style.INK, markersize=5, label=name, gid=f"chosen {number}")
    left.plot(
        known["controls"], y, marker, markerfacecolor="none", color=style.GREY, markersize=5,
        label=f"random heads for {name}", gid=f"controls {number}",
    )  # fmt: skip
    right.hlines(y, known["low"], known["high"], color=style.INK, linewidth=1.4, gid=f"interval {number}")
    right.plot(known["excess"], y, marker, color=style.INK, markersize=5, gid=f"excess {number}")


def draw_course(at: WindowView) -> Figure:
    """Over the entries: the mean over heads of what edits cost, and how many heads cost anything, and since when."""
    table, begins = at.table(COURSE_FILE), at.table(BEGINS)
    edits = [edit for edit in EDITS if edit in set(table["edit"])]
    figure = canvas(at, 9.6, 4.0, "When Does a Head's Position Begin to Matter?")
    left, right = figure.subplots(1, 2)
    for number, edit in enumerate(edits):
        marker = MARKERS[number % len(MARKERS)]
        line_style = {"marker": marker, "markersize": 4, "linewidth": 1.2, "color": f"C{number}"}
        x, rows = _measured(at, table, edit)
        left.errorbar(x, rows["mean"], yerr=rows["mean_se"], label=edit, gid=f"mean {edit}", **line_style)
        right.plot(x, rows["costly"], label=f"{edit}: costs here", gid=f"costly {edit}", **line_style)
        x, since = _measured(at, begins, edit)
        line_style |= {"linestyle": "--", "linewidth": 1.0, "markerfacecolor": "white"}
        right.plot(x, since["so_far"], label=f"{edit}: and at all later ones", gid=f"begun {edit}", **line_style)
    left.set_ylabel(f"mean {RISE}")
    left.axhline(0.0, color=style.GREY, linewidth=0.8)
    right.set_ylabel("heads whose edit costs significantly")
    right.set_ylim(bottom=0.0)
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (left, right):
        style.checkpoint_axis(axes, at.study)
        axes.legend(loc="best", fontsize=7, frameon=False)
    return style.finish(figure)


def _measured(at: WindowView, table: pd.DataFrame, edit: str) -> tuple[np.ndarray, pd.DataFrame]:
    """The rows of one edit and their places on the axis: lines join entries that were ablated, over those between."""
    rows = table[table["edit"] == edit].set_index("model").reindex(at.names).reset_index()
    known = rows[rows["edit"].notna()]
    return known.index.to_numpy(), known
