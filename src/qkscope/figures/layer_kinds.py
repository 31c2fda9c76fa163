"""Figure 8: rotary and NoPE layers apart, as small multiples with direct labels."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.analysis.results import Study
from qkscope.analysis.schema import NOPE, ROTARY
from qkscope.figures import style
from qkscope.figures.curves import band_key, draw_band_line

KINDS = (
    (ROTARY, "rotary layers", style.BLUE, "o", "-"),
    (NOPE, "NoPE layers", style.AMBER, "^", "--"),
)


def draw_rope_vs_nope(study: Study, table: pd.DataFrame, note: str) -> Figure:
    """Figure 8: mean r_q, mean r_k and the share of discordant keys, for rotary and NoPE heads."""
    headline = f"Rotary and NoPE Layers {style.span_title(study)}"
    figure = style.new_figure(11.0, 4.0, study, headline, note)
    panels = figure.subplots(1, 3, sharex=True)
    places = {name: i for i, name in enumerate(study.names)}
    for axes, measure, title in zip(
        panels,
        ("r_q", "r_k", "discordant"),
        ("mean $r_q$", "mean $r_k$", "heads with $r_k$ < −0.3 (%)"),
        strict=True,
    ):
        for kind, label, colour, marker, linestyle in KINDS:
            rows = table[table["rotary"] == kind]
            x = [places[model] for model in rows["model"]]
            _draw_kind(axes, rows, measure, x, (label, colour, marker, linestyle))
        axes.set_title(title, fontsize=9.5, loc="left")
        style.checkpoint_axis(axes, study, phase_names=False)
        _limits(axes, table, measure)
        axes.axhline(0.0, color=style.GREY, linewidth=0.8)
    handles = panels[0].get_legend_handles_labels()[0]
    style.header_legend(figure, [*handles, band_key(style.GREY)], 3)
    return style.finish(figure)


def _draw_kind(axes: Axes, rows: pd.DataFrame, measure: str, x: list[int], look: tuple[str, str, str, str]) -> None:
    label, colour, marker, linestyle = look
    if measure == "discordant":
        size = style.marker_size(len(rows))
        axes.plot(
            x, 100.0 * rows[measure], color=colour, marker=marker, linestyle=linestyle, linewidth=1.8,
            markersize=size, label=label, gid=measure,
        )  # fmt: skip
        return
    draw_band_line(axes, rows, measure, colour=colour, marker=marker, label=label, linestyle=linestyle, x=x)


def _limits(axes: Axes, table: pd.DataFrame, measure: str) -> None:
    if measure == "discordant":
        axes.set_ylim(0.0, max(10.0, 115.0 * float(table[measure].max())))
        return
    lowest = float((table[measure] - table[f"{measure}_std"].fillna(0.0)).min())
    axes.set_ylim(-1.0 if lowest < -0.6 else -0.6 if lowest < -0.2 else -0.2, 1.0)
