"""The picture of a comparison: a run beside a published study, or two runs head by head.

The published picture overlays the curves with the band of tolerance, puts the heatmaps of run, reference and
difference side by side, and the categories as pairs of bars; what differs is outlined in one colour everywhere.
The picture of two runs has a scatter panel per checkpoint and a table of the category changes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from qkscope.compare.judge import DIFFERS, PublishedComparison
from qkscope.compare.references import PLASTICITY, ROTATION
from qkscope.compare.two_runs import HeadComparison, category_moves, reference_values
from qkscope.draw import style
from qkscope.lenses.base import error_name
from qkscope.lenses.categories import CATEGORY_COLOURS
from qkscope.lenses.depth_axis import DEPTH_COLUMNS, N_BINS
from qkscope.lenses.taxonomy import CATEGORIES, UNDEFINED
from qkscope.results.folder import COMPARISON_PNG, COMPARISON_SVG
from qkscope.results.read import Entries, one_line, phase_segments

OUTLINE = "#c026d3"  # what differs; used for nothing else
REFERENCE_INK = "#111827"
DIFFERENCE_LIMIT = 0.1  # colour scale of the differences: ten times the last printed digit
PANELS = 12  # scatter panels at most; more checkpoints are in the table
_CURVES = (
    ("r_q", "mean $r_q$", style.BLUE, "o"),
    ("r_k", "mean $r_k$", style.RED, "s"),
    ("explained_variance", "mean explained variance", style.PURPLE, "D"),
)
_HEATMAPS = (("heatmap_rq", "mean $r_q$", "Blues"), ("heatmap_rk", "mean $r_k$", "Reds"))
_BAR = 0.36
# Means of lenses, on a row of their own where they were compared; quartiles are in the table only.
_OF_LENSES = {
    ROTATION: (
        ("r_k_a_abs", "mean |r| of keys along a", style.RED, "s"),
        ("separation_strength", "mean separation", style.PURPLE, "D"),
        ("plane_var_fraction", "mean share of the plane", style.PURPLE, "o"),
        ("alpha_k_abs", "mean |slope| of keys", style.RED, "s"),
        ("mu_q_a", "mean query along a", style.BLUE, "o"),
        ("bias_strength", "mean bias per token", style.PURPLE, "D"),
    ),
    PLASTICITY: (
        ("ap", "mean plasticity", style.PURPLE, "o"),
        ("ap_first", "mean plasticity, first fifth", style.PURPLE, "s"),
        ("ap_last", "mean plasticity, last fifth", style.PURPLE, "D"),
        ("ap_drop", "mean drop of plasticity", style.PURPLE, "^"),
    ),
}
_COLUMNS = 12  # of the grid: rows have 1, 3, 4 or 6 panels


def draw_published_comparison(
    study: Entries, comparison: PublishedComparison, headline: str, note: str, run: str = "this run"
) -> Figure:
    """Run and publication side by side; `study` has the published checkpoints."""
    cells = comparison.cells
    with matplotlib.rc_context(style.RC):
        rows = len(study.checkpoints)
        tall = max(1.9, 0.24 * rows + 0.6)
        study = replace(study, title=one_line(study.title))
        of_lenses = {what: curves for what, curves in _OF_LENSES.items() if (cells["what"] == what).any()}
        figure = style.new_figure(13.0, 6.9 + 2 * tall + 2.4 * len(of_lenses), study, headline, note)
        names = [[f"{what} {part}" for part in ("value", "reference", "difference")] for what, _, _ in _HEATMAPS]
        layout = [[measure for measure, *_ in _CURVES], *names, ["taxonomy"]]
        layout += [[measure for measure, *_ in curves] for curves in of_lenses.values()]
        wide = [[each for each in row for _ in range(_COLUMNS // len(row))] for row in layout]
        heights = [2.7, tall, tall, 2.9, *(2.1 for _ in of_lenses)]
        axes: dict[str, Axes] = figure.subplot_mosaic(wide, height_ratios=heights)  # type: ignore[arg-type]
        for what, curves in {"trajectory": _CURVES, **of_lenses}.items():
            for measure, label, colour, marker in curves:
                _draw_curve(axes[measure], study, _rows(cells, what, measure, study), label, colour, marker)
                if what in of_lenses:
                    axes[measure].tick_params(labelsize=6.5)
        _print_discordant(axes["r_k"], study, comparison.coverage.set_index("model")["discordant"], run)
        for what, label, colours in _HEATMAPS:
            table = cells[cells["what"] == what]
            panels = [axes[f"{what} {part}"] for part in ("value", "reference", "difference")]
            _draw_heatmaps(panels, study, table, label, colours, run)
        _draw_categories(axes["taxonomy"], study, cells[cells["what"] == "taxonomy"], run)
        key = _published_key(run, errors=bool(cells["error"].notna().any()))
        style.header_legend(figure, key, len(key))
        return style.finish(figure)


def draw_head_comparison(study: Entries, comparison: HeadComparison, headline: str, note: str) -> Figure:
    """One scatter panel per shared checkpoint (at most 12, evenly chosen), and the changes of category."""
    with matplotlib.rc_context(style.RC):
        models = chosen_panels(list(dict.fromkeys(comparison.pairs["model"])))
        columns = min(4, len(models), max(2, math.ceil(math.sqrt(len(models)))))
        rows = math.ceil(len(models) / columns)
        height = max(4.6, 2.55 * rows + 1.1)
        study = replace(study, title=one_line(study.title))
        figure = style.new_figure(2.6 * columns + 5.6, height, study, headline, note)
        grid = figure.add_gridspec(rows, columns + 1, width_ratios=[1.0] * columns + [1.75])
        for i, model in enumerate(models):
            axes = figure.add_subplot(grid[i // columns, i % columns])
            _draw_pairs(axes, study, comparison, model)
            axes.tick_params(labelleft=i % columns == 0, labelbottom=i + columns >= len(models))
        _draw_moves(figure.add_subplot(grid[:, columns]), comparison)
        turned = bool(comparison.pairs.loc[comparison.pairs["model"].isin(models), "turned"].any())
        style.header_legend(figure, _head_key(turned), 3 if turned else 2)
        return style.finish(figure)


def chosen_panels(models: Sequence[str], most: int = PANELS) -> list[str]:
    """At most so many of the checkpoints, first and last among them, evenly spread."""
    if len(models) <= most:
        return list(models)
    return [models[round(i * (len(models) - 1) / (most - 1))] for i in range(most)]


def save_comparison(figure: Figure, folder: Path) -> list[Path]:
    """Write `comparison.png` and `comparison.svg`; the same figure gives the same bytes."""
    return style.save_as(figure, folder / COMPARISON_PNG, folder / COMPARISON_SVG)


# --- a published study ------------------------------------------------------------------------------


def _rows(cells: pd.DataFrame, what: str, cell: str, study: Entries) -> pd.DataFrame:
    """The rows of one number over the checkpoints, in order."""
    chosen = cells[(cells["what"] == what) & (cells["cell"] == cell)].set_index("model")
    return chosen.reindex(list(study.names))


def _published_key(run: str, errors: bool) -> list[Artist]:
    bars = Line2D(
        [], [], color=style.BLUE, marker="|", markersize=9, linestyle="none", label="one standard error over documents"
    )
    return [
        Line2D([], [], color=style.BLUE, marker="o", markersize=5, label=run),
        *([bars] if errors else []),
        Line2D([], [], color=REFERENCE_INK, linestyle=(0, (3, 2)), marker="_", markersize=7, label="published"),
        Patch(facecolor=style.FAINT, label="tolerance"),
        Patch(facecolor="none", edgecolor=OUTLINE, linewidth=1.8, label="differs"),
    ]


def _draw_curve(axes: Axes, study: Entries, rows: pd.DataFrame, label: str, colour: str, marker: str) -> None:
    x = np.arange(len(rows))
    reference, allowed = rows["reference"].to_numpy(), rows["tolerance"].to_numpy()
    axes.fill_between(x, reference - allowed, reference + allowed, color=style.FAINT, linewidth=0, gid="tolerance")
    axes.plot(
        x, reference, color=REFERENCE_INK, linestyle=(0, (3, 2)), linewidth=1.1, marker="_", markersize=8, zorder=4,
        gid="reference",
    )  # fmt: skip
    axes.plot(x, rows["value"], color=colour, marker=marker, markersize=4.5, linewidth=1.5, zorder=3, gid="value")
    if rows["error"].notna().any():
        reach = rows["error"].to_numpy(dtype=float)
        axes.errorbar(x, rows["value"], reach, fmt="none", ecolor=colour, elinewidth=1.0, capsize=2.0, gid="error")
    off = (rows["verdict"] == DIFFERS).to_numpy()
    axes.scatter(
        x[off], rows["value"].to_numpy()[off], s=110, facecolor="none", edgecolor=OUTLINE, linewidth=1.8, zorder=5,
        gid="differs",
    )  # fmt: skip
    axes.set_title(label, fontsize=9.5, loc="left")
    style.checkpoint_axis(axes, study, phase_names=False)


def _print_discordant(axes: Axes, study: Entries, shares: "pd.Series[float]", run: str) -> None:
    """Under the mean of r_k, the share of the run's heads that the mean cancels."""
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.16 * (high - low), high)
    text: dict[str, Any] = {"fontsize": 6.5, "color": style.AMBER, "transform": axes.get_xaxis_transform()}
    for x, share in enumerate(shares.reindex(list(study.names))):
        if not math.isnan(share):
            axes.text(x, 0.015, f"{100 * share:.0f}%", ha="center", va="bottom", gid="discordant", **text)
    axes.text(-0.5, 0.075, f"{run}: heads with $r_k$ < −0.3", ha="left", va="bottom", **text)


