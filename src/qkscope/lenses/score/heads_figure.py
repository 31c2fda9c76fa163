"""What scores are made of, head by head: one bar for each, those with the most position first.

Of a run these are the heads of the last checkpoint, of seeds and models those of each.
"""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.draw.curves import draw_errors
from qkscope.lenses.base import error_name
from qkscope.lenses.canvas import canvas
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.named_entries import named_entries
from qkscope.lenses.score.bars import draw_parts, legend_beside
from qkscope.lenses.score.summaries import shares_shown, with_kind
from qkscope.lenses.score.table import ADVANTAGE
from qkscope.lenses.views import WindowView

NAMED_HEADS = 64  # up to here every bar has the name of its head
MOST_KINDS = 3


def draw_score_heads(at: WindowView) -> Figure:
    """Bars of all heads and, below each, how far late keys win; entries and kinds of layers apart."""
    models, shares = [entry.name for entry in named_entries(at.study)], shares_shown(at)
    of = {model: style.plain(at.study.labels[model]) for model in models}
    groups = [group for model in models for group in _groups(at, model, "" if len(models) == 1 else f"{of[model]}: ")]
    headline = f"Every Head of {of[models[0]]}: What Its Scores Are Made Of"
    if len(models) > 1:
        headline = f"What Scores Are Made Of in Every Head {style.span_title(at.study)}"
    figure = canvas(at, 12.0, 1.1 + 3.4 * len(groups), headline, models)
    grid = figure.subplots(2 * len(groups), 1, squeeze=False, height_ratios=[2, 1] * len(groups))[:, 0]
    for i, (name, group) in enumerate(groups):
        rows = group.sort_values([shares[0], "layer", "head"], ascending=[False, True, True]).reset_index(drop=True)
        _draw_group(grid[2 * i], grid[2 * i + 1], rows, f"{name}{len(rows):,} heads, most position first", shares)
    errors = error_name(shares[0])
    legend_beside(grid[0], any(errors in group.columns and group[errors].notna().any() for _, group in groups))
    return style.finish(figure)


def _groups(at: WindowView, model: str, whose: str) -> list[tuple[str, pd.DataFrame]]:
    """An entry's heads, apart for each kind of layer where it has several, and what their panel is called."""
    heads = with_kind(at, model)
    kinds = kinds_in_order(heads["layer_kind"])
    if len(kinds) < 2:
        return [(whose, heads)]
    return [(f"{whose}{style.plain(kind)} layers, ", heads[heads["layer_kind"] == kind]) for kind in kinds[:MOST_KINDS]]


def _draw_group(bars: Axes, late: Axes, rows: pd.DataFrame, title: str, shares: Sequence[str]) -> None:
    x = list(range(len(rows)))
    few = len(rows) <= NAMED_HEADS
    draw_parts(bars, x, rows, shares, width=0.86 if few else 1.0)
    bars.set_yticks([0, 0.5, 1.0], ["0", "50", "100"])
    bars.set_ylabel("share (%)")
    bars.set_title(title, fontsize=9.5, loc="left")
    values = rows[ADVANTAGE].to_numpy(dtype=float)
    late.axhline(0.0, color=style.GREY, linewidth=0.8, zorder=1)
    late.plot(x, values, color=style.INK, marker="o", markersize=4 if few else 1.6, linestyle="none", gid=ADVANTAGE)
    if error_name(ADVANTAGE) in rows.columns:
        draw_errors(late, x, values, rows[error_name(ADVANTAGE)].to_numpy(dtype=float), gid=ADVANTAGE)
    late.set_ylabel("late keys\nwin by (SD)")
    names = [f"L{layer} H{head}" for layer, head in zip(rows["layer"], rows["head"], strict=True)]
    for axes in (bars, late):
        axes.set_xlim(-0.6, len(rows) - 0.4)
        axes.set_xticks([])
    if few:
        late.set_xticks(x, names, rotation=90, fontsize=7)
    else:
        late.set_xlabel("heads")
