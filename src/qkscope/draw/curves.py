"""Means over heads as a line with a band, for any lens that draws them."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from qkscope.draw import style


def draw_band_line(
    axes: Axes,
    table: pd.DataFrame,
    measure: str,
    *,
    colour: str,
    marker: str,
    label: str,
    linestyle: str | tuple[int, tuple[int, ...]] = "-",
    x: "Sequence[float] | None" = None,
    joined: bool = True,
) -> None:
    """Markers at the means and ± 1 standard deviation: a line with a band, or bars where nothing joins the entries."""
    places = list(range(len(table))) if x is None else list(x)
    mean, std = table[measure], table[f"{measure}_std"]
    if joined and len(table) > 1:
        axes.fill_between(
            places, mean - std, mean + std, color=colour, alpha=0.14, linewidth=0, zorder=1, gid=f"{measure} band"
        )
    else:
        axes.vlines(places, mean - std, mean + std, color=colour, alpha=0.3, linewidth=7, gid=f"{measure} bar")
    axes.plot(
        places,
        mean,
        color=colour,
        marker=marker,
        linestyle=linestyle if joined else "none",
        linewidth=1.8,
        markersize=style.marker_size(len(table)),
        label=label,
        zorder=3,
        gid=measure,
    )


def band_key(colour: str) -> Patch:
    """The legend entry of a band."""
    return Patch(facecolor=colour, alpha=0.2, label="± 1 standard deviation over heads")
