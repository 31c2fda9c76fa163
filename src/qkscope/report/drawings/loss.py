"""What the model loses without the positional part of each head's scores."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.draw.curves import error_keys
from qkscope.lenses.ablation import NAME, STRENGTHS, last_measured, rank_correlation, shown_edit
from qkscope.lenses.kind_of_layer import KindMark, kind_marks, kinds_in_order
from qkscope.lenses.views import Results
from qkscope.report.charts import layout

NAMED = 3  # heads whose edit costs most
LINE = 0.045  # of the height of the axes, for a line of text
AGAINST = "r_q"


def draw_loss(tables: Results) -> Figure:
    """A dot per head of the last ablated checkpoint: loss increase after the edit against |r_q|."""
    at = tables.own
    edit, model = shown_edit(at), last_measured(at)
    heads = at.of_entry(model)
    heads = heads[heads[f"loss_{edit}"].notna() & heads[AGAINST].notna()]
    title = f"Loss Without Positional Information ({style.plain(at.study.labels[model])})"
    figure = layout.canvas(tables, 6.8, 4.4, title, span=False)
    axes = figure.subplots()
    axes.axhline(0.0, color=style.GREY, linewidth=0.8)
    _draw_heads(axes, heads, f"loss_{edit}")
    ranks = at.table(NAME)
    row = ranks[(ranks["model"] == model) & (ranks["edit"] == edit) & (ranks["strength"] == AGAINST)]
    if len(row):
        note = f"rank correlation {rank_correlation(row.iloc[0])}"
        axes.text(0.02, 0.97, note, transform=axes.transAxes, va="top", fontsize=8, gid="note")
    axes.set_xlabel(STRENGTHS[AGAINST])
    axes.set_ylabel("loss increase (nats per token)")
    known = bool(heads[f"loss_{edit}_se"].notna().any())
    axes.legend(handles=[*axes.get_legend_handles_labels()[0], *error_keys(known)], loc="center left", fontsize=7.5)
    return style.finish(figure)


def _draw_heads(axes: Axes, heads: pd.DataFrame, loss: str) -> None:
    kinds = kinds_in_order(heads["layer_kind"])
    marks = (
        kind_marks(kinds) if len(kinds) > 1 else {kind: KindMark(style.BLUE, "o") for kind in set(heads["layer_kind"])}
    )
    for kind, mark in marks.items():
        rows = heads[heads["layer_kind"] == kind]
        axes.errorbar(
            rows[AGAINST].abs(), rows[loss], yerr=rows[f"{loss}_se"], fmt=mark.marker, color=mark.colour,
            ecolor=style.INK, markersize=4, elinewidth=0.7, alpha=0.8, label=f"{style.plain(kind) or 'all'} heads",
            gid=kind,
        )  # fmt: skip
    low, high = axes.get_ylim()
    room = LINE * (high - low)
    place = high
    for head in heads.nlargest(NAMED, loss).to_dict("records"):
        place = min(place - room, float(head[loss]))  # below the label before it, where heads cost nearly the same
        axes.annotate(
            f"L{head['layer']:.0f} H{head['head']:.0f}", (abs(head[AGAINST]), place), (6, 0),
            textcoords="offset points", va="center", fontsize=7.5, gid="named",
        )  # fmt: skip
