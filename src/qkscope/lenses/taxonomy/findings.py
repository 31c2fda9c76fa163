"""What happens between categories: the steps with the most turnover, and which heads moved."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from qkscope.lenses.taxonomy.table import CATEGORIES
from qkscope.results.read import Entry
from qkscope.stats.findings import JUMP_SHARE, PhaseChange, change_over
from qkscope.stats.means import HeadPanel
from qkscope.stats.significance import SMALLEST


@dataclass(frozen=True)
class Busiest:
    """The one or two steps in which the most heads changed between categories net, in order; only real changes."""

    steps: tuple[PhaseChange, ...] = ()
    equal: int = 0  # steps, of all there are, that are as large as the largest
    more: bool = False  # whether a step that is not among `steps` is as large as one that is


def busiest_steps(panel: HeadPanel, checkpoints: Sequence[Entry], most: int = 2) -> Busiest:
    """The steps with the most turnover, and whether others are as large."""
    steps = [change_over(panel, pair, CATEGORIES) for pair in itertools.pairwise(checkpoints)]
    real = [step for step in steps if any(change.direction for change in step.changes.values())]
    if not real:
        return Busiest()
    ranked = sorted(real, key=lambda step: -step.size)
    largest = ranked[0].size
    kept = [step for step in ranked[:most] if step.size >= JUMP_SHARE * largest]
    return Busiest(
        steps=tuple(step for step in steps if any(step is each for each in kept)),
        equal=sum(largest - step.size <= SMALLEST for step in real),
        more=any(kept[-1].size - step.size <= SMALLEST for step in ranked[len(kept) :]),
    )


@dataclass(frozen=True)
class Moves:
    """How heads moved between categories in one step."""

    heads: int
    changed: int
    decided: int | None  # of those that changed, how many are beyond doubt at both ends; None without errors
    commonest: tuple[tuple[str, str, int], ...]  # (from, to, heads), most first


def moves_between(transitions: pd.DataFrame, before: str, after: str) -> Moves:
    """The moves of one step, from the transitions table."""
    rows = transitions[(transitions["from_model"] == before) & (transitions["to_model"] == after)]
    moved = rows[rows["from_category"] != rows["to_category"]].sort_values("heads", ascending=False, kind="stable")
    commonest = tuple(
        (str(a), str(b), int(n))
        for a, b, n in zip(moved["from_category"], moved["to_category"], moved["heads"], strict=True)
    )
    known = "decided" in moved.columns and moved["decided"].notna().any()
    decided = int(moved["decided"].sum()) if known else None
    return Moves(int(rows["heads"].sum()), int(moved["heads"].sum()), decided, commonest)
