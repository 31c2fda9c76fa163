"""Biases of all heads by family: histograms above, bias against separation below."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.lenses.across_models.figure import FAMILY_COLOURS, MARKERS
from qkscope.lenses.canvas import canvas
from qkscope.lenses.rotation.families import MOST_FAMILIES, families, within_models
from qkscope.lenses.rotation.heads_figure import BINS, correlation_words
from qkscope.lenses.rotation.table import FILE, THOUSAND
from qkscope.lenses.views import WindowView


def draw_families(at: WindowView) -> Figure:
    """A column per family, its models told apart by colour and mark; each family has its own scale of bias."""
    shown = dict(list(families(at).items())[:MOST_FAMILIES])
    figure = canvas(at, max(5.6, 3.0 * len(shown) + 0.8), 6.2, "Bias of Every Head by Family")
    panels = figure.subplots(2, len(shown), squeeze=False, height_ratios=(1, 1.4))
    for column, (family, members) in zip(panels.T, shown.items(), strict=True):
        for place, entry in enumerate(members):
            table = at.table(FILE)
            heads = table[table["model"] == entry.name]
            _draw_model(column, heads, place, style.plain(entry.label, 20))
        column[0].set_title(style.plain(family or "family not known"), fontsize=9.5, loc="left")
        column[0].axvline(0.0, color=style.INK, linewidth=0.9, linestyle=(0, (4, 3)), gid="zero")
        column[0].set_xlabel("bias per 1,000 tokens", fontsize=7.5)
        column[1].set_title(f"within models: {correlation_words(within_models(at, members))}", fontsize=7.5, loc="left",
                            color=style.GREY)  # fmt: skip
        column[1].axhline(0.0, color=style.GREY, linewidth=0.8)
        column[1].set_xlim(0.0, 1.0)
        column[1].set_xlabel("separation along b", fontsize=7.5)
        column[1].legend(fontsize=6.5, loc="best")
    panels[0, 0].set_ylabel("share of heads per unit")
    panels[1, 0].set_ylabel("bias per 1,000 tokens")
    return style.finish(figure)


def _draw_model(column: np.ndarray, heads: pd.DataFrame, place: int, label: str) -> None:
    colour, marker = FAMILY_COLOURS[place % len(FAMILY_COLOURS)], MARKERS[place % len(MARKERS)]
    above: Axes = column[0]
    below: Axes = column[1]
    bias = heads["bias_strength"].to_numpy(dtype=float) * THOUSAND
    known = bias[np.isfinite(bias)]
    if len(known):
        above.hist(known, bins=BINS, density=True, color=colour, alpha=0.45, histtype="stepfilled", gid=f"bias {label}")
    below.scatter(
        heads["separation_strength"], bias, s=9, color=colour, marker=marker, alpha=0.55, linewidth=0, label=label,
        gid=f"heads {label}", zorder=3,
    )  # fmt: skip
