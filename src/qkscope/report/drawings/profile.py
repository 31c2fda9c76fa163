"""Mean projections of a few heads' queries and keys on PC0, by position."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qkscope.draw import style
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.lenses.base import error_name
from qkscope.lenses.profile import HeadProfile, profiles_of, without_sink
from qkscope.lenses.views import Results
from qkscope.report.charts import layout

KINDS = (("q", style.BLUE, "o", "queries"), ("k", style.RED, "s", "keys"))
MOST_COLUMNS = 3


def draw_profile(tables: Results) -> Figure:
    """A panel per chosen head: mean projection on PC0 by position; bands are ± 1 standard deviation over tokens."""
    at = tables.own
    heads = profiles_of(at)
    models = list(dict.fromkeys(head.model for head in heads))
    names = {model: style.plain(at.study.labels[model]) for model in models}
    of = f" ({names[models[0]]})" if len(models) == 1 else ""
    columns = min(MOST_COLUMNS, len(heads))
    rows = -(-len(heads) // columns)
    size = max(7.0, 1.0 + 2.6 * columns), 1.3 + 2.5 * rows
    figure = layout.canvas(tables, *size, f"Projection on PC0 by Position{of}", span=False)
    grid = figure.subplots(rows, columns, squeeze=False)
    known = False
    for axes, head in zip(grid.flat, heads, strict=False):
        known |= _draw_head(axes, head)
        whose = "" if len(models) == 1 else f"{names[head.model]}\n"
        axes.set_title(f"{whose}{head.name}, {head.why}", fontsize=9, loc="left", pad=14)
        axes.text(0.0, 1.01, _numbers(head), transform=axes.transAxes, fontsize=7, color=style.GREY, va="bottom")
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(heads))
    for axes in grid[-1]:
        axes.set_xlabel("position")
    for axes in grid[:, 0]:
        axes.set_ylabel("projection on PC0")
    lines = [Line2D([], [], color=color, marker=marker, label=name) for _, color, marker, name in KINDS]
    band = Patch(facecolor=style.GREY, alpha=0.25, label="± 1 SD over tokens")
    style.header_legend(figure, [*lines, band, *error_keys(known)], 4)
    return style.finish(figure)


def _numbers(head: HeadProfile) -> str:
    r_q, r_k = (style.signed(float(head.numbers[name])) for name in ("r_q", "r_k"))
    bends = [float(head.numbers[name]) for name in ("bend_q", "bend_k")]
    texts = ["–" if np.isnan(value) else f"{100 * value:.0f}%" for value in bends]
    return f"$r_q$ {r_q}, $r_k$ {r_k}; bent {texts[0]}, {texts[1]}"


def _draw_head(axes: Axes, head: HeadProfile) -> bool:
    """Queries and keys of one head; says whether errors are known."""
    rows = without_sink(head.rows)
    x = ((rows["start"] + rows["end"] - 1) / 2).to_numpy(dtype=float)
    known = False
    for kind, color, marker, _ in KINDS:
        name = f"{kind}_pc0"
        mean, sd = rows[name].to_numpy(dtype=float), rows[f"{name}_sd"].to_numpy(dtype=float)
        axes.fill_between(x, mean - sd, mean + sd, color=color, alpha=0.16, linewidth=0, gid=f"{name} band")
        axes.plot(x, mean, color=color, marker=marker, markersize=3, linewidth=1.4, gid=name, zorder=3)
        errors = rows[error_name(name)].to_numpy(dtype=float) if error_name(name) in rows.columns else x * np.nan
        draw_errors(axes, x, mean, errors, gid=name)
        known |= bool(np.isfinite(errors).any())
    length = int(head.rows["end"].max())
    axes.set_xticks([0, length // 2, length], ["0", f"{length // 2:,}", f"{length:,}"])
    axes.axhline(0.0, color=style.LINE, linewidth=0.6, zorder=0.5)
    axes.tick_params(labelsize=7.5)
    return known
