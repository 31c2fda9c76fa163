"""The five figures of docs/findings.md, from the same tables as its text."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import numpy as np
from findings_numbers import Place, Tables
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from study_tables import SHARES

from qkscope.draw.style import AMBER, BLUE, FAINT, GREY, INK, PURPLE, RC, RED
from qkscope.stats.significance import critical_value

COLORS = {"speeches": BLUE, "code": RED, "novel": AMBER}
MARKERS = {"speeches": "o", "code": "s", "novel": "^"}
COMPONENTS = {"position": BLUE, "query-position": PURPLE, "preference": AMBER, "query": GREY}
INCHES = 7.2
STORIES = "stories15m"


def draw(tables: Tables, folder: Path) -> None:
    """All figures as PNG files."""
    figures = {
        "windows": windows, "prediction": prediction, "components": components, "ablation": ablation, "texts": texts,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(RC):
        for name, make in figures.items():
            figure = make(tables)
            figure.savefig(folder / f"findings_{name}.png", dpi=150, metadata={"Software": None})


def new(height: float) -> Figure:
    return Figure(figsize=(INCHES, height), layout="constrained")


def legend(figure: Figure, tables: Tables, *more: Line2D) -> None:
    """Corpora, and what else there is, above the axes."""
    style = {"linestyle": "none", "markersize": 5}
    handles = [Line2D([], [], color=COLORS[each], marker=MARKERS[each], label=each, **style) for each in tables.corpora]
    figure.legend(handles=[*handles, *more], loc="outside upper center", ncols=len(handles) + len(more))


def windows(tables: Tables) -> Figure:
    """Mean r by window: a panel for each model and layer type."""
    figure, names = new(3.9), {}
    for part in ("main", "long"):
        for place in tables.places(part, by_kind=True):
            names.setdefault(place.name, []).append(place)
    axes = figure.subplots(2, len(names), sharex="col", sharey="row", squeeze=False)
    for column, (name, places) in enumerate(names.items()):
        for row, measure in enumerate(("r_q", "r_k")):
            ax = axes[row, column]
            for place in places:
                rows = tables.rows("means", place)
                found = sorted({int(w) for w in rows.loc[rows["measure"] == measure, "window"]})
                numbers = [(w, tables.mean(measure, place, w)) for w in found if w >= 64]
                known = [(w, n.value, n.documents.size) for w, n in numbers if np.isfinite(n.documents.size)]
                if not known:
                    continue
                x, y, error = np.array(known).T
                color, is_main = COLORS[place.corpus], place.part == "main"
                style = {"linestyle": "-" if is_main else "--", "markerfacecolor": color if is_main else "white"}
                style |= {"marker": MARKERS[place.corpus], "markersize": 4, "linewidth": 1.2}
                ax.errorbar(x, y, error, color=color, **style)
            ax.set_xscale("log", base=2)
            ax.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
            if row == 0:
                ax.set_title(short(name), fontsize=9)
            else:
                ax.set_xlabel("window (tokens)", fontsize=8)
                low, high = ax.get_xlim()
                ticks = [tick for tick in (64, 256, 2048, 8192) if low <= tick <= high]
                ax.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
            if column == 0:
                ax.set_ylabel(f"mean ${measure[0]}_{measure[2]}$")
    parts = {"main": "-", "long": "--"} if len(tables.table("entries", "long")) else {}
    legend(figure, tables, *(Line2D([], [], color=INK, linestyle=line, label=part) for part, line in parts.items()))
    return figure


def short(name: str) -> str:
    """A model's name on two lines at most."""
    return (
        name.replace("-Instruct", "").replace(" (", "\n(").replace("-Coder", "\nCoder").replace("SmolLM2-", "SmolLM2\n")
    )


def prediction(tables: Tables) -> Figure:
    """Measured against predicted r of each head."""
    models = tables.models()
    figure = new(4.2)
    axes = figure.subplots(2, len(models), sharex="row", sharey="row", squeeze=False)
    for column, (model, label) in enumerate(models.items()):
        for row, measure in enumerate(("r_q", "r_k")):
            ax = axes[row, column]
            ax.plot([-1, 1], [-1, 1], color=FAINT, linewidth=1)
            for corpus in tables.corpora:
                heads = tables.rows("heads", Place("main", corpus, model, label))
                ax.scatter(heads[f"{measure}_rope"], heads[measure], s=5, alpha=0.5, linewidths=0, color=COLORS[corpus],
                           marker=MARKERS[corpus])  # fmt: skip
            low = -0.15 if measure == "r_q" else -1.05
            ax.set(xlim=(low, 1.05), ylim=(low, 1.05))
            if row == 0:
                ax.set_title(short(label), fontsize=9)
            ax.set_xlabel(f"predicted ${measure[0]}_{measure[2]}$", fontsize=8)
            if column == 0:
                ax.set_ylabel(f"measured ${measure[0]}_{measure[2]}$")
    legend(figure, tables)
    return figure


