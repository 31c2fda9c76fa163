"""Stacked bars of the four parts of a score, with the errors of each."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from qkscope.draw import style
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.lenses.base import error_name
from qkscope.lenses.score.looks import LOOKS

NUMBERED_BARS = 16  # up to here there is room for percentages inside bars
NUMBERED_SHARE = 0.06
BAR_WIDTH = 0.8


def draw_parts(
    axes: Axes, x: Sequence[float], table: pd.DataFrame, shares: Sequence[str], *, width: float = BAR_WIDTH
) -> None:
    """One bar per row of a table with these shares; errors where it has them, percentages where there is room."""
    bottom = np.zeros(len(table))
    crowded = len(table) > 60
    numbered = len(table) <= NUMBERED_BARS
    for i, (share, part) in enumerate(zip(shares, LOOKS, strict=True)):
        heights = table[share].to_numpy(dtype=float)
        axes.bar(
            x, heights, width, bottom=bottom, color=part.colour, edgecolor="none" if crowded else "white",
            linewidth=0.0 if crowded else 0.5, label=part.name, zorder=2, gid=part.name,
        )  # fmt: skip
        if numbered:
            _print_shares(axes, x, heights, bottom, part.colour)
        last = i == len(LOOKS) - 1
        ends = bottom if last else bottom + heights
        error = error_name(share)
        if error in table.columns and not crowded:
            aside = 0.7 * width * ((i + 0.5) / len(LOOKS) - 0.5)
            draw_errors(axes, np.asarray(x) + aside, ends, table[error].to_numpy(dtype=float), gid=part.name)
        bottom = bottom + heights
    axes.set_ylim(0.0, 1.0)


def _print_shares(
    axes: Axes, x: Sequence[float], heights: npt.NDArray[np.float64], bottom: npt.NDArray[np.float64], colour: str
) -> None:
    for place, height, low in zip(x, heights, bottom, strict=True):
        if height >= NUMBERED_SHARE:
            axes.text(
                place, low + height / 2, f"{100 * height:.0f}", ha="center", va="center", fontsize=7,
                color=style.readable_on(colour), zorder=3, gid="share",
            )  # fmt: skip


def part_keys(errors: bool) -> list[Artist]:
    """The legend: parts as they are stacked, top first, and error bars."""
    parts = [Patch(facecolor=part.colour, label=part.name) for part in reversed(LOOKS)]
    return [*parts, *error_keys(errors)]


def legend_beside(axes: Axes, errors: bool) -> None:
    """The legend to the right of the last panel."""
    axes.legend(handles=part_keys(errors), loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
