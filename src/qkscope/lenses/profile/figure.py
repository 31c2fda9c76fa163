"""Where queries and keys of a few heads lie along PC0 and along the drift axis, bucket by bucket."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qkscope.draw import style
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.lenses.base import error_name
from qkscope.lenses.canvas import canvas
from qkscope.lenses.profile.choice import HeadProfile, profiles_of, without_sink
from qkscope.lenses.views import WindowView

KINDS = (("q", style.BLUE, "o", "queries"), ("k", style.RED, "s", "keys"))
ROWS = (("pc0", "along PC0"), ("a", "along the drift axis"))


def draw_profile(at: WindowView) -> Figure:
    """Small multiples: a column per head, PC0 above and the drift axis below; bands are ± 1 standard deviation."""
    heads = profiles_of(at)
    models = list(dict.fromkeys(head.model for head in heads))
    names = {model: style.plain(at.study.labels[model]) for model in models}
    headline = f"Queries and Keys by Position in {names[models[0]]}"
    if len(models) > 1:
        headline = f"Queries and Keys by Position {style.span_title(at.study)}"
    figure = canvas(at, max(8.4, 1.0 + 2.3 * len(heads)), 5.4, headline, models)
    grid = figure.subplots(2, len(heads), sharex="all" if len(models) == 1 else "col", squeeze=False)
    known = False
    for column, head in zip(grid.T, heads, strict=True):
        for axes, (axis, _) in zip(column, ROWS, strict=True):
            known |= _draw_axis(axes, head, axis)
        whose = "" if len(models) == 1 else f"{names[head.model]}\n"
        column[0].set_title(f"{whose}{head.name}, {head.why}", fontsize=9, loc="left", pad=14)
        column[0].text(
            0.0, 1.01, _numbers(head), transform=column[0].transAxes, fontsize=7, color=style.GREY, va="bottom"
        )
        column[1].set_xlabel("position")
    for axes, (_, label) in zip(grid[:, 0], ROWS, strict=True):
        axes.set_ylabel(f"projection {label}")
    lines = [Line2D([], [], color=colour, marker=marker, label=name) for _, colour, marker, name in KINDS]
    band = Patch(facecolor=style.GREY, alpha=0.25, label="± 1 SD over tokens")
    style.header_legend(figure, [*lines, band, *error_keys(known)], 4)
    return style.finish(figure)


def _numbers(head: HeadProfile) -> str:
    r_q, r_k = (style.signed(float(head.numbers[name])) for name in ("r_q", "r_k"))
    bends = [float(head.numbers[name]) for name in ("bend_q", "bend_k")]
    texts = ["–" if np.isnan(value) else f"{100 * value:.0f}%" for value in bends]
    return f"$r_q$ {r_q}, $r_k$ {r_k}; bent {texts[0]}, {texts[1]}"


def _draw_axis(axes: Axes, head: HeadProfile, axis: str) -> bool:
    """Queries and keys along one direction; says whether errors are known."""
    rows = without_sink(head.rows)
    x = ((rows["start"] + rows["end"] - 1) / 2).to_numpy(dtype=float)
    known = False
    for kind, colour, marker, _ in KINDS:
        name = f"{kind}_{axis}"
        mean, sd = rows[name].to_numpy(dtype=float), rows[f"{name}_sd"].to_numpy(dtype=float)
        axes.fill_between(x, mean - sd, mean + sd, color=colour, alpha=0.16, linewidth=0, gid=f"{name} band")
        axes.plot(x, mean, color=colour, marker=marker, markersize=3, linewidth=1.4, gid=name, zorder=3)
        errors = rows[error_name(name)].to_numpy(dtype=float) if error_name(name) in rows.columns else x * np.nan
        draw_errors(axes, x, mean, errors, gid=name)
        known |= bool(np.isfinite(errors).any())
    length = int(head.rows["end"].max())
    axes.set_xticks([0, length // 2, length], ["0", f"{length // 2:,}", f"{length:,}"])
    axes.axhline(0.0, color=style.LINE, linewidth=0.6, zorder=0.5)
    axes.tick_params(labelsize=7)
    return known
