"""Figures across models: what each component is for, how much it explains, and every head by family."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qkscope.draw import style
from qkscope.lenses.across_models.table import EVERY_MODEL, ROLES, at_component, family_of
from qkscope.lenses.canvas import canvas
from qkscope.lenses.categories import HIGH, LOW
from qkscope.lenses.views import WindowView
from qkscope.results.entries import Entry

COLUMNS = 4  # panels beside each other
MOST_PANELS = 16
BAR = 0.38
# Families differ in hue and lightness; none looks like the blue of queries or the red of keys.
FAMILY_COLOURS = ("#8b5cf6", "#b45309", "#0f766e", "#6b7280", "#be185d", "#4d7c0f", "#1f2937", "#a16207")
MARKERS = "osD^vPX*<>"


def family_colours(entries: tuple[Entry, ...]) -> dict[str, str]:
    """A colour for each family."""
    families = list(dict.fromkeys(family_of(entry) for entry in entries))
    return {name: FAMILY_COLOURS[i % len(FAMILY_COLOURS)] for i, name in enumerate(families)}


def draw_roles(at: WindowView) -> Figure:
    """Mean r_q and r_k of each component: a panel per model, and one over all heads."""
    shown = list(at.study.checkpoints[:MOST_PANELS])
    panels = [
        *((entry.label, entry.name) for entry in shown),
        *([("all heads", EVERY_MODEL)] if len(shown) > 1 else []),
    ]
    figure, axes = _grid(at, len(panels), "Which Components Follow Position", 2.1)
    for place, (title, name) in zip(axes, panels, strict=False):
        _draw_role(place, at, name)
        place.set_title(style.plain(title), fontsize=9, loc="left")
    keys: list[Artist] = [
        Patch(facecolor=style.BLUE, label="mean $r_q$"),
        Patch(facecolor=style.RED, label="mean $r_k$"),
    ]
    keys.append(Line2D([], [], color=style.INK, marker="_", linestyle="none", markersize=8, label="mean size |r|"))
    style.header_legend(figure, keys, 3)
    return style.finish(figure)


def _draw_role(axes: Axes, at: WindowView, name: str) -> None:
    table = at.table(ROLES)
    components = at_component(table, name, "pc")
    for kind, colour, side in (("q", style.BLUE, -0.5), ("k", style.RED, 0.5)):
        x = components + BAR * side
        axes.bar(x, at_component(table, name, f"r_{kind}"), BAR, color=colour, gid=f"r_{kind}")
        sizes = at_component(table, name, f"r_{kind}_abs")
        axes.plot(x, sizes, color=style.INK, marker="_", linestyle="none", markersize=6, gid=f"size {kind}")
    axes.axhline(0, color=style.LINE, linewidth=0.8)
    axes.set_ylim(min(-0.12, 1.1 * float(np.nanmin([table["r_k"].min(), 0.0]))), 1.02)  # the same in every panel
    axes.set_xticks(components, [f"{int(c)}" for c in components])
    axes.set_xlabel("component", fontsize=7.5)


def draw_explained(at: WindowView) -> Figure:
    """Mean share of variance of each component, a line per model, coloured by family."""
    table, colours = at.table(ROLES), family_colours(at.study.checkpoints)
    figure = canvas(at, 8.2, 4.6, f"Explained Variance by Component {style.span_title(at.study)}")
    axes = figure.subplots()
    seen: dict[str, int] = {}
    for entry in at.study.checkpoints:
        family = family_of(entry)
        marker = MARKERS[seen.setdefault(family, 0) % len(MARKERS)]
        seen[family] += 1
        shares = 100 * at_component(table, entry.name, "explained_variance")
        x = at_component(table, entry.name, "pc")
        label = style.plain(entry.label)
        axes.plot(
            x, shares, color=colours[family], marker=marker, markersize=4.5, linewidth=1.2, label=label, gid="model"
        )
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    axes.set_xticks(range(int(table["pc"].max()) + 1))
    axes.set_xlabel("component")
    axes.set_ylabel("mean share of variance (%)")
    axes.legend(fontsize=7, ncols=1 + len(at.study.checkpoints) // 12)
    return style.finish(figure)


def draw_families(at: WindowView) -> Figure:
    """Every head on PC0, r_q against r_k: a panel per family, models told apart by their marks."""
    colours = family_colours(at.study.checkpoints)
    figure, axes = _grid(at, len(colours), "Every Head by Family (PC0)", 2.9)
    for place, (family, colour) in zip(axes, colours.items(), strict=False):
        members = [entry for entry in at.study.checkpoints if family_of(entry) == family]
        for i, entry in enumerate(members):
            mine = at.heads[at.heads["model"] == entry.name]
            place.scatter(
                mine["r_q"], mine["r_k"], s=9, color=colour, alpha=0.55, marker=MARKERS[i % len(MARKERS)], linewidth=0,
                label=style.plain(entry.label, 20), gid="heads",
            )  # fmt: skip
        for line in (-HIGH, -LOW, LOW, HIGH):
            place.axhline(line, color=style.FAINT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0.5)
        for line in (LOW, HIGH):
            place.axvline(line, color=style.FAINT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0.5)
        place.set_xlim(-0.05, 1.05)
        place.set_ylim(-1.05, 1.05)
        place.set_xlabel("$r_q$")
        place.set_title(style.plain(family or "family not known"), fontsize=9, loc="left", color=colour)
        place.legend(fontsize=6.5, loc="lower left")
    axes[0].set_ylabel("$r_k$")
    return style.finish(figure)


def _grid(at: WindowView, panels: int, headline: str, height: float) -> tuple[Figure, list[Axes]]:
    columns = min(COLUMNS, panels)
    rows = math.ceil(panels / columns)
    figure = canvas(at, max(6.4, 3.0 * columns), height * rows + 1.0, f"{headline} {style.span_title(at.study)}")
    grid = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    for spare in grid[panels:]:
        spare.set_visible(False)
    return figure, list(grid[:panels])
