"""What scores are made of, head by head, at the last entry: one bar per head, those with the most position first."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.draw.curves import draw_errors
from qkscope.lenses.at_window import AtWindow
from qkscope.lenses.base import error_name
from qkscope.lenses.canvas import canvas
from qkscope.lenses.kind_of_layer import kinds_in_order
from qkscope.lenses.score.bars import draw_parts, legend_beside
from qkscope.lenses.score.summaries import shares_shown, with_kind
from qkscope.lenses.score.table import ADVANTAGE

NAMED_HEADS = 64  # up to here every bar has the name of its head
MOST_KINDS = 3


def draw_score_heads(at: AtWindow) -> Figure:
    """Bars of all heads of the last entry and, below each, how far late keys win; kinds of layers apart."""
    model = at.names[-1]
    heads, shares = with_kind(at, model), shares_shown(at)
    kinds = kinds_in_order(heads["layer_kind"])
    groups = [heads[heads["layer_kind"] == kind] for kind in kinds[:MOST_KINDS]] if len(kinds) > 1 else [heads]
    headline = f"Every Head of {style.plain(at.study.labels[model])}: What Its Scores Are Made Of"
    figure = canvas(at, 12.0, 1.1 + 3.4 * len(groups), headline, [model])
    grid = figure.subplots(2 * len(groups), 1, squeeze=False, height_ratios=[2, 1] * len(groups))[:, 0]
    for i, group in enumerate(groups):
        rows = group.sort_values([shares[0], "layer", "head"], ascending=[False, True, True]).reset_index(drop=True)
        kind = style.plain(kinds[i]) + " layers, " if len(groups) > 1 else ""
        _draw_group(grid[2 * i], grid[2 * i + 1], rows, f"{kind}{len(rows):,} heads, most position first", shares)
    errors = error_name(shares[0])
    legend_beside(grid[0], errors in heads.columns and bool(heads[errors].notna().any()))
    return style.finish(figure)


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
