"""What happens between categories: the steps with the most turnover, and which heads moved."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from qkscope.lenses.taxonomy.table import CATEGORIES
from qkscope.results.read import Entry
from qkscope.stats.findings import JUMP_SHARE, PhaseChange, change_over
from qkscope.stats.noise import HeadPanel


def busiest_steps(panel: HeadPanel, checkpoints: Sequence[Entry], most: int = 2) -> list[PhaseChange]:
    """The steps in which the most heads changed between categories net, in order; only real changes."""
    steps = [change_over(panel, pair, CATEGORIES) for pair in itertools.pairwise(checkpoints)]
    real = [step for step in steps if any(change.direction for change in step.changes.values())]
    largest = max((step.size for step in real), default=0.0)
    kept = sorted((step for step in real if step.size >= JUMP_SHARE * largest), key=lambda step: -step.size)[:most]
    return [step for step in steps if any(step is each for each in kept)]


@dataclass(frozen=True)
class Moves:
    """How heads moved between categories in one step."""

    heads: int
    changed: int
    commonest: tuple[tuple[str, str, int], ...]  # (from, to, heads), most first


def moves_between(transitions: pd.DataFrame, before: str, after: str) -> Moves:
    """The moves of one step, from the transitions table."""
    rows = transitions[(transitions["from_model"] == before) & (transitions["to_model"] == after)]
    moved = rows[rows["from_category"] != rows["to_category"]].sort_values("heads", ascending=False, kind="stable")
    commonest = tuple(
        (str(a), str(b), int(n))
        for a, b, n in zip(moved["from_category"], moved["to_category"], moved["heads"], strict=True)
    )
    return Moves(int(rows["heads"].sum()), int(moved["heads"].sum()), commonest)
