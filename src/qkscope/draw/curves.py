"""Means over heads as a line with a band and error bars."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
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
    x: Sequence[float] | None = None,
    joined: bool = True,
) -> None:
    """Means with ± 1 SD over heads: a line with a band, or markers with bars where no line joins the entries.

    Standard errors over documents (`<measure>_se`) are thin bars.
    """
    places = list(range(len(table))) if x is None else list(x)
    mean, std = table[measure], table[f"{measure}_std"]
    if joined and len(table) > 1:
        axes.fill_between(places, mean - std, mean + std, zorder=1, gid=f"{measure} band", color=colour, alpha=0.14,
                          linewidth=0)  # fmt: skip
    else:
        axes.vlines(places, mean - std, mean + std, color=colour, alpha=0.3, linewidth=7, gid=f"{measure} bar")
    axes.plot(
        places, mean, color=colour, marker=marker, linestyle="-" if joined else "none", linewidth=1.8,
        markersize=style.marker_size(len(table)), label=label, zorder=3, gid=measure,
    )  # fmt: skip
    if f"{measure}_se" in table.columns:
        draw_errors(axes, places, mean, table[f"{measure}_se"], gid=measure)


def draw_errors(axes: Axes, x: npt.ArrayLike, values: npt.ArrayLike, errors: npt.ArrayLike, *, gid: str) -> None:
    """A thin bar of ± 1 standard error at each value whose error is known."""
    at, middle, error = (np.asarray(each, dtype=np.float64) for each in (x, values, errors))
    known = np.isfinite(middle) & np.isfinite(error)
    if known.any():
        low, high = (middle - error)[known], (middle + error)[known]
        axes.vlines(at[known], low, high, color=style.INK, linewidth=1.0, zorder=4, gid=f"{gid} error")


def error_keys(known: bool) -> list[Line2D]:
    """The legend entry of error bars, where errors are known."""
    label = "± 1 SE over documents"
    return [Line2D([], [], label=label, color=style.INK, marker="|", markersize=8, linestyle="none")] if known else []


def spread_keys(colour: str, errors: bool) -> list[Artist]:
    """The legend entries of a band (shorter where error bars need room for theirs) and of known errors."""
    label = f"± 1 {'SD' if errors else 'standard deviation'} over heads"
    return [Patch(facecolor=colour, alpha=0.2, label=label), *error_keys(errors)]
