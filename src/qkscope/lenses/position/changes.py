"""`changes.csv`: which heads changed from each checkpoint to the next, with paired errors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pandas as pd

from qkscope.lenses.paired import paired_changes
from qkscope.lenses.views import WindowView


def changes_at(at: WindowView) -> pd.DataFrame | None:
    """Changes of every head between neighbouring checkpoints of one run that saw the same documents; else None."""
    if at.replicates is None or not (at.study.one_run and at.study.same_documents) or len(at.names) < 2:
        return None
    return head_changes(at.heads, at.replicates, at.names)


def head_changes(heads: pd.DataFrame, replicates: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame | None:
    """The table for checkpoints in order; None where there are too few groups for errors."""
    return paired_changes(heads, replicates, list(itertools.pairwise(models)))
