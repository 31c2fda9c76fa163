"""What the model loses when heads' scores are edited: a row per head, and groups of heads against random ones.

`qkscope ablate` writes both. What goes with the loss beforehand is a summary over heads.
"""

from __future__ import annotations

import numpy as np

from qkscope.lenses.base import HeadTable, Measure, StudyBuild, StudyTable
from qkscope.lenses.views import WindowView
from qkscope.stats.jackknife import FEWEST_GROUPS

FILE, GROUPS_FILE, COURSE_FILE = "ablation_heads", "ablation_groups.csv", "ablation_course.csv"
# By name: what each edit takes away, as `qkscope.ablate.edits` defines it.
EDITS = {
    "kernel": "the mean score at each distance that RoPE makes of the mean query and key",
    "kernel_measured": "the measured mean score of each pair of positions",
    "key_mean": "the mean key, as RoPE turns it",
    "query_mean": "the mean query, as RoPE turns it",
    "flatten": "the drift with position along axis a",
    "flatten_pc0": "the drift with position along component 0",
    "shuffle": "the order of distances (each has the mean score of another)",
    "zero": "the head's output",
    "nothing": "nothing (what rounding does)",
}
SPREAD = "kernel_spread"
NATS = "nats per token"
COLUMNS = (
    *(
        Measure(f"loss_{edit}", f"Rise of the mean loss when an edit takes away {what}.", NATS)
        for edit, what in EDITS.items()
    ),
    Measure(
        SPREAD, "Standard deviation over distances of the scaled mean score that RoPE makes of mean query and key.", "",
        (0.0, np.inf), error=None,
    ),
)  # fmt: skip
TABLE = HeadTable(FILE, COLUMNS, None, "own")

GROUPS_KEY = ("model", "edit", "group", "outcome")
GROUPS = StudyTable(
    GROUPS_FILE,
    (
        Measure("heads", "Heads that were edited together.", error=None),
        Measure("documents", "Documents over which means are taken.", error=None),
        Measure("draws", "Groups of other heads, drawn at random with as many in each layer.", error=None),
        Measure("chosen", "How much the outcome rises when the chosen heads are edited.", NATS, error=None),
        Measure("controls", "The same for other heads, mean over draws.", NATS, error=None),
        Measure("excess", "chosen minus controls, with an error over documents and draws.", NATS),
        Measure("low", "Where the 95 % interval of excess begins; empty for few documents or draws.", NATS, error=None),
        Measure("high", "Where it ends.", NATS, error=None),
        Measure("exceeds", "Draws whose outcome rises less than that of the chosen heads.", error=None),
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
MOST_GROUPED = 6  # models or seeds whose groups fit into one figure


def measured_edits(at: WindowView) -> list[str]:
    """The edits of single heads that were measured, in the order of EDITS."""
    table = at.table(FILE)
    return [edit for edit in EDITS if table[f"loss_{edit}"].notna().any()]


def documents_of(at: WindowView, model: str, edit: str) -> int | None:
    """On how many documents single heads were measured, where that is recorded."""
    if not at.has(COURSE_FILE):
        return None
    course = at.table(COURSE_FILE)
    here = course[(course["model"] == model) & (course["edit"] == edit)]
    return None if here.empty else int(here["documents"].iloc[0])


def freedom_of_losses(at: WindowView, model: str, edit: str) -> float:
    """Degrees of freedom of errors over documents; those of the fewest that give errors where that is not recorded."""
    return float((documents_of(at, model, edit) or FEWEST_GROUPS) - 1)


def shown_edit(at: WindowView) -> str:
    """The edit that figure and card are about: the first of EDITS that was measured."""
    return measured_edits(at)[0]


def measured_entries(at: WindowView, file: str = FILE) -> list[str]:
    """The entries with ablated heads, in order."""
    there = set(at.table(file)["model"])
    return [name for name in at.names if name in there]


def grouped_entries(at: WindowView) -> list[str]:
    """Whose groups are shown: the last checkpoint of a run that has any, or every model or seed."""
    measured = list(measured_entries(at, GROUPS_FILE))
    return measured[-1:] if at.study.one_run else measured[:MOST_GROUPED]


def last_measured(at: WindowView, file: str = FILE) -> str:
    """The last of them."""
    return measured_entries(at, file)[-1]
