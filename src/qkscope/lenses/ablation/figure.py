"""What an edit of each head costs against measures of how strongly the head encodes position."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.lenses.ablation.table import EDITS, NAME, STRENGTHS, last_measured, shown_edit
from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.canvas import canvas
from qkscope.lenses.taxonomy.heads import heads_at


def draw_ablation(at: AtWindow) -> Figure:
    """One panel per measure that the results have: a dot per head of the last entry, its error over documents."""
    edit, model = shown_edit(at), last_measured(at)
    ranks = at.table(NAME)
    ranks = ranks[(ranks["edit"] == edit) & (ranks["model"] == model)].set_index("strength")
    names = [name for name in STRENGTHS if name in ranks.index]
    heads = heads_at(at)
    heads = heads[(heads["model"] == model) & heads[f"loss_{edit}"].notna()]
    label = at.study.labels[model]
    figure = canvas(at, 3.1 * len(names) + 0.6, 3.7, f"Does It Matter? Loss without {EDITS[edit]} ({label})")
    panels = np.atleast_1d(figure.subplots(1, len(names), sharey=True))
    for name, axes in zip(names, panels, strict=True):
        _panel(axes, heads, name, edit)
        row = ranks.loc[name]
        axes.set_title(f"rank correlation {row['rho']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})", fontsize=8)
        axes.set_xlabel(STRENGTHS[name])
    panels[0].set_ylabel("rise of the loss (nats per token)")
    return style.finish(figure)


def _panel(axes: Axes, heads: pd.DataFrame, name: str, edit: str) -> None:
    loss, error = f"loss_{edit}", f"loss_{edit}_se"
    axes.axhline(0.0, color=style.GREY, linewidth=0.8)
    for nope, marker, colour in ((False, "o", style.INK), (True, "D", style.GREY)):
        rows = heads[(heads["layer_kind"].str.contains("NoPE", case=False)) == nope]
        known = rows[rows[name].notna()]
        axes.errorbar(
            known[name].abs(), known[loss], yerr=known[error], fmt=marker, color=colour,
            markersize=3.2, linewidth=0.6, alpha=0.75, label="NoPE" if nope else "rotary", gid=f"{name} {marker}",
        )  # fmt: skip
    if len(set(heads["layer_kind"])) > 1:
        axes.legend(loc="upper left", fontsize=7, frameon=False)
