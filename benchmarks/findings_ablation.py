"""The section of docs/findings.md about what the model loses when heads are edited."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
from findings_numbers import Place, Tables, table
from scipy import optimize, stats

from qkscope.text import counted
from qkscope.words.phrases import listed, plus_minus

LEVEL = 0.05  # of intervals, and of all comparisons together
CLOSE = 0.2  # by which the doses of chosen heads and controls may differ, as a share of the former
WORDS = {"kernel": "the mean score at each distance (`kernel`)", "zero": "the whole head (`zero`)"}


def ablation(tables: Tables) -> tuple[str, str, str]:
    """What the model loses without position in some heads, against other heads of the same dose."""
    rows = judged(tables.table("ablation", "main"))
    if rows.empty:
        return "**Not measured.**", "", ""
    said = []
    for edit, of in rows.groupby("edit", sort=False):
        more, less = (places(tables, of[of["way"] == way]) for way in (1, -1))
        said.append(f"Without {WORDS[str(edit)]}, they cost significantly more than controls in {len(more)} of "
                    f"{counted(len(of), 'case')}{named(tables, more)} and less in "
                    f"{len(less)}{named(tables, less)}.")  # fmt: skip
    held, beyond = rows[rows["holds"]], int((rows["way"] != 0).sum())
    top = rows.loc[rows["excess"].abs().idxmax()]
    of_edit = {edit: (int((of["way"] > 0).sum()), int((of["way"] < 0).sum()), len(of))
               for edit, of in rows.groupby("edit")}  # fmt: skip
    lead = title(of_edit)
    rest = " ".join(said) + (
        f" After correction for {len(rows)} comparisons (Holm), {len(held)} of these {beyond} hold. The largest "
        f"difference is {plus_minus(top['excess'], top['excess_se'])} nats per token "
        f"({tables.models()[top['model']]} on {top['corpus']}, `{top['edit']}`)."
    )
    first, left = rows.iloc[0], [label for name, label in tables.models().items() if name not in set(rows["model"])]
    off = rows[abs(rows["controls_dose"] / rows["chosen_dose"] - 1) > CLOSE]
    text = (
        "Loss increase in nats per token when the ten heads with the largest r_q are edited together, minus that of "
        "ten other heads with about the same dose (how much `kernel` removes): mean ± standard error over "
        f"{first['documents']} documents of {first['tokens']} tokens and {first['draws']} draws of controls "
        "([ablation.md](ablation.md)). Bold: the 95% interval excludes 0; † holds after correction. In parentheses: "
        "loss increase of the chosen heads, and the dose of controls relative to theirs.\n\n"
        + table(["model", "edit", *tables.corpora], cells(tables, rows))
        + (f"\n\nDoses differ by more than {100 * CLOSE:.0f}% in {tables.grouped(places(tables, off))}: too few "
           "other heads are like the chosen ones." if len(off) else "")
        + (f"\n\nNot edited: {listed(left)} (the rotation of a layer could not be measured)." if left else "")
    )  # fmt: skip
    return lead, rest, text


def title(counts: dict[str, tuple[int, int, int]]) -> str:
    """What most comparisons say; where there is no majority, how many say what."""
    more, less, number = (sum(each[i] for each in counts.values()) for i in range(3))
    if max(more, less) > number / 2:
        return f"**Heads with the largest r_q cost {'more' if more > less else 'less'} than others of the same dose.**"
    return (
        f"**Editing the heads with the largest r_q costs significantly more than editing others of the same dose in "
        f"{more} of {number} comparisons, and less in {less}.**"
    )


def judged(rows: pd.DataFrame) -> pd.DataFrame:
    """Comparisons with whether they exceed their interval (1, −1), and hold among all of them."""
    if rows.empty:
        return rows
    way = np.where(rows["low"] > 0, 1, np.where(rows["high"] < 0, -1, 0))
    return rows.assign(way=way, holds=holm([p_value(row) for _, row in rows.iterrows()]))


def p_value(row: pd.Series) -> float:
    """Two-sided p of a difference, with the degrees of freedom that its interval was made with."""
    error = float(row["excess_se"])
    if not error > 0:
        return math.nan
    reach = (float(row["high"]) - float(row["excess"])) / error  # in errors: the quantile of Student's t

    def off(freedom: float) -> float:
        return float(stats.t.ppf(1 - LEVEL / 2, freedom)) - reach

    lowest, highest = 1.0, 1e6
    freedom = lowest if off(lowest) < 0 else highest if off(highest) > 0 else optimize.brentq(off, lowest, highest)
    return float(2 * stats.t.sf(abs(row["excess"]) / error, freedom))


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


def places(tables: Tables, rows: pd.DataFrame) -> list[Place]:
    """The cases of some comparisons, each once."""
    return list(dict.fromkeys(Place("main", str(row["corpus"]), str(row["model"]), tables.models()[str(row["model"])])
                              for _, row in rows.iterrows()))  # fmt: skip


def named(tables: Tables, found: list[Place]) -> str:
    """Cases in parentheses."""
    return f" ({tables.grouped(found)})" if found else ""


def cells(tables: Tables, rows: pd.DataFrame) -> list[list[str]]:
    """A row for each model and edit, with the difference on each corpus."""
    by = {(row["model"], row["edit"], row["corpus"]): row for _, row in rows.iterrows()}
    edits = dict.fromkeys(rows["edit"])
    return [[label, f"`{edit}`", *(cell(by.get((model, edit, corpus))) for corpus in tables.corpora)]
            for model, label in tables.models().items() for edit in edits if model in set(rows["model"])]  # fmt: skip


def cell(row: pd.Series | None) -> str:
    """A difference with its error, bold beyond its interval, and what lies behind it."""
    if row is None:
        return "–"
    text = plus_minus(row["excess"], row["excess_se"])
    dose = row["controls_dose"] / row["chosen_dose"]
    shown = f"**{text}**" if row["way"] else text
    return f"{shown}{'†' if row['holds'] else ''} ({row['chosen']:.2f}; {dose:.2f})".replace("-", "−")


def limit(tables: Tables) -> str:
    """Edits are measured over fewer tokens than heads are chosen by."""
    rows = tables.table("ablation", "main")
    if rows.empty:
        return ""
    longest = max(tables.window(place) for place in tables.places())
    return (
        f"**Ablations** read {int(rows['tokens'].max()):,} tokens of a document, while heads are chosen by r over up "
        f"to {longest:,}: they say nothing about longer distances. Controls have the chosen heads' dose, but are of "
        "other layers. Errors are over documents and draws, not over KV heads."
    )
