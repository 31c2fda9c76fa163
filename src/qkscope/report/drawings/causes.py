"""Effects: each change of r as a waterfall of its causes, and the loss after edits of single heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from qkscope.draw import style
from qkscope.draw.curves import draw_errors, error_keys
from qkscope.draw.palette import CAUSE_COLOURS
from qkscope.lenses.ablation import NAME, STRENGTHS, last_measured, rank_correlation, shown_edit
from qkscope.lenses.kind_of_layer import KindMark, kind_marks, kinds_in_order
from qkscope.lenses.rope.split import EVERY, R_K, R_Q
from qkscope.lenses.rope.steps import (
    JOINT_WORDS,
    WORDS,
    Steps,
    causes_of,
    consecutive,
    drawn_steps,
    split_rows,
    whole_way,
)
from qkscope.lenses.views import Results
from qkscope.report.charts import layout
from qkscope.results.entries import Entries
from qkscope.words.phrases import plus_minus, signed

LOOKS = {
    "window": (CAUSE_COLOURS["window"], ""),
    "base": (CAUSE_COLOURS["base"], "////"),
    "weights": (CAUSE_COLOURS["weights"], ""),
    "joint": (CAUSE_COLOURS["window"], "////"),
    "joint_weights": (CAUSE_COLOURS["weights"], ""),
    "unexplained": (CAUSE_COLOURS["unexplained"], "...."),
}
ROWS = ((R_Q, style.BLUE, "mean $r_q$"), (R_K, style.RED, "mean $r_k$"))
GAP = 0.6  # between steps that do not follow each other
NAMED = 3  # heads whose edit costs most
TEXT_LINE = 0.045  # of the height of the axes
AGAINST = "r_q"


def draw_causes(tables: Results) -> Figure:
    """Each step of a run at equal context length, in floating bars; at the right, from the first to the last."""
    at = tables.own if tables.common is None else tables.common
    study, table = at.study, split_rows(at)
    steps, whole = consecutive(table, study), whole_way(table, study)
    heads_of = "" if set(table["heads_of"]) == {EVERY} else " (Rotary Heads)"
    shown = drawn_steps(steps)
    width = min(12.5, 3.6 + 0.95 * len(shown) + (2.6 if whole is not None else 0.0))
    title = f"Causes of Change at Equal Context Length{heads_of}"
    figure = layout.canvas(tables, max(width, 6.6), 6.4, title, span=False, equal=True)
    ratios = [max(len(shown), 2.5), 3.0] if whole is not None else [1.0]
    panels = figure.subplots(2, len(ratios), width_ratios=ratios, squeeze=False, sharey="row")
    causes: set[str] = set()
    for row, (quantity, colour, title) in zip(panels, ROWS, strict=True):
        causes |= _draw_steps(row[0], _places(shown, quantity, steps), colour)
        row[0].set_ylabel(title)
        if whole is not None:
            causes |= _draw_whole(row[1], whole[quantity], study, colour)
            row[1].tick_params(axis="y", length=0)
        low, high = row[0].get_ylim()
        row[0].set_ylim(low, high + 0.16 * (high - low))  # room for the numbers
    if whole is not None:
        panels[0][1].set_title("from the first to the last", fontsize=8.5, color=style.GREY)
        panels[0][1].set_xticklabels([])
    _axis(panels[-1][0], panels[0][0], shown, steps, study)
    known = bool(table["change_se"].notna().any())
    words = {LOOKS[part]: (WORDS | JOINT_WORDS)[part] for part in LOOKS if part in causes}
    keys = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=style.INK, linewidth=0.6, label=text)
        for (colour, hatch), text in words.items()
    ]
    style.header_legend(figure, [*keys, *error_keys(known)], 5 if width > 9 else 3)
    return style.finish(figure)


def _places(shown: Sequence[int], quantity: str, steps: Steps) -> list[tuple[float, pd.Series]]:
    """Where each step begins on the axis, and its row."""
    places, x = [], 0.0
    for number, step in enumerate(shown):
        if number:
            x += 1.0 if shown[number - 1] == step - 1 else 1.0 + GAP
        places.append((x, steps[step][quantity]))
    return places


def _draw_steps(axes: Axes, places: Sequence[tuple[float, pd.Series]], colour: str) -> set[str]:
    """Draw each step; returns the causes to which changes are attributed."""
    drawn: set[str] = set()
    for start, row in places:
        parts = [part for part in causes_of(row) if row[part] != 0.0]
        drawn |= set(causes_of(row))
        width = 0.72 / max(len(parts), 2)
        level = float(row["before"])
        for number, part in enumerate(parts):
            x = start + 0.5 + (number - (len(parts) - 1) / 2) * width
            level = _bar(axes, x, level, row, part, 0.92 * width)
        ends = [start, start + 1.0]
        axes.plot(ends, [row["before"], row["after"]], "o", color=colour, markersize=6, zorder=5, gid="measured")
    axes.axhline(0.0, color=style.GREY, linewidth=0.8)
    axes.margins(y=0.12)
    return drawn


def _bar(axes: Axes, x: float, level: float, row: pd.Series, part: str, width: float) -> float:
    """A floating bar from the level so far to the next one, with its error; returns the next level."""
    colour, hatch = LOOKS[part]
    value = float(row[part])
    axes.bar(x, value, width, bottom=level, color=colour, hatch=hatch, edgecolor=style.INK, linewidth=0.6, zorder=3,
             gid=part)  # fmt: skip
    axes.plot([x - 0.8 * width, x + 0.8 * width], [level, level], color=style.LINE, linewidth=0.8, zorder=2)
    draw_errors(axes, [x], [level + value], [row.get(f"{part}_se", np.nan)], gid=part)
    return level + value


def _draw_whole(axes: Axes, row: pd.Series, study: Entries, colour: str) -> set[str]:
    """From the first checkpoint to the last, with the numbers at the bars; returns the causes."""
    level, causes = float(row["before"]), causes_of(row)
    for number, part in enumerate(causes):
        before = level
        level = _bar(axes, number + 1.0, level, row, part, 0.8)
        error = row.get(f"{part}_se", np.nan)
        stated = plus_minus(row[part], error, signed=True) if np.isfinite(error) else signed(row[part])
        text = stated.replace(" ±", "\n±") if row[part] else "0"
        axes.annotate(text, (number + 1.0, max(before, level)), (0, 4), textcoords="offset points", ha="center",
                      va="bottom", fontsize=7.5, gid=f"{part} value")  # fmt: skip
    last = len(causes) + 1.0
    axes.plot([0.0, last], [row["before"], row["after"]], "o", color=colour, markersize=6, zorder=5, gid="measured")
    axes.set_xlim(-0.6, last + 0.6)
    axes.set_xticks([0.0, last], [style.plain(study.labels[str(row[end])]) for end in ("from_model", "to_model")],
                    rotation=45, ha="right", rotation_mode="anchor")  # fmt: skip
    axes.axhline(0.0, color=style.GREY, linewidth=0.8)
    return set(causes)


def _axis(bottom: Axes, top: Axes, shown: Sequence[int], steps: Steps, study: Entries) -> None:
    """Checkpoints below their dots; dashed lines between phases where no step is left out."""
    if len(shown) == len(study.names) - 1:
        style.checkpoint_axis(bottom, study, phase_names=False)
        style.checkpoint_axis(top, study, labels=False)
        for axes in (bottom, top):
            axes.set_xlim(-0.5, len(shown) + 0.5)
        return
    ticks: dict[float, str] = {}
    for start, row in _places(shown, R_Q, steps):
        for x, end in ((start, "from_model"), (start + 1.0, "to_model")):
            ticks[x] = style.plain(study.labels[str(row[end])])
    bottom.set_xticks(list(ticks), list(ticks.values()), rotation=45, ha="right", rotation_mode="anchor")
    top.set_xticks(list(ticks), [""] * len(ticks))


# --- loss -------------------------------------------------------------------------------------------


def draw_loss(tables: Results) -> Figure:
    """A dot per head of the last ablated checkpoint: loss increase after the edit against |r_q|."""
    at = tables.own
    edit, model = shown_edit(at), last_measured(at)
    heads = at.of_entry(model)
    heads = heads[heads[f"loss_{edit}"].notna() & heads[AGAINST].notna()]
    title = f"Loss Without Positional Information ({style.plain(at.study.labels[model])})"
    figure = layout.canvas(tables, 6.8, 4.4, title, span=False, models=[model])
    axes = figure.subplots()
    axes.axhline(0.0, color=style.GREY, linewidth=0.8)
    _draw_heads(axes, heads, f"loss_{edit}")
    ranks = at.table(NAME)
    row = ranks[(ranks["model"] == model) & (ranks["edit"] == edit) & (ranks["strength"] == AGAINST)]
    if len(row):
        note = f"rank correlation {rank_correlation(row.iloc[0])}"
        axes.text(0.02, 0.97, note, transform=axes.transAxes, va="top", fontsize=8, gid="note")
    axes.set_xlabel(layout.in_math(STRENGTHS[AGAINST]))
    axes.set_ylabel("loss increase (nats per token)")
    known = bool(heads[f"loss_{edit}_se"].notna().any())
    axes.legend(handles=[*axes.get_legend_handles_labels()[0], *error_keys(known)], loc="center left", fontsize=7.5)
    return style.finish(figure)


def _draw_heads(axes: Axes, heads: pd.DataFrame, loss: str) -> None:
    kinds = kinds_in_order(heads["layer_kind"])
    alone = {kind: KindMark(style.BLUE, "o") for kind in set(heads["layer_kind"])}
    marks = kind_marks(kinds) if len(kinds) > 1 else alone
    for kind, mark in marks.items():
        rows = heads[heads["layer_kind"] == kind]
        axes.errorbar(
            rows[AGAINST].abs(), rows[loss], yerr=rows[f"{loss}_se"], fmt=mark.marker, color=mark.colour,
            ecolor=style.INK, markersize=4, elinewidth=0.7, alpha=0.8, label=f"{style.plain(kind) or 'all'} heads",
            gid=kind,
        )  # fmt: skip
    low, high = axes.get_ylim()
    room = TEXT_LINE * (high - low)
    lowest = {"left": high, "right": high}  # of the labels on either side of their dots
    for number, head in enumerate(heads.nlargest(NAMED, loss).to_dict("records")):
        side = "right" if number % 2 else "left"  # heads that cost nearly the same have labels on different sides
        lowest[side] = min(lowest[side] - room, float(head[loss]))
        axes.annotate(
            f"L{head['layer']:.0f} H{head['head']:.0f}", (abs(head[AGAINST]), lowest[side]),
            (6 if side == "left" else -6, 0), textcoords="offset points", ha=side, va="center", fontsize=7.5,
            gid="named", zorder=6, bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 0.5},
        )  # fmt: skip
