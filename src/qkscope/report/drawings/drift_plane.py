"""Ellipses in the plane of a and b: where queries and keys of each position bucket lie, and how far they spread.

`draw_plane` draws any head of a moments file; the figure of a report shows a few heads, chosen by a stated rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

from qkscope.draw import style
from qkscope.errors import InputError
from qkscope.lenses.profile import profile
from qkscope.lenses.rotation.planes import FILE, chosen_heads, planes
from qkscope.lenses.sums import layer_sums
from qkscope.lenses.views import Results
from qkscope.moments.moments import Moments
from qkscope.report.charts import layout

COLOURS = {"q": "Blues", "k": "Reds"}
PALEST = 0.35  # of a colour map: early positions must be seen on white


def draw_drift_plane(tables: Results) -> Figure:
    """A column per chosen head; rows are the first and the last checkpoint that are shown."""
    at = tables.own
    heads = chosen_heads(at)
    models = list(dict.fromkeys(heads["model"]))
    columns = int(heads.groupby("model").size().max())
    figure = layout.canvas(
        tables, 2.7 * columns + 1.0, 2.75 * len(models) + 1.0, "Queries and Keys in the Drift Plane", span=False
    )
    panels = figure.subplots(len(models), columns, squeeze=False)
    table = at.table(FILE)
    for row, model in enumerate(models):
        chosen = heads[heads["model"] == model].to_dict("records")
        window = at.window_of(model)
        for axes in panels[row, len(chosen) :]:
            axes.set_visible(False)
        for axes, head in zip(panels[row], chosen, strict=False):
            here = (table["model"] == model) & (table["layer"] == head["layer"]) & (table["head"] == head["head"])
            draw_head(axes, table[here], window)
            axes.set_title(f"layer {head['layer']:.0f}, head {head['head']:.0f}", fontsize=8.5, loc="left")
            axes.set_title(style.plain(at.study.labels[model], 16), fontsize=7, loc="right", color=style.GREY)
    _colour_bars(figure, panels, [at.window_of(model) for model in models])
    return style.finish(figure)


def draw_plane(
    moments: Moments | Path | str, layer: int, head: int, *, window: int | None = None, skip_positions: int = 0
) -> Figure:
    """One head of a moments file in the plane of a and b, from sums alone; `Figure.savefig` writes it.

    `window` takes the first so many positions, `skip_positions` leaves out the first; both must be bucket edges.
    """
    loaded = moments if isinstance(moments, Moments) else Moments.load(moments)
    if layer not in loaded.layers or not 0 <= head < loaded.layers[layer].q_heads:
        layers = sorted(loaded.layers)
        raise InputError(f"there is no layer {layer} with a head {head}; layers are {layers[0]} to {layers[-1]}")
    sums = layer_sums(loaded, layer, [head], window, skip=skip_positions)
    columns = {**profile(sums), **planes(sums), "position": sums.q_buckets.mean_t}  # as rows of `buckets` have them
    rows = pd.DataFrame({name: values[0] for name, values in columns.items()})
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=(5.2, 4.2), dpi=style.DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        draw_head(axes, rows, sums.window)
        axes.set_title(f"Layer {layer}, head {head}, {sums.window:,} tokens", loc="left", fontsize=10)
        _colour_bars(figure, np.array([[axes]]), [sums.window])
        figure.draw_without_rendering()
    return figure


def draw_head(axes: Axes, rows: pd.DataFrame, window: float) -> None:
    """One ellipse (one standard deviation) per bucket and kind, darker with position; a line joins the means."""
    for kind, colours in COLOURS.items():
        shade = _shades(colours)
        known = rows[np.isfinite(rows[f"{kind}_a"]) & np.isfinite(rows[f"{kind}_b"])]
        axes.plot(known[f"{kind}_a"], known[f"{kind}_b"], color=shade(0.75), linewidth=0.8, zorder=3, gid=kind)
        for row in known.to_dict("records"):
            colour = shade(row["position"] / window)
            axes.add_patch(_ellipse(row, str(kind), colour))
            axes.plot(
                row[f"{kind}_a"], row[f"{kind}_b"], "o" if kind == "q" else "s", color=colour, markersize=2.6, zorder=4
            )
    axes.autoscale_view()
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel("along a (drift)", fontsize=7.5)
    axes.set_ylabel("along b (separation)", fontsize=7.5)
    axes.tick_params(labelsize=6.5)


def _ellipse(row: dict[str, float], kind: str, colour: tuple[float, float, float, float]) -> Ellipse:
    spread = np.array([[row[f"{kind}_var_a"], row[f"{kind}_cov_ab"]], [row[f"{kind}_cov_ab"], row[f"{kind}_var_b"]]])
    values, vectors = np.linalg.eigh(np.nan_to_num(spread))
    width, height = 2.0 * np.sqrt(np.maximum(values[::-1], 0.0))
    angle = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
    return Ellipse(
        (row[f"{kind}_a"], row[f"{kind}_b"]), width, height, angle=float(angle), facecolor=(*colour[:3], 0.05),
        edgecolor=colour, linewidth=0.7, zorder=2, gid=f"{kind} ellipse",
    )  # fmt: skip


def _shades(colours: str) -> Colormap:
    return ListedColormap(matplotlib.colormaps[colours](np.linspace(PALEST, 1.0, 256)))


def _colour_bars(figure: Figure, panels: np.ndarray, windows: Sequence[float]) -> None:
    """Position in the window, for queries and for keys."""
    most = max(windows)
    same = min(windows) == most
    for kind, name in (("k", "keys"), ("q", "queries")):
        scale = ScalarMappable(Normalize(0.0, most if same else 1.0), _shades(COLOURS[kind]))
        bar = figure.colorbar(scale, ax=list(panels.flat), fraction=0.018, pad=0.012, aspect=26)
        bar.set_label(f"{name}: position" + ("" if same else " / window"), fontsize=7)
        bar.ax.tick_params(labelsize=6.5)
        bar.outline.set_visible(False)
