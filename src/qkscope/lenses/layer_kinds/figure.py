"""Figure 8: kinds of layers apart (rotary or NoPE; full, sliding or chunked), as small multiples."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.draw.curves import draw_band_line, draw_errors, spread_keys
from qkscope.lenses.canvas import canvas
from qkscope.lenses.errors import has_errors
from qkscope.lenses.kind_marks import KindMark, kind_marks
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.views import WindowView


def draw_layer_kinds(at: WindowView) -> Figure:
    """Figure 8: mean r_q, mean r_k and the share of discordant keys, for the heads of each kind of layer."""
    study, table = at.study, at.table("layer_kinds")
    if not study.one_run:  # a gap in a run says something; an empty place among models does not
        study = study.only(list(table["model"]))
    headline = f"Kinds of Layers {style.span_title(study)}"
    figure = canvas(at, 11.0, 4.0, headline)
    panels = figure.subplots(1, 3, sharex=True)
    places = {name: i for i, name in enumerate(study.names)}
    marks = kind_marks(kinds_in_order(table["layer_kind"]))
    for axes, measure, title in zip(
        panels,
        ("r_q", "r_k", "discordant"),
        ("mean $r_q$", "mean $r_k$", "heads with $r_k$ < −0.3 (%)"),
        strict=True,
    ):
        for number, (kind, mark) in enumerate(marks.items()):
            rows = table[table["layer_kind"] == kind]
            aside = 0.0 if study.one_run else 0.2 * (number - (len(marks) - 1) / 2)
            x = [places[model] + aside for model in rows["model"]]
            _draw_kind(axes, rows, measure, x, kind, mark, study.one_run)
        axes.set_title(title, fontsize=9.5, loc="left")
        style.checkpoint_axis(axes, study, phase_names=False)
        _limits(axes, table, measure)
        axes.axhline(0.0, color=style.GREY, linewidth=0.8)
    handles = panels[0].get_legend_handles_labels()[0]
    keys = spread_keys(style.GREY, has_errors(table, ("r_q", "r_k", "discordant")))
    style.header_legend(figure, [*handles, *keys], 2 + len(keys))
    return style.finish(figure)


def _draw_kind(
    axes: Axes, rows: pd.DataFrame, measure: str, x: Sequence[float], kind: str, mark: KindMark, joined: bool
) -> None:
    label = style.plain(kind)
    if measure == "discordant":
        axes.plot(
            x, 100.0 * rows[measure], color=mark.colour, marker=mark.marker, linestyle=mark.line if joined else "none",
            linewidth=1.8, markersize=style.marker_size(len(rows)), label=label, gid=measure,
        )  # fmt: skip
        draw_errors(axes, x, 100.0 * rows[measure], 100.0 * rows[f"{measure}_se"], gid=measure)
        return
    draw_band_line(
        axes, rows, measure, colour=mark.colour, marker=mark.marker, label=label, linestyle=mark.line, x=x,
        joined=joined,
    )  # fmt: skip


def _limits(axes: Axes, table: pd.DataFrame, measure: str) -> None:
    if measure == "discordant":
        axes.set_ylim(0.0, max(10.0, 115.0 * float(table[measure].max())))
        return
    lowest = float((table[measure] - table[f"{measure}_std"].fillna(0.0)).min())
    axes.set_ylim(-1.0 if lowest < -0.6 else -0.6 if lowest < -0.2 else -0.2, 1.0)
