"""What the model loses when heads are edited: the tables that `qkscope ablate` writes, and how to read them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from qkscope.lenses.base import HeadTable, Measure, StudyBuild, StudyTable
from qkscope.lenses.views import WindowView
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.stats.significance import is_significant

FILE, GROUPS_FILE, COURSE_FILE = "ablation_heads", "ablation_groups.csv", "ablation_course.csv"
BEGINS = "ablation_begins"
# By name: what each edit takes away; `qkscope.ablate.edits` computes it.
EDITS = {
    "kernel": "the mean score at each distance that RoPE makes of the mean query and key",
    "kernel_measured": "the measured mean score of each pair of positions",
    "key_mean": "the mean key, as RoPE rotates it",
    "query_mean": "the mean query, as RoPE rotates it",
    "flatten": "the drift with position along axis a",
    "flatten_pc0": "the drift with position along component 0",
    "shuffle": "the order of distances (each has the mean score of another)",
    "zero": "the head's output",
    "nothing": "nothing (what rounding does)",
}
TITLES = {
    "kernel": "loss increase without the average distance preference",
    "zero": "loss increase without the head",
    "kernel_measured": "loss increase without the measured mean score of each pair of positions",
    "key_mean": "loss increase without the mean key",
    "query_mean": "loss increase without the mean query",
    "flatten": "loss increase without drift along the drift axis",
    "flatten_pc0": "loss increase without drift along PC0",
    "shuffle": "loss increase with shuffled distances",
    "nothing": "loss increase without any edit (rounding)",
}
SPREAD = "kernel_spread"
NATS = "nats per token"
COLUMNS = (
    *(
        Measure(
            f"loss_{edit}",
            f"Increase of the mean loss without {what}.",
            NATS,
            title=TITLES.get(edit, ""),
        )
        for edit, what in EDITS.items()
    ),
    Measure(
        SPREAD, "Standard deviation over distances of the scaled mean score that RoPE makes of mean query and key.", "",
        (0.0, np.inf), error=None, title="spread of the positional kernel",
    ),
)  # fmt: skip
TABLE = HeadTable(FILE, COLUMNS, None, "own")

GROUPS_KEY = ("model", "edit", "group", "outcome")
GROUPS = StudyTable(
    GROUPS_FILE,
    (
        Measure("heads", "Heads that were edited together.", error=None),
        Measure("documents", "Documents over which means are taken.", error=None),
        Measure(
            "draws", "Groups of other heads, drawn at random with as many in each layer or the same dose.", error=None
        ),
        Measure("chosen", "How much the outcome rises when the chosen heads are edited.", NATS, error=None),
        Measure("controls", "The same for other heads, mean over draws.", NATS, error=None),
        Measure("excess", "chosen minus controls, with an error over documents and draws.", NATS),
        Measure("low", "Where the 95 % interval of excess begins; empty for few documents or draws.", NATS, error=None),
        Measure("high", "Where it ends.", NATS, error=None),
        Measure("exceeds", "Draws whose outcome rises less than that of the chosen heads.", error=None),
        Measure("chosen_dose", "Sum of kernel_spread over the chosen heads: what the edit kernel removes.", error=None),
        Measure("controls_dose", "The same for other heads, mean over draws.", error=None),
    ),
    (*GROUPS_KEY, "windows"),
    (*GROUPS_KEY, "windows"),
)
COURSE_KEY = ("model", "edit")
COURSE = StudyTable(
    COURSE_FILE,
    (
        Measure("heads", "Heads that were edited, each by itself.", error=None),
        Measure("documents", "Documents over which means are taken.", error=None),
        Measure("mean", "Mean over these heads of how much the loss rises.", NATS),
        Measure("costly", "Heads whose edit costs significantly.", error=None),
        Measure("gaining", "Heads whose edit gains significantly.", error=None),
    ),
    (*COURSE_KEY, "windows"),
    (*COURSE_KEY, "windows"),
)
WRITTEN = StudyBuild((GROUPS, COURSE), None)


def measured_edits(at: WindowView) -> list[str]:
    """The edits of single heads that were measured, in the order of EDITS."""
    return [edit for edit in EDITS if f"loss_{edit}" in at.heads and at.heads[f"loss_{edit}"].notna().any()]


def shown_edit(at: WindowView) -> str:
    """The edit that figure and summary are about: the first of EDITS that was measured."""
    return measured_edits(at)[0]


def last_measured(at: WindowView) -> str:
    """The last entry with ablated heads."""
    edited = at.heads[[f"loss_{edit}" for edit in measured_edits(at)]].notna().any(axis=1)
    there = set(at.heads["model"][edited])
    return [name for name in at.names if name in there][-1]


def begins_at(at: WindowView) -> pd.DataFrame | None:
    """At each entry and edit: how many heads begin to matter there, and how many have begun so far.

    A head begins to matter at the first entry from which on its edit costs significantly, at every entry that was
    ablated. Heads that were not edited at all of them are left out. None for fewer than two entries.
    """
    if not at.study.one_run:
        return None
    rows = []
    for edit in measured_edits(at):
        loss = f"loss_{edit}"
        known = at.heads[at.heads[loss].notna() & at.heads[f"{loss}_se"].notna()]
        names = [name for name in at.names if name in set(known["model"])]
        if len(names) < 2:
            continue
        freedom = known["model"].map({name: _documents(at, name, edit) - 1.0 for name in names})
        costs = (known[loss] > 0) & (is_significant(known[loss], known[f"{loss}_se"], freedom) == 1)
        wide = known.assign(costs=costs).pivot_table("costs", ["layer", "head"], "model", aggfunc="first")
        values = wide.reindex(columns=names).dropna().to_numpy(dtype=bool)  # (heads, entries)
        from_then_on = np.logical_and.accumulate(values[:, ::-1], axis=1)[:, ::-1].sum(axis=0)
        for name, begin, so_far in zip(names, np.diff(from_then_on, prepend=0), from_then_on, strict=True):
            count = {"heads": len(values), "begin": int(begin), "so_far": int(so_far)}
            rows.append({"model": name, "edit": edit, **count})
    return pd.DataFrame(rows) if rows else None


def _documents(at: WindowView, model: str, edit: str) -> int:
    """On how many documents single heads were measured; where that is not recorded, the fewest that give errors."""
    course = at.table(COURSE_FILE) if at.has(COURSE_FILE) else pd.DataFrame(columns=["model", "edit", "documents"])
    here = course[(course["model"] == model) & (course["edit"] == edit)]
    return FEWEST_GROUPS if here.empty else int(here["documents"].iloc[0])
