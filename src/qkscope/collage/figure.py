"""The drawing of a collage: a panel per head, queries blue and keys red, darker with position."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure

from qkscope.collage.points import Axes, HeadPoints
from qkscope.draw import style
from qkscope.results.entries import Entries
from qkscope.results.folder import COLLAGE_PNG, COLLAGE_SVG

COLOURS = {"q": "Blues", "k": "Reds"}
KINDS = {"q": "queries", "k": "keys"}
FAINTEST = 0.25  # of a colour map: the first positions must still be seen on white
COLUMNS = 3


def draw_collage(heads: Sequence[HeadPoints], axes: Axes, title: str, document: int | None = None) -> Figure:
    """All heads; with `document`, its tokens in colour over the others in grey."""
    columns = min(COLUMNS, max(2, math.ceil(math.sqrt(len(heads))))) if len(heads) > 1 else 1
    rows = math.ceil(len(heads) / columns)
    longest = max(int(head.table["position"].max()) for head in heads)
    what = f"document {document} over the others (grey)" if document is not None else "kept tokens"
    note = f"{what}; darker is later, up to position {longest:,}; labels are the tokens farthest from their line"
    with matplotlib.rc_context(style.RC):
        figure = style.new_figure(
            4.4 * columns + 1.2, 3.9 * rows + 0.9, Entries(title, (), ()), f"{' and '.join(axes.names)}", note
        )
        panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
        for spare in panels[len(heads) :]:
            spare.set_visible(False)
        for panel, head in zip(panels, heads, strict=False):
            _draw_head(panel, head, axes, longest, document)
        for kind, colours in COLOURS.items():
            norm = matplotlib.colors.Normalize(0, longest)
            mappable = matplotlib.cm.ScalarMappable(norm, _map(colours))
            bar = figure.colorbar(mappable, ax=list(panels[: len(heads)]), shrink=0.5, pad=0.01, aspect=30)
            bar.set_label(f"position of {KINDS[kind]}", fontsize=7.5)
        return style.finish(figure)


def _map(colours: str) -> matplotlib.colors.Colormap:
    whole = matplotlib.colormaps[colours]
    return matplotlib.colors.LinearSegmentedColormap.from_list(colours, whole(np.linspace(FAINTEST, 1.0, 64)))


def _draw_head(panel: Panel, head: HeadPoints, axes: Axes, longest: int, document: int | None) -> None:
    shown = head.table if document is None else head.table[head.table["document"] == document]
    if document is not None:
        other = head.table[head.table["document"] != document]
        panel.scatter(other["x"], other["y"], s=5, color=style.FAINT, linewidth=0, zorder=1, gid="others")
    for kind, colours in COLOURS.items():
        mine = shown[shown["kind"] == kind]
        panel.scatter(
            mine["x"], mine["y"], s=9, c=mine["position"], cmap=_map(colours), vmin=0, vmax=longest, linewidth=0,
            alpha=0.8, zorder=2, gid=kind,
        )  # fmt: skip
        for row in head.outliers(kind, document).to_dict("records"):
            panel.annotate(
                style.plain(outlier_name(row), 16), (row["x"], row["y"]), xytext=(3, 3),
                textcoords="offset points", fontsize=6, color=style.INK, gid="outlier",
            )  # fmt: skip
    panel.set_title(f"{head.name}: {head.facts}", fontsize=7.5, loc="left")
    panel.set_xlabel(axes.names[0])
    panel.set_ylabel(axes.names[1])


def outlier_name(row: Mapping[Any, Any]) -> str:
    """A token's text, or where it is."""
    text = str(row["token"])
    return repr(text)[1:-1] if text else f"doc {row['document']}, {row['position']}"


def save_collage(figure: Figure, folder: Path) -> list[Path]:
    """Write `collage.png` and `collage.svg`."""
    return style.save_as(figure, folder / COLLAGE_PNG, folder / COLLAGE_SVG)