def components(tables: Tables) -> Figure:
    """Stacked shares of the variance of scores, at both bucket widths."""
    models = tables.models()
    figure = new(3.3)
    axes = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for ax, (model, label) in zip(axes, models.items(), strict=True):
        for x, corpus in enumerate(tables.corpora):
            for side, prefix in enumerate(("", "line_")):
                below = 0.0
                for share, (name, color) in zip(SHARES, COMPONENTS.items(), strict=True):
                    number = tables.mean(f"{prefix}{share}", Place("main", corpus, model, label))
                    ax.bar(x + (side - 0.5) * 0.42, number.value, 0.38, bottom=below, color=color, label=name,
                           hatch="////" if side else None, edgecolor="white", linewidth=0.5)  # fmt: skip
                    below += number.value
        ax.set_title(short(label), fontsize=9)
        ax.set_xticks(range(len(tables.corpora)), tables.corpora)
        ax.tick_params(axis="x", length=0)
    axes[0].set_ylabel("share of the variance of scores")
    handles = [Patch(color=color, label=name) for name, color in COMPONENTS.items()]
    handles += [Patch(facecolor=FAINT, label="16 buckets"),
                Patch(facecolor=FAINT, hatch="////", edgecolor="white", label="one bucket")]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def ablation(tables: Tables) -> Figure:
    """Loss increase beyond that of controls, with 95% intervals."""
    rows = tables.table("ablation", "main")
    models = {name: label for name, label in tables.models().items() if name in set(rows["model"])}
    edits = list(dict.fromkeys(rows["edit"])) if len(rows) else []
    figure = new(2.6)
    axes = figure.subplots(1, max(len(edits), 1), sharey=True, squeeze=False)[0]
    for ax, edit in zip(axes, edits, strict=False):
        ax.axvline(0, color=GREY, linewidth=0.8)
        for y, model in enumerate(models):
            for i, corpus in enumerate(tables.corpora):
                found = rows[(rows["model"] == model) & (rows["corpus"] == corpus) & (rows["edit"] == edit)]
                for _, row in found.iterrows():
                    solid = row["low"] > 0 or row["high"] < 0
                    ax.errorbar(row["excess"], y + (i - 1) * 0.22, color=COLORS[corpus], marker=MARKERS[corpus],
                                xerr=[[row["excess"] - row["low"]], [row["high"] - row["excess"]]], markersize=5,
                                markerfacecolor=COLORS[corpus] if solid else "white", linewidth=1.2)  # fmt: skip
        ax.set_xscale("symlog", linthresh=0.1)
        ticks = [-1, -0.1, 0, 0.1, 1]
        ax.set_xticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
        ax.set_title({"kernel": "without the mean score at each distance", "zero": "without the heads"}.get(edit, edit),
                     fontsize=9)  # fmt: skip
        ax.set_xlabel("loss increase minus controls' (nats per token)", fontsize=8)
    axes[0].set_yticks(range(len(models)), [label.replace("-Instruct", "") for label in models.values()])
    axes[0].set_ylim(len(models) - 0.5, -0.5)
    legend(figure, tables)
    return figure


def texts(tables: Tables) -> Figure:
    """Mean r of each model on each corpus, and how far text and rounding move stories15M's heads."""
    figure = new(3.0)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    models = tables.models()
    for y, (model, label) in enumerate(models.items()):
        for i, corpus in enumerate(tables.corpora):
            for measure, fill in (("r_q", True), ("r_k", False)):
                number = tables.mean(measure, Place("main", corpus, model, label))
                reach = float(critical_value(number.documents.freedom)) * number.documents.size
                left.errorbar(number.value, y + (i - 1) * 0.2, xerr=reach, color=COLORS[corpus], markersize=5,
                              marker=MARKERS[corpus], markerfacecolor=COLORS[corpus] if fill else "white")  # fmt: skip
    left.set_yticks(range(len(models)), [label.replace("-Instruct", "") for label in models.values()])
    left.set_ylim(len(models) - 0.5, -0.5)
    left.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
    left.set_xlabel("mean $r_q$ (filled) and $r_k$ (open), 95% intervals", fontsize=8)
    groups = {}
    rounded = tables.table("heads", "quantized").set_index(["corpus", "layer", "head"])
    for model, label in tables.models("quantized").items():
        if model != STORIES:
            ends = [rounded.loc[rounded["model"] == name, "r_q"] for name in (STORIES, model)]
            groups[label.removeprefix("stories15M ")] = (ends[1] - ends[0]).to_numpy()
    heads = tables.table("heads", "quantized").query("model == @STORIES").set_index(["layer", "head"])
    for one, two in combinations(tables.corpora_of("quantized"), 2):
        ends = [heads.loc[heads["corpus"] == corpus, "r_q"] for corpus in (one, two)]
        groups[f"{one} → {two}"] = (ends[1] - ends[0]).to_numpy()
    rng = np.random.default_rng(0)
    for y, values in enumerate(groups.values()):
        right.scatter(values, y + rng.uniform(-0.25, 0.25, len(values)), s=6, alpha=0.6, linewidths=0, color=PURPLE)
    right.set_yticks(range(len(groups)), list(groups))
    right.invert_yaxis()
    right.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
    right.set_xlabel("change of a head's $r_q$ (stories15M)", fontsize=8)
    legend(figure, tables)
    return figure