def _draw_heatmaps(
    panels: Sequence[Axes], study: Entries, table: pd.DataFrame, label: str, colours: str, run: str
) -> None:
    """Run, publication and difference of one measure; the first two share a colour scale, from 0 to 1."""
    places = pd.MultiIndex.from_product([study.names, DEPTH_COLUMNS], names=["model", "cell"])
    cells = table.set_index(["model", "cell"]).reindex(places)
    shape = (len(study.checkpoints), N_BINS)
    verdicts = cells["verdict"].to_numpy().reshape(shape)
    kinds = (
        ("value", f"{label}: {run}", colours, (0.0, 1.0), _two_decimals),
        ("reference", f"{label}: published", colours, (0.0, 1.0), _two_decimals),
        ("difference", f"{label}: difference × 1000", "PuOr_r", (-DIFFERENCE_LIMIT, DIFFERENCE_LIMIT), _thousandths),
    )
    for axes, (column, title, name, (low, high), spell) in zip(panels, kinds, strict=True):
        values = cells[column].to_numpy(dtype=float).reshape(shape)
        colourmap = matplotlib.colormaps[name].with_extremes(bad=(1.0, 1.0, 1.0, 0.0))
        image = axes.imshow(
            values, cmap=colourmap, vmin=low, vmax=high, aspect="auto", interpolation="nearest", gid=column
        )
        _print_cells(axes, values, image.to_rgba(np.nan_to_num(values)), spell)
        if column != "reference":
            _outline(axes, verdicts)
        axes.set_title(title, fontsize=9.5, loc="left")
        _label_heatmap(axes, study, names=column == "value")


