"""Figure 2: what fraction of heads is in each category, one stacked bar per checkpoint."""

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from qkscope.draw import style
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.lenses.canvas import canvas
from qkscope.lenses.categories import CATEGORY_COLOURS
from qkscope.lenses.errors import has_errors
from qkscope.lenses.taxonomy.table import CATEGORIES, K_POSITIONAL, MIXED, Q_POSITIONAL, UNDEFINED
from qkscope.lenses.views import WindowView

# Beside its colour each neighbour differs in texture: blue and indigo alone are hard to tell apart.
HATCHES = {Q_POSITIONAL: "////", K_POSITIONAL: "....", UNDEFINED: "xxxx"}
BAR_WIDTH = 0.74
NUMBERED_BARS = 16  # up to here there is room for percentages inside the bars
NUMBERED_SHARE = 0.05
THIN_SHARE = 0.012


def draw_taxonomy_evolution(at: WindowView) -> Figure:
    """Figure 2: stacked fractions in the order of the taxonomy; categories without any head are left out."""
    study = at.study
    headline = f"Head Taxonomy {'Evolution ' if study.one_run else ''}{style.span_title(study)}"
    figure = canvas(at, 9.0, 4.6, headline)
    axes = figure.subplots()
    fractions = at.table("taxonomy_fractions")
    shown = [c for c in CATEGORIES if bool((fractions[c] > 0).any())]  # a key without a bar says nothing
    bottom = [0.0] * len(fractions)
    for category in shown:
        heights = [float(v) for v in fractions[category]]
        _draw_layer(axes, category, heights, bottom)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    _draw_errors(axes, fractions, shown)
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("fraction of heads")
    style.checkpoint_axis(axes, study)
    handles = [_key(category) for category in reversed(shown)]  # as the bars are stacked, top first
    handles += error_keys(has_errors(fractions, shown))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    return style.finish(figure)


def _draw_errors(axes: Axes, fractions: pd.DataFrame, shown: list[str]) -> None:
    """Each share's error at the upper end of its slice, the last one's at its lower end: above it is nothing.

    Errors of neighbours stand beside each other, since slices can be thinner than their errors.
    """
    tops = fractions[shown].cumsum(axis=1)
    for i, category in enumerate(shown):
        ends = tops[category] - (fractions[category] if i == len(shown) - 1 else 0.0)
        aside = 0.8 * BAR_WIDTH * ((i + 0.5) / len(shown) - 0.5)
        there = fractions[f"{category}_se"].where(fractions[f"{category}_se"] > 0)
        draw_errors(axes, [x + aside for x in range(len(fractions))], ends, there, gid=category)


def _key(category: str) -> Artist:
    return Patch(
        facecolor=CATEGORY_COLOURS[category],
        edgecolor=style.GREY if category == UNDEFINED else "white",
        hatch=HATCHES.get(category),
        label=category,
    )


def _draw_layer(axes: Axes, category: str, heights: list[float], bottom: list[float]) -> None:
    colour = CATEGORY_COLOURS[category]
    bars = axes.bar(
        range(len(heights)),
        heights,
        BAR_WIDTH,
        bottom=bottom,
        color=colour,
        edgecolor=style.GREY if category == UNDEFINED else "white",
        linewidth=0.5 if len(heights) <= 60 else 0.0,
        hatch=HATCHES.get(category),
        label=category,
        zorder=2,
        gid=category,
    )
    for bar in bars:
        if bar.get_height() < THIN_SHARE:  # an edge or a texture would cover the whole slice
            bar.set_linewidth(0.0)
            bar.set_hatch("")
    if len(heights) > NUMBERED_BARS:
        return
    for x, (height, low) in enumerate(zip(heights, bottom, strict=True)):
        if height >= NUMBERED_SHARE:
            box = {"boxstyle": "round,pad=0.1", "facecolor": colour, "edgecolor": "none"}
            axes.text(
                x,
                low + height / 2,
                f"{100 * height:.0f}%",
                ha="center",
                va="center",
                fontsize=7.5,
                color=style.INK if category == MIXED else style.readable_on(colour),
                bbox=box if category in HATCHES else None,
                zorder=3,
                gid="share",
            )
