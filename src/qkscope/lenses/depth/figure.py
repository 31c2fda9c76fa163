"""Figures 4 and 5: mean r_q and r_k by checkpoint (rows) and depth (columns), with the values printed."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from qkscope.draw import style
from qkscope.lenses.base import error_name
from qkscope.lenses.canvas import canvas
from qkscope.lenses.depth_axis import N_BINS, DepthAxis, depth_axis
from qkscope.lenses.views import WindowView
from qkscope.results.read import Entries, phase_segments

LABEL_CHARACTERS = 36
ROW_INCHES = (0.34, 0.165)  # few rows are roomy; many shrink to the height of a line and the page grows
BESIDE = 0.085  # room beside the cells, the same in both figures, so that their panels are of one size
NEGATIVE = {"Blues": "#fde9c9", "Reds": "#dbe7fb"}  # another hue for means below 0, beside their sign


def draw_heatmap_rq(at: WindowView) -> Figure:
    """Figure 4: mean r_q in Blues from 0 to 1."""
    study = at.study
    headline = f"Mean $r_q$ (PC0) by Layer Depth {style.span_title(study)}"
    figure, _ = _heatmap(at, at.table("depth_rq"), "Blues", headline, "mean $r_q$")
    return style.finish(figure)


def draw_heatmap_rk(at: WindowView) -> Figure:
    """Figure 5: mean r_k in Reds from 0 to 1; at the right end of each row the share of discordant keys."""
    study = at.study
    headline = f"Mean $r_k$ (PC0) by Layer Depth {style.span_title(study)}"
    figure, axes = _heatmap(at, at.table("depth_rk"), "Reds", headline, "mean $r_k$")
    size = _text_points(len(study.checkpoints))
    right = depth_axis(at).size - 0.35
    for row, share in enumerate(at.table("concordance")["discordant"]):
        if not np.isnan(share):
            axes.text(
                right, row, f"{100 * share:.0f}%", va="center", fontsize=size, color=style.AMBER,
                gid="discordant", clip_on=False, in_layout=False,
            )  # fmt: skip
    axes.text(
        right, -0.6, "discordant\n($r_k$ < −0.3)", va="bottom", fontsize=7.5, color=style.AMBER, clip_on=False,
        in_layout=False,
    )  # fmt: skip
    return style.finish(figure)


def _row_inches(rows: int) -> float:
    roomy, tight = ROW_INCHES
    return roomy if rows <= 20 else max(tight, roomy * 20 / rows)


def _text_points(rows: int) -> float:
    return min(8.0, 40.0 * _row_inches(rows))


def _heatmap(at: WindowView, means: pd.DataFrame, colours: str, headline: str, label: str) -> tuple[Figure, Axes]:
    study = at.study
    rows = len(means)
    height = max(2.6, rows * _row_inches(rows) + 1.4)
    axis = depth_axis(at)
    figure = canvas(at, 9.4, height, headline)
    axes = figure.subplots()
    values = np.vectorize(style.as_printed, otypes=[float])(means[list(axis.columns)].to_numpy(dtype=float))
    colourmap = matplotlib.colormaps[colours].with_extremes(under=NEGATIVE[colours], bad=(1.0, 1.0, 1.0, 0.0))
    image = axes.imshow(values, cmap=colourmap, vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest", gid="means")
    _print_cells(axes, values, colourmap)
    _label_axes(axes, study, axis, _error_words(means[[error_name(name) for name in axis.columns]]))
    bar = figure.colorbar(
        image, ax=axes, shrink=min(1.0, 3.0 / height), pad=BESIDE, aspect=18,
        extend="min" if bool(np.nanmin(np.append(values, 0.0)) < 0) else "neither",
    )  # fmt: skip
    bar.set_label(label)
    bar.outline.set_visible(False)
    return figure, axes


def _print_cells(axes: Axes, values: np.ndarray, colourmap: Colormap) -> None:
    size = _text_points(len(values))
    for row, column in np.ndindex(values.shape):
        value = float(values[row, column])
        if np.isnan(value):
            axes.add_patch(
                Rectangle(
                    (column - 0.5, row - 0.5), 1, 1, facecolor="#f3f4f6", edgecolor=style.FAINT, hatch="///",
                    linewidth=0, gid="no heads",
                )
            )  # fmt: skip
            continue
        red, green, blue, _ = colourmap(value)
        axes.text(
            column, row, style.signed(value), ha="center", va="center", fontsize=size,
            color=style.readable_on((red, green, blue)), gid="cell", in_layout=False,
        )  # fmt: skip


def _error_words(errors: pd.DataFrame) -> str:
    """How sure the printed means are: there is no room for an error in every cell."""
    known = errors.to_numpy(dtype=float)
    known = known[np.isfinite(known)]
    if not known.size:
        return ""
    return f"; standard error of a mean over documents: {np.median(known):.3f} (median), {known.max():.3f} (largest)"


def _label_axes(axes: Axes, study: Entries, axis: DepthAxis, errors: str) -> None:
    rows = len(study.checkpoints)
    labels = [style.plain(c.label, LABEL_CHARACTERS) for c in study.checkpoints]
    axes.set_yticks(range(rows), labels, fontsize=_text_points(rows))
    if axis.layers is None:
        axes.set_xticks(np.arange(N_BINS + 1) - 0.5, [f"{edge / N_BINS:.1f}" for edge in range(N_BINS + 1)])
        axes.set_xlabel(f"normalised depth (0 = first layer, 1 = last){errors}")
    else:
        axes.set_xticks(range(axis.layers), [str(layer) for layer in range(axis.layers)])
        axes.set_xlabel(f"layer{errors}")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for _, first, _ in phase_segments(study.checkpoints)[1:]:
        axes.axhline(first - 0.5, color="white", linewidth=2.5, gid="phase")