def _two_decimals(value: float) -> str:
    return style.signed(value)


def _thousandths(value: float) -> str:
    whole = round(1000 * value)
    return f"{whole:+d}".replace("-", "−") if whole else "0"


def _print_cells(axes: Axes, values: np.ndarray, colours: np.ndarray, spell: Callable[[float], str]) -> None:
    size = 6.5 if len(values) <= 14 else 5.0
    for row, column in np.ndindex(values.shape):
        value = float(values[row, column])
        if math.isnan(value):
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="#f3f4f6", edgecolor=style.FAINT, hatch="///",
                          linewidth=0, gid="missing")
            )  # fmt: skip
            continue
        red, green, blue = (float(part) for part in colours[row, column][:3])
        axes.text(
            column, row, spell(value), ha="center", va="center", fontsize=size,
            color=style.readable_on((red, green, blue)), gid="cell", in_layout=False,
        )  # fmt: skip


def _outline(axes: Axes, verdicts: np.ndarray) -> None:
    for row, column in np.argwhere(verdicts == DIFFERS):
        axes.add_patch(
            Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, facecolor="none", edgecolor=OUTLINE, linewidth=1.8,
                      zorder=4, gid="differs")
        )  # fmt: skip


def _label_heatmap(axes: Axes, study: Entries, names: bool) -> None:
    labels = [style.plain(c.label, 16) for c in study.checkpoints] if names else []
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_xticks(np.arange(0, N_BINS + 1, 2) - 0.5, [f"{edge / N_BINS:.1f}" for edge in range(0, N_BINS + 1, 2)])
    axes.set_xlabel("normalised depth", fontsize=8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for _, first, _ in phase_segments(study.checkpoints)[1:]:
        axes.axhline(first - 0.5, color="white", linewidth=2.0)


def _draw_categories(axes: Axes, study: Entries, table: pd.DataFrame, run: str) -> None:
    """Two stacked bars per checkpoint: the run at the left, the publication (paler) at the right."""
    x = np.arange(len(study.checkpoints))
    shown = [c for c in CATEGORIES if c != UNDEFINED or (table.loc[table["cell"] == c, "value"] > 0).any()]
    for column, offset, alpha in (("value", -_BAR / 2 - 0.015, 1.0), ("reference", _BAR / 2 + 0.015, 0.5)):
        bottom = np.zeros(len(x))
        for category in shown:
            rows = _rows(table, "taxonomy", category, study)
            heights = rows[column].to_numpy(dtype=float)
            bars = axes.bar(
                x + offset, np.nan_to_num(heights), _BAR, bottom=bottom, color=CATEGORY_COLOURS[category],
                alpha=alpha, edgecolor="white", linewidth=0.4, label=category if column == "value" else None,
                gid=f"{category} {column}", zorder=2,
            )  # fmt: skip
            _mark_bars(axes, list(bars), heights, rows["verdict"].to_numpy(), column)
            bottom += np.nan_to_num(heights)
    for place, name in enumerate(study.names):
        if bool((table.loc[table["model"] == name, "value"].isna()).all()):
            axes.text(
                place - _BAR / 2, 6, "missing", rotation=90, ha="center", va="bottom", fontsize=7, color=style.GREY,
                gid="missing",
            )  # fmt: skip
    axes.set_title(
        f"heads per category: {run} (left bar) and published (right, paler)", fontsize=9.5, loc="left", pad=14
    )
    axes.set_ylabel("heads")
    style.checkpoint_axis(axes, study)
    keys = [Patch(facecolor=CATEGORY_COLOURS[c], edgecolor=style.GREY, linewidth=0.4, label=c) for c in shown]
    axes.legend(
        handles=keys, loc="lower right", bbox_to_anchor=(1.0, 1.085), ncols=len(keys), borderaxespad=0.0, borderpad=0.1,
        handlelength=1.4, columnspacing=1.4,
    )  # fmt: skip


def _mark_bars(axes: Axes, bars: Sequence[Rectangle], heights: np.ndarray, verdicts: np.ndarray, column: str) -> None:
    """Print the numbers that have room, and outline what differs."""
    for bar, height, verdict in zip(bars, heights, verdicts, strict=True):
        left, low = bar.get_xy()
        if verdict == DIFFERS and column == "value":
            axes.add_patch(
                Rectangle((left, low), bar.get_width(), max(bar.get_height(), 1.0), facecolor="none",
                          edgecolor=OUTLINE, linewidth=1.8, zorder=4, gid="differs")
            )  # fmt: skip
        if height >= 14:
            axes.text(
                left + bar.get_width() / 2, low + height / 2, f"{height:.0f}", ha="center", va="center", fontsize=6.5,
                color=style.INK, gid="heads", zorder=3,
            )  # fmt: skip


# --- two runs ---------------------------------------------------------------------------------------


def _head_key(turned: bool) -> list[Artist]:
    hollow = Line2D(
        [], [], color=style.GREY, marker="o", markersize=5, markerfacecolor="none", linestyle="",
        label="sign not known: reference turned round",
    )  # fmt: skip
    return [
        Line2D([], [], color=style.BLUE, marker="o", markersize=5, linestyle="", label="$r_q$"),
        Line2D([], [], color=style.RED, marker="s", markersize=4.5, linestyle="", label="$r_k$"),
        *([hollow] if turned else []),
    ]


def _draw_pairs(axes: Axes, study: Entries, comparison: HeadComparison, model: str) -> None:
    rows = comparison.pairs[comparison.pairs["model"] == model]
    axes.plot([-1, 1], [-1, 1], color=style.LINE, linewidth=0.9, zorder=1, gid="equal")
    for measure, colour, marker in (("r_k", style.RED, "s"), ("r_q", style.BLUE, "o")):
        turned, reference = rows["turned"].to_numpy(dtype=bool), reference_values(rows, measure)
        axes.scatter(
            reference[~turned], rows[measure][~turned], s=11, marker=marker, facecolor=colour, edgecolor="white",
            linewidth=0.25, alpha=0.7, zorder=3, gid=measure, clip_on=False,
        )  # fmt: skip
        axes.scatter(
            reference[turned], rows[measure][turned], s=11, marker=marker, facecolor="none", edgecolor=colour,
            linewidth=0.8, zorder=3, gid=f"{measure} turned", clip_on=False,
        )  # fmt: skip
        if rows[error_name(measure)].notna().any():
            _draw_pair_errors(axes, rows, measure, reference, colour)
    axes.set_xlim(-1.05, 1.05)
    axes.set_ylim(-1.05, 1.05)
    axes.set_xticks([-1, 0, 1])
    axes.set_yticks([-1, 0, 1])
    axes.set_box_aspect(1.0)
    axes.set_title(style.plain(study.labels.get(model, model), 24), fontsize=8.5, loc="left")
    worst = comparison.agreement[comparison.agreement["model"] == model].set_index("measure")["max"]
    changed = int((comparison.changed["model"] == model).sum())
    facts = f"max |Δ$r_q$| {_size(worst['r_q'])}\nmax |Δ$r_k$| {_size(worst['r_k'])}\n{changed} of {len(rows)} changed"
    axes.text(0.97, 0.04, facts, transform=axes.transAxes, ha="right", va="bottom", fontsize=6.5, color=style.GREY,
              gid="facts")  # fmt: skip
    axes.set_xlabel("reference", fontsize=7.5)
    axes.set_ylabel("this run", fontsize=7.5)


def _draw_pair_errors(axes: Axes, rows: pd.DataFrame, measure: str, reference: np.ndarray, colour: str) -> None:
    """± 1 standard error over documents of both sides, faint: hundreds of heads overlap."""
    axes.errorbar(
        reference, rows[measure], xerr=rows[f"reference_{error_name(measure)}"], yerr=rows[error_name(measure)],
        fmt="none", ecolor=colour, elinewidth=0.6, alpha=0.35, zorder=2,
    )  # fmt: skip


def _size(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.3f}" if value >= 0.0005 or value == 0 else f"{value:.0e}".replace("-", "−")


def _draw_moves(axes: Axes, comparison: HeadComparison) -> None:
    """Categories in the reference (rows) and in this run (columns); off the diagonal is a change."""
    moves = category_moves(comparison.pairs)
    shown = [c for c in CATEGORIES if c != UNDEFINED or moves.loc[c].sum() + moves[c].sum() > 0]
    numbers = moves.loc[shown, shown].to_numpy()
    changes = np.where(np.eye(len(shown), dtype=bool), 0, numbers)
    most = max(1, int(changes.max()))
    image = axes.imshow(changes, cmap="RdPu", vmin=0, vmax=1.4 * most, interpolation="nearest", gid="moves")
    colours = image.to_rgba(changes)
    for row, column in np.ndindex(numbers.shape):
        if numbers[row, column]:
            red, green, blue = (float(part) for part in colours[row, column][:3])
            axes.text(
                column, row, f"{numbers[row, column]:,}", ha="center", va="center", fontsize=7.5, gid="moved",
                color=style.GREY if row == column else style.readable_on((red, green, blue)),
                fontweight="normal" if row == column else "bold",
            )  # fmt: skip
    _frame_moves(axes, shown, len(comparison.changed), len(comparison.pairs))


def _frame_moves(axes: Axes, shown: Sequence[str], changed: int, heads: int) -> None:
    axes.set_xticks(range(len(shown)), list(shown), rotation=40, ha="right", rotation_mode="anchor", fontsize=7.5)
    axes.set_yticks(range(len(shown)), list(shown), fontsize=7.5)
    axes.set_xlabel("category in this run", fontsize=8)
    axes.set_ylabel("category in the reference", fontsize=8)
    axes.tick_params(length=0)
    axes.set_title(f"{changed:,} of {heads:,} heads changed category", fontsize=9, loc="left")
    for spine in axes.spines.values():
        spine.set_visible(False)
    for edge in np.arange(len(shown) + 1) - 0.5:
        axes.axhline(edge, color=style.FAINT, linewidth=0.6)
        axes.axvline(edge, color=style.FAINT, linewidth=0.6)
