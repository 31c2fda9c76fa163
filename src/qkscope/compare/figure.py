"""The figure of a comparison: this run against the reference, a panel per published quantity or per checkpoint."""

import math
from collections.abc import Sequence

import matplotlib
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qkscope.compare.judge import DIFFERS, JudgedNumbers, titles_of
from qkscope.compare.numbers import measure_title
from qkscope.draw import style
from qkscope.results.entries import Entries

OUTLINE = "#c026d3"  # what differs; used for nothing else
PANELS = 12  # checkpoints at most, evenly chosen; all are in the table
_COLUMNS = 4
_MARKS = {"r_k": (style.RED, "s"), "explained_variance": (style.PURPLE, "D")}
_MARK = (style.BLUE, "o")  # of everything else


def draw_comparison(study: Entries, judged: JudgedNumbers, headline: str, note: str) -> Figure:
    """Value against reference with tolerance, standard error and a ring around what differs."""
    cells = judged.counted
    if judged.changed is None:
        titles = titles_of(cells)
        panels = [(title, cells[titles == title]) for title in titles.unique()]
    else:
        shared = cells[cells["value"].notna() & cells["reference"].notna()]
        models = chosen_panels(list(shared["model"].unique()))
        panels = [(study.labels.get(model, model), shared[shared["model"] == model]) for model in models]
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(style.RC):
        figure = style.new_figure(max(3.0 * columns, 6.5), 2.8 * rows + 1.0, study, headline, note)
        grid = figure.add_gridspec(rows, columns)
        for i, (title, part) in enumerate(panels):
            axes = figure.add_subplot(grid[i // columns, i % columns])
            _draw_panel(axes, part)
            axes.set_title(style.plain(title, 34), fontsize=8.5, loc="left")
            axes.set_ylabel("this run" if i % columns == 0 else "", fontsize=8)
            axes.set_xlabel("reference" if i + columns >= len(panels) else "", fontsize=8)
        key = _key(judged)
        style.header_legend(figure, key, len(key))
        return style.finish(figure)


def chosen_panels(models: Sequence[str], most: int = PANELS) -> list[str]:
    """At most so many of the checkpoints, first and last among them, evenly spread."""
    if len(models) <= most:
        return list(models)
    return [models[round(i * (len(models) - 1) / (most - 1))] for i in range(most)]


def _draw_panel(axes: Axes, cells: pd.DataFrame) -> None:
    known = cells[cells["value"].notna() & cells["reference"].notna()]
    for what, part in known.groupby("what", sort=False):
        colour, marker = _MARKS.get(str(what), _MARK)
        x, y, wide = part["reference"], part["value"], part["tolerance"]
        axes.errorbar(x, x, wide, fmt="none", ecolor=style.FAINT, elinewidth=2.2, zorder=1, gid="tolerance")
        if part["error"].notna().any():
            axes.errorbar(x, y, part["error"], fmt="none", ecolor=colour, elinewidth=0.6, alpha=0.5, zorder=2)
        hollow = part.get("sign_unknown", pd.Series(False, index=part.index))
        faces = ["none" if each else colour for each in hollow]
        axes.scatter(x, y, s=12, marker=marker, c=faces, edgecolors=colour, linewidth=0.5, zorder=3, gid=str(what))
        off = part["verdict"] == DIFFERS
        axes.scatter(x[off], y[off], s=60, facecolor="none", edgecolor=OUTLINE, linewidth=1.2, zorder=4, gid="differs")
    if len(known):
        low, high = float(known[["value", "reference"]].min().min()), float(known[["value", "reference"]].max().max())
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        ends = (low - room, high + room)
        axes.plot(ends, ends, color=style.LINE, linewidth=0.9, zorder=0)
        axes.set(xlim=ends, ylim=ends)
    axes.set_box_aspect(1.0)
    axes.tick_params(labelsize=7)
    facts = f"{int((known['verdict'] == DIFFERS).sum())} of {len(cells)} differ"
    missing = f"\n{len(cells) - len(known)} missing" if len(known) < len(cells) else ""
    axes.text(0.97, 0.04, facts + missing, transform=axes.transAxes, ha="right", va="bottom", fontsize=6.5,
              color=style.GREY, gid="facts")  # fmt: skip


def _key(judged: JudgedNumbers) -> list[Artist]:
    marks = []  # color, marker, label, and whether it is hollow
    if judged.changed is not None:
        marks = [(*_MARKS.get(what, _MARK), measure_title(what), False) for what in judged.cells["what"].unique()]
        if judged.cells["sign_unknown"].any():
            marks.append((style.GREY, "o", "sign not known: reference flipped", True))
    if judged.cells["error"].notna().any():
        marks.append((style.BLUE, "|", "± one standard error", False))
    marks += [(style.FAINT, "s", "tolerance", False), (OUTLINE, "o", "differs", True)]
    return [
        Line2D([], [], color=colour, marker=marker, markersize=5, linestyle="", label=label,
               markerfacecolor="none" if hollow else colour)
        for colour, marker, label, hollow in marks
    ]  # fmt: skip
