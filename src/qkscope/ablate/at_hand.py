"""The same ablation in a notebook: a model in memory, windows of token ids, tables back; nothing on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from qkscope.ablate.choice import units_of
from qkscope.ablate.measure import AblatedText, EditSource, Measurer
from qkscope.ablate.outcomes import against_controls
from qkscope.ablate.passes import Ablation
from qkscope.ablate.tables import ablation_table, about
from qkscope.ablate.work import AblationSettings
from qkscope.documents.tokens import group_of
from qkscope.moments.moments import Moments

MODEL = "model"  # the name in the tables' first column


@dataclass(frozen=True)
class AblationAtHand:
    """What an ablation of a model at hand found."""

    table: pd.DataFrame  # as `ablation.csv`: means over documents with errors
    controls: pd.DataFrame  # chosen heads against their controls; empty unless they were edited together
    documents: pd.DataFrame  # a row per document, edit, unit and outcome


def ablate_windows(
    model: Any,
    windows: Sequence[Any],
    moments: Moments,
    heads: pd.DataFrame,
    settings: AblationSettings,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> AblationAtHand:
    """Measure every window; `heads` has a row per head with its numbers, from which the settings choose."""
    units, groups = units_of(settings.heads, heads), moments.layout.groups
    source = EditSource(moments, moments.layout.context, settings.seed)
    rows, done, whole = [], 0, len(windows) * len(settings.edits)
    with Ablation(model) as ablation:
        measurer = Measurer(ablation, source, settings, tokenizer)
        for document, window in enumerate(windows):
            text = AblatedText(document, group_of(document, groups), np.asarray(window, dtype=np.int64))
            for edit in settings.edits:
                same = {"model": MODEL, "document": document, "edit": edit}
                named = {unit.name: about(unit) for unit in units}
                for name, outcome, before, delta in measurer.measure(text, edit, units):
                    rows.append({**same, **named[name], "outcome": outcome, "before": before, "delta": delta})
                done += 1
                if progress is not None:
                    progress(done, whole)
    table = pd.DataFrame(rows)
    return AblationAtHand(ablation_table(table), against_controls(table), table)
