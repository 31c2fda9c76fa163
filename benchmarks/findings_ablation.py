"""The section of docs/findings.md about what the model loses when heads are edited."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from findings_numbers import Number, Part, Place, Tables, table
from scipy import optimize, stats

from qkscope.stats.significance import is_significant
from qkscope.words.phrases import listed

LEVEL = 0.05  # of intervals, and of all comparisons together
MOST_SHARED = 0.5  # of random heads that are chosen ones: with more, a group is compared with itself
LARGEST = "position-dominated"
WHOLE = "zero"  # the edit that removes all of a head, so that heads are compared at one dose
Row = dict[str, Any]


def ablation(tables: Tables) -> Part:
    """What the model loses without position in some heads, against other heads."""
    rows = tables.table("ablation")
    if rows.empty:
        return Part(text=["No ablation was run."])
    measured = judged(rows[rows["outcome"] == "all"])
    every = measured[measured["shared"] < 1.0]
    decidable = every[every["decidable"]]
    documents, draws, tokens = (sorted(set(every[name])) for name in ("documents", "draws", "tokens"))
    alike = measured[(measured["shared"] > MOST_SHARED) & (measured["shared"] < 1.0)]
    undecided = "whether these heads matter more than random ones, which are mostly the same heads: "
    return Part(
        short=_ablation_short(tables, decidable),
        open=[undecided + _named(tables, alike.to_dict("records"))] if len(alike) else [],
        text=[
            "Loss increase in nats per token when heads are edited together, minus that of as many random other heads "
            f"per layer ({_numbers(draws)} draws, {_numbers(documents)} documents of {_numbers(tokens)} tokens). "
            "`kernel` removes the mean score at each distance, `zero` the whole head ([ablation.md](ablation.md)). "
            "Random heads match the number of heads, not how much `kernel` removes: **only `zero` is dose-matched.** "
            "Bold: the 95% interval excludes 0. *n. d.*: not decided, because more than half of the random "
            "heads are chosen ones. In parentheses: number of heads.",
            table(["model", "heads", "edit", *tables.corpora], _rows(tables, every)),
            _told(tables, decidable),
            _lowered(tables, measured),
            _left_out(tables, measured),
            _not_edited(tables, measured),
        ],
        compared=len(decidable),
    )


def judged(measured: pd.DataFrame) -> pd.DataFrame:
    """Comparisons with whether they can be decided, beyond their interval (1, −1), and hold among all of them."""
    decidable = (measured["shared"] <= MOST_SHARED) & measured["low"].notna()
    way = np.where(measured["low"] > 0, 1, np.where(measured["high"] < 0, -1, 0)) * decidable
    p = [p_value(row) if known else math.nan for row, known in zip(measured.to_dict("records"), decidable, strict=True)]
    return measured.assign(decidable=decidable, way=way, holds=holm(p))


def p_value(row: Row) -> float:
    """Two-sided p of a difference, with the degrees of freedom that its interval was made with."""
    value, error, reach = (float(row[name]) for name in ("excess", "excess_se", "high"))
    if not error > 0:
        return math.nan
    wide = (reach - value) / error  # in errors: the quantile of Student's t

    def off(freedom: float) -> float:
        return float(stats.t.ppf(1 - LEVEL / 2, freedom)) - wide

    lowest, highest = 1.0, 1e6
    freedom = lowest if off(lowest) < 0 else highest if off(highest) > 0 else optimize.brentq(off, lowest, highest)
    return float(2 * stats.t.sf(abs(value) / error, freedom))


def holm(p: Iterable[float], level: float = LEVEL) -> list[bool]:
    """Which comparisons hold if not one of all of them may be wrong (Holm); an unknown p never does."""
    values = list(p)
    order = sorted((value, place) for place, value in enumerate(values) if value == value)
    held = [False] * len(values)
    for rank, (value, place) in enumerate(order):
        if value > level / (len(order) - rank):
            break
        held[place] = True
    return held


def _rows(tables: Tables, every: pd.DataFrame) -> list[list[str]]:
    """A row for each model, kind of group and edit, with the difference on each corpus."""
    keyed: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in every.to_dict("records"):
        keyed.setdefault((str(row["model"]), _kind(row), str(row["edit"])), {})[str(row["corpus"])] = row
    order = list(tables.models)
    return [
        [tables.models[model], kind, f"`{edit}`", *(_cell(of.get(corpus)) for corpus in tables.corpora)]
        for (model, kind, edit), of in sorted(keyed.items(), key=lambda item: order.index(item[0][0]))
    ]


def _cell(row: Row | None) -> str:
    """The difference with its error; bold beyond its interval."""
    if row is None:
        return "–"
    text = f"{_excess(row)}" + ("" if row["decidable"] else " *n. d.*")
    return f"{f'**{text}**' if row['way'] else text} ({row['heads']})"


def _excess(row: Row) -> Number:
    return Number(float(row["excess"]), float(row["excess_se"]))


def _numbers(values: list[float]) -> str:
    return " or ".join(str(int(value)) for value in values)


def _ablation_short(tables: Tables, rows: pd.DataFrame) -> list[str]:
    """How many chosen groups matter more than random ones, how many of these hold, and what repeats."""
    if rows.empty:
        return []
    counts = {}
    for edit, of in rows.groupby("edit", sort=False):
        counts[str(edit)] = (int((of["way"] > 0).sum()), int((of["way"] < 0).sum()), len(of))
    first = WHOLE if WHOLE in counts else next(iter(counts))
    more, less, groups = counts.pop(first)
    others = [f"{more} and {less} of {groups} under `{edit}`" for edit, (more, less, groups) in counts.items()]
    also = f" ({', '.join(others)}, not dose-matched)" if others else ""
    largest = rows.loc[rows["excess"].abs().idxmax()].to_dict()
    holding = rows[rows["holds"]]
    ways = [(words, holding[holding["way"] == way]) for way, words in ((1, "cost more"), (-1, "cost less"))]
    named = [f"{words}: {_named(tables, of.to_dict('records'))}" for words, of in ways if len(of)]
    which = f" ({'; '.join(named)})" if named else ""
    beyond = int((rows["way"] != 0).sum())
    return [
        f"**Under `{first}`, chosen heads cost more than random heads in {more} of {groups} groups and less in "
        f"{less}**{also}, by 95% intervals; the largest difference is {_excess(largest)} nats per token. After "
        f"correction for {len(rows)} comparisons (Holm), {len(holding)} of these {beyond} hold{which}."
        f"{_repeats(tables, rows)}"
    ]


def _named(tables: Tables, rows: Iterable[Row]) -> str:
    """Groups with their edits, one after the other by model, with the corpora of each."""
    found: dict[tuple[str, str], list[Place]] = {}
    for row in rows:
        place = Place(str(row["corpus"]), str(row["model"]), tables.models[str(row["model"])])
        found.setdefault((_kind(row), str(row["edit"])), []).append(place)
    edits: dict[tuple[str, str], list[str]] = {}
    for (kind, edit), of in found.items():
        edits.setdefault((kind, tables.grouped(of)), []).append(f"`{edit}`")
    return "; ".join(f"{kind} under {listed(under)} in {where}" for (kind, where), under in edits.items())


def _kind(row: Row) -> str:
    """A group's name without how many heads it was chosen among."""
    return str(row["group"]).split(" of ")[0]


def _repeats(tables: Tables, rows: pd.DataFrame) -> str:
    """What comes out the same way on all corpora: model, kind of group and edit."""
    if len(tables.corpora) < 2:
        return ""
    kinds = [_kind(row) for row in rows.to_dict("records")]
    said = []
    for (model, kind, edit), of in rows.assign(kind=kinds).groupby(["model", "kind", "edit"], sort=False):
        if set(of["corpus"]) == set(tables.corpora) and abs(of["way"].sum()) == len(of):
            cost = "more" if of["way"].iloc[0] > 0 else "less"
            said.append(f"{kind} of {tables.models[str(model)]} cost {cost} under `{edit}`")
    return f" On every corpus alike: {listed(said)}." if said else " No group differs significantly on all corpora."


def _told(tables: Tables, rows: pd.DataFrame) -> str:
    """Which groups are beyond their intervals."""
    said = []
    for word, way in (("more", 1), ("less", -1)):
        chosen = rows[rows["way"] == way].to_dict("records")
        said += [f"Cost {word} than random heads: {_named(tables, chosen)}."] if chosen else []
    return " ".join(said)


def _lowered(tables: Tables, rows: pd.DataFrame) -> str:
    """Where the model is better without."""
    lower = rows[rows["chosen"] < 0]
    if lower.empty:
        return "No edit of chosen heads lowers the loss."
    said = f"Edits of chosen heads lower the loss in {len(lower)} of {len(rows)} comparisons"
    if "chosen_se" not in rows:
        return f"{said}."
    freedom = lower["documents"] - 1 if "documents" in lower else tables.groups - 1
    sure = lower[is_significant(lower["chosen"], lower["chosen_se"], freedom) == 1].to_dict("records")
    return f"{said}, significantly in {len(sure)}{f' ({_named(tables, sure)})' if sure else ''}."


def _left_out(tables: Tables, rows: pd.DataFrame) -> str:
    """Groups that have no others to be compared with."""
    alone = rows[rows["shared"] == 1.0].to_dict("records")
    return f"Left out, because they are all heads of their layers: {_named(tables, alone)}." if alone else ""


def _not_edited(tables: Tables, rows: pd.DataFrame) -> str:
    """Whose heads were not edited, or not by category, and why position-dominated ones were not."""
    by_r, edited = rows["group"].str.startswith("top "), rows["group"] == LARGEST
    said = []
    for words, of in (("No ablation was run of", rows), ("No category was edited of", rows[~by_r])):
        there = set(zip(of["corpus"], of["model"], strict=True))
        missing = [place for place in tables.places() if (place.corpus, place.model) not in there]
        said += [f"{words} {tables.grouped(missing)}."] if missing else []
    there = set(zip(rows.loc[edited, "corpus"], rows.loc[edited, "model"], strict=True))
    others = [place for place in tables.places() if (place.corpus, place.model) not in there]
    many = [place for place in others if tables.number("categories", LARGEST, place).value > 0.5]
    heads = {place: tables.number("entries", "heads", place).value for place in others}
    few = [place for place in others if tables.number("categories", LARGEST, place).value * heads[place] < 1.5]
    for places, why in ((many, "they are more than half of all heads"), (few, "there are fewer than two")):
        if places:
            said.append(f"Position-dominated heads of {tables.grouped(places)} were not edited: {why}.")
    return " ".join(said)


SECTIONS = {"ablation": ablation}
